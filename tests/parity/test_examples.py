"""The examples run: training starts after a pass and a check, and after nothing else; the workflow's own steps work."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import DATA

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "launch"


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def run(arguments, folder, path, **variables):
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"} | variables
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def stand_in(tmp_path):
    """stand_in(gate, check, ...): an olmo-parity that answers with these exit codes, check by check, and notes its calls."""

    def make(gate, *checks):
        for i, code in enumerate(checks):
            (tmp_path / f"check{i}").write_text(str(code))
        script(
            tmp_path / "bin" / "olmo-parity",
            f"""#!/usr/bin/env bash
echo "$@" >> {tmp_path}/calls
if [ "$1" = check-report ]; then
    i=$(grep -c check-report {tmp_path}/calls)
    exit $(cat {tmp_path}/check$((i - 1)))
fi
touch "${{@: -1}}"
exit {gate}
""",
        )
        return tmp_path / "bin"

    return make


def launch(tmp_path, path):
    """Exit code, whether training started, and the calls of olmo-parity in order."""
    done = run([EXAMPLES / "launch.sh", "orbax/0", "touch", "trained"], tmp_path, path)
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    return done.returncode, (tmp_path / "trained").exists(), ["gate" if c == "--candidate" else "check" for c in calls]


def test_training_starts_after_a_pass_that_the_check_confirms(tmp_path, stand_in):
    assert launch(tmp_path, stand_in(0, 0)) == (0, True, ["gate", "check"])


@pytest.mark.parametrize("code", [1, 2, 3])
def test_no_training_where_the_gate_does_not_pass(tmp_path, stand_in, code):
    assert launch(tmp_path, stand_in(code, 0)) == (code, False, ["gate"])


@pytest.mark.parametrize("code", [1, 2])
def test_no_training_where_the_check_says_no(tmp_path, stand_in, code):
    assert launch(tmp_path, stand_in(0, code)) == (code, False, ["gate", "check"])


def test_a_report_that_still_holds_saves_the_gate_and_one_that_does_not_is_made_again(tmp_path, stand_in):
    (tmp_path / "parity-report.json").touch()
    assert launch(tmp_path, stand_in(0, 0)) == (0, True, ["check"])
    (tmp_path / "trained").unlink()
    (tmp_path / "calls").unlink()
    assert launch(tmp_path, stand_in(0, 1, 0)) == (0, True, ["check", "gate", "check"])
    (tmp_path / "trained").unlink()
    (tmp_path / "calls").unlink()
    assert launch(tmp_path, stand_in(1, 1, 0)) == (1, False, ["check", "gate"])


def test_no_training_where_olmo_parity_is_not_installed(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [EXAMPLES / "launch.sh", "orbax/0", "touch", "trained"],
        cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 127 and not (tmp_path / "trained").exists()


def test_the_launch_script_without_a_command_says_its_usage(tmp_path):
    done = run([EXAMPLES / "launch.sh", "orbax/0"], tmp_path, tmp_path)
    assert done.returncode == 2 and "usage:" in done.stderr


def shell_steps(file="github-actions.yml", job="parity", event="pull_request"):
    workflow = yaml.safe_load((EXAMPLES / file).read_text())
    steps = workflow["jobs"][job]["steps"]
    assert workflow[True] == [event]  # YAML reads the key `on` as true
    return [step for step in steps if "run" in step]


def as_github(tmp_path, path):
    """The steps of the launch workflow as GitHub runs them: none after one that failed, but those that always run."""
    script(tmp_path / "launch.sh", "#!/bin/sh\ntouch trained\n")
    code = 0
    for step in shell_steps("github-launch.yml", "launch", "workflow_dispatch"):
        if step["name"] != "Install" and (code == 0 or step.get("if") == "always()"):
            variables = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
            code = run(["bash", "-e", "-c", step["run"]], tmp_path, path, **variables).returncode or code
    return code


def as_slurm(tmp_path, path):
    script(tmp_path / "bin" / "srun", '#!/bin/sh\nexec "$@"\n')
    return run([EXAMPLES / "slurm.sh", "orbax/0", "touch", "trained"], tmp_path, path).returncode


def as_kubernetes(tmp_path, path):
    """The containers of the job as Kubernetes starts them: none after an init container that failed."""
    script(tmp_path / "bin" / "python", "#!/bin/sh\ntouch trained\n")
    pod = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    for container in [*pod["initContainers"], *pod["containers"]]:
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        code = run([*container["command"], *container["args"]], tmp_path, path, **variables).returncode
        if code:
            return code
    return 0


LAUNCHERS = [as_slurm, as_kubernetes, as_github]


def launched(launcher, tmp_path, path):
    """Exit code, whether training started, and the calls of olmo-parity in order."""
    code = launcher(tmp_path, path)
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    return code, (tmp_path / "trained").exists(), calls


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_behind_a_scheduler_training_starts_after_a_preflight_that_the_check_confirms(launcher, tmp_path, stand_in):
    assert launched(launcher, tmp_path, stand_in(0, 0)) == (0, True, ["preflight", "check-report"])


@pytest.mark.parametrize("code", [1, 2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_behind_a_scheduler_no_training_starts_where_preflight_does_not_pass(launcher, code, tmp_path, stand_in):
    assert launched(launcher, tmp_path, stand_in(code, 0)) == (code, False, ["preflight"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_behind_a_scheduler_no_training_starts_where_the_check_says_no(launcher, tmp_path, stand_in):
    assert launched(launcher, tmp_path, stand_in(0, 1)) == (1, False, ["preflight", "check-report"])


def test_a_requeued_job_uses_a_report_that_still_holds(tmp_path, stand_in):
    (tmp_path / "preflight-report.json").touch()
    assert launched(as_slurm, tmp_path, stand_in(1, 0)) == (0, True, ["check-report"])


def test_the_slurm_script_without_a_command_says_its_usage(tmp_path):
    done = run([EXAMPLES / "slurm.sh", "orbax/0"], tmp_path, tmp_path)
    assert done.returncode == 2 and "usage:" in done.stderr


def installed(folder):
    """A copy of the package as it is now, with its two commands: an edit during the test must not change the code hash."""
    for part in ("olmo_jax", "convert", "parity"):
        shutil.copytree(ROOT / part, folder / "olmo_parity" / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "cli.py", folder / "olmo_parity" / "cli.py")
    for command, main in (("olmo-parity", "parity_main"), ("olmo-convert", "convert_main")):
        code = f"from olmo_parity.cli import {main}; {main}()"
        script(
            folder / "bin" / command,
            f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -c "{code}" "$@"\n',
        )
    return folder / "bin"


def test_the_workflow_passes_on_a_right_conversion_and_the_launch_script_takes_its_report(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path, project = installed(tmp_path / "site"), tmp_path / "project"
    shutil.copytree(DATA / "tiny-trained" / "hf-bfloat16-step900", project / "checkpoints" / "hf")
    shutil.copy(EXAMPLES / "parity.toml", project)
    shutil.copy(ROOT / "demo" / "prompts.jsonl", project)
    summary = tmp_path / "step-summary.md"
    steps = shell_steps()
    assert [s["name"] for s in steps] == ["Install", "Convert", "Gate", "Summary", "These very bytes"]
    assert "olmo-parity[torch,html]" in steps[0]["run"]
    for step in steps[1:]:
        done = run(["bash", "-e", "-c", step["run"]], project, path, GITHUB_STEP_SUMMARY=str(summary))
        assert done.returncode == 0, step["name"] + done.stdout + done.stderr
    assert "PASS" in summary.read_text()
    report = json.loads((project / "parity" / "report.json").read_text())
    assert report["verdict"] == "pass" and report["settings_file"] == str(project / "parity.toml")
    assert sorted(p.name for p in (project / "parity").iterdir()) == [
        "junit.xml", "report.html", "report.json", "summary.md",
    ]  # fmt: skip
    check_schema(report)

    settings = {"PARITY_REPORT": "parity/report.json"}
    done = run([EXAMPLES / "launch.sh", "checkpoints/orbax/0", "touch", "trained"], project, path, **settings)
    assert done.returncode == 0 and (project / "trained").exists()
    (project / "trained").unlink()
    config = project / "checkpoints" / "orbax" / "0" / "olmo_config.json"
    config.write_text(config.read_text().replace('"sliding_window": 16', '"sliding_window": 15'))
    (project / "parity.toml").write_text('reference = "none"\n')  # the gate that follows the no ends soon
    done = run([EXAMPLES / "launch.sh", "checkpoints/orbax/0", "touch", "trained"], project, path, **settings)
    assert done.returncode == 2 and not (project / "trained").exists()
    assert "olmo_config.json is not the one that was judged" in done.stdout


def check_schema(report):
    """Against docs/report.schema.json: a key that is new in the record must be documented there."""
    import jsonschema

    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(report)
