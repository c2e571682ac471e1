"""Limits and verdicts: NaN fails, the boundary is stable, nothing compared is an error."""

import math

import pytest

from olmo_parity.parity import gate


def summary(**changes):
    base = {
        "spread_of_logits": 1.0,
        "max_abs_delta_logit": 1e-6,
        "kl_mean": 1e-6,
        "nonfinite_logits_reference": 0,
        "nonfinite_logits_candidate": 0,
    }
    return {**base, **changes}


def verdict(criteria, uncovered=()):
    return gate.judge(criteria, list(uncovered), 512)


def both(**changes):
    return gate.float32_criteria(summary(**changes)) + gate.bfloat16_criteria(summary(**changes), summary())


def test_small_differences_pass():
    assert verdict(both()).exit_code == gate.PASS


@pytest.mark.parametrize("factor, code", [(0.9, gate.PASS), (1.0, gate.PASS), (1.1, gate.FAIL)])
def test_the_limit_itself_passes_and_more_fails(factor, code):
    assert verdict(both(max_abs_delta_logit=gate.FLOAT32_DELTA.value * factor)).exit_code == code
    assert verdict(both(kl_mean=gate.PUBLISHED_KL * factor)).exit_code == code


@pytest.mark.parametrize(
    "name, bad",
    [
        ("max_abs_delta_logit", math.nan),
        ("max_abs_delta_logit", math.inf),
        ("kl_mean", math.nan),
        ("kl_mean", math.inf),
        ("spread_of_logits", math.nan),
    ],
)
def test_nan_and_infinity_fail(name, bad):
    assert verdict(both(**{name: bad})).exit_code == gate.FAIL


def test_one_non_finite_logit_fails_whatever_the_statistics_say():
    assert verdict(both(nonfinite_logits_candidate=1)).exit_code == gate.FAIL
    assert verdict(both(nonfinite_logits_reference=1)).exit_code == gate.FAIL


def test_the_limit_follows_the_size_of_the_logits():
    at_step_0, trained = (
        summary(spread_of_logits=0.2, max_abs_delta_logit=1e-4),
        summary(spread_of_logits=5, max_abs_delta_logit=1e-4),
    )
    assert verdict(gate.float32_criteria(at_step_0)).exit_code == gate.FAIL
    assert verdict(gate.float32_criteria(trained)).exit_code == gate.PASS


def test_constant_logits_pass_only_where_they_are_equal():
    assert verdict(gate.float32_criteria(summary(spread_of_logits=0.0, max_abs_delta_logit=0.0))).exit_code == gate.PASS
    assert (
        verdict(gate.float32_criteria(summary(spread_of_logits=0.0, max_abs_delta_logit=1e-9))).exit_code == gate.FAIL
    )


def test_the_bfloat16_limit_is_the_published_one_or_the_references_own_noise():
    assert gate.bfloat16_criteria(summary(), summary(kl_mean=1e-5))[1].limit == 1.5e-3
    assert gate.bfloat16_criteria(summary(), summary(kl_mean=4e-3))[1].limit == pytest.approx(6e-3)


def test_a_reference_whose_own_noise_is_nan_does_not_pass():
    criteria = gate.bfloat16_criteria(summary(), summary(kl_mean=math.nan))
    assert verdict(criteria).exit_code == gate.FAIL or criteria[1].limit == 1.5e-3


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
