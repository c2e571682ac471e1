"""Held-out losses of one pair of checkpoints: each side loads once for each dtype and keeps three numbers a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..convert.sources import Source
from . import calibrate, losses
from .batches import Sequence
from .candidate import run_candidate
from .devices import Placement
from .heldout_stats import Tokens, predicted
from .legs import main_dtype, narrower
from .recorded import Recorded
from .reference import BENIGN, run_reference


@dataclass
class Runs:
    """What both sides make of the sequences. Files lie in folder/<run>/<index>.npy, of losses.TOKEN."""

    reference: Source | Recorded
    candidate: Source
    sequences: list[Sequence]
    folder: Path
    streamed: bool
    placement: Placement
    allow_unknown_keys: tuple[str, ...]
    versions: dict[str, str]
    weights: str  # hash of the reference's
    recalibrate: bool
    say: Callable[[str], None]

    def __post_init__(self):
        self.settings: dict[str, dict] = {}
        self.stored = narrower(self.reference, self.candidate)

    def float32(self) -> tuple[Tokens, Tokens]:
        """Reference and candidate in float32."""
        return self._reference("ref32", "float32", self.stored), self._candidate("cand32", "float32")

    def bfloat16(self) -> tuple[Tokens, Tokens, Tokens]:
        """The reference in float32 on weights rounded to bfloat16, and reference and candidate in bfloat16."""
        rounded = "bfloat16" if "bfloat16" not in (self.stored, main_dtype(self.reference)) else self.stored
        return (
            self._reference("ref32", "float32", rounded),
            self._reference("ref16", "bfloat16", None),
            self._candidate("cand16", "bfloat16"),
        )

    def _reference(self, name: str, dtype: str, round_to: str | None) -> Tokens:
        rounded = f", weights rounded to {round_to}" if round_to else ""
        self.say(f"reference in {dtype}{rounded}")
        folder = self.folder / name
        if self.reference.kind == "record":
            self.settings[name] = self.reference.losses(dtype, round_to, folder, self.sequences)
        else:
            self.settings[name] = self._run(self.sequences, dtype, round_to, folder, keep=losses.LOSSES)
        return self._kept(name)

    def _run(self, sequences, dtype: str, round_to: str | None, folder: Path, **more) -> dict:
        return run_reference(
            self.reference.path,
            self.reference.config,
            sequences,
            dtype=dtype,
            round_to=round_to,
            streamed=self.streamed,
            device=self.placement.reference,
            folder=folder,
            **more,
        )

    def _candidate(self, name: str, dtype: str) -> Tokens:
        self.say(f"candidate in {dtype}")
        self.settings[name] = run_candidate(
            self.candidate.path,
            self.sequences,
            dtype=dtype,
            streamed=self.streamed,
            keep=losses.LOSSES,
            folder=self.folder / name,
            allow_unknown_keys=self.allow_unknown_keys,
            placement=self.placement,
        )
        return self._kept(name)

    def _kept(self, name: str) -> Tokens:
        kept = [np.load(self.folder / name / f"{i}.npy") for i in range(len(self.sequences))]
        return predicted(kept, self.sequences)

    def noise(self) -> dict:
        """After float32(): metrics.summarise of the reference against itself, benignly changed.

        On the first sequences alone, and from the cache where nothing changed.
        """
        if self.reference.kind == "record":
            return self.reference.noise
        plain = self.folder / "noise-plain"

        def run(sequences: list[Sequence], folder: Path) -> dict:
            self.say("reference in float32, benignly changed")
            self._run(sequences, "float32", self.stored, plain)
            return self._run(sequences, "float32", self.stored, folder, benign=True)

        facts = {"round_to": self.stored, "benign": BENIGN, "threads": self.settings["ref32"]["threads"]}
        facts |= {"streamed": self.streamed, "device": self.settings["ref32"]["device"]}
        return calibrate.reference_noise(
            self.reference,
            self.sequences,
            weights=self.weights,
            plain=plain,
            run=run,
            folder=self.folder / "noise-benign",
            facts=[facts, self.versions],
            again=self.recalibrate,
        )
