"""--stream: shards of the hub come one at a time, are converted, read back while they are here, and deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..olmo_jax.errors import BadInput
from .checkpoint import Source
from .checksums import array_sha256
from .compare import compare_moves
from .copying import Move, group_moves, run_all
from .fit import UNCOMPARED
from .orbax_io import open_item
from .orbax_write import TreeWriter
from .places import BucketPath, is_remote
from .progress import in_bytes

ROOM = "shards"  # in the staging folder: where a shard lies while it is here


def check_streamable(source: Source) -> None:
    """Raise BadInput where two shards would be needed at once."""
    for note in source.notes:
        if UNCOMPARED in note:
            raise BadInput(f"{source.name} cannot be streamed: {note}. Convert it without --stream")


def copy_shards(
    source: Source,
    moves: Sequence[Move],
    step: Path,
    writer: TreeWriter,
    copy: Callable[[Sequence[Move]], list[dict]],
    record: Callable[[Move, dict], None],
    *,
    verify: bool,
    workers: int,
    quiet: bool,
) -> None:
    """Carry moves over, shard by shard. copy writes a group of moves and returns their manifest entries; record notes one
    as finished, which with verify is after it was read back and compared with its shard."""
    room = _room(source, step)
    shutil.rmtree(room, ignore_errors=True)  # of a run that was killed: also where no shard is wanted any more
    shards: dict[Path, list[Move]] = {}
    for move in moves:
        shards.setdefault(move.tensor.file, []).append(move)
    for file, part in shards.items():
        entries: dict[str, dict] = {}

        def carry(group: Sequence[Move], entries=entries) -> None:
            for move, entry in zip(group, copy(group), strict=True):
                entries[move.key] = entry

        with source.hub.holding(file, room, quiet):
            run_all(group_moves(part), carry, workers)
            if verify:
                # So that a reader sees these, and of stacks what other shards hold: no other leaf is there yet.
                writer.finish([*(move.stored.path for move in part), *writer.prepared])
                differences = compare_moves(step, part, workers, lambda _: None, whole=False)
                if differences:
                    raise BadInput("what was read back is not what was meant", differences)
        for move in part:
            record(move, entries[move.key])


def _room(source: Source, step: Path | BucketPath) -> Path:
    """Where a shard lies while it is here: beside the tree, or in the folder for temporary files if that is in a bucket."""
    if not is_remote(step):
        return step / ROOM
    room = source.hub.folder.parent / ROOM
    free = shutil.disk_usage(room.parent).free
    if free < source.hub.largest:
        raise BadInput(
            f"{room} has {in_bytes(free)} free, the largest shard takes {in_bytes(source.hub.largest)}: set TMPDIR to a "
            "larger disk"
        )
    return room


def hash_differences(
    step: Path, moves: Sequence[Move], finished: Mapping[str, dict], workers: int, progress: Callable[[int], None]
) -> list[str]:
    """Read the whole tree again, the shards being gone, and compare it with the hashes taken when it was compared."""
    reader = open_item(step / moves[0].item)
    leaves = reader.leaves  # opened once, before threads ask

    def one(move: Move) -> str | None:
        entry = finished[move.key]
        found = array_sha256(reader, move.leaf.path, entry["chunk_shape"], progress)
        if found != entry["target_sha256"] or leaves[move.leaf.path].dtype.name != entry["dtype"]:
            return f"{move.leaf.path} has sha256 {found}, {entry['target_sha256']} was written"
        return None

    with ThreadPoolExecutor(workers) as pool:
        return [text for text in pool.map(one, moves) if text]
