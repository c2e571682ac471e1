"""OLMo 3 in one page of jax.numpy, read from the Orbax tree that olmo-convert writes. None of olmo_parity's code is used.

olmo-parity --reference HF_FOLDER --candidate ORBAX_TREE --candidate-fn inhouse:make      (from this folder)
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

DOT = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)  # sums in float32, always


def make(checkpoint, config, dtype, sliding_window):
    """checkpoint: a step folder. sliding_window: instead of the config's, or None. Returns forward."""
    named = make_activations(checkpoint, config, dtype, sliding_window)
    return lambda tokens, positions, segment_ids: named(tokens, positions, segment_ids)["lm_head"]


def make_activations(checkpoint, config, dtype, sliding_window):
    """The same, of a function that gives every layer's output too, by its name: what olmo-parity trace compares."""
    tree = ocp.PyTreeCheckpointer().restore(checkpoint.absolute() / "state")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
    window = sliding_window or config["sliding_window"]
    run = jax.jit(partial(forward, config, window))
    return lambda tokens, positions, segment_ids: run(params, tokens, positions, segment_ids)


def forward(config, window, params, tokens, positions, segment_ids):
    """tokens, positions, segment_ids [B, T] -> by module name [B, T, width]; lm_head gives the logits [B, T, V]."""
    order = jnp.arange(tokens.shape[1])
    back = order[:, None] - order[None, :]  # tokens from key to query
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = {"full_attention": same & (back >= 0), "sliding_attention": same & (back >= 0) & (back < window)}
    turns = {kind: rotary(rope, config["head_dim"], positions) for kind, rope in config["rope_parameters"].items()}
    x = params["embed_tokens"]["embedding"][tokens]
    named = {"embed_tokens": x}
    for i, kind in enumerate(config["layer_types"]):
        x = named[f"layers.{i}"] = layer(config, params["layers"][str(i)], x, turns[kind], seen[kind])
    x = named["norm"] = rms_norm(x, params["norm"]["scale"], config["rms_norm_eps"])
    tied = config["tie_word_embeddings"]
    named["lm_head"] = dot(x, params["embed_tokens"]["embedding"].T if tied else params["lm_head"]["kernel"])
    return named


def layer(config, p, x, turn, seen):
    """Norms stand after attention and MLP, none before."""
    eps, attn, mlp = config["rms_norm_eps"], p["self_attn"], p["mlp"]

    def heads(a):
        return a.reshape(*a.shape[:2], -1, config["head_dim"])

    q = rotate(heads(rms_norm(dot(x, attn["q_proj"]["kernel"]), attn["q_norm"]["scale"], eps)), turn)
    k = rotate(heads(rms_norm(dot(x, attn["k_proj"]["kernel"]), attn["k_norm"]["scale"], eps)), turn)
    v = heads(dot(x, attn["v_proj"]["kernel"]))
    shared = q.shape[2] // k.shape[2]  # query heads to a kv head
    k, v = jnp.repeat(k, shared, axis=2), jnp.repeat(v, shared, axis=2)
    scores = DOT("bqhd,bkhd->bhqk", q, k).astype(x.dtype).astype(jnp.float32) * config["head_dim"] ** -0.5
    scores = jnp.where(seen[:, None], scores.astype(x.dtype), jnp.finfo(x.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
    mixed = DOT("bhqk,bkhd->bqhd", weights, v).astype(x.dtype).reshape(*x.shape[:2], -1)
    x = x + rms_norm(dot(mixed, attn["o_proj"]["kernel"]), p["post_attention_layernorm"]["scale"], eps)
    gate = dot(x, mlp["gate_proj"]["kernel"])
    gated = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * dot(x, mlp["up_proj"]["kernel"])
    return x + rms_norm(dot(gated, mlp["down_proj"]["kernel"]), p["post_feedforward_layernorm"]["scale"], eps)


def dot(x, kernel):
    return DOT("...i,io->...o", x, kernel).astype(x.dtype)


def rms_norm(x, scale, eps):
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(rope, width, positions):
    """cos and sin [B, T, 1, width / 2] float32, plain or YaRN.

    The frequencies in float32 step by step: one unit in the last place turns position 8192 by 5e-4 radians.
    """
    one, theta = np.float32(1), rope["rope_theta"]
    wavelength = (theta ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width)).astype(float)).astype(
        np.float32
    )
    frequency = one / wavelength
    if rope["rope_type"] == "yarn":
        turns = rope["original_max_position_embeddings"] / (2 * math.pi)
        fast, slow = (
            width * math.log(turns / rope[beta]) / (2 * math.log(theta)) for beta in ("beta_fast", "beta_slow")
        )
        if rope["truncate"]:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, width - 1)
        ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(fast)) / np.float32(slow - fast or 0.001)
        kept = one - np.clip(ramp, 0, 1)
        frequency = one / (np.float32(rope["factor"]) * wavelength) * (one - kept) + frequency * kept
    angles = positions.astype(jnp.float32)[..., None, None] * frequency
    factor = np.float32(rope.get("attention_factor", 1))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x, turn):
    """x [B, T, heads, width]: dimension d is turned with d + width / 2."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
