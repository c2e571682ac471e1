"""Nothing half-written: a staging folder beside the target, a lock, a journal of finished leaves, and the renames."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from ..olmo_jax.errors import BadInput
from .manifest import MANIFEST, read_manifest, versions
from .places import BucketPath, is_remote, place
from .progress import in_bytes

JOURNAL = "journal.jsonl"
# TensorStore writes what becomes a file here first, and does not cut what a killed process left there: a manifest that is
# shorter than that one would be spoilt by its end (0.1.86).
LOCK = ".__lock"
JOURNALS = "journal-*.jsonl"  # of the other processes of one conversion
SPARE_BYTES = 64 << 20  # beside the arrays: metadata, manifest, tokenizer files, the store's own index


class Staging:
    """The folder that a conversion writes into until it is whole. Use as a context manager; `publish` renames it.

    `finished` holds what an earlier run, killed on its way, had completed: leaf path to journal record.
    """

    def __init__(self, target: Path, job: dict, *, overwrite: bool = False):
        self.target = target
        self.folder, self.replaced = _siblings(target)
        self.job, self.overwrite = whole_job(job), overwrite
        self._made: list[Path] = []  # folders above the target, innermost first
        self._keep = False  # the unfinished work, although the input is bad
        self.finished: dict[str, dict] = {}
        self._handle: int | None = None
        self._journal = None
        self._write_lock = threading.Lock()

    def __enter__(self) -> Staging:
        try:
            self._made = make_parent(self.target)
            self._lock()
            self._recover()
            _check_target(self.target, self.overwrite)
            self._read_journal()
            # Until the work begins no refusal speaks against what an earlier run finished.
            self._keep = bool(self.finished)
        except BaseException as error:
            if self._handle is not None:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()  # only where it is empty: unfinished work stays
            self._leave(error)
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._journal:
            self._journal.close()
        if isinstance(error, BadInput) and not self._keep and self._handle is not None and self._owned():
            with contextlib.suppress(OSError):
                _remove(self.folder)  # the input must change first: nothing to resume
        self._leave(error)

    def start(self) -> None:
        """The work begins: bad input that it meets now is not to be resumed."""
        self._keep = False

    def record(self, key: str, entry: dict) -> None:
        """Note that a leaf is complete in the store. Called from any thread."""
        with self._write_lock:
            self.finished[key] = entry
            self._journal.write(json.dumps({"leaf": key, **entry}) + "\n")
            self._journal.flush()

    def take_journals(self) -> None:
        """Note what other processes of this run have finished, which their own journals say."""
        self._take_journals()
        self._write_journal()

    def note_merged(self) -> None:
        """All finished leaves are in their item now, none in a store of the process that wrote it."""
        for entry in self.finished.values():
            entry.pop("store", None)
        self._write_journal()

    def publish(self) -> None:
        """Rename the finished folder to the target; an old target goes away only after the new one is in place."""
        self._keep = True
        _check_target(self.target, self.overwrite)  # again: somebody may have put something there since
        self._journal.close()
        (self.folder / JOURNAL).unlink()
        _sync_folder(self.folder)
        if self.target.exists():
            os.rename(self.target, self.replaced)
        os.rename(self.folder, self.target)
        _sync_folder(self.target.parent)
        if self.replaced.exists():
            _remove(self.replaced)

    def check_space(self, needed: int) -> None:
        """Refuse before the work starts where the file system cannot hold what is still to be written."""
        free = shutil.disk_usage(self.folder).free
        needed += SPARE_BYTES
        if free < needed:
            raise BadInput(
                f"{self.target.parent} has {in_bytes(free)} free, the conversion needs {in_bytes(needed)}: "
                f"{needed - free} bytes are missing"
            )

    def _leave(self, error: BaseException | None) -> None:
        self._unlock()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.folder)  # a full disk, met by a write, has no name of its own
        if error is not None:
            remove_empty(self._made)

    def _recover(self) -> None:
        """What a run that was killed in `publish` left: the old target, which counts until the new one is in place."""
        if not os.path.lexists(self.replaced):
            return
        if not _is_ours(self.replaced):
            raise BadInput(f"{self.replaced} is in the way, and no conversion wrote it: move it away")
        if not os.path.lexists(self.target) or _is_empty(self.target):
            os.rename(self.replaced, self.target)
        elif _is_ours(self.target):
            _remove(self.replaced)
        else:
            raise BadInput(
                f"{self.replaced} holds the checkpoint that was at {self.target} before a run was killed, and {self.target} "
                "holds something else now: move one of them away"
            )

    def _lock(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            self._handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise BadInput(f"{self.folder} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._unlock()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BadInput(
                    f"another run is converting into {self.target} (it holds {self.folder}): wait for it"
                ) from None
            raise BadInput(f"{self.folder} cannot be locked: {error.strerror}") from None
        if not self._owned():
            self._unlock()
            raise BadInput(f"another run has just finished {self.target}: look at it first")

    def _owned(self) -> bool:
        """Whether the locked folder is still the one under the staging name: its first holder renames it away."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._handle), os.stat(self.folder))
        return False

    def _unlock(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _read_journal(self) -> None:
        lines = _whole_lines(self.folder / JOURNAL)
        if lines:
            compare_jobs(lines[0]["job"], self.job, self.folder)
            self.finished = {line.pop("leaf"): line for line in lines[1:]}
            self._take_journals()
            for left in self.folder.rglob(f"*{LOCK}"):
                left.unlink()
        elif any(self.folder.iterdir()):
            # Killed before its journal had a line, or after it was taken away: nothing in it counts.
            known = {JOURNAL, f"{JOURNAL}.new", MANIFEST}
            if not any((self.folder / name).is_file() for name in known):
                raise BadInput(f"{self.folder} is in the way, and no conversion wrote it: move it away")
            _empty(self.folder)
        self._write_journal()

    def _take_journals(self) -> None:
        for file in sorted(self.folder.glob(JOURNALS)):
            self.finished |= {line.pop("leaf"): line for line in _whole_lines(file)[1:]}

    def _write_journal(self) -> None:
        """All of it anew: this also drops a last line that was cut, and the journals that were taken in."""
        if self._journal:
            self._journal.close()
        taken = sorted(self.folder.glob(JOURNALS))
        content = [json.dumps({"job": self.job})] + [json.dumps({"leaf": k, **v}) for k, v in self.finished.items()]
        fresh = self.folder / f"{JOURNAL}.new"
        fresh.write_text("\n".join(content) + "\n", encoding="utf-8")
        os.replace(fresh, self.folder / JOURNAL)
        for file in taken:
            file.unlink()
        self._journal = (self.folder / JOURNAL).open("a", encoding="utf-8")


def make_parent(target: Path) -> list[Path]:
    """Make the folder that is to hold the target; returns the folders that did not exist, innermost first."""
    parent = target.parent
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{parent} cannot be made: {error.strerror} (write permission is needed there)") from None
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"{parent} is not writable: write and search permission are needed there to make {target.name}")
    return made


def remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where it is empty


def whole_job(job: dict) -> dict:
    """With the version: another one may lay out other bytes, and its unfinished work does not mix with ours."""
    return {**job, "olmo-parity": versions().get("olmo-parity")}


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the source, lies in it, or holds it."""
    if is_remote(source) != is_remote(target):
        return
    try:
        a, b = source.resolve(), target.resolve()
    except RuntimeError as error:  # before Python 3.13
        raise BadInput(f"{target}: {error}") from None
    if a == b or a in b.parents or b in a.parents:
        raise BadInput(f"the target {target} and the source {source} lie in each other: name a folder of its own")
    if not is_remote(target) and a in _siblings(b):
        raise BadInput(
            f"{source} is where a conversion into {target} keeps its work: rename it, or name another target"
        )


def clean_target(target: str | Path) -> Path | BucketPath:
    """The target as an absolute path without a trailing slash, or as a prefix of a bucket."""
    if not str(target).strip():
        raise BadInput("the target has no name")
    path = place(target)
    if not is_remote(path):
        path = Path(os.path.abspath(path))
    elif not path.key:
        raise BadInput(f"{path} is a whole bucket: name a folder in it")
    if path.parent == path:
        raise BadInput(f"{path} cannot be a target")
    return path


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise BadInput(
            f"{target} exists and is {'a symlink' if target.is_symlink() else 'a file'}: name another target"
        )
    if _is_empty(target):
        return
    ours = _is_ours(target)
    if not overwrite:
        raise BadInput(
            f"{target} exists. Name another target" + (", or pass --overwrite to replace it" if ours else "")
        )
    if not ours:
        raise BadInput(f"{target} exists and holds no checkpoint that a conversion wrote: it is not replaced")


def working_folder(target: Path) -> Path:
    """Where a conversion into target works until it is whole."""
    return _siblings(target)[0]


def _siblings(target: Path) -> tuple[Path, Path]:
    """Where a conversion into target works, and where the old target lies between the two renames."""
    return target.parent / f".{target.name}.converting", target.parent / f".{target.name}.replaced"


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def _is_ours(folder: Path) -> bool:
    """Whether a conversion wrote this folder: it holds a manifest of ours, whatever its version."""
    if folder.is_symlink() or not (folder / MANIFEST).is_file():
        return False
    try:
        read_manifest(folder)
    except BadInput as error:
        return "this version reads" in error.headline
    return True


def _empty(folder: Path) -> None:
    """Remove what is in a folder of ours; what it is known by goes last, so that a kill leaves it known."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name in (JOURNAL, MANIFEST)):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _remove(folder: Path) -> None:
    _empty(folder)
    folder.rmdir()


def _whole_lines(file: Path) -> list[dict]:
    """The journal's lines up to the first that a kill cut short."""
    lines = []
    if file.exists():
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict) or ("leaf" if lines else "job") not in line:
                break
            lines.append(line)
    return lines


def compare_jobs(before: dict, now: dict, folder: Path | str) -> None:
    """Raise BadInput where unfinished work is that of another source or other options."""
    now = json.loads(json.dumps(now))
    changed = [
        f"{key}: was {_short(before.get(key))}, is {_short(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise BadInput(
            f"{folder} holds an unfinished conversion of something else. Run with the same source and options to resume "
            "it, or remove that folder to start over",
            changed,
        )


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
