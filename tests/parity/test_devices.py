"""Where either side runs changes no verdict: a mesh, several processes; float32 is true float32; what is not there is a sentence."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, devices, gate, metrics, padded
from olmo_parity.parity.candidate import run_candidate
from olmo_parity.parity.candidate_fn import CandidateFn
from olmo_parity.parity.devices import Placement
from tests.parity.two_layers import two_layers

BIN = Path(sys.executable).parent
EIGHT = "--xla_force_host_platform_device_count=8"
NOISE = 5e-5  # of a logit, float32: summation order (measured 2e-5 at most); a wrong mask or window changes logits by 1 and more


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return two_layers(tmp_path_factory.mktemp("two-layers"))


@pytest.fixture(scope="module")
def tree(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    subprocess.run([BIN / "olmo-convert", "hf2orbax", reference, folder], check=True, capture_output=True)
    return folder


def sequences_of(tree):
    """A short plain row, which padded.py looks at too, and a packed one under another window."""
    tokens = batches.built_in(open_source(tree).config)[0].tokens[:90]
    return [batches.Sequence("plain", tokens), batches.Sequence("packed", tokens, window=8, documents=(40, 50))]


def logits(tree, folder, placement=None):
    """Logits of every sequence and of the two padded runs, and the run's settings."""
    settings = run_candidate(tree, sequences_of(tree), dtype="float32", folder=folder, placement=placement)
    return [np.load(folder / n) for n in ("0.npy", "1.npy", padded.ALONE, padded.BATCHED)], settings


@pytest.fixture(scope="module")
def single(tree, tmp_path_factory):
    return logits(tree, tmp_path_factory.mktemp("single") / "run")


def worst(a, b):
    assert [x.shape for x in a] == [y.shape for y in b]
    return max(np.abs(x - y).max() for x, y in zip(a, b, strict=True))


def verdict(found, expected, tree):
    """Of the float32 leg, with one device's logits in the reference's place."""
    stats = [
        metrics.summarise(metrics.TokenStats.join(metrics.token_stats(a, b, s.tokens)), np.arange(len(a)))
        for a, b, s in zip(expected, found, sequences_of(tree), strict=False)
    ]
    criteria = gate.float32_criteria(stats[0], stats[0]) + gate.packed_criteria(stats[1], stats[0])
    return gate.judge(criteria, [], 180).name


def test_one_device_says_what_it_is(single):
    _, settings = single
    assert (settings["devices"], settings["mesh"], settings["processes"]) == (["cpu:cpu"], None, 1)
    assert settings["padded_row"] == "plain"


def test_a_mesh_of_eight_gives_the_same_logits(tree, tmp_path, monkeypatch, single):
    monkeypatch.setenv("XLA_FLAGS", EIGHT)
    found, settings = logits(tree, tmp_path / "run", Placement(mesh={"fsdp": 4, "tensor": 2}))
    assert settings["mesh"] == {"fsdp": 4, "tensor": 2} and settings["devices"] == ["cpu:cpu"] * 8
    # Other sums than one device's: equal bit for bit would mean that nothing was spread.
    assert 0 < worst(found, single[0]) < NOISE
    assert verdict(found, single[0], tree) == "pass"


def test_a_fault_on_a_mesh_fails(tree, tmp_path, monkeypatch, single):
    damaged = tmp_path / "0"
    shutil.copytree(tree, damaged)
    config = json.loads((damaged / "olmo_config.json").read_text())
    (damaged / "olmo_config.json").write_text(json.dumps(config | {"sliding_window": 15}))
    monkeypatch.setenv("XLA_FLAGS", EIGHT)
    found, _ = logits(damaged, tmp_path / "run", Placement(mesh={"fsdp": 4, "tensor": 2}))
    assert worst(found, single[0]) > 100 * NOISE
    assert verdict(found, single[0], tree) == "fail"


def test_two_processes_that_hold_half_each_give_the_same_logits(tree, tmp_path, single):
    found, settings = logits(tree, tmp_path / "run", Placement(processes=2))
    assert settings["processes"] == 2 and settings["mesh"] == {"fsdp": 2}
    assert 0 < worst(found, single[0]) < NOISE
    assert verdict(found, single[0], tree) == "pass"


FUNCTION = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def make(checkpoint, config, dtype, sliding_window):
    mesh = Mesh(np.array(jax.devices()), ("rows",))  # the devices of both processes
    def forward(tokens, positions, segment_ids):
        whole = jnp.asarray(tokens, jnp.float32)[..., None] + jnp.arange(config["vocab_size"])
        spread = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P(None, "rows")))(np.asarray(whole))
        assert not spread.is_fully_addressable
        return spread
    return forward
"""


def test_a_candidate_functions_logits_may_lie_in_several_processes(tree, tmp_path, monkeypatch):
    (tmp_path / "spread_model.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    source, row = open_source(tree), sequences_of(tree)[0]
    function = CandidateFn("spread_model:make", None, source.config, placement=Placement(processes=2))
    settings = function.run([row], dtype="float32", folder=tmp_path / "run")
    assert settings["processes"] == 2
    wanted = row.tokens[:, None] + np.arange(source.config.vocab_size)
    assert np.array_equal(np.load(tmp_path / "run" / "0.npy"), wanted)


def workers(folder):
    """The pids of the candidate's processes, by their number."""
    found = {}
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if str(folder) in words:
                found[int(words[words.index(str(folder)) + 1])] = pid
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the processes in /proc")
def test_a_process_killed_at_work_ends_the_others_and_is_a_sentence(tree, tmp_path):
    folder, raised = tmp_path / "run", []

    def run():
        try:
            run_candidate(tree, sequences_of(tree), dtype="float32", folder=folder, placement=Placement(processes=2))
        except BadInput as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)  # or a failure of this test would wait for it
    thread.start()
    for _ in range(1200):  # until the first logits are there, and the other sequences are not
        if (folder / "0.npy").exists():
            break
        time.sleep(0.05)
    found = workers(folder)
    os.kill(found[1], signal.SIGKILL)
    thread.join(20)  # JAX itself would wait 100 s for the heartbeat of the dead one
    assert not thread.is_alive(), "the gate still waits"
    assert "process 1 of 2 of the JAX side in its float32 run ended with signal 9" in str(raised[0])
    assert not Path(f"/proc/{found[0]}").exists()


def gate_command(reference, tree, *more, **env):
    command = [BIN / "olmo-parity", "--no-config", "--reference", reference, "--candidate", tree, *more]
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=300, env={**os.environ, **env}
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


MESH = ["--mesh", "fsdp=4,tensor=2", "--candidate-device", "cpu", "--reference-device", "cpu"]


def test_the_gate_passes_on_a_mesh_with_a_changed_window_and_says_what_was_in_effect(reference, tree, tmp_path):
    pytest.importorskip("torch")
    options = [*MESH, "--override", "sliding_window=24", "--json", tmp_path / "r.json"]
    # What the environment asks for is less than true float32, and must not be what is run.
    done = gate_command(reference, tree, *options, XLA_FLAGS=EIGHT, JAX_DEFAULT_MATMUL_PRECISION="bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    leg = record["legs"]["float32"]
    assert record["overrides"] == {"sliding_window": 24}
    assert [record[side]["path"] for side in ("reference", "candidate")] == [str(reference), str(tree)]
    assert "changed on both sides, so not the model of the files: sliding_window=24" in done.stdout
    assert {side: leg[side]["visible_keys"]["sliding_attention"][-1][1] for side in ("reference", "candidate")} == {
        "reference": 24,
        "candidate": 24,
    }
    assert leg["candidate"]["mesh"] == {"fsdp": 4, "tensor": 2}
    assert (leg["reference"]["device"], leg["reference"]["attention"], leg["reference"]["tf32"]) == (
        "cpu",
        "eager",
        False,
    )
    for side in ("reference", "candidate"):
        assert (leg[side]["matmul_precision"], leg[side]["float32_products_in_full"]) == ("highest", True)
    assert "on 8 x cpu:cpu, mesh fsdp=4,tensor=2, matmul precision highest, float32 products in full" in done.stdout


@pytest.mark.parametrize(
    "options, words",
    [
        (["--mesh", "fsdp=4"], "--mesh fsdp=4 is 4 devices, JAX finds 1"),
        (["--processes", "2", "--mesh", "fsdp=3"], "is 3 devices, JAX finds 2 in 2 processes"),
        (["--candidate-device", "tpu"], "--candidate-device tpu"),
        (["--candidate-device", "gpu"], "--candidate-device gpu: JAX finds none on this machine, only cpu"),
        (["--reference-device", "cuda"], "finds no GPU on this machine"),
        (["--mesh", "data=2", "--candidate-device", "xpu", "--reference-device", "gpu"], "3 faults"),
        (["--mesh", "fsdp=2", "--streamed", "--gradients"], "2 faults"),
    ],
)
def test_what_is_not_there_is_a_sentence_before_the_work(options, words, reference, tree):
    torch = pytest.importorskip("torch")
    import jax

    if torch.cuda.is_available() or jax.default_backend() != "cpu":
        pytest.skip("this machine has an accelerator")
    done = gate_command(reference, tree, *options)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "reference in float32" not in done.stderr


def test_a_record_is_not_placed():
    with pytest.raises(BadInput, match="a record was computed already"):
        devices.placement(reference="cuda", recorded=True)


def test_the_probe_sees_every_shorter_product():
    import ml_dtypes

    def bfloat16_pieces(count):  # what a TPU does with a float32: pieces of 8 bits, multiplied one by one
        def multiply(a, b):
            total, rest = np.zeros_like(a), a.copy()
            for _ in range(count):
                piece = rest.astype(ml_dtypes.bfloat16).astype(np.float32)
                total, rest = total + piece @ b, rest - piece
            return total

        return multiply

    def tf32(a, b):  # 10 bits of fraction
        return (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) @ b

    assert devices.products_in_full(np.matmul) and devices.products_in_full(bfloat16_pieces(3))
    for shorter in (tf32, bfloat16_pieces(1), bfloat16_pieces(2)):
        assert not devices.products_in_full(shorter)


def test_true_float32_is_set_over_what_was_there():
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        found = devices.full_float32_torch("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == {"matmul_precision": "highest", "tf32": False, "float32_products_in_full": True}


def test_a_device_that_rounds_all_the_same_is_refused(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(devices, "products_in_full", lambda multiply: False)
    with pytest.raises(BadInput, match="rounds the factors"):
        devices.full_float32_torch("cpu")
    with pytest.raises(BadInput, match="rounds the factors"):
        devices.start_jax({"device": None, "mesh": None, "processes": 1})


# Padded rows


def judge_rows(alone, batched, tokens):
    stats = metrics.TokenStats.join(metrics.token_stats(alone, batched, tokens))
    found = metrics.summarise(stats, np.arange(len(tokens)))
    quiet = metrics.summarise(
        metrics.TokenStats.join(metrics.token_stats(alone, alone, tokens)), np.arange(len(tokens))
    )
    criteria = gate.padded_criteria(found, quiet)
    return [c for c in criteria if not c.passed], gate.labels(criteria, found)


def faulty(model, fault):
    """A model [B, T] -> [B, T, V] that gets batches or padding wrong."""

    def logits_of(tokens, positions, segments):
        if fault == "the first row's segments are all rows'" and segments is not None:
            segments = np.broadcast_to(segments[:1], segments.shape)
        if fault == "the first row's positions are all rows'":
            positions = np.broadcast_to(positions[:1], positions.shape)
        logits = model(tokens, positions, segments)
        if fault == "one row sees the other" and len(tokens) > 1:
            logits = logits + 1e-3 * logits[::-1]
        return logits

    return logits_of


def test_a_padded_and_batched_row_is_equal_and_faults_of_batches_are_seen(tree, tmp_path):
    import jax.numpy as jnp

    from olmo_parity.convert.orbax_io import read_tree
    from olmo_parity.parity.candidate import logits_function

    source, row = open_source(tree), sequences_of(tree)[0]
    model = logits_function(source.config, read_tree(source.path), jnp.float32)
    for number, fault in enumerate(
        (
            None,
            "one row sees the other",
            "the first row's segments are all rows'",
            "the first row's positions are all rows'",
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        padded.write_rows(faulty(model, fault), row, folder)
        failed, labels = judge_rows(*(np.load(folder / n) for n in (padded.ALONE, padded.BATCHED)), row.tokens)
        assert bool(failed) == bool(fault), fault
        assert any("only padded rows differ" in label for label in labels) == bool(fault)


def test_the_batch_holds_the_row_padded_and_another():
    row = batches.Sequence("a", np.arange(30, dtype=np.int32), first_position=7)
    tokens, positions, segments = padded.batch_of(row)
    assert tokens.shape == positions.shape == segments.shape == (2, padded.PADDED)
    assert tokens[1, :30].tolist() == list(range(30)) and not tokens[1, 30:].any()
    assert positions[1].tolist() == list(range(7, 7 + padded.PADDED))
    assert segments[1].tolist() == [1] * 30 + [2] * (padded.PADDED - 30)
    assert [len(list(g)) for _, g in itertools.groupby(segments[0])] == [80, 81]
    assert positions[0, [0, 79, 80]].tolist() == [0, 79, 0]


def test_where_no_batch_can_be_run_the_criterion_is_off_and_says_why():
    (criterion,) = gate.padded_criteria(None, {}, unread="one row at a time")
    assert not criterion.on and "one row at a time" in criterion.reason
