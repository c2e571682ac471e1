"""Limits and the verdict: pure functions of measured numbers, written so that NaN fails and nothing compared never passes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from .metrics import BLOCK_TOKENS, MIN_BLOCKS

PASS, FAIL, BAD_INPUT, INCONCLUSIVE = 0, 1, 2, 3  # exit codes
VERDICTS = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}
PUBLISHED_KL = 1.5e-3  # nats per token, bfloat16: start line of a published 512-chip run


@dataclass(frozen=True)
class NoiseLimit:
    """A limit that follows from noise measured in the run: multiple x the larger of floor and noise.

    A noise above cap does not widen the limit further: such a run is inconclusive.
    """

    multiple: float
    floor: float
    cap: float
    reason: str


@dataclass(frozen=True)
class Profile:
    """One set of limits. All numbers of a verdict stand here, each with its reason."""

    name: str
    # max over tokens of the largest |delta logit| after taking the mean delta away, as a share of the logits' spread
    float32_delta: NoiseLimit
    # max over tokens of KL(reference || candidate), nats
    float32_kl: NoiseLimit
    # mean KL must be under the larger of these two: nats per token, times the reference's own
    bfloat16_kl: float
    bfloat16_noise_multiple: float
    # upper end of the one-sided 95% interval of candidate's KL over the reference's own; None: off
    bfloat16_ratio: float | None
    # |mean log-probability difference of the observed token| in standard errors of the reference's own; None: off
    bfloat16_bias: float | None


DEFAULT = Profile(
    name="default",
    float32_delta=NoiseLimit(
        multiple=30,
        floor=3e-6,
        cap=3e-5,
        reason="right implementations differ by 4e-6 to 1.5e-5 of the spread on widths 64 to 4096 (bench/float32_noise.py); "
        "the smallest fault of function on the fixtures is above 4e-2",
    ),
    float32_kl=NoiseLimit(
        multiple=900,
        floor=1e-13,
        cap=1e-9,
        reason="KL grows with the square of the logit difference, so 30 times there is 900 times here; right "
        "implementations reach 2e-14 (step 0) to 2.5e-11 (trained) at their worst token (bench/float32_noise.py), "
        "the smallest fault of function on the fixtures is above 1e-5",
    ),
    bfloat16_kl=PUBLISHED_KL,
    bfloat16_noise_multiple=1.5,
    bfloat16_ratio=1.5,
    bfloat16_bias=6.0,
)
PROFILES = {
    "default": DEFAULT,
    # A third of the room: for CI on one fixed machine, where noise is known.
    "strict": replace(
        DEFAULT,
        name="strict",
        float32_delta=replace(DEFAULT.float32_delta, multiple=10),
        float32_kl=replace(DEFAULT.float32_kl, multiple=100),
        bfloat16_noise_multiple=1.25,
        bfloat16_ratio=1.25,
    ),
    # The published start line as it stands, whatever the noise.
    "published": replace(
        DEFAULT, name="published", bfloat16_noise_multiple=0.0, bfloat16_ratio=None, bfloat16_bias=None
    ),
}
LIMIT_NAMES = ("float32-delta", "float32-kl", "bfloat16-kl", "bfloat16-ratio", "bfloat16-bias")


@dataclass(frozen=True)
class Criterion:
    """One thing that was judged: value against limit. An off criterion is reported and cannot decide."""

    name: str
    leg: str  # config, weights, mask, float32 or bfloat16
    value: float
    limit: float
    unit: str
    reason: str  # why this limit
    on: bool = True
    set_by_hand: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN

    @property
    def margin(self) -> float | None:
        """How many times the value fits into the limit; below 1 it does not pass. None where that says nothing."""
        return self.limit / self.value if self.value > 0 and self.limit > 0 else None

    def record(self) -> dict:
        return {**asdict(self), "passed": self.passed, "margin": self.margin}


def count_criterion(
    name: str, leg: str, count: int, what: str, on: bool = True, reason: str = "", unread: str = ""
) -> Criterion:
    """Something that must not occur at all. unread says why it was not counted: then it is off, and its value NaN."""
    if unread:
        return Criterion(name, leg, math.nan, 0, what, f"not compared: {unread}", on=False)
    return Criterion(name, leg, count, 0, what, reason or "any is a difference", on)


def mask_criteria(side: str, expected: dict, counted: dict | None) -> list[Criterion]:
    """Keys that each probed query sees around the edge of the true window, by layer type, against the config's; [] where not counted."""
    if counted is None:
        return []
    wrong = sum([p, keys] not in counted.get(kind, []) for kind, rows in expected.items() for p, keys in rows)
    return [count_criterion(f"queries of the {side} that see other keys", "mask", wrong, "of the probed queries")]


def float32_criteria(
    summary: dict, noise: dict, profile: Profile = DEFAULT, limits: dict | None = None
) -> list[Criterion]:
    """Of the float32 leg. summary and noise are metrics.summarise of reference against candidate and against itself."""
    return [
        finite_criterion("float32", summary),
        _noise_criterion("float32-delta", "max |delta logit| / spread", relative_delta, profile.float32_delta, summary, noise,
                         "of the spread", limits or {}),
        _noise_criterion("float32-kl", "max KL", lambda s: s["kl_max"], profile.float32_kl, summary, noise, "nats",
                         limits or {}),
    ]  # fmt: skip


def packed_criteria(
    summary: dict, noise: dict, profile: Profile = DEFAULT, limits: dict | None = None
) -> list[Criterion]:
    """Of a packed row in float32, against each document alone: the limits of the float32 leg."""
    return [replace(c, name=f"packed documents: {c.name}") for c in float32_criteria(summary, noise, profile, limits)]


def padded_criteria(
    summary: dict | None, noise: dict, profile: Profile = DEFAULT, limits: dict | None = None, unread: str = ""
) -> list[Criterion]:
    """Of the candidate in float32, a row padded and batched against the same row alone: the limits of the float32 leg.

    summary is None where neither was run, and unread says why.
    """
    if summary is None:
        return [count_criterion("padded rows", "float32", 0, "rows", unread=unread)]
    return [replace(c, name=f"padded rows: {c.name}") for c in float32_criteria(summary, noise, profile, limits)]


def relative_delta(summary: dict) -> float:
    """The largest shift-free |delta logit| as a share of the spread of the reference's logits."""
    delta, spread = summary["max_abs_delta_logit_shift_free"], summary["spread_of_logits"]
    if spread > 0:
        return delta / spread
    return 0.0 if delta == 0 else math.inf if spread == 0 else math.nan


def _noise_criterion(key, name, value_of, rule: NoiseLimit, summary, noise, unit, limits) -> Criterion:
    if key in limits:
        return Criterion(name, "float32", value_of(summary), limits[key], unit, "set by hand", set_by_hand=True)
    measured = value_of(noise)
    base = max(rule.floor, min(measured, rule.cap))
    of = (
        f"measured noise {measured:.2g}"
        if measured > rule.floor
        else f"floor {rule.floor:.2g} (measured noise {measured:.2g})"
    )
    return Criterion(
        name,
        "float32",
        value_of(summary),
        rule.multiple * base,
        unit,
        f"{rule.multiple:g} times the {of}; {rule.reason}",
    )


def noise_faults(noise: dict, profile: Profile = DEFAULT) -> list[str]:
    """Why the reference's own float32 noise allows no verdict; empty where it does."""
    faults = []
    for name, value, rule in (
        ("max |delta logit| / spread", relative_delta(noise), profile.float32_delta),
        ("max KL", noise["kl_max"], profile.float32_kl),
    ):
        if not value <= rule.cap:
            faults.append(f"the reference against itself: {name} {value:.3g}, more than {rule.cap:.3g}")
    return faults


def bfloat16_criteria(
    summary: dict, own: dict, ratio: dict, profile: Profile = DEFAULT, limits: dict | None = None
) -> list[Criterion]:
    """Of the bfloat16 leg.

    summary: reference float32 against candidate bfloat16; own: against the reference's bfloat16; both metrics.summarise.
    ratio: metrics.ratio_interval of the two.
    """
    limits = limits or {}
    noise = profile.bfloat16_noise_multiple * own["kl_mean"]
    # Written so that a NaN noise gives the published limit, and never a NaN limit that nothing can meet or miss.
    limit, reason = profile.bfloat16_kl, f"the published start line {profile.bfloat16_kl:g}"
    if noise > limit:
        limit = noise
        reason = f"{profile.bfloat16_noise_multiple:g} times the reference's own bfloat16 noise of {own['kl_mean']:.2e}"
    kl = Criterion("mean KL", "bfloat16", summary["kl_mean"], limit, "nats per token", reason)
    enough = ratio["blocks"] >= MIN_BLOCKS
    ratio_on = enough and (profile.bfloat16_ratio is not None or "bfloat16-ratio" in limits)
    ratio_limit = profile.bfloat16_ratio if profile.bfloat16_ratio is not None else DEFAULT.bfloat16_ratio
    upper = Criterion(
        "KL over the reference's own, upper end", "bfloat16", ratio["upper"], ratio_limit, "times",
        f"two right bfloat16 implementations are 0.9 to 1.1 times each other's noise; estimate {ratio['ratio']:.3g}, "
        f"one-sided 95% interval from {ratio['blocks']} blocks", on=ratio_on,
    )  # fmt: skip
    bias_on = enough and (profile.bfloat16_bias is not None or "bfloat16-bias" in limits)
    bias = Criterion(
        "mean log-probability difference", "bfloat16", ratio["bias_in_standard_errors"],
        profile.bfloat16_bias if profile.bfloat16_bias is not None else DEFAULT.bfloat16_bias, "standard errors",
        "of the observed token: noise averages out over tokens, faults do not", on=bias_on,
    )  # fmt: skip
    by_key = {"bfloat16-kl": kl, "bfloat16-ratio": upper, "bfloat16-bias": bias}
    return [finite_criterion("bfloat16", summary)] + [
        replace(c, limit=limits[key], reason="set by hand", set_by_hand=True) if key in limits else c
        for key, c in by_key.items()
    ]


def interval_coverage(blocks: int) -> dict:
    """Whether there were tokens enough for the bfloat16 leg's interval, as an item of batches.coverage."""
    detail = f"{blocks} blocks of {BLOCK_TOKENS} tokens; {MIN_BLOCKS} are needed for the bfloat16 leg's interval"
    return {"what": "bfloat16_interval", "covered": blocks >= MIN_BLOCKS, "detail": detail}


def finite_criterion(leg: str, summary: dict) -> Criterion:
    count = summary["nonfinite_logits_reference"] + summary["nonfinite_logits_candidate"]
    return count_criterion("finite logits", leg, count, "NaN or infinite logits")


def labels(criteria: list[Criterion], float32: dict) -> list[str]:
    """What the pattern of failures points at; each was checked by planting its cause (tests/parity/test_labels.py, test_faults.py)."""
    failed = {c.leg for c in criteria if c.on and not c.passed}
    wrong = [c.name for c in criteria if c.leg == "float32" and c.on and not c.passed]
    packed, padded = (any(n.startswith(kind) for n in wrong) for kind in ("packed", "padded"))
    plain = any(not n.startswith(("packed", "padded")) for n in wrong)
    found = []
    if "bfloat16" in failed and "float32" not in failed:
        found.append(
            "float32 agrees and bfloat16 does not: precision, most often where a cast stands (norms, rotary, softmax)"
        )
    if packed and not plain:
        found.append("only packed rows differ: documents see each other, or positions do not start again")
    if padded and not plain:
        found.append("only padded rows differ: padding is seen, or one row of a batch sees another")
    rows = float32["by_position"]
    if plain and "weights" not in failed and len(rows) > 2 and rows[0]["positions"] == [0, 0]:
        first, last = rows[0]["kl_mean"], rows[-1]["kl_mean"]
        if last > 0 and first <= last * POSITION_0_QUIET:
            found.append(
                "position 0 agrees and later ones do not: attention, that is rotary, window, mask or score scale"
            )
    return found


# Position 0 sees one key: the softmax hides scale, mask and rotary there, but not weights, norms or the MLP.
POSITION_0_QUIET = 1e-4


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    sentence: str  # what decided

    @property
    def name(self) -> str:
        return VERDICTS[self.exit_code]


def judge(criteria: list[Criterion], inconclusive: list[str], tokens: int) -> Verdict:
    """Fail if any criterion that is on does not pass; else inconclusive if there is a reason for it; else pass.

    Raises ValueError where nothing was compared.
    """
    judged = [c for c in criteria if c.on]
    if not judged or tokens <= 0:
        raise ValueError("nothing was compared: no verdict")
    failed = [c for c in judged if not c.passed]
    if failed:
        first = failed[0]
        more = f", and {len(failed) - 1} more criteria fail" if len(failed) > 1 else ""
        return Verdict(FAIL, f"{first.leg}: {first.name} is {first.value:.4g}, the limit is {first.limit:.4g}{more}")
    if inconclusive:
        return Verdict(INCONCLUSIVE, f"nothing differs, but: {'; '.join(inconclusive)}")
    closest = min((c for c in judged if c.margin), key=lambda c: c.margin, default=None)
    if closest is None:
        return Verdict(PASS, "both sides are equal bit for bit")
    by_hand = " (limits were set by hand)" if any(c.set_by_hand for c in judged) else ""
    return Verdict(
        PASS, f"closest to its limit: {closest.leg} {closest.name}, {closest.margin:.3g} times below it{by_hand}"
    )
