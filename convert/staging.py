"""Nothing half-written: a staging folder beside the target, a lock, a journal of finished leaves, and the renames."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
from pathlib import Path

from ..olmo_jax.errors import BadInput
from .orbax_io import TREE_FILE
from .progress import in_bytes

JOURNAL = "journal.jsonl"
SPARE_BYTES = 64 << 20  # beside the arrays: metadata, manifest, tokenizer files, the store's own index


class Staging:
    """The folder that a conversion writes into until it is whole. Use as a context manager; `publish` renames it.

    `finished` holds what an earlier run, killed on its way, had completed: leaf path to journal record.
    """

    def __init__(self, target: Path, job: dict, *, overwrite: bool = False):
        self.target = target
        self.folder = target.parent / f".{target.name}.converting"
        self.replaced = target.parent / f".{target.name}.replaced"
        self.job, self.overwrite = job, overwrite
        self.finished: dict[str, dict] = {}
        self._handle: int | None = None
        self._journal = None
        self._write_lock = threading.Lock()

    def __enter__(self) -> Staging:
        self._make_parent()
        self._lock()
        try:
            self._recover()
            _check_target(self.target, self.overwrite)
            self._read_journal()
        except BaseException:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # only where it is empty: unfinished work stays
            self._unlock()
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._journal:
            self._journal.close()
        if isinstance(error, BadInput) and self._handle is not None and self._owned():
            shutil.rmtree(self.folder, ignore_errors=True)  # the input must change first: nothing to resume
        self._unlock()

    def record(self, key: str, entry: dict) -> None:
        """Note that a leaf is complete in the store. Called from any thread."""
        with self._write_lock:
            self.finished[key] = entry
            self._journal.write(json.dumps({"leaf": key, **entry}) + "\n")
            self._journal.flush()

    def publish(self) -> None:
        """Rename the finished folder to the target; an old target goes away only after the new one is in place."""
        self._journal.close()
        (self.folder / JOURNAL).unlink()
        _sync_folder(self.folder)
        if self.target.exists():
            os.rename(self.target, self.replaced)
        os.rename(self.folder, self.target)
        _sync_folder(self.target.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def check_space(self, needed: int) -> None:
        """Refuse before the work starts where the file system cannot hold what is still to be written."""
        free = shutil.disk_usage(self.folder).free
        needed += SPARE_BYTES
        if free < needed:
            raise BadInput(
                f"{self.target.parent} has {in_bytes(free)} free, the conversion needs {in_bytes(needed)}: "
                f"{needed - free} bytes are missing"
            )

    def _make_parent(self) -> None:
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{parent} cannot be made: {error.strerror} (write permission is needed there)") from None
        if not os.access(parent, os.W_OK | os.X_OK):
            raise BadInput(
                f"{parent} is not writable: write and search permission are needed there to make {self.target.name}"
            )

    def _recover(self) -> None:
        """What a run that was killed in `publish` left: the old target, which counts until the new one is in place."""
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)
        elif self.replaced.exists():
            shutil.rmtree(self.replaced)

    def _lock(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            self._handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
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
        file = self.folder / JOURNAL
        lines = _whole_lines(file)
        if lines:
            _compare_jobs(lines[0]["job"], self.job, self.folder)
            self.finished = {line.pop("leaf"): line for line in lines[1:]}
        elif any(self.folder.iterdir()):
            # Killed before its journal had a line: nothing in it counts. The name is ours, the folder holds no more than that.
            for entry in self.folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        content = [json.dumps({"job": self.job})] + [json.dumps({"leaf": k, **v}) for k, v in self.finished.items()]
        fresh = self.folder / f"{JOURNAL}.new"
        fresh.write_text("\n".join(content) + "\n", encoding="utf-8")
        os.replace(fresh, file)  # also drops a last line that was cut
        self._journal = file.open("a", encoding="utf-8")


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the source, lies in it, or holds it."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise BadInput(f"the target {target} and the source {source} lie in each other: name a folder of its own")


def clean_target(target: str | Path) -> Path:
    """The target as an absolute path without a trailing slash."""
    if not str(target).strip():
        raise BadInput("the target has no name")
    path = Path(os.path.abspath(Path(target).expanduser()))
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
    if not any(target.iterdir()):
        return
    ours = (target / "manifest.json").is_file() or any(target.glob(f"*/{TREE_FILE}"))
    if not overwrite:
        raise BadInput(
            f"{target} exists. Name another target" + (", or pass --overwrite to replace it" if ours else "")
        )
    if not ours:
        raise BadInput(f"{target} exists and holds no checkpoint that a conversion wrote: it is not replaced")


def _whole_lines(file: Path) -> list[dict]:
    """The journal's lines up to the first that a kill cut short."""
    lines = []
    if file.exists():
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines if lines and "job" in lines[0] else []


def _compare_jobs(before: dict, now: dict, folder: Path) -> None:
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
