"""A row that is padded and batched must give what it gives alone: the candidate against itself, in float32."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path

import numpy as np

from .batches import Sequence

TOKENS = 100  # of the row that is looked at, at most
PADDED = 161  # tokens of both rows of the batch; odd, so that no block hides the edge
FIRST_DOCUMENT = 80  # tokens of the first of two documents in the other row
ALONE, BATCHED = "row-alone.npy", "row-batched.npy"


def row_of(sequences: Rows[Sequence]) -> Sequence | None:
    """The sequence whose start is looked at: the first of one document under the model's own window, if there is one."""
    return next((s for s in sequences if not s.documents and s.window is None), None)


def batch_of(sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segment ids [2, T] int32: another row of two documents, and below it this one, padded.

    It stands second, so that a model which takes the first row's mask or positions for all gives another answer.
    """
    tokens = sequence.tokens[:TOKENS].astype(np.int32)
    missing = PADDED - len(tokens)
    other = np.arange(PADDED)
    in_second = other >= FIRST_DOCUMENT
    return (
        np.stack([np.resize(tokens[::-1], PADDED), np.pad(tokens, (0, missing))]),
        np.stack([other - FIRST_DOCUMENT * in_second, sequence.first_position + other]).astype(np.int32),
        np.stack([1 + in_second, 1 + (other >= len(tokens))]).astype(np.int32),
    )


def write_rows(logits_of: Callable, sequence: Sequence, folder: Path | None) -> None:
    """Both runs of the row, [T, V] float32 each. logits_of(tokens, positions, segment_ids), [B, T] -> NumPy [B, T, V].

    folder None computes without writing: where processes share the work all must compute, and one writes.
    """
    tokens = sequence.tokens[None, :TOKENS].astype(np.int32)
    length = tokens.shape[1]
    alone = logits_of(tokens, sequence.positions()[None, :length], None)[0]
    batched = logits_of(*batch_of(sequence))[1, :length]
    if folder is not None:
        np.save(folder / ALONE, alone)
        np.save(folder / BATCHED, batched)
