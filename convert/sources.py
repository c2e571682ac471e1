"""A checkpoint of any form as lazily read tensors under their HF names, in HF orientation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import from_hf
from ..olmo_jax.errors import BadInput
from . import orbax_io, safetensors_io
from .fit import fit_tensors
from .mapping import TRANSPOSED, weights
from .safetensors_io import DTYPE_CODES, DTYPES

CONFIG = "config.json"
ORBAX_CONFIG = "olmo_config.json"


@dataclass(frozen=True)
class Tensor:
    """One weight of a source. shape and rows are in HF orientation: (out, in), (V, D) or (width,)."""

    hf: str  # HF name
    name: str  # as stored
    file: Path  # where its bytes lie; the item folder for an Orbax tree
    code: str  # dtype as safetensors spells it: F32, BF16, F16, or one that is not supported
    shape: tuple[int, ...]
    fetch: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)  # rows [start, stop)

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The whole tensor."""
        return self.fetch(0, self.shape[0])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis."""
        return self.fetch(start, stop)


@dataclass(frozen=True)
class Source:
    """A checkpoint that was opened: its config, and one tensor for every weight that the config asks for."""

    kind: str  # 'hf', 'core' or 'orbax'
    path: Path  # the folder that was taken
    said: str  # which folder was taken, and why
    config: Olmo3Config
    tensors: dict[str, Tensor]  # by HF name, in the order of mapping.weights
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # only where it was opened with strict=False
    padded_vocab_size: int | None = None  # rows stored, where they are more than the config's
    revision: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype_name(self) -> str:
        """The dtype of all tensors, or how many there are of each."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.code] = counts.get(tensor.code, 0) + 1
        if len(counts) == 1:
            code = next(iter(counts))
            return DTYPES[code].name if code in DTYPES else code
        return ", ".join(f"{code} x{n}" for code, n in sorted(counts.items()))


def open_source(path: str | Path, allow_unknown_keys: Sequence[str] = (), *, strict: bool = True) -> Source:
    """Open a checkpoint: an HF folder, OLMo-core's distributed folder, or an Orbax tree (step, parent or item).

    Reads headers and metadata only. Every fault of the config, of the files and of how they fit each other is raised in
    one BadInput; with strict=False faults of the tensors are kept in `Source.faults` instead.
    """
    given = Path(path).expanduser()
    if not str(path).strip() or not given.exists():
        raise BadInput(f"{str(path)!r} does not exist" if not given.is_symlink() else f"{given} is a dangling symlink")
    if not given.is_dir():
        raise BadInput(f"{given} is a file, a checkpoint folder is wanted: {given.parent}?")
    given = given.absolute()
    if not any(given.iterdir()):
        raise BadInput(f"{given} is empty, a checkpoint folder is wanted")
    if _is_hf(given):
        return _open_hf(given, allow_unknown_keys, strict)
    if orbax_io.is_tree(given):
        return _open_orbax(given, allow_unknown_keys, strict)
    if (given / CONFIG).is_file():
        return _open_hf(given, allow_unknown_keys, strict)  # says which weights are missing
    raise BadInput(f"{given} is no checkpoint of a known form: neither {CONFIG} with safetensors, nor an Orbax tree")


def _is_hf(folder: Path) -> bool:
    return (folder / safetensors_io.INDEX).exists() or any(folder.glob("*.safetensors"))


def _open_hf(folder: Path, allow_unknown_keys: Sequence[str], strict: bool) -> Source:
    faults: list[str] = []
    config = read_config(folder / CONFIG, allow_unknown_keys, faults)
    entries = safetensors_io.list_folder(folder, faults)
    tensors = {name: _hf_tensor(entry) for name, entry in entries.items()}
    return _finish("hf", folder, f"{folder} is an HF folder", folder / CONFIG, config, tensors, faults, strict)


def _hf_tensor(entry: safetensors_io.Entry) -> Tensor:
    def fetch(start: int, stop: int) -> np.ndarray:
        return safetensors_io.read_rows(entry, DTYPES[entry.code], start, stop)

    return Tensor(entry.name, entry.name, entry.file, entry.code, entry.shape, fetch)


def _open_orbax(folder: Path, allow_unknown_keys: Sequence[str], strict: bool) -> Source:
    resolved = orbax_io.resolve_tree(folder)
    faults: list[str] = []
    config = read_config(resolved.step / ORBAX_CONFIG, allow_unknown_keys, faults)
    reader = orbax_io.TreeReader(resolved.item)
    names = {w.jax: w for w in weights(config)} if config else {}
    tensors = {}
    for path, leaf in reader.leaves.items():
        weight = names.get(path)
        tensor = _orbax_tensor(
            reader, leaf, weight.hf if weight else path, bool(weight and weight.layout == TRANSPOSED)
        )
        tensors[tensor.hf] = tensor
    return _finish("orbax", resolved.step, resolved.said, resolved.step / ORBAX_CONFIG, config, tensors, faults, strict)


def _orbax_tensor(reader: orbax_io.TreeReader, leaf: orbax_io.LeafMetadata, hf: str, transposed: bool) -> Tensor:
    def fetch(start: int, stop: int) -> np.ndarray:
        if transposed:
            return np.ascontiguousarray(reader.read(leaf.path, (slice(None), slice(start, stop))).T)
        return reader.read(leaf.path, (slice(start, stop),))

    code = DTYPE_CODES.get(leaf.dtype, leaf.dtype.name)
    return Tensor(hf, leaf.path, reader.item, code, leaf.shape[::-1] if transposed else leaf.shape, fetch)


def _finish(kind, path, said, config_file, config, tensors, faults, strict, **more) -> Source:
    if config is None:
        raise BadInput(f"{path} cannot be used", faults)
    # Where a file could not be listed, its tensors being missing is no news; where one is cut, no tensor can be read.
    fit = fit_tensors(config, tensors, config_file, damaged=bool(faults))
    faults += fit.faults
    if faults and strict:
        raise BadInput(f"{path} cannot be used", faults)
    notes = (*config.notes, *fit.notes)
    return Source(kind, path, said, config, fit.tensors, notes, tuple(faults), **more)


def read_config(file: Path, allow_unknown_keys: Sequence[str], faults: list[str]) -> Olmo3Config | None:
    """The config of an HF folder or of an Orbax tree; None after appending its faults."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return from_hf(raw, str(file), allow_unknown_keys)
    except FileNotFoundError:
        faults.append(f"{file} does not exist: without it nothing says what the model computes")
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            faults.extend(f"{file}: {fault}" for fault in error.faults or [error.headline])
        else:
            faults.append(f"{file} is not JSON: {error}")
    return None
