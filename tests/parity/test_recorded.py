"""A recorded reference gives the verdict of the live one, without torch, and is refused where it does not belong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import find_fixture

pytest.importorskip("torch")
pytest.importorskip("transformers")
BIN = Path(sys.executable).parent
CHECKPOINTS = {"bfloat16": "tiny-trained/hf-bfloat16-step900", "float32": "tiny-yarn/hf-float32"}


def convert(source, target, *options):
    subprocess.run([BIN / "olmo-convert", "hf2orbax", source, target, *options], check=True, capture_output=True)


def gate(reference, candidate, report, torch=True):
    """Run the gate, with torch hidden where it must not be needed. Returns (exit code, record or stderr)."""
    hide = "" if torch else "sys.modules['torch'] = sys.modules['transformers'] = None\n"
    arguments = ["olmo-parity", "--reference", str(reference), "--candidate", str(candidate), "--json", str(report)]
    code = f"import sys\n{hide}sys.argv = {arguments!r}\nfrom olmo_parity.cli import parity_main\nparity_main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(report.read_text()) if report.exists() else done.stderr


@pytest.fixture(scope="module", params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def recorded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    source = find_fixture(request.param)
    convert(source, folder / "tree")
    done = subprocess.run([BIN / "olmo-parity", "record", source, folder / "record"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return source, folder / "record", folder / "tree"


def test_a_replay_without_torch_gives_the_numbers_of_the_live_run(recorded, tmp_path):
    source, record, tree = recorded
    live_code, live = gate(source, tree, tmp_path / "live.json")
    code, replay = gate(record, tree, tmp_path / "replay.json", torch=False)
    assert (code, live_code) == (0, 0)
    for a, b in zip(live["criteria"], replay["criteria"], strict=True):
        assert {**a, "reason": ""} == {**b, "reason": ""}
    assert replay["reference"]["weights_sha256"] == live["reference"]["weights_sha256"]


def test_a_fault_in_the_weights_fails_in_the_replay_too(recorded, tmp_path):
    source, record, _ = recorded
    script = Path(__file__).parents[2] / "demo" / "swap_gate_up.py"
    subprocess.run([sys.executable, script, source, tmp_path / "damaged", "2"], check=True)
    convert(tmp_path / "damaged", tmp_path / "tree")
    code, replay = gate(record, tmp_path / "tree", tmp_path / "r.json", torch=False)
    assert code == 1
    assert {d["weight"] for d in replay["weight_differences"]} == {
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    }
    assert {c["leg"] for c in replay["criteria"] if not c["passed"]} >= {"weights", "float32"}


def test_a_record_of_another_config_is_stale_and_not_a_bad_conversion(recorded, tmp_path):
    _, record, tree = recorded
    shutil.copytree(tree, tmp_path / "tree")
    file = tmp_path / "tree" / "olmo_config.json"
    config = json.loads(file.read_text())
    config["sliding_window"] += 1
    file.write_text(json.dumps(config))
    code, said = gate(record, tmp_path / "tree", tmp_path / "r.json", torch=False)
    assert code == 2 and "stale" in said and "sliding_window is 16 in the record, 17" in said


def test_a_changed_or_cut_record_is_refused(recorded, tmp_path):
    _, record, tree = recorded
    shutil.copytree(record, tmp_path / "record")
    file = tmp_path / "record" / "float32" / "0.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, said = gate(tmp_path / "record", tree, tmp_path / "r.json", torch=False)
    assert code == 2 and "0.npy is not what was recorded" in said
    (tmp_path / "record" / "record.json").write_text("{}")
    code, said = gate(tmp_path / "record", tree, tmp_path / "r.json", torch=False)
    assert code == 2 and "cannot be read as a record" in said


def test_a_record_is_not_written_over_and_nothing_is_left_behind(recorded):
    source, record, _ = recorded
    before = sorted(p.name for p in record.parent.iterdir())
    done = subprocess.run([BIN / "olmo-parity", "record", source, record], capture_output=True, text=True)
    assert done.returncode == 2 and "exists already" in done.stderr
    assert sorted(p.name for p in record.parent.iterdir()) == before


def test_bfloat16_logits_are_kept_in_two_bytes(recorded):
    _, record, _ = recorded
    assert np.load(record / "bfloat16" / "0.npy").dtype == np.uint16
    assert np.load(record / "float32" / "0.npy").dtype == np.float32
