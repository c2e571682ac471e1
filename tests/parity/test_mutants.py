"""Planted faults are killed by the leg that must catch them, right variants are not, and a gate that lets faults through says so."""

import copy
import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from olmo_parity.cli import parity_app
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.tree import leaves
from olmo_parity.parity import gate
from olmo_parity.parity.mutants import run, table
from olmo_parity.parity.mutants.catalogue import CONTROL, ENTRIES, GRADED, MUTANTS
from olmo_parity.parity.mutants.kinds import ALL, BENIGN, FUNCTION, Entry, Mutant, Steps
from olmo_parity.parity.mutants.planting import CannotPlant, module_tensors, plant, why_invisible
from tests.parity.random_checkpoints import SLIDE, WIDE, judging, raw_config, write_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")

# Classes of publicly known faults of such tools that change numbers: configs and releases (A), rotary (B, C1), layout and
# mapping (C), windows, norms, scale (D), vocabulary and tokens (E), precision, padding, kernels (F), NaN (G), leaves that were
# never restored (H), dtypes and damaged files (I).
NUMERICAL = "A1 A3 B1 C1 C2 C4 C5 C6 C7 D1 D2 D3 D4 E1 E2 E3 F1 F2 F3 G1 H2 I1 I2 I3 I4".split()
CHECKPOINTS = {
    "grouped": raw_config(),
    "heads of their own": raw_config(num_attention_heads=3, num_key_value_heads=3, rope_scaling=None),
    "tied": raw_config(tie_word_embeddings=True, layer_types=[WIDE, SLIDE] * 6),
}


@functools.cache
def checkpoint(name="grouped", spread=True):
    """A folder that stays until the tests end."""
    return write_checkpoint(Path(tempfile.mkdtemp()), CHECKPOINTS[name], spread=spread)


@functools.cache
def runner(spread=True):
    run = judging(checkpoint(spread=spread), Path(tempfile.mkdtemp()))
    run.traced = spread
    return run


def mutant(name):
    return next(m for m in MUTANTS if m.name == name)


def source(name):
    from olmo_parity.convert.sources import open_source

    return open_source(checkpoint(name))


def test_the_catalogue_has_a_line_for_every_numerical_class_of_known_faults():
    assert {e.known for e in ENTRIES if e.kind != BENIGN} == set(NUMERICAL)


def test_names_are_unique_and_there_are_many():
    names = [m.name for m in MUTANTS]
    assert len(set(names)) == len(names)
    assert sum(e.kind != BENIGN for e in ENTRIES) >= 60 and sum(e.kind == BENIGN for e in ENTRIES) >= 12


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_whatever_can_be_planted_names_modules_of_the_model(name):
    found = source(name)
    config, tensors = found.config, module_tensors(found)
    parts = {path.rsplit("/", 1)[0].replace("/", ".") for path in leaves(config)} | {"lm_head"}
    for i in range(config.num_hidden_layers):
        own = ("", ".self_attn", ".mlp", ".attention_residual", ".mlp_residual", ".mlp.swiglu")
        attention = (f".self_attn.{n}" for n in ("q_rotary", "k_rotary", "mix"))
        parts |= {f"layers.{i}{n}" for n in (*own, *attention)}
    for one in MUTANTS:
        try:
            planted = plant(one, config, tensors)
        except CannotPlant as reason:
            assert str(reason)
            continue
        assert planted.places <= parts
        hidden = why_invisible(planted, config, tensors)
        assert planted.places or hidden or one.entry.kind == BENIGN, one.name


def test_every_fault_can_be_planted_somewhere():
    planted = set()
    for name in CHECKPOINTS:
        found = source(name)
        for one in MUTANTS:
            try:
                plant(one, found.config, module_tensors(found))
                planted.add(one.entry.name)
            except CannotPlant:
                pass
    # These want what none of the three has: q_proj as a square, a vocabulary that the built-in sequences do not exhaust.
    assert {e.name for e in ENTRIES} - planted == set()


KILLED = (
    "window-minus-one@first", "yarn-on-sliding@middle", "yarn-truncate-turned@all", "documents-see-each-other@last",
    "mask-of-first-row@middle", "rotary-interleaved@last", "norm-after-rotary@first", "kv-heads-tiled@middle",
    "score-scale-of-width@last", "epsilon-times-10@first", "qk-norm-per-head@middle", "norms-before@last",
    "gelu-tanh-for-silu@first", "one-logit-nan", "products-tf32@middle", "block-norms-exchanged@middle",
    "qkv-fused-by-group@last", "two-q-heads-exchanged@first", "upper-half-one-row-down", "one-value-one-step@middle",
    "row-of-unused-token", "nan-in-unused-row",
)  # fmt: skip


@pytest.mark.parametrize("name", KILLED)
def test_a_fault_is_killed_by_the_leg_that_must_catch_it(name):
    found = runner().mutant(mutant(name))
    assert found["status"] == "killed" and not found["reason"]
    assert found["leg"] in {c["leg"] for c in found["failed"]}
    # The trace runs one row at a time, without padding, and looks up only tokens that occur.
    assert found["trace"]["right"] == (name not in UNTRACED), found["trace"]


UNTRACED = ("mask-of-first-row@middle", "row-of-unused-token", "nan-in-unused-row")


RIGHT = ("as-it-is", "more-padding", "second-row-of-two", "attention-in-blocks@all", "masked-with-infinity@all",
         "keys-scaled-not-scores@all", "qkv-in-one-product@all", "sums-in-parts@all", "head-in-slices")  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_variant_passes(name):
    found = runner().mutant(mutant(name))
    assert found["status"] == "passed" and not found["failed"]
    assert not found["trace"] or found["trace"]["first"] is None


HIDDEN = {
    "block-norms-exchanged@first": "no bit",
    "norm-after-rotary@first": "equal",
    "scale-left-out@all": "ones",
    "positions-from-one@all": "relative",
    "layer-types-not-read@all": "already says",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_show_at_step_0_is_called_invisible_with_its_reason_and_is_not_killed(name):
    found = runner(spread=False).mutant(mutant(name))
    assert found["status"] == "invisible" and HIDDEN[name] in found["reason"] and not found["failed"]


def test_what_a_checkpoint_has_no_place_for_is_invisible_and_is_not_run():
    found = runner().mutant(mutant("yarn-guessed@last"))
    assert (found["status"], found["planted"], found["reason"]) == ("invisible", False, "the config has YaRN")


def test_a_gate_that_cannot_see_lets_faults_survive_and_says_so():
    """The control: with huge limits a fault of function survives, and the verdict is a failure."""
    blind = copy.copy(runner())
    blind.judge = dataclasses.replace(blind.judge, limits={"float32-delta": 1e9, "float32-kl": 1e9})
    found = [blind.mutant(mutant(n)) for n in ("window-plus-one@first", "gelu-for-silu@middle", "as-it-is")]
    assert [m["status"] for m in found] == ["survived", "survived", "passed"]
    code, sentence = run.verdict(found, [])
    assert code == gate.FAIL and "window-plus-one@first" in sentence


def test_a_right_variant_that_is_called_a_fault_survives():
    """The control of the verdict: nothing else than the run decides that a mutant was killed."""
    entry = dataclasses.replace(mutant("attention-in-blocks@all").entry, kind=FUNCTION)
    found = runner().mutant(Mutant(entry, ALL))
    assert found["status"] == "survived" and run.verdict([found], [])[0] == gate.FAIL


def test_a_fault_that_is_called_right_fails_the_run():
    entry = dataclasses.replace(mutant("rotary-other-direction@first").entry, kind=BENIGN)
    found = runner().mutant(Mutant(entry, "first"))
    assert found["status"] == "killed" and run.verdict([found], [])[0] == gate.FAIL


def test_nothing_that_can_show_proves_nothing():
    hidden = runner().mutant(mutant("yarn-guessed@last"))
    assert run.verdict([hidden], [])[0] == gate.INCONCLUSIVE


def test_noise_that_allows_no_verdict_is_no_pass():
    killed = runner().mutant(mutant("window-minus-one@first"))
    assert run.verdict([killed], [])[0] == gate.PASS
    assert run.verdict([killed], ["too loud"])[0] == gate.INCONCLUSIVE


def test_a_graded_fault_ends_at_the_first_size_that_gets_through():
    graded = next(g for g in GRADED if g.name == "score-scale")
    sizes = runner().graded(graded)["sizes"]
    assert [s["killed"] for s in sizes] == [True] * (len(sizes) - 1) + [False]
    assert sizes[0]["size"] > sizes[-1]["size"]


def test_the_same_fault_in_every_place_is_planted_in_other_layers():
    config = source("grouped").config
    layers = {
        place: Mutant(mutant("rotary-left-out@all").entry, place).layers(config)
        for place in ("first", "middle", "last")
    }
    assert layers == {"first": (0,), "middle": (2,), "last": (3,)}
    assert mutant("window-minus-one@last").layers(config) == (2,)


def test_patterns_choose_by_name_place_and_family_and_the_control_always_runs():
    assert run.choose(("window-minus-one@first",))[0] == {"window-minus-one@first", CONTROL.name}
    assert run.choose(("window-minus-one",))[0] == {
        f"window-minus-one@{p}" for p in ("all", "first", "middle", "last")
    } | {CONTROL.name}
    assert {m.name for m in MUTANTS if m.entry.family == "mlp"} < run.choose(("mlp",))[0]
    assert run.choose(("graded",)) == ({CONTROL.name}, {g.name for g in GRADED})
    with pytest.raises(BadInput, match="'window-minus-one' meant"):
        run.choose(("window-minus-on",))


def test_a_change_of_a_layer_is_planted_there_alone():
    """The control of planting: a step that is as it was changes nothing."""
    steps = Steps(("self_attn.mix",), lambda c, mix, *args: mix(*args))
    found = runner().mutant(Mutant(Entry("control", "same", FUNCTION, "", steps, (ALL,)), ALL))
    assert found["status"] == "survived"
    assert not found["failed"] and found["trace"]["first"] is None


def test_the_command_ends_to_end(tmp_path):
    """As a user runs it: JAX in a process of its own, tables, record."""
    reference = checkpoint()
    files = {name: tmp_path / f"mutants.{name}" for name in ("json", "markdown")}
    only = [
        "window-minus-one@first",
        "one-scale-one-step@middle",
        "cast-before-scale",
        "yarn-guessed@last",
        "score-scale",
    ]
    arguments = [x for name in only for x in ("--only", name)] + [
        x for n, f in files.items() for x in (f"--{n}", str(f))
    ]
    result = CliRunner().invoke(parity_app, ["mutants", "--reference", str(reference), *arguments])
    assert result.exit_code == 0, result.output
    record = json.loads(files["json"].read_text())
    found = {m["name"]: m["status"] for m in record["mutants"]}
    assert found.pop("cast-before-scale@all") in ("killed", "survived")  # KL need not show it, and it does not decide
    assert found == {
        "window-minus-one@first": "killed",
        "one-scale-one-step@middle": "killed",
        "yarn-guessed@last": "invisible",
        "as-it-is": "passed",
    }
    assert record["graded"][0]["name"] == "score-scale"
    for text in (result.stdout, files["markdown"].read_text()):
        assert "window-minus-one@first" in text and "the config has YaRN" in text and "score-scale" in text
    assert table.console(record).startswith("PASS")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "no-such"], "no mutant has that name"),
        (["--limit", "float32-delt=1"], "unknown limit"),
        (["--profile", "lax"], "unknown profile"),
        (["--candidate", "HF"], "an Orbax tree is wanted"),
    ],
)
def test_bad_input_is_refused_before_the_work(arguments, said, tmp_path):
    path = str(checkpoint())
    arguments = [path if a == "HF" else a for a in arguments]
    result = CliRunner().invoke(parity_app, ["mutants", "--reference", path, *arguments])
    assert isinstance(result.exception, BadInput) and said in str(result.exception)
