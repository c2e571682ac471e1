"""What decides about a data loader, and what its streams leave open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import gate
from .loader_coverage import WHOLE, Coverage, Identity, epoch_length, may_miss, token_counts, whole_batches
from .loader_simulation import LoaderOptions, Streams
from .loader_streams import Stream

LEG = "loader"
ADVICE = "let the function read a smaller source and run a whole epoch"
MOST_DROPPED = 0.05  # of an epoch: what remainders may take before it could hide a fault
MOSTLY_REPEATED = 0.6  # different records over all, of an endless run that has no epochs
OTHER_PROCESSES = "records seen twice or never where other processes go on"
TOKEN_RATIO = 0.4  # |tokens seen / expected - 1| that neither remainders nor padding make


def coverage_criteria(
    streams: Streams, covered: Coverage, by_tokens: bool, identity: Identity
) -> tuple[list[gate.Criterion], list[str]]:
    """What the counts decide, and what they leave open."""
    many = streams.all("process")
    empty = sum(not len(s.ids) for s in many)
    criteria = [gate.count_criterion("processes without records", LEG, empty, "processes")]
    unclear = _single_run_repeats(streams, identity)
    rows = "rows are not those of the single-process run" if by_tokens else ""
    repeated = _counted(
        "records seen more often than in the single-process run", covered.repeated, covered.may_repeat,
        "equal documents further on in the single-process run", rows,
    )  # fmt: skip
    missing = _counted(
        "records never seen", covered.missing, covered.may_miss, "remainders of batches and shards", rows
    )
    strange = _counted(
        "records that the single-process run does not see", covered.unexpected, covered.may_exceed,
        "remainders that the single-process run dropped", rows,
    )  # fmt: skip
    if by_tokens:
        found, reasons = _token_criteria(streams, covered)
        return [*criteria, repeated, missing, strange, *found], unclear + reasons
    if covered.skipped is not None:
        criteria.append(
            gate.Criterion(
                "records left out between those seen", LEG, covered.skipped, 0, "of them",
                "every process takes records at one distance in the single-process order",
            )
        )  # fmt: skip
    elif covered.missing is None:
        unclear.append(f"these streams are too short to show which records never come: {ADVICE}")
    elif covered.missing:
        reason = _remainders(covered, many)
        missing = replace(missing, on=missing.passed or not reason)
        unclear += reason
    judged = [repeated, missing, strange]
    if identity.contents_vary and not all(c.passed for c in judged if c.on):
        judged = [replace(c, on=False) for c in judged]
        unclear.append(f"records cannot be told apart: {identity.note}. Give every record an id that is its own")
    return criteria + judged, unclear


def _remainders(covered: Coverage, many: list[Stream]) -> list[str]:
    """Why the records that never come are neither a fault nor none, in a sentence; empty where counts decide."""
    share, batch = covered.missing / covered.expected, whole_batches(many) or 1
    text = f"{covered.missing} of {covered.expected} records are never seen"
    if covered.missing <= covered.may_miss:
        few = "; remainders take so many, but with so few records a fault would look the same: give a larger source"
        return [text + few] if share > MOST_DROPPED else []
    # Uneven shards, and worker processes that nobody told us of, may each drop a remainder.
    if batch > 1 and (share <= MOST_DROPPED or covered.missing < len(many) * batch):
        return [
            f"{text}, {covered.may_miss} are left over by an even division into whole batches: keep remainders "
            "(drop_remainder=False) to see whether they come"
        ]
    return []


def _counted(name: str, count: int | None, allowed: int, why: str, unread: str) -> gate.Criterion:
    if count is None or unread:
        return gate.count_criterion(name, LEG, 0, "records", unread=unread or "the streams are too short")
    reason = f"{why} may be so many" if allowed else "none may be"
    return gate.Criterion(name, LEG, count, allowed, "records", reason)


def _single_run_repeats(streams: Streams, identity: Identity) -> list[str]:
    """The truth itself may be wrong: a loader whose own workers share a seed gives everything several times as one process."""
    single = streams.found["single",]
    keys = identity.keys(single)
    counts = np.bincount(keys)
    counts = counts[counts > 0]
    length = epoch_length(keys, ended=False)  # several epochs, one after another, are no repeats
    if length is not None or not len(counts) or len(counts) == len(keys):
        return []
    often = counts.min() if single.ended else 0
    if often >= 2 or (not single.ended and len(counts) <= MOSTLY_REPEATED * len(keys)):
        return [
            f"as one process the loader already gives {len(keys):,} records of which {len(counts):,} are different, not one "
            "epoch after another: workers that share a seed look like this. Let the function take workers, which are 0 in "
            "the single-process run"
        ]
    return []


def _token_criteria(streams: Streams, covered: Coverage) -> tuple[list[gate.Criterion], list[str]]:
    """Where records are not comparable, packed ones for instance: how often each token comes, over a whole epoch."""
    name, rows = "tokens of all processes over the single-process run's", "rows are not those of the single-process run"
    counted = token_counts(streams)
    if counted is None or covered.compared != WHOLE:
        why = "they hold no token ids" if counted is None else "the streams do not end"
        criterion = gate.count_criterion(name, LEG, 0, "times", unread=why)
        return [criterion], [
            f"{rows} (packed, or changed at random?), and {why}, so nothing shows that each comes once"
        ]
    over, under, ratio = counted
    criterion = gate.Criterion(
        name, LEG, abs(ratio - 1), TOKEN_RATIO, "of them", "too many or too few; 2 processes that shard twice are 0.5"
    )
    allowed = [
        min(MOST_DROPPED, _one_batch_of(group)) for group in ([streams.found["single",]], streams.all("process"))
    ]
    if over <= allowed[0] and under <= allowed[1]:
        return [criterion], []
    return [criterion], [
        f"{rows} (packed, or changed at random?); by token id {over:.2%} of the single-process run's tokens come too often and "
        f"{under:.2%} too seldom, which remainders do not explain"
    ]


def _one_batch_of(streams: list[Stream]) -> float:
    """The tokens in a batch of every stream, as a share of all: what remainders may take."""
    total = sum(int(s.tokens.sum()) for s in streams)
    last = sum(int(s.tokens.sum()) / len(s.sizes) * max(s.workers, 1) for s in streams if len(s.sizes))
    return last / total if total else 0.0


def repetition_criteria(
    streams: Streams, differing: dict, options: LoaderOptions
) -> tuple[list[gate.Criterion], list[str]]:
    """The same again, after a restart, and in the single-process order."""
    at = streams.facts["resume_at"]
    off = "no restart was asked for" if options.resume_at == 0 else "too few batches" if not at else ""
    state = off or ("" if streams.all("restored") else "the loader's iterator has no get_state and set_state")
    state = "it was refused" if "state_refused" in streams.facts else state
    count = gate.count_criterion
    order = count(
        "steps whose records are not the single-process run's", LEG, differing["steps"], "steps", options.same_order
    )
    criteria = [
        count("batches that differ when the loader runs again", LEG, differing["again"], "batches"),
        count(f"batches that differ after a restart at step {at}", LEG, differing["restart"], "batches", unread=off),
        count(f"batches that differ after the state of step {at} is put back", LEG, differing["restored"], "batches", unread=state),
        order if options.same_order else replace(order, reason="not asked for (--same-order)"),
    ]  # fmt: skip
    left = sum(len(s.sizes) - at for s in streams.all("process"))
    if options.resume_at != 0 and not (at and left):
        return criteria, [
            "there are too few batches to compare any after a restart: give more --steps or a larger source"
        ]
    return criteria, []


def other_processes(
    streams: Streams, identity: Identity, by_tokens: bool, options: LoaderOptions
) -> tuple[list[gate.Criterion], list[str]]:
    """What was seen before a restart and after it with another number of processes, against the single-process run."""
    if "other_processes_from" not in streams.facts:
        return [], []
    ours, _ = streams.facts["other_processes_from"]
    count, name = options.other_processes, OTHER_PROCESSES
    after, single = streams.all("other processes"), streams.found["single",]
    if by_tokens:
        why = "rows are not those of the single-process run"
        return [gate.count_criterion(name, LEG, 0, "records", unread=why)], [f"{name}: not known, {why}"]
    keys = np.concatenate([identity.keys(s) for s in [*(s.batches(0, ours) for s in streams.all("process")), *after]])
    truth = identity.keys(single)
    if np.array_equal(np.sort(truth[: len(keys)]), np.sort(keys)) and not (single.ended and len(keys) < len(truth)):
        return [gate.count_criterion(name, LEG, 0, "records")], []
    size = len(streams.labels)
    expected, counts = np.bincount(truth, minlength=size), np.bincount(keys, minlength=size)
    twice = int(np.maximum(counts - np.maximum(expected, 1), 0).sum())
    if single.ended and all(s.ended for s in after):
        never, allowed = (
            int(np.maximum(expected - counts, 0).sum()),
            may_miss(after, len(truth), 0, options.workers or 1),
        )
        value = twice + max(never - allowed, 0)
        return [gate.count_criterion(name, LEG, value, "records")], []
    criterion = gate.count_criterion(name, LEG, twice, "records")
    return [criterion], [] if twice else [
        f"so few steps do not show whether records are left out where {count} processes go on: {ADVICE}"
    ]
