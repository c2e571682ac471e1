"""Nothing half-written: killed runs resume, two runs into one target do not mix, what is there is not lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from olmo_parity.convert import pipeline, staging
from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import random_tensors, tiny_config, write_hf
from .test_pipeline import assert_holds

# A conversion that stops for a moment after every group, so that a kill lands anywhere in it.
SLOW = """
import sys, time
from olmo_parity.convert import copying, pipeline, staging
real = copying.copy_group
def slow(*a, **k):
    time.sleep(float(sys.argv[3]))
    return real(*a, **k)
pipeline.copy_group = slow
copying.SMALL_BYTES = 0  # every leaf a group of its own
print("ready", flush=True)
record = pipeline.hf2orbax(sys.argv[1], sys.argv[2], quiet=True, workers=2, overwrite="overwrite" in sys.argv)
print("resumed", record.resumed, flush=True)
"""


def start(source, target, pause, *more):
    command = [sys.executable, "-c", SLOW, str(source), str(target), str(pause), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = tiny_config(num_hidden_layers=2)
    tensors = random_tensors(config)
    return write_hf(tmp_path_factory.mktemp("small") / "hf", tensors, config), tensors, from_hf(config)


def test_the_stores_lock_files_of_a_killed_process_are_removed(small, tmp_path, monkeypatch):
    """TensorStore writes its next manifest over the longer one that was left there, and the end of that one stays."""
    source, tensors, config = small
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "finish_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        hf2orbax(source, tmp_path / "0", quiet=True)
    left = tmp_path / ".0.converting" / "state" / "manifest.ocdbt.__lock"
    left.write_bytes(b"a longer one" * 1000)
    monkeypatch.setattr(pipeline, "make_writers", lambda *_: pytest.fail("still there") if left.exists() else {})
    assert hf2orbax(source, tmp_path / "0", quiet=True).resumed == 25
    assert_holds(read_tree(tmp_path / "0"), tensors, config)


def test_a_run_killed_again_and_again_resumes_and_ends_in_the_same_tensors(small, tmp_path):
    source, tensors, config = small
    rng, kills, resumed = random.Random(0), 0, []
    journal = tmp_path / ".0.converting" / "journal.jsonl"
    for _ in range(40):
        done_before = len(journal.read_text().splitlines()) - 1 if journal.exists() else 0
        run = start(source, tmp_path / "0", 0.05)
        assert run.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.3))  # two of them are shorter than a whole run
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
        out, error = run.communicate()
        if (tmp_path / "0").exists():
            break
        done_after = len(journal.read_text().splitlines()) - 1 if journal.exists() else 0
        assert done_after >= done_before  # finished work is not done again
        resumed.append(done_after)
    else:
        hf2orbax(source, tmp_path / "0", quiet=True)
    assert kills >= 2 and max(resumed) > 0
    assert_holds(read_tree(tmp_path / "0"), tensors, config)
    from orbax.checkpoint import v1

    assert_holds(v1.load(tmp_path / "0"), tensors, config)
    assert sorted(os.listdir(tmp_path)) == ["0"]
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert len(manifest["tensors"]) == len(tensors)


def stop_after(monkeypatch, groups: int):
    """Make the conversion die, as by a kill, after so many groups."""
    real, count = pipeline.copy_group, []

    def dying(*arguments):
        if len(count) >= groups:
            raise KeyboardInterrupt
        count.append(1)
        return real(*arguments)

    monkeypatch.setattr(pipeline, "copy_group", dying)
    monkeypatch.setattr("olmo_parity.convert.copying.SMALL_BYTES", 0)
    return lambda: monkeypatch.setattr(pipeline, "copy_group", real)


def interrupted(small, tmp_path, monkeypatch):
    """A copy of the small source and a target whose conversion stopped after 5 leaves."""
    source = shutil.copytree(small[0], tmp_path / "hf")
    heal = stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        hf2orbax(source, tmp_path / "0", quiet=True, workers=1)
    heal()
    assert not (tmp_path / "0").exists()
    return source, tmp_path / "0"


def test_a_resumed_run_does_not_write_finished_leaves_again(small, tmp_path, monkeypatch):
    source, target = interrupted(small, tmp_path, monkeypatch)
    record = hf2orbax(source, target, quiet=True)
    assert record.resumed == 5 and record.verified
    assert_holds(read_tree(target), small[1], small[2])


def test_a_changed_source_is_refused_and_the_unfinished_work_kept(small, tmp_path, monkeypatch):
    source, target = interrupted(small, tmp_path, monkeypatch)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(BadInput, match="files: was"):
        hf2orbax(source, target, quiet=True)
    assert (tmp_path / ".0.converting" / "journal.jsonl").exists()


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"compression": "zstd"}, {"chunk_bytes": 999}])
def test_a_changed_option_is_refused(option, small, tmp_path, monkeypatch):
    source, target = interrupted(small, tmp_path, monkeypatch)
    with pytest.raises(BadInput, match=next(iter(option))):
        hf2orbax(source, target, quiet=True, **option)
    assert hf2orbax(source, target, quiet=True).resumed == 5


def test_a_changed_config_is_refused(small, tmp_path, monkeypatch):
    source, target = interrupted(small, tmp_path, monkeypatch)
    (source / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=2, rms_norm_eps=1e-5)))
    with pytest.raises(BadInput, match="config: was"):
        hf2orbax(source, target, quiet=True)


def test_a_journal_line_that_was_cut_counts_for_nothing(small, tmp_path, monkeypatch):
    source, target = interrupted(small, tmp_path, monkeypatch)
    journal = tmp_path / ".0.converting" / "journal.jsonl"
    journal.write_text(journal.read_text()[:-20])
    assert hf2orbax(source, target, quiet=True).resumed == 4
    assert_holds(read_tree(target), small[1], small[2])


def test_a_source_that_changes_during_the_run_is_noticed(small, tmp_path, monkeypatch):
    source = shutil.copytree(small[0], tmp_path / "hf")
    real = pipeline.copy_group

    def touching(*arguments):
        os.utime(source / "model.safetensors", ns=(1, 1))
        return real(*arguments)

    monkeypatch.setattr(pipeline, "copy_group", touching)
    with pytest.raises(BadInput, match="was changed while it was converted"):
        hf2orbax(source, tmp_path / "0", quiet=True)
    assert os.listdir(tmp_path) == ["hf"]


def test_two_runs_into_one_target_the_second_is_refused(small, tmp_path):
    source, tensors, config = small
    first = start(source, tmp_path / "0", 0.2)
    assert first.stdout.readline() == "ready\n"
    while not (tmp_path / ".0.converting" / "journal.jsonl").exists():
        time.sleep(0.02)
    with pytest.raises(BadInput, match="another run is converting"):
        hf2orbax(source, tmp_path / "0", quiet=True)
    out, error = first.communicate(timeout=60)
    assert first.returncode == 0, error
    assert_holds(read_tree(tmp_path / "0"), tensors, config)


def test_an_existing_target_is_refused_without_overwrite_and_replaced_with_it(small, tmp_path):
    source, tensors, config = small
    hf2orbax(source, tmp_path / "0", quiet=True, dtype="float32")
    before = (tmp_path / "0" / "manifest.json").read_bytes()
    with pytest.raises(BadInput, match="exists.*--overwrite"):
        hf2orbax(source, tmp_path / "0", quiet=True)
    assert (tmp_path / "0" / "manifest.json").read_bytes() == before
    hf2orbax(source, tmp_path / "0", quiet=True, overwrite=True)
    assert_holds(read_tree(tmp_path / "0"), tensors, config)
    assert os.listdir(tmp_path) == ["0"]


@pytest.mark.parametrize("make", ["folder", "file", "symlink"])
def test_what_no_conversion_wrote_is_never_replaced(make, small, tmp_path):
    target = tmp_path / "0"
    if make == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("x")
    elif make == "file":
        target.write_text("x")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(BadInput, match="exists"):
        hf2orbax(small[0], target, quiet=True, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_kill_between_the_renames_loses_neither_the_old_nor_the_new(moment, small, tmp_path, monkeypatch):
    source, tensors, config = small
    hf2orbax(source, tmp_path / "0", quiet=True, dtype="float32")
    real, calls = os.rename, []

    def dying(a, b):
        if len(calls) == moment:
            raise KeyboardInterrupt
        calls.append(1)
        real(a, b)

    monkeypatch.setattr(staging.os, "rename", dying)
    if moment == 2:
        monkeypatch.setattr(staging.shutil, "rmtree", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hf2orbax(source, tmp_path / "0", quiet=True, overwrite=True)
    monkeypatch.undo()
    if moment == 1:
        assert sorted(os.listdir(tmp_path)) == [".0.converting", ".0.replaced"]
    hf2orbax(source, tmp_path / "0", quiet=True, overwrite=True)
    assert_holds(read_tree(tmp_path / "0"), tensors, config)
    assert os.listdir(tmp_path) == ["0"]


def test_the_old_target_comes_back_when_the_next_run_fails(small, tmp_path):
    source, tensors, config = small
    hf2orbax(source, tmp_path / "0", quiet=True)
    os.rename(tmp_path / "0", tmp_path / ".0.replaced")
    with pytest.raises(BadInput, match="exists"):
        hf2orbax(source, tmp_path / "0", quiet=True)
    assert_holds(read_tree(tmp_path / "0"), tensors, config)


def test_a_full_disk_is_named_with_the_missing_bytes_before_anything_is_written(small, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda p: usage._replace(free=1000))
    with pytest.raises(BadInput, match="bytes are missing"):
        hf2orbax(small[0], tmp_path / "0", quiet=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_named(small, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(BadInput, match="not writable"):
        hf2orbax(small[0], tmp_path / "locked" / "0", quiet=True)


def test_a_parent_that_cannot_be_made_is_named(small, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be made"):
        hf2orbax(small[0], tmp_path / "file" / "0", quiet=True)


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_a_target_in_or_around_the_source_is_refused(where, small, tmp_path):
    source = shutil.copytree(small[0], tmp_path / "a" / "hf")
    with pytest.raises(BadInput, match="lie in each other"):
        hf2orbax(source, source / where, quiet=True)


def test_a_write_that_fails_in_mid_run_leaves_no_target(small, tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError(28, "No space left on device", "state")

    monkeypatch.setattr(pipeline, "copy_group", failing)
    with pytest.raises(OSError, match="No space left"):
        hf2orbax(small[0], tmp_path / "0", quiet=True)
    assert not (tmp_path / "0").exists()


def test_a_disk_that_fills_up_in_mid_run_is_a_sentence_and_the_next_run_goes_on(tmp_path):
    """A limit on the size of files stands in for the full disk: the store's own writes fail in the middle."""
    config = tiny_config(num_hidden_layers=2, intermediate_size=9000)
    tensors = random_tensors(config)
    write_hf(tmp_path / "hf", tensors, config)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000)); "
        "from olmo_parity.cli import convert_main; sys.argv[0] = 'olmo-convert'; convert_main()"
    )
    command = [sys.executable, "-c", code, "hf2orbax", str(tmp_path / "hf"), str(tmp_path / "0")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "run the same command again" in done.stderr and str(tmp_path) in done.stderr
    assert not (tmp_path / "0").exists()
    hf2orbax(tmp_path / "hf", tmp_path / "0", quiet=True)
    assert_holds(read_tree(tmp_path / "0"), tensors, from_hf(config))
