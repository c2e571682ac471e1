"""One weight from source to tree: read in slices, checked, laid out, hashed and written, never whole in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..olmo_jax.errors import BadInput
from .checkpoint import Tensor
from .layout import cast, non_finite, transposed
from .mapping import SPLIT_AXIS, TRANSPOSED, Place, Weight
from .orbax_io import ITEM
from .orbax_write import Leaf, TreeWriter, chunk_shape, store_errors

SMALL_BYTES = 1 << 20  # leaves up to this size share a commit: each commit waits for the disk (5 ms and more)
GROUP_BYTES = 8 << 20  # held in memory until it is committed


@dataclass(frozen=True)
class Move:
    """One step of a plan: this tensor becomes this leaf.

    leaf is olmo_jax's; in a tree of MaxText's layout it lies at `place`, which may be a part of a leaf.
    """

    weight: Weight
    tensor: Tensor
    leaf: Leaf
    item: str = ITEM  # of the Orbax step
    place: Place | None = None

    @property
    def key(self) -> str:
        """Names the leaf in the whole step."""
        return f"{self.item}/{self.leaf.path}"

    @property
    def turned(self) -> bool:
        return self.weight.layout == TRANSPOSED

    @property
    def shared(self) -> bool:
        """Whether other weights lie in the same stored leaf."""
        return self.place is not None and self.place.block is not None

    @property
    def stored(self) -> Leaf:
        """The leaf as it is stored."""
        place = self.place
        if place is None:
            return self.leaf
        return Leaf(place.path, place.leaf_shape, self.leaf.dtype, place.leaf_chunk(self.leaf.chunk_shape))

    def slices(self) -> Iterator[tuple[int, int]]:
        """HF rows of each chunk of the leaf. A chunk holds whole HF rows: they are the leaf's columns where it is turned."""
        step = self.leaf.chunk_shape[-1 if self.turned else 0]
        for start in range(0, self.tensor.shape[0], step):
            yield start, min(start + step, self.tensor.shape[0])

    def index(self, start: int, stop: int) -> tuple[slice, ...]:
        """Where HF rows [start, stop) lie in the leaf."""
        return (slice(None), slice(start, stop)) if self.turned else (slice(start, stop),)

    def stored_index(self, start: int, stop: int) -> tuple:
        """Where they lie in the stored leaf."""
        index = self.index(start, stop)
        return index if self.place is None else self.place.select(index)[0]


class NonFiniteError(Exception):
    """Tensors hold NaN or infinite values; each fault names one, counts them and locates the first."""

    def __init__(self, faults: list[str]):
        super().__init__("; ".join(faults))
        self.faults = faults


def plan_move(
    weight: Weight,
    tensor: Tensor,
    dtype: np.dtype | None,
    chunk_bytes: int,
    item: str = ITEM,
    prefix: str = "",
    place: Place | None = None,
) -> Move:
    """The leaf that a weight becomes, cut along the axis whose slices are whole rows of the source."""
    dtype = dtype or tensor.dtype
    axis = len(weight.shape) - 1 if weight.layout == TRANSPOSED else 0
    unit = place.shape[axis + 1] if place and SPLIT_AXIS.get(place.split) == axis else 1  # whole heads
    chunk = chunk_shape(weight.jax_shape, axis, dtype.itemsize, chunk_bytes, unit)
    return Move(weight, tensor, Leaf(prefix + weight.jax, weight.jax_shape, dtype, chunk), item, place)


def group_moves(moves: Sequence[Move]) -> list[list[Move]]:
    """Moves that are committed together: large ones alone, small ones (norms) in groups. The largest group comes first,
    so that no worker is left alone with it at the end."""
    groups, small, size = [], [], 0
    for move in sorted(moves, key=lambda move: move.item):
        if small and small[0].item != move.item:  # another item is another store
            groups.append(small)
            small, size = [], 0
        if move.leaf.nbytes > SMALL_BYTES:
            groups.append([move])
            continue
        if size + move.leaf.nbytes > GROUP_BYTES:
            groups.append(small)
            small, size = [], 0
        small.append(move)
        size += move.leaf.nbytes
    groups += [small] if small else []
    return sorted(groups, key=lambda group: -sum(move.leaf.nbytes for move in group))


def run_all(groups: Sequence[Sequence[Move]], action: Callable[[Sequence[Move]], None], workers: int) -> None:
    """Run action on every group, in their order. Non-finite tensors are collected, so that all are named; any other
    error ends the run."""
    faults, stop = [], []

    def one(group: Sequence[Move]) -> None:
        if stop:
            return
        try:
            action(group)
        except NonFiniteError as error:
            faults.extend(error.faults)
        except BaseException:
            stop.append(group)
            raise

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(one, group) for group in groups]:
            done.result()
    if faults:
        raise BadInput("the weights cannot be converted", sorted(faults))


def copy_group(
    moves: Sequence[Move], writers: Mapping[str, TreeWriter], allow_nonfinite: bool, progress: Callable[[int], None]
) -> list[dict]:
    """Carry weights over in one commit of the store; returns their manifest entries.

    Raises NonFiniteError naming every tensor of the group that holds such values.
    """
    with store_errors(writers[moves[0].item].item):
        return _copy_group(moves, writers, allow_nonfinite, progress)


def _copy_group(moves, writers, allow_nonfinite, progress) -> list[dict]:
    transaction = writers[moves[0].item].transaction() if len(moves) > 1 else None
    entries, faults = [], []
    try:
        for move in moves:
            try:
                entries.append(_copy(move, writers[move.item], allow_nonfinite, progress, transaction))
            except NonFiniteError as error:
                faults += error.faults
    finally:
        # Also after an error: TensorStore 0.1.86 crashes the process where a transaction with writes is dropped. Nothing
        # of a group counts until it is in the journal.
        if transaction is not None:
            transaction.commit_sync()
    if faults:
        raise NonFiniteError(faults)
    return entries


def _copy(move: Move, writer: TreeWriter, allow_nonfinite: bool, progress: Callable[[int], None], transaction) -> dict:
    tensor, leaf = move.tensor, move.leaf
    before, after = hashlib.sha256(), hashlib.sha256()
    found = NonFinite()
    store = writer.open(move.stored, transaction) if move.shared else writer.create(move.stored, transaction)
    pending = None
    for start, stop in move.slices():
        rows = tensor.rows(start, stop)
        found.look(rows, start)
        before.update(rows.view(np.uint8))
        kept = cast(rows, leaf.dtype)
        if rows.dtype != leaf.dtype:
            found.look_after_cast(rows, kept, tensor)
        laid = transposed(kept) if move.turned else np.ascontiguousarray(kept)
        after.update(laid.view(np.uint8))
        if pending is not None:
            _finish(pending, transaction)
        if not (found.count and not allow_nonfinite):
            # The slice is not touched again, so the store need not copy it first.
            part = store[move.stored_index(start, stop)]
            pending = part.write(laid.reshape(part.shape), can_reference_source_data_indefinitely=True)
        progress(rows.nbytes)
        del rows, kept, laid
    if pending is not None:
        _finish(pending, transaction)
    if found.count and not allow_nonfinite:
        raise NonFiniteError([found.sentence(tensor)])
    return {
        "source_name": tensor.name,
        "source_file": str(tensor.file),
        "item": move.item,
        "target_path": leaf.path,
        **({"stored": move.place.name} if move.place else {}),
        "layout": move.weight.layout,
        "source_shape": list(tensor.shape),
        "shape": list(leaf.shape),
        "source_dtype": tensor.dtype.name,
        "dtype": leaf.dtype.name,
        "chunk_shape": list(leaf.chunk_shape),
        "source_sha256": before.hexdigest(),
        "target_sha256": after.hexdigest(),
        **({"non_finite": found.count} if found.count else {}),
    }


def _finish(pending, transaction) -> None:
    """Wait until a write is in the store, or, inside a transaction, until it is part of it."""
    (pending if transaction is None else pending.copy).result()


class NonFinite:
    """Counts NaN and infinite values over the slices of one tensor."""

    def __init__(self):
        self.count, self.first = 0, None

    def look(self, rows: np.ndarray, start: int) -> None:
        count, first = non_finite(rows)
        if first is not None and self.first is None:
            self.first = (first[0] + start, *first[1:])
        self.count += count

    def look_after_cast(self, rows: np.ndarray, kept: np.ndarray, tensor: Tensor) -> None:
        """A cast to a narrower range turns large values into infinity: that is no copy of the weight any more."""
        overflowed = non_finite(kept)[0] - non_finite(rows)[0]
        if overflowed:
            raise NonFiniteError(
                [
                    f"{tensor.name} in {tensor.file}: {overflowed} values are beyond the range of {kept.dtype.name} "
                    "and would become infinite. Choose a wider --dtype"
                ]
            )

    def sentence(self, tensor: Tensor) -> str:
        values = "1 non-finite value" if self.count == 1 else f"{self.count} non-finite values"
        return (
            f"{tensor.name} in {tensor.file} has {values} (first at {list(self.first)}). "
            "Pass --allow-nonfinite to copy it bit for bit all the same"
        )
