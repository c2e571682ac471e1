"""Independent read-back: two checkpoints bit for bit, or a tree against its own manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..olmo_jax.errors import BadInput
from .orbax_io import TreeReader, resolve_tree

if TYPE_CHECKING:
    from .copying import Move

TILE = 64  # rows and columns compared at once: both sides of a turned comparison stay in the first-level cache


def compare_moves(step: Path, moves: Sequence[Move], workers: int, progress: Callable[[int], None]) -> list[str]:
    """Read source and tree again and compare every value's bits; one sentence for each tensor that differs.

    Turned weights are compared value by value through NumPy's own view of the transpose, not through the code that
    laid them out: a fault in that code must not hide itself.
    """
    reader = TreeReader(resolve_tree(step).item)
    found = reader.leaves
    faults = [f"{move.leaf.path} is missing in {step}" for move in moves if move.leaf.path not in found]
    unexpected = set(found) - {move.leaf.path for move in moves}
    faults += [f"{path} in {step} is unexpected" for path in sorted(unexpected)]

    def one(move: Move) -> str | None:
        try:
            return _compare(move, reader, progress)
        except BadInput as error:
            return str(error)

    queue = sorted((m for m in moves if m.leaf.path in found), key=lambda move: -move.tensor.nbytes)
    with ThreadPoolExecutor(workers) as pool:
        faults += [text for text in pool.map(one, queue) if text]
    return faults


def _compare(move: Move, reader: TreeReader, progress: Callable[[int], None]) -> str | None:
    leaf, tensor = reader.leaves[move.leaf.path], move.tensor
    if leaf.shape != move.leaf.shape or leaf.dtype != move.leaf.dtype:
        return (
            f"{leaf.path} in {reader.item} is {leaf.dtype.name} {leaf.shape}, "
            f"{move.leaf.dtype.name} {move.leaf.shape} is wanted from {tensor.name}"
        )
    count, first = 0, None
    for start, stop in move.slices():
        rows = tensor.rows(start, stop)
        size = rows.nbytes
        if rows.dtype != leaf.dtype:
            rows = rows.astype(leaf.dtype)
        kept = reader.read(leaf.path, move.index(start, stop))
        here, index = differing(rows, kept.T if move.turned else kept)
        if here and first is None:
            first = (index[0] + start, *index[1:])
        count += here
        progress(size)
    if not count:
        return None
    place = first[::-1] if move.turned else first
    return (
        f"{leaf.path} in {reader.item} differs from {tensor.name} in {tensor.file} in {count} values, "
        f"first at {list(place)} (HF index {list(first)})"
    )


def differing(a: np.ndarray, b: np.ndarray) -> tuple[int, tuple[int, ...] | None]:
    """How many values of two arrays of one shape and dtype differ in their bits, and the index of the first.

    Either may be a transposed view; the comparison goes tile by tile so that neither is walked across the cache.
    """
    bits = f"u{a.dtype.itemsize}"
    a, b = _as_bits(a, bits), _as_bits(b, bits)
    if a.ndim != 2 or (a.flags.c_contiguous and b.flags.c_contiguous):
        if np.array_equal(a, b):
            return 0, None
    elif _equal_by_tiles(a, b):
        return 0, None
    where = np.argwhere(a != b)
    return len(where), tuple(int(i) for i in where[0])


def _equal_by_tiles(a: np.ndarray, b: np.ndarray) -> bool:
    # Strips as in layout.py, but through a comparison: 16 rows of a against 16 columns of b.
    return all(np.array_equal(a[i : i + 16], b[i : i + 16]) for i in range(0, a.shape[0], 16))


def _as_bits(array: np.ndarray, bits: str) -> np.ndarray:
    return array.view(bits) if array.flags.c_contiguous else array.T.view(bits).T
