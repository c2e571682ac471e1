"""Small checkpoints made in the test: copies of ok-control with one thing wrong, and configs of any size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from olmo_parity.convert import safetensors_write
from olmo_parity.convert.mapping import weights
from olmo_parity.convert.safetensors_io import DTYPE_CODES, read_header, read_rows
from olmo_parity.convert.safetensors_io import DTYPES as BY_CODE
from olmo_parity.olmo_jax.config_hf import from_hf

BF16 = np.dtype(ml_dtypes.bfloat16)


def write_hf(folder: Path, tensors: dict[str, np.ndarray], config: dict | None, shard_bytes: int = 1 << 40) -> Path:
    """An HF folder with these tensors, and this config.json where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [(name, DTYPE_CODES[array.dtype], array.shape) for name, array in tensors.items()]
    shards, places = safetensors_write.lay_out(listed, shard_bytes)
    safetensors_write.create_files(folder, shards, places)
    for name, array in tensors.items():
        safetensors_write.write_rows(folder, places[name], 0, array)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_hf(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every shard of a folder."""
    found, faults = {}, []
    for file in sorted(folder.glob("*.safetensors")):
        for entry in read_header(file, faults):
            rows = entry.shape[0] if entry.shape else 1
            found[entry.name] = read_rows(entry, BY_CODE[entry.code], 0, rows)
    assert not faults, faults
    return found


def tiny_config(**changes) -> dict:
    """A config.json of 4 layers with kv heads of their own number and a head width that is not width over heads."""
    rope = {"rope_type": "default", "rope_theta": 500000}
    layers = changes.get("num_hidden_layers", 4)
    raw = {
        "model_type": "olmo3",
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "sliding_window": 16,
        "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
    }
    return {**raw, **changes}


def random_tensors(config: dict, dtype: np.dtype = BF16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for a config.json, by HF name."""
    rng = np.random.default_rng(seed)
    return {w.hf: rng.standard_normal(w.shape, np.float32).astype(dtype) for w in weights(from_hf(config))}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def run_convert(*arguments, **options) -> subprocess.CompletedProcess:
    """olmo-convert in a process of its own."""
    code = "from olmo_parity.cli import convert_main; convert_main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def ok_control(fixture_path, tmp_path) -> Path:
    """A copy of the good checkpoint that the broken ones are made from."""
    return Path(shutil.copytree(fixture_path("broken/ok-control"), tmp_path / "ok-control"))


@pytest.fixture
def tiny(tmp_path) -> Path:
    """An HF folder of tiny_config with random bfloat16 weights."""
    config = tiny_config()
    return write_hf(tmp_path / "tiny", random_tensors(config), config)
