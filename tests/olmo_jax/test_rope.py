"""Rotary tables at real dimensions, against transformers' own functions and against float64."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from olmo_parity.olmo_jax import layers as L
from olmo_parity.olmo_jax.config import FULL, SLIDING, RopeParameters
from olmo_parity.olmo_jax.config_hf import to_hf
from olmo_parity.olmo_jax.rope import default_attention_factor, resolve, rope_tables, tables_hash, yarn_ramp

HEAD_DIM, THETA = 128, 500000.0  # OLMo 3, 7B and 32B
PLAIN = RopeParameters("default", THETA)
RELEASED = RopeParameters("yarn", THETA, 8.0, 8192, 32.0, 1.0, default_attention_factor(8.0), True)
YARNS = {
    "as released": RELEASED,
    "not truncated": dataclasses.replace(RELEASED, truncate=False),
    "explicit attention factor": dataclasses.replace(RELEASED, attention_factor=1.0),
    # The ramp ends at dimension 65.3, past the 64 there are.
    "ramp past half": dataclasses.replace(RELEASED, original_max_position_embeddings=4_000_000),
    # And at 134: transformers clips at 127, AI2's code at 63 (no released model reaches either).
    "ramp past the end": dataclasses.replace(RELEASED, original_max_position_embeddings=5_000_000_000_000),
    "an empty ramp": dataclasses.replace(RELEASED, original_max_position_embeddings=8, beta_fast=2.0),
}


def float64_table(rope: RopeParameters, head_dim: int) -> list[float]:
    """YaRN, arXiv 2309.00071 section 3.2, one dimension at a time in Python's own floats."""

    def turns_to_dimension(turns):
        return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / 2 / math.log(THETA)

    table = []
    for d in range(head_dim // 2):
        frequency = rope.rope_theta ** (-2 * d / head_dim)
        if rope.rope_type == "yarn":
            low, high = turns_to_dimension(rope.beta_fast), turns_to_dimension(rope.beta_slow)
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            if low == high:
                high += 0.001
            divided = min(max((d - low) / (high - low), 0.0), 1.0)
            frequency = frequency / rope.factor * divided + frequency * (1 - divided)
        elif rope.rope_type == "linear":
            frequency /= rope.factor
        table.append(frequency)
    return table


@pytest.mark.parametrize("name", YARNS)
def test_tables_match_float64(name):
    for rope in (YARNS[name], PLAIN, RopeParameters("linear", THETA, 4.0)):
        wanted = np.array(float64_table(rope, HEAD_DIM))
        found = resolve(rope, HEAD_DIM).inv_freq
        assert found.dtype == np.float32 and found.shape == (64,)
        assert np.abs(found / wanted - 1).max() <= 3e-7  # three float32 roundings


def test_the_released_numbers():
    table = resolve(RELEASED, HEAD_DIM)
    assert table.attention_factor == 1.2079441541679836
    plain = resolve(PLAIN, HEAD_DIM).inv_freq
    assert yarn_ramp(RELEASED, HEAD_DIM) == (18, 35)
    assert (table.inv_freq[:19] == plain[:19]).all()
    assert np.allclose(table.inv_freq[35:], plain[35:] / 8, rtol=1e-7)
    assert ((plain / 8 < table.inv_freq) & (table.inv_freq < plain))[19:35].all()


def test_each_yarn_variant_is_another_table():
    tables = [resolve(rope, HEAD_DIM) for rope in (*YARNS.values(), PLAIN)]
    assert len({(t.inv_freq.tobytes(), t.attention_factor) for t in tables}) == len(tables)


def test_the_attention_factor_is_the_papers_unless_mscale_says_otherwise():
    assert default_attention_factor(8.0) == 0.1 * math.log(8) + 1
    assert default_attention_factor(1.0) == 1.0
    assert default_attention_factor(8.0, 0.7, 0.5) == (0.07 * math.log(8) + 1) / (0.05 * math.log(8) + 1)
    assert default_attention_factor(8.0, 0.7) == default_attention_factor(8.0)


@pytest.mark.parametrize("name", YARNS)
def test_tables_are_bit_equal_to_transformers_own(tiny_config, name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", "5.13")
    from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

    config = tiny_config(head_dim=HEAD_DIM, rope={SLIDING: PLAIN, FULL: YARNS[name]}, max_position_embeddings=65536)
    raw = to_hf(config)
    # transformers 5.24 looks for truncate beside the layer types instead of inside one, so it reads ours as true.
    raw["rope_parameters"]["truncate"] = YARNS[name].truncate
    reference = Olmo3RotaryEmbedding(transformers.Olmo3Config.from_dict(raw))
    for layer_type, table in rope_tables(config).items():
        wanted = getattr(reference, f"{layer_type}_inv_freq").numpy()
        # torch's power is up to 1 ulp off where NumPy's double is rounded once.
        assert np.abs(table.inv_freq / wanted - 1).max() <= 1.2e-7
        assert table.attention_factor == getattr(reference, f"{layer_type}_attention_scaling")
    if name in ("as released", "explicit attention factor"):
        assert (rope_tables(config)[FULL].inv_freq == reference.full_attention_inv_freq.numpy()).all()


def test_only_the_layer_types_that_occur_have_a_table(tiny_config):
    assert set(rope_tables(tiny_config())) == {SLIDING, FULL}
    assert set(rope_tables(tiny_config(layer_types=(FULL,) * 2))) == {FULL}


def test_the_hash_of_the_tables_tells_any_change(tiny_config):
    config = tiny_config()
    changed = [
        config.replace(rope={**config.rope, FULL: dataclasses.replace(config.rope[FULL], attention_factor=1.21)}),
        config.replace(rope={SLIDING: config.rope[FULL], FULL: config.rope[SLIDING]}),
        config.replace(rope={**config.rope, SLIDING: RopeParameters("default", 10000.5)}),
    ]
    hashes = {tables_hash(rope_tables(c)) for c in (config, *changed)}
    assert len(hashes) == 4
    assert tables_hash(rope_tables(config)) == tables_hash(rope_tables(config.replace(rms_norm_eps=1e-5)))


def test_cos_and_sin_are_right_at_the_longest_positions():
    """Angles up to 65535 radians, where a range reduction in too few bits shows. The angle itself is rounded to float32,
    as the reference has it; bfloat16 positions are the control."""
    table = resolve(PLAIN, HEAD_DIM)
    positions = np.concatenate([np.arange(0, 65536, 61), np.arange(65000, 65536)]).astype(np.int32)
    angles = (positions.astype(np.float32)[:, None] * table.inv_freq).astype(np.float64)
    cos, sin = jax.jit(lambda p: L.rotary_cos_sin(table.inv_freq, 1.25, p))(positions[None])
    assert np.abs(cos[0] - 1.25 * np.cos(angles)).max() <= 2e-7
    assert np.abs(sin[0] - 1.25 * np.sin(angles)).max() <= 2e-7
    rounded = positions.astype(jax.numpy.bfloat16).astype(np.float32)
    wrong, _ = L.rotary_cos_sin(table.inv_freq, 1.25, rounded[None])
    assert np.abs(wrong[0] - 1.25 * np.cos(angles)).max() > 1
