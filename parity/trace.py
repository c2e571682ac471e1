"""Which module leaves its envelope first, and which ones are wrong by themselves: the rows of a trace, from parts to a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..convert.mapping import apply_layout, weights
from ..convert.sources import Source
from ..olmo_jax.config import Olmo3Config
from .diagnosis import explain
from .envelopes import FORCED, FREE, Distance, Envelope, bfloat16_envelope, float32_envelope
from .traced_reference import Part
from .weights import kinds_of_difference
from .wrong_formulas import Place

MOST_EXPLAINED = 40  # modules; each costs a few forward passes of one module


@dataclass(frozen=True)
class Row:
    """One module. carried: its error in a free run, with all that came before; own: with the reference's own inputs."""

    name: str
    layer: int | None
    weights: tuple[str, ...]  # HF names
    carried: Envelope
    own: Envelope | None  # None where its inputs could not be put in
    because: tuple[str, ...] = ()

    @property
    def faulty(self) -> bool:
        """Wrong by itself; where that could not be asked, wrong at all."""
        return (self.own or self.carried).left


def trace_parts(
    parts: Iterable[Part],
    candidate,
    source: Source,
    dtype: str = "float32",
    explained: bool = True,
) -> list[Row]:
    """A row for every module, in the order of the computation.

    parts: of the reference (traced_reference), whose source is given. candidate: a TracedCandidate, or whatever has its
    compare. Faulty modules are explained where that can be told with certainty: from their weights (weight_kinds), else
    from what they give (diagnosis).
    """
    owners = module_weights(source.config)
    because = _Because(source, candidate) if explained and dtype == "float32" else lambda *_: ()
    rows: list[Row] = []
    head: _Slices | None = None
    for part in parts:
        own_errors = candidate.compare(part)
        if part.columns is not None:  # the head comes in slices of the vocabulary, and is one module
            here = _Slices(part, *own_errors)
            head = here if head is None else head.wider(here)
            continue
        rows += _rows(part, *own_errors, dtype, owners, because)
    if head:
        rows += _rows(head.part, head.free, head.forced, {}, dtype, owners, because)
    return rows


def _rows(part: Part, free, forced, given, dtype: str, owners: dict, because: Callable) -> list[Row]:
    """Of one part. Modules that the candidate does not name have none."""
    found: list[Row] = []
    layer = int(part.name.split(".")[1]) if part.name.startswith("layers.") else None
    for name in part.outputs[0]:
        if name not in free:
            continue
        carried, own = _envelope(free[name], part.free[name], FREE, dtype), None
        if name in forced:
            own = _envelope(forced[name], part.forced[name], FORCED, dtype)
        full = f"{part.name}.{name}" if name else part.name
        row = Row(full, layer, owners.get(full, ()), carried, own)
        if row.faulty:
            row = replace(row, because=tuple(because(row, part, name or part.name, given.get(name))))
        found.append(row)
    return found


class _Because:
    """Explains faulty modules, the first of them only: each costs a few forward passes of one module."""

    def __init__(self, source: Source, candidate):
        self.source, self.candidate, self.left = source, candidate, MOST_EXPLAINED
        self.weights = {w.hf: w for w in weights(source.config)}

    def __call__(self, row: Row, part: Part, name: str, found: list | None) -> list[str]:
        self.left -= 1
        if self.left < 0 or row.own is None:
            return []
        said = [f"{hf} {kind}" for hf in row.weights for kind in self._of_weight(hf)]
        if said or found is None:
            return said
        return explain(Place(self.source.config, row.layer, name, self.candidate.sequences, part, found, row.own.limit))

    def _of_weight(self, hf: str) -> list[str]:
        weight = self.weights[hf]
        try:
            found = apply_layout(weight.layout, np.asarray(self.candidate.reader.read(weight.jax)))
        except KeyError:  # the candidate has no such leaf, which was said when it was opened
            return []
        return kinds_of_difference(self.source, hf, found)


def _envelope(found: Distance, noise: Distance, rule, dtype: str) -> Envelope:
    return bfloat16_envelope(found, noise) if dtype == "bfloat16" else float32_envelope(found, noise, rule)


@dataclass(frozen=True)
class _Slices:
    part: Part
    free: dict[str, Distance]
    forced: dict[str, Distance]
    given: dict

    def wider(self, other: _Slices) -> _Slices:
        def both(a: dict, b: dict) -> dict:
            return {name: a[name].wider(b[name]) for name in a}

        part = replace(
            self.part, free=both(self.part.free, other.part.free), forced=both(self.part.forced, other.part.forced)
        )
        return _Slices(part, both(self.free, other.free), both(self.forced, other.forced), {})


def module_weights(config: Olmo3Config) -> dict[str, tuple[str, ...]]:
    """HF weight names by module."""
    found = {w.jax.rpartition("/")[0].replace("/", "."): (w.hf,) for w in weights(config)}
    return found if "lm_head" in found else {**found, "lm_head": found["embed_tokens"]}


def first_divergence(rows: list[Row]) -> str | None:
    """The first module that is wrong by itself; else the first whose carried error leaves its envelope."""
    own = next((r.name for r in rows if r.own and r.own.left), None)
    return own or next((r.name for r in rows if r.carried.left), None)


def record_of(rows: list[Row], dtype: str, sequences: list[str]) -> dict:
    """The rows as JSON values; `error` and `limit` are those with the reference's own inputs, where they could be put in."""
    modules = []
    for row in rows:
        judged = row.own or row.carried
        modules.append(
            {
                "name": row.name,
                "layer": row.layer,
                "weights": list(row.weights),
                **asdict(judged),
                "left": judged.left,
                "carried": {**asdict(row.carried), "left": row.carried.left},
                "inputs": "the reference's" if row.own else "its own",
                "because": list(row.because),
            }
        )
    return {
        "dtype": dtype,
        "sequences": sequences,
        "first_divergence": first_divergence(rows),
        "faulty": [row.name for row in rows if row.faulty],
        "modules": modules,
    }
