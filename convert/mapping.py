"""The one table of names and layouts: every weight of OLMo 3 in each form a checkpoint can have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..olmo_jax.config import Olmo3Config

SAME = "SAME"
TRANSPOSED = "TRANSPOSED"  # (out, in) in torch, (in, out) in JAX; its own inverse


@dataclass(frozen=True)
class Row:
    """One kind of weight. {i} stands for the layer; axes are letters of `sizes`, in the order of the HF tensor."""

    hf: str
    core: str
    jax: str
    layout: str
    axes: tuple[str, ...]  # of the HF tensor
    logical: tuple[str, ...]  # of the JAX leaf, for sharding


# fmt: off
ROWS = (
    #   HF name                                            OLMo-core name                       olmo_jax path                                     layout      HF axes       logical axes (JAX)
    Row("model.embed_tokens.weight",                       "embeddings.weight",                 "embed_tokens/embedding",                         SAME,       ("V", "D"),   ("vocab", "embed")),
    Row("model.layers.{i}.self_attn.q_proj.weight",        "blocks.{i}.attention.w_q.weight",   "layers/{i}/self_attn/q_proj/kernel",             TRANSPOSED, ("NH", "D"),  ("embed", "heads")),
    Row("model.layers.{i}.self_attn.k_proj.weight",        "blocks.{i}.attention.w_k.weight",   "layers/{i}/self_attn/k_proj/kernel",             TRANSPOSED, ("KH", "D"),  ("embed", "kv_heads")),
    Row("model.layers.{i}.self_attn.v_proj.weight",        "blocks.{i}.attention.w_v.weight",   "layers/{i}/self_attn/v_proj/kernel",             TRANSPOSED, ("KH", "D"),  ("embed", "kv_heads")),
    Row("model.layers.{i}.self_attn.o_proj.weight",        "blocks.{i}.attention.w_out.weight", "layers/{i}/self_attn/o_proj/kernel",             TRANSPOSED, ("D", "NH"),  ("heads", "embed")),
    Row("model.layers.{i}.self_attn.q_norm.weight",        "blocks.{i}.attention.q_norm.weight", "layers/{i}/self_attn/q_norm/scale",             SAME,       ("NH",),      ("norm",)),
    Row("model.layers.{i}.self_attn.k_norm.weight",        "blocks.{i}.attention.k_norm.weight", "layers/{i}/self_attn/k_norm/scale",             SAME,       ("KH",),      ("norm",)),
    Row("model.layers.{i}.mlp.gate_proj.weight",           "blocks.{i}.feed_forward.w1.weight", "layers/{i}/mlp/gate_proj/kernel",                TRANSPOSED, ("F", "D"),   ("embed", "mlp")),
    Row("model.layers.{i}.mlp.up_proj.weight",             "blocks.{i}.feed_forward.w3.weight", "layers/{i}/mlp/up_proj/kernel",                  TRANSPOSED, ("F", "D"),   ("embed", "mlp")),
    Row("model.layers.{i}.mlp.down_proj.weight",           "blocks.{i}.feed_forward.w2.weight", "layers/{i}/mlp/down_proj/kernel",                TRANSPOSED, ("D", "F"),   ("mlp", "embed")),
    Row("model.layers.{i}.post_attention_layernorm.weight",   "blocks.{i}.attention_norm.weight",    "layers/{i}/post_attention_layernorm/scale",   SAME,       ("D",),       ("norm",)),
    Row("model.layers.{i}.post_feedforward_layernorm.weight", "blocks.{i}.feed_forward_norm.weight", "layers/{i}/post_feedforward_layernorm/scale", SAME,       ("D",),       ("norm",)),
    Row("model.norm.weight",                               "lm_head.norm.weight",               "norm/scale",                                     SAME,       ("D",),       ("norm",)),
    Row("lm_head.weight",                                  "lm_head.w_out.weight",              "lm_head/kernel",                                 TRANSPOSED, ("V", "D"),   ("embed", "vocab")),
)
# fmt: on


@dataclass(frozen=True)
class Weight:
    """One weight of one model: a row with its layer filled in and its axes as numbers."""

    hf: str
    core: str
    jax: str
    layout: str
    shape: tuple[int, ...]  # of the HF tensor
    logical: tuple[str, ...]
    layer: int | None

    @property
    def jax_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.layout == TRANSPOSED else self.shape


def sizes(config: Olmo3Config) -> dict[str, int]:
    """Axis letters to lengths: V vocabulary, D width, NH query heads x head width, KH kv heads x head width, F MLP width."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "NH": config.num_attention_heads * config.head_dim,
        "KH": config.num_key_value_heads * config.head_dim,
        "F": config.intermediate_size,
    }


def weights(config: Olmo3Config) -> list[Weight]:
    """Every weight that a checkpoint of this config must hold: embedding, layers in order, final norm, head if untied."""
    lengths = sizes(config)

    def fill(row: Row, layer: int | None) -> Weight:
        shape = tuple(lengths[axis] for axis in row.axes)
        names = (name.replace("{i}", str(layer)) for name in (row.hf, row.core, row.jax))
        return Weight(*names, row.layout, shape, row.logical, layer)

    found = [fill(ROWS[0], None)]
    for layer in range(config.num_hidden_layers):
        found += [fill(row, layer) for row in ROWS if "{i}" in row.hf]
    found += [fill(row, None) for row in ROWS[1:] if "{i}" not in row.hf]
    return [w for w in found if not (config.tie_word_embeddings and w.hf == "lm_head.weight")]


def apply_layout(layout: str, array: np.ndarray) -> np.ndarray:
    """HF axes to JAX axes or back (each layout is its own inverse), as a view."""
    return array.T if layout == TRANSPOSED else array
