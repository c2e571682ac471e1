"""Numbers of held-out losses: two sides token by token, their difference with its standard error, and what limits it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import gate
from .batches import Sequence
from .gate import Criterion
from .metrics import BLOCK_TOKENS, MIN_BLOCKS, RESAMPLES

LEG = "heldout"
PUBLISHED_LOSS = 0.01  # nat: how near a published run's training loss stayed to the reference's curve
PUBLISHED_ACCURACY = 0.005  # how near its accuracies on tasks stayed
ONE_SIDED = 1.645  # standard errors of a one-sided 95% interval
RMS = gate.NoiseLimit(
    multiple=30,
    floor=1e-7,
    cap=1e-5,
    reason="right implementations are 0.8 to 1.6 times the reference's own noise, 1e-7 nat at step 0 to 2e-6 on random models "
    "with wide logits (bench/heldout_noise.py); epsilon 1.1e-6 for 1e-6, the smallest fault tried, is 3.5e-5 on the trained fixture",
)


@dataclass(frozen=True)
class Tokens:
    """Of every token [N] that is predicted, all sequences one after another."""

    loss: np.ndarray  # nats, float64
    top: np.ndarray  # id of the largest logit
    right: np.ndarray  # true where that is the token itself
    nonfinite: int  # NaN or infinite logits, of all positions


def predicted(kept: list[np.ndarray], sequences: list[Sequence]) -> Tokens:
    """Of what losses.py kept of every sequence [T]. The logits after the last token predict nothing that is known."""
    following = np.concatenate([s.tokens[1:] for s in sequences])
    joined = np.concatenate([one[:-1] for one in kept])
    nonfinite = sum(int(one["nonfinite"].sum()) for one in kept)
    return Tokens(joined["loss"], joined["top"], joined["top"] == following, nonfinite)


def blocks(sequences: list[Sequence]) -> np.ndarray:
    """The block [N] of every predicted token: its sequence, or where there are few sequences 32 tokens of one.

    Tokens of one text are alike, so a block counts as one observation for a standard error.
    """
    lengths = [len(s.tokens) - 1 for s in sequences]
    width = max(lengths, default=0) if sum(n > 0 for n in lengths) >= MIN_BLOCKS else BLOCK_TOKENS
    found, count = [], 0
    for length in lengths:
        found.append(count + np.arange(length) // max(width, 1))
        count += -(-length // max(width, 1))
    return np.concatenate(found)


def mean_and_error(values: np.ndarray, block: np.ndarray) -> tuple[float, float]:
    """The mean over tokens and its standard error with the tokens of a block together: sqrt(B / (B - 1) sum_b s_b^2) / N, s_b the
    sum of a block's deviations from the mean (the cluster-robust estimate). NaN where there is one block."""
    mean = float(values.mean())
    sums = np.bincount(block, values - mean)
    count = len(sums)
    error = math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values) if count > 1 else math.nan
    return mean, error


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def row(reference: Tokens, candidate: Tokens, sequences: list[Sequence]) -> dict:
    """One step's numbers. Losses in nats per token; bits per byte where every token's text is known."""
    block = blocks(sequences)
    difference, error = mean_and_error(candidate.loss - reference.loss, block)
    sizes = [s.text_bytes for s in sequences]
    size = None if None in sizes or not sum(sizes) else sum(sizes)
    found = {
        "tokens": len(block),
        "blocks": int(block[-1]) + 1,
        "difference": difference,
        "standard_error": error,
        "rms_difference": rms(candidate.loss - reference.loss),
        "largest_difference": float(np.max(np.abs(candidate.loss - reference.loss))),
        "same_top": float(np.mean(reference.top == candidate.top)),
        "within_published_loss": bool(abs(difference) <= PUBLISHED_LOSS),
        "within_published_accuracy": bool(
            abs(float(candidate.right.mean()) - float(reference.right.mean())) <= PUBLISHED_ACCURACY
        ),
    }
    for name, side in (("reference", reference), ("candidate", candidate)):
        loss = float(side.loss.mean())
        found[f"loss_{name}"] = loss
        found[f"perplexity_{name}"] = float(np.exp(loss))
        found[f"accuracy_{name}"] = float(side.right.mean())
        found[f"bits_per_byte_{name}"] = None if size is None else float(side.loss.sum()) / math.log(2) / size
    return found


def float32_criteria(step: str, found: dict, noise: dict) -> tuple[list[Criterion], list[str], dict]:
    """What noise allows in float32. noise: metrics.summarise of the reference against itself, benignly changed.

    Returns the noise of a token's loss too, nats.
    """
    measured = noise["observed_logprob_delta_rms"]
    base = max(RMS.floor, min(measured, RMS.cap))
    of = f"measured noise {measured:.2g}" if base == measured else f"{base:.2g} (measured noise {measured:.2g})"
    share = 1 + RMS.multiple / math.sqrt(found["tokens"])
    criteria = [
        Criterion(
            f"step {step}: |difference of the mean loss|", LEG, abs(found["difference"]), share * base, "nat",
            f"{share:.3g} times the {of} of a token: noise averages out over {found['tokens']:,} tokens, up to its common part",
        ),
        Criterion(
            f"step {step}: rms difference of a token's loss", LEG, found["rms_difference"], RMS.multiple * base, "nat",
            f"{RMS.multiple:g} times the {of}; {RMS.reason}",
        ),
    ]  # fmt: skip
    own = {"rms": measured, "mean": noise["observed_logprob_delta_mean"]}
    if not measured <= RMS.cap:
        text = f"step {step}: the reference against itself differs by {measured:.2g} nat a token, more than {RMS.cap:g}"
        return criteria, [text], own
    return criteria, [], own


def bfloat16_criteria(
    step: str, wide: Tokens, own: Tokens, candidate: Tokens, sequences: list[Sequence]
) -> tuple[list[Criterion], list[str], dict]:
    """What noise allows in bfloat16: the reference's own, both against wide, the reference in float32 on the same weights.

    Returns the noise too: its rms and mean, nats, and the ratios.
    """
    block = blocks(sequences)
    count = int(block[-1]) + 1
    mine, theirs = own.loss - wide.loss, candidate.loss - wide.loss
    with np.errstate(invalid="ignore", divide="ignore"):
        squares = np.stack([np.bincount(block, mine**2), np.bincount(block, theirs**2)])
        drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
        sums = [s[drawn].sum(axis=1) for s in squares]
        ratios = np.where((sums[0] == 0) & (sums[1] == 0), 0.0, sums[1] / sums[0])
        upper = float(np.quantile(ratios, 0.95, method="higher"))
        mean, error = mean_and_error(mine, block)
        bias = float(np.abs(theirs.mean() - mean))
        in_errors = 0.0 if bias == 0 else float(np.divide(bias, error))
    enough = count >= MIN_BLOCKS
    criteria = [
        Criterion(
            f"step {step}: mean square of the differences over the reference's own, upper end", LEG, upper,
            gate.DEFAULT.bfloat16_ratio, "times", "as the gate's: two right bfloat16 implementations are about 1; one-sided "
            f"95% interval from {count} blocks", on=enough,
        ),
        Criterion(
            f"step {step}: |difference of the mean loss|", LEG, in_errors, gate.DEFAULT.bfloat16_bias, "standard errors",
            f"of the reference's own in bfloat16, {error:.2g} nat: noise averages out over tokens, faults do not", on=enough,
        ),
    ]  # fmt: skip
    few = f"step {step}: {count} blocks of tokens; {MIN_BLOCKS} are needed to judge bfloat16: give more text"
    noise = {"rms": rms(mine), "mean": mean, "standard_error": error, "rms_candidate": rms(theirs), "bias": bias}
    return criteria, [] if enough else [few], noise


def training_criteria(step: str, found: dict, limit: float) -> tuple[list[Criterion], list[str]]:
    """Of checkpoints that two training runs made: their mean losses may differ by limit, nat, and tokens must suffice to see it."""
    reach = ONE_SIDED * found["standard_error"]
    size = abs(found["difference"])
    criterion = Criterion(
        f"step {step}: |difference of the mean loss|, lower end", LEG, max(size - reach, 0.0) if reach == reach else size,
        limit, "nat", f"set by hand; {size:.4g} less {ONE_SIDED} standard errors of {found['standard_error']:.2g}",
        set_by_hand=True,
    )  # fmt: skip
    if size + reach <= limit or not criterion.passed:
        return [criterion], []
    return [criterion], [
        f"step {step}: the mean losses differ by {size:.4g} nat, and so few tokens leave {reach:.2g} open (limit {limit:g})"
    ]
