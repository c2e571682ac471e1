"""The two legs: which runs they need, their statistics, their worst tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..convert.sources import Source
from . import calibrate, metrics
from .also import Also, third_side
from .batches import Sequence, positions
from .candidate import run_candidate
from .candidate_fn import CandidateFn
from .devices import Placement
from .distribution import distributions
from .padded import ALONE, BATCHED, row_of
from .recorded import Recorded
from .reference import BENIGN, run_reference

WORST = 10  # tokens shown with their context
CONTEXT = 8  # tokens before one of them


@dataclass
class Legs:
    """Runs of both sides on the same sequences. Logits lie in folder/<run>/<index>.npy, [T, V] float32.

    Reference and candidate are never in memory together: every run loads its model, writes its logits and lets go.
    """

    reference: Source | Recorded
    candidate: Source | CandidateFn
    sequences: list[Sequence]
    folder: Path
    versions: dict[str, str]
    recalibrate: bool
    streamed: bool  # one layer of the model in memory at a time, on both sides
    placement: Placement  # where either side runs
    allow_unknown_keys: tuple[str, ...]
    say: Callable[[str], None]
    weights: str  # hash of the reference's
    also: Also | None = None  # a third side of the float32 leg

    def __post_init__(self):
        self.settings: dict[str, dict] = {}

    def run(self) -> dict:
        """Both legs, as the record has them."""
        noise = self.float32_references()
        self._candidate("cand32", "float32")
        if self.also:
            self.say("OLMo-core's own model in float32")
            self.settings["also32"] = self.also.run(self.sequences, self.stored, self.folder / "also32")
        rounded = self.bfloat16_references()
        self._candidate("cand16", "bfloat16")
        self._candidate("cand16-as-found", "bfloat16", exact_casts=False)
        self.say("comparing logits")
        own, cand = self._compare(rounded, "ref16"), self._compare(rounded, "cand16")
        float32, packed = self._split(self._compare("ref32", "cand32"))
        return {
            "float32": {
                "compared": "reference float32 against candidate float32",
                "statistics": self._summary(float32),
                "packed": self._summary(packed, packed=True) if packed else None,
                "padded": self._padded(),
                "also": self._also(),
                "noise": noise,
                "worst": self._worst(float32, "ref32", "cand32"),
                "reference": self.settings["ref32"],
                "candidate": self.settings["cand32"],
            },
            "bfloat16": {
                "compared": "reference float32 against candidate bfloat16, weights rounded to bfloat16 on both sides",
                "statistics": self._summary(self._split(cand)[0]),
                "own_noise": self._summary(self._split(own)[0]),
                "ratio": metrics.ratio_interval(
                    metrics.TokenStats.join(*self._split(own)[0]), metrics.TokenStats.join(*self._split(cand)[0])
                ),
                "against_reference_bfloat16": self._summary(self._split(self._compare("ref16", "cand16"))[0]),
                "with_flags_as_found": {
                    "xla_flags": self.settings["cand16-as-found"]["xla_flags"],
                    "statistics": self._summary(self._split(self._compare(rounded, "cand16-as-found"))[0]),
                },
                "worst": self._worst(self._split(cand)[0], rounded, "cand16"),
                "reference": self.settings["ref16"],
                "candidate": self.settings["cand16"],
            },
        }

    @property
    def stored(self) -> str | None:
        """The dtype that the reference's weights are rounded to for the float32 leg."""
        return narrower(self.reference, self.candidate)

    def float32_references(self) -> dict:
        """The reference's run ref32; returns the summary of its own noise."""
        self._reference("ref32", "float32", self.stored)
        return self._noise(self.stored)

    def bfloat16_references(self) -> str:
        """The reference's runs for the bfloat16 leg; returns the name of the float32 one, beside ref16."""
        rounded = "ref32"
        if "bfloat16" not in (self.stored, main_dtype(self.reference)):
            # The float32 side of the bfloat16 leg holds the same rounded weights: arithmetic is compared, not storage.
            rounded = "ref32-rounded"
            self._reference(rounded, "float32", "bfloat16")
        self._reference("ref16", "bfloat16", None)
        return rounded

    def _reference(self, name: str, dtype: str, round_to: str | None) -> None:
        if self.reference.kind == "record":
            self.say(f"recorded reference in {dtype}")
            self.settings[name] = self.reference.restore(dtype, round_to, self.folder / name)
            return
        what = f", weights rounded to {round_to}" if round_to else ""
        self.say(f"reference in {dtype}{what}")
        self.settings[name] = run_reference(
            self.reference.path,
            self.reference.config,
            self.sequences,
            dtype=dtype,
            round_to=round_to,
            streamed=self.streamed,
            device=self.placement.reference,
            folder=self.folder / name,
        )

    def _candidate(self, name: str, dtype: str, exact_casts: bool = True) -> None:
        self.say(f"candidate in {dtype}" + ("" if exact_casts else ", XLA_FLAGS as found"))
        if isinstance(self.candidate, CandidateFn):
            self.settings[name] = self.candidate.run(
                self.sequences, dtype=dtype, exact_casts=exact_casts, folder=self.folder / name
            )
            return
        self.settings[name] = run_candidate(
            self.candidate.path,
            self.sequences,
            dtype=dtype,
            exact_casts=exact_casts,
            streamed=self.streamed,
            folder=self.folder / name,
            allow_unknown_keys=self.allow_unknown_keys,
            placement=self.placement,
        )

    def _noise(self, stored: str | None) -> dict:
        """Summary of the reference against itself with benign changes; from the cache where nothing changed."""
        if self.reference.kind == "record":
            return self.reference.noise
        settings = {"round_to": stored, "benign": BENIGN, "threads": self.settings["ref32"]["threads"]}
        settings |= {"streamed": self.streamed, "device": self.settings["ref32"]["device"]}
        return calibrate.reference_noise(
            self.reference,
            self.sequences,
            weights=self.weights,
            plain=self.folder / "ref32",
            run=lambda sequences, folder: run_reference(
                self.reference.path,
                self.reference.config,
                sequences,
                dtype="float32",
                round_to=stored,
                benign=True,
                streamed=self.streamed,
                device=self.placement.reference,
                folder=folder,
            ),
            folder=self.folder / "ref32-benign",
            facts=[settings, self.versions],
            again=self.recalibrate,
        )

    def _padded(self) -> dict | None:
        """The candidate's padded and batched row against the same row alone; None where it ran neither."""
        if not self.settings["cand32"].get("padded_row"):
            return None
        alone, batched = (np.load(self.folder / "cand32" / name, mmap_mode="r") for name in (ALONE, BATCHED))
        stats = metrics.token_stats(alone, batched, row_of(self.sequences).tokens[: len(alone)])
        return metrics.summarise(metrics.TokenStats.join(stats), np.arange(len(alone)))

    def _also(self) -> dict | None:
        """The third side against both others, packed rows included; None where there is none."""
        if not self.also:
            return None
        names = {
            "reference_candidate": ("ref32", "cand32"),
            "reference_also": ("ref32", "also32"),
            "candidate_also": ("cand32", "also32"),
        }
        at = positions(self.sequences)
        pairs = {
            name: metrics.summarise(metrics.TokenStats.join(*self._compare(a, b)), at) for name, (a, b) in names.items()
        }
        return third_side(pairs, self.also, self.settings["also32"])

    def _compare(self, a: str, b: str) -> list[metrics.TokenStats]:
        return [
            metrics.token_stats(self._logits(a, i), self._logits(b, i), s.tokens) for i, s in enumerate(self.sequences)
        ]

    def _logits(self, run: str, index: int) -> np.ndarray:
        return np.load(self.folder / run / f"{index}.npy", mmap_mode="r")

    def _split(self, stats: list) -> tuple[list, list]:
        """Statistics of plain rows and of packed ones, which are a check of their own."""
        plain = [s for s, q in zip(stats, self.sequences, strict=True) if not q.documents]
        return plain, [s for s, q in zip(stats, self.sequences, strict=True) if q.documents]

    def _summary(self, stats: list, packed: bool = False) -> dict:
        rows = [s for s in self.sequences if bool(s.documents) == packed]
        joined = metrics.TokenStats.join(*stats)
        return metrics.summarise(joined, positions(rows)) | {"distribution": distributions(joined)}

    def _worst(self, stats: list, a: str, b: str) -> list[dict]:
        """The tokens with the largest |delta logit|, worst first; a NaN counts as the largest."""
        indices = [i for i, s in enumerate(self.sequences) if not s.documents]
        size = np.concatenate([np.nan_to_num(s.max_abs, nan=np.inf) for s in stats])
        owner = np.concatenate([np.full(len(s), k) for k, s in enumerate(stats)])
        place = np.concatenate([np.arange(len(s)) for s in stats])
        found = []
        for at in np.argsort(-size, kind="stable")[:WORST]:
            k, position = int(owner[at]), int(place[at])
            sequence = self.sequences[indices[k]]
            found.append(
                {
                    "sequence": sequence.id,
                    "position": position,
                    "token": int(sequence.tokens[position]),
                    "context": sequence.tokens[max(0, position - CONTEXT) : position].tolist(),
                    "logit_of_token": int(stats[k].max_abs_id[position]),
                    "abs_delta_logit": float(stats[k].max_abs[position]),
                    "kl": float(stats[k].kl[position]),
                    "top5_reference": self._top5(a, indices[k], position),
                    "top5_candidate": self._top5(b, indices[k], position),
                }
            )
        return found

    def _top5(self, run: str, index: int, position: int) -> list[list]:
        row = np.asarray(self._logits(run, index)[position : position + 1], np.float64)
        return [[int(i), float(row[0, i])] for i in metrics.top(row)[0]]


def main_dtype(source: Source | Recorded) -> str:
    """The dtype of most of a checkpoint's bytes."""
    if source.kind == "record":
        return source.dtype
    sizes: dict[str, int] = {}
    for tensor in source.tensors.values():
        sizes[str(tensor.dtype)] = sizes.get(str(tensor.dtype), 0) + tensor.nbytes
    return max(sizes, key=sizes.get)


def narrower(reference: Source, candidate: Source | CandidateFn) -> str | None:
    """The dtype to round the reference's weights to before the float32 leg: the candidate's, where a conversion rounded.

    What a candidate function reads is known where its checkpoint could be opened.
    """
    if isinstance(candidate, CandidateFn):
        return narrower(reference, candidate.source) if candidate.source else None
    stored = main_dtype(candidate)
    return None if stored in ("float32", main_dtype(reference)) else stored
