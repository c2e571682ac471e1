"""Local hub caches: which revision a snapshot folder is, and what its name says about the weights."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

TRAINING_START = re.compile(r"step[-_]?0+(?![0-9])")


def revision_of(folder: Path) -> str | None:
    """Commit and branch names of a hub snapshot (models--X/snapshots/COMMIT), None for any other folder."""
    if folder.parent.name != "snapshots":
        return None
    refs = folder.parent.parent / "refs"
    names = [str(p.relative_to(refs)) for p in sorted(refs.rglob("*")) if p.is_file() and _commit(p) == folder.name]
    return f"{folder.name} ({', '.join(names)})" if names else folder.name


def training_start_note(folder: Path, revision: str | None, codes: Set[str]) -> str | None:
    """AI2 trains in float32 and publishes HF folders in bfloat16: a start from them is not AI2's start."""
    if codes != {"BF16"} or not TRAINING_START.search(revision or folder.name):
        return None
    return (
        "these are bfloat16 weights of a training start: AI2's own step 0 is float32, these are rounded. To start where "
        "AI2 started, convert its distributed checkpoint with core2orbax"
    )


def _commit(file: Path) -> str:
    return file.read_text(encoding="ascii", errors="replace").strip()
