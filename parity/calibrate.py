"""The reference's own float32 noise: itself against itself with changes that must not matter; kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

from ..convert.sources import Source
from .batches import Sequence

ENOUGH_TOKENS = 1024  # tokens; the largest of many differences hardly grows with more


def sample(sequences: list[Sequence]) -> list[int]:
    """Indices of the sequences that noise is measured on: from the first, until there are tokens enough."""
    chosen, tokens = [], 0
    for index, sequence in enumerate(sequences):
        if tokens >= ENOUGH_TOKENS:
            break
        chosen.append(index)
        tokens += len(sequence.tokens)
    return chosen


def cached(key: str, measure: Callable[[], dict], again: bool = False) -> tuple[dict, bool]:
    """The noise of an earlier run under this key, else measured and kept. Returns it and whether it was kept before.

    A file that cannot be read or written costs time, not the run.
    """
    file = _folder() / f"{key}.json"
    if not again:
        try:
            return json.loads(file.read_text()), True
        except (OSError, ValueError):
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


def key_of(source: Source, sequences: list[Sequence], settings: dict, versions: dict) -> str:
    """sha256 over everything that the noise depends on: weights, config, sequences, versions, machine.

    The weights are taken by their files' names, sizes and times of change: hashing 14 GB would cost more than measuring.
    """
    files = sorted({tensor.file.resolve() for tensor in source.tensors.values()})
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    facts = {
        "files": stats,
        "config": repr(source.config),
        "sequences": [(s.sha256, s.first_position, s.window, s.documents) for s in sequences],
        "settings": settings,
        "versions": versions,
        "machine": [platform.machine(), _processor(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "olmo-parity" / "noise"
