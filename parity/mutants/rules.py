"""What a checkpoint must have for a fault to be planted, or to show: each rule gives the reason why not, or None."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...olmo_jax.config import FULL, SLIDING
from .kinds import Facts
from .places import K_NORM, Q_NORM
from .values import unused_id


def yarn(f: Facts) -> str | None:
    return None if _scaled(f) else "no layer has YaRN"


def yarn_and_sliding(f: Facts) -> str | None:
    return yarn(f) or (None if SLIDING in f.config.layer_types else "no layer slides")


def no_yarn_yet(f: Facts) -> str | None:
    return "the config has YaRN" if _scaled(f) else (None if FULL in f.config.layer_types else "every layer slides")


def sliding(f: Facts) -> str | None:
    return None if SLIDING in f.config.layer_types else "no layer slides: the config has no window"


def untied(f: Facts) -> str | None:
    return "the head is tied to the embedding" if f.config.tie_word_embeddings else None


def tied(f: Facts) -> str | None:
    return None if f.config.tie_word_embeddings else "the head is not tied"


def groups(f: Facts) -> str | None:
    c = f.config
    if c.num_attention_heads == c.num_key_value_heads:
        return "every query head has a kv head of its own"
    return several_kv_heads(f)


def several_kv_heads(f: Facts) -> str | None:
    return "there is one kv head" if f.config.num_key_value_heads == 1 else None


def several_heads(f: Facts) -> str | None:
    return "there is one head" if f.config.num_attention_heads == f.config.num_key_value_heads == 1 else None


def other_head_dim(f: Facts) -> str | None:
    c = f.config
    return "head_dim is the width over the heads" if c.head_dim * c.num_attention_heads == c.hidden_size else None


def eleven_layers(f: Facts) -> str | None:
    return "names of up to ten layers sort alike as text and as numbers" if f.config.num_hidden_layers <= 10 else None


def an_unused_id(f: Facts) -> str | None:
    return "the built-in sequences hold every token" if unused_id(f.config) is None else None


def scales_not_ones(*names: str):
    """Names as in the entry: relative to the layer, or the model's own."""

    def rule(f: Facts) -> str | None:
        scales = [f.tensors[n] for n in _full_names(f, names)]
        return "the norms' scales are ones" if all((s == 1).all() for s in scales) else None

    return rule


def not_bfloat16(name: str):
    def rule(f: Facts) -> str | None:
        array = f.tensors[name].astype(np.float32)
        same = np.array_equal(array.astype(ml_dtypes.bfloat16).astype(np.float32), array)
        return f"{name} holds nothing but bfloat16 values" if same else None

    return rule


def scales_differ_within_pairs(f: Facts) -> str | None:
    """Rotary keeps the mean square of q and k, so a norm can come after it unless it multiplies a pair unevenly."""
    half = f.config.head_dim // 2
    for name in _full_names(f, (Q_NORM, K_NORM)):
        scale = f.tensors[name].reshape(-1, 2, half)
        if not np.array_equal(scale[:, 0], scale[:, 1]):
            return None
    types = {f.config.layer_types[i] for i in f.layers}
    if any(f.config.rope[t].rope_type == "yarn" and f.config.rope[t].attention_factor != 1 for t in types):
        return None  # the norm takes the attention factor away again
    return "rotary keeps the mean square, and both scales of a rotary pair are equal"


def epsilon(times: float):
    """The inverse root of a norm whose epsilon is so many times as large; 0 where it was left out."""
    return lambda square, eps: (square + times * eps) ** -0.5


def epsilon_outside(square: float, eps: float) -> float:
    return 1 / (square**0.5 + eps)


def never_shows_relative(f: Facts) -> str | None:
    return "rotary is relative: the same shift of all positions of a document changes no score"


def _scaled(f: Facts) -> bool:
    return any(r.rope_type == "yarn" for r in f.config.rope.values())


def _full_names(f: Facts, names) -> list[str]:
    return [f"layers.{i}.{n}" for i in f.layers for n in names] if f.layers else list(names)
