"""What one simulated process gets from a user's data loader, its records kept as numbers."""

from __future__ import annotations

import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..olmo_jax.errors import BadInput
from .loader_records import Batch, batch_of

ARGUMENTS = "(process_index, process_count, seed, step)"
LAST_LINES = 6  # of a traceback of the user's own code
MOST_TOKEN_ID = 1 << 22  # a larger number is no token id


@dataclass(frozen=True)
class Stream:
    """What one process got: records [I] one after another, in batches [K]."""

    ids: np.ndarray  # [I] code of the id, -1 where there is none
    contents: np.ndarray  # [I] code of the content
    sizes: np.ndarray  # [K] records in every batch
    tokens: np.ndarray  # [largest id + 1] how often each token id occurs
    ended: bool  # the loader ended by itself
    workers: int = 0  # worker processes, as far as the loader says

    def batches(self, start: int, stop: int | None = None) -> Stream:
        """Some of its batches; tokens are not counted again."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        sizes = self.sizes[start:stop]
        a, b = ends[min(start, len(self.sizes))], ends[min(start + len(sizes), len(self.sizes))]
        return Stream(self.ids[a:b], self.contents[a:b], sizes, self.tokens[:0], self.ended, self.workers)


class StateRefused(Exception):
    """An iterator does not take the state that another one of the same loader gave."""


class Collector:
    """Calls the user's function as one process or another, and gives every record that comes a number."""

    def __init__(self, function: Callable, seed: int, alive: Callable[[str], None]):
        """alive is told what is being waited for. Raises BadInput where the function cannot be called."""
        self.function, self.seed, self.alive = function, seed, alive
        self.codes: dict[str, int] = {}  # of an id, and of the hash of a content
        self.told_by: tuple[str, ...] = ()
        self.told_first = ""  # by which batch
        try:
            parameters = inspect.signature(function)
        except (TypeError, ValueError):  # one that Python knows nothing about
            parameters = None
        self.takes_workers = parameters is not None and "workers" in parameters.parameters
        try:
            if parameters:
                parameters.bind(0, 1, 0, 0, **self._named(0))
        except TypeError as error:
            raise BadInput(f"the loader function must take {ARGUMENTS}, and may take workers: {error}") from None

    def stream(
        self, index: int, count: int, step: int = 0, *, batches: int | None = None, records: int | None = None,
        seed: int | None = None, workers: int | None = None, restore_at: int | None = None,
    ) -> Stream:  # fmt: skip
        """What process index of count gets from a step on: at most so many batches, and so many records to the next batch.

        restore_at takes so many batches first, and goes on in a second iterator that was given the first one's state.
        """
        arguments = (index, count, self.seed if seed is None else seed, step)
        where = f"process {index} of {count}" + (f" from step {step}" if step else "")
        ids, contents, sizes, tokens, ended = [], [], [], np.zeros(0, np.int64), False
        with _as_process(index, count):
            loader = self._called(where, arguments, workers)
            iterator = _iterator(loader, where)
            if restore_at is not None:
                iterator = self._restored(iterator, restore_at, where, arguments, workers)
            while (batches is None or len(sizes) < batches) and (records is None or len(ids) < records):
                what = f"{where}, batch {(restore_at or step) + len(sizes)}"
                self.alive(what)
                try:
                    element = next(iterator)
                except StopIteration:
                    ended = True
                    break
                except Exception:
                    raise BadInput(f"the loader of {what} raised\n{_last_lines()}") from None
                batch = self._batch(element, what)
                sizes.append(len(batch.records))
                for record in batch.records:
                    ids.append(-1 if record.id is None else self._code(f"id {record.id}"))
                    contents.append(self._code(f"content {record.content.hex()}"))
                if batch.tokens is not None:
                    tokens = _counted(tokens, batch.tokens)
            told = _workers_of(loader)
            _close(iterator)
            del iterator, loader
        return Stream(*(np.asarray(v, np.int64) for v in (ids, contents, sizes)), tokens, ended, told)

    def resumable(self, workers: int | None) -> bool:
        """Has the loader's iterator a state that can be kept and put back?"""
        with _as_process(0, 1):
            iterator = _iterator(self._called("process 0 of 1", (0, 1, self.seed, 0), workers), "process 0 of 1")
            found = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
            _close(iterator)
        return found

    def _named(self, workers: int | None) -> dict:
        return {"workers": workers or 0} if self.takes_workers else {}

    def _called(self, where: str, arguments: tuple, workers: int | None):
        try:
            return self.function(*arguments, **self._named(workers))
        except Exception:
            raise BadInput(f"the loader function raised for {where}\n{_last_lines()}") from None

    def _restored(self, iterator, at: int, where: str, arguments: tuple, workers: int | None) -> Iterator:
        """A second iterator with the state that the first has after so many batches."""
        second = _iterator(self._called(where, arguments, workers), where)
        try:
            for _ in itertools.islice(iterator, at):
                pass
            second.set_state(iterator.get_state())
        except Exception as error:
            raise StateRefused(f"{type(error).__name__}: {error}") from None
        _close(iterator)
        return second

    def _batch(self, element, what: str) -> Batch:
        try:
            batch = batch_of(element)
        except BadInput as error:
            raise BadInput(f"what the loader of {what} gave cannot be split into records: {error}") from None
        if batch.told_by and batch.told_by != self.told_by:
            if self.told_by:
                raise BadInput(
                    f"the loader of {what} gave records of another structure: told apart by {', '.join(batch.told_by)}, "
                    f"those of {self.told_first} by {', '.join(self.told_by)}"
                )
            self.told_by, self.told_first = batch.told_by, what
        return batch

    def _code(self, label: str) -> int:
        return self.codes.setdefault(label, len(self.codes))


def _iterator(loader, where: str) -> Iterator:
    try:
        return iter(loader)
    except Exception as error:
        raise BadInput(
            f"the loader function gave a {type(loader).__name__} for {where}; an iterator, or something to iterate over, "
            f"is wanted: {error}"
        ) from None


def _close(iterator) -> None:
    if hasattr(iterator, "close"):
        iterator.close()


@contextmanager
def _as_process(index: int, count: int) -> Iterator[None]:
    """jax.process_index and jax.process_count, which Grain's ShardByJaxProcess asks, answer for the simulated process."""
    if not {"jax", "grain"} & set(sys.modules):
        yield
        return
    import jax

    before = jax.process_index, jax.process_count
    jax.process_index, jax.process_count = (lambda *_, **__: index), (lambda *_, **__: count)
    try:
        yield
    finally:
        jax.process_index, jax.process_count = before


def _workers_of(loader) -> int:
    """Worker processes of a Grain or torch DataLoader; 0 where it does not say."""
    options = getattr(loader, "multiprocessing_options", None)
    found = getattr(loader if options is None else options, "num_workers", 0)
    return found if isinstance(found, int) else 0


def _counted(counts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """counts [V] with these token ids added; negative ones, which mask a target, are left out."""
    flat = tokens.reshape(-1).astype(np.int64)
    flat = flat[(flat >= 0) & (flat < MOST_TOKEN_ID)]
    new = np.bincount(flat, minlength=len(counts))
    new[: len(counts)] += counts
    return new


def _last_lines() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])
