"""How far apart two right float32 implementations are: transformers (eager) against olmo_jax on random weights.

    python bench/float32_noise.py [--wide]

Prints one line a case: max |delta logit|, the spread of the logits, their quotient (what the gate judges), max KL.
Random weights as at step 0 (std 0.02, norms ones) and spread ones (matrices std 0.05 x, norms 1 + 0.1 N).
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.model import from_tree
from olmo_parity.olmo_jax.tree import unflatten
from olmo_parity.parity.metrics import summarise, token_stats

# name, width, heads, kv heads, head width, MLP width, layers, vocabulary, tokens
CASES = [
    ("tiny", 64, 4, 4, 16, 128, 8, 1000, 512),
    ("grouped", 256, 8, 2, 32, 688, 16, 1000, 512),
    ("1024 wide", 1024, 16, 4, 64, 2752, 16, 2000, 512),
]
WIDE = [("7B layers", 4096, 32, 32, 128, 11008, 4, 2000, 256), ("32B layers", 5120, 40, 8, 128, 27648, 2, 2000, 256)]


def config_of(width, heads, kv_heads, head_dim, mlp, layers, vocabulary):
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp,
        "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "rope_scaling": None,
        "sliding_window": 64,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "pad_token_id": None,
        "eos_token_id": 1,
    }


def measure(name, width, heads, kv_heads, head_dim, mlp, layers, vocabulary, tokens, seed, spread):
    raw = config_of(width, heads, kv_heads, head_dim, mlp, layers, vocabulary)
    config = from_hf(raw)
    torch.manual_seed(seed)
    hf_config = transformers.Olmo3Config(**raw)
    hf_config._attn_implementation = "eager"
    model = transformers.Olmo3ForCausalLM(hf_config).eval()
    with torch.no_grad():
        if spread:
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.normal_(1, 0.1)
                else:
                    parameter.normal_(0, 2 / np.sqrt(parameter.shape[1]))
        state = model.state_dict()
        flat = {w.jax: jnp.asarray(apply_layout(w.layout, state[w.hf].numpy())) for w in weights(config)}
        ids = np.random.default_rng(seed).integers(0, vocabulary, tokens)
        reference = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    del model, state
    candidate = from_tree(config, unflatten(flat), dtype=jnp.float32)
    logits = np.asarray(nnx.jit(lambda m, x: m(x))(candidate, ids[None].astype(np.int32))[0])
    s = summarise(token_stats(reference, logits, ids), np.arange(tokens))
    relative = s["max_abs_delta_logit"] / s["spread_of_logits"]
    kind = "spread" if spread else "step 0"
    print(
        f"{name:12} {kind:7} seed {seed}  max |delta| {s['max_abs_delta_logit']:.2e}  spread {s['spread_of_logits']:.3f}"
        f"  quotient {relative:.2e}  KL max {s['kl_max']:.1e}",
        flush=True,
    )
    return relative


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    cases = WIDE if "--wide" in sys.argv else CASES
    seeds = range(1 if "--wide" in sys.argv else 5)
    print(f"largest quotient {max(measure(*c, seed, kind) for c in cases for seed in seeds for kind in (False, True)):.2e}")
