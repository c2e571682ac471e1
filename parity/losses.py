"""Next-token losses in place of logits: three numbers a token, taken up slice by slice of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .streaming import logits_file

LOGITS, LOSSES = "logits", "losses"  # what a run keeps of every sequence
# loss: nats, of the token that follows, float64; NaN after the last token. top: id of the largest logit.
TOKEN = np.dtype([("loss", np.float64), ("top", np.int32), ("nonfinite", np.int32)])
VALUES_AT_ONCE = 1 << 22  # logits held in float64 at a time: 34 MB


class Losses:
    """Stands where a file of logits [T, V] would: `losses[rows, columns] = logits`, every entry once, in any order.

    When all are there folder/<index>.npy is written, [T] of TOKEN. Logits at position t predict token t + 1.
    """

    def __init__(self, folder: Path, index: int, tokens: np.ndarray, vocab_size: int):
        self.file = folder / f"{index}.npy"
        self.following = np.append(np.asarray(tokens, np.int64)[1:], -1)
        self.left = len(tokens) * vocab_size
        self.peak = np.full(len(tokens), -np.inf)  # the largest logit so far, and the sum of exp(logit - peak)
        self.total = np.zeros(len(tokens))
        self.target = np.full(len(tokens), np.nan)
        self.top = np.zeros(len(tokens), np.int32)
        self.nonfinite = np.zeros(len(tokens), np.int32)

    def __len__(self) -> int:
        return len(self.following)

    def __setitem__(self, where: tuple[slice, slice], logits: np.ndarray) -> None:
        first, _, _ = where[0].indices(len(self))
        column, _, _ = where[1].indices(np.iinfo(np.int64).max)
        step = max(VALUES_AT_ONCE // logits.shape[1], 1)
        for start in range(0, len(logits), step):
            part = np.asarray(logits[start : start + step], np.float64)
            self._add(slice(first + start, first + start + len(part)), column, part)
        self.left -= logits.size
        if not self.left:
            self._write()

    @np.errstate(invalid="ignore", over="ignore")  # NaN is carried into the loss and counted
    def _add(self, rows: slice, column: int, x: np.ndarray) -> None:
        largest, peak = x.max(axis=1), self.peak[rows]
        higher = np.maximum(peak, largest)  # NaN where there is one
        shift = np.where(np.isneginf(higher), 0.0, higher)
        self.total[rows] = self.total[rows] * np.exp(peak - shift) + np.exp(x - shift[:, None]).sum(axis=1)
        top = column + x.argmax(axis=1)
        first = (largest > peak) | (
            (largest == peak) & (top < self.top[rows])
        )  # of equal logits the lowest id, as argmax
        self.top[rows] = np.where(first, top, self.top[rows])
        self.peak[rows] = higher
        self.nonfinite[rows] += (np.isnan(x) | np.isposinf(x)).sum(axis=1)
        following = self.following[rows]
        here = (following >= column) & (following < column + x.shape[1])
        self.target[rows][here] = x[here, following[here] - column]

    def _write(self) -> None:
        found = np.empty(len(self), TOKEN)
        with np.errstate(invalid="ignore", divide="ignore"):
            found["loss"] = np.log(self.total) + (self.peak - self.target)
        found["top"], found["nonfinite"] = self.top, self.nonfinite
        np.save(self.file, found)


def place(keep: str, folder: Path, index: int, tokens: np.ndarray, vocab_size: int) -> np.ndarray | Losses:
    """What takes the logits of a sequence, slice by slice: folder/<index>.npy of them, or of its losses alone."""
    if keep == LOGITS:
        return logits_file(folder, index, len(tokens), vocab_size)
    return Losses(folder, index, tokens, vocab_size)


def write(keep: str, folder: Path, index: int, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The same for logits [T, V] that are there as a whole."""
    if keep == LOGITS:
        np.save(folder / f"{index}.npy", logits)
    else:
        Losses(folder, index, tokens, logits.shape[1])[:, :] = logits
