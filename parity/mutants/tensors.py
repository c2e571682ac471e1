"""Whole tensors under wrong names or in wrong layouts: change(config, tensors) -> the changed ones. By module name, in HF orientation: (out, in), (V, D), (width,).

In a layer the names are relative to it. Values keep the dtype they are stored in.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..batches import special_ids
from .places import EMBEDDING, GATE, HEAD, UP, K, O, Q, V

SEED = 20251201


def exchange(a: str, b: str):
    return lambda c, t: {a: t[b], b: t[a]}


def transposed(name: str):
    return lambda c, t: {name: np.ascontiguousarray(t[name].T)}


def reshaped(name: str):
    """Read in the other order: reshaped to the shape that a transposition would have given."""
    return lambda c, t: {name: t[name].reshape(t[name].shape[::-1]).T.copy()}


def by_heads(name: str, order):
    """Heads of a projection's rows in another order: order(config, heads) -> indices."""

    def change(c, t):
        rows = t[name].reshape(-1, c.head_dim, t[name].shape[1])
        return {name: rows[order(c, len(rows))].reshape(t[name].shape)}

    return change


def first_two(c, heads):
    return np.r_[1, 0, 2:heads] if heads > 1 else np.arange(heads)


def backwards(c, heads):
    return np.arange(heads)[::-1]


def tiled(c, heads):
    """As if query head n read kv head n % K."""
    return np.arange(heads).reshape(c.num_key_value_heads, -1).T.reshape(-1)


def interleave(*names: str):
    """Rows as interleaved rotary wants them: the halves of each head dealt out in turn."""
    return lambda c, t: {n: _halves(t[n], c, (0, 2, 1, 3), (2, c.head_dim // 2)) for n in names}


def deinterleave(*names: str):
    """The inverse, on rows that were never interleaved."""
    return lambda c, t: {n: _halves(t[n], c, (0, 2, 1, 3), (c.head_dim // 2, 2)) for n in names}


def halves_exchanged(*names: str):
    """The two halves of each head exchanged."""
    return lambda c, t: {n: _rolled_heads(t[n], c) for n in names}


def _halves(array, c, axes, split):
    return array.reshape(-1, *split, array.shape[1]).transpose(axes).reshape(array.shape)


def _rolled_heads(array, c):
    return np.roll(array.reshape(-1, c.head_dim, array.shape[1]), c.head_dim // 2, axis=1).reshape(array.shape)


def columns_by_width(c, t):
    """o_proj reads heads and head width in the other order: [H, N] for [N, H]."""
    columns = t[O].reshape(len(t[O]), c.head_dim, c.num_attention_heads)
    return {O: columns.transpose(0, 2, 1).reshape(t[O].shape)}


def fused_by_group(c, t):
    """A fused tensor that holds q, k and v kv head by kv head, cut as if all of q came first."""
    kv, width = c.num_key_value_heads, t[Q].shape[1]
    parts = [t[n].reshape(kv, -1, width) for n in (Q, K, V)]
    return _cut(np.concatenate(parts, axis=1).reshape(-1, width), t, (Q, K, V))


def fused_in_other_order(c, t):
    """A fused tensor of k, q, v cut as q, k, v."""
    return _cut(np.concatenate([t[K], t[Q], t[V]]), t, (Q, K, V))


def gate_and_up_in_turns(c, t):
    """A fused tensor whose rows are gate and up in turns, cut into halves."""
    return _cut(np.stack([t[GATE], t[UP]], axis=1).reshape(-1, t[GATE].shape[1]), t, (GATE, UP))


def _cut(fused, t, names):
    ends = np.cumsum([len(t[n]) for n in names])
    return {n: fused[end - len(t[n]) : end] for n, end in zip(names, ends, strict=True)}


def norm_by_width(name: str):
    """A norm's scale reads heads and head width in the other order."""
    return lambda c, t: {name: t[name].reshape(-1, c.head_dim).T.reshape(-1)}


def first_head_for_all(name: str):
    """A norm's scale of one head's width, repeated."""
    return lambda c, t: {name: np.tile(t[name][: c.head_dim], len(t[name]) // c.head_dim)}


def layers_by(order):
    """Whole layers in another order: layer i gets the weights of layer order(config)[i]."""

    def change(c, t):
        names = [n.removeprefix("layers.0.") for n in t if n.startswith("layers.0.")]
        return {f"layers.{i}.{n}": t[f"layers.{j}.{n}"] for i, j in enumerate(order(c)) for n in names if i != j}

    return change


def by_name(c):
    """Sorted as text: 10 comes before 2."""
    return sorted(range(c.num_hidden_layers), key=str)


def last_two(c):
    order = list(range(c.num_hidden_layers))
    return [*order[:-2], *order[-2:][::-1]]


def reversed_order(c):
    return list(range(c.num_hidden_layers))[::-1]


def one_late(c):
    """Layer 0's weights twice, the last layer's never."""
    return [max(i - 1, 0) for i in range(c.num_hidden_layers)]


def stacked_the_other_way(c):
    """Layers stacked as [4, rest] and taken apart as [rest, 4]."""
    order = np.arange(c.num_hidden_layers // 4 * 4).reshape(-1, 4).T.reshape(-1)
    return [*order.tolist(), *range(len(order), c.num_hidden_layers)]


def rows_down(name: str):
    """Every row of the vocabulary one lower: a row was put in before them."""
    return lambda c, t: {name: np.roll(t[name], 1, axis=0)}


def upper_rows_down(name: str):
    """The upper half of the vocabulary one lower."""

    def change(c, t):
        half = len(t[name]) // 2
        return {name: np.concatenate([t[name][:half], np.roll(t[name][half:], 1, axis=0)])}

    return change


def special_ids_exchanged(c, t):
    """The rows of two special ids exchanged in embedding and head."""
    a, b = _two_special(c)
    order = np.arange(c.vocab_size)
    order[[a, b]] = b, a
    return {n: t[n][order] for n in (EMBEDDING, HEAD) if n in t}


def _two_special(c):
    found = special_ids(c)
    return found[:2] if len(found) > 1 else (0, c.vocab_size - 1)


def head_from_embedding(c, t):
    return {HEAD: t[EMBEDDING]}


def never_restored(name: str):
    return lambda c, t: {name: np.zeros_like(t[name])}


def at_random(name: str):
    """Left at a random start of the same size."""

    def change(c, t):
        own = t[name].astype(np.float64)
        drawn = np.random.default_rng(SEED).normal(own.mean(), max(own.std(), 1e-3), own.shape)
        return {name: drawn.astype(t[name].dtype)}

    return change


def of_next_layer(c, t):
    """One layer's q_proj read twice: the middle layer has the one before it."""
    i = c.num_hidden_layers // 2
    return {f"layers.{i}.{Q}": t[f"layers.{max(i - 1, 0)}.{Q}"]}


def bits_as_float16(name: str):
    """Bytes of bfloat16 read as float16."""

    def change(c, t):
        bits = t[name].astype(ml_dtypes.bfloat16).view(np.float16)
        return {name: bits.astype(t[name].dtype)}

    return change
