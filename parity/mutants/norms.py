"""Faults of norms. What stands in the place of a module: change(config, module, *its arguments)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...olmo_jax import layers as L


# x is [..., D].
def epsilon_outside(c, norm, x):
    """Added to the root of the mean square, not to the mean square."""
    y = x.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))
    return (norm.scale[...].astype(jnp.float32) * (y / (root + norm.eps))).astype(x.dtype)


def epsilon_times(factor: float):
    return lambda c, norm, x: L.rms_norm(x, norm.scale[...], norm.eps * factor)


def no_epsilon(c, norm, x):
    return L.rms_norm(x, norm.scale[...], 0.0)


def one_plus(c, norm, x):
    return L.rms_norm(x, 1 + norm.scale[...].astype(jnp.float32), norm.eps)


def no_scale(c, norm, x):
    return L.rms_norm(x, jnp.ones_like(norm.scale[...]), norm.eps)


def mean_taken_away(c, norm, x):
    """LayerNorm."""
    y = x.astype(jnp.float32)
    return L.rms_norm((y - y.mean(-1, keepdims=True)).astype(x.dtype), norm.scale[...], norm.eps)


def left_out(c, module, x, *_):
    return x


def per_head(c, norm, x):
    """Each head normalised by itself, after the split."""
    heads = x.reshape(*x.shape[:-1], -1, c.head_dim)
    scale = norm.scale[...].reshape(-1, c.head_dim)
    return L.rms_norm(heads, scale, norm.eps).reshape(x.shape)


def norm_bfloat16(c, norm, x):
    """Mean square, root and product in bfloat16, in a float32 model too."""
    y, scale = x.astype(jnp.bfloat16), norm.scale[...].astype(jnp.bfloat16)
    return (scale * (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.eps))).astype(x.dtype)


def cast_before_scale(c, norm, x):
    """Llama's order: rounded to the dtype of the activations, then multiplied."""
    return norm.scale[...].astype(x.dtype) * L.rms_norm(x, jnp.ones_like(norm.scale[...]), norm.eps)


def squares_in_own_dtype(c, norm, x):
    """Squares and their mean in the dtype of the activations."""
    mean = jnp.mean(x * x, axis=-1, keepdims=True).astype(jnp.float32)
    y = x.astype(jnp.float32) * jax.lax.rsqrt(mean + norm.eps)
    return (norm.scale[...].astype(jnp.float32) * y).astype(x.dtype)
