"""Faults of reading the config, and of masks and rotary tables made from it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from ...olmo_jax import layers as L
from ...olmo_jax.config import FULL, LAYER_TYPES, SLIDING, Olmo3Config, RopeParameters
from ...olmo_jax.rope import default_attention_factor, rope_tables
from ..batches import original_context


def window_by(tokens: int):
    """The window is wider by so many tokens (narrower where negative), and never under 1."""
    return lambda c: c.replace(sliding_window=max(1, (c.sliding_window or 0) + tokens))


def epsilon_times(factor: float):
    return lambda c: c.replace(rms_norm_eps=c.rms_norm_eps * factor)


def theta_times(factor: float):
    return lambda c: _rope(c, lambda r: dataclasses.replace(r, rope_theta=r.rope_theta * factor))


def theta_10000(c):
    return _rope(c, lambda r: dataclasses.replace(r, rope_theta=10000.0))


def turn_types(c):
    """The pattern of layer types begins one layer early."""
    return c.replace(layer_types=(*c.layer_types[1:], c.layer_types[0]))


def derive_types(c):
    """Three sliding layers and one full, whatever the config lists."""
    types = tuple(FULL if i % 4 == 3 else SLIDING for i in range(len(c.layer_types)))
    rope = {t: c.rope.get(t, next(iter(c.rope.values()))) for t in LAYER_TYPES}
    return c.replace(layer_types=types, rope=rope, sliding_window=c.sliding_window or 64)


def one_table(c):
    """Sliding layers get the full layers' table."""
    return c.replace(rope={t: c.rope[FULL] for t in c.rope})


def no_yarn(c):
    return _rope(c, lambda r: RopeParameters("default", r.rope_theta))


def linear_for_yarn(c):
    return _rope(c, lambda r: RopeParameters("linear", r.rope_theta, factor=r.factor) if r.rope_type == "yarn" else r)


def theta_for_yarn(c):
    """NTK-aware: theta grows so that the slowest dimension is stretched by the factor."""

    def change(r):
        if r.rope_type != "yarn":
            return r
        return RopeParameters("default", r.rope_theta * r.factor ** (c.head_dim / max(c.head_dim - 2, 1)))

    return _rope(c, change)


def attention_factor(change):
    """change(attention factor, factor) -> what is used instead."""
    return lambda c: _yarn(c, lambda r: {"attention_factor": change(r.attention_factor, r.factor)})


def factor_left_out(own, factor):
    return 1.0


def factor_squared(own, factor):
    return own * own


def factor_of_factor(own, factor):
    """The formula applied to its own result."""
    return default_attention_factor(own)


def factor_as_log(own, factor):
    """0.1 ln(factor) without the one that is added to it."""
    return max(0.1 * math.log(factor), 1e-3)


def factor_by_formula(own, factor):
    """The formula, where the config states a number of its own."""
    return default_attention_factor(factor)


def other_truncate(c):
    return _yarn(c, lambda r: {"truncate": not r.truncate})


def context_from_positions(c):
    """YaRN's original context taken from max_position_embeddings."""
    return _yarn(c, lambda r: {"original_max_position_embeddings": c.max_position_embeddings})


def context_by_factor(c):
    """YaRN's original context multiplied by the factor."""
    return _yarn(
        c, lambda r: {"original_max_position_embeddings": round(r.original_max_position_embeddings * r.factor)}
    )


def guess_yarn(c):
    """YaRN on full layers, guessed from the length, where the config has none."""
    r = c.rope[FULL]
    factor = 8.0
    guessed = RopeParameters("yarn", r.rope_theta, factor, max(1, c.max_position_embeddings // 8), 32.0, 1.0,
                             default_attention_factor(factor), True)  # fmt: skip
    return c.replace(rope={**c.rope, FULL: guessed})


def _rope(c: Olmo3Config, change):
    return c.replace(rope={t: change(r) for t, r in c.rope.items()})


def _yarn(c: Olmo3Config, change):
    return _rope(c, lambda r: dataclasses.replace(r, **change(r)) if r.rope_type == "yarn" else r)


# Masks: change(config, inputs, row, layer) -> inputs. A row has tokens, positions and segment_ids [B, T].
def no_window(c, inputs, row, layer):
    """A sliding layer sees everything before it; its rotary table stays."""
    return _masked(inputs, row, None)


def window_everywhere(c, inputs, row, layer):
    return _masked(inputs, row, c.sliding_window)


def no_causality(c, inputs, row, layer):
    """A query sees what comes after it too, within its document and window."""
    length = row.tokens.shape[1]
    distance = np.abs(np.arange(length)[:, None] - np.arange(length)[None, :])
    mask = jnp.asarray(distance < (c.window(layer) or length))[None]
    document = _document(row)
    return inputs._replace(mask=mask if document is None else mask & _same(document))


def not_itself(c, inputs, row, layer):
    """A query does not see its own token; the first of a document, which would see nothing, does."""
    own = jnp.eye(row.tokens.shape[1], dtype=bool)[None]
    alone = inputs.mask.sum(-1, keepdims=True) == 1
    return inputs._replace(mask=inputs.mask & (~own | alone))


def no_documents(c, inputs, row, layer):
    """Documents of a packed row see each other."""
    return inputs._replace(mask=L.attention_mask(row.tokens.shape[1], c.window(layer)))


def documents_by_id(c, inputs, row, layer):
    """The mask lets a query see the first token of the row, whatever its document."""
    first = jnp.arange(row.tokens.shape[1]) == 0
    return inputs._replace(mask=inputs.mask | first[None, None])


def mask_of_first_row(c, inputs, row, layer):
    return inputs._replace(mask=inputs.mask[:1])


def rotary_of_first_row(c, inputs, row, layer):
    return inputs._replace(cos=inputs.cos[:1], sin=inputs.sin[:1])


def lose_keys(c, inputs, row, layer):
    """Every 32nd key is lost, as by a kernel that is wrong at the edge of its blocks; its own query still sees it."""
    length = row.tokens.shape[1]
    kept = np.eye(length, dtype=bool) | (np.arange(length) % 32 != 31)
    return inputs._replace(mask=inputs.mask & jnp.asarray(kept)[None])


def _masked(inputs, row, window):
    return inputs._replace(mask=L.attention_mask(row.tokens.shape[1], window, _document(row)))


def _document(row):
    return None if row.segment_ids is None else L.documents(row.segment_ids)[0]


def _same(document):
    return document[:, :, None] == document[:, None, :]


# Rotary tables, in the same form.
def positions_from_one(c, inputs, row, layer):
    return _turned(c, inputs, row.positions + 1, layer)


def positions_not_restarted(c, inputs, row, layer):
    """Positions go on from document to document of a packed row."""
    length = row.tokens.shape[1]
    first = row.positions[:, :1] if row.segment_ids is None else 0
    return _turned(c, inputs, first + np.arange(length, dtype=np.int32)[None], layer)


def positions_clamped(c, inputs, row, layer):
    """Positions stop at the end of the original context, or at 255 where there is none (a byte)."""
    last = (original_context(c) or 256) - 1
    return _turned(c, inputs, np.minimum(row.positions, last), layer)


def no_rotary(c, inputs, row, layer):
    return inputs._replace(cos=jnp.ones_like(inputs.cos), sin=jnp.zeros_like(inputs.sin))


def other_direction(c, inputs, row, layer):
    return inputs._replace(sin=-inputs.sin)


def half_of_it(c, inputs, row, layer):
    """Only the faster half of the dimensions turns."""
    still = np.arange(inputs.cos.shape[-1]) >= (inputs.cos.shape[-1] + 1) // 2
    return inputs._replace(cos=jnp.where(still, 1.0, inputs.cos), sin=jnp.where(still, 0.0, inputs.sin))


def tables_bfloat16(c, inputs, row, layer):
    return inputs._replace(cos=_rounded(inputs.cos), sin=_rounded(inputs.sin))


def frequencies_bfloat16(c, inputs, row, layer):
    """Inverse frequencies were rounded with the rest of the model."""
    table = rope_tables(c)[c.layer_types[layer]]
    rounded = np.asarray(_rounded(jnp.asarray(table.inv_freq)))
    cos, sin = L.rotary_cos_sin(rounded, table.attention_factor, row.positions)
    return inputs._replace(cos=cos, sin=sin)


def positions_bfloat16(c, inputs, row, layer):
    """Positions in bfloat16: from 256 on they are even, from 512 on multiples of four."""
    return _turned(c, inputs, _rounded(jnp.asarray(row.positions, jnp.float32)), layer)


def _turned(c, inputs, positions, layer):
    table = rope_tables(c)[c.layer_types[layer]]
    cos, sin = L.rotary_cos_sin(table.inv_freq, table.attention_factor, jnp.asarray(positions))
    return inputs._replace(cos=cos, sin=sin)


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)
