"""The arithmetic of OLMo 3: functions of arrays, each cast where the PyTorch reference casts.

B batch, T query position, S key position, D width, N query heads, K kv heads, G = N / K, H head width.

The activation dtype is the dtype of x. In bfloat16 the casts hold inside fused code only with
--xla_allow_excess_precision=false: by default XLA removes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Without it float32 products are rounded to TF32 on GPUs and to bfloat16 on TPUs. It does not slow bfloat16 inputs.
PRECISION = lax.Precision.HIGHEST


def linear(x, kernel):
    """x [..., I], kernel [I, O] -> [..., O]: products summed in float32, rounded once to x's dtype."""
    y = jnp.matmul(x, kernel.astype(x.dtype), precision=PRECISION, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def embed(tokens, embedding, dtype):
    """tokens [B, T], embedding [V, D] -> [B, T, D]. A token outside the vocabulary gives NaN, not the nearest row.

    The NaN reaches the whole row (attention gives it weight 0, and 0 x NaN is NaN): pad with tokens that exist.
    """
    tokens = jnp.where(tokens < 0, embedding.shape[0], tokens)  # or -1 would be the last row
    return embedding.at[tokens].get(mode="fill", fill_value=jnp.nan).astype(dtype)


def rms_norm(x, scale, eps):
    """x [..., D], scale [D] -> [..., D]. Scaled in float32 and cast afterwards (Llama casts first)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (scale.astype(jnp.float32) * y).astype(x.dtype)


def swiglu(gate, up):
    """silu(gate) * up, all [..., F]. silu in float32, rounded once; then the product is rounded."""
    wide = gate.astype(jnp.float32)
    return (wide / (1 + jnp.exp(-wide))).astype(gate.dtype) * up


def rotary_cos_sin(inv_freq, attention_factor, positions):
    """inv_freq [H/2] radians per token, positions [B, T] -> cos and sin, each [B, T, H/2] float32.

    float32 on purpose: in bfloat16 position 257 rounds to 256.
    """
    angles = positions.astype(jnp.float32)[..., None] * inv_freq.astype(np.float32)
    return jnp.cos(angles) * np.float32(attention_factor), jnp.sin(angles) * np.float32(attention_factor)


def rotate(x, cos, sin):
    """x [B, T, heads, H], cos and sin [B, T, H/2] -> x turned by its position. Half-split: dimension d pairs with d + H/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def documents(segment_ids):
    """segment_ids [B, T] -> (document [B, T], position [B, T]): a document is a run of equal adjacent ids.

    Runs, not equal ids anywhere in the row: an id used again further on is another document, so packers that start
    counting anew cannot make documents see each other.
    """
    starts = segment_ids != jnp.roll(segment_ids, 1, axis=1)
    starts = starts.at[:, 0].set(True)
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begun = lax.cummax(jnp.where(starts, index, 0), axis=1)  # [B, T], where the token's document begins
    return jnp.cumsum(starts.astype(jnp.int32), axis=1), index - begun


def attention_mask(length, window=None, document=None):
    """Which keys a query sees, bool [1 or B, T, S]: itself and what came before, at most `window` tokens in all.

    From the order of tokens in the row, as the reference has it, never from position numbers.
    document [B, T]: other documents of a packed row are not seen.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]  # [T, S], tokens from key to query
    seen = distance >= 0
    if window is not None:
        seen &= distance < window  # the query's own token is one of the window's
    mask = jnp.asarray(seen)[None]
    return mask if document is None else mask & (document[:, :, None] == document[:, None, :])


def attention(q, k, v, mask):
    """q [B, T, N, H], k and v [B, S, K, H], mask [1 or B, T, S] -> [B, T, N, H]. Query head n reads kv head n // G."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    exact = {"precision": PRECISION, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, **exact).astype(q.dtype)
    # torch multiplies a bfloat16 tensor by a Python float in float32; JAX would round the scale to bfloat16 first.
    scores = (scores.astype(jnp.float32) * np.float32(width**-0.5)).astype(q.dtype)
    # The reference adds the dtype's lowest number to unseen scores; after the softmax both are exactly 0.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v, **exact).astype(q.dtype)
    return mixed.reshape(batch, length, heads, width)
