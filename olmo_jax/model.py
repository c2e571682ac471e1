"""OLMo 3 as a Flax NNX model, whole or part by part, unrolled or scanned over layers.

Modules carry the Hugging Face names, leaves are embedding, kernel and scale (OLMo-core and Hugging Face store kernels
transposed). The arithmetic is in layers.py, the leaves' shapes in tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers as L
from .config import Olmo3Config, layer_period
from .errors import BadInput
from .rope import rope_tables
from .tree import check_tree, flatten, leaves, random_tree, unflatten


class AttentionInputs(NamedTuple):
    """What the attention of one layer type must know beside its input. Weights play no part in it."""

    cos: jax.Array  # [1 or B, T, H/2] float32
    sin: jax.Array  # [1 or B, T, H/2] float32
    mask: jax.Array  # [1 or B, T, S] bool


def attention_inputs(config: Olmo3Config, length: int, positions=None, segment_ids=None) -> dict[str, AttentionInputs]:
    """By layer type. positions and segment_ids are [B, T] integers.

    segment_ids: a run of equal ids is one document of a packed row and sees only itself. positions turn the rotary
    embedding and nothing else: who sees whom follows from the order in the row and segment_ids. (transformers guesses
    packing from positions that start again; here it is said.) Positions left out count from 0 in every document.
    """
    document = None
    if segment_ids is not None:
        document, counted = L.documents(segment_ids)
    else:
        counted = jnp.arange(length, dtype=jnp.int32)[None]
    positions = counted if positions is None else positions
    found = {}
    for layer_type, table in rope_tables(config).items():
        cos, sin = L.rotary_cos_sin(table.inv_freq, table.attention_factor, positions)
        window = config.window(config.layer_types.index(layer_type))
        found[layer_type] = AttentionInputs(cos, sin, L.attention_mask(length, window, document))
    return found


class Embedding(nnx.Module):
    def __init__(self, params: Mapping, dtype):
        self.embedding = nnx.Param(params["embedding"])  # [V, D]
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens):  # [B, T] -> [B, T, D]
        return L.embed(tokens, self.embedding[...], self.dtype)

    def attend(self, x):  # [B, T, D] -> [B, T, V], the head of a tied model
        return L.linear(x, self.embedding[...].T)


class Linear(nnx.Module):
    def __init__(self, params: Mapping):
        self.kernel = nnx.Param(params["kernel"])  # [I, O]

    def __call__(self, x):  # [..., I] -> [..., O]
        return L.linear(x, self.kernel[...])


class RMSNorm(nnx.Module):
    def __init__(self, params: Mapping, eps: float):
        self.scale = nnx.Param(params["scale"])  # [D]
        self.eps = eps

    def __call__(self, x):  # [..., D] -> [..., D]
        return L.rms_norm(x, self.scale[...], self.eps)


# Steps without parameters are modules too, so that each has a name: what they give can be captured and compared by it.
class Rotary(nnx.Module):
    def __call__(self, x, inputs: AttentionInputs):  # [B, T, heads, H] -> [B, T, heads, H]
        return L.rotate(x, inputs.cos, inputs.sin)


class Mix(nnx.Module):
    def __call__(self, q, k, v, inputs: AttentionInputs):  # [B, T, N, H], k and v [B, S, K, H] -> [B, T, N, H]
        return L.attention(q, k, v, inputs.mask)


class SwiGLU(nnx.Module):
    def __call__(self, gate, up):  # [B, T, F] -> [B, T, F]
        return L.swiglu(gate, up)


class Residual(nnx.Module):
    def __call__(self, x, change):  # [B, T, D] -> [B, T, D]
        return x + change


class Attention(nnx.Module):
    def __init__(self, config: Olmo3Config, params: Mapping):
        self.head_dim = config.head_dim
        self.q_proj = Linear(params["q_proj"])  # [D, N H]
        self.k_proj = Linear(params["k_proj"])  # [D, K H]
        self.v_proj = Linear(params["v_proj"])  # [D, K H]
        self.o_proj = Linear(params["o_proj"])  # [N H, D]
        self.q_norm = RMSNorm(params["q_norm"], config.rms_norm_eps)
        self.k_norm = RMSNorm(params["k_norm"], config.rms_norm_eps)
        self.q_rotary, self.k_rotary, self.mix = Rotary(), Rotary(), Mix()

    def __call__(self, x, inputs: AttentionInputs):  # [B, T, D] -> [B, T, D]
        # q and k are normalised over all heads together, before the split into heads and before rotary.
        q = self._heads(self.q_norm(self.q_proj(x)))
        k = self._heads(self.k_norm(self.k_proj(x)))
        v = self._heads(self.v_proj(x))
        mixed = self.mix(self.q_rotary(q, inputs), self.k_rotary(k, inputs), v, inputs)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))

    def _heads(self, x):  # [B, T, heads H] -> [B, T, heads, H]
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class MLP(nnx.Module):
    def __init__(self, params: Mapping):
        self.gate_proj = Linear(params["gate_proj"])  # [D, F]
        self.up_proj = Linear(params["up_proj"])  # [D, F]
        self.down_proj = Linear(params["down_proj"])  # [F, D]
        self.swiglu = SwiGLU()

    def __call__(self, x):  # [B, T, D] -> [B, T, D]
        return self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nnx.Module):
    """One layer. Norms stand after attention and MLP, before the residual is added; there is none before them."""

    def __init__(self, config: Olmo3Config, params: Mapping):
        self.self_attn = Attention(config, params["self_attn"])
        self.mlp = MLP(params["mlp"])
        self.post_attention_layernorm = RMSNorm(params["post_attention_layernorm"], config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(params["post_feedforward_layernorm"], config.rms_norm_eps)
        self.attention_residual, self.mlp_residual = Residual(), Residual()

    def __call__(self, x, inputs: AttentionInputs):  # [B, T, D] -> [B, T, D]
        x = self.attention_residual(x, self.post_attention_layernorm(self.self_attn(x, inputs)))
        return self.mlp_residual(x, self.post_feedforward_layernorm(self.mlp(x)))


class Olmo3(nnx.Module):
    """The model. Build it with `from_tree` or `random_model`, which check what they are given.

    Unrolled, `layers` holds every layer. Scanned, `stacked` holds one period of layers whose leaves have a leading axis
    of repeats, and `layers` the layers beyond whole periods.
    """

    def __init__(self, config: Olmo3Config, tree: Mapping, *, dtype, scan_layers: bool = False):
        self.config = config
        self.dtype = jnp.dtype(dtype)  # of activations
        self.period, self.repeats = layer_period(config.layer_types) if scan_layers else (0, 0)
        if self.repeats == 1:  # nothing repeats
            self.period = self.repeats = 0
        scanned = self.period * self.repeats
        one = [tree["layers"][str(i)] for i in range(config.num_hidden_layers)]
        self.embed_tokens = Embedding(tree["embed_tokens"], dtype)
        self.stacked = nnx.List(
            [DecoderLayer(config, _stack(one[i : scanned : self.period])) for i in range(self.period)]
        )
        self.layers = nnx.List([DecoderLayer(config, params) for params in one[scanned:]])
        self.norm = RMSNorm(tree["norm"], config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(tree["lm_head"])

    def __call__(self, tokens, positions=None, segment_ids=None):
        """tokens [B, T] -> logits [B, T, V] in the activation dtype. See attention_inputs for the other two."""
        inputs = attention_inputs(self.config, tokens.shape[1], positions, segment_ids)
        x = self.embed_tokens(tokens)
        types = self.config.layer_types
        if self.repeats:
            graph, state = nnx.split(self.stacked)

            def one_period(x, state):
                for layer_type, layer in zip(types[: self.period], nnx.merge(graph, state), strict=True):
                    x = layer(x, inputs[layer_type])
                return x, None

            x, _ = jax.lax.scan(one_period, x, state)
        for layer_type, layer in zip(types[self.period * self.repeats :], self.layers, strict=True):
            x = layer(x, inputs[layer_type])
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.config.tie_word_embeddings else self.lm_head(x)


def from_tree(config: Olmo3Config, tree: Mapping, *, dtype, param_dtype=None, scan_layers: bool = False) -> Olmo3:
    """The model over the leaves of `tree` (string keys, NumPy or JAX arrays; the Orbax tree on disk has this form).

    dtype: of activations. param_dtype: of parameters; None keeps each leaf's own.
    Raises BadInput naming every leaf that is missing, unexpected, of another shape or not a concrete array.
    """
    flat = check_tree(leaves(config), tree)
    return Olmo3(config, _arrays(flat, param_dtype), dtype=dtype, scan_layers=scan_layers)


def part_from_tree(config: Olmo3Config, name: str, tree: Mapping, *, dtype, param_dtype=None) -> nnx.Module:
    """One part, from its own subtree: 'embed_tokens', 'layers.<i>', 'norm' or 'lm_head'. To run a model layer by layer.

    Embedding(tokens), DecoderLayer(x, attention_inputs(...)[config.layer_types[i]]), RMSNorm(x), Linear(x). The head of a
    tied model is Embedding.attend.
    """
    prefix = name.replace(".", "/") + "/"
    wanted = {path.removeprefix(prefix): leaf for path, leaf in leaves(config).items() if path.startswith(prefix)}
    if not wanted or name == "layers":
        raise BadInput(f"the model has no part {name!r} (embed_tokens, layers.<i>, norm, lm_head unless tied)")
    own = _arrays(check_tree(wanted, tree, name), param_dtype)
    if name == "embed_tokens":
        return Embedding(own, dtype)
    if name == "norm":
        return RMSNorm(own, config.rms_norm_eps)
    return Linear(own) if name == "lm_head" else DecoderLayer(config, own)


def random_model(config: Olmo3Config, rngs: nnx.Rngs, *, dtype, param_dtype=jnp.float32, scan_layers=False) -> Olmo3:
    """A model with the parameters OLMo starts from (tree.random_tree)."""
    return Olmo3(config, random_tree(config, rngs.params(), param_dtype), dtype=dtype, scan_layers=scan_layers)


def to_tree(model: Olmo3) -> dict:
    """The parameters as from_tree takes them, bit for bit; stacked leaves are taken apart."""
    flat = {"norm/scale": model.norm.scale[...], "embed_tokens/embedding": model.embed_tokens.embedding[...]}
    if not model.config.tie_word_embeddings:
        flat["lm_head/kernel"] = model.lm_head.kernel[...]
    for i in range(model.config.num_hidden_layers):
        beyond = i - model.period * model.repeats
        layer = model.layers[beyond] if beyond >= 0 else model.stacked[i % model.period]
        for path, array in flatten(nnx.to_pure_dict(nnx.state(layer, nnx.Param))).items():
            flat[f"layers/{i}/{path}"] = array if beyond >= 0 else array[i // model.period]
    return unflatten({path: flat[path] for path in leaves(model.config)})


def module_outputs(model: Olmo3, tokens, positions=None, segment_ids=None) -> dict[str, jax.Array]:
    """What every module gives, by its name ('layers.0.self_attn.q_proj'), in the order of the computation.

    The whole model's output is 'lm_head', tied or not. Unrolled models only. May be run under nnx.jit.
    """
    if model.repeats:
        raise BadInput("a scanned model has no module of its own per layer: build it with scan_layers=False")
    outputs: dict[str, jax.Array] = {}

    def record(name, module, *args):
        outputs[name] = module(*args)
        return outputs[name]

    outputs["lm_head"] = with_calls(model, record)(tokens, positions, segment_ids)
    return outputs


def with_calls(model: nnx.Module, call: Callable, prefix: str = ""):
    """The model, or a part of it, in which call(name, module, *args) stands for every module(*args) below it.

    call may note what it is given, or give something else. Names begin with prefix. Modules of modules are called through
    it as well. The result has the same arrays under new modules, and is plain Python: it lives for one call, in or outside
    jax.jit, and is no argument of it.
    """
    copy = nnx.merge(*nnx.split(model))
    _stand_in(copy, prefix, call)
    return copy


def _stand_in(module: nnx.Module, prefix: str, call: Callable) -> None:
    def stand_in(child, name):
        _stand_in(child, name + ".", call)
        return _StandIn(child, name, call)

    for name, child in list(vars(module).items()):
        if isinstance(child, nnx.List):
            setattr(module, name, [stand_in(one, f"{prefix}{name}.{i}") for i, one in enumerate(child)])
        elif isinstance(child, nnx.Module):
            setattr(module, name, stand_in(child, prefix + name))


class _StandIn:
    def __init__(self, module, name, call):
        self.module, self.name, self.call = module, name, call

    def __call__(self, *args):
        return self.call(self.name, self.module, *args)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _arrays(flat: Mapping, param_dtype) -> dict:
    return unflatten({path: jnp.asarray(array, param_dtype) for path, array in flat.items()})


def _stack(trees: list) -> dict:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
