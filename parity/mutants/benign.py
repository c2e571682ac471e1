"""Other right ways to compute the same thing, which the gate must never fail. In the form of attention.py."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...olmo_jax import layers as L
from ...olmo_jax.model import from_tree
from ..candidate import logits_function
from .attention import attend

BLOCK = 160  # keys taken at a time by attention in blocks; divides no length that is run
COLUMNS = 77  # of the head, computed at a time


def as_it_is(c, module, *args):
    return module(*args)


def divided_by_root(c, norm, x):
    """A division instead of the reciprocal root."""
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + norm.eps)
    return (norm.scale[...].astype(jnp.float32) * y).astype(x.dtype)


def rotated_halves(c, rotary, x, inputs):
    """x cos + rotate_half(x) sin, with tables of the whole head width, as the reference writes it."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = (jnp.concatenate([t, t], axis=-1)[:, :, None] for t in (inputs.cos, inputs.sin))
    return (wide * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


def rotated_as_complex(c, rotary, x, inputs):
    """Pairs as complex numbers times e^(i angle)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first + 1j * second) * (inputs.cos + 1j * inputs.sin)[:, :, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def kv_heads_repeated(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask)


def keys_scaled(c, mix, q, k, v, inputs):
    """k is scaled, not the scores."""
    k = (k.astype(jnp.float32) * np.float32(q.shape[-1] ** -0.5)).astype(k.dtype)
    return attend(q, k, v, inputs.mask, scale=1.0)


def masked_with_infinity(c, mix, q, k, v, inputs):
    def softmax(scores):
        return jax.nn.softmax(jnp.where(inputs.mask[:, None], scores.astype(jnp.float32), -jnp.inf), axis=-1)

    return attend(q, k, v, jnp.ones_like(inputs.mask), softmax=softmax)


def attention_in_blocks(c, mix, q, k, v, inputs):
    """Keys in blocks with a running maximum and sum, as flash kernels do; nothing rounded until the end."""
    heads, width, group = q.shape[2], q.shape[3], q.shape[2] // k.shape[2]
    qs, ks, vs = q.astype(jnp.float32), *(jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    shape = (q.shape[0], heads, q.shape[1], 1)
    top, total, mixed = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape[:3], width))
    for start in range(0, k.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        scores = jnp.einsum("btnh,bsnh->bnts", qs, ks[:, part], precision=L.PRECISION) * width**-0.5
        scores = jnp.where(inputs.mask[:, None, :, part], scores, -jnp.inf)
        higher = jnp.maximum(top, scores.max(-1, keepdims=True))
        shift = jnp.where(jnp.isfinite(higher), higher, 0)
        grown, kept = jnp.exp(scores - shift), jnp.exp(top - shift)
        total = total * kept + grown.sum(-1, keepdims=True)
        mixed = mixed * kept + jnp.einsum("bnts,bsnh->bnth", grown, vs[:, part], precision=L.PRECISION)
        top = higher
    return (mixed / total).swapaxes(1, 2).astype(q.dtype)


def qkv_in_one(c, attn, x, inputs):
    """One product with the three kernels side by side."""
    kernels = [p.kernel[...] for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
    ends = np.cumsum([kernel.shape[1] for kernel in kernels])[:-1]
    q, k, v = jnp.split(L.linear(x, jnp.concatenate(kernels, axis=1)), ends, axis=-1)
    q, k, v = (y.reshape(*x.shape[:2], -1, attn.head_dim) for y in (attn.q_norm(q), attn.k_norm(k), v))
    mixed = attn.mix(attn.q_rotary(q, inputs), attn.k_rotary(k, inputs), v, inputs)
    return attn.o_proj(mixed.reshape(*x.shape[:2], -1))


def gate_and_up_in_one(c, mlp, x):
    kernel = jnp.concatenate([mlp.gate_proj.kernel[...], mlp.up_proj.kernel[...]], axis=1)
    return mlp.down_proj(mlp.swiglu(*jnp.split(L.linear(x, kernel), 2, axis=-1)))


def silu_by_sigmoid(c, swiglu, gate, up):
    wide = gate.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide)).astype(gate.dtype) * up


def summed_backwards(c, linear, x):
    return L.linear(x[..., ::-1], linear.kernel[...][::-1])


def summed_in_parts(c, linear, x):
    """Over the inputs in three parts, as devices that share them do; partial sums in float32."""
    parts = zip(jnp.array_split(x, 3, axis=-1), jnp.array_split(linear.kernel[...], 3, axis=0), strict=True)
    exact = {"precision": L.PRECISION, "preferred_element_type": jnp.float32}
    return sum(jnp.matmul(a, kernel.astype(x.dtype), **exact) for a, kernel in parts).astype(x.dtype)


def head_in_slices(c, head, x):
    """The vocabulary in slices. A tied head has no kernel of its own: it is asked with slices of the tokens."""
    if not hasattr(head, "kernel"):
        return jnp.concatenate([head(part) for part in jnp.array_split(x, 3, axis=1)], axis=1)
    kernel = head.kernel[...]
    parts = (kernel[:, a : a + COLUMNS] for a in range(0, kernel.shape[1], COLUMNS))
    return jnp.concatenate([L.linear(x, part) for part in parts], axis=-1)


def embedding_by_product(c, embed, tokens):
    """Rows picked by a product with ones and zeros, as on devices that share the vocabulary."""
    table = embed.embedding[...].astype(embed.dtype)
    return L.linear(jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype), table)


# Rows of tokens, with tokens, positions, segment_ids [B, T] and the index of the one looked at.
def more_padding(row):
    more = np.arange(1, 38, dtype=np.int32)[None]  # tokens
    tokens = np.concatenate([row.tokens, 0 * more], axis=1)
    return replace(row, tokens=tokens, positions=np.concatenate([row.positions, row.positions[:, -1:] + more], axis=1))


def second_of_two(row):
    """Below another row of the same batch."""
    tokens, positions = np.concatenate([row.tokens[:, ::-1], row.tokens]), np.concatenate([row.positions] * 2)
    return replace(row, tokens=tokens, positions=positions, index=1)


# The whole model in one compiled function, as the gate runs it by default, and scanned over layers.
compiled_whole = logits_function


def scanned(config, tree, dtype):
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)

    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, state, tokens, positions, segment_ids):
        return nnx.merge(graph, state)(tokens, positions, segment_ids).astype(jnp.float32)

    def logits_of(tokens, positions, segment_ids, window=None):
        own = config if window is None else config.replace(sliding_window=window)
        model = from_tree(own, tree, dtype=dtype, scan_layers=True)
        return np.asarray(run(*nnx.split(model), tokens, positions, segment_ids))

    return logits_of
