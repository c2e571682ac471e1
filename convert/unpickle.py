"""Reading the pickles in torch's files without torch and without running anything: an allow-list of inert stand-ins."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping

from ..olmo_jax.errors import BadInput


class Inert:
    """Stands for an object of a pickle: keeps what it was made of, does nothing."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str) and not k.startswith("__")})
        else:
            self.state = state


def _shape(values=()) -> tuple:
    return tuple(values)


def _tensor(storage, offset, size, stride, *rest) -> dict:
    """What torch._utils._rebuild_tensor_v2 would build a tensor from."""
    return {"storage": storage, "offset": offset, "size": tuple(size), "stride": tuple(stride)}


DTYPES = "float32 bfloat16 float16 float64 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2".split()
TORCH_DTYPES = {("torch", name): name for name in DTYPES}
DCP = "torch.distributed.checkpoint.metadata"
METADATA_NAMES = {
    **TORCH_DTYPES,
    **{
        (DCP, name): Inert
        for name in (
            "Metadata TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING ChunkStorageMetadata "
            "BytesStorageMetadata MetadataIndex StorageMeta"
        ).split()
    },
    ("torch.serialization", "_get_layout"): Inert,
    ("torch", "Size"): _shape,
    ("collections", "OrderedDict"): dict,
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
}
STORAGES = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
TENSOR_NAMES = {
    **TORCH_DTYPES,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch", "Size"): _shape,
    ("collections", "OrderedDict"): dict,
}
TRAINER_NAMES = {  # trainer state carries random generators as NumPy arrays: kept as inert objects, never built
    **TENSOR_NAMES,
    **{(module, "_reconstruct"): Inert for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "ndarray"): Inert,
    ("numpy", "dtype"): Inert,
    ("_codecs", "encode"): Inert,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream, names: Mapping[tuple[str, str], object], where: str):
        super().__init__(stream)
        self.names, self.where = names, where

    def find_class(self, module: str, name: str):
        try:
            return self.names[module, name]
        except KeyError:
            raise BadInput(
                f"{self.where} asks for {module}.{name}, which no checkpoint of OLMo-core needs: refused, nothing was run"
            ) from None

    def persistent_load(self, key):
        """A storage of torch's zip format: ('storage', type, name, device, values)."""
        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
            raise BadInput(f"{self.where} holds the persistent id {key!r}, a storage is wanted")
        return {"dtype": key[1], "key": key[2], "values": key[4]}


def unpickle(content: bytes, names: Mapping[tuple[str, str], object], where: str):
    """The object in content, with only `names` allowed. Raises BadInput naming anything else that it asks for."""
    try:
        return _Unpickler(io.BytesIO(content), names, where).load()
    except BadInput:
        raise
    except Exception as error:  # pickle raises nearly anything on damaged input
        raise BadInput(f"{where} is damaged: {type(error).__name__}: {error}") from None
