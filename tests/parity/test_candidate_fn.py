"""--candidate-fn: any implementation through the gate, and a sentence for each way it can be unusable."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, candidate_fn, gate
from olmo_parity.parity.options import GateOptions
from olmo_parity.parity.run import run_gate
from tests.conftest import find_fixture

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKPOINT = "tiny-trained/hf-bfloat16-step900"
BIN = Path(sys.executable).parent
VOCABULARY = 10


def run(*arguments, cwd):
    done = subprocess.run(
        [str(a) for a in (BIN / "olmo-parity", "--no-config", *arguments)], capture_output=True, text=True, cwd=cwd,
        timeout=600, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr.split("raised")[0], done.stderr
    return done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(str(find_fixture(CHECKPOINT)), str(folder), quiet=True)
    return folder


@pytest.fixture
def needs_torch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.fixture
def beside(monkeypatch):
    """beside(folder): modules are looked for in folder, as where the command is started there."""

    def enter(folder):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        sys.modules.pop("inhouse", None)

    return enter


def test_the_in_house_example_passes_and_its_weights_are_compared(tree, beside, needs_torch):
    beside(EXAMPLES)
    record = run_gate(find_fixture(CHECKPOINT), tree, GateOptions(candidate_fn="inhouse:make"))
    assert record["verdict"] == "pass", record["decided_by"]
    assert record["candidate"]["function"] == "inhouse:make" and record["candidate"]["weights_sha256"]
    assert record["legs"]["float32"]["candidate"]["implementation"] == "inhouse:make"
    assert all(c["on"] for c in record["criteria"] if c["leg"] in ("config", "weights"))
    assert len(record["sequences"]) == 3  # the built-in ones, packed documents among them


def test_the_in_house_example_with_a_planted_fault_fails_and_without_a_checkpoint_weights_are_off(
    tree, tmp_path, beside, needs_torch
):
    text = (EXAMPLES / "inhouse.py").read_text()
    for right, wrong in (("(back < window)", "(back <= window)"), ("checkpoint.absolute()", f"Path({str(tree)!r})")):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (tmp_path / "faulty.py").write_text("from pathlib import Path\n" + text)
    batch = tmp_path / "prompts.jsonl"
    batch.write_text(json.dumps({"id": "past the window of 16", "tokens": list(range(40))}))
    beside(tmp_path)
    options = GateOptions(candidate_fn="faulty:make", batch=batch, only_batch=True, trace=False)
    record = run_gate(find_fixture(CHECKPOINT), None, options)
    assert record["verdict"] == "fail"
    off = [c for c in record["criteria"] if not c["on"] and c["leg"] in ("config", "weights")]
    assert {c["name"] for c in off} == {
        "config fields that differ",
        "weights that differ",
        "weights with NaN or infinity",
    }
    assert all("no --candidate was given" in c["reason"] and np.isnan(c["value"]) for c in off)
    assert record["candidate"]["weights_sha256"] is None
    assert {c["leg"] for c in record["criteria"] if c["on"] and not c["passed"]} >= {"float32"}


@pytest.mark.parametrize(
    "spec, words",
    [
        ("inhouse", "package.module:function"),
        ("no_such_module:make", "no module no_such_module"),
        ("inhouse:no_such_function", "has no no_such_function; it has"),
        ("inhouse:DOT", ""),  # a callable that is no factory
        ("inhouse:math", "a module, a function is wanted"),
        ("broken:make", "ZeroDivisionError"),
        ("lacking:make", "imports not_installed_anywhere"),
    ],
)
def test_a_name_that_cannot_be_used_is_a_sentence(spec, words, tmp_path, monkeypatch):
    shutil.copy(EXAMPLES / "inhouse.py", tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "lacking.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("inhouse", "broken", "lacking"):
        sys.modules.pop(name, None)
    if not words:
        assert callable(candidate_fn.load(spec)[0])
        return
    with pytest.raises(BadInput, match=words):
        candidate_fn.load(spec)


def test_a_misspelt_name_ends_the_command_with_2_before_the_work(tree, tmp_path, needs_torch):
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate-fn", "inhouse:mke", cwd=EXAMPLES)
    assert done.returncode == 2 and "has no mke; it has" in done.stderr
    assert "reference in float32" not in done.stderr


def test_gradients_of_a_function_and_a_checkpoint_that_is_not_there_are_refused(tmp_path, needs_torch, beside):
    beside(EXAMPLES)
    with pytest.raises(BadInput, match="gives logits alone"):
        run_gate(find_fixture(CHECKPOINT), None, GateOptions(candidate_fn="inhouse:make", gradients=True))
    with pytest.raises(BadInput, match="does not exist"):
        run_gate(find_fixture(CHECKPOINT), tmp_path / "none", GateOptions(candidate_fn="inhouse:make"))


def answer(forward, tokens=5, window=None):
    """Logits of a sequence by a candidate whose factory returns forward."""
    run_one = candidate_fn.logits_of(lambda *given: forward, None, {}, "float32", VOCABULARY)
    return run_one(batches.Sequence("s", np.arange(tokens, dtype=np.int32), window=window))


def right(tokens, positions, segment_ids):
    assert tokens.dtype == positions.dtype == segment_ids.dtype == np.int32
    assert tokens.shape == positions.shape == segment_ids.shape
    return np.arange(tokens.size * VOCABULARY, dtype=np.float32).reshape(*tokens.shape, VOCABULARY)


UNUSABLE = {
    "gave 11 logits a token, the reference's vocabulary has 10. Is its vocabulary padded": lambda t, p, s: np.zeros(
        (*t.shape, VOCABULARY + 1)
    ),
    "have shape": lambda t, p, s: np.zeros((t.shape[1], VOCABULARY)),
    "are int64, a floating type is wanted": lambda t, p, s: np.zeros((*t.shape, VOCABULARY), int),
    "forward raised": lambda t, p: None,
    "are object": lambda t, p, s: None,
}


@pytest.mark.parametrize("words", UNUSABLE)
def test_logits_that_cannot_be_compared_are_a_sentence(words):
    assert answer(right).shape == (5, VOCABULARY)
    with pytest.raises(BadInput, match=words):
        answer(UNUSABLE[words])


def test_a_factory_that_returns_no_function_is_a_sentence():
    with pytest.raises(BadInput, match="returned a int; it must return a function"):
        answer(3)


def test_nan_is_a_wrong_number_and_not_bad_input():
    logits = answer(lambda t, p, s: np.full((*t.shape, VOCABULARY), np.nan))
    assert np.isnan(logits).all()
    from olmo_parity.parity import metrics

    stats = metrics.token_stats(np.zeros_like(logits), logits, np.arange(5))
    summary = metrics.summarise(stats, np.arange(5))
    assert gate.judge([gate.finite_criterion("float32", summary)], [], 5).exit_code == gate.FAIL


def test_documents_and_padding_are_told_apart_and_each_window_is_built_once():
    seen, built = [], []

    def make(checkpoint, config, dtype, sliding_window):
        built.append(sliding_window)
        return lambda t, p, s: seen.append((t[0], p[0], s[0])) or right(t, p, s)

    forward = candidate_fn.logits_of(make, None, {}, "float32", VOCABULARY)
    tokens = np.arange(6, dtype=np.int32)
    forward(batches.Sequence("packed", tokens, documents=(2, 4)))
    forward(batches.Sequence("plain", tokens, first_position=7))
    forward(batches.Sequence("narrow", tokens, window=3))
    (_, positions, segments), (_, shifted, alone), _ = seen
    assert positions[:6].tolist() == [0, 1, 0, 1, 2, 3] and segments[:7].tolist() == [1, 1, 2, 2, 2, 2, 3]
    assert shifted[:6].tolist() == [7, 8, 9, 10, 11, 12] and alone[:7].tolist() == [1] * 6 + [2]
    assert built == [None, 3]


@pytest.mark.skipif(
    importlib.util.find_spec("maxtext") is None, reason="MaxText is not installed (Python 3.12 and later)"
)
def test_the_maxtext_adapter_builds_a_model_from_a_maxtext_config_and_tree(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLES / "maxtext_check.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_maxtext_adapter_says_what_is_missing(tmp_path, monkeypatch):
    if importlib.util.find_spec("maxtext"):
        pytest.skip("MaxText is installed here")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make, _ = candidate_fn.load("maxtext_adapter:make")
    config = open_source(find_fixture(CHECKPOINT)).config
    with pytest.raises(BadInput, match="MaxText is not installed"):
        candidate_fn.logits_of(make, tmp_path, {"vocab_size": config.vocab_size}, "float32", config.vocab_size)(
            batches.Sequence("s", np.arange(4, dtype=np.int32))
        )
