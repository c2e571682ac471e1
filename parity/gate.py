"""Limits and the verdict: pure functions of measured numbers, written so that NaN fails and nothing compared never passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

PASS, FAIL, BAD_INPUT, INCONCLUSIVE = 0, 1, 2, 3  # exit codes
VERDICTS = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}


@dataclass(frozen=True)
class Limit:
    """A number with its reason."""

    value: float
    reason: str


# Relative to the spread (standard deviation over the vocabulary) of the reference's logits, so that one number serves
# logits of 0.6 (step 0) and of 18 (trained).
FLOAT32_DELTA = Limit(
    2e-4,
    "13 times the largest noise measured between right float32 implementations (1.6e-5, width 4096), "
    "a 60th of the smallest effect of a wrong norm epsilon, window or rotary table on the fixtures",
)
PUBLISHED_KL = 1.5e-3  # nats per token, bfloat16: start line of a published 512-chip run
BFLOAT16_NOISE_MULTIPLE = 1.5  # two right bfloat16 implementations measured 0.92 to 1.09 times each other's noise


@dataclass(frozen=True)
class Criterion:
    """One thing that was judged: value against limit. An off criterion is reported and cannot decide."""

    name: str
    leg: str  # config, weights, float32 or bfloat16
    value: float
    limit: float
    unit: str
    reason: str  # why this limit
    on: bool = True

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN

    @property
    def margin(self) -> float | None:
        """How many times the value fits into the limit; below 1 it does not pass. None where that says nothing."""
        return self.limit / self.value if self.value > 0 and self.limit > 0 else None

    def record(self) -> dict:
        return {**asdict(self), "passed": self.passed, "margin": self.margin}


def count_criterion(name: str, leg: str, count: int, what: str, on: bool = True) -> Criterion:
    """Something that must not occur at all."""
    return Criterion(name, leg, count, 0, what, "any is a difference", on)


def float32_criteria(summary: dict) -> list[Criterion]:
    """Of the float32 leg's summary (metrics.summarise): logits finite, largest difference within the limit."""
    spread = summary["spread_of_logits"]
    delta = summary["max_abs_delta_logit"]
    relative = delta / spread if spread > 0 else (0.0 if delta == 0 else float("inf"))
    return [
        finite_criterion("float32", summary),
        Criterion(
            "max |delta logit| / spread",
            "float32",
            relative,
            FLOAT32_DELTA.value,
            "of the spread",
            FLOAT32_DELTA.reason,
        ),
    ]


def bfloat16_criteria(summary: dict, own_noise: dict) -> list[Criterion]:
    """Of the bfloat16 leg: summary of KL(reference float32 || candidate bfloat16) and of the reference's own bfloat16."""
    noise = own_noise["kl_mean"]
    limit = max(PUBLISHED_KL, BFLOAT16_NOISE_MULTIPLE * noise)
    reason = (
        f"the published start line {PUBLISHED_KL:g}"
        if limit == PUBLISHED_KL
        else f"{BFLOAT16_NOISE_MULTIPLE:g} times the reference's own bfloat16 noise of {noise:.2e}"
    )
    return [
        finite_criterion("bfloat16", summary),
        Criterion("mean KL", "bfloat16", summary["kl_mean"], limit, "nats per token", reason),
    ]


def finite_criterion(leg: str, summary: dict) -> Criterion:
    count = summary["nonfinite_logits_reference"] + summary["nonfinite_logits_candidate"]
    return count_criterion("finite logits", leg, count, "NaN or infinite logits")


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    sentence: str  # what decided

    @property
    def name(self) -> str:
        return VERDICTS[self.exit_code]


def judge(criteria: list[Criterion], uncovered: list[str], tokens: int) -> Verdict:
    """Fail if any criterion that is on does not pass; else inconclusive if something was not covered; else pass.

    Raises ValueError where nothing was compared.
    """
    judged = [c for c in criteria if c.on]
    if not judged or tokens <= 0:
        raise ValueError("nothing was compared: no verdict")
    failed = [c for c in judged if not c.passed]
    if failed:
        first = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return Verdict(FAIL, f"{first.leg}: {first.name} is {first.value:.4g}, the limit is {first.limit:.4g}{more}")
    if uncovered:
        return Verdict(INCONCLUSIVE, f"nothing differs, but this run could not show faults of: {', '.join(uncovered)}")
    closest = min((c for c in judged if c.margin), key=lambda c: c.margin, default=None)
    if closest is None:
        return Verdict(PASS, "both sides are equal bit for bit")
    return Verdict(PASS, f"closest to its limit: {closest.leg} {closest.name}, {closest.margin:.3g} times below it")
