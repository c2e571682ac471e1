"""MaxText's own model on trees written with --layout maxtext and maxtext-unscanned, beside olmo_jax on the same weights.

    python bench/maxtext_tree.py HF_FOLDER

Wants MaxText (PyPI 0.2.5, Python 3.12) and olmo-parity in one Python, and a small model without YaRN. For each layout MaxText
restores the tree into its own model as a run does (load_parameters_path), and its logits are compared with olmo_jax's in
float32. A tree with two blocks exchanged is the control: it must differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import maxtext_adapter

from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.config import FULL, Olmo3Config
from olmo_parity.olmo_jax.config_hf import to_hf
from olmo_parity.parity.candidate import logits_function

TOKENS = 128
NOISE = 9e-5  # of the largest difference over the spread of the logits: the gate's own limit at its floor


def arguments(config: Olmo3Config, scanned: bool) -> str:
    """A training command's arguments for a model of this config."""
    rope = config.rope[FULL]
    if rope.rope_type != "default":
        raise SystemExit("MaxText applies YaRN to sliding layers too: this comparison wants a model without it")
    return (
        f"src/maxtext/configs/base.yml model_name=olmo3-7b base_emb_dim={config.hidden_size} "
        f"base_num_query_heads={config.num_attention_heads} base_num_kv_heads={config.num_key_value_heads} "
        f"head_dim={config.head_dim} base_mlp_dim={config.intermediate_size} "
        f"base_num_decoder_layers={config.num_hidden_layers} vocab_size={config.vocab_size} "
        f"sliding_window_size={config.sliding_window} mlp_activations=[silu,linear] "
        f"normalization_layer_epsilon={config.rms_norm_eps} use_qk_norm=true inhomogeneous_layer_cycle_interval=4 "
        f"rope_type=default rope_max_timescale={int(rope.rope_theta)} normalize_embedding_logits=false "
        f"logits_via_embedding={str(config.tie_word_embeddings).lower()} scan_layers={str(scanned).lower()} "
        f"max_target_length={TOKENS} enable_checkpointing=false"
    )


def maxtext_logits(items: Path, config: Olmo3Config, scanned: bool, tokens: np.ndarray, work: Path) -> np.ndarray:
    """[1, T, V] float32 of MaxText's model, restored from an item."""
    os.environ["MAXTEXT_ARGS"] = f"{arguments(config, scanned)} base_output_directory={work}"
    forward = maxtext_adapter.make(items, json.loads(json.dumps(to_hf(config))), "float32", None)
    positions = np.arange(TOKENS, dtype=np.int32)[None]
    return np.asarray(forward(tokens, positions, np.ones_like(positions)), np.float32)


def exchange_blocks(items: Path) -> None:
    """Put block 1 of a stacked matrix where block 0 was, and back."""
    import tensorstore as ts

    path = "params.params.decoder.layers.layers_0.mlp.wi_0.kernel/"
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{items}/"}, "path": path}
    store = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    values = store.read().result()
    store.write(values[:, ::-1]).result()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b).max() / b.astype(np.float64).std())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="HF folder of a small model")
    given = parser.parse_args()
    config = open_source(given.folder).config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, TOKENS), dtype=np.int32)
    work, failed = Path(tempfile.mkdtemp(prefix="olmo-parity-maxtext-")), False
    try:
        hf2orbax(given.folder, work / "ours", quiet=True)
        ours = logits_function(config, read_tree(work / "ours"), "float32")(
            tokens, np.arange(TOKENS, dtype=np.int32)[None], None
        )
        for layout in ("maxtext", "maxtext-unscanned"):
            items = work / layout / "0" / "items"
            hf2orbax(given.folder, items.parent, layout=layout, quiet=True)
            distance = relative(maxtext_logits(items, config, layout == "maxtext", tokens, work), ours)
            print(f"{layout}: max |delta logit| / spread {distance:.2e} against olmo_jax")
            failed |= not distance <= NOISE
        exchange_blocks(work / "maxtext" / "0" / "items")
        distance = relative(maxtext_logits(work / "maxtext" / "0" / "items", config, True, tokens, work), ours)
        print(f"control, two blocks exchanged: {distance:.2e}")
        failed |= distance <= NOISE
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
