"""Checksums of a tree: of every file it consists of, and of every array as it is read back."""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from .orbax_io import TreeReader
from .safetensors_io import naming

READ_BYTES = 8 << 20  # of a file at once: fits the cache and is far above the cost of a call


def file_checksums(folder: Path, names: list[str], workers: int) -> list[dict]:
    """Name, length and crc32 of every file under the named folders or files of `folder`, sorted by name.

    crc32 because it finds every single flipped bit at 4.2 GB/s (sha256: 1.8): arrays have a sha256 of their own, this is for
    the bytes between them.
    """
    files = sorted(f for name in names for f in _files(folder / name))
    with ThreadPoolExecutor(workers) as pool:
        sums = list(pool.map(_crc32, files))
    return [
        {"file": str(file.relative_to(folder)), "bytes": file.stat().st_size, "crc32": f"{value:08x}"}
        for file, value in zip(files, sums, strict=True)
    ]


def sha256_of_file(file: Path) -> str:
    """sha256 of a small file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def array_sha256(reader: TreeReader, path: str, chunk_shape: list[int], progress: Callable[[int], None]) -> str:
    """sha256 over an array's chunks in grid order, each in C order without padding: what manifest.json calls target_sha256.

    Raises BadInput naming the array where a chunk cannot be read.
    """
    shape, digest = reader.leaf(path).shape, hashlib.sha256()
    if len(chunk_shape) != len(shape) or any(n < 1 for n in chunk_shape):
        raise BadInput(f"{path}: the manifest's chunk shape {chunk_shape} does not belong to shape {shape}")
    for box in _boxes(shape, chunk_shape):
        part = np.ascontiguousarray(reader.read(path, box))
        digest.update(part.reshape(-1).view(np.uint8))
        progress(part.nbytes)
    return digest.hexdigest()


def _boxes(shape: tuple[int, ...], chunk_shape: list[int]) -> Iterator[tuple[slice, ...]]:
    counts = [range(math.ceil(n / c)) for n, c in zip(shape, chunk_shape, strict=True)]
    for at in itertools.product(*counts):
        yield tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, chunk_shape, shape, strict=True))


def _files(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else iter([path])


def _crc32(file: Path) -> int:
    value = 0
    with naming(file), file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value
