"""Nothing half-written in a bucket, where nothing can be renamed: rights tried first, a journal beside the target, and
the marker that readers ask for written last."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..olmo_jax.errors import BadInput
from .manifest import MANIFEST
from .orbax_io import MARKER
from .orbax_write import write_markers
from .places import REQUESTS_AT_ONCE, BucketPath
from .staging import compare_jobs, whole_job

JOURNAL_SECONDS = 2.0  # between two writes of the journal: what a killed run did in between is done again


class BucketStaging:
    """As staging.Staging. A conversion writes into the target itself, which counts for nothing until `publish` marks it.

    The journal is the object .NAME.converting.json beside the target. Each run writes it on condition that no other run has
    since, so of two runs into one target the first one stops.
    """

    def __init__(self, target: BucketPath, job: dict, *, overwrite: bool = False):
        self.target = self.folder = target
        self.journal = target.parent / f".{target.name}.converting.json"
        self.job, self.overwrite = whole_job(job), overwrite
        self.run = secrets.token_hex(8)
        self.finished: dict[str, dict] = {}
        self._generation = b""
        self._written = 0.0
        self._lost = False
        self._lock = threading.Lock()

    def __enter__(self) -> BucketStaging:
        check_rights(self.target)
        self.target.bucket.forget()
        before = self._take_over()
        if before is None:
            self._check_target()
        elif not before.get("clearing"):
            self.finished = before["finished"]
        clear = before is None or bool(before.get("clearing"))
        self._write(clearing=clear)
        if clear:
            self._clear()
            self._write()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None or self._lost:
            return
        with contextlib.suppress(BadInput, OSError):  # the error that is on its way says more
            if isinstance(error, BadInput):
                self._clear()  # the input must change first: nothing to resume
                self.journal.unlink()
            else:
                self._write()

    def record(self, key: str, entry: dict) -> None:
        """Note that a leaf is complete in the store. Called from any thread."""
        with self._lock:
            self.finished[key] = entry
            if time.monotonic() - self._written > JOURNAL_SECONDS:
                self._write()

    def take_journals(self) -> None:
        """There are none: one process writes into a bucket."""

    def publish(self) -> None:
        """Mark the finished tree: from here on readers take it."""
        self._write()
        write_markers(self.target, {move.partition("/")[0] for move in self.finished})
        with contextlib.suppress(OSError):
            self.journal.unlink()  # one that stays is no harm: beside a marked tree it means nothing

    def check_space(self, needed: int) -> None:
        """A bucket has no end."""

    def start(self) -> None:
        """Nothing is refused after the journal was taken over."""

    def _take_over(self) -> dict | None:
        """The journal of a run that was killed, None where there is none that counts."""
        answer = self.journal.bucket.read(self.journal.key)
        self._generation = answer.stamp.generation
        if answer.state != "value" or (self.target / MARKER).is_file():
            return None
        try:
            before = json.loads(answer.value)
            job = before["job"]
            if not isinstance(before["finished"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{self.journal} is in the way, and no conversion wrote it: move it away") from None
        compare_jobs(job, self.job, f"{self.target} ({self.journal})")
        return before

    def _check_target(self) -> None:
        if not self.target.exists():
            return
        ours = (self.target / MANIFEST).is_file()
        if not self.overwrite:
            hint = ", or pass --overwrite to replace it" if ours else ""
            raise BadInput(f"{self.target} exists. Name another target{hint}")
        if not ours:
            raise BadInput(f"{self.target} exists and holds no checkpoint that a conversion wrote: it is not replaced")

    def _write(self, clearing: bool = False) -> None:
        content = {"job": self.job, "run": self.run, "clearing": clearing, "finished": self.finished}
        text = json.dumps(content).encode()
        generation = self.journal.bucket.write(self.journal.key, text, self._generation)
        if not generation:
            self._lost = True
            raise BadInput(f"another run is converting into {self.target} (it wrote {self.journal}): let it finish")
        self._generation, self._written = generation, time.monotonic()

    def _clear(self) -> None:
        """Remove every object under the target: the marker first, so that nobody reads what is half gone."""
        bucket = self.target.bucket
        bucket.forget()
        keys = bucket.keys(f"{self.target.key}/")
        marker = (self.target / MARKER).key
        if marker in keys:
            bucket.write(marker, None)
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(lambda key: bucket.write(key, None), keys))


def check_rights(target: BucketPath) -> None:
    """Try at the target what a conversion needs, before hours of work. Raises BadInput naming every right that is missing."""
    bucket = target.bucket
    probe = (target.parent / f".{target.name}.probe").key
    faults: list[str] = []

    def allowed(right: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except PermissionError as error:
            stays = ". The small object that tried it stays there" if right == "delete" else ""
            faults.append(f"{error.filename}: {error.strerror}{stays}")
            return False
        return True

    def listed() -> None:
        # TensorStore 0.1.86 takes a list that Google refuses for an empty one.
        if probe not in bucket.keys(probe) and wrote:
            raise PermissionError(0, f"{bucket.right('list')} is missing: what was written is not listed", str(target))

    wrote = allowed("write", lambda: bucket.write(probe, b"olmo-parity tries whether it may write here"))
    allowed("read", lambda: bucket.read(probe))
    allowed("list", listed)
    allowed("delete", lambda: bucket.write(probe, None))
    if faults:
        raise BadInput(f"{target} cannot be written", faults)
