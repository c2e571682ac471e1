"""How far apart two right float32 implementations are: transformers (eager) against olmo_jax on random weights.

    python bench/float32_noise.py [--wide]

Prints one line a case: max |delta logit|, the spread of the logits, their quotient (what the gate judges), max KL.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from random_models import build, raw_config

from olmo_parity.olmo_jax.model import from_tree
from olmo_parity.parity.metrics import summarise, token_stats

# fmt: off
CASES = {
    "tiny":      dict(width=64,   heads=4,  kv_heads=4, head_dim=16, mlp=128,  layers=8,  vocabulary=1000),
    "grouped":   dict(width=256,  heads=8,  kv_heads=2, head_dim=32, mlp=688,  layers=16, vocabulary=1000),
    "1024 wide": dict(width=1024, heads=16, kv_heads=4, head_dim=64, mlp=2752, layers=16, vocabulary=2000),
}
WIDE = {
    "7B layers":  dict(width=4096, heads=32, kv_heads=32, head_dim=128, mlp=11008, layers=4, vocabulary=2000),
    "32B layers": dict(width=5120, heads=40, kv_heads=8,  head_dim=128, mlp=27648, layers=2, vocabulary=2000),
}
# fmt: on


def measure(name: str, shape: dict, tokens: int, seed: int, spread: bool) -> float:
    model, config, tree = build(raw_config(**shape), seed, spread)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, tokens).astype(np.int32)
    with torch.no_grad():
        reference = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    del model
    candidate = from_tree(config, tree, dtype=jnp.float32)
    logits = np.asarray(nnx.jit(lambda m, x: m(x))(candidate, ids[None])[0])
    s = summarise(token_stats(reference, logits, ids), np.arange(tokens))
    relative = s["max_abs_delta_logit_shift_free"] / s["spread_of_logits"]
    print(
        f"{name:11} {'spread' if spread else 'step 0'}  seed {seed}  max |delta| {s['max_abs_delta_logit']:.2e}"
        f"  spread {s['spread_of_logits']:.3f}  quotient {relative:.2e}  KL max {s['kl_max']:.1e}",
        flush=True,
    )
    return relative


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    wide = "--wide" in sys.argv
    largest = max(
        measure(name, shape, 256 if wide else 512, seed, spread)
        for name, shape in (WIDE if wide else CASES).items()
        for seed in range(1 if wide else 5)
        for spread in (False, True)
    )
    print(f"largest quotient {largest:.2e}")
