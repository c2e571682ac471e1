"""How far a module's output may be from the reference's: distances, and limits that follow from noise (NumPy alone)."""

from __future__ import annotations

import math

import numpy as np


class Distance:
    """Distance of two outputs, token by token: |b - a| / |a|, L2 over everything but tokens; slices of it may come one by one.

    A token whose a is all zeros is infinitely far off unless b is zero too. NaN on either side makes its token NaN.
    """

    def __init__(self):
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """More tokens: a and b [T, ...]."""
        self.parts.append(_squares(a, b))

    def widen(self, other: Distance) -> None:
        """More columns of the same tokens."""
        if not self.parts:
            self.parts = list(other.parts)
            return
        pairs = zip(self.parts, other.parts, strict=True)
        self.parts = [(d + more_d, s + more_s) for (d, s), (more_d, more_s) in pairs]

    @property
    def by_token(self) -> np.ndarray:
        difference, size = (np.concatenate(x) for x in zip(*self.parts, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(np.where(difference == 0, 0.0, difference / size))

    @property
    def largest(self) -> float:
        return float(self.by_token.max()) if self.parts else math.nan


def _squares(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squares [T] of b - a and of a, in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (a, b))
        return ((b - a) ** 2).sum(axis=1), (a**2).sum(axis=1)
