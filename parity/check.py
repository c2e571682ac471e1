"""check-report: was this report a pass, for the very bytes that are about to be used?

What it protects against: a tree that was changed, exchanged or damaged after the gate ran, the report of another tree or
of another version of this code, an old one, one that is no pass, and one in which a verdict or a criterion was changed
by hand without the rest. What it does not: a report is not signed, so whoever edits value and limit together, or writes
a whole report, or changes this code, gets an exit code of 0; a tree changed between this check and its use (put the
check right before the launch); the tokenizer and the data, which are not part of what the gate compares.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..convert import manifest
from ..convert.orbax_io import is_tree, resolve_tree
from ..convert.places import place
from ..convert.sources import CONFIG, open_source, tree_config
from ..olmo_jax.errors import BadInput
from . import identity
from .preflight import SCHEMA as PREFLIGHT
from .preflight import not_run_of, verdict_of
from .preflight_options import STAGES
from .report import uncovered
from .run import SCHEMA

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}
LEGS = ("config", "weights", "float32", "bfloat16")  # without these a report shows nothing
DECIDING = (  # no option turns these off
    ("config", "config fields that differ"),
    ("float32", "finite logits"),
    ("float32", "max |delta logit| / spread"),
    ("float32", "max KL"),
    ("bfloat16", "finite logits"),
    ("bfloat16", "mean KL"),
)
CLOCKS = timedelta(minutes=5)  # two machines' clocks may differ by so much
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class Answer:
    exit_code: int  # 0 yes, 1 no
    sentence: str


class _No(Exception):
    """The report does not hold, and why."""


def check_report(report: Path, target: Path | str, max_age: str | None = None) -> Answer:
    """Does a report of the gate, or of preflight, hold for this checkpoint, now, with this code?

    All of the checkpoint's data is read and hashed; its manifest.json is not believed. Raises BadInput where the report
    or the checkpoint cannot be read.
    """
    target = place(target)
    age = None if max_age is None else parse_age(max_age)
    whole = record = _read(report)
    try:
        if whole["schema"] == PREFLIGHT:
            record = _check_preflight(whole, report)
            _check_age(whole, report, age)
        _check_schema(record, report)
        _check_judged(record, report)
        _check_pass(record, report)
        _check_age(record, report, age)
        _check_code(record, report)
        _check_target(record, report, target)
        _check_settings(record)
    except _No as no:
        return Answer(1, f"NO  {no}")
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # edited by hand, or made by something else
        raise BadInput(f"{report} is not a whole report: {error!r}") from None
    side = record["candidate"]
    notes = _qualifications(record)
    if whole is not record and whole["not_run"]:
        notes.insert(0, f"not run: {'; '.join(whole['not_run'])}")
    more = "".join(f"\n  note: {text}" for text in notes)
    return Answer(
        0,
        f"YES  {report} is a pass of {record['created']} for {target} (weights {side['weights_sha256'][:12]}), judged "
        f"against {record['reference']['path']} by the {record['profile']} profile{more}",
    )


def _check_preflight(whole: dict, report: Path) -> dict:
    """The gate's own record inside that of a preflight, which is judged like any other; the rest is judged here."""
    if whole["only"]:
        raise _No(f"{report} is of {', '.join(whole['only'])} alone (--only): run all of preflight")
    stages = {s["stage"]: s for s in whole["stages"]}
    faults = [f"there is no stage {name}" for name in STAGES if name not in stages]
    faults += [f"{s['stage']}: {fault}" for s in whole["stages"] for fault in _stage_faults(s)]
    verdict = verdict_of(whole["stages"], whole["strict"])
    if (whole["verdict"], whole["exit_code"]) != verdict[:2]:
        faults.append(f"the verdict is {whole['verdict']!r}, its stages make it {verdict[0]!r}")
    if whole["not_run"] != not_run_of(whole["stages"]):
        faults.append("what was not run is not what its stages say")
    if faults:
        raise _No(f"{report} contradicts itself and was not left as preflight wrote it: {'; '.join(faults)}")
    if whole["verdict"] != "pass":
        raise _No(f"{report} is no pass: {whole['verdict'].upper()}, {whole['decided_by']}")
    if "report" not in stages["logits"]:
        raise _No(f"{report} holds no comparison of logits ({stages['logits']['decided_by']}): it shows too little")
    for s in whole["stages"]:
        function = s.get("function") or {}
        if function.get("sha256") and identity.file_hash(Path(function["file"])) != function["sha256"]:
            raise _No(
                f"{report} judged {function['name']}, and {function['file']} was changed since: run preflight again"
            )
    inner = stages["logits"]["report"]
    for key in ("candidate", "reference", "settings_sha256", "code_sha256"):
        if whole[key] != inner.get(key):
            raise _No(f"{report} contradicts itself: its {key} is not that of its stage logits")
    return inner


def _stage_faults(stage: dict) -> list[str]:
    """What in a stage's record does not follow from the rest of it."""
    failed = [c for c in stage["criteria"] if c["on"] and not float(c["value"]) <= float(c["limit"])]
    faults = [
        f"{c['name']} is said to have {'passed' if c['passed'] else 'failed'} with {c['value']} against {c['limit']}"
        for c in stage["criteria"]
        if (float(c["value"]) <= float(c["limit"])) is not c["passed"]
    ]
    if stage["verdict"] == "pass" and (failed or stage["open_questions"] or not stage["criteria"]):
        faults.append("it is said to pass, and a criterion failed, something was left open, or nothing was judged")
    if stage["verdict"] == "not run" and not stage["not_run"]:
        faults.append("it was not run, and not listed so")
    return faults


def _check_settings(record: dict) -> None:
    """A parity.toml that was changed since may name another reference or other limits. One that is gone says nothing."""
    file = Path(record["settings_file"]) if record.get("settings_file") else None
    if file and file.is_file() and identity.file_hash(file) != record.get("settings_sha256"):
        raise _No(f"{file} was changed since: reference, profile or limits may be others. Run the gate again")


def parse_age(text: str) -> timedelta:
    """24h, 90m, 7d, 30s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not found:
        raise BadInput(f"--max-age {text!r}: a number and s, m, h or d is wanted, 24h for instance")
    try:
        return timedelta(**{UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise BadInput(f"--max-age {text!r} is too long") from None


def inconsistencies(record: dict) -> list[str]:
    """What in a report does not follow from the rest of it, judged again from its criteria. Empty where all agree."""
    faults, failed = [], False
    for c in record["criteria"]:
        passed = float(c["value"]) <= float(c["limit"])
        if passed is not c["passed"]:
            word = "passed" if c["passed"] else "failed"
            faults.append(f"{c['leg']} {c['name']} is said to have {word} with {c['value']} against {c['limit']}")
        failed |= c["on"] and not passed
    lacking = [leg for leg in LEGS if not any(c["leg"] == leg for c in record["criteria"])]
    lacking += [
        leg for leg in LEGS if leg not in ("weights", *lacking) and not any(c["leg"] == leg and c["on"] for c in record["criteria"])
    ]  # fmt: skip
    faults += [f"no criterion of the {leg} leg was judged" for leg in lacking]
    judged = {(c["leg"], c["name"]) for c in record["criteria"] if c["on"] is True}
    faults += [
        f"{leg} {name} was not judged" for leg, name in DECIDING if leg not in lacking and (leg, name) not in judged
    ]
    if sum(s["tokens"] for s in record["sequences"]) <= 0:
        faults.append("no tokens were compared")
    open_questions = [c["what"] for c in uncovered(record)] + record["open_questions"]
    if EXIT_CODES.get(record["verdict"]) != record["exit_code"]:
        faults.append(f"the verdict {record['verdict']!r} does not go with exit code {record['exit_code']}")
    if record["verdict"] == "pass" and failed:
        faults.append("the verdict is pass, and a criterion failed")
    if record["verdict"] == "pass" and open_questions:
        faults.append(f"the verdict is pass, and this was left open: {'; '.join(open_questions)}")
    return faults


def _read(report: Path) -> dict:
    try:
        record = json.loads(Path(report).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{report}: {error.strerror}. Did the gate run, with --json?") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{report} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("schema"), str):
        raise BadInput(f"{report} is not a report of olmo-parity: it has no schema")
    return record


def _check_schema(record: dict, report: Path) -> None:
    if record["schema"] != SCHEMA:
        raise _No(f"{report} is of the schema {record['schema']!r}, this version reads {SCHEMA!r}")


def _check_judged(record: dict, report: Path) -> None:
    try:
        side = record["candidate"]
        if side["weights_sha256"] is None or side["config_sha256"] is None:
            raise _No(
                f"{report} judged {side['path']} by a function alone, its weights unread: give the gate a --candidate that it can read"
            )
        if record.get("overrides"):
            raise _No(
                f"{report} judged a model with a changed config ({', '.join(record['overrides'])}), not the files'"
            )
        function = side.get("function")
        if function and identity.file_hash(Path(side["function_file"])) != side["function_sha256"]:
            raise _No(f"{report} judged {function}, and {side['function_file']} was changed since: run the gate again")
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{report} does not say what it judged: {error!r}") from None


def _check_pass(record: dict, report: Path) -> None:
    try:
        faults = inconsistencies(record)
        verdict, why = str(record["verdict"]), record["decided_by"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{report} is not a whole report: {error!r}") from None
    if faults:
        raise _No(f"{report} contradicts itself and was not left as the gate wrote it: {'; '.join(faults)}")
    if verdict != "pass":
        raise _No(f"{report} is no pass: {verdict.upper()}, {why}")


def _check_age(record: dict, report: Path, limit: timedelta | None) -> None:
    try:
        created = datetime.fromisoformat(record["created"])
        age = datetime.now(UTC) - created
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{report} has no time at which it was made: {error!r}") from None
    if age < -CLOCKS:
        raise _No(f"{report} was made at {record['created']}, which is yet to come: is a clock wrong?")
    if limit is not None and age > limit:
        raise _No(f"{report} was made at {record['created']}, more than {limit} ago: run the gate again")


def _check_code(record: dict, report: Path) -> None:
    try:
        version, code = record["versions"]["olmo-parity"], record["code_sha256"]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{report} does not say which code made it: {error!r}") from None
    here, here_code = identity.versions()["olmo-parity"], identity.code_hash()
    if (version, code) != (here, here_code):
        raise _No(
            f"{report} was made by olmo-parity {version} (code {code[:12]}), this is {here} (code {here_code[:12]}): "
            "run the gate again"
        )


def _check_target(record: dict, report: Path, target: Path) -> None:
    side = record["candidate"]
    found, config = _config_of(target)
    if found != side.get("form"):
        raise _No(f"{report} judged a checkpoint of the {side.get('form')} form, {target} is of the {found} form")
    if identity.file_hash(config) != side["config_sha256"]:
        raise _No(f"{config} is not the one that was judged: it was changed, or this is another checkpoint")
    # The gate let these keys through: the file is the same, byte for byte.
    keys = tuple(json.loads(config.read_text(encoding="utf-8")))
    source = open_source(target, allow_unknown_keys=keys)
    hashes = identity.tensor_hashes(source)
    if identity.combined_hash(hashes) != side["weights_sha256"]:
        raise _No(f"the weights in {target} are not those that were judged{_changed(source, hashes)}")


def _config_of(target: Path) -> tuple[str, Path]:
    """The form of a checkpoint and where its config lies, found without reading it."""
    if not target.is_dir():
        raise BadInput(f"{target} is not a folder: a checkpoint is wanted")
    if (target / CONFIG).is_file() and not is_tree(target):
        return "hf", target / CONFIG
    return "orbax", tree_config(resolve_tree(target).step)


def _changed(source, hashes: dict) -> str:
    """Which tensors changed since the conversion, where a manifest lies beside them that still says what they were."""
    try:
        then = {t["target_path"]: t["target_sha256"] for t in manifest.read_manifest(source.path)["tensors"]}
    except (BadInput, KeyError, TypeError):
        return ""
    changed = [name for name in hashes if then.get(name) != hashes[name][2]]
    if not changed:
        return ": they are as their manifest.json says, so this is another conversion than the one that was judged"
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f": changed since their conversion: {', '.join(sorted(changed)[:3])}{more}"


def _qualifications(record: dict) -> list[str]:
    """What a reader of a pass should know about it."""
    off = [f"{c['leg']} {c['name']}" for c in record["criteria"] if not c["on"]]
    by_hand = [f"{c['leg']} {c['name']}" for c in record["criteria"] if c.get("set_by_hand")]
    notes = [f"off in that run: {', '.join(off)}"] if off else []
    notes += [f"limits set by hand: {', '.join(by_hand)}"] if by_hand else []
    open_ends = [c["what"] for c in record["coverage"] if not c["covered"]]
    notes += [f"not covered, and accepted: {', '.join(open_ends)}"] if open_ends else []
    if record["candidate"].get("function"):
        notes.append(f"the model judged was that of {record['candidate']['function']}")
    here = identity.versions()
    for name in ("jax", "jaxlib", "flax"):
        if record["versions"].get(name) != here[name]:
            notes.append(f"{name} was {record['versions'].get(name)} in that run, here it is {here[name]}")
    return notes
