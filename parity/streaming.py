"""What both layer-streamed sides share: rows of the embedding, slices of the vocabulary, logits written slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SLICE_BYTES = 64 << 20  # of the embedding, read at a time


def rows_of(read: Callable[[int, int], np.ndarray], count: int, ids: np.ndarray, step: int) -> np.ndarray:
    """Rows ids (ascending, each once) of a matrix of count rows: [len(ids), D], of which only slices are ever in memory.

    read gives rows [start, stop). Slices begin at multiples of step rows, so that a chunk on disk is read once.
    """
    found = []
    for start, stop in slices(count, step):
        wanted = ids[(ids >= start) & (ids < stop)]
        if wanted.size:
            found.append(read(start, stop)[wanted - start])
    return np.concatenate(found)


def slices(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of a range of count in steps; the last may be shorter."""
    return ((start, min(start + step, count)) for start in range(0, count, step))


def logits_file(folder: Path, index: int, tokens: int, vocab_size: int) -> np.ndarray:
    """folder/<index>.npy, [T, V] float32, to be written in slices: its pages belong to the file, not to the process."""
    return np.lib.format.open_memmap(folder / f"{index}.npy", mode="w+", dtype=np.float32, shape=(tokens, vocab_size))
