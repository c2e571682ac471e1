"""The child process of `olmo-parity mutants`: JAX stays up, mutant after mutant is planted, run and judged."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from .. import gate, padded
from ..batches import Sequence
from ..children import serve
from ..devices import start_jax
from ..legs import narrower
from .catalogue import GRADED, MUTANTS
from .judge import Judge, status_of, why_small
from .kinds import LEGS, PRECISION, Graded, Mutant
from .planting import CannotPlant, Planted, Row, module_tensors, plant, rows_of, why_invisible
from .run import PROGRESS


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    start_jax(request, index, address)  # before anything else of JAX
    from ...convert.sources import open_source

    unknown = tuple(request["allow_unknown_keys"])
    reference, candidate = (open_source(Path(request[side]), unknown) for side in ("reference", "candidate"))
    sequences = [Sequence.from_json(s) for s in request["sequences"]]
    judge = Judge(
        reference,
        candidate,
        sequences,
        Path(request["logits"]),
        request["rounded"],
        request["noise"],
        gate.PROFILES[request["profile"]],
        request["limits"],
    )

    def say(what: str) -> None:
        with open(folder / PROGRESS, "a", encoding="utf-8") as stream:
            stream.write(what + "\n")

    run = Run(judge, say, traced=request["traced"])
    return {
        "mutants": [run.mutant(m) for m in MUTANTS if m.name in request["mutants"]],
        "graded": [run.graded(g) for g in GRADED if g.name in request["graded"]],
    }


class Run:
    """Both dtypes of the right candidate, kept while mutants come and go."""

    def __init__(self, judge: Judge, say: Callable[[str], None] = lambda _: None, traced: bool = True):
        self.judge, self._say, self.config, self.traced = judge, say, judge.candidate.config, traced
        self.tensors, self.rows = module_tensors(judge.candidate), rows_of(judge.sequences)
        self.tracers: dict = {}
        self._say("the right candidate")

    @functools.cached_property
    def float32(self):
        return self._candidate("float32", self.rows)

    @functools.cached_property
    def bfloat16(self):
        return self._candidate("bfloat16", self.rows)

    @functools.cached_property
    def padded(self):
        """In float32, on the rows of padded.py."""
        plain = padded.row_of(self.judge.sequences)
        length = min(padded.TOKENS, len(plain.tokens))
        alone = Row(plain.tokens[None, :length], plain.positions()[None, :length], None, None, length)
        batched = Row(*padded.batch_of(plain), None, length, index=1)
        return self._candidate("float32", [alone, batched], self.float32.parts)

    def _candidate(self, dtype: str, rows: list[Row], parts=None):
        from .candidate import Candidate  # imports JAX

        return Candidate(self.config, self.tensors, dtype, rows, parts)

    def mutant(self, mutant: Mutant) -> dict:
        """One line of the result: what was planted, the verdict, and why."""
        started = time.monotonic()
        self._say(mutant.name)
        entry = mutant.entry
        found = {
            "name": mutant.name,
            "family": entry.family,
            "kind": entry.kind,
            "known": entry.known,
            "leg": LEGS[entry.kind],
            "layers": list(mutant.layers(self.config)),
        }
        try:
            planted = plant(mutant, self.config, self.tensors)
        except CannotPlant as error:
            return found | {"status": "invisible", "reason": str(error), "planted": False}
        why = why_invisible(planted, self.config, self.tensors)
        small = None
        if entry.root:
            eps, squares = self.config.rms_norm_eps, self.float32.smallest_squares
            small = why_small(planted, eps, squares, self.judge.delta_limit)
        criteria = self.judge.files(planted) + self.float32_criteria(planted)
        logits = self.bfloat16.logits(planted)
        criteria += self.judge.bfloat16(logits)
        status = status_of(entry.kind, criteria, why, small)
        return found | {
            "status": status,
            "reason": small if status == "too small" else why,
            "planted": True,
            "places": sorted(planted.places),
            "failed": [c.record() for c in criteria if c.on and not c.passed],
            "float32": {c.name: {"value": c.value, "limit": c.limit} for c in criteria if c.leg == "float32"},
            "bfloat16": {c.name: {"value": c.value, "limit": c.limit} for c in criteria if c.leg == "bfloat16"},
            "field": self.judge.field(logits),
            "trace": self.tracer(entry.kind).trace(planted) if self.traced else None,
            "seconds": round(time.monotonic() - started, 2),
        }

    def tracer(self, kind: str):
        """Casts of a bfloat16 model are traced in bfloat16, all else in float32."""
        from .traced import Tracer

        right = self.bfloat16 if kind == PRECISION else self.float32
        if right.dtype not in self.tracers:
            round_to = narrower(self.judge.reference, self.judge.candidate) if right is self.float32 else None
            self.tracers[right.dtype] = Tracer(self.judge.reference, self.judge.sequences, round_to, right)
        return self.tracers[right.dtype]

    def float32_criteria(self, planted: Planted) -> list[gate.Criterion]:
        """Of the float32 leg. Padded rows are run where nothing else has failed: they could not save a mutant."""
        criteria = self.judge.float32(self.float32.logits(planted))
        if all(c.passed for c in criteria if c.on):
            criteria += self.judge.padded(*self.padded.logits(planted))
        return criteria

    def graded(self, graded: Graded) -> dict:
        """The sizes of one fault, largest first, until the float32 leg lets one through."""
        found = {"name": graded.name, "unit": graded.unit, "sizes": [], "reason": None}
        for size in graded.sizes:
            mutant = graded.mutant(size)
            self._say(mutant.name)
            try:
                planted = plant(mutant, self.config, self.tensors)
            except CannotPlant as error:
                return found | {"reason": str(error)}
            if not planted.places:
                break  # too small to change a bit
            criteria = self.float32_criteria(planted)
            killed = any(c.on and not c.passed for c in criteria)
            found["sizes"].append(
                {"size": size, "killed": killed, "value": criteria[1].value, "limit": criteria[1].limit}
            )
            if not killed:
                break
        return found


if __name__ == "__main__":
    serve(_run)
