"""Names for what is wrong with a data loader, where the pattern of counts is a known one."""

from __future__ import annotations

import numpy as np

from .loader_coverage import FIRST, Coverage, Identity, restart_shift, token_counts
from .loader_simulation import LoaderOptions, Streams

NEAR = 0.15  # relative: how near a coverage must be to 1/N to be called that
UNEVEN = 2.0  # the largest process's records over the smallest's


def kinds(
    streams: Streams,
    identity: Identity,
    covered: Coverage,
    by_tokens: bool,
    differing: dict[str, int],
    options: LoaderOptions,
) -> list[dict]:
    """[{kind, sentence}]. differing: by "again", "restart", "restored", the batches that differ; "steps", the
    steps; "other processes", records seen twice or never."""
    many = streams.all("process")
    found = [_empty(many), _same_shard(many, identity, covered)]
    if by_tokens:
        found.append(_by_tokens(streams, options))
    else:
        found += [_sharded_twice(covered, options), _several_times(many, identity, covered, options)]
    found.append(_not_repeatable(streams, identity, differing["again"]))
    for name, what in (("restart", "a restart"), ("restored", "putting the saved state back")):
        found.append(_restart(streams, identity, name, what) if differing[name] else None)
    found.append(_other_processes(streams, differing["other processes"], options))
    found.append(_shuffled_within(streams, identity, covered) if differing["steps"] else None)
    return [{"kind": k, "sentence": s} for k, s in filter(None, found)]


def _empty(many) -> tuple[str, str] | None:
    counts = [len(s.ids) for s in many]
    empty = [p for p, n in enumerate(counts) if not n]
    if empty:
        gets = "gets" if len(empty) == 1 else "get"
        sentence = f"{_processes(empty)} of {len(many)} {gets} no records: are there fewer files than processes?"
        return "starved processes", sentence
    if max(counts) > UNEVEN * min(counts):
        p, q = int(np.argmin(counts)), int(np.argmax(counts))
        return (
            "uneven processes",
            f"process {p} gets {counts[p]:,} records, process {q} {counts[q]:,}: are files dealt out whole?",
        )
    return None


def _same_shard(many, identity: Identity, covered: Coverage) -> tuple[str, str] | None:
    """Processes that see the very same set of records."""
    if not covered.repeated:  # equal documents
        return None
    groups: dict[bytes, list[int]] = {}
    for p, stream in enumerate(many):
        keys = np.unique(identity.keys(stream))
        if len(keys):
            groups.setdefault(keys.tobytes(), []).append(p)
    same = [g for g in groups.values() if len(g) > 1]
    if not same:
        return None
    if len(same[0]) == len(many):
        return "not sharded", f"all {len(many)} processes see the same records"
    return "shared shards", f"{_processes(same[0])} see the same records" + (
        f", and {len(same) - 1} more groups" if same[1:] else ""
    )


def _sharded_twice(covered: Coverage, options: LoaderOptions) -> tuple[str, str] | None:
    count, workers = options.processes, options.workers or 1
    if covered.skipped is not None:
        return "sharded twice", (
            f"every process takes records at one distance in the single-process order, and all together leave out "
            f"{covered.skipped:.0%} of those between"
        )
    if not covered.missing or not covered.distinct:
        return None
    times = covered.expected / covered.distinct
    for shards, what in (
        (count, f"{count} processes"),
        (workers, f"{workers} workers"),
        (count**2, f"{count} processes, three times over"),
    ):
        if shards > 1 and abs(times / shards - 1) <= NEAR and covered.missing > covered.may_miss:
            return "sharded twice", (
                f"all processes together see {covered.distinct:,} of {covered.expected:,} records, 1 of {shards}: the records "
                f"are divided by {what} and then divided again"
            )
    return None


def _several_times(many, identity, covered: Coverage, options: LoaderOptions) -> tuple[str, str] | None:
    """One process sees every record of its own several times."""
    if not covered.repeated:
        return None
    times = set()
    for stream in many:
        _, counts = np.unique(identity.keys(stream), return_counts=True)
        times |= set(counts.tolist())
    if len(times) != 1 or (k := times.pop()) == 1:
        return None
    text = f"every process sees each of its records {k} times"
    if options.workers and k == options.workers:
        return "same seed in every worker", f"{text}, once from each of its {k} workers: they do not divide its shard"
    if k == options.processes:
        return (
            "sharded by the sampler alone",
            f"{text}, as often as there are processes: is what reads the sampler not told of its shards?",
        )
    return "repeated records", text


def _by_tokens(streams: Streams, options: LoaderOptions) -> tuple[str, str] | None:
    counted = token_counts(streams)
    if not counted or options.processes == 1:
        return None
    ratio = counted[2]
    if abs(ratio * options.processes - 1) <= NEAR:
        return (
            "sharded twice",
            f"all processes together see {ratio:.1%} of the single-process run's tokens, 1 of {options.processes}",
        )
    if abs(ratio / options.processes - 1) <= NEAR:
        return "not sharded", f"all processes together see the single-process run's tokens {ratio:.2f} times"
    return None


def _not_repeatable(streams: Streams, identity: Identity, differ: int) -> tuple[str, str] | None:
    if not differ:
        return None
    return "another stream every time", (
        f"{differ} batches differ when the same process runs again with the same seed: something random is not seeded, or "
        "follows the order of a set"
    )


def _restart(streams: Streams, identity: Identity, name: str, what: str) -> tuple[str, str] | None:
    at, shifts = streams.facts["resume_at"], set()
    for key, stream in streams.found.items():
        if key[0] == name:
            shifts.add(restart_shift(streams.found["process", key[1]], at, stream, identity))
    shift = shifts.pop() if len(shifts) == 1 else None
    if shift is None or shift == 0:
        return None
    if shift == -at:
        return "restart from the beginning", f"after {what} at step {at} the stream begins again"
    batches = "batch" if abs(shift) == 1 else f"{abs(shift)} batches"
    done = f"the last {batches} come again" if shift < 0 else f"{batches} are left out"
    done = done.replace("batch come", "batch comes").replace("batch are", "one batch is")
    return "off by one at a restart" if abs(
        shift
    ) == 1 else "restart at another step", f"after {what} at step {at} {done}"


def _other_processes(streams: Streams, wrong: int, options: LoaderOptions) -> tuple[str, str] | None:
    if not wrong:
        return None
    ours, theirs = streams.facts["other_processes_from"]
    return "gaps or repeats at another process count", (
        f"{wrong:,} records come twice or never where {options.other_processes} processes go on at step {theirs} after "
        f"{ours} steps of {options.processes}: what a process reads depends on how many there are"
    )


def _shuffled_within(streams: Streams, identity: Identity, covered: Coverage) -> tuple[str, str] | None:
    """Every process keeps to its own records, whatever the seed, where the single-process run mixes all."""
    if (
        len(streams.all("process")) == 1
        or covered.compared == FIRST
        or covered.repeated
        or covered.missing > covered.may_miss
    ):
        return None
    first, other = streams.found["process", 0], streams.found["other seed", 0]
    single, single_other = streams.found["single",], streams.found["single, other seed",]
    a, b = identity.keys(first), identity.keys(other)
    length = min(len(single.ids), len(single_other.ids))
    mixed = not np.array_equal(identity.keys(single)[:length], identity.keys(single_other)[:length])
    if mixed and not np.array_equal(a, b) and np.array_equal(np.unique(a), np.unique(b)):
        return "shuffled within shards only", (
            "with another seed process 0 sees its same records in another order: records are divided first and shuffled "
            "then, so no epoch mixes those of two processes"
        )
    return None


def seed_changes_nothing(streams: Streams) -> bool:
    a, b = streams.found["single",], streams.found["single, other seed",]
    length = min(len(a.ids), len(b.ids))
    return length > 1 and np.array_equal(a.contents[:length], b.contents[:length])


def _processes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    shown = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
    return f"{len(numbers)} processes ({shown})"
