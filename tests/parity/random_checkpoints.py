"""Hugging Face folders with random weights in which every weight matters, and one process's worth of judging mutants on them."""

import json
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.hf_config import hf_config
from olmo_parity.convert.mapping import weights
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.parity import batches, devices, gate, identity
from olmo_parity.parity.legs import Legs
from olmo_parity.parity.mutants.child import Run
from olmo_parity.parity.mutants.judge import Judge

SLIDE, WIDE = "sliding_attention", "full_attention"


def raw_config(**changes) -> dict:
    """Four layers, GQA, head width other than D / N, YaRN on the full layer."""
    fields = {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 40,
        "layer_types": [SLIDE, SLIDE, SLIDE, WIDE],
        "max_position_embeddings": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": yarn(8.0, 256),  # its ramp is not at whole dimensions
        "sliding_window": 16,
        "tie_word_embeddings": False,
        "vocab_size": 120,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
    } | changes
    return fields | {"num_hidden_layers": len(fields["layer_types"])}


def yarn(factor: float, original: int) -> dict:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2}  # fmt: skip


def write_checkpoint(folder: Path, raw: dict, seed: int = 0, spread: bool = True) -> Path:
    """Matrices N(0, 0.25) and norms 1 + 0.1 N; not spread: N(0, 0.02) and norms ones, as at step 0."""
    numpy = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(seed)
    config, tensors = from_hf(raw), {}
    for w in weights(config):
        noise = rng.standard_normal(w.shape).astype(np.float32)
        tensors[w.hf] = (1 + 0.1 * spread * noise) if len(w.shape) == 1 else (0.25 if spread else 0.02) * noise
        tensors[w.hf] = tensors[w.hf].astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))  # in the spellings of all releases
    return folder


def judging(checkpoint: Path, folder: Path, candidate: Path | None = None) -> Run:
    """What the child process of `olmo-parity mutants` works with, in this process. folder: for the reference's logits."""
    source = open_source(checkpoint)
    target = open_source(candidate) if candidate else source
    sequences = batches.built_in(source.config)
    legs = Legs(source, target, sequences, folder, identity.versions(), False, False, devices.Placement(), (),
                lambda _: None, str(checkpoint))  # fmt: skip
    noise, rounded = legs.float32_references(), legs.bfloat16_references()
    devices.full_float32_jax()
    return Run(Judge(source, target, sequences, folder, rounded, noise, gate.DEFAULT, {}))
