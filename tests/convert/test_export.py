"""orbax2hf: byte-equal tensors, and a config.json that both lines of transformers read as the same function."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from olmo_parity.convert import export
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.hf_config import hf_config
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.config import RopeParameters
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.rope import rope_tables

from .conftest import random_tensors, read_hf, run_convert, same_bits, tiny_config, write_hf
from .test_pipeline import CASES, with_all_patterns

# A folder with transformers 4.57 and what it needs (pip install --target), used beside the torch that is installed.
TRANSFORMERS_4 = os.environ.get("OLMO_PARITY_TRANSFORMERS_4")


def assert_same_folders(a, b) -> None:
    a, b = read_hf(a), read_hf(b)
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name


@pytest.mark.parametrize("case", CASES)
def test_hf_to_orbax_to_hf_is_byte_equal_per_tensor(case, fixture_path, tmp_path):
    folder = fixture_path(case)
    hf2orbax(folder, tmp_path / "0", quiet=True)
    orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    assert_same_folders(folder, tmp_path / "back")
    assert open_source(tmp_path / "back").config.differences(open_source(folder).config) == []
    for file in folder.glob("tokenizer*.json"):
        if "audit" not in file.name:
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("native", "hf"), [("tiny-gqa/native/step0", "hf-float32"), ("tiny-sharded/native/step0", "hf-float32")]
)
def test_core_to_orbax_to_hf_equals_ai2s_own_hf_form(native, hf, fixture_path, tmp_path):
    reference = fixture_path(f"{native.split('/')[0]}/{hf}")
    core2orbax(fixture_path(native), tmp_path / "0", quiet=True)
    orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    assert_same_folders(reference, tmp_path / "back")


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 5000])
def test_all_bfloat16_bit_patterns_come_back(chunk_bytes, tmp_path):
    with_all_patterns(tmp_path / "hf")
    hf2orbax(tmp_path / "hf", tmp_path / "0", allow_nonfinite=True, chunk_bytes=chunk_bytes, quiet=True)
    with pytest.raises(BadInput, match="non-finite"):
        orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    assert not (tmp_path / "back").exists()
    orbax2hf(tmp_path / "0", tmp_path / "back", allow_nonfinite=True, quiet=True)
    assert_same_folders(tmp_path / "hf", tmp_path / "back")


def test_a_round_trip_of_distinct_integers_keeps_every_cell(tmp_path):
    config = tiny_config()
    tensors = {n: np.arange(a.size, dtype=np.float32).reshape(a.shape) for n, a in random_tensors(config).items()}
    hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", quiet=True, chunk_bytes=2000)
    orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    assert_same_folders(tmp_path / "hf", tmp_path / "back")


@pytest.fixture
def tree(tiny, tmp_path):
    hf2orbax(tiny, tmp_path / "0", quiet=True)
    return tmp_path / "0"


def test_shards_carry_an_index_and_metadata_that_safetensors_reads(tree, tiny, tmp_path):
    from safetensors import safe_open

    orbax2hf(tree, tmp_path / "back", shard_bytes=50_000, quiet=True)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    tensors = read_hf(tiny)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, "flax") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert tuple(opened.get_slice(name).get_shape()) == tensors[name].shape


def test_the_result_verifies_both_ways_and_a_flipped_bit_is_named(tree, tiny, tmp_path):
    orbax2hf(tree, tmp_path / "back", quiet=True)
    assert verify(tree, tmp_path / "back", quiet=True).equal
    assert verify(tmp_path / "back", tree, quiet=True).equal
    assert verify_manifest(tmp_path / "back", quiet=True).equal
    file = tmp_path / "back" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for result in (verify_manifest(tmp_path / "back", quiet=True), verify(tree, tmp_path / "back", quiet=True)):
        assert any("lm_head" in text for text in result.differences)


def test_read_back_notices_a_wrong_byte_and_leaves_no_target(tree, tmp_path, monkeypatch):
    real = export.write_rows

    def wrong(folder, place, start, rows):
        rows = rows.copy()
        rows.reshape(-1).view(np.uint16)[-1] ^= 1
        real(folder, place, start, rows)

    monkeypatch.setattr(export, "write_rows", wrong)
    with pytest.raises(BadInput, match="differs"):
        orbax2hf(tree, tmp_path / "back", quiet=True)
    assert not (tmp_path / "back").exists()


def test_a_killed_export_resumes(tree, tiny, tmp_path, monkeypatch):
    real, count = export._copy, []

    def dying(*arguments):
        if len(count) == 7:
            raise KeyboardInterrupt
        count.append(1)
        return real(*arguments)

    monkeypatch.setattr(export, "_copy", dying)
    with pytest.raises(KeyboardInterrupt):
        orbax2hf(tree, tmp_path / "back", workers=1, quiet=True)
    monkeypatch.undo()
    with pytest.raises(BadInput, match="shard_bytes: was"):
        orbax2hf(tree, tmp_path / "back", shard_bytes=1000, quiet=True)
    assert orbax2hf(tree, tmp_path / "back", quiet=True).resumed == 7
    assert_same_folders(tiny, tmp_path / "back")


def test_a_source_that_is_no_tree_is_refused(tiny, tmp_path):
    with pytest.raises(BadInput, match="wants an Orbax tree"):
        orbax2hf(tiny, tmp_path / "back", quiet=True)


# config.json as transformers reads it.

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2,
}
PROBE = """
import json, sys
import torch, transformers
from transformers import AutoConfig, Olmo3ForCausalLM
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder)
    model = Olmo3ForCausalLM(config).eval()
    x, positions = torch.zeros(1, 40, config.hidden_size), torch.arange(40)[None]
    found = {"version": transformers.__version__, "dtype": str(getattr(config, "dtype", None) or config.torch_dtype)}
    if hasattr(model.model, "rotary_embs"):
        tables = {k: v(x, positions) for k, v in model.model.rotary_embs.items()}
    else:
        tables = {t: model.model.rotary_emb(x, positions, t) for t in ("sliding_attention", "full_attention")}
    for name, (cos, sin) in tables.items():
        found[name] = [cos[0, -1].tolist(), sin[0, -1].tolist()]
    found["layer_types"], found["window"] = config.layer_types, config.sliding_window
    found["eps"], found["head_dim"] = config.rms_norm_eps, model.model.layers[0].self_attn.head_dim
    print(json.dumps(found))
"""


def as_transformers_reads(folders, line: str) -> list[dict]:
    """What one line of transformers makes of each config.json; the rotary as cos and sin at position 39."""
    environment = dict(os.environ)
    if line == "4":
        if not TRANSFORMERS_4:
            pytest.skip("set OLMO_PARITY_TRANSFORMERS_4 to a folder with transformers 4.57")
        environment["PYTHONPATH"] = TRANSFORMERS_4
    else:
        pytest.importorskip("transformers")
    command = [sys.executable, "-c", PROBE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in done.stdout.splitlines()]
    assert all(f["version"].startswith(line) for f in found) and len(found) == len(folders)
    return found


@pytest.mark.parametrize("line", ["4", "5"])
def test_both_lines_of_transformers_read_the_config_as_we_do(line, tmp_path):
    configs, folders = [], []
    for number, (theta, full) in enumerate(itertools.product((500000, 10000.0), ({"rope_type": "default"}, YARN))):
        rope = {"full_attention": {**full, "rope_theta": theta}}
        rope["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
        configs.append(from_hf(tiny_config(rope_parameters=rope)))
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(json.dumps(hf_config(configs[-1].replace(dtype="bfloat16"))))
    for config, found in zip(configs, as_transformers_reads(folders, line), strict=True):
        for layer_type, table in rope_tables(config).items():
            angle = 39 * np.concatenate([table.inv_freq, table.inv_freq]).astype(np.float64)
            wanted = [np.cos(angle) * table.attention_factor, np.sin(angle) * table.attention_factor]
            np.testing.assert_allclose(found[layer_type], wanted, atol=2e-5)  # float32 angles up to 39 radians
        assert found["layer_types"] == list(config.layer_types) and found["window"] == 16
        assert found["head_dim"] == 20 and "bfloat16" in found["dtype"] and found["eps"] == 1e-6


def test_our_own_reader_takes_every_spelling_back(tmp_path):
    rope = {"full_attention": {**YARN, "rope_theta": 500000}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 500000}
    config = from_hf(tiny_config(rope_parameters=rope))
    for spelling in ("both", "4", "5"):
        assert from_hf(hf_config(config, spelling)).differences(config) == []
    assert "rope_parameters" not in hf_config(config, "4") and "rope_theta" not in hf_config(config, "5")


@pytest.mark.parametrize("sliding", [RopeParameters("default", 10000.0), RopeParameters("linear", 500000, factor=2.0)])
def test_what_4_57_cannot_say_is_refused_and_5_alone_is_offered(sliding):
    config = from_hf(tiny_config())
    config = config.replace(rope={**config.rope, "sliding_attention": sliding})
    with pytest.raises(BadInput, match="--transformers 5"):
        hf_config(config)
    with pytest.raises(BadInput, match="no config.json says this to transformers 4.57"):
        hf_config(config, "4")
    assert from_hf(hf_config(config, "5")).differences(config) == []
    with pytest.raises(BadInput, match="not supported"):
        hf_config(config, "6")


def test_the_exported_folder_loads_in_transformers_with_every_weight(tree, tiny, tmp_path):
    pytest.importorskip("transformers")
    from transformers import Olmo3ForCausalLM

    orbax2hf(tree, tmp_path / "back", shard_bytes=60_000, quiet=True)
    model, info = Olmo3ForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tensors = read_hf(tiny)
    for name, value in model.state_dict().items():
        assert value.view(dtype=__import__("torch").uint16).numpy().tobytes() == tensors[name].tobytes()


def test_the_commands_say_what_they_did(tree, tmp_path):
    done = run_convert("orbax2hf", tree.parent, tmp_path / "back") if len(list(tree.parent.iterdir())) == 1 else None
    done = done or run_convert("orbax2hf", tree, tmp_path / "back")
    assert done.returncode == 0 and "47 tensors" in done.stdout and "verified" in done.stdout
    shutil.rmtree(tmp_path / "back")
