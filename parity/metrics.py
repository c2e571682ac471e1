"""Statistics of two arrays of logits: float64 arithmetic on float32 logits, over real tokens and the true vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

ROWS_AT_ONCE = 64  # tokens held in float64 at a time: 64 x 100,278 x 8 bytes = 51 MB an array


@dataclass(frozen=True)
class TokenStats:
    """One number per token, arrays [T] float64 (ids and counts int64).

    The reference's distribution is p, the candidate's q; logarithms are natural, KL in nats.
    """

    max_abs: np.ndarray  # max over the vocabulary of |delta logit|
    max_abs_id: np.ndarray  # the token id where that is
    mean_abs: np.ndarray  # mean over the vocabulary of |delta logit|
    max_abs_shift_free: np.ndarray  # the same after taking the mean delta away: the part that softmax can see
    spread: np.ndarray  # standard deviation over the vocabulary of the reference's logits
    kl: np.ndarray  # KL(reference || candidate)
    kl_reverse: np.ndarray  # KL(candidate || reference)
    top1_equal: np.ndarray  # 1 where both have the same argmax
    nonfinite_reference: np.ndarray  # logits that are NaN or infinite
    nonfinite_candidate: np.ndarray
    observed_delta: np.ndarray  # log q - log p of the token that follows; NaN after the last token

    def __len__(self) -> int:
        return len(self.kl)

    def join(*parts: TokenStats) -> TokenStats:
        """The tokens of several sequences, one after another."""
        return TokenStats(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(TokenStats)})


def token_stats(reference: np.ndarray, candidate: np.ndarray, tokens: np.ndarray) -> TokenStats:
    """Compare logits [T, V] of both sides at every position of tokens [T].

    Raises ValueError where the shapes differ or nothing is there to compare. Non-finite logits are counted and make every
    statistic of their token NaN or infinite, never small. A logit of minus infinity on both sides counts as equal.
    """
    if reference.shape != candidate.shape or reference.shape[0] != len(tokens) or reference.ndim != 2:
        raise ValueError(
            f"logits {reference.shape} and {candidate.shape} for {len(tokens)} tokens do not belong together"
        )
    if reference.size == 0:
        raise ValueError("no logits to compare")
    following = np.append(np.asarray(tokens, np.int64)[1:], -1)
    return TokenStats.join(
        *(
            _rows(reference[a : a + ROWS_AT_ONCE], candidate[a : a + ROWS_AT_ONCE], following[a : a + ROWS_AT_ONCE])
            for a in range(0, len(tokens), ROWS_AT_ONCE)
        )
    )


def _rows(reference: np.ndarray, candidate: np.ndarray, following: np.ndarray) -> TokenStats:
    x, y = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    masked = np.isneginf(x) & np.isneginf(y)  # both sides exclude the token: equal, and not part of the spread
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        delta = np.where(masked, 0.0, y - x)
        size = np.abs(delta)
        worst = size.argmax(axis=1)  # NaN counts as the largest
        log_p, log_q = _log_softmax(x), _log_softmax(y)
        last = following < 0
        observed = np.where(last, 0, following)[:, None]
        observed_delta = np.take_along_axis(log_q, observed, 1)[:, 0] - np.take_along_axis(log_p, observed, 1)[:, 0]
        return TokenStats(
            max_abs=np.take_along_axis(size, worst[:, None], 1)[:, 0],
            max_abs_id=worst.astype(np.int64),
            mean_abs=size.mean(axis=1),
            max_abs_shift_free=np.abs(delta - delta.mean(axis=1, keepdims=True)).max(axis=1),
            spread=np.where(masked, np.nan, x).std(axis=1) if not masked.any() else _masked_std(x, masked),
            kl=_kl(log_p, log_q, masked),
            kl_reverse=_kl(log_q, log_p, masked),
            top1_equal=(x.argmax(axis=1) == y.argmax(axis=1)).astype(np.float64),
            nonfinite_reference=(~np.isfinite(x) & ~masked).sum(axis=1),
            nonfinite_candidate=(~np.isfinite(y) & ~masked).sum(axis=1),
            observed_delta=np.where(last, np.nan, observed_delta),
        )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _kl(log_p: np.ndarray, log_q: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """KL(p || q) [T] as the sum of p (e^d - 1 - d) with d = log q - log p.

    Equal to the usual sum of -p d, since p and q both sum to 1, but every term is at least zero: nothing cancels, KL of
    1e-15 is a number and not rounding noise, equal logits give exactly 0, and no clamp is needed.
    """
    d = np.where(masked, 0.0, log_q - log_p)
    return (np.where(masked, 0.0, np.exp(log_p)) * (np.expm1(d) - d)).sum(axis=1)


def _masked_std(x: np.ndarray, masked: np.ndarray) -> np.ndarray:
    counted = (~masked).sum(axis=1)
    filled = np.where(masked, 0.0, x)
    mean = filled.sum(axis=1) / counted
    return np.sqrt((np.where(masked, 0.0, x - mean[:, None]) ** 2).sum(axis=1) / counted)


def summarise(stats: TokenStats, positions: np.ndarray) -> dict:
    """Numbers of a set of tokens at positions [T] within their sequences; see the keys' names for units.

    spread is the root mean square over tokens. Averages are over tokens, each counted once.
    """
    kl = stats.kl
    observed = stats.observed_delta[~np.isnan(stats.observed_delta) | (stats.nonfinite_candidate > 0)]
    spread = float(np.sqrt(np.mean(stats.spread**2)))
    return {
        "tokens": len(stats),
        "max_abs_delta_logit": float(_max(stats.max_abs)),
        "mean_abs_delta_logit": float(stats.mean_abs.mean()),
        "max_abs_delta_logit_shift_free": float(_max(stats.max_abs_shift_free)),
        "spread_of_logits": spread,
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(_max(kl)),
        "kl_reverse_mean": float(stats.kl_reverse.mean()),
        "top1_agreement": float(stats.top1_equal.mean()),
        "observed_logprob_delta_mean": float(observed.mean()) if observed.size else None,
        "nonfinite_logits_reference": int(stats.nonfinite_reference.sum()),
        "nonfinite_logits_candidate": int(stats.nonfinite_candidate.sum()),
        "by_position": by_position(stats, positions),
    }


def by_position(stats: TokenStats, positions: np.ndarray) -> list[dict]:
    """Means by position bucket: 0 apart (it sees one key, so no mask, scale or rotary fault shows there), then octaves."""
    edges = [0, 1, 16, 64, 256, 1024, 4096, 16384, 65536, np.inf]
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (positions >= low) & (positions < high)
        if inside.any():
            rows.append(
                {
                    "positions": [int(low), int(positions[inside].max())],
                    "tokens": int(inside.sum()),
                    "kl_mean": float(stats.kl[inside].mean()),
                    "max_abs_delta_logit": float(_max(stats.max_abs[inside])),
                    "top1_agreement": float(stats.top1_equal[inside].mean()),
                }
            )
    return rows


def _max(values: np.ndarray) -> float:
    """The maximum, NaN where any value is NaN (Python's max and np.nanmax would lose it)."""
    return float(np.max(values))
