"""verify: any one flipped bit is found and named, with the source or with the manifest alone."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from olmo_parity.convert.manifest import read_manifest
from olmo_parity.convert.mapping import weights
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.rope import rope_tables, tables_hash

from .conftest import random_tensors, run_convert, tiny_config, write_hf


@pytest.fixture(scope="module", params=["none", "zstd"])
def pair(request, tmp_path_factory):
    """An HF folder and the tree made from it, with several chunks an array."""
    root = tmp_path_factory.mktemp("pair")
    config = tiny_config(num_hidden_layers=2)
    write_hf(root / "hf", random_tensors(config), config)
    hf2orbax(root / "hf", root / "0", chunk_bytes=4000, compression=request.param, quiet=True)
    return root / "hf", root / "0"


def test_an_untouched_tree_is_equal_both_ways(pair):
    assert verify(*pair, quiet=True).equal and verify_manifest(pair[1], quiet=True).equal
    assert verify(pair[1], pair[0], quiet=True).equal
    assert verify(pair[1], pair[1], quiet=True).equal


def test_any_flipped_bit_in_the_files_of_the_tree_is_found_and_named(pair, tmp_path):
    """Random bits of random files, and every file at least once."""
    tree = shutil.copytree(pair[1], tmp_path / "0")
    files = sorted(p for p in (tree / "state").rglob("*") if p.is_file())
    rng = random.Random(0)
    chosen = [*files[:: max(len(files) // 25, 1)], *(rng.choices(files, [f.stat().st_size for f in files], k=25))]
    for file in chosen:
        good = file.read_bytes()
        at, bit = rng.randrange(len(good)), rng.randrange(8)
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        file.write_bytes(bad)
        try:
            result = verify_manifest(tree, quiet=True)
            assert not result.equal, (file, at, bit)
            assert any(str(file.relative_to(tree)) in text for text in result.differences)
        except BadInput as error:
            assert str(tree / "state") in str(error)
        finally:
            file.write_bytes(good)
    assert verify_manifest(tree, quiet=True).equal


def test_a_flipped_bit_in_the_values_fails_the_read_with_the_tensor_named(pair, tmp_path):
    tree = shutil.copytree(pair[1], tmp_path / "0")
    file = max((p for p in (tree / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    for result in (verify(pair[0], tree, quiet=True), verify_manifest(tree, quiet=True)):
        assert any(
            "cannot be read" in text and ("kernel" in text or "embedding" in text) for text in result.differences
        )


def test_a_changed_source_value_is_named_with_its_first_index(pair, tmp_path):
    source = shutil.copytree(pair[0], tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    tensors = random_tensors(config)
    for name, place in (("model.layers.1.mlp.gate_proj.weight", (70, 9)), ("model.embed_tokens.weight", (119, 63))):
        bits = tensors[name].view(np.uint16)
        bits[place] ^= 1
    write_hf(source, tensors, config)
    result = verify(source, pair[1], quiet=True)
    assert len(result.differences) == 2
    text = " ".join(result.differences)
    assert "layers/1/mlp/gate_proj/kernel" in text and "[9, 70]" in text and "HF index [70, 9]" in text
    assert "embed_tokens/embedding" in text and "1 values, first at [119, 63]" in text
    done = run_convert("verify", source, pair[1])
    assert done.returncode == 1 and done.stdout.startswith("different: 2 differences")


def test_a_changed_config_is_a_difference(pair, tmp_path):
    tree = shutil.copytree(pair[1], tmp_path / "0")
    raw = json.loads((tree / "olmo_config.json").read_text())
    raw["rope_parameters"]["sliding_attention"]["rope_theta"] = 10000
    (tree / "olmo_config.json").write_text(json.dumps(raw))
    assert any("rope.sliding_attention.rope_theta" in d for d in verify(pair[0], tree, quiet=True).differences)
    assert any("rotary tables differ" in d for d in verify_manifest(tree, quiet=True).differences)


def test_another_dtype_is_a_difference_unless_it_was_asked_for(pair, tmp_path):
    hf2orbax(pair[0], tmp_path / "0", dtype="float32", quiet=True)
    result = verify(pair[0], tmp_path / "0", quiet=True)
    assert result.equal and any("cast to float32 on request" in note for note in result.notes)
    manifest = tmp_path / "0" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"dtype": "float32",\n "compression"', '"dtype": null,\n "compression"')
    )
    assert any("is bfloat16 in" in d for d in verify(pair[0], tmp_path / "0", quiet=True).differences)


def test_a_missing_or_unexpected_file_of_the_tree_is_named(pair, tmp_path):
    tree = shutil.copytree(pair[1], tmp_path / "0")
    (tree / "state" / "stray").write_text("x")
    assert "file state/stray is not in the manifest" in verify_manifest(tree, quiet=True).differences
    (tree / "state" / "stray").unlink()
    (tree / "commit_success.txt").unlink()
    assert "file commit_success.txt is missing" in verify_manifest(tree, quiet=True).differences


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99, "tensors": []}'])
def test_a_damaged_manifest_is_a_sentence(content, pair, tmp_path):
    tree = shutil.copytree(pair[1], tmp_path / "0")
    (tree / "manifest.json").write_text(content)
    done = run_convert("verify", "--manifest", tree)
    assert done.returncode == 2 and "manifest" in done.stderr and "Traceback" not in done.stderr


def test_the_manifest_says_where_everything_came_from(pair):
    source, tree = pair
    manifest = read_manifest(tree)
    config = from_hf(json.loads((source / "config.json").read_text()))
    assert manifest["rotary_tables_sha256"] == tables_hash(rope_tables(config))
    assert manifest["source"]["path"] == str(source)
    assert {"python", "numpy", "tensorstore", "olmo-parity"} <= manifest["versions"].keys()
    by_name = {entry["source_name"]: entry for entry in manifest["tensors"]}
    assert list(by_name) == [w.hf for w in weights(config)]
    entry = by_name["model.layers.0.self_attn.k_proj.weight"]
    assert entry["source_file"] == str(source / "model.safetensors")
    assert (entry["target_path"], entry["layout"]) == ("layers/0/self_attn/k_proj/kernel", "TRANSPOSED")
    assert (entry["source_shape"], entry["shape"], entry["dtype"]) == ([40, 64], [64, 40], "bfloat16")


def test_the_hashes_of_the_manifest_are_plain_sha256_of_the_bytes(tmp_path):
    import hashlib

    config = tiny_config(num_hidden_layers=1)
    tensors = random_tensors(config)
    hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", quiet=True)
    for entry in read_manifest(tmp_path / "0")["tensors"]:
        array = tensors[entry["source_name"]]
        assert entry["source_sha256"] == hashlib.sha256(array.tobytes()).hexdigest()
        laid = np.ascontiguousarray(array.T if entry["layout"] == "TRANSPOSED" else array)
        assert entry["target_sha256"] == hashlib.sha256(laid.tobytes()).hexdigest()  # one chunk: the array's own bytes


def test_a_native_source_is_verified_with_and_without_its_padding_rows(fixture_path, tmp_path):
    native = fixture_path("tiny-gqa/native/step0")
    for policy in ("cut", "keep"):
        core2orbax(native, tmp_path / policy, vocabulary=policy, quiet=True)
        assert verify(native, tmp_path / policy, quiet=True).equal
        assert verify_manifest(tmp_path / policy, quiet=True).equal
    assert not verify(tmp_path / "cut", tmp_path / "keep", quiet=True).equal


def test_the_command_wants_two_checkpoints_or_one_and_manifest(pair):
    assert run_convert("verify", pair[0]).returncode == 2
    assert run_convert("verify", "--manifest", *pair).returncode == 2
    done = run_convert("verify", *pair, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["equal"] is True


def test_the_revision_of_a_hub_snapshot_is_recorded_and_a_rounded_start_is_said(ok_control, tmp_path):
    snapshot = tmp_path / "models--allenai--Olmo" / "snapshots" / "abc123"
    shutil.copytree(ok_control, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "stage1-step0").write_text("abc123")
    source = open_source(snapshot)
    assert source.revision == "abc123 (stage1-step0)"
    assert any("core2orbax" in note for note in source.notes)
    (refs / "stage1-step0").rename(refs / "stage1-step1000")
    assert not open_source(snapshot).notes
