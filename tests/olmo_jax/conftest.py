"""Checkpoints and small configs for the tests of olmo_jax. Also run by path from the scripts the tests start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.olmo_jax.config import FULL, SLIDING, Olmo3Config, RopeParameters
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.tree import unflatten

# These tests compile a hundred small programs once each: most of the time would go into optimising them.
jax.config.update("jax_disable_most_optimizations", True)

YARN = RopeParameters(
    "yarn", 100.0, 4.0, 64, 4.0, 0.5, 1.2, True
)  # blends dimensions 1 to 6 of 8; 1.6 to 5.2 without truncate


def make_tiny_config(**changes) -> Olmo3Config:
    """Four layers, GQA, head width other than D / N, a window of 4 tokens, YaRN on the full layer."""
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "layer_types": (SLIDING, SLIDING, SLIDING, FULL),
        "sliding_window": 4,
        "rope": {SLIDING: RopeParameters("default", 10000.0), FULL: YARN},
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    if "layer_types" in changes:
        changes.setdefault("num_hidden_layers", len(changes["layer_types"]))
    return Olmo3Config(**fields | changes)


def make_lively_tree(config: Olmo3Config, seed: int = 0) -> dict:
    """float32 parameters in which every leaf matters: large matrices and norms that are not ones."""
    rng = np.random.default_rng(seed)
    flat = {}
    for weight in weights(config):
        noise = rng.standard_normal(weight.jax_shape).astype(np.float32)
        flat[weight.jax] = 1 + 0.3 * noise if weight.jax.endswith("scale") else 0.2 * noise
    return unflatten(flat)


def load_checkpoint(folder: Path, config_folder: Path | None = None) -> tuple[Olmo3Config, dict]:
    """(config, tree of NumPy arrays in the stored dtype) of a Hugging Face folder."""
    from safetensors.flax import load_file

    config = from_hf(json.loads(((config_folder or folder) / "config.json").read_text()))
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= {name: np.asarray(array) for name, array in load_file(file).items()}
    flat = {w.jax: apply_layout(w.layout, stored.pop(w.hf)) for w in weights(config)}
    assert not stored
    return config, unflatten(flat)


def load_batch(case: Path, logits: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """(tokens [B, T] padded at the end, which a causal model does not see; logits [T_i, V padded] of each row)."""
    from safetensors.numpy import load_file

    rows = load_file(case / "token_ids.safetensors")
    tokens = np.zeros((len(rows), max(map(len, rows.values()))), np.int32)
    for i, row in enumerate(rows.values()):
        tokens[i, : len(row)] = row
    stored = load_file(logits)
    return tokens, [stored[name.replace("ids", "logits")] for name in rows]


def compare(reference: list[np.ndarray], logits: np.ndarray) -> tuple[float, np.ndarray]:
    """(max |delta logit|, KL(reference || logits) of every position in nats), over the true vocabulary, in float64.

    logits [B, T, V]; reference [T_i, V padded] for each row.
    """

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    worst, divergences = 0.0, []
    for wanted, found in zip(reference, np.asarray(logits, np.float64), strict=True):
        wanted, found = wanted[:, : found.shape[-1]].astype(np.float64), found[: len(wanted)]
        delta = np.abs(wanted - found).max()
        worst = max(worst, delta if np.isfinite(delta) else np.inf)
        p, q = log_softmax(wanted), log_softmax(found)
        divergences.append((np.exp(p) * (p - q)).sum(-1))
    return worst, np.concatenate(divergences)


@pytest.fixture
def optimised():
    """Compiled as a user's program would be."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def tiny_config():
    return make_tiny_config


@pytest.fixture
def lively_tree():
    return make_lively_tree


@pytest.fixture
def checkpoint():
    return load_checkpoint


@pytest.fixture
def batch():
    return load_batch


@pytest.fixture
def compared():
    return compare


@pytest.fixture
def run_alone():
    """run_alone(script, *arguments, flags=...): what a script prints, as JSON, run in a process of its own with these XLA
    flags. The names of this file are in the script's scope."""

    def run(script: str, *arguments: str, flags: str):
        head = f"import runpy, sys; globals().update(runpy.run_path({str(Path(__file__))!r}))\n"
        found = subprocess.run(
            [sys.executable, "-c", head + script, *map(str, arguments)],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert found.returncode == 0, found.stderr[-3000:]
        return json.loads(found.stdout.splitlines()[-1])

    return run
