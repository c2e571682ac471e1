"""The gate on bad ground: stale caches, damaged weights, odd dtypes, a working directory or a signal in the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, calibrate, legs, run, weights
from olmo_parity.parity.candidate import run_candidate
from olmo_parity.parity.recorded import Recorded
from tests.conftest import find_fixture
from tests.parity.records import record
from tests.parity.two_layers import two_layers

CHECKPOINT = "tiny-trained/hf-bfloat16-step900"


@pytest.fixture
def noise_of(tmp_path, monkeypatch):
    """noise_of(weights=...) measures, or takes from the cache; returns whether it was kept before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sequence = batches.Sequence("a", np.arange(4, dtype=np.int32))
    logits = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    (tmp_path / "plain").mkdir()
    np.save(tmp_path / "plain" / "0.npy", logits)
    (tmp_path / "model.safetensors").write_bytes(b"0123")
    source = SimpleNamespace(config="config", tensors={"a": SimpleNamespace(file=tmp_path / "model.safetensors")})

    def measure(sequences, folder):
        folder.mkdir(exist_ok=True)
        np.save(folder / "0.npy", logits + 1e-6)

    def noise(weights):
        folder = {"plain": tmp_path / "plain", "folder": tmp_path / "changed"}
        return calibrate.reference_noise(source, [sequence], weights=weights, run=measure, facts=[], **folder)

    return lambda weights="one": noise(weights)["from_cache"]


def test_noise_of_other_weights_at_the_same_path_size_and_time_is_measured_again(noise_of):
    assert [noise_of("one"), noise_of("one"), noise_of("other")] == [False, True, False]


@pytest.mark.parametrize("text", ["{}", "[1]", "null", '{"kl_max": "0"}', "{"])
def test_a_cache_file_that_holds_something_else_is_measured_again(noise_of, tmp_path, text):
    noise_of()
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text(text)
    assert [noise_of(), noise_of()] == [False, True]


def test_a_user_without_a_home_folder_measures_every_time(noise_of, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert [noise_of(), noise_of()] == [False, False]


@pytest.mark.parametrize(
    ("reference", "candidate", "rounded"),
    [
        ("float32", "float32", None),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        ("float16", "float32", None),
        ("bfloat16", "float32", None),
        ("bfloat16", "bfloat16", None),
        ("bfloat16", "float16", "float16"),
    ],
)
def test_the_reference_is_rounded_as_the_conversion_rounded(reference, candidate, rounded):
    sides = [
        SimpleNamespace(kind="hf", tensors={"a": SimpleNamespace(dtype=dtype, nbytes=1)})
        for dtype in (reference, candidate)
    ]
    assert legs.narrower(*sides) == rounded


def tensor(values):
    values = np.asarray(values)
    return SimpleNamespace(
        hf="a", dtype=values.dtype, nbytes=values.nbytes, shape=values.shape, rows=lambda a, b: values[a:b]
    )


@pytest.mark.parametrize(("value", "differing"), [(1.5, 0), (1.5 + 2**-20, 1), (1.25, 1)])
def test_a_candidate_widened_to_float32_has_the_weights_of_a_bfloat16_record(value, differing):
    from olmo_parity.parity.identity import hf_hashes

    stored = SimpleNamespace(tensors={"a": tensor(np.array([[1.5, 2.0]], ml_dtypes.bfloat16))})
    kept = {"dtype": "bfloat16", "weights": hf_hashes(stored), "weights_rounded": None}
    candidate = SimpleNamespace(kind="orbax", tensors={"a": tensor(np.array([[value, 2.0]], np.float32))})
    assert len(Recorded(Path(), None, kept).weight_differences(candidate)) == differing


def test_nan_in_a_token_that_no_prompt_holds_and_another_end_token_fail(tmp_path, monkeypatch):
    """Both sides hold the NaN, and no logit shows it: the run is a recorded pass."""
    numpy = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("torch")
    (tmp_path / "hf").mkdir()
    hf, tree = two_layers(tmp_path / "hf"), tmp_path / "tree" / "0"
    tensors = numpy.load_file(hf / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].copy()
    unseen = set(range(259)).difference(*(s.tokens.tolist() for s in batches.built_in(open_source(hf).config)))
    token = max(unseen)
    embedding[token, 3] = np.nan
    numpy.save_file({**tensors, "model.embed_tokens.weight": embedding}, hf / "model.safetensors")
    hf2orbax(hf, tree, allow_nonfinite=True, quiet=True)
    file = tree / "olmo_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 7}))
    passed = record()["legs"]
    passed["float32"]["padded"] = passed["float32"]["packed"]  # the record is from before that check
    monkeypatch.setattr(run, "Legs", lambda *args, **more: SimpleNamespace(run=lambda: passed))
    found = run.run_gate(hf, tree)
    assert (found["exit_code"], found["weight_differences"]) == (1, [])
    assert {c["name"]: c["value"] for c in found["criteria"] if not c["passed"]} == {
        "config fields that differ": 1,
        "weights with NaN or infinity": 1,
    }
    assert found["config_differences"] == [{"field": "eos_token_id", "reference": 256, "candidate": 7}]
    assert "the candidate's model.embed_tokens.weight holds 1 NaN or infinite values" in found["notes"]


def test_finite_weights_are_not_counted():
    assert weights.nonfinite_weights(open_source(find_fixture(CHECKPOINT))) == []


def test_the_reference_runs_where_no_layer_slides_and_no_window_is_stated(tmp_path):
    pytest.importorskip("torch")
    from olmo_parity.parity.reference import run_reference

    file = two_layers(tmp_path) / "config.json"
    config = json.loads(file.read_text()) | {"layer_types": ["full_attention"] * 2, "sliding_window": None}
    file.write_text(json.dumps(config))
    source, sequence = open_source(tmp_path), batches.Sequence("a", np.arange(40, dtype=np.int32))
    found = run_reference(tmp_path, source.config, [sequence], dtype="float32", folder=tmp_path / "run")
    assert found["visible_keys"] == batches.expected_keys(source.config)
    assert np.isfinite(np.load(tmp_path / "run" / "0.npy")).all()


def test_modules_in_the_working_directory_are_not_taken_for_the_gates_own(tmp_path, monkeypatch):
    for name in ("numpy.py", "jax.py", "olmo_parity.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    run_candidate(tmp_path, [], dtype="float32", folder=tmp_path / "run")


def test_a_platform_that_is_not_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    with pytest.raises(BadInput, match="JAX does not start with JAX_PLATFORMS rocm") as error:
        run_candidate(tmp_path, [], dtype="float32", folder=tmp_path / "run")
    assert "Traceback" not in str(error.value)


COMMAND = """
import sys, tempfile
from pathlib import Path
from olmo_parity import cli
from olmo_parity.parity.children import run_children

def work(app):
    with tempfile.TemporaryDirectory() as folder:
        run_children("sleeper", Path(folder), {"processes": 1}, {"PYTHONPATH": sys.argv[1]}, "a sleeper")

cli._run = work
cli.parity_main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_gate_that_is_ended_leaves_no_child_no_files_and_no_verdict(tmp_path, name):
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time\nopen(f'{sys.argv[1]}/pid', 'w').write(f'{os.getpid()}\\n')\ntime.sleep(60)\n"
    )
    (tmp_path / "temporary").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    gate = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path)], env=env)
    deadline, pid = time.monotonic() + 60, ""
    while not pid.endswith("\n") and time.monotonic() < deadline:
        pid = "".join(p.read_text() for p in tmp_path.glob("temporary/*/pid"))
        time.sleep(0.02)
    gate.send_signal(getattr(signal, name))
    assert gate.wait(30) == 128 + getattr(signal, name)
    assert list((tmp_path / "temporary").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "text": "\\ud800"}', "surrogates not allowed"),
        ('{"id": "\\ud800", "tokens": [1]}', "surrogates not allowed"),
        ('{"id": "a", "tokens": ' + "[" * 100_000, "is not JSON"),
        ('{"id": "built-in-512", "tokens": [1]}', "are the built-in sequences'"),
    ],
    ids=["text", "id", "depth", "built-in"],
)
def test_lines_that_would_break_something_later_are_refused_by_number(tmp_path, line, said):
    source = open_source(find_fixture(CHECKPOINT))
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match="line 1") as error:
        batches.read_prompts(tmp_path / "prompts.jsonl", source.config, source.path / "tokenizer.json", None)
    assert said in str(error.value)
