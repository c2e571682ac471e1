"""Random OLMo 3 models for the benches: one set of weights in a transformers model and as an olmo_jax tree."""

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.tree import unflatten


def raw_config(
    *, width, heads, kv_heads, head_dim, mlp, layers, vocabulary, window=64, yarn=None, layer_types=None, tied=False
):
    """A config.json. yarn: (factor, original context in tokens) or None."""
    scaling = yarn and {
        "rope_type": "yarn",
        "factor": yarn[0],
        "original_max_position_embeddings": yarn[1],
        "beta_fast": 32,
        "beta_slow": 1,
    }
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp,
        "layer_types": layer_types or ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "rope_scaling": scaling,
        "sliding_window": window,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "pad_token_id": None,
        "eos_token_id": 1,
    }


def build(raw: dict, seed: int, spread: bool):
    """(transformers model in float32 and eager, Olmo3Config, tree of float32 leaves).

    spread: False as at step 0 (std 0.02, norms ones); True as far from it as trained weights are (matrices std 2 over the
    root of their width, norms 1 + 0.1 N): logits then have a spread of about 2.
    """
    config = from_hf(raw)
    torch.manual_seed(seed)
    hf_config = transformers.Olmo3Config(**raw)
    hf_config._attn_implementation = "eager"
    model = transformers.Olmo3ForCausalLM(hf_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if spread and parameter.ndim == 1:
                parameter.normal_(1, 0.1)
            elif spread:
                parameter.normal_(0, 2 / np.sqrt(parameter.shape[1]))
    return model, config, tree_of(model, config, jnp.float32)


def tree_of(model, config, dtype) -> dict:
    """The weights of a transformers model as an olmo_jax tree."""
    state = model.state_dict()
    flat = {w.jax: jnp.asarray(apply_layout(w.layout, state[w.hf].float().numpy()), dtype) for w in weights(config)}
    return unflatten(flat)
