"""Faults of rotary embedding and attention. What stands in the place of a module: change(config, module, *its arguments)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...olmo_jax import layers as L


# Rotary: x [B, T, heads, H].
def interleaved(c, rotary, x, inputs):
    """Dimension 2 d pairs with 2 d + 1, not d with d + H/2."""
    wide = x.astype(jnp.float32)
    first, second = wide[..., 0::2], wide[..., 1::2]
    cos, sin = inputs.cos[:, :, None], inputs.sin[:, :, None]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def next_position(c, rotary, x, inputs):
    """Turned by the position of the next token (the last token by the first's)."""
    return L.rotate(x, jnp.roll(inputs.cos, -1, axis=1), jnp.roll(inputs.sin, -1, axis=1))


def not_turned(c, rotary, x, inputs):
    return x


def turned_twice(c, rotary, x, inputs):
    return rotary(rotary(x, inputs), inputs)


def turned_by_head(c, rotary, x, inputs):
    """Heads and positions exchanged: turned by the number of the head."""
    heads = x.shape[2]
    return L.rotate(x.swapaxes(1, 2), inputs.cos[:, :heads], inputs.sin[:, :heads]).swapaxes(1, 2)


def rotary_in_own_dtype(c, rotary, x, inputs):
    """Tables, products and sums in the dtype of the activations."""
    cos, sin = inputs.cos[:, :, None].astype(x.dtype), inputs.sin[:, :, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# Attention: q [B, T, N, H], k and v [B, S, K, H].
def attend(q, k, v, mask, *, scale=None, change_scores=None, softmax=None, kv_of=None):
    """As layers.attention, with every kv head repeated: kv_of [N] says which one a query head reads.

    change_scores(scores [B, N, T, S]) comes after the scale and before the mask; softmax(scores, v's dtype) -> weights.
    """
    heads, width = q.shape[2:]
    kv_of = np.arange(heads) // (heads // k.shape[2]) if kv_of is None else kv_of
    exact = {"precision": L.PRECISION, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("btnh,bsnh->bnts", q, k[:, :, kv_of], **exact).astype(q.dtype)
    scores = (scores.astype(jnp.float32) * np.float32(width**-0.5 if scale is None else scale)).astype(q.dtype)
    scores = scores if change_scores is None else change_scores(scores)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1) if softmax is None else softmax(scores)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(q.dtype), v[:, :, kv_of], **exact).astype(q.dtype)


def no_score_scale(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, scale=1.0)


def scale_times(factor: float):
    return lambda c, mix, q, k, v, inputs: attend(q, k, v, inputs.mask, scale=factor * q.shape[-1] ** -0.5)


def scale_twice(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, scale=1 / q.shape[-1])


def scale_of_width(c, mix, q, k, v, inputs):
    """From the width over the heads, not from the config's head_dim."""
    return attend(q, k, v, inputs.mask, scale=(c.hidden_size / c.num_attention_heads) ** -0.5)


def capped_scores(c, mix, q, k, v, inputs):
    return attend(
        q, k, v, inputs.mask, change_scores=lambda s: (50 * jnp.tanh(s.astype(jnp.float32) / 50)).astype(s.dtype)
    )


def softmax_with_sink(c, mix, q, k, v, inputs):
    """One is added to the sum that weights are divided by."""

    def softmax(scores):
        wide = scores.astype(jnp.float32)
        top = jnp.maximum(wide.max(-1, keepdims=True), 0)
        grown = jnp.exp(wide - top)
        return grown / (grown.sum(-1, keepdims=True) + jnp.exp(-top))

    return attend(q, k, v, inputs.mask, softmax=softmax)


def softmax_bfloat16(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, softmax=lambda s: jax.nn.softmax(s.astype(jnp.bfloat16), axis=-1))


def softmax_in_own_dtype(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, softmax=lambda s: jax.nn.softmax(s, axis=-1))


def weights_bfloat16(c, mix, q, k, v, inputs):
    """Attention weights rounded to bfloat16 before they meet the values."""

    def softmax(scores):
        return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)

    return attend(q, k, v, inputs.mask, softmax=softmax)


def scores_not_rounded(c, mix, q, k, v, inputs):
    """Scores and weights stay in float32 until the values are summed."""
    return L.attention(*(x.astype(jnp.float32) for x in (q, k, v)), inputs.mask).astype(q.dtype)


def kv_heads_tiled(c, mix, q, k, v, inputs):
    """Query head n reads kv head n % K, not n // G."""
    return attend(q, k, v, inputs.mask, kv_of=np.arange(q.shape[2]) % k.shape[2])


def kv_heads_turned(c, mix, q, k, v, inputs):
    """Query head n reads the kv head after its own."""
    kv_of = np.arange(q.shape[2]) // (q.shape[2] // k.shape[2])
    return attend(q, k, v, inputs.mask, kv_of=(kv_of + 1) % k.shape[2])


def first_kv_head(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, kv_of=np.zeros(q.shape[2], int))


def keys_for_values(c, mix, q, k, v, inputs):
    return mix(q, k, k, inputs)


def norm_after_rotary(c, attn, x, inputs):
    """q and k normalised after they were turned, not before."""
    batch, length = x.shape[:2]
    q, k, v = (proj(x) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))

    def heads(y):
        return y.reshape(batch, length, -1, attn.head_dim)

    q = heads(attn.q_norm(attn.q_rotary(heads(q), inputs).reshape(q.shape)))
    k = heads(attn.k_norm(attn.k_rotary(heads(k), inputs).reshape(k.shape)))
    return attn.o_proj(attn.mix(q, k, heads(v), inputs).reshape(batch, length, -1))
