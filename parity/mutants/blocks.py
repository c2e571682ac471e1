"""Faults of MLP, residuals, products and the model's ends. What stands in the place of a module: change(config, module, *its arguments)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...olmo_jax import layers as L


# MLP: gate and up [..., F].
def activated(function):
    return lambda c, swiglu, gate, up: function(gate.astype(jnp.float32)).astype(gate.dtype) * up


gelu_tanh = activated(lambda x: jax.nn.gelu(x, approximate=True))
gelu = activated(lambda x: jax.nn.gelu(x, approximate=False))
relu = activated(jax.nn.relu)
sigmoid_alone = activated(jax.nn.sigmoid)
no_activation = activated(lambda x: x)
silu_of_quick_gelu = activated(lambda x: x * jax.nn.sigmoid(1.702 * x))


def up_activated(c, swiglu, gate, up):
    return swiglu(up, gate)


def swiglu_bfloat16(c, swiglu, gate, up):
    return swiglu(gate.astype(jnp.bfloat16), up.astype(jnp.bfloat16)).astype(gate.dtype)


def swiglu_in_own_dtype(c, swiglu, gate, up):
    """The sigmoid is computed and rounded in the dtype of the activations."""
    return gate * (1 / (1 + jnp.exp(-gate))) * up


def swiglu_rounded_once(c, swiglu, gate, up):
    return swiglu(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


# Residuals and the order of things in a layer.
def dropped(c, residual, x, change):
    return change


def change_times(factor: float):
    return lambda c, residual, x, change: residual(x, (change * factor).astype(x.dtype))


def change_by_depth(c, residual, x, change):
    return residual(x, (change / np.sqrt(2 * c.num_hidden_layers)).astype(x.dtype))


def change_bfloat16(c, residual, x, change):
    """The sum of the stream is rounded to bfloat16."""
    return residual(x, change).astype(jnp.bfloat16).astype(x.dtype)


def norms_before(c, layer, x, inputs):
    """Norms before attention and MLP, none after: Llama's block."""
    x = layer.attention_residual(x, layer.self_attn(layer.post_attention_layernorm(x), inputs))
    return layer.mlp_residual(x, layer.mlp(layer.post_feedforward_layernorm(x)))


def norms_of_sums(c, layer, x, inputs):
    """Norms after the residual was added: the first transformer's block."""
    x = layer.post_attention_layernorm(layer.attention_residual(x, layer.self_attn(x, inputs)))
    return layer.post_feedforward_layernorm(layer.mlp_residual(x, layer.mlp(x)))


def parallel(c, layer, x, inputs):
    """Attention and MLP both read what comes into the layer."""
    attended = layer.post_attention_layernorm(layer.self_attn(x, inputs))
    return layer.mlp_residual(layer.attention_residual(x, attended), layer.post_feedforward_layernorm(layer.mlp(x)))


def mlp_first(c, layer, x, inputs):
    x = layer.mlp_residual(x, layer.post_feedforward_layernorm(layer.mlp(x)))
    return layer.attention_residual(x, layer.post_attention_layernorm(layer.self_attn(x, inputs)))


def layer_left_out(c, layer, x, inputs):
    return x


def layer_twice(c, layer, x, inputs):
    return layer(layer(x, inputs), inputs)


# Products: x [..., I], kernel [I, O].
def factors_bfloat16(c, linear, x):
    """Factors rounded to bfloat16, sums in float32: what a TPU does by default."""
    return L.linear(_bfloat16(x), _bfloat16(linear.kernel[...])).astype(x.dtype)


def factors_tf32(c, linear, x):
    """Factors rounded to 10 bits of fraction: what a recent GPU does by default."""
    return L.linear(_tf32(x), _tf32(linear.kernel[...])).astype(x.dtype)


def sums_bfloat16(c, linear, x):
    """Partial sums of 32 products are rounded to bfloat16 as they are added up."""
    kernel, total = linear.kernel[...], jnp.zeros((), jnp.bfloat16)
    for start in range(0, kernel.shape[0], 32):
        part = L.linear(x[..., start : start + 32], kernel[start : start + 32])
        total = (total.astype(jnp.float32) + part.astype(jnp.float32)).astype(jnp.bfloat16)
    return total.astype(x.dtype)


def _bfloat16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _tf32(x):
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0x1000) & jnp.uint32(0xFFFFE000), jnp.float32)


# The ends of the model. embed_tokens(tokens [B, T]), lm_head(x [B, T, D]).
def token_put_before(c, embed, tokens):
    """A begin-of-text token (id 0) is put before the prompt, and the last token falls off."""
    return embed(jnp.concatenate([jnp.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1))


def last_id_clipped(c, embed, tokens):
    return embed(jnp.minimum(tokens, c.vocab_size - 2))


def ids_wrap(c, embed, tokens):
    """Ids at or above the last multiple of 64 begin again from 0."""
    return embed(tokens % max((c.vocab_size - 1) // 64 * 64, 1))


def times_root_of_width(c, embed, tokens):
    x = embed(tokens)
    return (x * np.sqrt(c.hidden_size)).astype(x.dtype)


def embedding_bfloat16(c, embed, tokens):
    x = embed(tokens)
    return x.astype(jnp.bfloat16).astype(x.dtype)


def head_of_its_own(c, head, x):
    """A tied model with a head that was left at its random start."""
    kernel = 0.02 * jax.random.normal(jax.random.key(0), (x.shape[-1], c.vocab_size))
    return L.linear(x, kernel)


def logits_capped(c, head, x):
    y = head(x)
    return (30 * jnp.tanh(y.astype(jnp.float32) / 30)).astype(y.dtype)


def logits_by_root_of_width(c, head, x):
    y = head(x)
    return (y / np.sqrt(c.hidden_size)).astype(y.dtype)


def logits_bfloat16(c, head, x):
    y = head(x)
    return y.astype(jnp.bfloat16).astype(y.dtype)


def one_nan(c, head, x):
    """One logit of the first token of every row is NaN."""
    return head(x).at[:, 0, -1].set(jnp.nan)
