"""Damaged checkpoints: a sentence that names file and tensor, exit 2, nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.safetensors_io import read_header
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput

from .broken import BROKEN, _config, _rebuild
from .conftest import random_tensors, run_convert, tiny_config, write_hf


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_folder_is_refused_with_a_sentence_and_leaves_nothing(name, ok_control, tmp_path):
    damage, words = BROKEN[name]
    damage(ok_control)
    with pytest.raises(BadInput) as caught:
        hf2orbax(ok_control, tmp_path / "run" / "0", quiet=True)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("name", BROKEN)
def test_the_damaged_folders_of_the_full_set_are_refused_too(name, fixture_path, tmp_path):
    folder = fixture_path(f"broken/{name}")
    assert json.loads((folder / "expect.json").read_text())["exit"] == 2
    with pytest.raises(BadInput) as caught:
        hf2orbax(folder, tmp_path / "0", quiet=True)
    for word in BROKEN[name][1]:
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_command_line_answers_with_exit_2_and_no_traceback(ok_control, tmp_path):
    BROKEN["wrong-shape"][0](ok_control)
    done = run_convert("hf2orbax", ok_control, tmp_path / "0")
    assert done.returncode == 2
    assert "(64, 48)" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "0").exists()


def test_the_good_folder_converts_without_a_message(ok_control, tmp_path):
    done = run_convert("hf2orbax", ok_control, tmp_path / "0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "note" not in done.stdout and "warn" not in done.stdout


def test_all_faults_are_listed_together(ok_control):
    def spoil(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.sinks"] = ["BF16", [4], bytes(8)]
        tensors["lm_head.weight"] = ["I8", [1000, 64], bytes(64000)]

    _rebuild(ok_control, spoil)
    with pytest.raises(BadInput) as caught:
        open_source(ok_control)
    assert len(caught.value.faults) == 3
    assert "(3 faults)" in str(caught.value)


def test_a_name_with_a_prefix_is_listed_with_the_nearest_match(tmp_path):
    config = tiny_config()
    tensors = {n.replace("model.", "model.language_model.", 1): a for n, a in random_tensors(config).items()}
    with pytest.raises(BadInput) as caught:
        open_source(write_hf(tmp_path / "hf", tensors, config))
    text = str(caught.value)
    assert "the nearest is model.layers.0.self_attn.q_proj.weight" in text
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in text
    assert "46 of 47" in text


def test_a_padded_vocabulary_is_called_padded(tmp_path):
    config = tiny_config(vocab_size=128)
    folder = write_hf(tmp_path / "hf", random_tensors(config), tiny_config(vocab_size=120))
    with pytest.raises(BadInput, match="padded: 128 rows, 8 beyond vocab_size 120"):
        open_source(folder)


def test_a_norm_of_one_head_is_explained(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.q_norm.weight"] = tensors["model.layers.1.self_attn.q_norm.weight"][:20]
    with pytest.raises(BadInput, match="the whole projection before the split into heads"):
        open_source(write_hf(tmp_path / "hf", tensors, config))


def test_a_tied_config_with_an_equal_stored_head_is_taken_and_said(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = open_source(write_hf(tmp_path / "hf", tensors, tiny_config(tie_word_embeddings=True)))
    assert "lm_head.weight" not in source.tensors
    assert any("left out" in note for note in source.notes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text("x"), "is a file"),
        (lambda p: p.mkdir(), "is empty"),
        (lambda p: (p.mkdir(), (p / "notes.txt").write_text("x")), "no checkpoint of a known form"),
        (
            lambda p: (p.mkdir(), (p / "pytorch_model.bin").write_text("x"), (p / "config.json").write_text("{}")),
            "pytorch_model.bin",
        ),
    ],
)
def test_a_path_that_is_no_checkpoint_is_named(make, words, tmp_path):
    make(tmp_path / "given")
    with pytest.raises(BadInput, match=words):
        open_source(tmp_path / "given")


def test_one_file_and_an_index_that_does_not_name_it_are_refused(ok_control):
    shutil.copy(ok_control / "model.safetensors", ok_control / "other.safetensors")
    header_names = open_source(ok_control).tensors
    index = {"weight_map": dict.fromkeys(header_names, "other.safetensors")}
    (ok_control / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="holds both"):
        open_source(ok_control)


def test_a_tensor_that_the_index_does_not_list_is_refused(ok_control):
    names = dict.fromkeys(open_source(ok_control).tensors, "model.safetensors")
    del names["model.norm.weight"]
    (ok_control / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BadInput, match="model.norm.weight.*is not listed"):
        open_source(ok_control)


HEADERS = {
    "empty file": (b"", "0 bytes"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    "not JSON": ((3).to_bytes(8, "little") + b"{,}", "not the JSON"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "JSON object is wanted"),
    "same name twice": ((26).to_bytes(8, "little") + b'{"a":{"dtype":1},"a":true}', "occurs twice"),
    "not UTF-8": ((2).to_bytes(8, "little") + b"\xff\xfe", "not the JSON"),
    "deep JSON": ((200000).to_bytes(8, "little") + b"[" * 200000, "not the JSON"),
    "negative": (
        (62).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}       ',
        "whole numbers",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_that_is_no_safetensors_file_is_explained(case, ok_control):
    content, words = HEADERS[case]
    (ok_control / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=words):
        open_source(ok_control)


@pytest.mark.parametrize("change", [("start", 2), ("start", -2), ("stop", 2)])
def test_offsets_that_overlap_leave_holes_or_do_not_fit_the_shape_are_refused(change, ok_control):
    from .broken import _header, _write

    header, data = _header(ok_control)
    offsets = header["model.layers.2.mlp.up_proj.weight"]["data_offsets"]
    assert offsets[1] < len(data)  # not the last tensor: the end of the file tells nothing
    if change[0] == "start":
        header["model.layers.2.mlp.up_proj.weight"]["data_offsets"] = [o + change[1] for o in offsets]
    else:
        header["model.layers.2.mlp.up_proj.weight"]["data_offsets"] = [offsets[0], offsets[1] + change[1]]
    _write(ok_control / "model.safetensors", header, data)
    with pytest.raises(BadInput, match="it overlaps|unaccounted|its data_offsets span"):
        open_source(ok_control)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{root}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_a_shard_outside_the_folder_is_not_opened_even_if_it_is_a_good_file(name, ok_control, tmp_path):
    shutil.move(ok_control / "model.safetensors", tmp_path / "outside.safetensors")
    (ok_control / "a").mkdir()
    names = [entry.name for entry in read_header(tmp_path / "outside.safetensors", [])]
    index = {"weight_map": dict.fromkeys(names, name.format(root=tmp_path))}
    (ok_control / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="leaves the checkpoint folder: refused before opening it"):
        open_source(ok_control)


@pytest.mark.parametrize("length", [-1, 1])
def test_a_byte_more_or_less_is_noticed(length, ok_control):
    file = ok_control / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] if length < 0 else content + b"\0")
    with pytest.raises(BadInput, match="1 short" if length < 0 else "1 bytes after"):
        open_source(ok_control)


def test_a_tokenizer_out_of_step_with_the_config_is_refused(fixture_path, tmp_path):
    folder = Path(shutil.copytree(fixture_path("tiny-trained/hf-bfloat16-step900"), tmp_path / "hf"))
    for name, key in (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id")):
        raw = json.loads((folder / name).read_text())
        raw[key] = 0
        (folder / name).write_text(json.dumps(raw))
    with pytest.raises(BadInput, match="eos_token_id.*out of step"):
        hf2orbax(folder, tmp_path / "0", quiet=True)
    assert not (tmp_path / "0").exists()


def test_every_non_finite_tensor_is_named_with_its_first_index(ok_control, tmp_path):
    def spoil(tensors):
        for name, where, bits in (("model.norm.weight", 5, 0x7F80), ("lm_head.weight", 64 * 999 + 3, 0xFFC1)):
            values = np.frombuffer(tensors[name][2], np.uint16).copy()
            values[where] = bits
            tensors[name][2] = values.tobytes()

    _rebuild(ok_control, spoil)
    with pytest.raises(BadInput) as caught:
        hf2orbax(ok_control, tmp_path / "0", quiet=True, chunk_bytes=8000)
    assert len(caught.value.faults) == 2
    assert "first at [5]" in str(caught.value) and "first at [999, 3]" in str(caught.value)


def test_an_unknown_config_key_is_let_through_by_name_and_the_manifest_says_so(ok_control, tmp_path):
    _config(ok_control, mystery=1)
    with pytest.raises(BadInput, match="--allow-unknown-key mystery"):
        open_source(ok_control)
    hf2orbax(ok_control, tmp_path / "0", allow_unknown_keys=["mystery"], quiet=True)
    assert json.loads((tmp_path / "0" / "manifest.json").read_text())["allowed_unknown_keys"] == ["mystery"]


def test_reading_a_source_needs_no_torch_transformers_or_safetensors():
    code = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None
import olmo_parity.convert.pipeline, olmo_parity.convert.describe
assert "jax" not in sys.modules
"""
    import subprocess
    import sys

    assert importlib.util.find_spec("safetensors")  # else this would prove nothing
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
