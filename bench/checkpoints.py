"""Checkpoints of OLMo 3's true layer shapes with any number of layers, made by streaming."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from olmo_parity.convert.mapping import weights
from olmo_parity.convert.safetensors_io import DTYPE_CODES
from olmo_parity.convert.safetensors_write import create_files, lay_out, write_rows
from olmo_parity.olmo_jax.config_hf import from_hf, to_hf

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8},
}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
POOL = 1 << 24  # random values; each slice starts at a random place in them, so that compression sees noise
SLICE = 1 << 23  # values written at once


def make(
    folder: Path, shape: str, layers: int, dtype: str = "bfloat16", vocab_size: int = 100278, seed: int = 0
) -> int:
    """Write an HF folder of `layers` layers; returns the bytes of its tensors."""
    rope = {"rope_type": "default", "rope_theta": 500000}
    raw = {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        **SHAPES[shape],
        "num_hidden_layers": layers,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": dtype,
    }
    config = from_hf(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config), indent=2))
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    pool = (rng.standard_normal(POOL, np.float32) * 0.02).astype(kind)
    wanted = weights(config)
    shards, places = lay_out([(w.hf, DTYPE_CODES[kind], w.shape) for w in wanted], 5_000_000_000)
    create_files(folder, shards, places)
    for weight in wanted:
        width = weight.shape[-1] if len(weight.shape) == 2 else 1
        step = max(SLICE // width, 1)
        for start in range(0, weight.shape[0], step):
            rows = min(step, weight.shape[0] - start)
            at = int(rng.integers(0, POOL - rows * width + 1))
            write_rows(folder, places[weight.hf], start, pool[at : at + rows * width].reshape(rows, *weight.shape[1:]))
    return sum(shard.length for shard in shards)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    print(make(options.folder, options.shape, options.layers, options.dtype), "bytes")
