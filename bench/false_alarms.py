"""How often the gate fails a right candidate: random configs, seeds and right candidates, judged as the gate judges.

    python bench/false_alarms.py [--configs 20] [--seeds 5] [--first 0]

Every run has two right candidates: olmo_jax (unrolled or scanned), and transformers itself with other attention, other
padding, other threads and another summation order of the head. The sequences are the built-in ones. Prints one line for
each alarm, and the rates with the smallest margin of every criterion.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from random_models import build, raw_config, tree_of

from olmo_parity.olmo_jax.model import from_tree
from olmo_parity.parity import batches, gate, metrics
from olmo_parity.parity.candidate import padded_row
from olmo_parity.parity.reference import _forward, impose_window

MAX_LAYERS = 9


def random_config(rng: np.random.Generator) -> dict:
    kv_heads = int(rng.choice([1, 2, 4]))
    layers = int(rng.integers(1, MAX_LAYERS))
    period = int(rng.integers(2, 6))
    types = ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(layers)]
    return raw_config(
        width=int(rng.choice([32, 64, 96, 128])),
        heads=kv_heads * int(rng.choice([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=int(rng.choice([8, 16, 32])),
        mlp=int(rng.choice([64, 104, 256])),
        layers=layers,
        vocabulary=int(rng.choice([259, 500, 1000])),
        window=int(rng.choice([8, 16, 100, 600])),
        yarn=(8.0, int(rng.choice([32, 256]))) if rng.random() < 0.5 else None,
        layer_types=types,
        tied=bool(rng.random() < 0.2),
    )


@nnx.jit
def jax_logits(model, tokens, positions, segment_ids):
    return model(tokens, positions, segment_ids).astype(jnp.float32)


def of_jax(config, tree, dtype, sequences, scan):
    found = []
    for s in sequences:
        own = config if s.window is None else config.replace(sliding_window=s.window)
        model = from_tree(own, tree, dtype=dtype, scan_layers=scan)
        length = -(-len(s.tokens) // 128) * 128
        found.append(np.asarray(jax_logits(model, *padded_row(s, length))[0, : len(s.tokens)]))
    return found


def of_torch(model, config, sequences, benign):
    model.set_attn_implementation("sdpa" if benign else "eager")
    found = []
    with torch.no_grad():
        for s in sequences:
            impose_window(model, config, s.window)
            found.append(np.concatenate([_forward(model, tokens, first, benign, torch) for tokens, first in s.parts()]))
    impose_window(model, config, None)
    return found


def compared(sequences, expected, found):
    plain, packed = [], []
    for s, a, b in zip(sequences, expected, found, strict=True):
        (packed if s.documents else plain).append(metrics.token_stats(a, b, s.tokens))
    return metrics.TokenStats.join(*plain), metrics.TokenStats.join(*packed)


def summary(stats):
    return metrics.summarise(stats, np.zeros(len(stats)))


def judged(sequences, runs, candidate32, candidate16):
    noise = summary(compared(sequences, runs["ref32"], runs["benign32"])[0])
    plain, packed = compared(sequences, runs["ref32"], candidate32)
    own, cand = (compared(sequences, runs["rounded"], x)[0] for x in (runs["ref16"], candidate16))
    criteria = gate.float32_criteria(summary(plain), noise) + gate.packed_criteria(summary(packed), noise)
    criteria += gate.bfloat16_criteria(summary(cand), summary(own), metrics.ratio_interval(own, cand))
    return criteria, gate.noise_faults(noise)


def one_run(raw, seed, spread):
    model, config, tree = build(raw, seed, spread)
    sequences = batches.built_in(config)
    runs = {"ref32": of_torch(model, config, sequences, False), "benign32": of_torch(model, config, sequences, True)}
    jax32 = of_jax(config, tree, jnp.float32, sequences, scan=seed % 2)
    rope = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16).to(torch.float32)  # weights rounded; the rotary tables go back to what they were
    for name, buffer in rope.items():
        model.get_buffer(name).copy_(buffer)
    runs["rounded"] = of_torch(model, config, sequences, False)
    tree16 = tree_of(model, config, jnp.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    runs["ref16"] = of_torch(model, config, sequences, False)
    benign16 = of_torch(model, config, sequences, True)
    jax16 = of_jax(config, tree16, jnp.bfloat16, sequences, scan=seed % 2)
    return {
        "olmo_jax": judged(sequences, runs, jax32, jax16),
        "torch": judged(sequences, runs, runs["benign32"], benign16),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="config to begin with")
    arguments = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    count, alarms, open_questions, margins = 0, {"float32": 0, "bfloat16": 0}, 0, {}
    for number in range(arguments.first, arguments.first + arguments.configs):
        raw = random_config(np.random.default_rng(number))
        for seed in range(arguments.seeds):
            for name, (criteria, faults) in one_run(raw, seed, spread=bool((number + seed) % 2)).items():
                count += 1
                open_questions += bool(faults)
                for leg in alarms:
                    failed = [c for c in criteria if c.leg == leg and not c.passed]
                    alarms[leg] += bool(failed)
                    for c in failed:
                        print(
                            f"alarm: config {number} seed {seed} {name}: {c.leg} {c.name} {c.value:.3g} > {c.limit:.3g}"
                        )
                for c in criteria:
                    if c.margin:
                        margins.setdefault((c.leg, c.name), []).append(c.margin)
        print(f"config {number}: {count} runs, alarms {alarms}, noise above the cap {open_questions}", flush=True)
    for (leg, name), values in margins.items():
        print(f"{leg:9} {name:45} margin min {min(values):.3g} median {np.median(values):.3g}")
    for leg, n in alarms.items():
        print(f"{leg}: {n} false alarms in {count} runs ({n / count:.1%})")
