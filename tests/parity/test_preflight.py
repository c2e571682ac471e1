"""preflight: the order of its stages, where it stops, its one exit code, and what its report says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorstore as ts

from olmo_parity import cli
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import preflight, preflight_options, preflight_report, report, settings, stage
from olmo_parity.parity.gate import Criterion, count_criterion
from olmo_parity.parity.options import GateOptions
from olmo_parity.parity.preflight_options import STAGES, Preflight
from tests.conftest import DATA
from tests.parity.records import record as gate_record

CHECKPOINT = DATA / "tiny-trained" / "hf-bfloat16-step900"
NO_SETTINGS = settings.Settings(None, {})


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(str(CHECKPOINT), str(folder), quiet=True)
    return folder


def answer(verdict, name="weights", left=()):
    """What a stage of that verdict returns."""
    if verdict == stage.NOT_RUN:
        return stage.not_run(name, "nothing was named")
    worst = Criterion("worst leaf", name, {"fail": 3.0}.get(verdict, 0.5), 1.0, "of its norm", "measured")
    questions = ["noise"] if verdict == "inconclusive" else []
    return stage.judged(
        name, 0, [worst], open_questions=questions, parts_not_run=left, where=["leaf 3"], advice=["look"]
    )


@pytest.fixture
def staged(monkeypatch, tree):
    """staged(weights=..., logits=..., ...): preflight with stages that answer so, all others pass; what ran, in order."""

    def run(options=None, **verdicts):
        ran = []

        def function(name):
            def one(options, say):
                ran.append(name)
                verdict = verdicts.get(name, "pass")
                if verdict == stage.BAD_INPUT:
                    raise BadInput("the file is a folder", ["and empty"])
                return answer(verdict, name) if isinstance(verdict, str) else verdict

            return one

        monkeypatch.setattr(preflight, "_function", function)
        found = preflight.run_preflight(Preflight(candidate=tree) if options is None else options(tree))
        return SimpleNamespace(record=found, ran=ran, code=found["exit_code"], says=found["decided_by"])

    return run


def test_all_stages_run_in_their_order_and_pass_together(staged):
    done = staged()
    assert done.ran == list(STAGES) and (done.code, done.record["verdict"]) == (0, "pass")
    assert done.record["not_run"] == [] and "Not run" not in done.says
    assert [s["stage"] for s in done.record["stages"]] == list(STAGES)


def test_the_first_failure_ends_the_run_and_those_after_it_say_so(staged):
    done = staged(weights="fail")
    assert done.ran == ["weights"] and done.code == 1
    assert done.says.startswith("weights: weights: worst leaf is 3")
    assert {s["verdict"] for s in done.record["stages"][1:]} == {"not run"}
    assert "weights did not pass" in done.record["stages"][1]["decided_by"]


def test_with_keep_going_all_of_them_run_and_the_failure_decides(staged):
    done = staged(lambda tree: Preflight(candidate=tree, keep_going=True), weights="fail")
    assert done.ran == list(STAGES) and done.code == 1
    done = staged(lambda tree: Preflight(candidate=tree, keep_going=True), weights="bad input", logits="fail")
    assert done.code == 1 and done.says.startswith("logits")


def test_input_that_cannot_be_used_is_exit_2_with_its_sentence_in_the_report(staged):
    done = staged(weights=stage.BAD_INPUT)
    assert done.code == 2 and done.ran == ["weights"] and done.says == "weights: the file is a folder"
    assert "and empty" in preflight_report.console(done.record)
    assert done.record["candidate"] is None  # nothing was judged


def test_an_inconclusive_stage_does_not_stop_the_run_and_is_exit_3(staged):
    done = staged(weights="inconclusive")
    assert done.ran == list(STAGES) and done.code == 3


def test_what_is_not_run_is_said_and_decides_only_with_strict(staged):
    done = staged(logits=stage.NOT_RUN)
    assert done.code == 0 and "Not run: logits (nothing was named)" in done.says
    strict = staged(lambda tree: Preflight(candidate=tree, strict=True), logits=stage.NOT_RUN)
    assert strict.code == 3 and "logits (nothing was named)" in strict.says
    part = answer("pass", "logits", left=["no torch"])
    assert staged(logits=part).code == 0 and "logits (no torch)" in staged(logits=part).says
    assert staged(lambda tree: Preflight(candidate=tree, strict=True), logits=part).code == 3
    nothing = staged(**dict.fromkeys(STAGES, stage.NOT_RUN))
    assert nothing.code == 3 and nothing.says.startswith("nothing was run")


def test_a_failure_is_a_failure_with_strict_too(staged):
    done = staged(lambda tree: Preflight(candidate=tree, strict=True), logits="fail", weights=stage.NOT_RUN)
    assert done.code == 1


def test_only_runs_what_it_names_in_the_order_of_the_stages(staged):
    done = staged(lambda tree: Preflight(candidate=tree, only=("logits",)))
    assert done.ran == ["logits"] and done.record["only"] == ["logits"]
    chosen, _ = preflight_options.choose({"only": ["logits", "weights"]}, NO_SETTINGS)
    assert chosen.only == ("weights", "logits")
    with pytest.raises(BadInput, match="--only weigths: there is no such stage, was weights meant"):
        preflight_options.choose({"only": ["weigths"]}, NO_SETTINGS)


def test_without_a_candidate_there_is_nothing_to_judge():
    with pytest.raises(BadInput, match="--candidate is wanted"):
        preflight.run_preflight(Preflight())


def test_a_function_that_cannot_be_imported_is_said_before_the_first_stage_and_only_where_its_stage_runs(
    staged, tmp_path, monkeypatch
):
    (tmp_path / "training.py").write_text("def make(rate, tree): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"\[preflight\] optimizer training:mke: .*has no mke; it has make"):
        staged(lambda tree: Preflight(candidate=tree, optimizer="training:mke"))
    with pytest.raises(BadInput, match=r"\[preflight\] restore trainin:make: no module trainin"):
        staged(lambda tree: Preflight(candidate=tree, optimizer="training:make", restore="trainin:make"))
    assert staged(lambda tree: Preflight(candidate=tree, restore="trainin:make", only=("weights",))).code == 0


def weights_of(tree, **more):
    return preflight.run_weights(Preflight(candidate=tree, **more), print)


def test_the_weights_are_compared_with_their_source_or_with_their_manifest(tree, tmp_path):
    by_source = weights_of(tree, reference=CHECKPOINT)
    assert by_source["verdict"] == "pass" and str(CHECKPOINT) in by_source["decided_by"]
    by_manifest = weights_of(tree)
    assert by_manifest["verdict"] == "pass" and "its manifest" in by_manifest["decided_by"]
    bare = Path(shutil.copytree(tree, tmp_path / "0"))
    (bare / "manifest.json").unlink()
    assert weights_of(bare)["verdict"] == stage.NOT_RUN
    assert weights_of(bare, source=CHECKPOINT)["verdict"] == "pass"


@pytest.mark.parametrize("against", [{"reference": CHECKPOINT}, {}])
def test_one_changed_bit_of_a_weight_fails_and_is_named(against, tree, tmp_path):
    changed = Path(shutil.copytree(tree, tmp_path / "0"))
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{changed}/state/"},
            "path": "layers.3.mlp.up_proj.kernel/",
        },
    }
    store = ts.open(spec, read=True, write=True).result()
    values = np.array(store.read().result())
    values.view(np.uint16)[1, 2] ^= 1
    store.write(values).result()
    found = weights_of(changed, **against)
    assert found["verdict"] == "fail" and "layers" in "".join(found["where"]) and "up_proj" in "".join(found["where"])


def test_a_tree_that_is_stored_narrower_than_its_source_passes_without_a_manifest_too(tree, tmp_path):
    """As another tool would have cast it: the gate takes it, so the stage before it must."""
    wide = tmp_path / "wide"
    hf2orbax(str(CHECKPOINT), str(wide / "0"), dtype="float32", quiet=True)
    (wide / "0" / "manifest.json").unlink()
    found = weights_of(wide / "0", reference=CHECKPOINT)
    assert found["verdict"] == "pass" and "is stored in float32" in "".join(found["notes"])


def test_weights_that_may_differ_are_not_run(tree):
    found = weights_of(tree, reference=CHECKPOINT, gate=GateOptions(weights_may_differ=True))
    assert found["verdict"] == stage.NOT_RUN and "weights_may_differ" in found["decided_by"]


def test_the_logits_are_those_of_the_gate_and_need_a_reference(tree, monkeypatch):
    assert preflight.run_logits(Preflight(candidate=tree), print)["verdict"] == stage.NOT_RUN
    monkeypatch.setattr("olmo_parity.parity.run.run_gate", lambda *a: gate_record("fail"))
    found = preflight.run_logits(Preflight(reference=CHECKPOINT, candidate=tree), print)
    assert found["verdict"] == "fail" and found["report"] == gate_record("fail")
    assert "model.layers" in "".join(found["where"]) and found["advice"]


def toml(folder, text):
    (folder / "parity.toml").write_text(text)
    return settings.load(folder / "parity.toml", False)


def test_parity_toml_gives_sides_and_table_and_the_command_line_wins(tmp_path):
    found = toml(
        tmp_path,
        'reference = "hf"\ncandidate = "orbax/0"\njson = "gate.json"\ngradients = true\nz_loss = 1e-5\n'
        '[preflight]\nsource = "core"\nstrict = true\njson = "preflight.json"\n',
    )
    chosen, reports = preflight_options.choose({"candidate": Path("other"), "strict": False}, found)
    assert (chosen.reference, chosen.candidate) == (tmp_path / "hf", Path("other"))
    assert (chosen.source, chosen.strict) == (tmp_path / "core", False)
    assert reports == {"json": tmp_path / "preflight.json", "junit": None, "markdown": None}
    assert not chosen.gate.gradients and chosen.gate.z_loss is None  # a stage of their own
    assert chosen.gate.settings_file == tmp_path / "parity.toml"


def test_an_unknown_key_of_the_table_is_refused_by_name(tmp_path):
    with pytest.raises(
        BadInput, match=r"\[preflight\] in .*parity.toml cannot be used[^$]*'sorce': was 'source' meant"
    ):
        preflight_options.choose({}, toml(tmp_path, '[preflight]\nsorce = "hf"\n'))
    with pytest.raises(BadInput, match="strict is 'yes', true or false is wanted"):
        preflight_options.choose({}, toml(tmp_path, '[preflight]\nstrict = "yes"\n'))


def test_the_console_shows_verdict_first_then_number_limit_and_what_to_try_of_every_stage(staged):
    text = preflight_report.console(
        staged(lambda tree: Preflight(candidate=tree, keep_going=True), logits="fail").record
    )
    lines = text.splitlines()
    assert lines[0].startswith("FAIL  logits")
    row = next(line for line in lines if line.startswith("  logits"))
    assert "FAIL" in row and "worst leaf 3, limit 1 of its norm (3 times above)" in row
    assert lines[lines.index(row) + 1 : lines.index(row) + 3] == ["      leaf 3", "      try: look"]
    assert next(line for line in lines if line.startswith("  weights")).count("pass") == 1


def test_junit_and_markdown_have_a_place_for_every_stage(staged):
    done = staged(lambda tree: Preflight(candidate=tree, strict=True), weights="fail")
    suite = ElementTree.fromstring(preflight_report.as_junit(done.record))
    assert int(suite.get("failures")) == 3 and int(suite.get("skipped")) == len(STAGES) - 1
    cases = {(c.get("classname"), c.get("name")) for c in suite.iter("testcase")}
    assert {(f"olmo-parity.{name}", "verdict") for name in STAGES} <= cases
    text = preflight_report.as_markdown(done.record)
    assert all(f"| {name} |" in text for name in STAGES) and "try: look" in text
    unread = preflight_report.as_junit(staged(weights=stage.BAD_INPUT).record)
    assert int(ElementTree.fromstring(unread).get("errors")) == 2


def test_the_command_writes_the_report_and_ends_with_its_exit_code(tree, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-c", "from olmo_parity.cli import parity_main; parity_main()", "preflight"]
        return subprocess.run([*command, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "parity.toml").write_text(f'candidate = "{tree}"\n[preflight]\njson = "p.json"\n')
    done = run("--only", "weights")
    assert done.returncode == 0 and done.stdout.startswith("PASS")
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["schema"] == preflight.SCHEMA and found["settings_file"] == str(tmp_path / "parity.toml")
    assert found["candidate"]["weights_sha256"]
    check_schema(found)
    done = run("--candidate", tmp_path / "none")
    assert done.returncode == 2 and done.stdout.startswith("BAD INPUT")


def check_schema(found):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DATA.parents[1] / "docs" / "preflight.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)


def test_every_verdict_fits_the_schema(staged):
    for verdict in ("pass", "fail", "inconclusive", stage.NOT_RUN, stage.BAD_INPUT):
        check_schema(json.loads(report.as_json(staged(weights=verdict).record)))


def test_the_help_names_every_stage():
    help_text = next(c for c in cli.parity_app.registered_commands if c.callback.__name__ == "preflight")
    annotation = help_text.callback.__annotations__["only"]
    assert all(name in annotation for name in STAGES)


def test_a_stage_of_nothing_but_switched_off_criteria_is_no_verdict():
    with pytest.raises(ValueError, match="nothing was compared"):
        stage.judged("weights", 0, [count_criterion("x", "weights", 0, "y", on=False)])
