"""The signs of life of the processes of one conversion: small files beside the target, each written by one process alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ..olmo_jax.errors import BadInput

SIGN = re.compile(r"(\d+)\.[0-9a-f]{32}\.json")
OURS = re.compile(r"\d+\.[0-9a-f]{32}(\.job|\.start)?\.json")
# "failed" and "left" end a process.
ENDED = ("failed", "left")


@dataclass
class Seen:
    """The sign of another process: its last state, when that changed by this clock, and whether it ever did.

    One that does not change may have been left by a process that was killed long ago.
    """

    state: dict
    changed: float
    fresh: bool = False

    @property
    def silent(self) -> float:
        """Seconds."""
        return time.monotonic() - self.changed

    @property
    def ended(self) -> bool:
        return self.state["phase"] in ENDED


class Signs:
    """The sign of this process, and those it watches: process 0 all others, another one those of a process 0."""

    def __init__(self, folder: Path, index: int, count: int):
        self.folder, self.index = folder, index
        self.me = uuid.uuid4().hex
        self.gone = False  # another process took this one's sign away
        self._state = {"me": self.me, "index": index, "count": count, "phase": "opening", "beat": 0}
        self._state |= {"host": socket.gethostname(), "pid": os.getpid()}
        self._seen: dict[str, Seen] = {}
        self._lock = threading.RLock()

    def begin(self, **more) -> None:
        """Make the folder and the first sign. Raises BadInput where somebody else's files lie there."""
        wrong = self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir())
        if wrong or any(map(_is_foreign, _names(self.folder))):
            raise BadInput(f"{self.folder} is in the way, and no conversion wrote it: move it away")
        self._state |= more
        for last in (False, True):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file(self.index, self.me).write_text(json.dumps(self._state), encoding="utf-8")
                return
            except FileNotFoundError:  # another process, which ends, has just removed the empty folder
                if last:
                    raise

    def say(self, phase: str | None = None, **more) -> None:
        """How far this process has come; without a phase only that it lives."""
        with self._lock:
            self._state |= {"phase": phase, **more} if phase else {}
            self._state["beat"] += 1
            try:
                # In place: network file systems keep the old file for a while where it is replaced by a rename. Never made
                # again: who cleans up would find the folder filled anew.
                with open(self._file(self.index, self.me), "r+", encoding="utf-8") as file:
                    file.write(json.dumps(self._state))
                    file.truncate()
            except FileNotFoundError:
                self.gone = True

    def look(self) -> list[Seen]:
        """The signs of the others as they are now, the one that changed last at the end."""
        with self._lock:
            found = [
                name for name in _names(self.folder) if (match := SIGN.fullmatch(name)) and self._watches(match[1])
            ]
            for name in {*found, *self._seen}:
                self._read(name)
            return sorted(self._seen.values(), key=lambda sign: sign.changed)

    def tell(self, what: str, value) -> None:
        """Lay down what is too long for a sign."""
        with contextlib.suppress(FileNotFoundError):
            self._file(self.index, self.me, f".{what}").write_text(json.dumps(value), encoding="utf-8")

    def told(self, sign: Seen, what: str):
        return json.loads(self._file(sign.state["index"], sign.state["me"], f".{what}").read_text(encoding="utf-8"))

    def leave(self) -> None:
        """Take this process's own files away, and the folder where it is empty."""
        with self._lock:
            _remove(self.folder, [name for name in _names(self.folder) if self.me in name])

    def _watches(self, index: str) -> bool:
        return (index == "0") != (self.index == 0)

    def _file(self, index: int, me: str, what: str = "") -> Path:
        return self.folder / f"{index}.{me}{what}.json"

    def _read(self, name: str) -> None:
        before = self._seen.get(name)
        try:
            state = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if before and not before.ended and before.state["phase"] != "published":
                before.state = {**before.state, "phase": "left"}
            return
        except (OSError, ValueError):  # being written: the state before counts
            return
        if before is None:
            self._seen[name] = Seen(state, time.monotonic())
        elif state != before.state:
            self._seen[name] = Seen(state, time.monotonic(), True)


def clear(folder: Path) -> None:
    """Remove what conversions left in the folder, and the folder where nothing else lies in it."""
    _remove(folder, [name for name in _names(folder) if OURS.fullmatch(name)])


def _is_foreign(name: str) -> bool:
    return not OURS.fullmatch(name) and not name.startswith(".nfs")  # NFS: removed, but still open somewhere


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
