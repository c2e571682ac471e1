"""What a stage of preflight returns: its verdict, what decided it, and what of it was not run."""

from __future__ import annotations

import time

from . import gate
from .gate import Criterion

NOT_RUN, BAD_INPUT = "not run", "bad input"  # verdicts beside those of gate.VERDICTS


def judged(
    stage: str,
    started: float,
    criteria: list[Criterion],
    *,
    open_questions: list[str] | tuple = (),
    parts_not_run: list[str] | tuple = (),
    passed: str | None = None,
    where: list[str] | tuple = (),
    advice: list[str] | tuple = (),
    **more,
) -> dict:
    """The record of a stage that ran.

    started: time.monotonic() at its start. open_questions: why it is inconclusive where nothing failed. parts_not_run: a
    sentence for each part that could not be run with what was given. passed: what decided a pass, where that says more than
    which criterion is closest to its limit. where, advice: lines for a reader of a failure. more: the stage's own numbers.
    """
    verdict = gate.judge(criteria, list(open_questions), 1)
    sentence = passed if passed and verdict.exit_code == gate.PASS else verdict.sentence
    return {
        "stage": stage,
        "verdict": verdict.name,
        "decided_by": sentence,
        "criteria": [c.record() for c in criteria],
        "open_questions": list(open_questions),
        "not_run": list(parts_not_run),
        "where": list(where) if verdict.exit_code != gate.PASS else [],
        "advice": list(advice) if verdict.exit_code != gate.PASS else [],
        "seconds": round(time.monotonic() - started, 2),
        **more,
    }


def not_run(stage: str, why: str, verdict: str = NOT_RUN, seconds: float = 0.0) -> dict:
    """The record of a stage that judged nothing, and why."""
    return {
        "stage": stage,
        "verdict": verdict,
        "decided_by": why,
        "criteria": [],
        "open_questions": [],
        "not_run": [why] if verdict == NOT_RUN else [],
        "where": [],
        "advice": [],
        "seconds": round(seconds, 2),
    }


def exit_code(record: dict) -> int:
    """Of a command that ran one stage alone."""
    return next(code for code, name in gate.VERDICTS.items() if name == record["verdict"])
