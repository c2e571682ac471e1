"""How a statistic is spread over tokens, compactly: counts in bins of a quarter decade, enough to draw it from a report."""

from __future__ import annotations

import numpy as np

from .metrics import TokenStats

BINS_PER_DECADE = 4
SMALLEST, LARGEST = -80, 79  # bins counted: 1e-20 up to 1e20; values beyond count in the outermost


def distributions(stats: TokenStats) -> dict:
    """Of one leg's tokens: KL (nats), and the largest shift-free |delta logit| as a share of the leg's spread."""
    spread = float(np.sqrt(np.mean(stats.spread**2)))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(stats.max_abs_shift_free == 0, 0.0, stats.max_abs_shift_free / spread)
    return {"kl": histogram(stats.kl), "delta_over_spread": histogram(share)}


def histogram(values: np.ndarray) -> dict:
    """Counts of values [T] by magnitude: counts[i] of 10^((first + i) / bins_per_decade) up to the next edge.

    Zeros (and anything below) and non-finite values are counted apart, so that all counts add up to T.
    """
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    positive = values[finite & (values > 0)]
    bins = np.clip(np.floor(np.log10(positive) * BINS_PER_DECADE).astype(int), SMALLEST, LARGEST)
    first = int(bins.min()) if bins.size else 0
    return {
        "bins_per_decade": BINS_PER_DECADE,
        "first": first,
        "counts": np.bincount(bins - first).tolist() if bins.size else [],
        "zero": int((finite & (values <= 0)).sum()),
        "nonfinite": int((~finite).sum()),
    }
