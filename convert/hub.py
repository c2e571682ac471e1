"""Hub names and revisions: which of a user's words mean the hub, and what local caches and names say about weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ..olmo_jax.errors import BadInput

TRAINING_START = re.compile(r"step[-_]?0+(?![0-9])")
SCHEME = re.compile(r"hf:/{1,2}")  # one slash is left of the two where the text went through a Path
ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@(\S+))?", re.ASCII)  # allenai/Olmo-3-1025-7B@stage1-step0
MAIN = "main"
NEAR = 6  # revisions that are named where the asked one does not exist


@dataclass(frozen=True)
class HubId:
    """A repository on the hub and the revision that was asked for."""

    repo: str
    revision: str
    explicit: bool  # written as hf://

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}"


def hub_id(path: str | Path) -> HubId | None:
    """What a user's word means on the hub: hf://ORG/NAME[@REVISION], or ORG/NAME[@REVISION] where nothing local has that
    name. None for everything else.

    Raises BadInput for hf:// with something else behind it, and where a missing local folder is more likely meant.
    """
    text = str(path)
    scheme = SCHEME.match(text)
    match = ID.fullmatch(text[scheme.end() :] if scheme else text)
    if scheme and not match:
        raise BadInput(f"{text} names no repository: hf://ORG/NAME or hf://ORG/NAME@REVISION is wanted")
    if not match or match[1].startswith((".", "~")):
        return None
    if not scheme:
        if Path(text).exists() or Path(match[1]).exists():
            return None  # a folder of that name wins, as it does in transformers
        if Path(match[1]).parent.is_dir():
            raise BadInput(
                f"{text} does not exist, though the folder {Path(match[1]).parent} does. If the hub is meant, write "
                f"hf://{text}"
            )
    return HubId(match[1], match[2] or MAIN, bool(scheme))


def with_revision(path: str, revision: str | None) -> str:
    """The path with --revision put in: it belongs to a hub id that names none itself."""
    if revision is None:
        return path
    if not revision or re.search(r"\s", revision):
        raise BadInput(f"--revision {revision!r}: the name of a branch, a tag or a commit is wanted")
    found = hub_id(path)
    if found is None:
        local = Path(path).exists()
        hint = f"a local {'folder' if Path(path).is_dir() else 'file'} has none" if local else "no hub id is given"
        raise BadInput(f"--revision {revision} with {path}: {hint}. For the hub write hf://ORG/NAME@{revision}")
    if "@" in path:
        raise BadInput(f"{path} names a revision already, and --revision {revision} names one too: leave one out")
    return f"{path}@{revision}"


def near_revisions(asked: str, names: Sequence[str]) -> list[str]:
    """Revisions that may have been meant: the same name with the nearest numbers first, then the most similar names."""

    def shape(name: str) -> str:
        return re.sub(r"\d+", "#", name)

    def numbers(name: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", name)]

    def distance(name: str) -> list[int]:
        return [abs(a - b) for a, b in zip(numbers(name), numbers(asked), strict=True)]

    same = sorted((name for name in names if shape(name) == shape(asked)), key=distance)
    similar = difflib.get_close_matches(asked, names, n=NEAR, cutoff=0.4)
    return list(dict.fromkeys([*same[:NEAR], *similar]))[:NEAR]


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
