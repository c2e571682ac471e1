"""check-report: a pass, of this schema, for these very bytes, by this code, not too old; else a sentence and no launch."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import check, identity, preflight, stage
from olmo_parity.parity.gate import count_criterion
from olmo_parity.parity.preflight_options import STAGES
from tests.conftest import DATA
from tests.parity.records import criterion, record

BIN = Path(sys.executable).parent
CODE = "c" * 64
CHECKPOINT = DATA / "tiny-trained" / "hf-bfloat16-step900"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    subprocess.run([BIN / "olmo-convert", "hf2orbax", CHECKPOINT, folder], check=True, capture_output=True)
    return folder


@pytest.fixture
def copied(tree, tmp_path):
    return Path(shutil.copytree(tree, tmp_path / "0"))


@pytest.fixture(scope="module")
def good(tree):
    """A real record, as if made just now, by this code, of this tree."""
    source = open_source(tree)
    found = record(
        "pass",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        code_sha256=CODE,
        versions=identity.versions(),
    )
    found["candidate"]["config_sha256"] = identity.file_hash(tree / "olmo_config.json")
    found["candidate"]["weights_sha256"] = identity.combined_hash(identity.tensor_hashes(source))
    return found


@pytest.fixture
def ask(tmp_path, good, monkeypatch):
    """ask(target, edit, max_age): the answer on the good record after an edit."""
    monkeypatch.setattr(identity, "code_hash", lambda: CODE)  # a test of its own; here nobody's edit must be seen

    def ask(target, edit=lambda r: None, max_age=None):
        found = json.loads(json.dumps(good))
        edit(found)
        (tmp_path / "r.json").write_text(json.dumps(found))
        return check.check_report(tmp_path / "r.json", target, max_age)

    return ask


def test_a_fresh_pass_for_these_bytes_is_a_yes(tree, copied, ask):
    assert ask(tree, max_age="24h").exit_code == 0
    assert ask(copied).exit_code == 0  # bytes count, not the path
    assert ask(tree / "state").exit_code == 0  # the item of the same step


def test_a_parity_toml_that_changed_since_is_a_no_and_one_that_is_gone_says_nothing(tree, tmp_path, ask):
    settings = tmp_path / "parity.toml"
    settings.write_text('profile = "default"')
    judged = {"settings_file": str(settings), "settings_sha256": identity.file_hash(settings)}
    assert ask(tree, lambda r: r.update(judged)).exit_code == 0
    settings.write_text('profile = "published"')
    answer = ask(tree, lambda r: r.update(judged))
    assert answer.exit_code == 1 and "was changed since" in answer.sentence
    settings.unlink()
    assert ask(tree, lambda r: r.update(judged)).exit_code == 0


def test_a_yes_names_reference_and_profile(tree, ask, good):
    sentence = ask(tree).sentence
    assert good["reference"]["path"] in sentence and "default profile" in sentence


def test_one_changed_bit_of_a_weight_is_a_no_that_names_the_weight(copied, ask):
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{copied}/state/"},
            "path": "layers.3.mlp.up_proj.kernel/",
        },
    }
    store = ts.open(spec, read=True, write=True).result()
    values = np.array(store.read().result())
    values.view(np.uint16)[1, 2] ^= 1
    store.write(values).result()
    answer = ask(copied)
    assert answer.exit_code == 1
    assert "the weights in" in answer.sentence and "changed since their conversion" in answer.sentence
    assert "layers/3/mlp/up_proj/kernel" in answer.sentence


def test_the_manifest_is_not_believed(copied, ask, tree):
    """An exchanged tree under the manifest of the right one."""
    other = copied.parent / "other"
    subprocess.run([sys.executable, DATA.parents[1] / "demo" / "swap_gate_up.py", CHECKPOINT, other, "2"], check=True)
    shutil.rmtree(copied)
    subprocess.run([BIN / "olmo-convert", "hf2orbax", other, copied], check=True, capture_output=True)
    assert "this is another conversion" in ask(copied).sentence
    shutil.copy(tree / "manifest.json", copied / "manifest.json")
    answer = ask(copied)
    assert answer.exit_code == 1 and "changed since their conversion: layers/2/mlp/gate_proj/kernel" in answer.sentence
    (copied / "manifest.json").unlink()
    answer = ask(copied)
    assert answer.exit_code == 1 and "the weights in" in answer.sentence


def test_a_damaged_file_of_the_tree_cannot_be_read(copied, ask):
    file = max((copied / "state").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    try:
        assert ask(copied).exit_code == 1
    except BadInput as error:
        assert str(copied) in str(error)  # the store's own checksum


@pytest.mark.parametrize("key, value", [("rms_norm_eps", 1e-5), ("sliding_window", 15), ("rope_theta", 10000)])
def test_a_changed_config_is_a_no(copied, ask, key, value):
    file = copied / "olmo_config.json"
    config = json.loads(file.read_text())
    config[key] = value
    file.write_text(json.dumps(config))
    answer = ask(copied)
    assert answer.exit_code == 1 and "olmo_config.json is not the one that was judged" in answer.sentence


def test_another_form_and_another_checkpoint_are_a_no(ask):
    answer = ask(CHECKPOINT)
    assert answer.exit_code == 1 and "judged a checkpoint of the orbax form" in answer.sentence


def test_an_old_report_is_a_no_only_where_an_age_is_given(tree, ask):
    def aged(**past):
        created = (datetime.now(UTC) - timedelta(**past)).isoformat(timespec="seconds")
        return lambda r: r.update(created=created)

    answer = ask(tree, aged(hours=25), "24h")
    assert answer.exit_code == 1 and "ago: run the gate again" in answer.sentence
    assert ask(tree, aged(hours=23), "24h").exit_code == 0
    assert ask(tree, aged(days=400)).exit_code == 0
    answer = ask(tree, aged(hours=-2), "24h")
    assert answer.exit_code == 1 and "yet to come" in answer.sentence


@pytest.mark.parametrize("text", ["24", "h", "-1h", "1w", "", "1e3h", "nanh", "9" * 30 + "d"])
def test_an_age_that_cannot_be_read_is_refused(text):
    with pytest.raises(BadInput, match="--max-age"):
        check.parse_age(text)


def test_ages_are_read_in_their_units():
    assert [check.parse_age(t) for t in ("90s", "1.5m", "24h", "7d")] == [
        timedelta(seconds=90), timedelta(seconds=90), timedelta(days=1), timedelta(days=7),
    ]  # fmt: skip


def not_covered(found):
    found["coverage"][0]["covered"] = False


def uneven(found):
    criterion(found, "float32", "max KL")["value"] = 1.0


EDITS = {
    "another schema": (lambda r: r.update(schema="olmo-parity/report/0"), "is of the schema 'olmo-parity/report/0'"),
    "failed": (
        lambda r: r.update(record("fail", candidate=r["candidate"], code_sha256=r["code_sha256"])),
        "is no pass: FAIL, weights: weights that differ is 2",
    ),
    "inconclusive": (
        lambda r: (not_covered(r), r.update(verdict="inconclusive", exit_code=3, decided_by="not shown: window")),
        "is no pass: INCONCLUSIVE, not shown: window",
    ),
    "fail edited to pass": (
        lambda r: r.update(record("fail", candidate=r["candidate"], verdict="pass", exit_code=0)),
        "the verdict is pass, and a criterion failed",
    ),
    "verdict alone": (lambda r: r.update(exit_code=1), "does not go with exit code 1"),
    "exit code alone": (lambda r: r.update(verdict="fail"), "does not go with exit code 0"),
    "a value alone": (uneven, "float32 max KL is said to have passed with 1.0"),
    "a NaN": (lambda r: criterion(r, "bfloat16", "mean KL").update(value="nan"), "is said to have passed with nan"),
    "a limit of NaN": (lambda r: criterion(r, "bfloat16", "mean KL").update(limit="nan"), "is said to have passed"),
    "uncovered and passed": (not_covered, "this was left open: attention"),
    "open question and passed": (lambda r: r.update(open_questions=["noise"]), "this was left open: noise"),
    "a leg taken out": (
        lambda r: r.update(criteria=[c for c in r["criteria"] if c["leg"] != "float32"]),
        "no criterion of the float32 leg was judged",
    ),
    "weights taken out": (
        lambda r: r.update(criteria=[c for c in r["criteria"] if c["leg"] != "weights"]),
        "no criterion of the weights leg was judged",
    ),
    "a leg switched off": (
        lambda r: [c.update(on=False) for c in r["criteria"] if c["leg"] == "bfloat16"],
        "no criterion of the bfloat16 leg was judged",
    ),
    "one criterion switched off": (
        lambda r: criterion(r, "float32", "max KL").update(on=False),
        "float32 max KL was not judged",
    ),
    "one criterion taken out": (
        lambda r: r["criteria"].remove(criterion(r, "bfloat16", "mean KL")),
        "bfloat16 mean KL was not judged",
    ),
    "no tokens": (lambda r: r.update(sequences=[]), "no tokens were compared"),
    "another version": (lambda r: r["versions"].update({"olmo-parity": "0.0.9"}), "was made by olmo-parity 0.0.9"),
    "edited code": (lambda r: r.update(code_sha256="0" * 64), "(code 000000000000)"),
    "unread weights": (lambda r: r["candidate"].update(weights_sha256=None), "its weights unread"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_is_no_pass_of_this_kind_is_a_no_with_its_own_sentence(tree, ask, name):
    edit, words = EDITS[name]
    answer = ask(tree, edit)
    assert answer.exit_code == 1 and words in answer.sentence, answer


def test_a_changed_candidate_function_is_a_no(tree, ask, tmp_path):
    module = tmp_path / "model.py"
    module.write_text("def build(): ...\n")
    sha = identity.file_hash(module)

    def of_function(r):
        r["candidate"].update(function="model:build", function_file=str(module), function_sha256=sha)

    assert ask(tree, of_function).exit_code == 0
    module.write_text("def build(): pass\n")
    assert "was changed since" in ask(tree, of_function).sentence


@pytest.mark.parametrize(
    "edit",
    [
        lambda r: r.pop("criteria"),
        lambda r: r["criteria"][0].pop("limit"),
        lambda r: r["criteria"][0].update(value=None),
        lambda r: r.pop("candidate"),
        lambda r: r.pop("created"),
        lambda r: r.update(created="yesterday"),
        lambda r: r.update(created="2026-11-29T10:00:00"),  # of no time zone
        lambda r: r.pop("code_sha256"),
        lambda r: r.pop("schema"),
        lambda r: r.update(versions=None),
        lambda r: r.update(code_sha256=5),
        lambda r: r.update(settings_file=5),
    ],
)
def test_half_a_report_cannot_be_read(tree, ask, edit):
    with pytest.raises(BadInput, match=r"r\.json"):
        ask(tree, edit)


def test_a_yes_says_what_was_off_by_hand_or_accepted(tree, ask):
    def qualified(r):
        criterion(r, "weights", "weights that differ").update(on=False, value=2, passed=False)
        criterion(r, "bfloat16", "mean KL").update(set_by_hand=True)
        not_covered(r)
        r.update(accepted_uncovered=["attention"])
        r["versions"]["jax"] = "0.1"

    sentence = ask(tree, qualified).sentence
    for words in (
        "off in that run: weights weights that differ", "set by hand: bfloat16 mean KL",
        "accepted: attention", "jax was 0.1 in that run",
    ):  # fmt: skip
        assert words in sentence


def of_preflight(good):
    """The record of a preflight whose stage logits is that gate's; every other stage passed."""
    stages = [stage.judged(name, 0, [count_criterion("differences", name, 0, "leaves")]) for name in STAGES]
    at = list(STAGES).index("logits")
    stages[at] |= {"criteria": good["criteria"], "report": good}
    same = ("created", "versions", "code_sha256", "reference", "candidate", "settings_file", "settings_sha256")
    verdict, exit_code, sentence = preflight.verdict_of(stages, False)
    return {
        "schema": preflight.SCHEMA, "verdict": verdict, "exit_code": exit_code, "decided_by": sentence, "only": [],
        "strict": False, "keep_going": False, "not_run": [], "stages": stages, "seconds": 1.0,
        **{key: good.get(key) for key in same},
    }  # fmt: skip


@pytest.fixture
def ask_preflight(tmp_path, good, monkeypatch):
    """ask_preflight(target, edit, max_age): the answer on a good preflight after an edit."""
    monkeypatch.setattr(identity, "code_hash", lambda: CODE)

    def ask(target, edit=lambda r: None, max_age=None):
        found = json.loads(json.dumps(of_preflight(good)))
        edit(found)
        (tmp_path / "p.json").write_text(json.dumps(found))
        return check.check_report(tmp_path / "p.json", target, max_age)

    return ask


def test_a_preflight_that_passed_is_a_yes_for_these_bytes_and_for_no_others(tree, copied, ask_preflight):
    assert ask_preflight(tree, max_age="24h").exit_code == 0
    config = copied / "olmo_config.json"
    config.write_text(config.read_text().replace('"sliding_window": 16', '"sliding_window": 15'))
    assert ask_preflight(copied).exit_code == 1


def leave_out(found, name):
    found["stages"][list(STAGES).index(name)] = stage.not_run(name, "nothing was named")
    found["not_run"] = [f"{name} (nothing was named)"]


def test_a_yes_names_what_was_not_run(tree, ask_preflight):
    answer = ask_preflight(tree, lambda r: leave_out(r, "weights"))
    assert answer.exit_code == 0 and "not run: weights (nothing was named)" in answer.sentence


def logits_of(found):
    return found["stages"][list(STAGES).index("logits")]


def failed(found, verdict="fail", exit_code=1):
    found["stages"][0]["criteria"][0].update(value=1, passed=False)
    found["stages"][0].update(verdict="fail")
    found.update(verdict=verdict, exit_code=exit_code)


PREFLIGHT_EDITS = {
    "failed": (failed, "is no pass: FAIL"),
    "a failed stage in a pass": (lambda r: failed(r, "pass", 0), "its stages make it 'fail'"),
    "a stage called passed that failed": (
        lambda r: (failed(r, "pass", 0), r["stages"][0].update(verdict="pass")),
        "it is said to pass, and a criterion failed",
    ),
    "a value alone": (lambda r: r["stages"][0]["criteria"][0].update(value=3), "said to have passed with 3"),
    "a NaN": (lambda r: r["stages"][0]["criteria"][0].update(value="nan"), "said to have passed with nan"),
    "an open question": (lambda r: r["stages"][0].update(open_questions=["noise"]), "something was left open"),
    "a stage that judged nothing": (lambda r: r["stages"][0].update(criteria=[]), "nothing was judged"),
    "a stage taken out": (lambda r: r["stages"].pop(0), "there is no stage weights"),
    "not run and not said": (
        lambda r: (leave_out(r, "weights"), r.update(not_run=[])),
        "what was not run is not what its stages say",
    ),
    "only some stages": (lambda r: r.update(only=["weights"]), "weights alone (--only)"),
    "no logits": (lambda r: leave_out(r, "logits"), "holds no comparison of logits"),
    "another verdict": (lambda r: r.update(verdict="inconclusive"), "its stages make it 'pass'"),
    "another exit code": (lambda r: r.update(exit_code=1), "its stages make it 'pass'"),
    "the gate inside failed": (
        lambda r: logits_of(r)["report"].update(record("fail", candidate=r["candidate"], code_sha256=CODE)),
        "is no pass: FAIL",
    ),
    "another tree than its gate's": (
        lambda r: r["candidate"].update(weights_sha256="0" * 64),
        "its candidate is not that of its stage logits",
    ),
    "other code than its gate's": (lambda r: r.update(code_sha256="0" * 64), "its code_sha256 is not that"),
}


@pytest.mark.parametrize("name", PREFLIGHT_EDITS)
def test_a_preflight_that_is_no_pass_is_a_no_with_its_own_sentence(tree, ask_preflight, name):
    edit, words = PREFLIGHT_EDITS[name]
    answer = ask_preflight(tree, edit)
    assert answer.exit_code == 1 and words in answer.sentence, answer


def test_a_users_function_that_was_changed_since_is_a_no(tree, ask_preflight, tmp_path):
    module = tmp_path / "training.py"
    module.write_text("def make(): ...\n")
    entry = {"name": "training:make", "file": str(module), "sha256": identity.file_hash(module)}
    assert ask_preflight(tree, lambda r: r["stages"][2].update(function=entry)).exit_code == 0
    module.write_text("def make(): pass\n")
    answer = ask_preflight(tree, lambda r: r["stages"][2].update(function=entry))
    assert answer.exit_code == 1 and "training.py was changed since" in answer.sentence


def test_an_old_preflight_and_half_a_preflight_are_refused(tree, ask_preflight):
    old = (datetime.now(UTC) - timedelta(hours=25)).isoformat(timespec="seconds")
    assert ask_preflight(tree, lambda r: r.update(created=old), "24h").exit_code == 1
    for edit in (
        lambda r: r.pop("stages"), lambda r: r["stages"][0].pop("criteria"), lambda r: r.pop("strict"),
        lambda r: r["stages"][0]["criteria"][0].pop("limit"), lambda r: r.update(stages=None),
        lambda r: r.update(created="soon"), lambda r: logits_of(r).update(report=5),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=r"p\.json"):
            ask_preflight(tree, edit)


def test_the_command_answers_with_its_exit_code(tree, tmp_path, good):
    def run(*arguments):
        done = subprocess.run([BIN / "olmo-parity", "check-report", *arguments], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    report = tmp_path / "r.json"
    assert run(report, tree)[0] == 2 and "Did the gate run" in run(report, tree)[1]
    report.write_text("{")
    assert run(report, tree)[0] == 2
    report.write_text(json.dumps(good | {"code_sha256": identity.code_hash()}))
    assert run(report, tree, "--max-age", "24h")[0] == 0
    assert run(report, tree, "--max-age", "soon")[0] == 2
    assert run(report, tmp_path / "none")[0] == 2
    report.write_text(json.dumps(good | {"verdict": "fail", "exit_code": 1}))
    code, text = run(report, tree)
    assert code == 1 and text.startswith("NO")


def test_every_chunk_is_hashed_also_a_last_one_that_is_not_full_and_as_the_manifest_has_it(tmp_path):
    convert = [BIN / "olmo-convert", "hf2orbax", CHECKPOINT, tmp_path / "0", "--chunk-bytes", "3000"]
    subprocess.run(convert, check=True, capture_output=True)
    written = json.loads((tmp_path / "0" / "manifest.json").read_text())["tensors"]
    assert any(n % c for t in written for n, c in zip(t["shape"], t["chunk_shape"], strict=True))  # the point of this
    found = identity.tensor_hashes(open_source(tmp_path / "0"))
    assert {path: sha for path, (_, _, sha) in found.items()} == {t["target_path"]: t["target_sha256"] for t in written}


def test_the_code_hash_sees_every_file_of_the_package(tmp_path):
    package = Path(check.__file__).parents[1]
    for part in ("olmo_jax", "convert", "parity"):
        shutil.copytree(package / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "cli.py", tmp_path / "cli.py")
    before = identity.code_hash(tmp_path)
    for file in ("cli.py", "olmo_jax/rope.py", "convert/mapping.py", "parity/gate.py"):
        whole = (tmp_path / file).read_text()
        (tmp_path / file).write_text(whole + "#")
        assert identity.code_hash(tmp_path) != before
        (tmp_path / file).write_text(whole)
    os.rename(tmp_path / "parity" / "gate.py", tmp_path / "parity" / "gates.py")
    assert identity.code_hash(tmp_path) != before


def test_the_weights_hash_knows_name_dtype_and_shape_beside_the_bytes():
    one = {"a": ("float32", (2, 3), "0" * 64), "b": ("float32", (6,), "1" * 64)}
    first = identity.combined_hash(one)
    assert first == identity.combined_hash(dict(reversed(one.items())))
    for other in (
        {"a": one["b"], "b": one["a"]}, one | {"a": ("float32", (3, 2), "0" * 64)},
        one | {"a": ("int32", (2, 3), "0" * 64)}, {"a": one["a"]},
    ):  # fmt: skip
        assert identity.combined_hash(other) != first
