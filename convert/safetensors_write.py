"""Writing safetensors shards in any order: headers first, then each tensor's rows at their place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .safetensors_io import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5_000_000_000  # as transformers cuts them by default
ALIGNMENT = 8  # the header is padded so that data starts on a multiple, as the format's own library does


@dataclass(frozen=True)
class Place:
    """Where one tensor goes: file name and byte offset of its first value."""

    file: str
    offset: int
    code: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One file to be written: its header, and its whole length in bytes."""

    file: str
    header: bytes
    length: int


def lay_out(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], shard_bytes: int
) -> tuple[list[Shard], dict[str, Place]]:
    """Files and places for tensors (name, dtype code, shape), in their order; a file ends where the next would pass shard_bytes."""
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    filled = 0
    for name, code, shape in tensors:
        size = math.prod(shape) * DTYPES[code].itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, code, shape, size))
        filled += size
    shards, places = [], {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        header: dict = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
        offset = 0
        for name, code, shape, size in group:
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        start = 8 + len(text)
        for name, code, shape, _ in group:
            places[name] = Place(file, start + header[name]["data_offsets"][0], code, shape)
        shards.append(Shard(file, len(text).to_bytes(8, "little") + text, start + offset))
    return shards, places


def create_files(folder: Path, shards: Sequence[Shard], places: dict[str, Place]) -> None:
    """Make every file at its full length with its header, and the index where there is more than one."""
    for shard in shards:
        with (folder / shard.file).open("r+b" if (folder / shard.file).exists() else "wb") as stream:
            stream.write(shard.header)
            stream.truncate(shard.length)
    if len(shards) > 1:
        total = sum(shard.length - len(shard.header) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": {name: place.file for name, place in places.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_rows(folder: Path, place: Place, start: int, rows: np.ndarray) -> None:
    """Write rows of a tensor, beginning with row start."""
    view = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
    offset = place.offset + start * math.prod(place.shape[1:]) * rows.itemsize
    handle = os.open(folder / place.file, os.O_WRONLY)
    try:
        while len(view):
            count = os.pwrite(handle, view[: 1 << 30], offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(handle)


def sync_files(folder: Path, shards: Sequence[Shard]) -> None:
    """Bring the files to the disk: the rename that follows must not be there before them."""
    for shard in shards:
        handle = os.open(folder / shard.file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
