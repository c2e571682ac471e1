"""One mutant's verdict: the gate's own criteria on its logits, weights and config, and three rules of the field beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...convert.sources import Source
from .. import batches, gate, metrics, padded, sides
from ..candidate import visible_keys
from ..weights import bit_differences, nonfinite_weights
from .kinds import BENIGN, LEGS
from .planting import Planted, module_of

# Rules that are in use elsewhere, on reference and candidate both in bfloat16: name -> (unit, what passes).
FIELD_RULES = {
    "max_kl": ("largest KL(reference || candidate) of any token, nats", 0.015),
    "cosine": ("smallest cosine of any token's logits", 0.99),
    "mean_abs": ("mean |delta logit| over tokens and vocabulary", 0.1),
}


@dataclass
class Judge:
    """The reference's logits and noise, and the limits; every mutant is judged against them.

    folder: holds runs of Legs. rounded: the float32 run of the bfloat16 leg.
    """

    reference: Source
    candidate: Source
    sequences: list[batches.Sequence]
    folder: Path
    rounded: str
    noise: dict
    profile: gate.Profile
    limits: Mapping[str, float]

    def __post_init__(self):
        self.expected = batches.expected_keys(self.reference.config)
        self.logits = {run: self._run(run) for run in {"ref32", "ref16", self.rounded}}
        own = self._stats(self.rounded, self.logits["ref16"])
        self.own = self._joined(own, packed=False)

    @property
    def delta_limit(self) -> float:
        """The float32 leg's limit for |delta logit|, as a share of the logits' spread."""
        return gate.float32_criteria(self.noise, self.noise, self.profile, self.limits)[1].limit

    def float32(self, logits: list[np.ndarray]) -> list[gate.Criterion]:
        """logits [T, V] of every sequence."""
        stats = self._stats("ref32", logits)
        plain, packed = (_summary(self._joined(stats, packed)) for packed in (False, True))
        judged = (self.noise, self.profile, self.limits)
        return gate.float32_criteria(plain, *judged) + gate.packed_criteria(packed, *judged)

    def padded(self, alone: np.ndarray, batched: np.ndarray) -> list[gate.Criterion]:
        """The two runs of padded.py, [T, V]."""
        tokens = padded.row_of(self.sequences).tokens[: len(alone)]
        stats = metrics.token_stats(alone, batched, tokens)
        return gate.padded_criteria(_summary(stats), self.noise, self.profile, self.limits)

    def bfloat16(self, logits: list[np.ndarray]) -> list[gate.Criterion]:
        stats = self._joined(self._stats(self.rounded, logits), packed=False)
        ratio = metrics.ratio_interval(self.own, stats)
        return gate.bfloat16_criteria(_summary(stats), _summary(self.own), ratio, self.profile, self.limits)

    def files(self, planted: Planted) -> list[gate.Criterion]:
        """Config, masks and weights, which are judged from the candidate's files."""
        tree = self._source(planted)
        config = sides.config_differences(self.reference, replace(self.candidate, config=planted.config))
        wrong = bit_differences(replace(self.reference, tensors=self._same_names(tree)), tree)
        return [
            gate.count_criterion("config fields that differ", "config", len(config), "fields"),
            gate.count_criterion("weights that differ", "weights", len(wrong), "tensors"),
            gate.count_criterion("weights with NaN or infinity", "weights", len(nonfinite_weights(tree)), "tensors"),
            *gate.mask_criteria("candidate", self.expected, visible_keys(planted.config)),
        ]

    def field(self, logits: list[np.ndarray]) -> dict[str, dict]:
        """The rules of the field on bfloat16 logits of every sequence: value, limit, and whether the rule would stop it."""
        pairs = [
            (a, b) for a, b, s in zip(self.logits["ref16"], logits, self.sequences, strict=True) if not s.documents
        ]
        stats = self._joined(self._stats("ref16", logits), packed=False)
        with np.errstate(invalid="ignore", over="ignore"):
            values = {
                "max_kl": float(np.max(stats.kl)),
                "cosine": float(min(np.min(_cosine(a, b)) for a, b in pairs)),
                "mean_abs": float(stats.mean_abs.mean()),
            }
        found = {}
        for name, (_, limit) in FIELD_RULES.items():
            # Written so that NaN is stopped.
            passes = values[name] >= limit if name == "cosine" else values[name] <= limit
            found[name] = {"value": values[name], "limit": limit, "stops": not passes}
        return found

    def _run(self, run: str) -> list[np.ndarray]:
        return [np.load(self.folder / run / f"{i}.npy", mmap_mode="r") for i in range(len(self.sequences))]

    def _stats(self, run: str, logits: list[np.ndarray]) -> list[metrics.TokenStats]:
        pairs = zip(self.logits[run], logits, self.sequences, strict=True)
        return [metrics.token_stats(a, b, s.tokens) for a, b, s in pairs]

    def _joined(self, stats: list, packed: bool) -> metrics.TokenStats:
        pairs = zip(stats, self.sequences, strict=True)
        return metrics.TokenStats.join(*(s for s, q in pairs if bool(q.documents) == packed))

    def _source(self, planted: Planted) -> Source:
        """The candidate's checkpoint, of its weights only those that were changed."""
        found = {}
        for name, tensor in self.candidate.tensors.items():
            if module_of(name) in planted.tensors:
                array = planted.tensors[module_of(name)]
                found[name] = replace(tensor, fetch=lambda start, stop, array=array: array[start:stop])
        return replace(self.candidate, tensors=found)

    def _same_names(self, other: Source) -> dict:
        return {name: self.reference.tensors[name] for name in other.tensors}


def _summary(stats: metrics.TokenStats) -> dict:
    return metrics.summarise(stats, np.zeros(len(stats)))


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[T, V] each -> [T]; NaN where one has no length or is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def status_of(kind: str, criteria: list[gate.Criterion], why_invisible: str | None, why_small: str | None) -> str:
    """killed, survived, invisible or too small; of a benign variant passed or killed."""
    failed = {c.leg for c in criteria if c.on and not c.passed}
    if kind == BENIGN:
        return "killed" if failed else "passed"
    if LEGS[kind] in failed:
        return "killed"
    return "invisible" if why_invisible else "too small" if why_small else "survived"


def why_small(planted: Planted, eps: float, smallest_squares: Mapping[str, float], limit: float) -> str | None:
    """Why a fault of epsilon is below what the float32 leg claims to see, from what the right model's norms are given.

    A norm whose output is off by a share r moves the logits by about that share of their spread, of which `limit` is allowed.
    """
    root = planted.mutant.entry.root
    squares = [smallest_squares[name] for name in planted.places]
    most = max(abs(root(square, eps) / (square + eps) ** -0.5 - 1) for square in squares)
    if not most < limit:
        return None
    return (
        f"it moves no norm's output by more than {most:.1g} of it, and the limit is {limit:.1g} of the logits' spread"
    )
