"""Limits and verdicts: NaN fails, the boundary is stable, nothing compared is an error."""

import math

import pytest

from olmo_parity.parity import gate


def summary(**changes):
    base = {
        "spread_of_logits": 1.0,
        "max_abs_delta_logit_shift_free": 1e-6,
        "kl_mean": 1e-6,
        "kl_max": 1e-12,
        "nonfinite_logits_reference": 0,
        "nonfinite_logits_candidate": 0,
        "by_position": [],
    }
    return {**base, **changes}


RATIO = {"ratio": 1.0, "upper": 1.05, "blocks": 32, "bias_in_standard_errors": 0.5}


def verdict(criteria, open_questions=()):
    return gate.judge(criteria, list(open_questions), 512)


def float32(profile=gate.DEFAULT, noise=None, limits=None, **changes):
    return gate.float32_criteria(summary(**changes), noise or summary(), profile, limits)


def bfloat16(profile=gate.DEFAULT, own=None, ratio=None, limits=None, **changes):
    return gate.bfloat16_criteria(summary(**changes), own or summary(), ratio or RATIO, profile, limits)


def both(**changes):
    return float32(**changes) + bfloat16(**changes)


def named(criteria, name):
    return next(c for c in criteria if c.name == name)


def test_small_differences_pass():
    assert verdict(both()).exit_code == gate.PASS


@pytest.mark.parametrize("factor, code", [(0.9, gate.PASS), (1.0, gate.PASS), (1.1, gate.FAIL)])
def test_the_limit_itself_passes_and_more_fails(factor, code):
    delta = gate.DEFAULT.float32_delta
    at = delta.multiple * delta.floor
    assert verdict(both(max_abs_delta_logit_shift_free=at * factor)).exit_code == code
    assert verdict(both(kl_mean=gate.PUBLISHED_KL * factor)).exit_code == code
    assert verdict(bfloat16(ratio={**RATIO, "upper": 1.5 * factor})).exit_code == code
    assert verdict(bfloat16(ratio={**RATIO, "bias_in_standard_errors": 6 * factor})).exit_code == code


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["max_abs_delta_logit_shift_free", "kl_mean", "kl_max"])
def test_nan_and_infinity_fail(name, bad):
    assert verdict(both(**{name: bad})).exit_code == gate.FAIL


def test_a_nan_spread_ratio_or_bias_fails():
    assert verdict(float32(spread_of_logits=math.nan)).exit_code == gate.FAIL
    for name in ("upper", "bias_in_standard_errors"):
        assert verdict(bfloat16(ratio={**RATIO, name: math.nan})).exit_code == gate.FAIL


def test_limits_follow_measured_noise_between_floor_and_cap():
    rule = gate.DEFAULT.float32_delta
    for noise, base in ((0.0, rule.floor), (rule.floor * 2, rule.floor * 2), (rule.cap * 10, rule.cap)):
        criterion = float32(noise=summary(max_abs_delta_logit_shift_free=noise))[1]
        assert criterion.limit == pytest.approx(rule.multiple * base)


def test_noise_above_the_cap_is_no_ground_for_a_verdict_and_nan_noise_neither():
    assert gate.noise_faults(summary()) == []
    for noise in ({"max_abs_delta_logit_shift_free": 1e-3}, {"kl_max": 1e-6}, {"kl_max": math.nan}):
        assert len(gate.noise_faults(summary(**noise))) == 1
    assert (
        math.isnan(float32(noise=summary(kl_max=math.nan))[2].limit)
        or float32(noise=summary(kl_max=math.nan))[2].limit <= 1e-6
    )


def test_too_few_tokens_for_an_interval_switch_its_criteria_off_and_are_not_covered():
    few = {"ratio": math.nan, "upper": math.nan, "blocks": 29, "bias_in_standard_errors": math.nan}
    criteria = bfloat16(ratio=few)
    assert [c.on for c in criteria] == [True, True, False, False]
    assert verdict(criteria).exit_code == gate.PASS and not gate.interval_coverage(29)["covered"]
    assert gate.interval_coverage(30)["covered"]
    assert verdict(bfloat16(ratio={**few, "blocks": 30})).exit_code == gate.FAIL


def test_profiles_differ_as_they_say():
    noisy = {"own": summary(kl_mean=4e-3), "kl_mean": 5e-3}
    assert verdict(bfloat16(**noisy)).exit_code == gate.PASS
    assert verdict(bfloat16(gate.PROFILES["published"], **noisy)).exit_code == gate.FAIL
    loose = {"ratio": {**RATIO, "upper": 3.0, "bias_in_standard_errors": 50}}
    assert verdict(bfloat16(gate.PROFILES["published"], **loose)).exit_code == gate.PASS
    assert named(bfloat16(gate.PROFILES["published"]), "mean log-probability difference").on is False
    assert verdict(bfloat16(gate.PROFILES["strict"], ratio={**RATIO, "upper": 1.4})).exit_code == gate.FAIL


def test_a_limit_set_by_hand_decides_and_is_marked():
    criteria = float32(limits={"float32-delta": 1e-9})
    assert verdict(criteria).exit_code == gate.FAIL and criteria[1].set_by_hand
    criteria = bfloat16(gate.PROFILES["published"], limits={"bfloat16-ratio": 1.01})
    assert verdict(criteria).exit_code == gate.FAIL
    assert "by hand" in verdict(bfloat16(limits={"bfloat16-kl": 1.0})).sentence
    assert set(gate.LIMIT_NAMES) == {"float32-delta", "float32-kl", "bfloat16-kl", "bfloat16-ratio", "bfloat16-bias"}


def test_one_non_finite_logit_fails_whatever_the_statistics_say():
    assert verdict(both(nonfinite_logits_candidate=1)).exit_code == gate.FAIL
    assert verdict(both(nonfinite_logits_reference=1)).exit_code == gate.FAIL


def test_the_limit_follows_the_size_of_the_logits():
    assert verdict(float32(spread_of_logits=0.1, max_abs_delta_logit_shift_free=2e-5)).exit_code == gate.FAIL
    assert verdict(float32(spread_of_logits=5.0, max_abs_delta_logit_shift_free=2e-5)).exit_code == gate.PASS


def test_constant_logits_pass_only_where_they_are_equal():
    assert verdict(float32(spread_of_logits=0.0, max_abs_delta_logit_shift_free=0.0)).exit_code == gate.PASS
    assert verdict(float32(spread_of_logits=0.0, max_abs_delta_logit_shift_free=1e-9)).exit_code == gate.FAIL


def test_the_bfloat16_limit_is_the_published_one_or_the_references_own_noise():
    assert bfloat16(own=summary(kl_mean=1e-5))[1].limit == 1.5e-3
    assert bfloat16(own=summary(kl_mean=4e-3))[1].limit == pytest.approx(6e-3)
    assert bfloat16(own=summary(kl_mean=math.nan))[1].limit == 1.5e-3


def test_what_was_not_covered_is_inconclusive_and_a_failure_comes_first():
    assert verdict(both(), ["window"]).exit_code == gate.INCONCLUSIVE
    assert verdict(both(kl_mean=1.0), ["window"]).exit_code == gate.FAIL


def test_a_criterion_that_is_off_cannot_decide():
    off = gate.count_criterion("weights that differ", "weights", 5, "tensors", on=False)
    assert verdict([off, *both()]).exit_code == gate.PASS


def test_nothing_compared_is_an_error():
    with pytest.raises(ValueError, match="nothing was compared"):
        gate.judge([], [], 512)
    with pytest.raises(ValueError, match="nothing was compared"):
        gate.judge([gate.count_criterion("x", "weights", 0, "tensors", on=False)], [], 512)
    with pytest.raises(ValueError, match="nothing was compared"):
        gate.judge(both(), [], 0)
