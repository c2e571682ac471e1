"""The parameters of OLMo 3 as a nested dict of arrays: which leaves there are, their shapes, and random ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Olmo3Config
from .errors import BadInput


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    logical: tuple[str, ...]  # a name for each axis, which sharding.py maps to axes of the mesh


# Letters as in config.py; NH and KH are heads times head width.
# fmt: off
LAYER = (
    # path under layers/{i}                axes          logical axes
    ("self_attn/q_proj/kernel",           ("D", "NH"),  ("embed", "heads")),
    ("self_attn/k_proj/kernel",           ("D", "KH"),  ("embed", "kv_heads")),
    ("self_attn/v_proj/kernel",           ("D", "KH"),  ("embed", "kv_heads")),
    ("self_attn/o_proj/kernel",           ("NH", "D"),  ("heads", "embed")),
    ("self_attn/q_norm/scale",            ("NH",),      ("norm",)),
    ("self_attn/k_norm/scale",            ("KH",),      ("norm",)),
    ("mlp/gate_proj/kernel",              ("D", "F"),   ("embed", "mlp")),
    ("mlp/up_proj/kernel",                ("D", "F"),   ("embed", "mlp")),
    ("mlp/down_proj/kernel",              ("F", "D"),   ("mlp", "embed")),
    ("post_attention_layernorm/scale",    ("D",),       ("norm",)),
    ("post_feedforward_layernorm/scale",  ("D",),       ("norm",)),
)
EMBEDDING = (("embed_tokens/embedding",   ("V", "D"),   ("vocab", "embed")),)
NORM =      (("norm/scale",               ("D",),       ("norm",)),)
HEAD =      (("lm_head/kernel",           ("D", "V"),   ("embed", "vocab")),)
# fmt: on


DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))  # JAX would cut float64 to float32 silently


def leaves(config: Olmo3Config) -> dict[str, Leaf]:
    """Every leaf of a model of this config, by path ('layers/0/self_attn/q_proj/kernel'), in the order of the network."""
    size = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "NH": config.num_attention_heads * config.head_dim,
        "KH": config.num_key_value_heads * config.head_dim,
    }
    rows = [*EMBEDDING]
    for i in range(config.num_hidden_layers):
        rows += [(f"layers/{i}/{path}", axes, logical) for path, axes, logical in LAYER]
    rows += [*NORM, *(() if config.tie_word_embeddings else HEAD)]
    return {path: Leaf(tuple(size[a] for a in axes), logical) for path, axes, logical in rows}


def flatten(tree: Mapping, prefix: str = "") -> dict[str, object]:
    """{'norm': {'scale': x}} to {'norm/scale': x}."""
    flat = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(flatten(value, path + "/") if isinstance(value, Mapping) else {path: value})
    return flat


def unflatten(flat: Mapping[str, object]) -> dict:
    """{'norm/scale': x} to {'norm': {'scale': x}}."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def check_tree(wanted: Mapping[str, Leaf], tree: Mapping, what: str = "the parameter tree") -> dict[str, object]:
    """The flat form of a tree that holds exactly the wanted leaves, each a concrete floating-point array of its shape.

    Raises BadInput naming every path at fault.
    """
    flat = flatten(tree)
    faults = []
    for path in sorted(set(wanted) - set(flat), key=list(wanted).index):
        faults.append(f"{path} is missing, an array of shape {wanted[path].shape} is wanted")
    for path in (p for p in flat if p not in wanted):
        faults.append(f"{path} is unexpected: the config has no such leaf")
    for path, leaf in wanted.items():
        if path not in flat:
            continue
        array = flat[path]
        if isinstance(array, jax.ShapeDtypeStruct):
            faults.append(f"{path} is only a shape (ShapeDtypeStruct), its values were never restored")
        elif not isinstance(array, (np.ndarray, jax.Array)):
            faults.append(f"{path} is a {type(array).__name__}, an array is wanted")
        elif tuple(array.shape) != leaf.shape:
            faults.append(f"{path} has shape {tuple(array.shape)}, the config asks for {leaf.shape}")
        elif array.dtype not in DTYPES:
            faults.append(f"{path} has dtype {array.dtype}, {', '.join(map(str, DTYPES))} are wanted")
        elif isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            faults.append(f"{path} was deleted (donated to another computation?)")
    if faults:
        raise BadInput(f"{what} does not fit the config", faults)
    return {path: flat[path] for path in wanted}


INIT_STD, INIT_CUT = 0.02, 3.0  # OLMo-core's InitMethod.normal: every matrix and the embedding; the cut is in stds


def random_tree(config: Olmo3Config, key: jax.Array, param_dtype=jnp.float32) -> dict:
    """Parameters as OLMo starts from: matrices normal with std 0.02 cut at 3 std (and not rescaled), norms ones."""
    flat = {}
    for number, (path, leaf) in enumerate(leaves(config).items()):
        if path.endswith("/scale"):
            flat[path] = jnp.ones(leaf.shape, param_dtype)
        else:
            own = jax.random.fold_in(key, number)
            values = INIT_STD * jax.random.truncated_normal(own, -INIT_CUT, INIT_CUT, leaf.shape, jnp.float32)
            flat[path] = values.astype(param_dtype)
    return unflatten(flat)
