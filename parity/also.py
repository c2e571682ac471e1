"""A second reference beside the first: which of three sides is the odd one out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path

from ..convert.mapping import weights
from ..convert.sources import Source, open_source
from ..olmo_jax.errors import BadInput
from . import core_model, footprint, gate
from .batches import Sequence
from .weights import weight_differences

KIND = "core:"
NAME = "OLMo-core"
LEG = "reference"  # of the criteria: they judge the reference, the float32 leg judges the candidate
PAIRS = ("reference_candidate", "reference_also", "candidate_also")
MOST_NAMED = 8  # tensors


@dataclass(frozen=True)
class Also:
    """A step folder of OLMo-core, opened for the float32 leg."""

    source: Source  # with the padding rows of its vocabulary
    config_differences: tuple[tuple[str, object, object], ...]  # (field, reference's value, its own)
    stored: Mapping[str, str]  # the dtype that the reference is stored in, by HF name: the weights are rounded to it

    def run(self, sequences: list[Sequence], round_to: str | None, folder: Path) -> dict:
        """As core_model.run_core, in the weights that the reference's float32 leg runs with."""
        return core_model.run_core(self.source, sequences, stored=self.stored, round_to=round_to, folder=folder)


def folder_of(text: str) -> Path:
    """DIR of core:DIR. Raises BadInput."""
    if not text.startswith(KIND) or not text.removeprefix(KIND):
        raise BadInput(f"--also {text}: {KIND}DIR is wanted, DIR a step folder of OLMo-core")
    return Path(text.removeprefix(KIND))


def open_also(text: str, reference, sequences: Rows[Sequence], allow_unknown_keys: tuple[str, ...] = ()) -> Also:
    """Open core:DIR beside the reference. Raises BadInput where it cannot be a third side:

    not installed, not a step folder, not the same weights, or a whole model does not fit into memory.
    """
    folder = folder_of(text)
    if reference.kind != "hf":
        raise BadInput("--also needs the live reference and its weights: a record holds neither. Name the HF folder")
    core_model.require_core()
    cut = open_source(folder, allow_unknown_keys=allow_unknown_keys)
    if cut.kind != "core":
        raise BadInput(f"--also {text} is of the {cut.kind} form; a step folder of OLMo-core is wanted")
    differing = weight_differences(cut, reference, sides=(NAME, "the reference"))
    if differing:
        sentences = [entry["sentence"] for entry in differing[:MOST_NAMED]]
        if len(differing) > MOST_NAMED:
            sentences.append(f"and {len(differing) - MOST_NAMED} more tensors")
        raise BadInput(
            f"--also {text} does not hold the reference's weights, so their logits cannot be compared: "
            f"{len(differing)} of {len(reference.tensors)} tensors differ. Is it another step?",
            sentences,
        )
    need, available = memory_needed(cut, sequences), footprint.available_bytes()
    if need > footprint.SHARE * available:
        raise BadInput(
            f"--also holds OLMo-core's whole model in float32 and needs about {need / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} are available: leave it out, or run it on a larger machine"
        )
    source = open_source(folder, allow_unknown_keys=allow_unknown_keys, vocabulary="keep")
    stored = {name: tensor.dtype.name for name, tensor in reference.tensors.items()}
    return Also(source, tuple(reference.config.differences(cut.config)), stored)


def memory_needed(source: Source, sequences: Rows[Sequence]) -> int:
    """Bytes of OLMo-core's whole model in float32, with its activations."""
    largest = 4 * max(math.prod(w.shape) for w in weights(source.config))
    return footprint.reference_bytes(source.config, sequences, "float32") + largest


def third_side(pairs: Mapping[str, dict], also: Also, settings: dict) -> dict:
    """legs.float32.also of the record. pairs: metrics.summarise of every pair, by the names of PAIRS, over all sequences."""
    return {
        "name": NAME,
        "path": str(also.source.path),
        "pairs": {name: {**s, "max_delta_of_spread": gate.relative_delta(s)} for name, s in pairs.items()},
        "config_differences": [{"field": n, "reference": a, "also": b} for n, a, b in also.config_differences],
        "settings": settings,
    }


def judge(
    pairs: Mapping[str, dict], noise: dict, profile: gate.Profile, limits: Mapping[str, float]
) -> tuple[list[gate.Criterion], dict | None]:
    """Criteria of the reference against the third side, and which side stands apart.

    A pair is beyond the limit where any criterion that the float32 leg would judge it by does not pass.
    """
    judged = {name: gate.float32_criteria(pairs[name], noise, profile, limits) for name in PAIRS}
    agree = {name: all(c.passed for c in criteria) for name, criteria in judged.items()}
    criteria = [replace(c, leg=LEG, name=f"reference against {NAME}: {c.name}") for c in judged["reference_also"]]
    return criteria, odd_one_out(**agree)


def odd_one_out(reference_candidate: bool, reference_also: bool, candidate_also: bool) -> dict | None:
    """Which side stands apart, given which pairs agree: {side, sentence}, or None where all agree. side is None where no
    single one stands apart."""
    agreeing = [reference_candidate, reference_also, candidate_also]
    if all(agreeing):
        return None
    if agreeing == [False, True, False]:
        return _odd("candidate", f"reference and {NAME} agree, the candidate differs: the candidate is wrong")
    if agreeing == [False, False, True]:
        return _odd("reference", f"candidate and {NAME} agree, the reference differs: do not believe the reference")
    if agreeing == [True, False, False]:
        return _odd(
            "also",
            f"reference and candidate agree, {NAME} differs: they may share a fault that AI2's own model does not have, "
            "so do not believe the reference before it is known why",
        )
    if not any(agreeing):
        return _odd(None, f"reference, candidate and {NAME} all differ from each other: do not believe any of them")
    sides = {"reference_candidate": "reference and candidate", "reference_also": f"reference and {NAME}"}
    pair = dict(zip(PAIRS, agreeing, strict=True))
    apart = next((words for name, words in sides.items() if not pair[name]), f"candidate and {NAME}")
    return _odd(
        None, f"{apart} differ, the third side is within the limit of both: no side stands apart, look at noise"
    )


def _odd(side: str | None, sentence: str) -> dict:
    return {"side": side, "sentence": sentence}


def lines(also: dict) -> list[str]:
    """The pairwise numbers and where the configs differ, for the report."""
    words = {
        "reference_candidate": "reference against candidate",
        "reference_also": f"reference against {NAME}",
        "candidate_also": f"candidate against {NAME}",
    }
    found = [
        f"{words[name]}: max |delta logit| / spread {float(pair['max_delta_of_spread']):.2e}, "
        f"max KL {float(pair['kl_max']):.2e}"
        for name, pair in also["pairs"].items()
    ]
    found += [
        f"config: {d['field']} is {d['reference']!r} in the reference, {d['also']!r} in {NAME}"
        for d in also["config_differences"]
    ]
    return found
