"""The processes of one conversion: which of them this is, how far each has come, and which has failed or gone silent.

They meet in a folder beside the target, which all of them must see: each keeps one file there that it writes again and again.
Process 0 leads. It admits the others, waits for their shares, and finishes the tree; they watch it alone, it watches them all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from ..olmo_jax.errors import BadInput

BEAT_SECONDS = 1.0
LOST_SECONDS = 120.0  # without a sign of life: network file systems may show another host's writes a minute late
REFUSAL_BEATS = 10
START_SECONDS = 600.0  # for all to come: each may have to fetch a source first
KEPT = "what is finished is kept: run the same command on every host again to go on"
START, REFUSED = "start.json", "refused.json"
# In this order; "failed" and "left" end a process.
PHASES = ("called", "joined", "writing", "written", "merged", "verified", "published")
ENDED = ("failed", "left")


def which(text: str | None) -> tuple[int, int]:
    """--distributed as (index, count): INDEX/COUNT by hand, or auto for what JAX finds on TPU pods, GKE, Slurm, Open MPI."""
    if text is None:
        return 0, 1
    if text == "auto":
        return _detected()
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise BadInput(f"--distributed {text}: auto or INDEX/COUNT is wanted, 0/4 to 3/4 for four processes")
    return int(index), int(count)


def _detected() -> tuple[int, int]:
    import jax

    jax.config.update("jax_platforms", "cpu")  # the chips stay free: nothing is computed here
    try:
        jax.distributed.initialize(initialization_timeout=int(START_SECONDS))
        found = jax.process_index(), jax.process_count()
        jax.distributed.shutdown()  # from here on the processes watch each other through the file system
    except Exception as error:  # whatever a cluster's detection may raise
        raise BadInput(
            f"--distributed auto: JAX finds no other processes here ({error or type(error).__name__}). Say which one this "
            "is: --distributed INDEX/COUNT"
        ) from None
    return found


class Team:
    """The processes of one conversion, seen from one of them. A context manager: leaving it by an error stops the others.

    With count 1 there are no others, and nothing is written.
    """

    def __init__(self, target: Path, index: int, count: int):
        self.target, self.index, self.count = target, index, count
        self.folder = target.parent / f".{target.name}.hosts"
        self.run = ""  # names this run: set by process 0
        self._me = uuid.uuid4().hex
        self._state: dict = {"me": self._me, "host": socket.gethostname(), "pid": os.getpid(), "beat": 0}
        # By process: its last state and when that changed, by this clock.
        self._seen: dict[int, tuple[dict, float]] = {}
        self._trouble: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # What lies here already is from a run before this one.
        self._old = {name: self._read(name) for name in (REFUSED, "0.json")} if index else {}

    @property
    def store(self) -> str:
        """The folder below each item that this process writes its arrays into; empty: the item itself."""
        return f"ocdbt.process_{self.index}_{self.run[:8]}" if self.count > 1 else ""

    @property
    def name(self) -> str:
        return f"process {self.index} of {self.count}"

    def __enter__(self) -> Team:
        if self.count > 1:
            if self.index == 0:
                self.run = uuid.uuid4().hex
                shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
                self.folder.mkdir(exist_ok=True)
            self._thread = threading.Thread(target=self._watch, daemon=True)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._thread is None:
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        ending = time.monotonic()
        if error is None:
            self._say("left" if self.index else "published")
        elif self.run:  # else nobody has heard of this process
            bad_input = isinstance(error, BadInput)
            self._say("failed", why=_why(error), faults=list(error.faults) if bad_input else [], input=bad_input)
        if self.index == 0:
            # The others stop at their next slice. Their work must have ended before the staging folder is given up.
            self._until(lambda: all([self._ended(i, ending) for i in range(1, self.count)]), LOST_SECONDS)
            shutil.rmtree(self.folder, ignore_errors=True)

    def refuse(self, error: BaseException) -> None:
        """Process 0 could not begin: say so to those that wait for it, for a moment."""
        if self.count == 1 or not self.target.parent.is_dir():
            return
        with contextlib.suppress(OSError):  # the error itself matters more
            self.folder.mkdir(exist_ok=True)
            self._write(REFUSED, {"me": self._me, "why": _why(error)})
            time.sleep(REFUSAL_BEATS * BEAT_SECONDS)
            (self.folder / REFUSED).unlink()
            self.folder.rmdir()  # only where it is empty: it may be that of a run that goes on

    def gather(self, job: dict, finished: Sequence[str]) -> None:
        """Process 0: wait until all others are there, with the same job, and tell them what is finished already."""
        if self.count == 1:
            return
        self._say("called", run=self.run)
        others = range(1, self.count)
        if not self._until(lambda: all([self._joined(i) for i in others]), START_SECONDS):
            missing = [str(i) for i in others if not self._joined(i)]
            raise self._lost(
                f"process {', '.join(missing)} of {self.count} did not come within {START_SECONDS:.0f} s: the same command must "
                f"run on every host, and all must see {self.target.parent}"
            )
        theirs = {i: self._read(f"job-{i}.json") for i in others}
        faults = [f"process {i}: {text}" for i in others for text in _changes(job, theirs[i])]
        if faults:
            raise BadInput("the processes were started with other sources or options than process 0", faults)
        members = [self._me, *(self._seen[i][0]["me"] for i in others)]
        self._write(START, {"run": self.run, "members": members, "finished": list(finished)})
        self.reached("writing")
        self._thread.start()

    def join(self, job: dict) -> list[str]:
        """The others: wait until process 0 admits this one; returns what an earlier run had finished."""

        start: dict = {}

        def admitted() -> bool:
            refusal = self._read(REFUSED)
            if refusal and refusal != self._old[REFUSED]:
                raise BadInput(f"process 0 did not begin: {refusal['why']}")
            leader = self._look(0)
            if leader.get("phase") == "failed" and leader != self._old["0.json"]:
                raise self._failure(0, leader)
            if "run" not in leader:
                return False
            if self.run != leader["run"]:  # maybe that of a run that was killed: then another one follows
                self.run = leader["run"]
                self._write(f"job-{self.index}.json", job)
            self._say("joined", run=self.run)
            start.update(self._read(START))
            return start.get("run") == self.run and start["members"][self.index] == self._me

        if not self._until(admitted, START_SECONDS):
            raise self._lost(
                f"process 0 of {self.count} did not come within {START_SECONDS:.0f} s: was the command started on every host, "
                f"and do all see {self.target.parent}?"
            )
        self._thread.start()
        return start["finished"]

    def reached(self, phase: str, **more) -> None:
        """Say how far this process has come."""
        if self.count > 1:
            self.check()
            self._say(phase, **more)

    def wait(self, phase: str) -> list[dict]:
        """Until the others have come so far (for process 0) or process 0 has (for the others); returns what they said there."""
        others = range(1, self.count) if self.index == 0 else [0]
        while not all(self._at(i, phase) for i in others):
            self.check()
            time.sleep(BEAT_SECONDS / 4)
        self.check()
        return [self._seen[i][0] for i in others]

    def check(self) -> None:
        """Raise what ended another process: called between slices, so that none works on in vain."""
        if self._trouble:
            raise self._trouble

    def _watch(self) -> None:
        others = range(1, self.count) if self.index == 0 else [0]
        now = time.monotonic()
        self._seen = {i: (self._seen.get(i, ({}, 0.0))[0], now) for i in others}
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._say()
            except OSError as error:
                self._trouble = self._trouble or error
            for i in others:
                state = self._look(i)
                silent = self._silent(i)
                if state.get("run", self.run) != self.run:
                    self._trouble = self._trouble or self._lost("another run of this conversion was started meanwhile")
                elif state.get("phase") == "failed":
                    self._trouble = self._trouble or self._failure(i, state)
                elif silent > LOST_SECONDS and state.get("phase") not in (*ENDED, "published"):
                    who = f"process {i} of {self.count} (pid {state.get('pid')} on {state.get('host')})"
                    self._trouble = self._trouble or self._lost(
                        f"{who} has given no sign for {silent:.0f} s: it was killed, or its host is gone"
                    )

    def _failure(self, index: int, state: dict) -> Exception:
        why = str(state.get("why"))
        # Process 0 hands on what another one said.
        text = (
            why
            if why.startswith("process ")
            else f"process {index} of {self.count} on {state.get('host')} ended: {why}"
        )
        return BadInput(text, state.get("faults") or []) if state.get("input") else self._lost(text)

    def _lost(self, text: str) -> OSError:
        return OSError(errno.ECANCELED, f"{text}; {KEPT}", str(self.target))

    def _joined(self, index: int) -> bool:
        state = self._look(index)
        if state.get("phase") == "failed":
            raise self._failure(index, state)
        return state.get("phase") == "joined"

    def _at(self, index: int, phase: str) -> bool:
        state = self._look(index)
        return state.get("run") == self.run and state.get("phase") in PHASES[PHASES.index(phase) :]

    def _ended(self, index: int, since: float) -> bool:
        """Whether process 0, which ends, need not wait for another one: one that has not come yet hears of it for a moment."""
        state = self._look(index)
        if not state:
            return time.monotonic() - since > REFUSAL_BEATS * BEAT_SECONDS
        return state["phase"] in ENDED or self._silent(index) > LOST_SECONDS

    def _silent(self, index: int) -> float:
        """Seconds since another process was last heard of; 0 where it never was."""
        return time.monotonic() - self._seen[index][1] if index in self._seen else 0.0

    def _look(self, index: int) -> dict:
        """The last state of another process. A file that is just being written shows the one before."""
        state = self._read(f"{index}.json")
        if self.index == 0 and state.get("run") != self.run:
            state = {}  # of a process that is left over from a run before
        with self._lock:
            before = self._seen.get(index, ({}, 0.0))
            if state and state != before[0]:
                self._seen[index] = before = (state, time.monotonic())
        return before[0]

    def _say(self, phase: str | None = None, **more) -> None:
        with self._lock:
            self._state |= {"phase": phase, **more} if phase else {}
            self._state["beat"] += 1
            self._write(f"{self.index}.json", self._state)

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(BEAT_SECONDS / 4)
            if self.index == 0:
                self._say()
        return True

    def _read(self, name: str) -> dict:
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _write(self, name: str, value: dict) -> None:
        """In place: network file systems keep the old file for a while where it is replaced by a rename."""
        with contextlib.suppress(FileNotFoundError):  # process 0 has ended the run, or cleans up after an older one
            (self.folder / name).write_text(json.dumps(value), encoding="utf-8")


def _why(error: BaseException) -> str:
    text = error.headline if isinstance(error, BadInput) else getattr(error, "strerror", None) or str(error)
    return (text or type(error).__name__).split("; what is finished is kept")[0]


def _changes(before: dict, now: dict) -> list[str]:
    before = json.loads(json.dumps(before))
    return [
        f"{key} is {_short(now.get(key))}, {_short(before.get(key))} in process 0"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."
