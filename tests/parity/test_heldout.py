"""Held-out loss: right pairs agree at every step, wrong ones do not, and every number is what it says."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_parity import cli
from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import (
    heldout,
    heldout_pairs,
    heldout_runs,
    losses,
    metrics,
    settings,
    streamed_candidate,
    token_files,
)
from olmo_parity.parity import heldout_stats as stats
from olmo_parity.parity.batches import Sequence, read_prompts
from olmo_parity.parity.candidate import logits_function, row_logits
from olmo_parity.parity.options import DEFAULTS, GateOptions
from olmo_parity.parity.preflight_options import Preflight
from olmo_parity.parity.recording import record_reference
from olmo_parity.parity.reference import run_reference
from tests.conftest import find_fixture
from tests.parity.two_layers import two_layers

pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
STEPS = {0: 0.0, 150: 0.6, 900: 1.0}  # share of the trained weights in each; the rest is as if it were not trained yet


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps: hf/step0, hf/step150, hf/step900 and orbax/0, orbax/150, orbax/900; and held-out text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "whole").mkdir()
    whole = two_layers(folder / "whole")
    tensors = safetensors.load_file(whole / "model.safetensors")
    draw = np.random.default_rng(0)
    for step, share in STEPS.items():
        hf = folder / "hf" / f"step{step}"
        hf.mkdir(parents=True)
        shutil.copy(whole / "config.json", hf)
        shutil.copy(find_fixture("tiny-trained/hf-bfloat16-step900/tokenizer.json"), hf)
        mixed = {
            n: (share * t.astype(np.float32) + (1 - share) * draw.normal(0, 0.05, t.shape)).astype(np.float32)
            for n, t in tensors.items()
        }
        safetensors.save_file(mixed, hf / "model.safetensors")
        hf2orbax(str(hf), str(folder / "orbax" / str(step)), quiet=True)
    text = Path(json.__file__).read_bytes()[:1600]
    np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / "held.npy")
    (folder / "held.jsonl").write_text(json.dumps({"id": "json", "text": text[:250].decode()}) + "\n")
    return folder


@pytest.fixture
def in_process(monkeypatch):
    """The candidate in this process: no time goes into starting another."""

    def run_candidate(target, sequences, *, dtype, folder, keep, **_):
        import jax.numpy as jnp

        folder.mkdir()
        source = open_source(target)
        logits_of = logits_function(source.config, read_tree(source.path), getattr(jnp, dtype))
        for index, sequence in enumerate(sequences):
            losses.write(keep, folder, index, sequence.tokens, row_logits(logits_of, sequence))
        return {}

    monkeypatch.setattr(heldout_runs, "run_candidate", run_candidate)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def compare(folder, files=("held.npy",), pairs=None, gate=DEFAULTS, **options):
    short = {"sequence_length": 64, "max_tokens": 448} if not {"sequence_length", "max_tokens"} & set(options) else {}
    values = {"files": [folder / f for f in files], **short, **options}
    if pairs:
        values["pairs"] = [(folder / a, folder / b) for a, b in pairs]
    else:
        values |= {"reference": folder / "hf", "candidate": folder / "orbax"}
    return heldout.run_heldout(*heldout.chosen(values, gate))


# Verdicts


def test_a_run_agrees_at_every_step_and_a_mismatched_pair_does_not(run, in_process):
    found = compare(run)
    assert found["verdict"] == "pass", found["decided_by"]
    assert [r["step"] for r in found["steps"]] == ["0", "150", "900"]
    falling = [r["loss_reference"] for r in found["steps"]]
    assert falling[0] > 5.4 and falling == sorted(falling, reverse=True)
    for row in found["steps"]:
        assert row["tokens"] == 7 * 63 and abs(row["difference"]) < 1e-6 and row["same_top"] == 1
        assert row["within_published_loss"] and len(row["candidate"]["weights_sha256"]) == 64
    wrong = compare(run, pairs=[("hf/step150", "orbax/900")])
    assert wrong["verdict"] == "fail" and "step 150" in wrong["decided_by"]
    assert not wrong["steps"][0]["within_published_loss"] and wrong["where"]


def test_the_trained_fixture_agrees_at_its_three_steps(fixture_path, run, in_process, tmp_path):
    pairs = []
    for step in (0, 150, 900):
        hf = fixture_path(f"tiny-trained/hf-float32-step{step}")
        hf2orbax(str(hf), str(tmp_path / str(step)), quiet=True)
        pairs.append((hf, tmp_path / str(step)))
    found = compare(run, pairs=pairs, max_tokens=200)
    assert found["verdict"] == "pass" and [r["passed"] for r in found["steps"]] == [True] * 3


def test_a_small_fault_of_function_fails(run, in_process, tmp_path):
    shutil.copytree(run / "orbax" / "900", tmp_path / "0")
    file = tmp_path / "0" / "olmo_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rms_norm_eps": config["rms_norm_eps"] * 1.5}))
    found = compare(run, pairs=[("hf/step900", tmp_path / "0")])
    failed = {c["name"] for c in found["criteria"] if not c["passed"]}
    assert found["verdict"] == "fail"
    assert failed >= {"step 900: config fields that differ", "step 900: rms difference of a token's loss"}


def test_nan_in_the_weights_fails(run, in_process, tmp_path):
    shutil.copytree(run / "hf" / "step900", tmp_path / "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    safetensors.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    hf2orbax(str(tmp_path / "hf"), str(tmp_path / "0"), allow_nonfinite=True, quiet=True)
    found = compare(run, pairs=[("hf/step900", tmp_path / "0")])
    assert found["verdict"] == "fail" and "NaN" in found["decided_by"]


def test_bfloat16_has_a_limit_of_its_own_and_needs_enough_text(run):
    pair = [("hf/step900", "orbax/900")]
    found = compare(run, pairs=pair, dtype="bfloat16", sequence_length=128)
    row = found["steps"][0]
    assert found["verdict"] == "pass", found["decided_by"]
    assert 1e-4 < row["noise"]["rms"] < 0.1 and row["runs"]["cand16"]["dtype"] == "bfloat16"
    found = stats.bfloat16_criteria("0", *noisy(1, 1, 600), [Sequence("a", np.zeros(601, np.int32))])
    assert not any(c.on for c in found[0]) and "30 are needed" in found[1][0]


def test_training_runs_are_judged_by_the_limit_that_is_given(run, in_process):
    found = compare(run, pairs=[("hf/step150", "orbax/900")], loss_limit=2.0)
    row = found["steps"][0]
    size, error = abs(row["difference"]), row["standard_error"]
    assert found["verdict"] == "pass" and 0.1 < size < 2 and row["noise"] is None
    (far,), _ = stats.training_criteria("150", row, size - 2 * error)
    assert not far.passed
    (near,), unclear = stats.training_criteria("150", row, size + error)
    assert near.passed and "so few tokens leave" in unclear[0]
    (none,), _ = stats.training_criteria("150", row | {"difference": math.nan, "standard_error": math.nan}, 2.0)
    assert not none.passed


# Numbers


def noisy(own, theirs, count, seed=0):
    """Tokens of the reference in float32 and bfloat16 and of a candidate whose noise is theirs, in units of 1e-2 nat."""
    draw = np.random.default_rng(seed)
    loss = draw.uniform(1, 6, count)
    return [
        stats.Tokens(loss + scale * 1e-2 * draw.normal(size=count), np.zeros(count), np.ones(count), 0)
        for scale in (0, own, theirs)
    ]


def test_bfloat16_noise_that_is_larger_or_leans_to_one_side_fails():
    sequences = [Sequence(str(i), np.zeros(51, np.int32)) for i in range(40)]
    wide, own, same = noisy(1, 1, 2000)
    leaning = stats.Tokens(same.loss + 2e-3, same.top, same.right, 0)
    for candidate, passed in ((same, (True, True)), (noisy(1, 1.5, 2000)[2], (False, True)), (leaning, (True, False))):
        criteria, _, _ = stats.bfloat16_criteria("0", wide, own, candidate, sequences)
        assert tuple(c.passed for c in criteria) == passed
    missing = stats.Tokens(np.full(2000, np.nan), same.top, same.right, 5)
    assert not any(c.passed for c in stats.bfloat16_criteria("0", wide, own, missing, sequences)[0])


def test_float32_noise_that_leans_to_one_side_fails_before_it_is_large():
    noise = {"observed_logprob_delta_rms": 1e-7, "observed_logprob_delta_mean": 0.0}
    found = {"tokens": 2500, "difference": 1e-7, "rms_difference": 1e-6}
    for change, passed in (
        ({}, [True, True]),
        ({"difference": -2e-7}, [False, True]),
        ({"rms_difference": 4e-6}, [True, False]),
        ({"difference": math.nan, "rms_difference": math.nan}, [False, False]),
    ):
        criteria, unclear, _ = stats.float32_criteria("0", found | change, noise)
        assert [c.passed for c in criteria] == passed and not unclear
    _, unclear, _ = stats.float32_criteria("0", found, noise | {"observed_logprob_delta_rms": 1e-4})
    assert "more than 1e-05" in unclear[0]


def test_the_standard_error_takes_tokens_of_a_sequence_together():
    draw = np.random.default_rng(1)
    sequences = [Sequence(str(i), np.zeros(33, np.int32)) for i in range(50)]
    block = stats.blocks(sequences)
    assert block.tolist() == np.repeat(np.arange(50), 32).tolist()
    shared = np.repeat(draw.normal(size=50), 32)  # every token of a sequence off by the same
    mean, error = stats.mean_and_error(shared, block)
    assert mean == pytest.approx(shared.mean())
    assert error == pytest.approx(shared[::32].std(ddof=1) / math.sqrt(50))
    alone = draw.normal(size=1600)
    assert stats.mean_and_error(alone, block)[1] == pytest.approx(1 / 40, rel=0.3)
    assert stats.blocks(sequences[:2] + [Sequence("x", np.zeros(1, np.int32))]).tolist() == [0] * 32 + [1] * 32
    assert stats.blocks([Sequence("x", np.zeros(70, np.int32))]).max() == 2
    assert math.isnan(stats.mean_and_error(alone, np.zeros(1600, int))[1])


def test_losses_from_slices_are_those_of_whole_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "VALUES_AT_ONCE", 1000)
    draw = np.random.default_rng(2)
    logits = (5 * draw.normal(size=(50, 301))).astype(np.float32)
    logits[:, 7] = -np.inf
    logits[3, 40], logits[9] = np.inf, 1e4
    logits[12, 200] = np.nan
    tokens = draw.integers(8, 300, 50)
    taken = losses.Losses(tmp_path, 0, tokens, 301)
    for rows in (slice(20, 50), slice(0, 20)):
        for columns in (slice(64, 200), slice(0, 64), slice(200, 301)):
            taken[rows, columns] = logits[rows, columns]
    losses.write(losses.LOSSES, tmp_path, 1, tokens, logits)
    by_slices, whole = np.load(tmp_path / "0.npy"), np.load(tmp_path / "1.npy")
    expected = -metrics.token_stats(logits, logits, tokens).observed_reference
    for found in (by_slices, whole):
        assert np.allclose(found["loss"], expected, rtol=1e-13, atol=1e-13, equal_nan=True)
        assert np.flatnonzero(found["nonfinite"]).tolist() == [3, 12] and np.isnan(found["loss"][[3, 12, 49]]).all()
        usual = np.setdiff1d(np.arange(50), [3, 12])
        assert np.array_equal(found["top"][usual], logits[usual].argmax(1))


def test_bits_per_byte_count_the_text_that_is_predicted(run, in_process):
    found = compare(run, files=("held.jsonl",), pairs=[("hf/step900", "orbax/900")])
    row = found["steps"][0]
    # One token is one byte here: bits per byte are bits per token.
    assert row["tokens"] == 249 and row["bits_per_byte_candidate"] == pytest.approx(row["loss_candidate"] / math.log(2))
    assert (
        compare(run, pairs=[("hf/step900", "orbax/900")], max_tokens=300)["steps"][0]["bits_per_byte_candidate"] is None
    )


def test_the_bytes_of_a_text_are_those_after_its_first_token(run, tmp_path):
    config = open_source(run / "hf" / "step900").config
    (tmp_path / "p.jsonl").write_text('{"id": "a", "text": "\\u00e9tude"}\n{"id": "b", "tokens": [1, 2]}\n')
    tokenizer = run / "hf" / "step900" / "tokenizer.json"
    first, second = read_prompts(tmp_path / "p.jsonl", config, tokenizer, None)
    assert (
        len(first.tokens) == 6 and first.text_bytes == 4 and second.text_bytes is None
    )  # é is two tokens of one character
    cut = read_prompts(tmp_path / "p.jsonl", config, tokenizer, 4)[0]
    assert cut.text_bytes == 2


# Layer by layer, and records


def test_layer_by_layer_gives_the_same(run, in_process, tmp_path):
    whole = compare(run, pairs=[("hf/step900", "orbax/900")], max_tokens=200)["steps"][0]
    source, tree = open_source(run / "hf" / "step900"), open_source(run / "orbax" / "900")
    sequences = [Sequence("row", np.fromfile(run / "held.npy", "<u2")[:200].astype(np.int32))]
    keep = {"keep": losses.LOSSES}
    first, second = tmp_path / "reference", tmp_path / "candidate"
    run_reference(source.path, source.config, sequences, dtype="float32", streamed=True, folder=first, **keep)
    second.mkdir()
    streamed_candidate.write_logits(tree.path, tree.config, sequences, dtype=np.float32, folder=second, **keep)
    for folder in (first, second):
        found = np.load(folder / "0.npy")
        assert float(np.mean(found["loss"][:-1])) == pytest.approx(whole[f"loss_{folder.name}"], abs=1e-6)
        assert sorted(p.name for p in folder.iterdir()) == ["0.npy"] and found.nbytes == 200 * 16  # no logits are kept


def test_a_record_gives_the_numbers_of_the_live_run_without_torch(run, in_process, tmp_path, monkeypatch):
    batch = GateOptions(batch=run / "held.npy", max_tokens=200, only_batch=True)
    record_reference(run / "hf" / "step900", tmp_path / "record", batch)
    live = compare(run, pairs=[("hf/step900", "orbax/900")], sequence_length=200)["steps"][0]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    pair = [(tmp_path / "record", "orbax/900")]
    for dtype in ("float32", "bfloat16"):
        found = compare(run, files=(), pairs=pair, dtype=dtype)
        assert found["verdict"] == "pass", found["decided_by"]
        if dtype == "float32":
            assert found["steps"][0]["loss_reference"] == live["loss_reference"]
    assert compare(run, files=(), pairs=[(tmp_path / "record", "orbax/150")])["verdict"] == "fail"
    with pytest.raises(BadInput, match="a record brings its own text"):
        compare(run, pairs=pair)
    kept = json.loads((tmp_path / "record" / "record.json").read_text())
    kept["sequences"] = [s | {"built_in": True} for s in kept["sequences"]]
    (tmp_path / "record" / "record.json").write_text(json.dumps(kept))
    with pytest.raises(BadInput, match="holds no text"):
        compare(run, files=(), pairs=pair)


# Token files


@pytest.fixture(scope="module")
def config(run):
    return open_source(run / "hf" / "step900").config


def tokens_of(file, config, **options):
    sequences, entry = token_files.read_token_file(file, config, **options)
    return np.concatenate([s.tokens for s in sequences]), entry


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_the_type_of_a_raw_file_is_deduced_from_the_vocabulary(dtype, config, tmp_path):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 999)
    tokens.astype(f"<u{np.dtype(dtype).itemsize}").tofile(tmp_path / "held.npy")
    found, entry = tokens_of(tmp_path / "held.npy", config)
    assert np.array_equal(found, tokens) and entry["dtype"] == dtype and entry["tokens_in_file"] == 999


def test_a_type_that_cannot_be_told_is_asked_for(config, tmp_path):
    np.array([5, 0, 7, 0], "<u2").tofile(tmp_path / "held.npy")
    with pytest.raises(BadInput, match="give --tokens-dtype"):
        tokens_of(tmp_path / "held.npy", config)
    found, _ = tokens_of(tmp_path / "held.npy", config, dtype="uint16")
    assert found.tolist() == [5, 0, 7, 0]
    np.zeros(400, "<u2").tofile(tmp_path / "held.npy")
    with pytest.raises(BadInput, match="give --tokens-dtype"):
        tokens_of(tmp_path / "held.npy", config)


def test_true_numpy_files_keep_their_type_and_their_rows(config, tmp_path):
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (4, 30))
    np.save(tmp_path / "held.npy", rows)
    sequences, entry = token_files.read_token_file(tmp_path / "held.npy", config)
    assert [s.tokens.tolist() for s in sequences] == rows.tolist() and "header" in entry["form"]
    np.save(tmp_path / "held.npy", rows.astype(np.float32))
    with pytest.raises(BadInput, match="whole numbers"):
        tokens_of(tmp_path / "held.npy", config)
    with pytest.raises(BadInput, match="rows of 30 tokens, 20 were asked for"):
        np.save(tmp_path / "held.npy", rows)
        tokens_of(tmp_path / "held.npy", config, length=20)


def test_rows_the_last_one_and_the_first_tokens(config, tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "held.npy")
    sequences, entry = token_files.read_token_file(tmp_path / "held.npy", config, length=33)
    assert [len(s.tokens) for s in sequences] == [33, 33, 33] and entry["left_out"] == 1
    sequences, entry = token_files.read_token_file(tmp_path / "held.npy", config, length=30, most=80)
    assert [len(s.tokens) for s in sequences] == [30, 30, 20] and (entry["last_row"], entry["tokens"]) == (20, 80)
    assert [s.id for s in sequences] == ["held.npy[0:30]", "held.npy[30:60]", "held.npy[60:80]"]


@pytest.mark.parametrize(
    "content, options, said",
    [
        (np.array([*range(40), 259, 7, 400], "<u4"), {}, "token 259 at position 40.*token 400 at position 42"),
        (np.arange(20, dtype="<u2"), {"dtype": "int8"}, "are known"),
        (np.arange(300, 400, dtype="<u2"), {}, "holds no tokens of a vocabulary of 259, read as uint16 or uint32"),
        (b"\x01\x02\x03", {"dtype": "uint16"}, "3 bytes, which is no whole number of uint16"),
        (b"", {}, "is empty"),
        (b"\x93NUMPY rest", {}, "cannot be read as one"),
        (np.arange(20, dtype="<u2"), {"length": 1}, "predict nothing"),
        (np.arange(20, dtype="<u2"), {"length": 10**6}, "positions"),
        (np.arange(1, dtype="<u2"), {"dtype": "uint16"}, "2 or more are wanted"),
        (None, {}, "No such file"),
    ],
)
def test_what_is_no_token_file_is_refused(content, options, said, config, tmp_path):
    file = tmp_path / "held.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        content.tofile(file)
    with pytest.raises(BadInput, match="(?s)" + said):
        tokens_of(file, config, **options)


# Pairs


def test_steps_are_read_from_names():
    names = {
        "step1000": 1000,
        "stage1-step1000-tokens5B": 1000,
        "hf-float32-step-7": 7,
        "1000": 1000,
        "final": None,
        "b16": None,
    }
    assert {n: heldout_pairs.step_of(n) for n in names} == names


def test_two_folders_are_paired_by_step_and_what_has_no_twin_is_said(run, tmp_path):
    pairs, notes = heldout_pairs.pairs_of((), run / "hf", run / "orbax")
    assert [p.step for p in pairs] == ["0", "150", "900"] and not notes
    shutil.copytree(run / "hf", tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf" / "step150")
    (tmp_path / "hf" / "step9").mkdir()  # no checkpoint
    pairs, notes = heldout_pairs.pairs_of((), tmp_path / "hf", run / "orbax")
    assert [p.step for p in pairs] == ["0", "900"] and "step 150 is in" in notes[0]
    shutil.copytree(tmp_path / "hf" / "step900", tmp_path / "hf" / "other-step900")
    with pytest.raises(BadInput, match="(?s)several checkpoints of one step.*step 900 could be"):
        heldout_pairs.pairs_of((), tmp_path / "hf", run / "orbax")
    single, _ = heldout_pairs.pairs_of((), run / "hf" / "step150", run / "orbax" / "150")
    assert single == [heldout_pairs.Pair("150", run / "hf" / "step150", run / "orbax" / "150")]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (((), None, "orbax"), "no checkpoints are named"),
        (((), "none", "orbax"), "not a folder"),
        (((), ".", "orbax"), "neither a checkpoint nor a folder of"),
        (((), "hf", "empty"), "neither a checkpoint nor"),
    ],
)
def test_what_cannot_be_paired_is_refused(arguments, said, run):
    (run / "empty").mkdir(exist_ok=True)
    named, reference, candidate = arguments
    with pytest.raises(BadInput, match=said):
        heldout_pairs.pairs_of(named, reference and run / reference, candidate and run / candidate)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"files": ()}, "no held-out text"),
        ({"dtype": "float16"}, "float32 and bfloat16 are known"),
        ({"files": ("held.npy", "held.npy")}, "two files hold a sequence held.npy"),
        ({"pairs": [("orbax/900", "orbax/900")]}, "step 900.*cannot be compared|step 900"),
        ({"pairs": [("hf/step900", "hf/step900")]}, "step 900"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(options, said, run):
    with pytest.raises(BadInput, match=said):
        compare(run, **options)


# Command and stage


def test_the_command_and_the_stage_of_preflight(run, in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("parity.toml").write_text(
        f'[heldout]\nfiles = ["{run}/held.npy"]\npairs = [["{run}/hf/step0", "{run}/orbax/0"]]\nmax_tokens = 200\n'
    )
    done = heldout.run_stage(Preflight(settings=settings.load(None, False)), lambda _: None)
    assert (done["stage"], done["verdict"]) == ("heldout", "pass") and done["steps"][0]["tokens"] == 199
    assert heldout.run_stage(Preflight(), lambda _: None)["verdict"] == "not run"
    wrong = ["olmo-parity", "heldout", "--pair", f"{run}/hf/step150={run}/orbax/900", "--json", "report.json"]
    monkeypatch.setattr(sys, "argv", wrong)
    with pytest.raises(SystemExit) as ended:
        cli.parity_main()
    said = capsys.readouterr().out
    assert ended.value.code == 1 and said.startswith("FAIL  heldout: ") and "beyond" in said
    assert json.loads(Path("report.json").read_text())["steps"][0]["step"] == "150"
