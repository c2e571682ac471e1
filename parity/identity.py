"""What was judged, and with what: hashes of weights, config file and own code; versions of everything that takes part."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from ..convert import manifest
from ..convert.checkpoint import Source
from ..convert.orbax_io import TreeReader, open_item, resolve_tree
from ..olmo_jax.errors import BadInput

PACKAGES = ("olmo-parity", "torch", "transformers", "jax", "jaxlib", "flax", "orbax-checkpoint", "tensorstore", "numpy")
SLICE_BYTES = 64 << 20  # read at once by each worker
MOST_WORKERS = 8


def tensor_hashes(source: Source) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """(dtype, shape, sha256 of its bytes) of every stored tensor by its stored name. All data is read, none of it trusted.

    An Orbax leaf is hashed chunk by chunk in order, each in C order and without padding: what the target_sha256 of a
    manifest.json is over, so that the two can be compared; in MaxText's layout its weights are, under olmo_jax's paths.
    Other forms are hashed row by row.
    """
    jobs = list(_leaves(source) if source.kind == "orbax" else _tensors(source))
    jobs.sort(key=lambda job: -int(np.prod(job[2], dtype=np.int64)))

    def one(job) -> tuple[str, tuple]:
        name, dtype, shape, slices = job
        digest = hashlib.sha256()
        for values in slices:
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return name, (dtype, shape, digest.hexdigest())

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        return dict(pool.map(one, jobs))


def hf_hashes(source: Source, round_to: str | None = None, exact: bool = False) -> dict[str, str]:
    """sha256 of every weight's bytes in HF orientation, by HF name, whatever form the checkpoint has.

    round_to casts first (to nearest even), as a conversion to that dtype does. exact leaves rows that the cast would change
    as they are, so that their hash is that of no weight in that dtype.
    """
    dtype = None if round_to is None else np.dtype(ml_dtypes.bfloat16 if round_to == "bfloat16" else round_to)

    def one(tensor) -> tuple[str, str]:
        digest = hashlib.sha256()
        for rows in _rows(tensor):
            cast = rows if dtype is None else rows.astype(dtype)
            rows = cast if not exact or np.array_equal(cast.astype(rows.dtype), rows) else rows
            digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
        return tensor.hf, digest.hexdigest()

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        return dict(pool.map(one, source.tensors.values()))


def combined_hash(tensors: dict[str, tuple[str, tuple[int, ...], str]]) -> str:
    """One sha256 over names, dtypes, shapes and hashes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, of_bytes = tensors[name]
        digest.update(f"{name}\0{dtype}\0{'x'.join(map(str, shape))}\0{of_bytes}\n".encode())
    return digest.hexdigest()


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None


def code_hash(package: Path | None = None) -> str:
    """sha256 over this package's .py files, by their place in it: a version number alone misses an edited checkout."""
    root = package or Path(__file__).parents[1]
    digest = hashlib.sha256()
    files = [root / "cli.py", *(f for part in ("olmo_jax", "convert", "parity") for f in (root / part).rglob("*.py"))]
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()}\0{file_hash(file)}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, the platform and every package that takes part, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    return found | dict.fromkeys(PACKAGES, "not installed") | manifest.versions(PACKAGES)


def _leaves(source: Source) -> Iterator[tuple]:
    reader = open_item(resolve_tree(source.path).item)
    for path, leaf in reader.leaves.items():
        yield path, leaf.dtype.name, leaf.shape, _chunks(reader, leaf)


def _chunks(reader: TreeReader, leaf) -> Iterator[np.ndarray]:
    starts = (range(0, n, step) for n, step in zip(leaf.shape, leaf.chunk_shape, strict=True))
    for corner in itertools.product(*starts):
        ends = (min(a + n, size) for a, n, size in zip(corner, leaf.chunk_shape, leaf.shape, strict=True))
        yield reader.read(leaf.path, tuple(slice(a, end) for a, end in zip(corner, ends, strict=True)))


def _tensors(source: Source) -> Iterator[tuple]:
    for tensor in source.tensors.values():
        yield tensor.name, tensor.dtype.name, tensor.shape, _rows(tensor)


def _rows(tensor) -> Iterator[np.ndarray]:
    step = max(1, SLICE_BYTES * tensor.shape[0] // max(tensor.nbytes, 1))
    for start in range(0, tensor.shape[0], step):
        yield tensor.rows(start, min(start + step, tensor.shape[0]))
