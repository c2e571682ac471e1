"""Does the trace name the module where a fault was planted? The trace's own rows, of the parts that a mutant changes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from ...convert.mapping import apply_layout, weights
from ...convert.sources import Source
from ..batches import Sequence
from ..trace import first_divergence, trace_parts
from ..traced_candidate import TracedCandidate
from ..traced_reference import reference_parts
from .candidate import Candidate
from .kinds import BENIGN
from .planting import Planted, Row, module_of


class Tracer:
    """The reference's parts in the dtype of a right candidate, kept in memory with what every module gives.

    round_to: the dtype that a float32 reference's weights are rounded to.
    """

    def __init__(self, reference: Source, sequences: list[Sequence], round_to: str | None, right: Candidate):
        self.reference, self.sequences, self.right, self.dtype = reference, sequences, right, right.dtype.name
        self.parts = list(reference_parts(reference, sequences, dtype=self.dtype, round_to=round_to))
        self.layer_steps = {f"{part.name}.{name}" for part in self.parts for name in part.outputs[0] if name}

    def trace(self, planted: Planted) -> dict | None:
        """What the trace says with the reference's values put in, of the first and the last part that were changed.

        first: the first faulty module, or None; right: is it one where the fault was planted, or none where nothing is wrong.
        None where no module was changed, and for right variants that go round the modules they are made of.
        """
        benign = planted.mutant.entry.kind == BENIGN
        changed = [name for name in self.right.order if name in parts_of(planted.places)]
        if not changed or (benign and not planted.places <= self.layer_steps):
            return None
        rows = []
        for name in dict.fromkeys((changed[0], changed[-1])):
            candidate = self._candidate(planted)
            candidate.x = (
                []
                if name == self.right.order[0]
                else [x[:, : row[0].shape[1]] for x, row in zip(self.right.given[name], candidate.rows, strict=True)]
            )
            own = [part for part in self.parts if part.name == name]
            rows += trace_parts(own, candidate, self.reference, self.dtype, explained=False)
        first = first_divergence([row for row in rows if row.own and row.own.left])
        return {
            "first": first,
            "faulty": [row.name for row in rows if row.own and row.own.left],
            "right": first is None if benign else any(_within(first or "", place) for place in planted.places),
        }

    def _candidate(self, planted: Planted) -> TracedCandidate:
        config = self.right.config
        leaves = Leaves(config, {**self.right.tensors, **planted.tensors})
        right_code = not planted.calls
        candidate = TracedCandidate(leaves, config, self.sequences, self.dtype, planted.calls, compiled=right_code)
        if planted.change_inputs:
            rows = [Row(*r, s.window, len(s.tokens)) for r, s in zip(candidate.rows, self.sequences, strict=True)]

            def change_inputs(layer, index, inputs):
                return planted.change_inputs(layer, inputs, rows[index]) if layer in planted.input_layers else inputs

            candidate.change_inputs = change_inputs
        return candidate


class Leaves:
    """Weights in memory, read as a TreeReader reads them from disk."""

    def __init__(self, config, tensors: Mapping[str, np.ndarray]):
        self.arrays = {w.jax: apply_layout(w.layout, tensors[module_of(w.hf)]) for w in weights(config)}
        self.leaves = {path: SimpleNamespace(nbytes=a.nbytes, chunk_shape=a.shape) for path, a in self.arrays.items()}

    def read(self, path: str, index: tuple = ()) -> np.ndarray:
        return self.arrays[path][index] if index else self.arrays[path]


def parts_of(places) -> set[str]:
    return {".".join(place.split(".")[:2]) for place in places}


def _within(name: str, place: str) -> bool:
    """Is the module the place itself, or a part of it (a whole layer, its attention)?"""
    return name == place or name.startswith(place + ".")
