"""Does maxtext_adapter.py work with the MaxText installed here? A small model, its tree, the adapter, and inhouse.py beside it.

    python examples/maxtext_check.py FOLDER

Prints the largest difference between the two in float32, on a plain and on a packed row. Exit 1 where it is not noise.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

sys.path.insert(0, str(Path(__file__).parent))
import inhouse
import maxtext_adapter

D, N, K, H, F, V, LAYERS, WINDOW = 64, 4, 2, 16, 96, 320, 4, 16
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
CONFIG = {
    "vocab_size": V, "head_dim": H, "rms_norm_eps": 1e-6, "sliding_window": WINDOW, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
}  # fmt: skip
ARGS = (
    f"src/maxtext/configs/base.yml model_name=olmo3-7b base_emb_dim={D} base_num_query_heads={N} base_num_kv_heads={K} "
    f"head_dim={H} base_mlp_dim={F} base_num_decoder_layers={LAYERS} vocab_size={V} sliding_window_size={WINDOW} "
    "mlp_activations=[silu,linear] normalization_layer_epsilon=1.e-6 use_qk_norm=true inhomogeneous_layer_cycle_interval=4 "
    "rope_type=default rope_max_timescale=500000 logits_via_embedding=false normalize_embedding_logits=false "
    "scan_layers=false max_target_length=128 enable_checkpointing=false"
)


def kernel(rng, *shape):
    return rng.normal(0, 0.1, shape).astype(np.float32)


def scale(rng, width):
    return rng.normal(1, 0.1, width).astype(np.float32)


def layer(rng):
    """One layer as (this package's tree, MaxText's tree)."""
    q, k, v = kernel(rng, D, N * H), kernel(rng, D, K * H), kernel(rng, D, K * H)
    o, gate, up, down = kernel(rng, N * H, D), kernel(rng, D, F), kernel(rng, D, F), kernel(rng, F, D)
    qn, kn, an, mn = scale(rng, N * H), scale(rng, K * H), scale(rng, D), scale(rng, D)
    ours = {
        "self_attn": {
            **{f"{n}_proj": {"kernel": a} for n, a in (("q", q), ("k", k), ("v", v), ("o", o))},
            "q_norm": {"scale": qn},
            "k_norm": {"scale": kn},
        },
        "mlp": {f"{n}_proj": {"kernel": a} for n, a in (("gate", gate), ("up", up), ("down", down))},
        "post_attention_layernorm": {"scale": an},
        "post_feedforward_layernorm": {"scale": mn},
    }
    theirs = {
        "attention": {
            "query": {"kernel": q.reshape(D, N, H)},
            "key": {"kernel": k.reshape(D, K, H)},
            "value": {"kernel": v.reshape(D, K, H)},
            "out": {"kernel": o.reshape(N, H, D)},
            "query_norm": {"scale": qn},
            "key_norm": {"scale": kn},
        },
        "mlp": {"wi_0": {"kernel": gate}, "wi_1": {"kernel": up}, "wo": {"kernel": down}},
        "post_self_attention_layer_norm": {"scale": an},
        "post_mlp_layer_norm": {"scale": mn},
    }
    return ours, theirs


def main(folder: Path) -> int:
    rng = np.random.default_rng(0)
    layers = [layer(rng) for _ in range(LAYERS)]
    embedding, norm, head = kernel(rng, V, D), scale(rng, D), kernel(rng, D, V)
    ours = {
        "embed_tokens": {"embedding": embedding},
        "layers": {str(i): one for i, (one, _) in enumerate(layers)},
        "norm": {"scale": norm},
        "lm_head": {"kernel": head},
    }
    decoder = {f"layers_{i}": one for i, (_, one) in enumerate(layers)}
    decoder |= {"decoder_norm": {"scale": norm}, "logits_dense": {"kernel": head}}
    theirs = {"params": {"params": {"token_embedder": {"embedding": embedding}, "decoder": decoder}}}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(folder.absolute() / "ours" / "state", ours)
    checkpointer.save(folder.absolute() / "items", theirs)
    os.environ["MAXTEXT_ARGS"] = f"{ARGS} base_output_directory={folder.absolute()}"
    tokens = rng.integers(0, V, (1, 128), dtype=np.int32)
    packed = np.repeat([1, 2, 3], [41, 37, 50]).astype(np.int32)[None]
    counted = np.concatenate([np.arange(n, dtype=np.int32) for n in (41, 37, 50)])[None]
    rows = {"plain": (np.arange(128, dtype=np.int32)[None], np.ones_like(packed)), "packed": (counted, packed)}
    worst = 0.0
    for window in (None, 5):
        mine = inhouse.make(folder / "ours", CONFIG, "float32", window)
        other = maxtext_adapter.make(folder / "items", CONFIG, "float32", window)
        for name, (positions, segments) in rows.items():
            a, b = (np.asarray(f(tokens, positions, segments), np.float64) for f in (mine, other))
            relative = np.abs(a - b).max() / a.std()
            print(f"window {window}, {name}: max |delta logit| / spread {relative:.2e} on {jax.default_backend()}")
            worst = max(worst, relative) if relative == relative else np.inf
    return int(not worst <= 9e-5)  # the gate's own limit at its floor


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
