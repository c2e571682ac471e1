"""preflight: everything that should be true before a launch, stage by stage, one record."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ..convert.manifest import MANIFEST
from ..convert.sources import open_source
from ..olmo_jax.errors import BadInput
from . import gate, identity, sides
from .import_check import check_imports
from .legs import main_dtype
from .preflight_options import STAGES, Preflight
from .recorded import is_record
from .report import advice as gate_advice
from .report import where as gate_where
from .stage import BAD_INPUT, judged, not_run

SCHEMA = "olmo-parity/preflight/1"
Say = Callable[[str], None]
# What runs a stage: function(options, say) -> a record of stage.py. Modules are imported when their stage's turn comes.
RUNS = {
    "weights": ("preflight", "run_weights"),
    "logits":  ("preflight", "run_logits"),
    "step0":   ("step0", "run_step0"),
    "restore": ("mesh_restore", "run_restore"),
    "loader":  ("loader", "run_stage"),
    "heldout": ("heldout", "run_stage"),
}  # fmt: skip
# The worst first: a stage that failed says more than one that could not be read.
EXIT_CODES = {"fail": gate.FAIL, BAD_INPUT: gate.BAD_INPUT, "inconclusive": gate.INCONCLUSIVE}


def run_preflight(options: Preflight, say: Say = lambda _: None) -> dict:
    """Run the stages in order and return the record of all of them.

    A stage that fails, or whose input cannot be used, is the last one unless options.keep_going; those after it say so.
    Raises BadInput before the first one where there is no candidate, or a function that was named cannot be imported.
    """
    started = time.monotonic()
    wanted = options.only or tuple(STAGES)
    if options.candidate is None and not options.gate.candidate_fn:
        raise BadInput(
            "--candidate is wanted, as an option or in a parity.toml here or above (olmo-parity preflight -h)"
        )
    check_imports({option: spec for name, (option, spec) in options.functions().items() if name in wanted})
    stages, stopped = [], ""
    for name in wanted:
        if stopped:
            stages.append(not_run(name, f"{stopped} did not pass, and --keep-going was not given"))
            continue
        say(f"stage {name}: {STAGES[name]}")
        begun = time.monotonic()
        try:
            stages.append(_function(name)(options, say))
        except BadInput as error:
            stages.append(not_run(name, str(error), BAD_INPUT, time.monotonic() - begun))
        if stages[-1]["verdict"] in ("fail", BAD_INPUT) and not options.keep_going:
            stopped = name
    reference, candidate = _judged_sides(options, stages)
    verdict, exit_code, sentence = verdict_of(stages, options.strict)
    file = options.settings.file
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict,
        "exit_code": exit_code,
        "decided_by": sentence,
        "only": list(options.only),
        "strict": options.strict,
        "keep_going": options.keep_going,
        "not_run": not_run_of(stages),
        "stages": stages,
        "reference": reference,
        "candidate": candidate,
        "settings_file": str(file) if file else None,
        "settings_sha256": identity.file_hash(file) if file else None,
        "versions": identity.versions(),
        "code_sha256": identity.code_hash(),
        "seconds": round(time.monotonic() - started, 2),
    }


def verdict_of(stages: list[dict], strict: bool) -> tuple[str, int, str]:
    """(verdict, exit code, what decided) of the stages' records. What was not run is said, and with strict it decides."""
    for verdict, code in EXIT_CODES.items():
        found = [s for s in stages if s["verdict"] == verdict]
        if found:
            more = f"; {', '.join(s['stage'] for s in found[1:])} too" if found[1:] else ""
            return verdict, code, f"{found[0]['stage']}: {found[0]['decided_by'].splitlines()[0]}{more}"
    ran = [s["stage"] for s in stages if s["verdict"] == "pass"]
    left = "; ".join(not_run_of(stages))
    if not ran:
        return "inconclusive", gate.INCONCLUSIVE, f"nothing was run. {left}"
    if strict and left:
        return (
            "inconclusive",
            gate.INCONCLUSIVE,
            f"nothing failed, but not everything was run (--strict). Not run: {left}",
        )
    return "pass", gate.PASS, f"{', '.join(ran)} passed" + (f". Not run: {left}" if left else "")


def not_run_of(stages: list[dict]) -> list[str]:
    """A sentence for every stage, and every part of one, that was not run."""
    return [f"{s['stage']} ({why})" for s in stages for why in s["not_run"]]


def run_weights(options: Preflight, say: Say) -> dict:
    """Every bit of the tree against the checkpoint it was made from, or against its own manifest."""
    from ..convert.verify import verify, verify_manifest

    name, started = "weights", time.monotonic()
    if options.candidate is None:
        return not_run(name, "no --candidate was given beside --candidate-fn")
    if options.gate.weights_may_differ:
        return not_run(name, "weights_may_differ is set: other weights are expected")
    try:
        candidate = open_source(options.candidate, options.gate.allow_unknown_keys)
    except BadInput as error:
        if not options.gate.candidate_fn:
            raise
        return not_run(name, f"only the candidate function can read {options.candidate}: {error.headline}")
    source = options.source
    if source is None and options.reference is not None and not is_record(options.reference):
        source = options.reference
    if source is not None:
        say(f"reading {source} and {options.candidate}")
        keys = options.gate.allow_unknown_keys
        done = verify(source, options.candidate, allow_unknown_keys=keys, dtype=main_dtype(candidate), quiet=True)
    elif (candidate.path / MANIFEST).is_file():
        say(f"reading {options.candidate}")
        done = verify_manifest(options.candidate, quiet=True)
    else:
        return not_run(name, f"no source is named, and {candidate.path} has no {MANIFEST}")
    against = "its manifest" if done.source is None else str(done.source)
    wrong = gate.count_criterion(f"differences from {against}", name, len(done.differences), "differences")
    return judged(
        name,
        started,
        [wrong],
        passed=f"{done.tensors} tensors, {done.bytes} bytes, equal bit for bit to {against}",
        where=done.differences,
        advice=["convert again, or find who changed source or tree"],
        against=against,
        notes=list(done.notes),
    )


def run_logits(options: Preflight, say: Say) -> dict:
    """The gate: both legs, against the live reference or a record of it."""
    from .run import run_gate

    name, started = "logits", time.monotonic()
    if options.reference is None:
        return not_run(name, "no reference is named")
    record = run_gate(options.reference, options.candidate, options.gate, say)
    return {
        "stage": name,
        "verdict": record["verdict"],
        "decided_by": record["decided_by"],
        "criteria": record["criteria"],
        "open_questions": record["open_questions"],
        "not_run": [],
        "where": gate_where(record),
        "advice": gate_advice(record),
        "seconds": round(time.monotonic() - started, 2),
        "report": record,
    }


def _function(name: str) -> Callable[[Preflight, Say], dict]:
    module, function = RUNS[name]
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)


def _judged_sides(options: Preflight, stages: list[dict]) -> tuple[dict | None, dict | None]:
    """Reference and candidate as the gate's record has them, hashes included; read here where the gate did not run.

    None for a side that is not there, or cannot be read.
    """
    for s in stages:
        if "report" in s:
            return s["report"]["reference"], s["report"]["candidate"]
    if any(s["verdict"] == BAD_INPUT for s in stages):
        return None, None
    return tuple(_side(path, options) for path in (options.reference, options.candidate))


def _side(path: Path | None, options: Preflight) -> dict | None:
    from .recorded import open_record

    if path is None:
        return None
    if is_record(path):
        return open_record(path).side
    try:
        return sides.describe(open_source(path, options.gate.allow_unknown_keys))
    except BadInput:
        return None  # the candidate function alone can read it
