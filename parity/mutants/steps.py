"""Faults of the code: what stands in the place of a module. change(config, module, *its arguments)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...olmo_jax import layers as L

NORMS = ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm")
QK_NORMS = NORMS[:2]
BLOCK_NORMS = NORMS[2:]
QK_ROTARY = ("self_attn.q_rotary", "self_attn.k_rotary")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PROJECTIONS = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
RESIDUALS = ("attention_residual", "mlp_residual")
MIX, SWIGLU = ("self_attn.mix",), ("mlp.swiglu",)


# Norms: x [..., D].
def epsilon_outside(c, norm, x):
    """Added to the root of the mean square, not to the mean square."""
    y = x.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))
    return (norm.scale[...].astype(jnp.float32) * (y / (root + norm.eps))).astype(x.dtype)


def epsilon_times(factor: float):
    return lambda c, norm, x: L.rms_norm(x, norm.scale[...], norm.eps * factor)


def no_epsilon(c, norm, x):
    return L.rms_norm(x, norm.scale[...], 0.0)


def one_plus(c, norm, x):
    return L.rms_norm(x, 1 + norm.scale[...].astype(jnp.float32), norm.eps)


def no_scale(c, norm, x):
    return L.rms_norm(x, jnp.ones_like(norm.scale[...]), norm.eps)


def mean_taken_away(c, norm, x):
    """LayerNorm."""
    y = x.astype(jnp.float32)
    return L.rms_norm((y - y.mean(-1, keepdims=True)).astype(x.dtype), norm.scale[...], norm.eps)


def left_out(c, module, x, *_):
    return x


def per_head(c, norm, x):
    """Each head normalised by itself, after the split."""
    heads = x.reshape(*x.shape[:-1], -1, c.head_dim)
    scale = norm.scale[...].reshape(-1, c.head_dim)
    return L.rms_norm(heads, scale, norm.eps).reshape(x.shape)


def norm_bfloat16(c, norm, x):
    """Mean square, root and product in bfloat16, in a float32 model too."""
    y, scale = x.astype(jnp.bfloat16), norm.scale[...].astype(jnp.bfloat16)
    return (scale * (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.eps))).astype(x.dtype)


def cast_before_scale(c, norm, x):
    """Llama's order: rounded to the dtype of the activations, then multiplied."""
    return norm.scale[...].astype(x.dtype) * L.rms_norm(x, jnp.ones_like(norm.scale[...]), norm.eps)


def squares_in_own_dtype(c, norm, x):
    """Squares and their mean in the dtype of the activations."""
    mean = jnp.mean(x * x, axis=-1, keepdims=True).astype(jnp.float32)
    y = x.astype(jnp.float32) * jax.lax.rsqrt(mean + norm.eps)
    return (norm.scale[...].astype(jnp.float32) * y).astype(x.dtype)


# Rotary: x [B, T, heads, H].
def interleaved(c, rotary, x, inputs):
    """Dimension 2 d pairs with 2 d + 1, not d with d + H/2."""
    wide = x.astype(jnp.float32)
    first, second = wide[..., 0::2], wide[..., 1::2]
    cos, sin = inputs.cos[:, :, None], inputs.sin[:, :, None]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def next_position(c, rotary, x, inputs):
    """Turned by the position of the next token (the last token by the first's)."""
    return L.rotate(x, jnp.roll(inputs.cos, -1, axis=1), jnp.roll(inputs.sin, -1, axis=1))


def not_turned(c, rotary, x, inputs):
    return x


def turned_twice(c, rotary, x, inputs):
    return rotary(rotary(x, inputs), inputs)


def turned_by_head(c, rotary, x, inputs):
    """Heads and positions exchanged: turned by the number of the head."""
    heads = x.shape[2]
    return L.rotate(x.swapaxes(1, 2), inputs.cos[:, :heads], inputs.sin[:, :heads]).swapaxes(1, 2)


def rotary_in_own_dtype(c, rotary, x, inputs):
    """Tables, products and sums in the dtype of the activations."""
    cos, sin = inputs.cos[:, :, None].astype(x.dtype), inputs.sin[:, :, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotary_bfloat16(c, rotary, x, inputs):
    return rotary_in_own_dtype(c, rotary, x.astype(jnp.bfloat16), inputs).astype(x.dtype)


# Attention: q [B, T, N, H], k and v [B, S, K, H].
def attend(q, k, v, mask, *, scale=None, change_scores=None, softmax=None, kv_of=None):
    """As layers.attention, with every kv head repeated: kv_of [N] says which one a query head reads.

    change_scores(scores [B, N, T, S]) comes after the scale and before the mask; softmax(scores, v's dtype) -> weights.
    """
    heads, width = q.shape[2:]
    kv_of = np.arange(heads) // (heads // k.shape[2]) if kv_of is None else kv_of
    exact = {"precision": L.PRECISION, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("btnh,bsnh->bnts", q, k[:, :, kv_of], **exact).astype(q.dtype)
    scores = (scores.astype(jnp.float32) * np.float32(width**-0.5 if scale is None else scale)).astype(q.dtype)
    scores = scores if change_scores is None else change_scores(scores)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1) if softmax is None else softmax(scores)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(q.dtype), v[:, :, kv_of], **exact).astype(q.dtype)


def no_score_scale(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, scale=1.0)


def scale_times(factor: float):
    return lambda c, mix, q, k, v, inputs: attend(q, k, v, inputs.mask, scale=factor * q.shape[-1] ** -0.5)


def scale_twice(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, scale=1 / q.shape[-1])


def scale_of_width(c, mix, q, k, v, inputs):
    """From the width over the heads, not from the config's head_dim."""
    return attend(q, k, v, inputs.mask, scale=(c.hidden_size / c.num_attention_heads) ** -0.5)


def capped_scores(c, mix, q, k, v, inputs):
    return attend(
        q, k, v, inputs.mask, change_scores=lambda s: (50 * jnp.tanh(s.astype(jnp.float32) / 50)).astype(s.dtype)
    )


def softmax_with_sink(c, mix, q, k, v, inputs):
    """One is added to the sum that weights are divided by."""

    def softmax(scores):
        wide = scores.astype(jnp.float32)
        top = jnp.maximum(wide.max(-1, keepdims=True), 0)
        grown = jnp.exp(wide - top)
        return grown / (grown.sum(-1, keepdims=True) + jnp.exp(-top))

    return attend(q, k, v, inputs.mask, softmax=softmax)


def softmax_bfloat16(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, softmax=lambda s: jax.nn.softmax(s.astype(jnp.bfloat16), axis=-1))


def softmax_in_own_dtype(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, softmax=lambda s: jax.nn.softmax(s, axis=-1))


def weights_bfloat16(c, mix, q, k, v, inputs):
    """Attention weights rounded to bfloat16 before they meet the values."""

    def softmax(scores):
        return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)

    return attend(q, k, v, inputs.mask, softmax=softmax)


def scores_not_rounded(c, mix, q, k, v, inputs):
    """Scores and weights stay in float32 until the values are summed."""
    return L.attention(*(x.astype(jnp.float32) for x in (q, k, v)), inputs.mask).astype(q.dtype)


def kv_heads_tiled(c, mix, q, k, v, inputs):
    """Query head n reads kv head n % K, not n // G."""
    return attend(q, k, v, inputs.mask, kv_of=np.arange(q.shape[2]) % k.shape[2])


def kv_heads_turned(c, mix, q, k, v, inputs):
    """Query head n reads the kv head after its own."""
    kv_of = np.arange(q.shape[2]) // (q.shape[2] // k.shape[2])
    return attend(q, k, v, inputs.mask, kv_of=(kv_of + 1) % k.shape[2])


def first_kv_head(c, mix, q, k, v, inputs):
    return attend(q, k, v, inputs.mask, kv_of=np.zeros(q.shape[2], int))


def keys_for_values(c, mix, q, k, v, inputs):
    return mix(q, k, k, inputs)


def norm_after_rotary(c, attn, x, inputs):
    """q and k normalised after they were turned, not before."""
    batch, length = x.shape[:2]
    q, k, v = (proj(x) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))

    def heads(y):
        return y.reshape(batch, length, -1, attn.head_dim)

    q = heads(attn.q_norm(attn.q_rotary(heads(q), inputs).reshape(q.shape)))
    k = heads(attn.k_norm(attn.k_rotary(heads(k), inputs).reshape(k.shape)))
    return attn.o_proj(attn.mix(q, k, heads(v), inputs).reshape(batch, length, -1))


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
