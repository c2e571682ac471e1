"""Which checkpoints are compared: pairs that are named, or two folders of checkpoints whose steps match."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..convert import places
from ..convert.hub import hub_id
from ..convert.orbax_io import is_tree
from ..convert.sources import CONFIG
from ..olmo_jax.errors import BadInput
from .recorded import is_record


class Pair(NamedTuple):
    """A checkpoint and its twin."""

    step: str  # as a report names it: the step's number, or the reference's name
    reference: Path | str  # Hugging Face folder, record, or hub id
    candidate: Path  # Orbax tree


def pairs_of(
    named: Iterable[tuple[Path | str, Path]], reference: Path | str | None, candidate: Path | None
) -> tuple[list[Pair], list[str]]:
    """The pairs, in the order of their steps, and a sentence for each checkpoint that has no twin.

    named: pairs as given; where there are none, reference and candidate are one pair, or two folders of checkpoints.
    Raises BadInput where nothing can be paired, or one step could be several checkpoints.
    """
    named = list(named)
    if named:
        return _in_order(Pair(_name(reference), reference, candidate) for reference, candidate in named), []
    if reference is None or candidate is None:
        raise BadInput("no checkpoints are named: --pair REFERENCE=CANDIDATE, or --reference and --candidate")
    if hub_id(reference) is not None or _is_reference(places.place(reference)):
        return [Pair(_name(reference), reference, candidate)], []
    ours = _by_step(places.place(reference), _is_reference, "--reference", "Hugging Face folders or records")
    theirs = _by_step(places.place(candidate), is_tree, "--candidate", "Orbax trees")
    both = [Pair(str(step), ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())]
    if not both:
        raise BadInput(
            f"no step of {reference} ({_listed(ours)}) is one of {candidate} ({_listed(theirs)}): name them with --pair"
        )
    alone = [(reference, step) for step in sorted(ours.keys() - theirs.keys())]
    alone += [(candidate, step) for step in sorted(theirs.keys() - ours.keys())]
    return both, [f"step {step} is in {folder} alone, and was not compared" for folder, step in alone]


def split_pair(text: str) -> tuple[str, str]:
    """REFERENCE=CANDIDATE of the command line."""
    reference, equals, candidate = text.partition("=")
    if not (reference and equals and candidate):
        raise BadInput(f"--pair {text}: REFERENCE=CANDIDATE is wanted, a Hugging Face folder and an Orbax tree")
    return reference, candidate


def step_of(name: str) -> int | None:
    """1000 of step1000, stage1-step1000-tokens5B, hf-step-1000 and 1000; None where a name tells no step."""
    found = re.findall(r"step[-_]?(\d+)", name, re.IGNORECASE)
    return int(found[-1]) if found else int(name) if name.isdecimal() else None


def _is_reference(path: Path) -> bool:
    return is_record(path) or ((path / CONFIG).is_file() and not is_tree(path))


def _by_step(folder: Path, wanted, option: str, what: str) -> dict[int, Path]:
    """The checkpoints in a folder by their step."""
    if not folder.is_dir():
        raise BadInput(f"{option} {folder} is not a folder")
    found: dict[int, Path] = {}
    faults = []
    for child in sorted(folder.iterdir()):
        step = step_of(child.name)
        if step is None or not child.is_dir() or not wanted(child):
            continue
        if step in found:
            faults.append(f"step {step} could be {found[step].name} or {child.name}")
        found[step] = child
    if faults:
        raise BadInput(
            f"{option} {folder} has several checkpoints of one step: name the right ones with --pair", faults
        )
    if not found:
        raise BadInput(
            f"{option} {folder} is neither a checkpoint nor a folder of {what} named by their steps (step1000, 1000)"
        )
    return found


def _in_order(pairs: Iterable[Pair]) -> list[Pair]:
    pairs = sorted(pairs, key=lambda p: (not p.step.isdecimal(), int(p.step) if p.step.isdecimal() else 0))
    names = [p.step for p in pairs]
    # Two checkpoints of one step (of two dtypes, of two runs) are told apart by their folders.
    return [p._replace(step=f"{p.step} {p.reference}") if names.count(p.step) > 1 else p for p in pairs]


def _name(reference: Path | str) -> str:
    name = Path(reference).name
    step = step_of(name)
    return name if step is None else str(step)


def _listed(steps: dict) -> str:
    return ", ".join(map(str, sorted(steps)[:8])) + (", ..." if len(steps) > 8 else "")
