"""The data loader check: does every record reach exactly one process, once an epoch, and again after a restart?

A published reproduction was misled for weeks by a loader that sharded twice: records repeated, training loss fell below the
reference's, held-out loss did not. The truth here is the single-process run of the same loader.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from . import settings
from .loader_coverage import Coverage, Identity, batches_that_differ, choose_identity, coverage, steps_that_differ
from .loader_criteria import OTHER_PROCESSES, coverage_criteria, other_processes, repetition_criteria
from .loader_kinds import kinds, seed_changes_nothing
from .loader_simulation import LoaderOptions, Streams, repeat, run_child, simulate
from .loader_streams import Stream
from .stage import judged, not_run

STAGE = "loader"
SECTION = "preflight.loader"
KEYS = {  # of that table in parity.toml; kinds as in settings.KEYS
    "function":        settings.TEXT,
    "processes":       settings.COUNT,
    "workers":         settings.WHOLE,
    "steps":           settings.COUNT,
    "seed":            settings.WHOLE,
    "resume_at":       settings.WHOLE,
    "other_processes": settings.COUNT,
    "same_order":      settings.FLAG,
    "patience":        settings.NUMBER,
}  # fmt: skip
HARMLESS = ("shuffled within shards only", "uneven processes")  # kinds that are named and do not decide


def run_loader(spec: str, options: LoaderOptions | None = None, say: Callable[[str], None] = lambda _: None) -> dict:
    """Check package.module:function, a function (process_index, process_count, seed, step) -> iterator of records or batches.

    It runs in two processes, one after the other, and is ended where it hangs. Returns the stage's record; raises BadInput.
    """
    options = _checked(options or LoaderOptions())
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
        say(f"the loader as {options.processes} processes, as one, and after a restart")
        streams = run_child(spec, options, Path(folder) / "first")
        say("the loader again, with the same seed")
        again = run_child(spec, options, Path(folder) / "again", again=True)
    return judge(streams, again, options, started)


def run_stage(options, say: Callable[[str], None]) -> dict:
    """The stage of preflight (options: preflight_options.Preflight): what [preflight.loader] of parity.toml asks for."""
    table = options.settings.section(SECTION, KEYS)
    if not table:
        return not_run(STAGE, f"no [{SECTION}] names a function")
    return run_loader(*chosen({}, table), say)


def chosen(given: dict, table: dict) -> tuple[str, LoaderOptions]:
    """The function and the options, those given over those of [preflight.loader]. Raises BadInput where no function is named."""
    values = table | given
    if "function" not in values:
        raise BadInput(f"no loader is named: olmo-parity loader package.module:function, or function in [{SECTION}]")
    return values.pop("function"), LoaderOptions(**values)


def check_loader(function: Callable, options: LoaderOptions | None = None) -> dict:
    """As run_loader, for a function of this process: nothing ends it where it hangs."""
    options = _checked(options or LoaderOptions())
    started = time.monotonic()
    return judge(simulate(function, options), repeat(function, options), options, started)


def _checked(options: LoaderOptions) -> LoaderOptions:
    faults = []
    if options.processes < 1 or (options.other_processes or 1) < 1:
        faults.append("processes and other processes must be 1 or more")
    if options.steps is not None and options.steps < 2:
        faults.append(f"steps is {options.steps}: a restart lies between two, so 2 or more are wanted")
    if options.workers is not None and options.workers < 0:
        faults.append(f"workers is {options.workers}, 0 or more is wanted")
    if options.resume_at == 0 and options.other_processes:
        faults.append("a restart with other processes is a restart: leave --resume-at 0 out")
    if faults:
        raise BadInput("the loader cannot be checked like that", faults)
    return options


def judge(streams: Streams, again: Streams, options: LoaderOptions, started: float) -> dict:
    """The stage's record from what was simulated."""
    many = streams.all("process")
    records = sum(len(s.ids) for s in many)
    if not records:
        raise BadInput(f"the loader gives no records to any of {options.processes} processes")
    identity = choose_identity(streams)
    covered = coverage(streams, identity, options.workers or 1)
    # Rows that the single-process run does not have: packing, or cropping, makes other ones in every process.
    by_tokens = identity.by == "content" and covered.unexpected > covered.may_exceed
    differing = _differing(streams, again, identity)
    criteria, unclear = coverage_criteria(streams, covered, by_tokens, identity)
    for more, reasons in (
        repetition_criteria(streams, differing, options),
        other_processes(streams, identity, by_tokens, options),
    ):
        criteria, unclear = criteria + more, unclear + reasons
    differing["other processes"] = next((int(c.value) for c in criteria if c.name == OTHER_PROCESSES and c.on), 0)
    named = kinds(streams, identity, covered, by_tokens, differing, options)
    faults = [f"{k['kind']}: {k['sentence']}" for k in named if k["kind"] not in HARMLESS]
    record = judged(
        STAGE,
        started,
        criteria,
        open_questions=unclear,
        passed=f"{records:,} records, {covered.compared} of {options.processes} processes: together they see what a single "
        "process sees" + (", by token counts" if by_tokens else ""),
        where=[f"{k['kind']}: {k['sentence']}" for k in named] + _examples(streams, covered),
        kinds=named,
        notes=_notes(streams, identity, covered, by_tokens, differing),
        options=asdict(options),
        identity=asdict(identity) | {"told_by": streams.facts["told_by"]},
        coverage={k: v for k, v in asdict(covered).items() if k not in ("examples", "shared")},
        processes=_rows(streams, identity, covered),
        single_process={"records": len(streams.found["single",].ids), "ended": streams.found["single",].ended},
        order={"steps": differing["compared steps"], "steps_that_differ": differing["steps"]},
        restart={key: streams.facts.get(key) for key in ("resume_at", "other_processes_from", "records_a_step")},
        function={key: streams.facts.get(key) for key in ("name", "file", "sha256")},
    )
    if record["verdict"] == "fail" and faults:
        record["decided_by"] = "; ".join(faults[:2])
    return record


def _differing(streams: Streams, again: Streams, identity: Identity) -> dict[str, int]:
    """Batches that differ though they should not, by what was compared."""
    at = streams.facts["resume_at"]
    found = dict.fromkeys(("again", "restart", "restored"), 0)
    for (_, p), stream in again.found.items():
        found["again"] += batches_that_differ(streams.found["process", p], _recoded(stream, again, streams), identity)
    for (kind, *rest), stream in streams.found.items():
        if kind in ("restart", "restored"):
            full = streams.found["process", rest[0]]
            found[kind] += batches_that_differ(full.batches(at), stream, identity)
    found["steps"], found["compared steps"] = steps_that_differ(streams, identity)
    return found


def _recoded(stream: Stream, own: Streams, wanted: Streams) -> Stream:
    """A stream with the codes of another run's labels; -2 for what that run has not seen."""
    codes = {label: code for code, label in enumerate(wanted.labels)}
    table = np.array([*(codes.get(label, -2) for label in own.labels), -1], np.int64)  # -1, no id, stays -1
    return replace(stream, ids=table[stream.ids], contents=table[stream.contents])


def _notes(streams: Streams, identity: Identity, covered: Coverage, by_tokens: bool, differing: dict) -> list[str]:
    many, single = streams.all("process"), streams.found["single",]
    found = [identity.note] if identity.note else []
    if by_tokens:
        found.append(
            "no process sees the single-process run's rows (packed?): how often each token comes was compared instead, which "
            "cannot show that one document came twice and another of the same tokens never"
        )
    keys = identity.keys(single)
    if single.ended and (again := len(keys) - len(np.unique(keys))):
        found.append(
            f"{again:,} of the single-process run's {len(keys):,} records come again in it; this is taken to be right"
        )
    if covered.missing and covered.missing <= covered.may_miss:
        found.append(f"{covered.missing} records are dropped as remainders of batches or shards")
    ends = [len(s.sizes) for s in many if s.ended]
    if ends and (len(ends) < len(many) or len(set(ends)) > 1):
        most = max(len(s.sizes) for s in many)
        found.append(
            f"processes end after {min(ends)} to {most} batches: a job that steps together must stop at the first"
        )
    if "state_refused" in streams.facts:
        found.append(
            f"the loader refuses its own saved state, so a restart from one would: {streams.facts['state_refused']}"
        )
    if seed_changes_nothing(streams):
        found.append("another seed gives the same stream: nothing is shuffled, or the seed is not used")
    if differing["steps"] and len(many) > 1:
        found.append(
            f"{differing['steps']} of {differing['compared steps']} steps hold other records than the same steps of the "
            "single-process run: training is not the same at another number of processes"
        )
    return found


def _examples(streams: Streams, covered: Coverage) -> list[str]:
    return [
        f"{what}, for instance: {', '.join(streams.labels[key] for key in keys)}"
        for what, keys in covered.examples.items()
        if keys
    ]


def _rows(streams: Streams, identity: Identity, covered: Coverage) -> list[dict]:
    return [
        {
            "process": p,
            "records": len(s.ids),
            "batches": len(s.sizes),
            "different": len(np.unique(identity.keys(s))),
            "seen_by_others_too": shared,
            "ended": s.ended,
        }
        for p, (s, shared) in enumerate(zip(streams.all("process"), covered.shared, strict=True))
    ]
