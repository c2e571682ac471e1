"""Input that somebody broke, and leftovers in the way: a sentence and exit code 2, and nothing that is not ours is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

from olmo_parity.convert import pipeline, staging
from olmo_parity.convert.carry import carried_files, tokenizer_faults
from olmo_parity.convert.core_io import Chunk, CoreTensor, _inside, trainer_position
from olmo_parity.convert.core_source import _adam_step
from olmo_parity.convert.describe import as_text, inspect
from olmo_parity.convert.diff import diff
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify_manifest
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import random_tensors, run_convert, tiny_config, write_hf
from .test_staging import stop_after

HUGE = 10**400  # no float holds it
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.2,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = tiny_config(num_hidden_layers=1)
    return write_hf(tmp_path_factory.mktemp("hostile") / "hf", random_tensors(config), config)


@pytest.fixture
def source(small, tmp_path):
    return shutil.copytree(small, tmp_path / "hf")


@pytest.mark.parametrize("value", [None, True, HUGE, 10**12, -1, 1.5, "x", [], [1], {"a": 1}, float("nan")])
def test_a_number_of_the_config_that_is_none_is_a_fault_by_name(value):
    plain = {k: v for k, v in tiny_config().items() if k != "rope_parameters"}
    scaling = {k: v for k, v in YARN.items() if k != "rope_theta"}
    for key in ("head_dim", "hidden_size", "vocab_size"):
        if value is not None:
            with pytest.raises(BadInput, match=key):
                from_hf(tiny_config(**{key: value}))
    for key in YARN.keys() - {"rope_type", "attention_factor"}:
        block = {**YARN, key: value}
        for raw in (
            {**plain, "rope_parameters": {"full_attention": block, "sliding_attention": block}},
            {**plain, "rope_theta": block["rope_theta"], "rope_scaling": {**scaling, **block}},
            {**plain, "rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}, "rope_scaling": block},
        ):
            try:
                from_hf(raw)
            except BadInput:
                continue
            assert value in (10**12, 1.5) or value is None  # numbers, odd as they are; or another spelling states it


@pytest.mark.parametrize("value", [[], {}, "x"])
def test_a_theta_that_is_no_number_beside_a_good_one_is_a_fault(value):
    with pytest.raises(BadInput, match="rope_theta"):
        from_hf(tiny_config(rope_theta=value))


def test_a_key_of_the_config_that_is_said_twice_is_refused(source):
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 1e-5}')
    with pytest.raises(BadInput, match="'rms_norm_eps' occurs twice"):
        open_source(source)


def damaged(folder, change) -> None:
    """model.safetensors with another header: change(header) edits it, or returns the text to write."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = (change(header) or json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


HEADERS = {
    "a dtype that is a list": lambda h: h["model.norm.weight"].update(dtype=["BF16"]),
    "a dtype that is null": lambda h: h["model.norm.weight"].update(dtype=None),
    "a shape beyond any float": lambda h: h["model.norm.weight"].update(shape=[HUGE]),
    "a number of 5000 digits": lambda h: json.dumps(h).replace("[64]", f"[{'1' * 5000}]", 1),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_somebody_broke_is_a_fault(case, source):
    damaged(source, HEADERS[case])
    with pytest.raises(BadInput, match="model.safetensors"):
        open_source(source)
    described = inspect(source)
    assert described.source.faults and as_text(described)


def test_a_tied_head_and_embedding_that_are_single_numbers_are_a_fault(tmp_path):
    config = tiny_config(num_hidden_layers=1, tie_word_embeddings=True)
    number = np.zeros((), ml_dtypes.bfloat16)
    tensors = {**random_tensors(config), "lm_head.weight": number, "model.embed_tokens.weight": number}
    with pytest.raises(BadInput, match="embed_tokens"):
        open_source(write_hf(tmp_path / "hf", tensors, config))


@pytest.mark.parametrize(
    "tokenizer", [{"added_tokens": 5}, {"added_tokens": [{"content": [1], "id": 2}]}, {"model": {"vocab": {"a": [1]}}}]
)
def test_a_tokenizer_of_odd_values_is_no_crash(tokenizer, source):
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": ["x"]}))
    config = from_hf(tiny_config(eos_token_id=7))
    faults = tokenizer_faults(carried_files(source), config)
    assert bool(faults) == ("added_tokens" in tokenizer)


def test_optimizer_steps_and_chunks_of_odd_shapes_are_faults(tmp_path):
    faults = []
    step = CoreTensor("optim.state.w.step", "float32", (2,), (Chunk((0,), (2,), tmp_path / "f", 0, 1),))
    assert _adam_step({step.name: step}, faults) is None and "one finite number" in faults[0]
    assert not _inside(Chunk((0, 0), (-2, -3), tmp_path, 0, 0), (2, 3))  # its product is that of the shape


def test_a_trainer_state_with_a_damaged_name_in_it_is_a_sentence(tmp_path):
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archivé/data.pkl", b"N.")
    (tmp_path / "train").mkdir()
    broken = out.getvalue().replace("é".encode(), b"\xc3\x28", 1)  # in the member's own header alone
    (tmp_path / "train" / "rank0.pt").write_bytes(broken)
    with pytest.raises(BadInput, match=r"rank0.pt is damaged"):
        trainer_position(tmp_path)


def test_a_manifest_with_anything_missing_or_odd_is_named(small, tmp_path):
    hf2orbax(small, tmp_path / "0", quiet=True)
    orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    for folder in (tmp_path / "0", tmp_path / "back"):
        file = folder / "manifest.json"
        whole = json.loads(file.read_text())
        row = "target_path" if folder.name == "0" else "target_name"
        for path in (["config_sha256"], ["tensors"], ["tree_files"], ["tensors", 0, row], ["tree_files", 0, "crc32"]):
            manifest = json.loads(json.dumps(whole))
            place = manifest
            for key in path[:-1]:
                place = place[key]
            del place[path[-1]]
            file.write_text(json.dumps(manifest))
            with pytest.raises(BadInput, match=f"manifest.json .*(\n.*)*{path[-1]}"):
                verify_manifest(folder, quiet=True)
        for key, value in ("tensors", {}), ("tensors", [1]), ("tree_files", [[]]), ("carried", 1):
            file.write_text(json.dumps({**whole, key: value}))
            with pytest.raises(BadInput, match="manifest.json"):
                verify_manifest(folder, quiet=True)


def test_no_warning_of_numpy_reaches_a_user(tmp_path):
    config = tiny_config(num_hidden_layers=1)
    tensors = random_tensors(config, np.dtype(np.float32))
    tensors["model.norm.weight"].view(np.uint32)[:3] = [0x7F800001, 0x7F7FFFFF, 0x80000001]  # signalling NaN, largest
    write_hf(tmp_path / "hf", tensors, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diff(tmp_path / "hf", tmp_path / "hf", quiet=True)
        with pytest.raises(BadInput, match="beyond the range of float16"):
            hf2orbax(tmp_path / "hf", tmp_path / "0", dtype="float16", allow_nonfinite=True, quiet=True)


@pytest.mark.parametrize("path", ["~no-such-user/x", os.fsdecode(b"a\xff")])
def test_a_path_that_cannot_be_used_is_a_sentence(path, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    for call in (lambda: open_source(path), lambda: hf2orbax(small, path, quiet=True), lambda: verify_manifest(path)):
        with pytest.raises(BadInput, match="home folder|UTF-8"):
            call()


@pytest.mark.parametrize("target", ["loop", "loop/0"])
def test_a_target_in_a_loop_of_links_is_a_sentence(target, small, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadInput, match="loop"):
        hf2orbax(small, tmp_path / target, quiet=True)


@pytest.mark.parametrize("name", [".0.converting", ".0.replaced"])
@pytest.mark.parametrize("target", [False, True])
def test_what_lies_under_the_names_of_our_own_work_is_not_deleted(name, target, small, tmp_path):
    if target:
        hf2orbax(small, tmp_path / "0", quiet=True)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match="is in the way"):
        hf2orbax(small, tmp_path / "0", overwrite=True, quiet=True)
    assert (tmp_path / name / "thesis.txt").read_text() == "x"


def test_a_link_under_the_staging_name_is_not_followed(small, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("x")
    (tmp_path / ".0.converting").symlink_to("elsewhere")
    with pytest.raises(BadInput, match="cannot be made"):
        hf2orbax(small, tmp_path / "0", quiet=True)
    assert os.listdir(tmp_path / "elsewhere") == ["thesis.txt"] and not (tmp_path / "0").exists()


@pytest.mark.parametrize("holds", ["nothing", "thesis.txt"])
def test_an_old_checkpoint_outlives_whatever_was_put_in_its_place(holds, small, tmp_path):
    hf2orbax(small, tmp_path / "0", quiet=True)
    manifest = (tmp_path / "0" / "manifest.json").read_bytes()
    os.rename(tmp_path / "0", tmp_path / ".0.replaced")  # killed between the renames
    (tmp_path / "0").mkdir()
    if holds != "nothing":
        (tmp_path / "0" / holds).write_text("x")
    with pytest.raises(BadInput, match="exists|something else"):
        hf2orbax(small, tmp_path / "0", quiet=True)
    kept = tmp_path / ("0" if holds == "nothing" else ".0.replaced") / "manifest.json"
    assert kept.read_bytes() == manifest


def test_a_checkpoint_of_a_training_run_is_not_overwritten(small, tmp_path):
    hf2orbax(small, tmp_path / "0", quiet=True)
    (tmp_path / "0" / "manifest.json").unlink()  # as plain Orbax writes it
    with pytest.raises(BadInput, match="no checkpoint that a conversion wrote"):
        hf2orbax(small, tmp_path / "0", overwrite=True, quiet=True)
    (tmp_path / "0" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(BadInput, match="no checkpoint that a conversion wrote"):
        hf2orbax(small, tmp_path / "0", overwrite=True, quiet=True)


def test_what_appears_at_the_target_during_the_run_stays(small, tmp_path, monkeypatch):
    real = pipeline.write_manifest

    def appearing(*arguments):
        (tmp_path / "0").mkdir()
        (tmp_path / "0" / "thesis.txt").write_text("x")
        real(*arguments)

    monkeypatch.setattr(pipeline, "write_manifest", appearing)
    with pytest.raises(BadInput, match="exists"):
        hf2orbax(small, tmp_path / "0", quiet=True)
    assert os.listdir(tmp_path / "0") == ["thesis.txt"]
    shutil.rmtree(tmp_path / "0")
    monkeypatch.undo()
    assert hf2orbax(small, tmp_path / "0", quiet=True).resumed == 14  # nor was the work lost


def half_done(small, tmp_path, monkeypatch):
    """A run that stopped after three leaves."""
    heal = stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        hf2orbax(small, tmp_path / "0", quiet=True, workers=1)
    heal()


def test_a_disk_that_is_still_full_does_not_cost_what_was_finished(small, tmp_path, monkeypatch):
    half_done(small, tmp_path, monkeypatch)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "disk_usage", lambda p: usage._replace(free=1000))
        with pytest.raises(BadInput, match="bytes are missing"):
            hf2orbax(small, tmp_path / "0", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(staging.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device: .*.0.converting"):
            hf2orbax(small, tmp_path / "0", quiet=True)
    assert hf2orbax(small, tmp_path / "0", quiet=True).resumed == 3


def test_unfinished_work_of_another_version_is_refused(small, tmp_path, monkeypatch):
    half_done(small, tmp_path, monkeypatch)
    monkeypatch.setattr(staging, "versions", lambda: {"olmo-parity": "99"})
    with pytest.raises(BadInput, match="olmo-parity: was .*, is .99"):
        hf2orbax(small, tmp_path / "0", quiet=True)


@pytest.mark.parametrize("line", ["1", "[]", '{"no leaf": 1}'])
def test_a_journal_line_of_odd_form_counts_for_nothing(line, small, tmp_path, monkeypatch):
    half_done(small, tmp_path, monkeypatch)
    journal = tmp_path / ".0.converting" / "journal.jsonl"
    journal.write_text(journal.read_text() + line + "\n")
    assert hf2orbax(small, tmp_path / "0", quiet=True).resumed == 3
    (tmp_path / ".1.converting").mkdir()
    (tmp_path / ".1.converting" / "journal.jsonl").write_text(line + "\n")
    assert hf2orbax(small, tmp_path / "1", quiet=True).resumed == 0


def test_a_source_where_the_work_is_kept_is_refused(small, tmp_path):
    hf2orbax(small, tmp_path / ".0.replaced", quiet=True)
    with pytest.raises(BadInput, match="keeps its work"):
        orbax2hf(tmp_path / ".0.replaced", tmp_path / "0", quiet=True)
    assert not (tmp_path / "0").exists()


def test_folders_made_for_a_target_go_when_nothing_was_written(tmp_path):
    config = tiny_config(num_hidden_layers=1)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][0] = np.nan
    source = write_hf(tmp_path / "hf", tensors, config)
    with pytest.raises(BadInput, match="non-finite"):
        hf2orbax(source, tmp_path / "a" / "b" / "0", quiet=True)
    assert os.listdir(tmp_path) == ["hf"]


def test_closed_streams_and_odd_names_are_no_crash(source):
    damaged(source, lambda h: h.update({"\ud800\n": h.pop("model.norm.weight")}))
    run = run_convert("inspect", source, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert run.returncode == 2 and "Traceback" not in run.stderr and r"\ud800" in run.stdout
    code = "from olmo_parity.cli import convert_main; convert_main()"
    command = [sys.executable, "-c", code, "hf2orbax", "/no/such/folder", str(source / "0")]
    closed = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command])
    assert closed.returncode == 2


def test_a_reader_that_went_away_is_not_a_difference(source):
    code = "from olmo_parity.cli import convert_main; convert_main()"
    run = subprocess.Popen(
        [sys.executable, "-c", code, "inspect", str(source)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 141


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_said_and_not_waited_for(name, kind, source):
    (source / name).unlink()
    (source / name).mkdir() if kind == "folder" else os.mkfifo(source / name)
    with pytest.raises(BadInput, match=f"{name} is {'a folder' if kind == 'folder' else 'no regular file'}"):
        open_source(source)


def test_a_disk_that_fails_under_the_source_is_named_by_the_source(source, tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("olmo_parity.convert.safetensors_io.os.preadv", failing)
    with pytest.raises(OSError, match=r"Input/output error: .*model\.safetensors"):
        hf2orbax(source, tmp_path / "0", quiet=True)
    assert not (tmp_path / "0").exists()
