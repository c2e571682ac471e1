"""Which streams of a data loader are run: every process, one process, restarts, another seed; in a process of their own."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from .children import ALIVE, run_children, serve
from .identity import file_hash
from .loader_streams import Collector, StateRefused, Stream

MOST_RECORDS = 2_000_000  # of all processes together, before an end is no longer waited for
CREDIT = 64  # records that the single-process run is let go beyond what all processes together saw
SEED_RECORDS = 1024  # that show whether another seed gives another stream
HASH_SEEDS = ("1", "2")  # PYTHONHASHSEED of the first run and of its repetition: hosts differ in it
STREAMS, LABELS = "streams.npz", "labels.json"
ARRAYS = ("ids", "contents", "sizes", "tokens")
REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class LoaderOptions:
    """What may be chosen. processes, workers and steps should be those of the training run, as far as there is time."""

    processes: int = 4
    workers: int | None = None  # of each process, given to the function; the single-process run has none
    steps: int | None = None  # batches of each process; None: a whole epoch
    seed: int = 0
    resume_at: int | None = None  # batches before a restart; 0: none is tried; None: half of the steps
    other_processes: int | None = None  # a restart with so many; None: none is tried
    same_order: bool = False  # the records of every step must be those of the single-process run
    patience: float = 120.0  # seconds without a batch before a loader counts as hanging


@dataclass(frozen=True)
class Streams:
    """Everything that was simulated, by name: ("single",), ("process", p), ("restart", p), ..."""

    found: dict[tuple, Stream]
    labels: list[str]  # of codes: "id ..." or "content ...", a hash
    facts: dict = field(default_factory=dict)

    def all(self, kind: str) -> list[Stream]:
        return [stream for name, stream in self.found.items() if name[0] == kind]


def simulate(function: Callable, options: LoaderOptions, alive: Callable[[str], None] = lambda _: None) -> Streams:
    """Run the loader as every process, as one process, from a restart, and with another seed. Raises BadInput."""
    collector = Collector(function, options.seed, alive)
    if options.workers is not None and not collector.takes_workers:
        raise BadInput("--workers was given, and the loader function has no parameter named workers to take it")
    count, steps, workers = options.processes, options.steps, options.workers
    found: dict[tuple, Stream] = {}
    left = MOST_RECORDS
    for p in range(count):
        found["process", p] = collector.stream(
            p, count, batches=steps, records=None if steps else left + 1, workers=workers
        )
        left -= len(found["process", p].ids)
        if left < 0 and not steps:
            raise BadInput(
                f"the loaders of {p + 1} of {count} processes gave more than {MOST_RECORDS:,} records and the last one did "
                "not end: give --steps, or let the function read a smaller source"
            )
    many = [found["process", p] for p in range(count)]
    found["single",] = _single(collector, many)
    other = options.seed + 1
    found["other seed", 0] = collector.stream(0, count, seed=other, batches=steps, workers=workers)
    found["single, other seed",] = collector.stream(0, 1, seed=other, records=SEED_RECORDS)
    facts = {"told_by": list(collector.told_by), "takes_workers": collector.takes_workers}
    shortest = min(len(s.sizes) for s in many)
    at = shortest // 2 if options.resume_at is None else options.resume_at
    if at > shortest:
        raise BadInput(f"--resume-at {at}: the shortest of {count} processes has {shortest} batches")
    if at:
        for p, stream in enumerate(many):
            found["restart", p] = collector.stream(p, count, at, batches=_rest(stream, at), workers=workers)
        if collector.resumable(workers):
            last, rest = count - 1, _rest(many[-1], at)
            try:
                found["restored", last] = collector.stream(last, count, restore_at=at, batches=rest, workers=workers)
            except StateRefused as error:
                facts["state_refused"] = str(error)
        if options.other_processes:
            facts |= _other_processes(collector, found, many, at, options)
    return Streams(found, list(collector.codes), facts | {"resume_at": at})


def _single(collector: Collector, many: list[Stream]) -> Stream:
    """The run as one process: to its end, or as far as all processes together got. Where these did not see the same
    records, far enough to see where theirs stand in it and where its epochs end."""
    total, remainders = sum(len(s.ids) for s in many), sum(int(s.sizes.max(initial=0)) for s in many)
    single = collector.stream(0, 1, records=total + 2 * remainders + CREDIT)
    if single.ended:
        return single
    same = any(
        np.array_equal(
            np.sort(getattr(single, name)[:total]), np.sort(np.concatenate([getattr(s, name) for s in many]))
        )
        for name in ("ids", "contents")
    )
    if same and not all(s.ended for s in many):
        return single
    return collector.stream(0, 1, records=min(2 * len(many) * total + CREDIT, MOST_RECORDS))


def _rest(stream: Stream, at: int) -> int:
    """Batches to compare after a restart; where the stream ended one more, to see that the restarted one ends there too."""
    return len(stream.sizes) - at + stream.ended


def _other_processes(collector: Collector, found: dict, many: list[Stream], at: int, options: LoaderOptions) -> dict:
    """Restart with another number of processes at the step before which as many records were seen."""
    count = options.other_processes
    first = [collector.stream(q, count, batches=1, workers=options.workers) for q in range(count)]
    mine, theirs = (sum(int(s.sizes[0]) for s in streams if len(s.sizes)) for streams in (many, first))
    if not mine or not theirs:
        raise BadInput(f"the first step of {options.processes} or of {count} processes holds no records")
    whole = theirs // math.gcd(mine, theirs)  # every so many of our steps are whole steps of theirs
    ours = at if options.resume_at else max(at // whole, 1) * whole
    if ours % whole or ours > min(len(s.sizes) for s in many):
        raise BadInput(
            f"a step holds {mine} records with {options.processes} processes and {theirs} with {count}: only after a "
            f"multiple of {whole} steps can {count} processes go on. Give such a --resume-at, or more --steps"
        )
    after = ours * mine // theirs
    rest = min(len(s.sizes) for s in many) - ours
    limit = None if options.steps is None else max(rest * mine // theirs, 1)
    for q in range(count):
        found["other processes", q] = collector.stream(q, count, after, batches=limit, workers=options.workers)
    return {"other_processes_from": [ours, after], "records_a_step": [mine, theirs]}


def repeat(function: Callable, options: LoaderOptions, alive: Callable[[str], None] = lambda _: None) -> Streams:
    """The first and the last process once more, to be compared with those of simulate."""
    collector, count = Collector(function, options.seed, alive), options.processes
    found = {
        ("process", p): collector.stream(p, count, batches=options.steps, records=MOST_RECORDS, workers=options.workers)
        for p in sorted({0, count - 1})
    }
    return Streams(found, list(collector.codes))


def run_child(spec: str, options: LoaderOptions, folder: Path, *, again: bool = False) -> Streams:
    """simulate, or where again repeat, in a process of its own that may hang or die. Raises BadInput.

    The two run with different PYTHONHASHSEED: a stream that follows the order of a set is another one on every host.
    """
    folder.mkdir()
    request = {"spec": spec, "again": again, "processes": 1, "options": asdict(options)}
    env = os.environ | {"PYTHONHASHSEED": HASH_SEEDS[again]}
    facts = run_children(__name__, folder, request, env, f"the process of the loader {spec}", options.patience)
    with np.load(folder / STREAMS) as arrays:
        found = {
            tuple(name): Stream(*(arrays[f"{i}/{part}"] for part in ARRAYS), ended=ended, workers=workers)
            for i, (name, ended, workers) in enumerate(facts.pop("streams"))
        }
    return Streams(found, json.loads((folder / LABELS).read_text()), facts)


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process: run the loader, write the streams, return the rest."""
    from .candidate_fn import load

    now = ["the import of the function"]
    threading.Thread(target=_report, args=(now, folder / ALIVE), daemon=True).start()
    function, _ = load(request["spec"], "loader function")
    if "absl.flags" in sys.modules and not (flags := sys.modules["absl.flags"].FLAGS).is_parsed():
        flags.mark_as_parsed()  # a training program parses them, and Grain asks for them where it has workers
    run = repeat if request["again"] else simulate
    streams = run(function, LoaderOptions(**request["options"]), lambda what: now.__setitem__(0, what))
    arrays = {f"{i}/{part}": getattr(s, part) for i, s in enumerate(streams.found.values()) for part in ARRAYS}
    np.savez(folder / STREAMS, **arrays)
    (folder / LABELS).write_text(json.dumps(streams.labels))
    file = inspect.getsourcefile(inspect.unwrap(function))
    source = {"name": request["spec"], "file": file, "sha256": file_hash(Path(file)) if file else None}
    return streams.facts | source | {"streams": [[name, s.ended, s.workers] for name, s in streams.found.items()]}


def _report(now: list[str], file: Path) -> None:
    """In a thread: keep in the file what is being waited for. It stays untouched while that is one thing."""
    written = ""
    while True:
        if now[0] != written:
            written = now[0]
            file.write_text(written)
        time.sleep(REPORT_SECONDS)


if __name__ == "__main__":
    serve(_run)
