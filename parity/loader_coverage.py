"""What all processes together see of a data set, counted against the single-process run of the same loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .loader_simulation import Streams
from .loader_streams import Stream

SHARED = 0.95  # of the records are the single-process run's too where what tells them apart is of the data: remainders may not be
EQUAL_DOCUMENTS = (
    0.1  # of the records: so many may come twice in the data itself, whatever the single-process run's start shows
)
STRIDE_RECORDS = 8  # of every process, at one distance from each other: no accident
WHOLE, EPOCHS, FIRST = "a whole epoch", "one epoch of an endless stream", "the first steps"


@dataclass(frozen=True)
class Identity:
    """How records are told apart: keys are codes, equal for equal records."""

    by: str  # "id" or "content"
    contents_vary: bool = False  # the same id comes with different contents
    note: str = ""

    def keys(self, stream: Stream) -> np.ndarray:
        return stream.ids if self.by == "id" else stream.contents


@dataclass(frozen=True)
class Coverage:
    """Counts of records. missing is None where so few steps cannot show it."""

    compared: str  # WHOLE, EPOCHS or FIRST
    expected: int | None  # of the single-process run; None where so few steps cannot say
    seen: int  # by all processes together
    distinct: int  # of these
    repeated: int  # seen more often than the single-process run sees them
    may_repeat: int  # equal documents that the single-process run may hold further on
    missing: int | None  # seen less often
    unexpected: int  # that the single-process run does not see
    may_miss: int  # remainders of batches, and of shards made equally long
    may_exceed: int  # remainders that the single-process run dropped
    examples: dict[str, list[int]]  # keys of some repeated, missing and unexpected ones
    shared: tuple[int, ...]  # of each process's distinct records, how many another process sees too
    same_as_first: bool  # the same records as the single-process run's first so many
    skipped: float | None  # of the records between those seen, where every process takes one in so many


def choose_identity(streams: Streams) -> Identity:
    """By id where ids are what they say; by content otherwise. An id may be a place within the shard, a document of several
    records, or a name made by each process."""
    single, many = streams.found["single",], streams.all("process")
    if any((s.ids < 0).any() for s in (single, *many)):
        return Identity("content", note="records have no ids, so contents tell them apart")
    ids = np.concatenate([single.ids, *(s.ids for s in many)])
    contents = np.concatenate([single.contents, *(s.contents for s in many)])
    pairs = np.unique(np.stack([ids, contents]), axis=1)
    several = len(pairs[0]) > len(np.unique(ids))  # contents of one id
    placed = {name: _placed(getattr(single, name), [getattr(s, name) for s in many]) for name in ("ids", "contents")}
    if not several:
        if placed["ids"] < SHARED <= placed["contents"]:
            return Identity("content", note="ids are made by each process, so contents tell records apart")
        return Identity("id")
    if placed["contents"] >= SHARED:
        note = "one id stands for several contents (a place within the shard, or a document), so contents tell records apart"
        return Identity("content", note=note)
    return Identity(
        "id", contents_vary=True, note="records of one id come with different contents, as if changed at random"
    )


def _placed(single: np.ndarray, many: list[np.ndarray]) -> float:
    """Share of the records that the single-process run has too."""
    all_keys = np.concatenate(many)
    return float(np.isin(all_keys, single).mean()) if len(all_keys) else 1.0


def coverage(streams: Streams, identity: Identity, workers: int) -> Coverage:
    """Count what all processes saw against the single-process run: over whole epochs where there are some, else as far as
    the streams go."""
    single, many = streams.found["single",], streams.all("process")
    truth, parts = identity.keys(single), [identity.keys(s) for s in many]
    seen = np.concatenate(parts)
    size = len(streams.labels)
    same_as_first = len(truth) >= len(seen) > 0 and np.array_equal(np.sort(truth[: len(seen)]), np.sort(seen))
    lengths = [epoch_length(k, s.ended) for k, s in zip([truth, *parts], [single, *many], strict=True)]
    compared, missing_known, skipped = FIRST, True, None
    if single.ended and all(s.ended for s in many):
        compared = WHOLE
    elif same_as_first and not all(s.ended for s in many):
        truth = truth[: len(seen)]
    elif all(length is not None for length in lengths):
        compared, truth = EPOCHS, truth[: lengths[0]]
        parts = [k[:n] for k, n in zip(parts, lengths[1:], strict=True)]
    else:
        missing_known, skipped = False, _skipped(truth, parts)
        truth = truth if lengths[0] is None else truth[: lengths[0]]
    seen = np.concatenate(parts)
    expected, counts = np.bincount(truth, minlength=size), np.bincount(seen, minlength=size)
    allowed = np.maximum(expected, 1)  # one that the single-process run has not given yet, or dropped, may come once
    if not missing_known and lengths[0] and len(seen) > lengths[0]:
        allowed = allowed * (-(-len(seen) // lengths[0]) + 1)  # some processes are an epoch further than others
    surplus, lack = np.maximum(counts - allowed, 0), np.maximum(expected - counts, 0)
    strange = (counts > 0) & (expected == 0)
    known = missing_known or single.ended
    batch = whole_batches([single])
    hidden = (batch - 1) * max(single.workers, 1) if batch else 0
    may_repeat = 0
    if not missing_known and not single.ended and identity.by == "content":
        start = truth[: len(seen)]
        may_repeat = int((EQUAL_DOCUMENTS + 2 * (1 - len(np.unique(start)) / max(len(start), 1))) * len(seen))
    owners = np.bincount(np.concatenate([np.unique(k) for k in parts]), minlength=size)
    return Coverage(
        compared=compared,
        expected=len(truth) if missing_known else None,
        seen=len(seen),
        distinct=int((counts > 0).sum()),
        repeated=int(surplus.sum()),
        may_repeat=may_repeat,
        missing=int(lack.sum()) if missing_known else None,
        unexpected=int(strange.sum()) if known else 0,
        may_miss=may_miss(many, len(truth), hidden, workers),
        may_exceed=hidden,
        examples={
            "repeated": np.flatnonzero(surplus)[:5].tolist(),
            "missing": np.flatnonzero(lack)[:5].tolist() if missing_known else [],
            "unexpected": np.flatnonzero(strange)[:5].tolist() if known else [],
        },
        shared=tuple(int((owners[np.unique(k)] > 1).sum()) for k in parts),
        same_as_first=bool(same_as_first),
        skipped=skipped,
    )


def may_miss(streams: list[Stream], expected: int, hidden: int, workers: int) -> int:
    """Records of an epoch that processes may leave out without a fault: what an even division over processes (and workers),
    each of whole batches, leaves over. hidden: as many more the single-process run may have left out itself.

    More are left out where shards are uneven; whether that is all right the counts cannot say.
    """
    batch, equal = whole_batches(streams), len({len(s.ids) for s in streams}) == 1
    epochs = np.arange(expected, expected + hidden + 1)
    shards = len(streams)
    if batch is not None and (batch > 1 or equal):
        shards *= max(workers, *(s.workers for s in streams), 1)
        return int((epochs - epochs // shards // batch * batch * shards).max())
    return int((epochs % shards).max()) if equal else 0


def whole_batches(streams: list[Stream]) -> int | None:
    """The size of every batch, None where there are several: then remainders were kept."""
    sizes = np.unique(np.concatenate([s.sizes for s in streams]))
    return int(sizes[0]) if len(sizes) == 1 else None


def epoch_length(keys: np.ndarray, ended: bool) -> int | None:
    """Records before a stream begins again; all of it where it ends. None where no second epoch can be seen.

    A second epoch: nothing new comes any more, and every so many records hold each of the first ones once.
    """
    if ended:
        return len(keys)
    _, first = np.unique(keys, return_index=True)
    again = np.ones(len(keys), bool)
    again[first] = False
    if not again.any():
        return None
    length = int(again.argmax())
    blocks = [keys[a : a + length] for a in range(0, len(keys), length)]
    whole = len(first) == length and all(len(np.unique(block)) == len(block) for block in blocks)
    return length if whole else None


def _skipped(truth: np.ndarray, parts: list[np.ndarray]) -> float | None:
    """Share of the records between those seen that no process takes, where every process begins by taking them at one distance.

    Taking every N-th of a shard that was every N-th already leaves such gaps. None where there is no such pattern: then so
    few steps show nothing about what comes later.
    """
    _, first = np.unique(truth, return_index=True)
    again = np.ones(len(truth), bool)
    again[first] = False
    truth = truth[: int(again.argmax())] if again.any() else truth  # what comes again has no one place
    place = {int(key): i for i, key in enumerate(truth)}
    taken = []
    for keys in parts:
        at = np.array([place.get(int(key), -1) for key in keys[: len(truth)]])
        even = np.diff(at) == (at[1] - at[0] if len(at) > 1 else 0)
        length = 1 + (int((~even).argmax()) if not even.all() else len(even))
        if length < STRIDE_RECORDS or at[0] < 0 or at[1] - at[0] < 2:
            return None
        taken.append(at[:length])
    seen = np.unique(np.concatenate(taken))
    between = np.unique(np.concatenate([np.arange(at[0], at[-1] + 1) for at in taken]))
    share = 1 - np.isin(between, seen).mean()
    return float(share) if share > 0 else None


def steps_that_differ(streams: Streams, identity: Identity) -> tuple[int, int]:
    """(steps whose records are not the single-process run's at that place, steps compared). Order within a step is free."""
    many = streams.all("process")
    steps = min(len(s.sizes) for s in many)
    many = [s.batches(0, steps) for s in many]
    sizes = np.sum([s.sizes for s in many], axis=0, dtype=np.int64)
    truth = identity.keys(streams.found["single",])[: sizes.sum()]
    step = np.concatenate([np.repeat(np.arange(steps), s.sizes) for s in many])
    found = np.concatenate([identity.keys(s) for s in many])
    found = found[np.lexsort((found, step))]
    step = np.repeat(np.arange(steps), sizes)
    truth = np.pad(truth, (0, len(found) - len(truth)), constant_values=-1)
    truth = truth[np.lexsort((truth, step))]
    return len(np.unique(step[found != truth])), steps


def batches_that_differ(expected: Stream, found: Stream, identity: Identity) -> int:
    """Batches of two streams, one by one, that do not hold the same records in the same order."""
    count = max(len(expected.sizes), len(found.sizes))
    differ = np.zeros(count, bool)
    sizes = [np.pad(s.sizes, (0, count - len(s.sizes)), constant_values=-1) for s in (expected, found)]
    differ |= sizes[0] != sizes[1]
    # A record's place within its batch: where the sizes are equal these lie side by side.
    kept = []
    for stream in (expected, found):
        batch = np.repeat(np.arange(len(stream.sizes)), stream.sizes)
        kept.append((batch[~differ[batch]], identity.keys(stream)[~differ[batch]]))
    (batch, a), (_, b) = kept
    differ[batch[a != b]] = True
    return int(differ.sum())


def restart_shift(stream: Stream, at: int, restarted: Stream, identity: Identity) -> int | None:
    """How many batches too far (too early: below 0) a restarted stream goes on; None where it goes on nowhere in it."""
    if not len(restarted.ids) or not len(stream.ids):
        return None
    starts = np.minimum(np.cumsum(stream.sizes) - stream.sizes, len(stream.ids) - 1)
    likely = np.flatnonzero(identity.keys(stream)[starts] == identity.keys(restarted)[0])
    for batch in sorted(likely.tolist(), key=lambda b: abs(b - at)):
        length = min(len(stream.sizes) - batch, len(restarted.sizes))
        if not batches_that_differ(stream.batches(batch, batch + length), restarted.batches(0, length), identity):
            return batch - at
    return None


def token_counts(streams: Streams) -> tuple[float, float, float] | None:
    """Tokens of all processes together against the single-process run's: (too many, too few, ratio of the totals), the first
    two as shares of its total. None where there are none.

    The one id whose count differs most is left out: where rows are packed it pads them, and how much depends on the rows.
    """
    single, many = streams.found["single",].tokens, [s.tokens for s in streams.all("process")]
    size = max(len(t) for t in (single, *many))
    truth, seen = (np.zeros(size, np.int64) for _ in range(2))
    truth[: len(single)] = single
    for tokens in many:
        seen[: len(tokens)] += tokens
    if np.count_nonzero(truth) < 2:
        return None
    delta = seen - truth
    kept = np.arange(size) != np.abs(delta).argmax()
    total = truth[kept].sum()
    over, under = np.maximum(delta[kept], 0).sum() / total, np.maximum(-delta[kept], 0).sum() / total
    return float(over), float(under), float(seen[kept].sum() / total)
