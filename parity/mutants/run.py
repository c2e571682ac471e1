"""`olmo-parity mutants` from end to end: a checkpoint in, which planted faults the gate catches out."""

from __future__ import annotations

import difflib
import fnmatch
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from ...convert.sources import Source, open_source
from ...olmo_jax.errors import BadInput
from .. import batches, devices, gate, identity, settings, sides
from ..children import run_children
from ..legs import Legs
from ..reference import require_torch
from .catalogue import CONTROL, ENTRIES, GRADED, MUTANTS
from .judge import FIELD_RULES
from .kinds import BENIGN, FUNCTION, WEIGHTS

SCHEMA = "olmo-parity/mutants/1"
DECISIVE = (FUNCTION, WEIGHTS)  # kinds that the gate must catch; precision is reported


def run_mutants(
    reference: Path,
    candidate: Path | None = None,
    *,
    only: tuple[str, ...] = (),
    profile: str = "default",
    limits: dict[str, float] | None = None,
    allow_unknown_keys: tuple[str, ...] = (),
    traced: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """Plant every mutant (or those whose names fit `only`) in a right candidate and judge each as the gate judges.

    candidate: an Orbax tree; without it the reference's own weights are converted in memory. Returns the record that
    tables are made from. Raises BadInput where nothing could be judged.
    """
    started = time.monotonic()
    settings.check_limits(profile, limits or {})
    chosen, graded = choose(only)
    require_torch()
    ref = open_source(reference, allow_unknown_keys)
    cand = open_source(candidate, allow_unknown_keys) if candidate else ref
    _check(reference, ref, candidate, cand)
    sequences = batches.built_in(ref.config)
    folder = Path(tempfile.mkdtemp(prefix="olmo-parity-"))
    try:
        say("hashing the reference")
        side = sides.describe(ref)
        place = devices.Placement()
        legs = Legs(ref, cand, sequences, folder, identity.versions(), False, False, place, allow_unknown_keys, say,
                    side["weights_sha256"])  # fmt: skip
        noise, rounded = legs.float32_references(), legs.bfloat16_references()
        request = {
            "reference": str(reference),
            "candidate": str(candidate or reference),
            "logits": str(folder),
            "rounded": rounded,
            "traced": traced,
            "noise": noise,
            "sequences": [s.to_json() for s in sequences],
            "profile": profile,
            "limits": limits or {},
            "allow_unknown_keys": list(allow_unknown_keys),
            "device": None,
            "mesh": None,
            "processes": 1,
        }
        mutants, graded = _run_all(request, chosen, graded, side["bytes"], folder, place, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    exit_code, sentence = verdict(mutants, gate.noise_faults(noise, gate.PROFILES[profile]))
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": exit_code,
        "decided_by": sentence,
        "reference": side,
        "candidate": str(candidate) if candidate else "the reference's weights, converted in memory",
        "profile": profile,
        "limits": limits or {},
        "only": list(only),
        "field_rules": {name: {"what": what, "limit": limit} for name, (what, limit) in FIELD_RULES.items()},
        "mutants": mutants,
        "graded": graded,
        "versions": identity.versions(),
        "code_sha256": identity.code_hash(),
        "seconds": round(time.monotonic() - started, 2),
    }


CHILD, PROGRESS = f"{__package__}.child", "progress.txt"
ALONE = 32  # mutants; fewer are not worth another child's start
SHARED_BYTES = 1 << 28  # of weights; larger ones are held once
MOST_CHILDREN = 4


def choose(only: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Names of mutants and of graded faults that fit any of the patterns; all without patterns. The control is always there.

    A pattern fits a whole name ('window-minus-one@first'), a name without its place, or a family ('rotary').
    """
    if not only:
        return {m.name for m in MUTANTS}, {g.name for g in GRADED}
    mutants, graded = {CONTROL.name}, set()
    for pattern in only:
        fits = {
            m.name
            for m in MUTANTS
            if any(fnmatch.fnmatchcase(n, pattern) for n in (m.name, m.entry.name, m.entry.family))
        }
        sizes = {g.name for g in GRADED if fnmatch.fnmatchcase(g.name, pattern)}
        if pattern == "graded":
            sizes = {g.name for g in GRADED}
        if not fits and not sizes:
            known = sorted(
                {m.entry.name for m in MUTANTS} | {m.entry.family for m in MUTANTS} | {g.name for g in GRADED}
            )
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0)[0]
            raise BadInput(f"--only {pattern}: no mutant has that name. Was {near!r} meant?")
        mutants |= fits
        graded |= sizes
    return mutants, graded


def verdict(mutants: list[dict], noise_faults: list[str]) -> tuple[int, str]:
    """Exit code and what decided it: 1 where a fault that must be caught survives or a right variant is killed."""
    killed = [m["name"] for m in mutants if m["kind"] == BENIGN and m["status"] == "killed"]
    survived = [m["name"] for m in mutants if m["kind"] in DECISIVE and m["status"] == "survived"]
    if killed:
        return gate.FAIL, f"{len(killed)} right variants were killed: {', '.join(killed)}"
    if survived:
        return gate.FAIL, f"{len(survived)} mutants survived: {', '.join(survived)}"
    if noise_faults:
        return gate.INCONCLUSIVE, f"the reference's noise allows no verdict: {'; '.join(noise_faults)}"
    count = sum(m["status"] == "killed" for m in mutants if m["kind"] in DECISIVE)
    if not count and any(m["kind"] in DECISIVE for m in mutants):
        return gate.INCONCLUSIVE, "none of these mutants can show on this checkpoint: nothing was proven"
    hidden = sum(m["status"] == "invisible" for m in mutants if m["kind"] in DECISIVE)
    right = sum(m["kind"] == BENIGN for m in mutants)
    return gate.PASS, f"{count} mutants killed, {hidden} cannot show on this checkpoint, {right} right variants pass"


def _check(reference: Path, ref: Source, candidate: Path | None, cand: Source) -> None:
    faults = []
    if ref.kind != "hf":
        faults.append(f"--reference {reference} is of the {ref.kind} form; a Hugging Face folder is wanted")
    if candidate and cand.kind != "orbax":
        faults.append(f"--candidate {candidate} is of the {cand.kind} form; an Orbax tree is wanted")
    differing = sides.config_differences(ref, cand)
    faults += [f"{name} is {a!r} in the reference, {b!r} in the candidate" for name, a, b in differing]
    if faults:
        raise BadInput("mutants need a pair that the gate passes as it is", faults)


def _run_all(
    request: dict, chosen: set[str], graded: set[str], size: int, folder: Path, place: devices.Placement, say
) -> tuple[list[dict], list[dict]]:
    """Results of all mutants and graded faults, in the order of the catalogue, from as many children as there are cores.

    Each child holds the weights by itself; places of one fault are one child's, which compiles it once.
    """
    few = len(chosen) + len(graded) < ALONE or size > SHARED_BYTES
    children = 1 if few else min(os.cpu_count() or 1, MOST_CHILDREN)
    said = _Progress(say, len(chosen))

    def one(number: int) -> dict:
        entries = {e.name for e in ENTRIES[number::children]}
        own = {
            "mutants": [m.name for m in MUTANTS if m.name in chosen and m.entry.name in entries],
            "graded": [g.name for g in GRADED[number::children] if g.name in graded],
        }
        into = folder / f"mutants-{number}"
        into.mkdir()
        # Casts are judged, so they must stand: as in the gate's own bfloat16 leg.
        return run_children(CHILD, into, request | own, place.environment(exact_casts=True), "the run of the mutants",
                            meanwhile=lambda: said.look(into))  # fmt: skip

    with ThreadPoolExecutor(children) as pool:
        answers = list(pool.map(one, range(children)))
    found = [{m["name"]: m for a in answers for m in a[what]} for what in ("mutants", "graded")]
    return [found[0][m.name] for m in MUTANTS if m.name in chosen], [
        found[1][g.name] for g in GRADED if g.name in graded
    ]


class _Progress:
    """Passes on which mutants the children are at."""

    def __init__(self, say: Callable[[str], None], count: int):
        self.say, self.count, self.seen, self.done = say, count, {}, 0

    def look(self, folder: Path) -> None:
        """Called again and again while the child of this folder runs."""
        try:
            names = (folder / PROGRESS).read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for name in names[self.seen.get(folder, 0) :]:
            known = name in {m.name for m in MUTANTS}
            self.done += known
            self.say(f"{self.done} of {self.count}: {name}" if known else name)
        self.seen[folder] = len(names)
