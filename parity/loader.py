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
from . import gate, stage
from .loader_coverage import Coverage, Identity, batches_that_differ, choose_identity, coverage, steps_that_differ
from .loader_criteria import OTHER_PROCESSES, coverage_criteria, other_processes, repetition_criteria
from .loader_kinds import kinds, seed_changes_nothing
from .loader_simulation import LoaderOptions, Streams, repeat, run_child, simulate
from .loader_streams import Stream

STAGE = "data loader"
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
    return judge(streams, again, options, started) | {"function": spec}


def check_loader(function: Callable, options: LoaderOptions | None = None) -> dict:
    """As run_loader, for a function of this process: nothing ends it where it hangs."""
    options = _checked(options or LoaderOptions())
    started = time.monotonic()
    return judge(simulate(function, options), repeat(function, options), options, started)


def console(record: dict) -> str:
    """The record as text."""
    lines = [f"{k['kind']}: {k['sentence']}" for k in record["kinds"]]
    lines += [f"not shown: {text}" for text in record["open_questions"]]
    for what, labels in record["coverage"]["examples"].items():
        if labels:
            lines.append(f"{what}, for instance: {', '.join(labels)}")
    return stage.console(record, lines + [f"note: {text}" for text in record["notes"]])


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
    verdict = gate.judge(criteria, unclear, records)
    sentence = verdict.sentence
    if verdict.exit_code == gate.PASS:
        sentence = (
            f"{records:,} records, {covered.compared} of {options.processes} processes: together they see what a single "
            "process sees" + (", by token counts" if by_tokens else "")
        )
    elif verdict.exit_code == gate.FAIL and (faults := [k for k in named if k["kind"] not in HARMLESS]):
        sentence = "; ".join(f"{k['kind']}: {k['sentence']}" for k in faults[:2])
    return stage.record(
        STAGE, verdict, sentence, criteria, started,
        kinds=named,
        open_questions=unclear,
        notes=_notes(streams, identity, covered, by_tokens, differing),
        options=asdict(options),
        identity=asdict(identity) | {"told_by": streams.facts["told_by"]},
        coverage=_readable(streams, covered),
        processes=_rows(streams, identity, covered),
        single_process={"records": len(streams.found["single",].ids), "ended": streams.found["single",].ended},
        order={"steps": differing["compared steps"], "steps_that_differ": differing["steps"]},
        restart={k: streams.facts[k] for k in ("resume_at", "other_processes_from", "records_a_step") if k in streams.facts},
    )  # fmt: skip


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


def _readable(streams: Streams, covered: Coverage) -> dict:
    examples = {what: [streams.labels[k] for k in keys] for what, keys in covered.examples.items()}
    return {**asdict(replace(covered, examples=examples)), "shared": sum(covered.shared)}


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
