"""Statistics of two arrays of logits: float64 arithmetic on float32 logits, over real tokens and the true vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

BLOCK_TOKENS = 32  # tokens resampled together
MIN_BLOCKS = 30  # fewer give no interval worth the name
RESAMPLES = 4000  # the 95% quantile then moves by under 1% from seed to seed
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
    jensen_shannon: np.ndarray  # mean of both sides' KL to their mean distribution; at most ln 2
    top1_equal: np.ndarray  # 1 where both have the same argmax
    top5_shared: np.ndarray  # share of the reference's five most likely tokens among the candidate's five
    nonfinite_reference: np.ndarray  # logits that are NaN or infinite
    nonfinite_candidate: np.ndarray
    observed_delta: np.ndarray  # log q - log p of the token that follows; NaN after the last token
    observed_reference: np.ndarray  # log p of that token

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
        log_mean = np.logaddexp(log_p, log_q) - np.log(2)
        last = following < 0
        observed = np.where(last, 0, following)[:, None]
        observed_reference = np.take_along_axis(log_p, observed, 1)[:, 0]
        observed_delta = np.take_along_axis(log_q, observed, 1)[:, 0] - observed_reference
        return TokenStats(
            max_abs=np.take_along_axis(size, worst[:, None], 1)[:, 0],
            max_abs_id=worst.astype(np.int64),
            mean_abs=size.mean(axis=1),
            max_abs_shift_free=np.abs(delta - delta.mean(axis=1, keepdims=True)).max(axis=1),
            spread=np.where(masked, np.nan, x).std(axis=1) if not masked.any() else _masked_std(x, masked),
            kl=_kl(log_p, log_q, masked),
            kl_reverse=_kl(log_q, log_p, masked),
            jensen_shannon=(_kl(log_p, log_mean, masked) + _kl(log_q, log_mean, masked)) / 2,
            top1_equal=(x.argmax(axis=1) == y.argmax(axis=1)).astype(np.float64),
            top5_shared=_shared(top(x), top(y)),
            nonfinite_reference=(~np.isfinite(x) & ~masked).sum(axis=1),
            nonfinite_candidate=(~np.isfinite(y) & ~masked).sum(axis=1),
            observed_delta=np.where(last, np.nan, observed_delta),
            observed_reference=np.where(last, np.nan, observed_reference),
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


def top(logits: np.ndarray, count: int = 5) -> np.ndarray:
    """Ids of the largest logits of each row [T, V], largest first [T, count] (fewer where the vocabulary is smaller)."""
    count = min(count, logits.shape[1])
    found = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, found, 1), axis=1, kind="stable")
    return np.take_along_axis(found, order, 1)


def _shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, :, None] == b[:, None, :]).any(axis=2).mean(axis=1)


def _masked_std(x: np.ndarray, masked: np.ndarray) -> np.ndarray:
    counted = (~masked).sum(axis=1)
    filled = np.where(masked, 0.0, x)
    mean = filled.sum(axis=1) / counted
    return np.sqrt((np.where(masked, 0.0, x - mean[:, None]) ** 2).sum(axis=1) / counted)


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinity are counted and carried, not warned about
def summarise(stats: TokenStats, positions: np.ndarray) -> dict:
    """Numbers of a set of tokens at positions [T] within their sequences; see the keys' names for units.

    spread is the root mean square over tokens. Averages are over tokens, each counted once. Losses are nats per token on
    the tokens that follow, with their standard error over tokens.
    """
    kl = stats.kl
    followed = ~np.isnan(stats.observed_delta) | (stats.nonfinite_candidate > 0) | (stats.nonfinite_reference > 0)
    delta, loss = stats.observed_delta[followed], -stats.observed_reference[followed]
    return {
        "tokens": len(stats),
        "max_abs_delta_logit": _max(stats.max_abs),
        "mean_abs_delta_logit": float(stats.mean_abs.mean()),
        "max_abs_delta_logit_shift_free": _max(stats.max_abs_shift_free),
        "spread_of_logits": float(np.sqrt(np.mean(stats.spread**2))),
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        **{f"kl_p{str(q).replace('.', '_')}": float(np.quantile(kl, q / 100)) for q in (90, 95, 99, 99.9)},
        "kl_max": _max(kl),
        "kl_reverse_mean": float(stats.kl_reverse.mean()),
        "jensen_shannon_mean": float(stats.jensen_shannon.mean()),
        "top1_agreement": float(stats.top1_equal.mean()),
        "top5_agreement": float(stats.top5_shared.mean()),
        "observed_logprob_delta_mean": _mean(delta),
        "observed_logprob_delta_rms": _mean(delta**2) ** 0.5,
        "loss_reference": _mean(loss),
        "loss_candidate": _mean(loss - delta),
        "perplexity_reference": float(np.exp(_mean(loss))),
        "perplexity_candidate": float(np.exp(_mean(loss - delta))),
        "loss_standard_error": float(loss.std(ddof=1) / np.sqrt(loss.size)) if loss.size > 1 else math.nan,
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


def ratio_interval(own: TokenStats, candidate: TokenStats, seed: int = 0) -> dict:
    """How the candidate's bfloat16 noise compares with the reference's own, both against the same float32 logits.

    ratio: sum of KL over all tokens, candidate's over own (each token weighs the same). upper: upper end of its
    one-sided 95% interval by resampling blocks of 32 consecutive tokens with replacement (neighbours share their context,
    so single tokens would give too narrow an interval). bias_in_standard_errors: the difference of the mean
    log-probability differences of the observed token, over the standard error of the reference's own.
    """
    count = len(own) // BLOCK_TOKENS
    kept = count * BLOCK_TOKENS
    blocks = np.stack([own.kl[:kept], candidate.kl[:kept]]).reshape(2, count, BLOCK_TOKENS).sum(axis=2)
    drawn = np.random.default_rng(seed).integers(0, max(count, 1), (RESAMPLES, count))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = _ratio(blocks[1][drawn].sum(axis=1), blocks[0][drawn].sum(axis=1))
        followed = ~np.isnan(own.observed_delta)
        a, b = own.observed_delta[followed], candidate.observed_delta[followed]
        means = a[: a.size // BLOCK_TOKENS * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS).mean(axis=1)
        error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
        bias = abs(b.mean() - a.mean()) if a.size else np.nan
        return {
            "ratio": float(_ratio(candidate.kl.sum(), own.kl.sum())),
            # method "higher": an infinite ratio stays infinite, and is not interpolated to NaN
            "upper": float(np.quantile(ratios, 0.95, method="higher")) if count else math.nan,
            "blocks": count,
            "bias": float(bias),
            "bias_standard_error": float(error),
            "bias_in_standard_errors": float(_ratio(bias, error)),
        }


def _ratio(a, b):
    """a / b with 0 / 0 = 0: no noise on either side is no excess."""
    return np.where((a == 0) & (b == 0), 0.0, np.divide(a, b))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan


def _max(values: np.ndarray) -> float:
    """The maximum, NaN where any value is NaN (Python's max and np.nanmax would lose it)."""
    return float(np.max(values))
