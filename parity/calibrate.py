"""The reference's own float32 noise: itself against itself with changes that must not matter; kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..convert.sources import Source
from . import identity, metrics
from .batches import Sequence, positions
from .reference import BENIGN

NEEDED = {"max_abs_delta_logit_shift_free", "spread_of_logits", "kl_max"}  # that limits are made of
ENOUGH_TOKENS = 1024  # tokens; the largest of many differences hardly grows with more


def reference_noise(
    source: Source,
    sequences: list[Sequence],
    *,
    weights: str,
    plain: Path,
    run: Callable[[list[Sequence], Path], dict],
    folder: Path,
    facts: list,
    again: bool = False,
) -> dict:
    """metrics.summarise of the reference in float32 against itself with changes that must not matter.

    weights is the hash of the source's; plain holds the unchanged logits by sequence; run(sequences, folder) writes the changed ones. Measured on the first
    sequences only, and taken from the cache where source, sequences and facts are those of an earlier run.
    """
    chosen, tokens = [], 0
    for sequence in sequences:
        if tokens >= ENOUGH_TOKENS:
            break
        chosen.append(sequence)
        tokens += len(sequence.tokens)

    def measure() -> dict:
        run(chosen, folder)
        stats = [
            metrics.token_stats(*(np.load(f / f"{i}.npy", mmap_mode="r") for f in (plain, folder)), s.tokens)
            for i, s in enumerate(chosen)
        ]
        return metrics.summarise(metrics.TokenStats.join(*stats), positions(chosen))

    noise, kept = cached(key_of(source, weights, chosen, facts), measure, again)
    return {**noise, "from_cache": kept, "changes": list(BENIGN)}


def cached(key: str, measure: Callable[[], dict], again: bool = False) -> tuple[dict, bool]:
    """The noise of an earlier run under this key, else measured and kept. Returns it and whether it was kept before.

    A file that cannot be read or written, or that holds something else, costs time, not the run.
    """
    try:
        file = _folder() / f"{key}.json"
    except RuntimeError:  # no home folder: a container's user without a name
        return measure(), False
    if not again:
        try:
            kept = json.loads(file.read_text())
            if {name for name, value in kept.items() if isinstance(value, (int, float))} >= NEEDED:
                return kept, True
        except (OSError, ValueError, AttributeError):
            pass
    noise = measure()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(noise))
        partial.rename(file)
    except OSError:
        pass
    return noise, False


def key_of(source: Source, weights: str, sequences: list[Sequence], facts: list) -> str:
    """sha256 over everything that the noise depends on: weights, config, sequences, code, machine, and the facts given.

    The weights are taken by their own hash: another checkpoint may lie at the same path with equal sizes and times.
    """
    everything = [
        weights,
        identity.code_hash(),
        repr(source.config),
        [(s.sha256, s.first_position, s.window, s.documents) for s in sequences],
        [platform.machine(), _processor(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS")],
        facts,
    ]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "olmo-parity" / "noise"
