"""Statistics of two logit arrays: right on known values, and never quiet about NaN."""

import numpy as np
import pytest

from olmo_parity.parity.metrics import TokenStats, ratio_interval, summarise, token_stats, top


def compared(reference, candidate, tokens=None):
    reference, candidate = np.asarray(reference, np.float32), np.asarray(candidate, np.float32)
    tokens = np.zeros(len(reference), np.int64) if tokens is None else tokens
    return token_stats(reference, candidate, tokens)


def summary(stats):
    return summarise(stats, np.arange(len(stats)))


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 3, (40, 30)).astype(np.float32)


def test_identical_logits_give_exactly_zero(logits):
    s = summary(compared(logits, logits))
    assert s["kl_max"] == 0 and s["kl_reverse_mean"] == 0 and s["max_abs_delta_logit"] == 0
    assert s["top1_agreement"] == 1


def test_kl_is_that_of_the_textbook_and_has_a_direction():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    stats = compared([np.log(p)], [np.log(q)])
    assert stats.kl[0] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-6)
    assert stats.kl_reverse[0] == pytest.approx((q * np.log(q / p)).sum(), rel=1e-6)
    assert stats.kl[0] != pytest.approx(stats.kl_reverse[0], rel=1e-3)


def test_tiny_kl_is_a_number_and_not_rounding_noise():
    """d^2/2 weighted by p: 1e-7 apart in one of two equal logits is KL of about 1.25e-15."""
    a = np.array([[0.0, 0.0]], np.float64)
    stats = token_stats(a, a + np.array([[1e-7, 0.0]]), np.zeros(1))
    assert stats.kl[0] == pytest.approx(1e-14 / 8, rel=1e-3)


def test_a_shift_of_all_logits_changes_no_probability(logits):
    stats = compared(logits, logits + np.float32(0.5))
    assert stats.max_abs.max() == pytest.approx(0.5, rel=1e-5)
    assert stats.max_abs_shift_free.max() < 1e-6 and stats.kl.max() < 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_one_non_finite_logit_spoils_every_statistic_of_its_side(logits, bad, side):
    damaged = logits.copy()
    damaged[-1, 7] = bad
    pair = (damaged, logits) if side == "reference" else (logits, damaged)
    s = summary(compared(*pair))
    assert s[f"nonfinite_logits_{side}"] == 1
    assert not s["max_abs_delta_logit"] <= 1e30
    assert s["kl_max"] > 0.001 or not np.isfinite(s["kl_max"])


def test_nan_survives_the_maximum_wherever_it_stands(logits):
    for row in (0, 17, 39):
        damaged = logits.copy()
        damaged[row, 3] = np.nan
        s = summary(compared(logits, damaged))
        assert np.isnan([s["max_abs_delta_logit"], s["kl_max"], s["kl_mean"]]).all()


def test_a_token_masked_on_both_sides_counts_as_equal(logits):
    a, b = logits.copy(), (logits + np.float32(1e-3) * np.random.default_rng(1).normal(size=logits.shape)).astype("f4")
    without = summary(compared(np.delete(a, 5, 1), np.delete(b, 5, 1)))
    a[:, 5] = b[:, 5] = -np.inf
    s = summary(compared(a, b))
    assert s["nonfinite_logits_reference"] == s["nonfinite_logits_candidate"] == 0
    assert s["kl_mean"] == pytest.approx(without["kl_mean"], rel=1e-9)
    assert s["spread_of_logits"] == pytest.approx(without["spread_of_logits"], rel=1e-9)


def test_a_token_masked_on_the_candidate_alone_is_an_infinite_divergence(logits):
    damaged = logits.copy()
    damaged[:, 5] = -np.inf
    assert np.isinf(compared(logits, damaged).kl).all()


def test_observed_token_is_the_next_one_and_the_last_has_none():
    reference = np.log(np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]))
    candidate = np.log(np.array([[0.25, 0.75], [0.25, 0.75], [0.25, 0.75]]))
    stats = token_stats(reference, candidate, np.array([0, 1, 0]))
    assert stats.observed_delta[:2] == pytest.approx([np.log(0.75 / 0.5), np.log(0.25 / 0.5)])
    assert np.isnan(stats.observed_delta[2])


def test_long_arrays_are_worked_in_pieces_with_equal_results():
    rng = np.random.default_rng(2)
    a, b = (rng.normal(size=(200, 11)).astype(np.float32) for _ in range(2))
    whole = compared(a, b)
    parts = TokenStats.join(*(compared(a[i : i + 1], b[i : i + 1]) for i in range(200)))
    np.testing.assert_array_equal(whole.kl, parts.kl)
    np.testing.assert_array_equal(whole.max_abs, parts.max_abs)


def test_position_zero_stands_apart(logits):
    s = summary(compared(logits, logits + 1))
    assert s["by_position"][0]["positions"] == [0, 0] and s["by_position"][0]["tokens"] == 1
    assert sum(row["tokens"] for row in s["by_position"]) == 40


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_compare_is_an_error(shape):
    with pytest.raises(ValueError, match="no logits"):
        compared(np.zeros(shape), np.zeros(shape), np.zeros(shape[0]))


def test_arrays_that_do_not_belong_together_are_an_error(logits):
    with pytest.raises(ValueError, match="belong together"):
        compared(logits, logits[:, :-1])
    with pytest.raises(ValueError, match="belong together"):
        token_stats(logits, logits, np.zeros(39))


def test_float32_is_compared_in_float64():
    """In bfloat16 or float32 arithmetic two near arrays give noise: here logits of 1e4 differ in the last bit only."""
    a = np.full((1, 4), 1e4, np.float32)
    b = a.copy()
    b[0, 0] = np.nextafter(np.float32(1e4), np.float32(2e4))
    d = float(b[0, 0]) - 1e4
    assert compared(a, b).kl[0] == pytest.approx(d * d * (1 / 4 - 1 / 16) / 2, rel=1e-2)


def noisy(seed, scale, tokens=1024):
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(99).normal(0, 2, (tokens, 50))
    return compared(base, base + rng.normal(0, scale, base.shape), np.random.default_rng(98).integers(0, 50, tokens))


def test_equal_noise_has_a_ratio_near_one_and_a_narrow_interval():
    r = ratio_interval(noisy(1, 0.01), noisy(2, 0.01))
    assert r["blocks"] == 32
    assert 0.9 < r["ratio"] < r["upper"] < 1.2
    assert r["bias_in_standard_errors"] < 5


def test_more_noise_and_bias_show():
    assert ratio_interval(noisy(1, 0.01), noisy(2, 0.015))["ratio"] == pytest.approx(2.25, rel=0.15)
    shifted = noisy(1, 0.01)
    biased = TokenStats(**{**vars(shifted), "observed_delta": shifted.observed_delta + 0.01})
    assert ratio_interval(shifted, biased)["bias_in_standard_errors"] > 10


def test_no_noise_at_all_and_noise_against_none():
    none, some = noisy(1, 0), noisy(2, 0.01)
    assert ratio_interval(none, none)["upper"] == 0
    assert ratio_interval(none, none)["bias_in_standard_errors"] == 0
    assert np.isinf(ratio_interval(none, some)["upper"])


def test_a_nan_token_spoils_the_interval():
    bad = noisy(2, 0.01)
    bad.kl[5] = np.nan
    r = ratio_interval(noisy(1, 0.01), bad)
    assert not r["ratio"] <= 1e9 and not r["upper"] <= 1e9


def test_few_tokens_give_no_interval():
    r = ratio_interval(noisy(1, 0.01, 20), noisy(2, 0.01, 20))
    assert r["blocks"] == 0 and np.isnan(r["upper"])


def test_top_ids_come_largest_first_and_agreement_counts_them():
    assert top(np.array([[0.0, 3, 1, 2]]), 3).tolist() == [[1, 3, 2]]
    assert top(np.array([[0.0, 1]]), 5).tolist() == [[1, 0]]
    a = np.array([[9.0, 8, 7, 6, 5, 0, 0, 0]])
    assert compared(a, np.array([[9.0, 8, 7, 6, 0, 0, 0, 5]])).top5_shared[0] == pytest.approx(0.8)


def test_jensen_shannon_is_symmetric_and_bounded():
    a, b = np.array([[10.0, -10, 0]]), np.array([[-10.0, 10, 0]])
    there, back = compared(a, b).jensen_shannon[0], compared(b, a).jensen_shannon[0]
    assert there == pytest.approx(back) and 0.6 < there <= np.log(2)
