"""What a checkpoint is to this package: a config, and lazily read tensors under their HF names in HF orientation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import from_hf
from ..olmo_jax.errors import BadInput
from .fit import fit_tensors
from .safetensors_io import DTYPES, kind_of, no_duplicates

if TYPE_CHECKING:
    from .hub_files import Checkout


@dataclass(frozen=True)
class Tensor:
    """One weight of a source. shape and rows are in HF orientation: (out, in), (V, D) or (width,)."""

    hf: str  # HF name
    name: str  # as stored
    file: Path  # where its bytes lie; the item folder for an Orbax tree
    code: str  # dtype as safetensors spells it: F32, BF16, F16, or one that is not supported
    shape: tuple[int, ...]
    fetch: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)  # rows [start, stop)
    files: tuple[Path, ...] = ()  # all of them, where there are more than one

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
    config_file: Path
    said: str  # which folder was taken, and why
    config: Olmo3Config
    tensors: dict[str, Tensor]  # by HF name, in the order of mapping.weights
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # only where it was opened with strict=False
    padded_vocab_size: int | None = None  # rows stored, where the source pads its vocabulary
    logical_vocab_size: int | None = None  # the tokenizer's entries, where the source states them beside the rows
    revision: str | None = None  # of a hub snapshot: its commit, and the names that point to it
    carry_from: Path | None = None  # the folder whose tokenizer files go along; path itself if None
    moments: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict
    )  # optimizer state by its name, then HF name
    training: Mapping[str, object] = field(default_factory=dict)  # where the trainer stood
    hub: Checkout | None = None  # the commit of the hub that it came from
    shards_on_hub: bool = False  # only headers are here: `hub.holding` brings one shard at a time

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def name(self) -> str:
        """What records call it: the folder, or the commit on the hub, wherever its files are kept here."""
        return str(self.hub.commit) if self.hub else str(self.path)

    def name_of(self, file: Path) -> str:
        """What records call one of its files."""
        return f"{self.hub.commit}/{file.relative_to(self.path).as_posix()}" if self.hub else str(file)

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


def fit_source(
    kind: str,
    path: Path,
    said: str,
    config_file: Path,
    config: Olmo3Config | None,
    tensors: dict[str, Tensor],
    faults: list[str],
    strict: bool,
    headers_only: bool = False,
    **more,
) -> Source:
    """The last step of opening: match tensors with the config and raise everything that was found wrong on the way."""
    if config is None:
        raise BadInput(f"{path} cannot be used", faults)
    # Where a file could not be listed, its tensors being missing is no news; where one is cut, no tensor can be read.
    fit = fit_tensors(config, tensors, config_file, damaged=bool(faults), headers_only=headers_only)
    faults += fit.faults
    if faults and strict:
        raise BadInput(f"{path} cannot be used", faults)
    notes = (*config.notes, *fit.notes, *more.pop("notes", ()))
    return Source(kind, path, config_file, said, config, fit.tensors, notes, tuple(faults), **more)


def read_config(file: Path, allow_unknown_keys: Sequence[str], faults: list[str]) -> Olmo3Config | None:
    """The config of an HF folder or of an Orbax tree; None after appending its faults."""
    if file.exists() and not file.is_file():
        faults.append(f"{file} is {kind_of(file)}, a JSON file is wanted")
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
        return from_hf(raw, str(file), allow_unknown_keys)
    except FileNotFoundError:
        faults.append(f"{file} does not exist: without it nothing says what the model computes")
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            faults.extend(f"{file}: {fault}" for fault in error.faults or [error.headline])
        else:
            faults.append(f"{file} is not JSON that can be read: {error}")
    return None
