"""OLMo-core's distributed checkpoints: tensors cut into chunks over ranks and files, read in slices without torch."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np

from ..olmo_jax.errors import BadInput
from .places import BucketPath, is_remote, shorter_than
from .safetensors_io import naming, pread_into
from .unpickle import METADATA_NAMES, TENSOR_NAMES, TRAINER_NAMES, unpickle

FOLDER = "model_and_optim"
METADATA = ".metadata"
NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor and where its bytes lie: `length` bytes at `start` of `file` are a torch.save archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class CoreTensor:
    """One tensor of a distributed checkpoint. dtype is torch's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def file(self) -> Path:
        """The file of the first chunk, to name the tensor by."""
        return self.chunks[0].file

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds a part of it."""
        return tuple(sorted({chunk.file for chunk in self.chunks}))

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of the first axis, put together from every chunk that has a part of them."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not self.shape:
            return _read_chunk(self, self.chunks[0], dtype, 0, 1).reshape(())
        stop = self.shape[0] if stop is None else stop
        whole_rows = [c for c in self.chunks if c.offsets[0] <= start and c.offsets[0] + c.sizes[0] >= stop]
        if len(whole_rows) == 1 and whole_rows[0].sizes[1:] == self.shape[1:]:
            chunk = whole_rows[0]
            return _read_chunk(self, chunk, dtype, start - chunk.offsets[0], stop - chunk.offsets[0])
        out = np.empty((stop - start, *self.shape[1:]), dtype)
        for chunk in self.chunks:
            first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first < last and 0 not in chunk.sizes:
                rest = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
                part = _read_chunk(self, chunk, dtype, first - chunk.offsets[0], last - chunk.offsets[0])
                out[(slice(first - start, last - start), *rest)] = part
        return out


def read_metadata(folder: Path, faults: list[str]) -> dict[str, CoreTensor]:
    """Every tensor of a model_and_optim folder by its name there (model.*, optim.*). Objects that are no tensors are left out."""
    file = folder / METADATA
    metadata = unpickle(file.read_bytes(), METADATA_NAMES, str(file))
    try:
        short = _short_objects(folder, metadata.storage_data.values()) if is_remote(folder) else {}
        placed = {}
        for index, info in metadata.storage_data.items():
            placed.setdefault(index.fqn, []).append((index, info))
        tensors = {}
        for name, kind in metadata.state_dict_metadata.items():
            if not hasattr(kind, "chunks"):
                continue
            tensor = _tensor(folder, name, kind, placed.get(name, []), short, faults)
            if tensor:
                tensors[name] = tensor
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise BadInput(
            f"{file} is not the metadata of a distributed checkpoint: {type(error).__name__}: {error}"
        ) from None
    return tensors


def trainer_position(step: Path) -> dict[str, object]:
    """Where the trainer stood, from train/rank0.pt: step, tokens seen, the data loader's place. Empty where it is absent."""
    file = step / "train" / "rank0.pt"
    if not file.is_file():
        return {}
    state = unpickle(_pickle_of(file, 0, file.stat().st_size), TRAINER_NAMES, str(file))
    if not isinstance(state, dict):
        raise BadInput(f"{file} holds a {type(state).__name__}, the trainer's state is wanted")
    plain = (int, float, str, bool, type(None))
    position = {k: v for k, v in state.items() if isinstance(v, plain) and k not in ("world_size",)}
    loader = state.get("data_loader")
    if isinstance(loader, dict):
        position["data_loader"] = {k: v for k, v in loader.items() if isinstance(v, plain)}
    return position


def _tensor(
    folder: Path, name: str, kind, placed: list, short: dict[BucketPath, int], faults: list[str]
) -> CoreTensor | None:
    shape = tuple(int(n) for n in kind.size)
    properties = kind.properties
    dtype = properties.state[0] if isinstance(getattr(properties, "state", None), tuple) else properties.dtype
    wanted = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
    chunks = []
    for index, info in placed:
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
        if offsets not in wanted:
            faults.append(f"{name}: a stored chunk at {list(offsets)} is not among the chunks that {METADATA} lists")
            return None
        path = PurePosixPath(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            faults.append(f"{name} lies in {path}, which leaves {folder}: refused before opening it")
            return None
        file = folder / path
        if not file.is_file():
            faults.append(f"{file} does not exist, {name} lies in it")
            return None
        size = short.get(file, math.inf) if is_remote(file) else file.stat().st_size
        if info.offset < 0 or info.length < 0 or info.offset + info.length > size:
            faults.append(
                f"{file} is cut short: {name} takes bytes {info.offset} to {info.offset + info.length}, the file has {size}"
            )
            return None
        chunks.append(Chunk(offsets, wanted.pop(offsets), file, info.offset, info.length))
    stored = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not chunks or any(math.prod(sizes) for sizes in wanted.values()):
        faults.append(
            f"{name}: the chunk at {list(next(iter(wanted), ()))} is stored nowhere. Is a rank's file missing?"
        )
        return None
    if stored != math.prod(shape) or any(not _inside(chunk, shape) for chunk in chunks) or _overlap(chunks):
        faults.append(
            f"{name}: its chunks hold {stored} values of {math.prod(shape)}, or overlap: {METADATA} is damaged"
        )
        return None
    return CoreTensor(name, str(dtype), shape, tuple(sorted(chunks, key=lambda c: c.offsets)))


def _short_objects(folder: BucketPath, placed) -> dict[BucketPath, int]:
    """Objects that are shorter than the metadata says: asked for together, since each takes a request."""
    ends: dict[BucketPath, int] = {}
    for info in placed:
        file = folder / info.relative_path
        ends[file] = max(ends.get(file, 0), info.offset + info.length)
    return shorter_than({file: end for file, end in ends.items() if file.is_file() and end >= 0})


def _inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return len(chunk.sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether any two boxes share a value. Ranks are few enough to try every pair."""
    return any(
        all(
            max(oa, ob) < min(oa + sa, ob + sb)
            for oa, sa, ob, sb in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
        )
        for i, a in enumerate(chunks)
        for b in chunks[i + 1 :]
        if a.offsets
    )


def _read_chunk(tensor: CoreTensor, chunk: Chunk, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of one chunk."""
    where = _locate(chunk.file, chunk.start, chunk.length)
    if where.dtype != tensor.dtype or where.size != chunk.sizes:
        raise BadInput(
            f"{tensor.name} in {chunk.file}: the stored chunk is {where.dtype} {where.size}, "
            f"{METADATA} says {tensor.dtype} {chunk.sizes}"
        )
    row = math.prod(chunk.sizes[1:]) * dtype.itemsize
    rows = stop - start if chunk.sizes else 1
    out = np.empty(rows * row, np.uint8)
    pread_into(chunk.file, where.start + start * row, out)
    return out.view(dtype).reshape((rows, *chunk.sizes[1:]))


@dataclass(frozen=True)
class _Values:
    """Where a torch.save archive of one tensor keeps its values: byte offset in the file, in C order."""

    start: int
    dtype: str
    size: tuple[int, ...]


@lru_cache(maxsize=4096)
def _locate(file: Path, start: int, length: int) -> _Values:
    """Find a tensor's raw bytes inside its archive; torch stores them uncompressed."""
    where = f"{file} at byte {start}"
    try:
        return _find_values(file, start, length, where)
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise BadInput(f"{where} does not describe a tensor: {type(error).__name__}: {error}") from None


def _find_values(file: Path, start: int, length: int, where: str) -> _Values:
    with naming(file), file.open("rb") as stream, _archive(stream, start, length, where) as archive:
        described = unpickle(_read_member(archive, "data.pkl", where), TENSOR_NAMES, where)
        if not isinstance(described, dict) or "storage" not in described:
            raise BadInput(f"{where} holds a {type(described).__name__}, one tensor is wanted")
        storage, size = described["storage"], described["size"]
        order = _member(archive, "byteorder")
        if order is not None and _read_member(archive, "byteorder", where).strip() != b"little":
            raise BadInput(f"{where} was written on a big-endian machine, which is not supported")
        member = _member(archive, f"data/{storage['key']}")
        if member is None:
            raise BadInput(f"{where} is damaged: it has no data/{storage['key']}")
        dtype = storage["dtype"]
        itemsize = NUMPY_DTYPES[dtype].itemsize if dtype in NUMPY_DTYPES else 0
        needed = (described["offset"] + math.prod(size)) * itemsize
        if described["offset"] < 0 or min(size, default=0) < 0:
            raise BadInput(f"{where} is damaged: offset {described['offset']} and shape {size} must not be negative")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size < needed:
            raise BadInput(f"{where} is damaged: {member.file_size} bytes of values are stored, {needed} are wanted")
        if not _is_c_order(size, described["stride"]):
            raise BadInput(f"{where}: the tensor is stored with strides {described['stride']}, C order is wanted")
        # The archive's offsets count from its own start; each member has a header of its own with two names of any length.
        stream.seek(start + member.header_offset)
        header = stream.read(30)
        if header[:4] != b"PK\x03\x04":
            raise BadInput(f"{where} is damaged: no member starts where its directory says")
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        first = start + member.header_offset + 30 + names + described["offset"] * itemsize
        if first + math.prod(size) * itemsize > start + length:
            raise BadInput(f"{where} is damaged: its values run past its end")
        return _Values(first, dtype, tuple(size))


def _pickle_of(file: Path, start: int, length: int) -> bytes:
    with file.open("rb") as stream, _archive(stream, start, length, str(file)) as archive:
        return _read_member(archive, "data.pkl", str(file))


def _archive(stream, start: int, length: int, where: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(_Section(stream, start, length))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise BadInput(f"{where} is damaged: {error}. A torch.save archive is wanted") from None


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """The member under the archive's one top folder, whatever that is called."""
    return next((m for m in archive.infolist() if m.filename.partition("/")[2] == name), None)


def _read_member(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    member = _member(archive, name)
    if member is None or member.file_size > 64 << 20:  # a description of one tensor takes under a kilobyte
        raise BadInput(f"{where} is damaged: no {name} of a sensible size in it")
    try:
        return archive.read(member)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"{where} is damaged: {error}") from None


def _is_c_order(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for length, actual in zip(reversed(size), reversed(stride), strict=True):
        if length > 1 and actual != step:
            return False
        step *= length
    return True


class _Section(io.RawIOBase):
    """A window of a file, so that zipfile sees one archive."""

    def __init__(self, stream, start: int, length: int):
        self.stream, self.start, self.length, self.at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self.at, self.length)[whence]
        if at < 0:
            raise OSError(22, "seek before the start")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        self.stream.seek(self.start + self.at)
        count = max(min(len(buffer), self.length - self.at), 0)
        content = self.stream.read(count)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)
