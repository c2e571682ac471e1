"""Several processes convert into one target: the same tree as from one, and where one fails none is left waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from olmo_parity.convert import hosts, pipeline, shares
from olmo_parity.convert.orbax_write import TreeWriter
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.shares import share
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import random_tensors, same_bits, tiny_config, write_hf

# A process that stops for a moment after every leaf, and takes another for lost after two seconds.
SLOW = """
import sys, time
from olmo_parity.convert import copying, hosts, shares, pipeline
hosts.BEAT_SECONDS, hosts.LOST_SECONDS = 0.05, 2.0
real, pause = copying.copy_group, float(sys.argv.pop(1))
def slow(*a):
    time.sleep(pause)
    return real(*a)
shares.copy_group = pipeline.copy_group = slow
copying.SMALL_BYTES = 0
from olmo_parity.cli import convert_main
convert_main()
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(hosts, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(hosts, "REFUSAL_BEATS", 200)  # four seconds: a busy machine may be slow to hear
    monkeypatch.setattr(hosts, "LOST_SECONDS", 5.0)
    monkeypatch.setattr(hosts, "START_SECONDS", 20.0)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    config = tiny_config(num_hidden_layers=8)
    return write_hf(tmp_path_factory.mktemp("eight") / "hf", random_tensors(config), config)


def together(count: int, convert, *arguments, only=None, **options) -> list:
    """What each of several processes returned or raised; here they are threads, which share nothing but the file system."""

    def one(index: int):
        try:
            return convert(*arguments, processes=(index, count), quiet=True, workers=1, **options)
        except (BadInput, OSError, KeyboardInterrupt) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count) if only is None else only))


def start(pause, *arguments, **environment) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW, str(pause), *map(str, arguments), "--quiet"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def stored(item) -> dict[str, bytes]:
    """Every key of the store with its bytes: chunks as they lie on disk, and the arrays' own metadata."""
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("layout", ["olmo_jax", "maxtext"])
def test_the_tree_has_the_same_keys_chunks_and_bits_as_from_one_process(count, layout, eight, tmp_path):
    options = {"layout": layout, "chunk_bytes": 5000}
    alone = hf2orbax(eight, tmp_path / "one" / "0", quiet=True, **options)
    records = together(count, hf2orbax, eight, tmp_path / "many" / "0", **options)
    item = "state" if layout == "olmo_jax" else "items"
    assert stored(tmp_path / "many" / "0" / item) == stored(tmp_path / "one" / "0" / item)
    one, many = (json.loads((tmp_path / n / "0" / "manifest.json").read_text()) for n in ("one", "many"))
    assert one["tensors"] == many["tensors"]
    assert (tmp_path / "many" / "0" / item / "_METADATA").read_text() == (
        tmp_path / "one" / "0" / item / "_METADATA"
    ).read_text()
    assert [p.name for p in (tmp_path / "many").iterdir()] == ["0"]
    assert [p.name for p in (tmp_path / "many" / "0").iterdir() if p.is_dir()] == [item]
    assert verify(eight, tmp_path / "many" / "0", quiet=True).equal
    assert verify_manifest(tmp_path / "many" / "0", quiet=True).equal
    assert records[0].tensors == alone.tensors and records[1].process == f"process 1 of {count}"
    assert all(record.tensors >= alone.tensors // count // 3 for record in records)


def test_plain_orbax_reads_it(eight, tmp_path):
    from orbax.checkpoint import v1

    together(2, hf2orbax, eight, tmp_path / "0")
    tree = v1.load(tmp_path / "0")
    for name, path in (("model.embed_tokens.weight", "embed_tokens"), ("lm_head.weight", "lm_head")):
        leaf = next(iter(tree[path].values()))
        wanted = open_source(eight).tensors[name].read()
        assert same_bits(np.asarray(leaf), wanted.T if path == "lm_head" else wanted)


def test_moments_and_more_processes_than_large_tensors(fixture_path, tmp_path):
    native = fixture_path("tiny-sharded/native/step0")
    core2orbax(native, tmp_path / "one", optimizer=True, quiet=True)
    together(3, core2orbax, native, tmp_path / "many", optimizer=True)
    for item in ("state", "optimizer"):
        assert stored(tmp_path / "many" / item) == stored(tmp_path / "one" / item)


def test_shares_are_everything_once_and_about_equal(eight, tmp_path):
    moves = pipeline.plan(open_source(eight), None, 1 << 20)
    for count in (1, 3, 200):
        parts = [share(moves, i, count) for i in range(count)]
        assert sorted(m.key for part in parts for m in part) == sorted(m.key for m in moves)
    sizes = [sum(m.leaf.nbytes for m in share(moves, i, 3)) for i in range(3)]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("killed, ending", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_killed_or_frozen_process_ends_the_others_in_bounded_time_and_the_next_run_resumes(
    killed, ending, eight, tmp_path
):
    target = tmp_path / "0"
    runs = [start(0.1, "hf2orbax", eight, target, "--distributed", f"{i}/2") for i in range(2)]
    journals = tmp_path / ".0.converting"
    wait_for(lambda: sum(len(p.read_text().splitlines()) for p in journals.glob("journal*")) > 12)
    os.kill(runs[killed].pid, ending)
    since = time.monotonic()
    out, err = runs[1 - killed].communicate(timeout=30)
    assert time.monotonic() - since < 15
    runs[killed].kill()
    runs[killed].wait()
    assert runs[1 - killed].returncode == 2, out + err
    assert f"process {killed} of 2 (pid {runs[killed].pid} on {socket.gethostname()}) has given no sign" in err
    assert "run the same command on every host again" in err and "Traceback" not in err
    assert not target.exists()
    record = hf2orbax(eight, target, quiet=True)  # one process goes on where several stopped
    assert record.resumed > 5
    assert verify(eight, target, quiet=True).equal and verify_manifest(target, quiet=True).equal


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_several_processes_go_on_where_one_or_others_stopped(eight, tmp_path, monkeypatch):
    real, calls = pipeline.copy_group, []
    lock = threading.Lock()

    def stopping(*arguments):
        with lock:
            calls.append(1)
            if len(calls) == stop_after:
                raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr("olmo_parity.convert.copying.SMALL_BYTES", 0)
    for module in (pipeline, shares):
        monkeypatch.setattr(module, "copy_group", stopping)
    stop_after = 10
    with pytest.raises(KeyboardInterrupt):
        hf2orbax(eight, tmp_path / "0", layout="maxtext", quiet=True, workers=1)
    for stop_after in (30, 50):  # noqa: B007 - `stopping` reads it
        ended = together(3, hf2orbax, eight, tmp_path / "0", layout="maxtext")
        assert all(isinstance(error, (KeyboardInterrupt, OSError)) for error in ended), ended
        assert any("ended: KeyboardInterrupt; what is finished is kept" in str(error) for error in ended)
    records = together(2, hf2orbax, eight, tmp_path / "0", layout="maxtext")
    assert records[0].resumed >= 40, records
    hf2orbax(eight, tmp_path / "one", layout="maxtext", quiet=True)
    assert stored(tmp_path / "0" / "items") == stored(tmp_path / "one" / "items")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "one"]


def test_bad_input_that_one_process_meets_ends_all_and_leaves_nothing(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"):
        tensors[name][3, 5] = np.nan
    source = write_hf(tmp_path / "hf", tensors, config)
    ended = together(3, hf2orbax, source, tmp_path / "run" / "0")
    assert all(isinstance(error, BadInput) for error in ended), ended
    assert all("--allow-nonfinite" in str(error) for error in ended)
    assert not (tmp_path / "run").exists()


def test_processes_that_were_started_differently_are_refused_by_name(eight, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(hf2orbax, eight, tmp_path / "0", dtype=d, quiet=True, processes=(i, 2))
            for i, d in enumerate((None, "float32"))
        ]
        for future in futures:
            with pytest.raises(BadInput, match='process 1: dtype is "float32", null in process 0'):
                future.result()


def differing(*runs) -> list:
    """What processes returned or raised that were started with other arguments: (source, target, options) of each."""

    def one(run):
        source, target, options = run
        try:
            return hf2orbax(source, target, quiet=True, workers=1, **options)
        except (BadInput, OSError) as error:
            return error

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(one, runs))


def test_one_that_verifies_does_not_wait_for_one_that_does_not(eight, tmp_path):
    options = ({"verify": True, "processes": (0, 2)}, {"verify": False, "processes": (1, 2)})
    ended = differing(*((eight, tmp_path / "0", more) for more in options))
    assert all("process 1: verify is false, true in process 0" in str(error) for error in ended), ended


@pytest.mark.parametrize("other", [(1, 3), (2, 3)])
def test_processes_of_another_number_are_named(other, eight, tmp_path):
    ended = differing(*((eight, tmp_path / "run" / "0", {"processes": which}) for which in ((0, 2), other)))
    wanted = f"process {other[0]} was started as {other[0]}/3, process 0 as 0/2"
    assert all(isinstance(error, BadInput) and wanted in str(error) for error in ended), ended
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_source_that_one_process_does_not_find_ends_the_others_at_once(lacking, eight, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "START_SECONDS", 600.0)
    sources = [eight, eight, eight]
    sources[lacking] = tmp_path / "missing"
    since = time.monotonic()
    ended = differing(*((s, tmp_path / "run" / "0", {"processes": (i, 3)}) for i, s in enumerate(sources)))
    assert all(isinstance(error, BadInput) and "missing" in str(error) for error in ended), ended
    assert time.monotonic() - since < 15 and not (tmp_path / "run").exists()


def test_a_process_that_comes_just_after_a_refusal_hears_of_it(eight, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(hosts, "START_SECONDS", 600.0)
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(together, 2, hf2orbax, tmp_path / "missing", tmp_path / "0", only=[0])
        wait_for(lambda: any('"failed"' in sign.read_text() for sign in tmp_path.glob(".0.hosts/*.json")))
        (late,) = together(2, hf2orbax, eight, tmp_path / "0", only=[1])
        assert isinstance(late, BadInput) and "process 0 of 2" in str(late) and "missing" in str(late)
        assert isinstance(refused.result()[0], BadInput)
    assert not list(tmp_path.iterdir())


def test_a_second_launch_is_refused_and_the_first_goes_on(eight, tmp_path, monkeypatch):
    """Also the same index twice: each of the second launch is one that the first has no place for."""
    monkeypatch.setattr("olmo_parity.convert.copying.SMALL_BYTES", 0)
    real, second = pipeline.copy_group, threading.Event()

    def waiting(*arguments):
        second.wait(30)
        return real(*arguments)

    for module in (pipeline, shares):
        monkeypatch.setattr(module, "copy_group", waiting)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, 2, hf2orbax, eight, tmp_path / "0")
        wait_for(lambda: list(tmp_path.glob(".0.converting/journal-*")))
        ended = together(2, hf2orbax, eight, tmp_path / "0")
        second.set()
        assert all(isinstance(e, BadInput) and "another run is converting into" in str(e) for e in ended), ended
        assert not any(isinstance(done, Exception) for done in first.result()), first.result()
    assert verify(eight, tmp_path / "0", quiet=True).equal
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


def test_a_restart_that_is_refused_leaves_what_was_finished(eight, tmp_path, monkeypatch):
    real, calls = pipeline.copy_group, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("olmo_parity.convert.copying.SMALL_BYTES", 0)
        patch.setattr(pipeline, "copy_group", stopping)
        hf2orbax(eight, tmp_path / "0", quiet=True, workers=1)
    missing = tmp_path / "missing"
    for source, options in ((eight, {"dtype": "float32"}), (eight, {"verify": False}), (missing, {})):
        runs = ((eight, {"processes": (0, 2)}), (source, {**options, "processes": (1, 2)}))
        assert all(isinstance(e, BadInput) for e in differing(*((s, tmp_path / "0", more) for s, more in runs)))
    assert together(2, hf2orbax, eight, tmp_path / "0")[0].resumed == 9


def test_a_folder_of_somebody_else_is_not_taken_for_signs(eight, tmp_path):
    for name in (".0.hosts/inventory.yaml", ".1.hosts"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
        ended = together(2, hf2orbax, eight, tmp_path / name[1])
        assert all(isinstance(e, BadInput) and "no conversion wrote it: move it away" in str(e) for e in ended), ended
        hf2orbax(eight, tmp_path / name[1], quiet=True)
        assert (tmp_path / name).read_text() == "mine"


def test_one_process_that_finishes_the_work_of_several_clears_their_signs(eight, tmp_path):
    leave_signs(tmp_path / ".0.hosts")
    hf2orbax(eight, tmp_path / "0", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("alone, words", [(0, "process 1 of 2 did not come"), (1, "process 0 of 2 did not come")])
def test_a_process_that_never_comes_is_named(alone, words, eight, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "START_SECONDS", 0.5)
    monkeypatch.setattr(hosts, "LOST_SECONDS", 0.5)
    (error,) = together(2, hf2orbax, eight, tmp_path / "0", only=[alone])
    assert isinstance(error, OSError) and words in str(error) and not (tmp_path / "0").exists()


def test_where_process_0_is_refused_the_others_hear_why(eight, tmp_path, monkeypatch):
    hf2orbax(eight, tmp_path / "0", quiet=True)
    ended = together(3, hf2orbax, eight, tmp_path / "0")
    assert all("exists. Name another target, or pass --overwrite" in str(error) for error in ended), ended
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    assert not isinstance(together(2, hf2orbax, eight, tmp_path / "0", overwrite=True)[0], Exception)


def test_a_full_disk_is_said_in_every_process_and_none_waits_for_long(eight, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000}))
    monkeypatch.setattr(hosts, "LOST_SECONDS", 60.0)
    since = time.monotonic()
    ended = together(3, hf2orbax, eight, tmp_path / "run" / "0")
    assert all("bytes are missing" in str(error) for error in ended), ended
    assert time.monotonic() - since < 20 and not (tmp_path / "run").exists()


def leave_signs(folder):
    """As of a run that was killed: of a process 0 that had admitted another, of one that had failed, of that other one."""
    old, failed, other = "a" * 32, "b" * 32, "c" * 32
    state = {"run": old, "index": 0, "count": 2, "beat": 7, "host": "x", "pid": 1, "members": [old, other]}
    folder.mkdir()
    signs = {
        f"0.{old}": {**state, "me": old, "phase": "published"},
        f"0.{failed}": {**state, "me": failed, "phase": "failed", "why": "long ago", "input": True},
        f"1.{other}": {**state, "me": other, "index": 1, "count": 3, "phase": "joined"},
        f"0.{old}.start": ["everything"],
    }
    for name, content in signs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_what_a_killed_run_left_is_not_taken_for_this_one(eight, tmp_path):
    """Its process 0 had got as far as to admit others, and one of them had written its last sign."""
    folder = tmp_path / ".0.hosts"
    leave_signs(folder)
    first = threading.Event()

    def helper():
        first.set()
        return hf2orbax(eight, tmp_path / "0", quiet=True, processes=(1, 2))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(helper)
        first.wait()
        time.sleep(0.5)
        assert not waiting.done()
        hf2orbax(eight, tmp_path / "0", quiet=True, processes=(0, 2))
        assert waiting.result().tensors
    assert verify(eight, tmp_path / "0", quiet=True).equal and not folder.exists()


def test_a_process_that_outlives_its_run_stops_when_the_next_one_begins(tmp_path, monkeypatch):
    first, helper, second = (hosts.Team(tmp_path / "0", index, 2) for index in (0, 1, 0))
    with ThreadPoolExecutor(1) as pool:
        first.__enter__()
        helper.__enter__()
        joined = pool.submit(helper.join, {"dtype": None})
        first.gather({"dtype": None}, ["a"])
        assert joined.result() == ["a"]
    first._over.set()  # as if it were killed: no more signs of it
    first._thread.join()
    monkeypatch.setattr(hosts, "START_SECONDS", 0.5)
    with (
        pytest.raises(OSError, match="process 1 of 2 did not come"),
        second,
    ):  # the old one is not taken for the new one
        second.gather({"dtype": None}, [])
    with pytest.raises(OSError, match="another run of this conversion was started"):
        helper.wait("merged")
    helper.__exit__(OSError, OSError("stopped"), None)
    assert not list(tmp_path.iterdir())


def test_a_share_that_does_not_arrive_is_found_by_who_reads_it_back(eight, tmp_path, monkeypatch):
    real = TreeWriter.merge

    def losing(self, stores):
        real(self, {name: paths for name, paths in stores.items() if "process_0" in name})

    monkeypatch.setattr(TreeWriter, "merge", losing)
    ended = together(2, hf2orbax, eight, tmp_path / "0")
    assert all(isinstance(error, (BadInput, OSError)) for error in ended) and not (tmp_path / "0").exists()


@pytest.mark.parametrize("text", ["", "4", "4/4", "-1/4", "a/b", "1/", "1/0"])
def test_which_process_this_is_must_be_said_right(text):
    with pytest.raises(BadInput, match="INDEX/COUNT"):
        hosts.which(text)
    assert hosts.which("3/4") == (3, 4) and hosts.which(None) == (0, 1)


def test_auto_asks_jax_as_under_slurm(eight, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    slurm |= {"JAX_COORDINATOR_ADDRESS": address}
    runs = [
        start(0, "hf2orbax", eight, tmp_path / "0", "--distributed", "auto", **slurm, SLURM_PROCID=str(i))
        for i in range(2)
    ]
    ends = [(run.communicate(timeout=60), run.returncode) for run in runs]
    assert [code for _, code in ends] == [0, 0], ends
    assert [f"process {i} of 2" in out for i, ((out, _), _) in enumerate(ends)] == [True, True]
    assert verify(eight, tmp_path / "0", quiet=True).equal


def test_auto_where_jax_finds_no_cluster_asks_for_the_index(monkeypatch):
    import jax

    def undefined(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", undefined)
    with pytest.raises(BadInput, match="coordinator_address should be defined.*--distributed INDEX/COUNT"):
        hosts.which("auto")
