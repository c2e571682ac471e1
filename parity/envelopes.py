"""How far a module's output may be from the reference's: distances, and limits that follow from noise (NumPy alone)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .gate import NoiseLimit

# One float32 rounding of every value moves an output by up to 2.4e-7 (rms_norm); sums of another order by as much again.
FREE = NoiseLimit(
    multiple=10,
    floor=3e-7,
    cap=math.inf,  # errors that were carried along say where it begins, not whether
    reason="right implementations stay within 1.9 times the noise of the reference's own modules (bench/trace_noise.py)",
)
FORCED = NoiseLimit(
    multiple=10,
    floor=3e-7,
    cap=1e-5,
    reason="right implementations stay within 1.9 times the noise of the reference's own modules (bench/trace_noise.py)",
)
# In bfloat16 two right implementations give the same bits from the same inputs but where their float32 sums fall on
# different sides of a rounding boundary; a cast in another place moves a third of the values by one step.
BFLOAT16 = 5e-4
BFLOAT16_REASON = (
    "5e-4 is one value in twenty rounded otherwise; right implementations reach 1e-4, a cast in another place 1.4e-3 "
    "(bench/trace_noise.py)"
)


@dataclass(frozen=True)
class Envelope:
    """What a module's error was, how far noise moves the same output, and where its envelope ends; all relative."""

    error: float
    noise: float
    limit: float

    @property
    def left(self) -> bool:
        return not self.error <= self.limit  # True for NaN


def float32_envelope(found: Distance, noise: Distance, rule: NoiseLimit) -> Envelope:
    """The largest error of a token against `rule`."""
    width = rule.multiple * max(rule.floor, min(noise.largest, rule.cap))
    return Envelope(found.largest, noise.largest, width)


def bfloat16_envelope(found: Distance, noise: Distance) -> Envelope:
    """The root mean square over tokens: one value rounded otherwise says nothing, every third one does."""
    return Envelope(found.rms, noise.rms, BFLOAT16)


class Distance:
    """Distance of two outputs, token by token: |b - a| / |a|, L2 over everything but tokens; slices of it may come one by one.

    A token whose a is all zeros is infinitely far off unless b is zero too. NaN on either side makes its token NaN.
    """

    def __init__(self):
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """More tokens: a and b [T, ...]."""
        self.parts.append(_squares(a, b))

    def wider(self, other: Distance) -> Distance:
        """With more columns of the same tokens."""
        found = Distance()
        pairs = zip(self.parts, other.parts, strict=True)
        found.parts = [(d + more_d, s + more_s) for (d, s), (more_d, more_s) in pairs]
        return found

    @property
    def by_token(self) -> np.ndarray:
        difference, size = (np.concatenate(x) for x in zip(*self.parts, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(np.where(difference == 0, 0.0, difference / size))

    @property
    def rms(self) -> float:
        """Root mean square over tokens."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sqrt(np.mean(self.by_token**2))) if self.parts else math.nan

    @property
    def largest(self) -> float:
        return float(self.by_token.max()) if self.parts else math.nan


def _squares(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squares [T] of b - a and of a, in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (a, b))
        return ((b - a) ** 2).sum(axis=1), (a**2).sum(axis=1)
