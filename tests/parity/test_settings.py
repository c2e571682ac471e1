"""parity.toml: where it is found, what it may hold, and that the command line wins."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import settings
from olmo_parity.parity.options import GateOptions

BIN = Path(sys.executable).parent
BOTH = 'reference = "hf"\ncandidate = "orbax/0"\n'


def write(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.toml").write_text(text)
    return folder / "parity.toml"


def choose(file, **given):
    return settings.choose(given, settings.load(file, False))


def test_the_nearest_file_at_or_above_the_working_directory_is_taken(tmp_path, monkeypatch):
    outer, inner = write(tmp_path, BOTH), write(tmp_path / "a" / "b", BOTH)
    (tmp_path / "a" / "b" / "c").mkdir()
    for folder, wanted in (("a/b/c", inner), ("a/b", inner), ("a", outer), (".", outer)):
        monkeypatch.chdir(tmp_path / folder)
        assert settings.load(None, False).file == wanted


def test_no_config_reads_none_and_config_reads_the_named_one(tmp_path, monkeypatch):
    write(tmp_path, "nonsense = 1")
    other = tmp_path / "other.toml"
    other.write_text(BOTH)
    monkeypatch.chdir(tmp_path)
    assert settings.load(None, True) == settings.Settings(None, {})
    assert settings.load(Path("other.toml"), False).file == other
    with pytest.raises(BadInput, match="exclude each other"):
        settings.load(other, True)
    with pytest.raises(BadInput, match="none.toml"):
        settings.load(tmp_path / "none.toml", False)


def test_relative_paths_are_relative_to_the_file_and_addresses_stay(tmp_path, monkeypatch):
    file = write(
        tmp_path / "project", 'reference = "gs://bucket/hf"\ncandidate = "orbax/0"\nbatch = "/p.jsonl"\njson = "r.json"'
    )
    monkeypatch.chdir(tmp_path)
    found = choose(file)
    assert found.reference == "gs://bucket/hf"
    assert found.candidate == tmp_path / "project" / "orbax/0"
    assert found.options.batch == Path("/p.jsonl")
    assert found.reports["json"] == tmp_path / "project" / "r.json"


def test_every_kind_of_value_arrives(tmp_path):
    file = write(
        tmp_path,
        BOTH + 'only_batch = true\nmax_tokens = 64\nprofile = "strict"\naccept_uncovered = ["window"]\n'
        'weights_may_differ = true\nallow_unknown_key = ["x"]\n[limits]\nfloat32-delta = 1e-4\n[preflight]\nloader = 1\n',
    )
    options = choose(file).options
    assert options.only_batch and options.max_tokens == 64 and options.profile == "strict"
    assert options.accept_uncovered == ("window",) and options.weights_may_differ
    assert options.allow_unknown_keys == ("x",) and options.limits == {"float32-delta": 1e-4}
    assert options.settings_file == file


def test_the_command_line_wins_over_the_file(tmp_path):
    file = write(
        tmp_path, BOTH + "only_batch = true\nmax_tokens = 64\n[limits]\nfloat32-delta = 1e-4\nfloat32-kl = 1e-9\n"
    )
    found = choose(file, candidate=Path("mine"), max_tokens=8, only_batch=False, limit=["float32-kl=0.5"])
    assert found.candidate == Path("mine") and found.reference == tmp_path / "hf"
    assert found.options.max_tokens == 8 and found.options.only_batch is False
    assert found.options.limits == {"float32-delta": 1e-4, "float32-kl": 0.5}


@pytest.mark.parametrize(
    "text, words",
    [
        ("refrence = 'x'", ["unknown key 'refrence': was 'reference' meant?"]),
        ("max-tokens = 4", ["unknown key 'max-tokens': was 'max_tokens' meant?"]),
        ("[preflihgt]\nx = 1", ["unknown key 'preflihgt': was 'preflight' meant?"]),
        ("preflight = 3", ["preflight is 3, a table is wanted"]),
        ("a = 1\nb = 2\nmax_tokens = 0", ["'a'", "'b'", "max_tokens is 0"]),
        ("max_tokens = true", ["max_tokens is True"]),
        ("max_tokens = 1.5", ["max_tokens is 1.5"]),
        ("only_batch = 'yes'", ["true or false is wanted"]),
        ("reference = ''", ["reference is ''"]),
        ("accept_uncovered = 'window'", ["a list of text is wanted"]),
        ("[limits]\nfloat32-kl = nan", ["limits is"]),
        ("[limits]\nfloat32-kl = inf", ["limits is"]),
        ("[limits]\nfloat32-kl = true", ["limits is"]),
        ("reference = ", ["is not TOML"]),
    ],
)
def test_what_is_not_known_or_of_a_wrong_kind_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(BadInput) as caught:
        settings.load(write(tmp_path, text), False)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"profile": "strickt"}, "unknown profile 'strickt': was 'strict' meant?"),
        ({"limit": ["float32-dleta=1"]}, "unknown limit 'float32-dleta': was 'float32-delta' meant?"),
        ({"limit": ["float32-kl=nan"]}, "NAME=VALUE is wanted"),
        ({"limit": ["float32-kl"]}, "NAME=VALUE is wanted"),
        ({"limit": ["float32-kl=-1"]}, "NAME=VALUE is wanted"),
    ],
)
def test_profiles_and_limits_that_do_not_exist_are_refused(tmp_path, given, words):
    with pytest.raises(BadInput) as caught:
        choose(write(tmp_path, BOTH), **given)
    assert words in str(caught.value)


def test_what_is_lacking_is_named_with_the_file_that_lacks_it(tmp_path):
    with pytest.raises(BadInput, match=r"--candidate is wanted.*parity\.toml"):
        choose(write(tmp_path, 'reference = "hf"'))


def test_every_option_of_the_gate_can_stand_in_the_file():
    spelled = {"allow_unknown_keys": "allow_unknown_key"}
    elsewhere = {"settings_file", "recalibrate"}  # the first is the file itself, the second is a thing to do once
    options = {spelled.get(f.name, f.name) for f in dataclasses.fields(GateOptions)} - elsewhere
    assert options <= set(settings.KEYS), f"add a row to settings.KEYS: {options - set(settings.KEYS)}"


def test_every_key_is_an_option_of_the_command_line():
    shown = subprocess.run([BIN / "olmo-parity", "--help"], capture_output=True, text=True, check=True).stdout
    for key in settings.KEYS:
        option = "--limit" if key == "limits" else "--" + key.replace("_", "-")
        assert option in shown, option


def test_the_example_is_accepted():
    found = settings.load(Path(__file__).parents[2] / "examples" / "launch" / "parity.toml", False)
    assert set(found.values) == {"reference", "candidate", "batch", "profile"}


def test_the_command_reads_the_file_and_refuses_it_by_name(tmp_path):
    def run(*arguments):
        return subprocess.run([BIN / "olmo-parity", *arguments], capture_output=True, text=True, cwd=tmp_path)

    assert "Usage" in run().stderr and run().returncode == 2
    write(tmp_path, 'refrence = "x"')
    done = run()
    assert done.returncode == 2 and "was 'reference' meant?" in done.stderr
    assert "--candidate" in run("--no-config", "--reference", "x").stderr
    write(tmp_path, BOTH)
    done = run("--max-tokens", "4")
    assert done.returncode == 2 and f"{tmp_path / 'hf'}" in done.stderr and "does not exist" in done.stderr
    done = run("--no-config", "check-report", "a", "b")
    assert done.returncode == 2 and "--no-config belongs to the gate" in done.stderr
