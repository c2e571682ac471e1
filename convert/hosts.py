"""The processes of one conversion: which of them this is, how far each has come, and which has failed or gone silent.

They meet in a folder beside the target, which all of them must see: each keeps one file there that it writes again and again.
Process 0 leads. It admits the others, waits for their shares, and finishes the tree; they watch it alone, it watches them all.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..olmo_jax.errors import BadInput
from .places import BucketPath, is_remote
from .signs import Seen, Signs, clear
from .staging import make_parent, remove_empty

BEAT_SECONDS = 1.0
LOST_SECONDS = 120.0  # without a sign of life: network file systems may show another host's writes a minute late
REFUSAL_BEATS = 10
START_SECONDS = 600.0  # for all to come: each may have to fetch a source first
KEPT = "what is finished is kept: run the same command on every host again to go on"
PHASES = ("called", "joined", "writing", "written", "merged", "verified", "published")  # in this order


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

    Entered before the source is opened, so that a fault found there is heard by those that wait. With count 1 there are no
    others, and nothing is written.
    """

    def __init__(self, target: Path | BucketPath, index: int, count: int):
        self.target, self.index, self.count = target, index, count
        self.folder = target.parent / f".{target.name}.hosts"
        self.run = ""  # names this run, once process 0 has called: its own name
        self._others = range(1, count) if index == 0 else [0]
        self._signs = Signs(self.folder, index, count)
        self._members: list[str] = []  # by index, once process 0 has admitted them: from then on no other sign counts
        self._trouble: Exception | None = None
        self._made: list[Path] = []  # folders above the target
        self._said_end = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def store(self) -> str:
        """The folder below each item that this process writes its arrays into; empty: the item itself."""
        return f"ocdbt.process_{self.index}_{self.run[:8]}" if self.count > 1 else ""

    @property
    def name(self) -> str:
        return f"process {self.index} of {self.count}"

    def __enter__(self) -> Team:
        if self.count > 1:
            self._made = make_parent(self.target)
            self._signs.begin(made=len(self._made))
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.end(kind, error, traceback)
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        if not self._members:
            self._signs.leave()  # a member's last sign is taken away by process 0
        if error is not None:
            # Whoever is the last to leave, and whoever made them: the folders above the target that were not there before.
            made = max([len(self._made), *(sign.state.get("made", 0) for sign in self._signs.look())])
            remove_empty([self.target.parent, *self.target.parent.parents][:made])

    def end(self, kind, error, traceback) -> None:
        """As __exit__, where process 0 gives up the staging folder: before that the work of the others must have ended."""
        if self._said_end:
            return
        self._said_end = True
        if self.count == 1:
            if error is None and not is_remote(self.target):
                clear(self.folder)  # of several processes whose work this one has finished
            return
        if error is None:
            self._signs.say("left" if self.index else "published")
        else:
            bad_input = isinstance(error, BadInput)
            faults = list(error.faults) if bad_input else []
            self._signs.say("failed", why=_why(error), faults=faults, input=bad_input)
        if self.index == 0 or not self._members:
            # Members stop at their next slice. Those that have not come so far, or are not there yet, hear of it for a moment.
            limit = LOST_SECONDS if self._members else REFUSAL_BEATS * BEAT_SECONDS
            self._until(lambda: self._signs.gone or all(self._has_ended(i) for i in self._others), limit)
        if self.index == 0 and self.run:
            clear(self.folder)  # also what a run that was killed left

    def gather(self, job: dict, finished: Sequence[str]) -> None:
        """Process 0: wait until all others are there, with the same job, and tell them what is finished already."""
        if self.count == 1:
            return
        self.run = self._signs.me
        self._signs.say("called", run=self.run)
        joined: dict[int, Seen] = {}

        def all_there() -> bool:
            for sign in self._signs.look():
                if sign.state.get("run") == self.run and sign.state["phase"] == "joined":
                    joined.setdefault(sign.state["index"], sign)
            self.check()
            return all(i in joined for i in self._others)

        if not self._until(all_there, START_SECONDS):
            missing = [str(i) for i in self._others if i not in joined]
            raise self._lost(
                f"process {', '.join(missing)} of {self.count} did not come within {START_SECONDS:.0f} s: the same command must "
                f"run on every host, and all must see {self.target.parent}"
            )
        faults = [
            f"process {i}: {text}" for i in self._others for text in _changes(job, self._signs.told(joined[i], "job"))
        ]
        if faults:
            raise BadInput("the processes were started with other sources or options than process 0", faults)
        self._members = [self._signs.me, *(joined[i].state["me"] for i in self._others)]
        self._signs.tell("start", list(finished))
        self._signs.say("writing", members=self._members)

    def join(self, job: dict) -> list[str]:
        """The others: wait until process 0 admits this one; returns what an earlier run had finished."""
        self._signs.tell("job", job)
        finished: list[str] = []

        def admitted() -> bool:
            leader = self._leader()
            self.check()
            if leader is None or "run" not in leader.state:
                return False
            if leader.state["run"] != self.run:
                self.run = leader.state["run"]
                self._signs.say("joined", run=self.run)
            if self._signs.me not in leader.state.get("members", []):
                return False
            finished.extend(self._signs.told(leader, "start"))
            self._members = leader.state["members"]
            return True

        if not self._until(admitted, START_SECONDS):
            raise self._lost(
                f"process 0 of {self.count} did not come within {START_SECONDS:.0f} s: was the command started on every host, "
                f"and do all see {self.target.parent}?"
            )
        return finished

    def reached(self, phase: str, **more) -> None:
        """Say how far this process has come."""
        if self.count > 1:
            self.check()
            self._signs.say(phase, **more)

    def wait(self, phase: str) -> list[dict]:
        """Until the others have come so far (for process 0) or process 0 has (for the others); returns what they said there."""
        if self.count == 1:
            return []
        far = PHASES[PHASES.index(phase) :]
        while True:
            states = [sign.state for sign in self._of_members()]
            self.check()
            if all(state["phase"] in far for state in states):
                return states
            time.sleep(BEAT_SECONDS / 4)

    def check(self) -> None:
        """Raise what ended another process: called between slices, so that none works on in vain."""
        if self._trouble:
            raise self._trouble

    def _watch(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._signs.say()
                self._trouble = self._trouble or (self._among_members() if self._members else self._before_work())
            except OSError as error:
                self._trouble = self._trouble or error

    def _of_members(self) -> list[Seen]:
        """In the order of their index."""
        watched = {self._members[i] for i in self._others}
        return sorted(
            (sign for sign in self._signs.look() if sign.state["me"] in watched), key=lambda sign: sign.state["index"]
        )

    def _leader(self) -> Seen | None:
        """A process 0 that lives: of two, the second of which is about to be refused, the one that has called."""
        living = [sign for sign in self._signs.look() if sign.fresh and not sign.ended and sign.silent < LOST_SECONDS]
        return max(living, key=lambda sign: "run" in sign.state, default=None)

    def _among_members(self) -> Exception | None:
        for sign in self._of_members():
            state = sign.state
            who = f"process {state['index']} of {self.count} (pid {state['pid']} on {state['host']})"
            if state["phase"] == "failed":
                return self._failure(state)
            if state["phase"] == "left" and not self._said_end:
                return self._lost(f"the sign of {who} was taken away from {self.folder}")
            if sign.silent > LOST_SECONDS and state["phase"] not in ("left", "published"):
                return self._lost(
                    f"{who} has given no sign for {sign.silent:.0f} s: it was killed, or its host is gone"
                )
        if self.index and any(s.fresh and s.state.get("run", self.run) != self.run for s in self._signs.look()):
            return self._lost("another run of this conversion was started meanwhile")
        return None

    def _before_work(self) -> Exception | None:
        """What keeps this process from taking part, or another one that it waits for."""
        if self.index == 0:
            # Not those of another run, which this one may be refused for.
            heard = [s.state for s in self._signs.look() if s.fresh and s.state.get("run", self.run) == self.run]
            failed = [state for state in heard if state["phase"] == "failed"]
            return self._failure(failed[0]) if failed else None
        leader = self._leader()
        if leader is None:
            failed = [s.state for s in self._signs.look() if s.fresh and s.state["phase"] == "failed"]
            if failed:
                return self._failure(failed[-1])
        elif leader.state["count"] != self.count:
            theirs = (
                f"process {self.index} was started as {self.index}/{self.count}, process 0 as 0/{leader.state['count']}"
            )
            return BadInput(f"{theirs}: the same COUNT is wanted everywhere")
        elif self._signs.me not in leader.state.get("members", [self._signs.me]):
            return BadInput(
                f"another run is converting into {self.target}, or this one has another process {self.index}: "
                "start each once, and wait for a run to end before the next"
            )
        if self._signs.gone:
            return BadInput(f"another run into {self.target} has just ended: look at it first")
        return None

    def _has_ended(self, index: int) -> bool:
        """As far as this process, which ends, can see."""
        signs = self._of_members() if self._members else [s for s in self._signs.look() if s.fresh]
        if self.index == 0:
            signs = [sign for sign in signs if sign.state.get("run", self.run) == self.run]
        those = [sign for sign in signs if sign.state["index"] == index]
        return bool(those) and all(sign.ended or sign.silent > LOST_SECONDS for sign in those)

    def _failure(self, state: dict) -> Exception:
        why = str(state.get("why"))
        # Process 0 hands on what another one said.
        text = (
            why
            if why.startswith("process ")
            else f"process {state['index']} of {self.count} on {state['host']} ended: {why}"
        )
        return BadInput(text, state.get("faults") or []) if state.get("input") else self._lost(text)

    def _lost(self, text: str) -> OSError:
        return OSError(errno.ECANCELED, f"{text}; {KEPT}", str(self.target))

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(BEAT_SECONDS / 4)
        return True


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
