"""One process's share of a conversion: which moves, and what it does with them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .compare import compare_moves
from .copying import Move, copy_group, group_moves, run_all
from .hosts import Team
from .orbax_write import TreeWriter
from .progress import Progress
from .staging import working_folder

if TYPE_CHECKING:
    from .checkpoint import Source


def share(moves: Sequence[Move], index: int, count: int) -> list[Move]:
    """The moves of one process of several, in their order; each has about as many bytes."""
    loads = [0] * count
    owner = {}
    for move in sorted(moves, key=lambda move: (-move.leaf.nbytes, move.key)):
        lightest = loads.index(min(loads))
        owner[move.key] = lightest
        loads[lightest] += move.leaf.nbytes
    return [move for move in moves if owner[move.key] == index]


def make_writers(moves: Sequence[Move], folder: Path, store: str, compression: str) -> dict[str, TreeWriter]:
    """A writer for each item of a step, with the arrays made that several moves share."""
    writers = {}
    for item in sorted({move.item for move in moves}, reverse=True):  # state first
        writers[item] = TreeWriter(folder / item, compression, os.cpu_count() or 1, store)
        shared = {move.stored.path: move.stored for move in moves if move.shared and move.item == item}
        writers[item].prepare(shared.values())
    return writers


def help_convert(
    team: Team,
    source: Source,
    moves: Sequence[Move],
    job: dict,
    check_source: Callable[[], None],
    *,
    compression: str,
    allow_nonfinite: bool,
    verify: bool,
    workers: int,
    quiet: bool,
) -> dict:
    """All that a process other than 0 does: its share written into a store of its own and noted in a journal of its own, then
    as much of the whole tree read back. Returns what goes into its record."""
    folder = working_folder(team.target)
    finished = set(team.join(job))
    mine = share([move for move in moves if move.key not in finished], team.index, team.count)
    writers = make_writers(mine, folder, team.store, compression)
    progress = Progress("writing", sum(move.tensor.nbytes for move in mine), quiet)
    lock = threading.Lock()
    with open(folder / f"journal-{team.store}.jsonl", "w", encoding="utf-8") as journal:
        journal.write(json.dumps({"job": job}) + "\n")

        def carry(group: Sequence[Move]) -> None:
            entries = copy_group(group, writers, allow_nonfinite, watched(team, progress))
            with lock:
                for move, entry in zip(group, entries, strict=True):
                    more = {"source_file": source.name_of(move.tensor.file), "store": team.store}
                    journal.write(json.dumps({"leaf": move.key, **entry, **more}) + "\n")
                journal.flush()

        run_all(group_moves(mine), carry, workers)
        os.fsync(journal.fileno())
    check_source()
    seconds, verify_seconds, peak = progress.close(), 0.0, progress.peak_anonymous
    team.reached("written")
    team.wait("merged")
    if verify:
        reading, differences = read_back(team, moves, folder, workers, quiet)
        verify_seconds, peak = reading.close(), max(peak, reading.peak_anonymous)
        team.reached("verified", differences=differences)
    team.wait("published")
    done = {"seconds": seconds, "verify_seconds": verify_seconds, "peak_memory": peak}
    return {"moves": mine, "resumed": 0, **done}


def read_back(team: Team, moves: Sequence[Move], folder: Path, workers: int, quiet: bool) -> tuple[Progress, list[str]]:
    """Compare a part of the tree with its source: with several processes what another one wrote, as a reader sees it."""
    mine = share(moves, (team.index + 1) % team.count, team.count)
    reading = Progress("verifying", sum(move.tensor.nbytes for move in mine), quiet)
    return reading, compare_moves(folder, mine, workers, watched(team, reading), whole=team.count == 1)


def watched(team: Team, progress: Progress) -> Callable[[int], None]:
    """Counts bytes, and stops the work where another process has ended."""

    def add(count: int) -> None:
        team.check()
        progress.add(count)

    return add
