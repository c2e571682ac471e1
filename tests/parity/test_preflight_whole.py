"""All of preflight from one parity.toml, behind the SLURM script: every stage passes with room to spare, and training starts."""

import json

import numpy as np
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.parity import check, preflight_options
from tests.conftest import DATA
from tests.parity.test_examples import EXAMPLES, installed, run, script
from tests.parity.two_layers import two_layers

SETTINGS = """
reference = "hf"
candidate = "tree/0"

[preflight]
mesh = "fsdp=4,tensor=2"
optimizer = "training:optimizer"
restore = "training:restore"
strict = true
junit = "junit.xml"
markdown = "summary.md"

[preflight.rules]
norm = "whole"

[preflight.loader]
function = "training:loader"

[heldout]
files = ["held.jsonl"]
"""
TRAINING = """
from pathlib import Path

import numpy as np

def optimizer(learning_rate, tree):
    import jax, optax

    decays = jax.tree_util.tree_map_with_path(lambda path, _: "embed_tokens" not in str(path), tree)
    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)

def restore(path, mesh):
    from olmo_parity.convert.sources import open_source
    from olmo_parity.olmo_jax.sharding import restore

    return restore(Path(path), open_source(path).config, mesh)

def loader(process_index, process_count, seed, step):
    order = np.random.default_rng(seed).permutation(320)
    for t in range(step, len(order) // (4 * process_count)):
        at = 4 * (t * process_count + process_index)
        yield {"tokens": np.stack([np.full(8, i) for i in order[at : at + 4]])}
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of a project in which training was launched, the launch's result, and the report."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    project = tmp_path_factory.mktemp("project")
    (project / "hf").mkdir()
    hf2orbax(str(two_layers(project / "hf")), str(project / "tree" / "0"), quiet=True)
    (project / "parity.toml").write_text(SETTINGS)
    (project / "training.py").write_text(TRAINING)
    rows = np.random.default_rng(0).integers(0, 256, (40, 64)).tolist()
    text = "".join(json.dumps({"id": str(i), "tokens": row}) + "\n" for i, row in enumerate(rows))
    (project / "held.jsonl").write_text(text)
    path = installed(tmp_path_factory.mktemp("site"))
    script(path / "srun", '#!/bin/sh\nexec "$@"\n')
    done = run([EXAMPLES / "slurm.sh", "tree/0", "touch", "trained"], project, path)
    assert (project / "preflight-report.json").exists(), done.stdout + done.stderr
    return project, done, json.loads((project / "preflight-report.json").read_text())


def test_every_stage_runs_and_passes_and_training_starts(launched):
    project, done, record = launched
    assert done.returncode == 0 and (project / "trained").exists(), done.stdout
    assert [(s["stage"], s["verdict"]) for s in record["stages"]] == [(s, "pass") for s in preflight_options.STAGES]
    assert record["not_run"] == [] and record["exit_code"] == 0
    assert "YES " in done.stdout and (project / "junit.xml").exists() and "PASS" in (project / "summary.md").read_text()
    jsonschema = pytest.importorskip("jsonschema")
    for name, found in (("preflight", record), ("report", stage(record, "logits")["report"])):
        schema = json.loads((DATA.parents[1] / "docs" / f"{name}.schema.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(found)


def stage(record, name):
    return next(s for s in record["stages"] if s["stage"] == name)


def test_the_three_steps_have_room_to_spare(launched):
    found = stage(launched[2], "step0")
    assert found["function"]["name"] == "training:optimizer"
    assert {c["leg"] for c in found["criteria"]} == {"optimizer", "torch optimizer", "gradients", "three steps"}
    criteria = {c["name"].split(" (")[0]: c for c in found["criteria"] if c["leg"] == "three steps"}
    assert sorted(criteria) == [
        *(f"loss difference / loss, step {t}" for t in (1, 2, 3)),
        *(f"worst {kind}" for kind in ("first moment", "second moment", "update")),
    ]
    assert all(c["margin"] > 3 for c in criteria.values()), criteria
    assert len(found["steps"]["parameters"]) == 25 and not found["steps"]["unresolved"]
    losses = [step["loss"] for step in found["steps"]["steps"]["candidate"]]
    assert losses[0] > losses[1] > losses[2]  # it does train


def test_the_restore_is_of_eight_devices_and_of_the_two_of_a_restart(launched):
    found = stage(launched[2], "restore")
    assert [m["axes"] for m in found["meshes"]] == [{"fsdp": 4, "tensor": 2}, {"fsdp": 1, "tensor": 2}]
    assert [len(m["devices"]) for m in found["meshes"]] == [8, 2] and all(m["simulated"] for m in found["meshes"])
    assert all(m["peak_memory"] > 50e6 for m in found["meshes"])
    assert found["meshes"][0]["parameters_per_device"] < found["meshes"][1]["parameters_per_device"]
    names = [c["name"] for c in found["criteria"]]
    assert sum(name.startswith("what the first mesh saved, onto fsdp=1,tensor=2") for name in names) == 4
    deltas = [c for c in found["criteria"] if c["name"].endswith("max |delta logit| / spread")]
    assert len(deltas) == 2 and all(c["margin"] > 10 for c in deltas)
    assert "simulated devices" in found["said"][0] and "peak memory" in found["said"][1]


def test_a_function_that_was_edited_afterwards_makes_the_report_a_no(launched, monkeypatch):
    project, _, record = launched
    file = project / "training.py"
    text, report, tree = file.read_text(), project / "preflight-report.json", project / "tree" / "0"
    monkeypatch.setattr(check.identity, "code_hash", lambda: record["code_sha256"])  # of the copy that made it
    assert check.check_report(report, tree).exit_code == 0
    file.write_text(text + "#")
    answer = check.check_report(report, tree)
    file.write_text(text)
    assert answer.exit_code == 1 and "training.py was changed since" in answer.sentence
