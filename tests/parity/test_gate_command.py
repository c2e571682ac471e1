"""olmo-parity as its user runs it: exit codes, sentences, the record."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import find_fixture

CHECKPOINT = "tiny-trained/hf-bfloat16-step900"
BIN = Path(sys.executable).parent


def run(*arguments, **more):
    done = subprocess.run(
        [str(a) for a in (BIN / "olmo-parity", *arguments)], capture_output=True, text=True, timeout=300, **more
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    subprocess.run(
        [BIN / "olmo-convert", "hf2orbax", find_fixture(CHECKPOINT), folder], check=True, capture_output=True
    )
    return folder


@pytest.fixture
def needs_torch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def test_a_right_conversion_passes_and_the_record_says_of_what(tree, tmp_path, needs_torch):
    (tmp_path / "prompts.jsonl").write_text(
        '{"id": "a", "text": "def f(x):"}\n{"id": "b", "tokens": [1, 2, 3, 4, 5]}\n'
    )
    report = tmp_path / "report.json"
    reference = find_fixture(CHECKPOINT)
    done = run(
        "--batch", tmp_path / "prompts.jsonl", "--max-tokens", 4,
        "--reference", reference, "--candidate", tree, "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PASS")
    record = json.loads(report.read_text())
    assert record["verdict"] == "pass" and record["exit_code"] == 0
    assert [s["id"] for s in record["sequences"]] == [
        "built-in-512",
        "built-in-512-window-64",
        "built-in-packed",
        "a",
        "b",
    ]
    assert [s["cut_from"] for s in record["sequences"]] == [None, None, None, 9, 5]
    assert "a was cut from 9 to 4 tokens" in done.stdout
    for leg in ("float32", "bfloat16"):
        assert record["legs"][leg]["statistics"]["tokens"] == 512 + 512 + 4 + 4
    assert "--xla_allow_excess_precision=false" in record["legs"]["bfloat16"]["candidate"]["xla_flags"]
    assert record["versions"]["transformers"] and record["versions"]["jax"]


def test_a_planted_fault_of_function_fails_and_says_where(tree, tmp_path, needs_torch):
    damaged = tmp_path / "0"
    shutil.copytree(tree, damaged)
    config = json.loads((damaged / "olmo_config.json").read_text())
    config["sliding_window"] -= 1
    (damaged / "olmo_config.json").write_text(json.dumps(config))
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate", damaged, "--json", tmp_path / "r.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("FAIL")
    assert "sliding_window is 16 in the reference, 15 in the candidate" in done.stdout
    failed = {c["leg"] for c in json.loads((tmp_path / "r.json").read_text())["criteria"] if not c["passed"]}
    assert {"config", "float32"} <= failed and "weights" not in failed
    assert "trace: layers.0.self_attn.mix is the first module outside its envelope" in done.stdout
    assert "certain: layers.{0-2,4-6}.self_attn.mix has a window of 15, the config says 16" in done.stdout


def test_another_steps_weights_fail_and_are_named(tmp_path, needs_torch):
    other, script = tmp_path / "other", Path(__file__).parents[2] / "demo" / "swap_gate_up.py"
    subprocess.run([sys.executable, script, find_fixture(CHECKPOINT), other, "2"], check=True)
    subprocess.run([BIN / "olmo-convert", "hf2orbax", other, tmp_path / "tree"], check=True, capture_output=True)
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate", tmp_path / "tree", "--no-trace")
    assert done.returncode == 1
    assert "model.layers.2.mlp.gate_proj.weight differs" in done.stdout
    assert "; it holds model.layers.2.mlp.up_proj.weight" in done.stdout and "trace:" not in done.stdout
    assert "float32: largest |delta| at" in done.stdout


def test_short_prompts_alone_are_inconclusive_unless_accepted(tree, tmp_path, needs_torch):
    (tmp_path / "short.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    common = ["--only-batch", "--batch", tmp_path / "short.jsonl", "--reference", find_fixture(CHECKPOINT)]
    done = run(*common, "--candidate", tree)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "not covered: window" in done.stdout
    missing = ("window", "packed", "high_token_ids", "special_tokens", "bfloat16_interval")
    accepted = [word for what in missing for word in ("--accept-uncovered", what)]
    done = run(*common, "--candidate", tree, *accepted)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Usage"),
        (["--reference", "x"], "--candidate"),
        (["--reference", "x", "trase"], "No such command"),
        (["--reference", "x", "trace"], "belongs to the gate and would not reach trace"),
        (["--no-such-option"], "No such option"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--only-batch", "false"], ""),
    ],
)
def test_bad_usage_is_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stdout + done.stderr


def test_paths_that_are_not_there_are_sentences(tree, tmp_path, needs_torch):
    for reference, candidate, words in (
        (tmp_path / "none", tree, "does not exist"),
        (find_fixture(CHECKPOINT), tmp_path / "none", "does not exist"),
        (tree, tree, "a Hugging Face folder or a record"),
        (find_fixture(CHECKPOINT), find_fixture(CHECKPOINT), "an Orbax tree is wanted"),
        (find_fixture("tiny-gqa/hf-bfloat16"), tree, "vocabularies differ: 500"),
    ):
        done = run("--reference", reference, "--candidate", candidate)
        assert done.returncode == 2, done.stdout + done.stderr
        assert words in done.stderr


def test_a_report_that_could_not_be_written_is_refused_before_the_work(tree, tmp_path, needs_torch):
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate", tree, "--json", tmp_path / "none" / "r.json")
    assert done.returncode == 2 and "--json" in done.stderr


def test_nothing_compared_is_an_error(tree, needs_torch):
    done = run("--only-batch", "--reference", find_fixture(CHECKPOINT), "--candidate", tree)
    assert done.returncode == 2 and "nothing would be compared" in done.stderr


@pytest.mark.parametrize("command", ["parity", "convert"])
def test_help_imports_neither_torch_nor_jax(command):
    code = (
        "import sys, olmo_parity.cli as c\n"
        f"try: c.{command}_app(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'jax', 'flax', 'orbax', 'transformers', 'numpy', 'tensorstore'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_torch_a_sentence_says_what_to_install(tree):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['olmo-parity', '--reference', {str(find_fixture(CHECKPOINT))!r}, '--candidate', {str(tree)!r}]\n"
        "from olmo_parity.cli import parity_main\n"
        "parity_main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'olmo-parity[torch]'" in done.stderr


def test_an_unknown_name_in_accept_uncovered_is_refused_before_the_work(tree):
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate", tree, "--accept-uncovered", "windows")
    assert done.returncode == 2 and "there is no such thing; known are attention" in done.stderr
    assert "comparing" not in done.stderr


def test_a_torch_that_does_not_import_is_a_sentence(tree, tmp_path, needs_torch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run("--reference", find_fixture(CHECKPOINT), "--candidate", tree, env=env)
    assert done.returncode == 2 and "does not import: OSError: libtorch_cpu.so" in done.stderr


def test_two_sides_that_agree_on_yarn_in_every_layer_fail_together(tmp_path, needs_torch):
    wrong = tmp_path / "wrong"
    shutil.copytree(find_fixture("tiny-yarn/hf-float32"), wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["rope_parameters"]["sliding_attention"] = config["rope_parameters"]["full_attention"]
    (wrong / "config.json").write_text(json.dumps(config))
    convert = [BIN / "olmo-convert", "hf2orbax", wrong, tmp_path / "tree"]
    assert "keeps plain rotary there" in subprocess.run(convert, check=True, capture_output=True, text=True).stdout
    done = run("--reference", wrong, "--candidate", tmp_path / "tree", "--json", tmp_path / "r.json")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [c["name"] for c in json.loads((tmp_path / "r.json").read_text())["criteria"] if not c["passed"]]
    assert failed == ["layer types with scaling that must not have it"]
