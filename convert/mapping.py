"""The one table of names and layouts: every weight of OLMo 3 in each form a checkpoint can have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..olmo_jax.config import Olmo3Config

SAME = "SAME"
TRANSPOSED = "TRANSPOSED"  # (out, in) in torch, (in, out) in JAX; its own inverse
# From a leaf of olmo_jax to MaxText's: split_heads goes there, join_heads back.
SPLIT_OUT = "SPLIT_OUT"  # (in, heads x width) as (in, heads, width)
SPLIT_IN = "SPLIT_IN"  # (heads x width, out) as (heads, width, out)
SPLIT_AXIS = {SPLIT_OUT: 1, SPLIT_IN: 0}  # which axis of our leaf becomes two
STACK_AXIS = 1  # of a leaf that holds one layer of every block of a scan (MaxText's param_scan_axis)
MAXTEXT_ROOT = "params/params"
MAXTEXT_CYCLE = 4  # layers in a block of its scan: inhomogeneous_layer_cycle_interval of its olmo3


@dataclass(frozen=True)
class Row:
    """One kind of weight. {i} stands for the layer, {layer} for where MaxText keeps it; axes are letters of `sizes`, in
    the order of the HF tensor."""

    hf: str
    core: str
    jax: str
    layout: str
    axes: tuple[str, ...]  # of the HF tensor
    logical: tuple[str, ...]  # of the JAX leaf, for sharding
    maxtext: str  # below MAXTEXT_ROOT
    split: str  # from the JAX leaf to MaxText's


# fmt: off
ROWS = (
    #   HF name                                            OLMo-core name                       olmo_jax path                                     layout      HF axes       logical axes (JAX)     MaxText path                                            from JAX to MaxText
    Row("model.embed_tokens.weight",                       "embeddings.weight",                 "embed_tokens/embedding",                         SAME,       ("V", "D"),   ("vocab", "embed"),    "token_embedder/embedding",                             SAME),
    Row("model.layers.{i}.self_attn.q_proj.weight",        "blocks.{i}.attention.w_q.weight",   "layers/{i}/self_attn/q_proj/kernel",             TRANSPOSED, ("NH", "D"),  ("embed", "heads"),    "decoder/{layer}/attention/query/kernel",               SPLIT_OUT),
    Row("model.layers.{i}.self_attn.k_proj.weight",        "blocks.{i}.attention.w_k.weight",   "layers/{i}/self_attn/k_proj/kernel",             TRANSPOSED, ("KH", "D"),  ("embed", "kv_heads"), "decoder/{layer}/attention/key/kernel",                 SPLIT_OUT),
    Row("model.layers.{i}.self_attn.v_proj.weight",        "blocks.{i}.attention.w_v.weight",   "layers/{i}/self_attn/v_proj/kernel",             TRANSPOSED, ("KH", "D"),  ("embed", "kv_heads"), "decoder/{layer}/attention/value/kernel",               SPLIT_OUT),
    Row("model.layers.{i}.self_attn.o_proj.weight",        "blocks.{i}.attention.w_out.weight", "layers/{i}/self_attn/o_proj/kernel",             TRANSPOSED, ("D", "NH"),  ("heads", "embed"),    "decoder/{layer}/attention/out/kernel",                 SPLIT_IN),
    Row("model.layers.{i}.self_attn.q_norm.weight",        "blocks.{i}.attention.q_norm.weight", "layers/{i}/self_attn/q_norm/scale",             SAME,       ("NH",),      ("norm",),             "decoder/{layer}/attention/query_norm/scale",           SAME),
    Row("model.layers.{i}.self_attn.k_norm.weight",        "blocks.{i}.attention.k_norm.weight", "layers/{i}/self_attn/k_norm/scale",             SAME,       ("KH",),      ("norm",),             "decoder/{layer}/attention/key_norm/scale",             SAME),
    Row("model.layers.{i}.mlp.gate_proj.weight",           "blocks.{i}.feed_forward.w1.weight", "layers/{i}/mlp/gate_proj/kernel",                TRANSPOSED, ("F", "D"),   ("embed", "mlp"),      "decoder/{layer}/mlp/wi_0/kernel",                      SAME),
    Row("model.layers.{i}.mlp.up_proj.weight",             "blocks.{i}.feed_forward.w3.weight", "layers/{i}/mlp/up_proj/kernel",                  TRANSPOSED, ("F", "D"),   ("embed", "mlp"),      "decoder/{layer}/mlp/wi_1/kernel",                      SAME),
    Row("model.layers.{i}.mlp.down_proj.weight",           "blocks.{i}.feed_forward.w2.weight", "layers/{i}/mlp/down_proj/kernel",                TRANSPOSED, ("D", "F"),   ("mlp", "embed"),      "decoder/{layer}/mlp/wo/kernel",                        SAME),
    Row("model.layers.{i}.post_attention_layernorm.weight",   "blocks.{i}.attention_norm.weight",    "layers/{i}/post_attention_layernorm/scale",   SAME,       ("D",),       ("norm",),           "decoder/{layer}/post_self_attention_layer_norm/scale", SAME),
    Row("model.layers.{i}.post_feedforward_layernorm.weight", "blocks.{i}.feed_forward_norm.weight", "layers/{i}/post_feedforward_layernorm/scale", SAME,       ("D",),       ("norm",),           "decoder/{layer}/post_mlp_layer_norm/scale",            SAME),
    Row("model.norm.weight",                               "lm_head.norm.weight",               "norm/scale",                                     SAME,       ("D",),       ("norm",),             "decoder/decoder_norm/scale",                           SAME),
    Row("lm_head.weight",                                  "lm_head.w_out.weight",              "lm_head/kernel",                                 TRANSPOSED, ("V", "D"),   ("embed", "vocab"),    "decoder/logits_dense/kernel",                          SAME),
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
    maxtext: str  # with {layer} still open
    split: str

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
        return Weight(*names, row.layout, shape, row.logical, layer, row.maxtext, row.split)

    found = [fill(ROWS[0], None)]
    for layer in range(config.num_hidden_layers):
        found += [fill(row, layer) for row in ROWS if "{i}" in row.hf]
    found += [fill(row, None) for row in ROWS[1:] if "{i}" not in row.hf]
    return [w for w in found if not (config.tie_word_embeddings and w.hf == "lm_head.weight")]


def apply_layout(layout: str, array: np.ndarray) -> np.ndarray:
    """HF axes to JAX axes or back (each layout is its own inverse), as a view."""
    return array.T if layout == TRANSPOSED else array


@dataclass(frozen=True)
class Place:
    """Where one weight lies in a MaxText tree."""

    path: str  # of the leaf that holds it, keys joined by /
    split: str  # from our leaf to that one
    shape: tuple[int, ...]  # of the weight there; a stacked leaf has STACK_AXIS besides
    block: int | None = None  # of a stacked leaf: index along STACK_AXIS
    blocks: int | None = None  # of a stacked leaf: its length there

    @property
    def name(self) -> str:
        """The name of the stored values: the leaf, and which part of it where it is stacked."""
        return self.path if self.block is None else f"{self.path}[:, {self.block}]"

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Of the whole leaf."""
        return self._stacked(self.shape, self.blocks)

    def leaf_chunk(self, chunk: tuple[int, ...]) -> tuple[int, ...]:
        """The chunk of the leaf for a chunk of ours: each block of a stack has chunks of its own."""
        width = self.shape[SPLIT_AXIS[self.split] + 1] if self.split in SPLIT_AXIS else 1
        return self._stacked(split_heads(self.split, chunk, width), 1)

    def _stacked(self, shape: tuple[int, ...], count: int | None) -> tuple[int, ...]:
        return shape if self.block is None else (*shape[:STACK_AXIS], count, *shape[STACK_AXIS:])

    def select(self, index: tuple[slice, ...] = ()) -> tuple[tuple, tuple[int, ...], tuple[slice, ...]]:
        """Slices of our leaf as (index of MaxText's leaf, shape in our axes of what that gives, slices that cut it to what
        was asked for): heads are whole there."""
        ours = join_heads(self.split, self.shape)
        stored, shape, cut = [], [], []
        for axis, length in enumerate(ours):
            start, stop, _ = (index[axis] if axis < len(index) else slice(None)).indices(length)
            if axis == SPLIT_AXIS.get(self.split):
                width = self.shape[axis + 1]
                first, last = start // width, -(-stop // width)
                stored += [slice(first, last), slice(None)]
                shape.append((last - first) * width)
                cut.append(slice(start - first * width, stop - first * width))
            else:
                stored.append(slice(start, stop))
                shape.append(stop - start)
                cut.append(slice(None))
        if self.block is not None:
            stored.insert(STACK_AXIS, self.block)
        return tuple(stored), tuple(shape), tuple(cut)


def split_heads(layout: str, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The shape that MaxText gives a leaf of ours (or a chunk of one); width: of a head."""
    axis = SPLIT_AXIS.get(layout)
    return shape if axis is None else (*shape[:axis], shape[axis] // width, width, *shape[axis + 1 :])


def join_heads(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse of `split_heads`."""
    axis = SPLIT_AXIS.get(layout)
    return shape if axis is None else (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def maxtext_place(weight: Weight, config: Olmo3Config, cycle: int | None) -> Place:
    """Where MaxText keeps a weight. cycle: layers in a block of its scan, None where layers are not stacked.

    Block b holds the layers cycle * b to cycle * b + cycle - 1; each of them has leaves of its own, which stack the blocks.
    """
    layer, block, blocks = "", None, None
    if weight.layer is not None and cycle is None:
        layer = f"layers_{weight.layer}"
    elif weight.layer is not None:
        block, within = divmod(weight.layer, cycle)
        layer, blocks = f"layers/layers_{within}", config.num_hidden_layers // cycle
    path = f"{MAXTEXT_ROOT}/{weight.maxtext.replace('{layer}', layer)}"
    return Place(path, weight.split, split_heads(weight.split, weight.jax_shape, config.head_dim), block, blocks)
