"""The functions of layers.py: against loops in float64, and in bfloat16 against the reference's own modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_parity.olmo_jax import layers as L


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def naive_attention(q, k, v, mask):
    """One query, one head at a time, in float64."""
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for b, n, t in np.ndindex(batch, heads, length):
        keys = [s for s in range(length) if mask[b % len(mask), t, s]]
        scores = np.array([np.dot(q[b, t, n], k[b, s, n // group]) for s in keys], np.float64) / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = sum(w * v[b, s, n // group] for w, s in zip(weights / weights.sum(), keys, strict=True))
    return out


def test_attention_is_softmax_over_the_keys_seen_and_shares_kv_heads_in_order():
    q, k, v = normal(2, 7, 6, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    mask = L.attention_mask(7, 3, jnp.array([[1] * 7, [1, 1, 2, 2, 2, 3, 3]]))
    wanted = naive_attention(q, k, v, np.asarray(mask))
    assert np.abs(L.attention(q, k, v, mask) - wanted).max() <= 1e-6
    interleaved = L.attention(q[:, :, [0, 3, 1, 4, 2, 5]], k, v, mask)  # the control: head n reading kv head n % K
    assert np.abs(interleaved - wanted).max() > 0.1


def test_a_key_that_is_not_seen_has_no_weight_at_all():
    q, k, v = normal(1, 6, 2, 8), normal(1, 6, 2, 8, seed=1), normal(1, 6, 2, 8, seed=2)
    mask = L.attention_mask(6, 2)
    k[:, :3], v[:, :3] = 1e4, 1e9
    other = L.attention(q, k, v, mask)
    k[:, :3], v[:, :3] = 0, 0
    assert (L.attention(q, k, v, mask)[:, 4:] == other[:, 4:]).all()


def test_rotary_turns_dimension_d_with_d_plus_half():
    x = normal(1, 3, 1, 8)
    angles = np.arange(3)[:, None] * np.array([1.0, 0.5, 0.25, 0.125])
    cos, sin = L.rotary_cos_sin(np.array([1.0, 0.5, 0.25, 0.125], np.float32), 1.0, np.arange(3)[None])
    turned = (x[0, :, 0, :4] + 1j * x[0, :, 0, 4:]) * np.exp(1j * angles)
    found = np.asarray(L.rotate(x, cos, sin))[0, :, 0]
    assert np.abs(found - np.concatenate([turned.real, turned.imag], axis=-1)).max() <= 1e-6


def test_norm_and_swiglu_in_float32():
    x, scale = normal(4, 16), normal(16, seed=1)
    wanted = scale * x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-2)
    assert np.abs(L.rms_norm(x, scale, 1e-2) - wanted).max() <= 1e-6
    gate, up = normal(100, scale=30), normal(100, seed=1)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    assert np.abs(L.swiglu(gate, up) - wanted).max() <= 1e-5
    # exp(-gate) overflows for the first; the limit of silu is 0, not NaN.
    assert (np.asarray(L.swiglu(jnp.array([-200.0, 0, 200]), jnp.ones(3))) == [0, 0, 200]).all()


def test_linear_sums_in_float32_and_rounds_once():
    x = jnp.full((1, 1024), 1.0, jnp.bfloat16)
    kernel = jnp.full((1024, 1), 1.0, jnp.bfloat16).at[0].set(8.0)
    assert float(L.linear(x, kernel)[0, 0]) == float(jnp.bfloat16(1031))  # a bfloat16 sum would stop at 256
    assert L.linear(x, kernel.astype(jnp.float32)).dtype == jnp.bfloat16


def test_documents_are_runs_of_equal_ids_and_count_from_zero():
    document, position = L.documents(jnp.array([[5, 5, 0, 0, 0, 5], [1, 2, 3, 3, 3, 3]]))
    assert document.tolist() == [[1, 1, 2, 2, 2, 3], [1, 2, 3, 3, 3, 3]]
    assert position.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]


# --- bfloat16, against the reference's own modules. Op by op, outside jit, so that XLA removes no cast. ---


@pytest.fixture
def reference():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.olmo3 import modeling_olmo3

    return torch, modeling_olmo3


def agreement(torch, found, wanted) -> float:
    """Share of bfloat16 values that are the same, bit for bit."""
    assert found.dtype == jnp.bfloat16 and wanted.dtype == torch.bfloat16
    return float((np.asarray(found.astype(jnp.float32)) == wanted.detach().float().numpy()).mean())


def both(torch, array):
    return jnp.asarray(array, jnp.bfloat16), torch.tensor(array).bfloat16()


def test_bfloat16_norm_rounds_where_the_reference_does(reference):
    torch, olmo3 = reference
    (x, tx), (scale, tscale) = both(torch, normal(64, 256)), both(torch, 1 + 0.3 * normal(256, seed=1))
    module = olmo3.Olmo3RMSNorm(256, 1e-6).bfloat16()
    module.weight.data = tscale
    wanted = module(tx)
    assert (
        agreement(torch, L.rms_norm(x, scale, 1e-6), wanted) >= 0.999
    )  # sums in another order, rarely another rounding
    llama = scale * L.rms_norm(x, jnp.ones_like(scale), 1e-6)  # cast first, scaled afterwards
    assert agreement(torch, llama, wanted) < 0.9


def test_bfloat16_swiglu_rounds_silu_once(reference):
    torch, _ = reference
    (gate, tgate), (up, tup) = both(torch, normal(10000, scale=2)), both(torch, normal(10000, seed=1))
    wanted = torch.nn.functional.silu(tgate) * tup
    assert agreement(torch, L.swiglu(gate, up), wanted) >= 0.999
    twice = gate * (1 / (1 + jnp.exp(-gate))) * up  # every step in bfloat16
    assert agreement(torch, twice, wanted) < 0.9
    never = (L.swiglu(gate.astype(jnp.float32), up.astype(jnp.float32))).astype(
        jnp.bfloat16
    )  # only the product rounded
    assert agreement(torch, never, wanted) < 0.9


def test_bfloat16_rotary_turns_in_float32(reference):
    torch, olmo3 = reference
    x, tx = both(torch, normal(1, 300, 2, 64))
    inv_freq = (1 / 10000 ** (np.arange(0, 64, 2) / 64)).astype(np.float32)
    cos, sin = L.rotary_cos_sin(inv_freq, 1.2, np.arange(300)[None])
    doubled = [torch.tensor(np.concatenate([t, t], -1)) for t in (np.asarray(cos), np.asarray(sin))]
    wanted, _ = olmo3.apply_rotary_pos_emb(tx.transpose(1, 2), tx.transpose(1, 2), *doubled)
    wanted = wanted.transpose(1, 2)
    assert agreement(torch, L.rotate(x, cos, sin), wanted) >= 0.999
    narrow = [t.astype(jnp.bfloat16).astype(jnp.float32) for t in (cos, sin)]
    assert agreement(torch, L.rotate(x, *narrow), wanted) < 0.9


def attention_otherwise(q, k, v, mask, scores_of):
    """layers.attention without GQA and with other scores."""
    scores = jnp.where(mask[:, None], scores_of(q, k), jnp.finfo(q.dtype).min)
    weights = jnp.exp(jax.nn.log_softmax(scores.astype(jnp.float32))).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)


def test_bfloat16_attention_rounds_where_the_reference_does(reference):
    torch, olmo3 = reference
    width = 58  # its root is 0.2% from a bfloat16
    arrays = [normal(2, 40, n, width, seed=n, scale=s) for n, s in ((6, 2.0), (2, 2.0), (2, 1.0))]
    ours, theirs = zip(*(both(torch, a) for a in arrays), strict=True)
    mask = L.attention_mask(40, 16)
    added = torch.tensor(np.where(mask, 0, float(torch.finfo(torch.bfloat16).min)))[:, None].bfloat16()
    module = type("Module", (), {"num_key_value_groups": 3, "training": False})
    wanted, _ = olmo3.eager_attention_forward(module, *(t.transpose(1, 2) for t in theirs), added, width**-0.5)
    assert agreement(torch, L.attention(*ours, mask), wanted) >= 0.99

    def product(q, k):
        return jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)

    def right(q, k):
        return (product(q, k).astype(q.dtype).astype(jnp.float32) * np.float32(width**-0.5)).astype(q.dtype)

    controls = {
        "scale rounded to bfloat16": lambda q, k: product(q, k).astype(q.dtype) * width**-0.5,
        "queries scaled before the product": lambda q, k: product(q * jnp.bfloat16(width**-0.5), k).astype(q.dtype),
        "scores never rounded": lambda q, k: product(q, k) * np.float32(width**-0.5),
    }
    q, k, v = ours[0], *(jnp.repeat(x, 3, axis=2) for x in ours[1:])
    assert agreement(torch, attention_otherwise(q, k, v, mask, right), wanted) >= 0.99
    for name, scores_of in controls.items():
        assert agreement(torch, attention_otherwise(q, k, v, mask, scores_of), wanted) < 0.9, name
