"""Each known fault of a data loader is caught and named; right loaders of every kind pass; what cannot be shown is said."""

import dataclasses
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import loader, preflight_options, settings
from olmo_parity.parity.loader import LoaderOptions, check_loader, run_loader
from olmo_parity.parity.preflight_options import Preflight

N = 240  # records: divided by 2, 3 and 4 processes in whole batches
STEP = 12  # of them, over all processes


def record(i):
    return {"index": int(i), "tokens": np.arange(i, i + 8)}


def batches(numbers, size, step=0, drop=False):
    """The records of these numbers in batches {index [B], tokens [B, T]}."""
    groups = [numbers[a : a + size] for a in range(0, len(numbers), size)]
    for group in groups[step:]:
        if len(group) == size or not drop:
            rows = [record(i) for i in group]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def shuffled(seed, count=N):
    return np.random.default_rng(seed).permutation(count)


def right(p, n, seed, step):
    return batches(shuffled(seed)[p::n], STEP // n, step)


def check(function, **options):
    return check_loader(function, LoaderOptions(**options))


def kinds(found):
    return [k["kind"] for k in found["kinds"]]


def criterion(found, name):
    return next(c for c in found["criteria"] if c["name"].startswith(name))


# Faults


def sliced_twice(p, n, seed, step):
    return batches(shuffled(seed)[p::n][p::n], 2, step)


def wrapped(p, n, seed, step):
    """A wrapper that knows of processes around a loader that knows of them."""
    return itertools.islice(right(p, n, seed, 0), p + step * n, None, n)


def not_divided(p, n, seed, step):
    return batches(shuffled(seed), 3, step)


def two_and_two(p, n, seed, step):
    """The number of the host taken for the number of the process: pairs see the same."""
    return right(p // 2 * 2, n, seed, step)


def fewer_files(p, n, seed, step):
    files = np.array_split(np.arange(N), 3)
    return batches(np.concatenate([*files[p::n], []]).astype(int), 4, step)


def once_more(p, n, seed, step):
    return right(p, n, seed, max(step - 1, 0))


def one_too_far(p, n, seed, step):
    return right(p, n, seed, step + 1 if step else 0)


def always_from_the_start(p, n, seed, step):
    return right(p, n, seed, 0)


def same_in_every_worker(p, n, seed, step, workers=0):
    mine = shuffled(seed)[p::n]
    return batches(np.repeat(mine, max(workers, 1)), 3, step)


def unseeded(p, n, seed, step):
    return batches(np.random.default_rng().permutation(N)[p::n], 3, step)


def contiguous(p, n, seed, step):
    """Right as long as the number of processes stays: shards are pieces, each shuffled by itself."""
    mine = np.array_split(np.arange(N), n)[p]
    return batches(mine[shuffled(seed, len(mine))], STEP // n, step)


FAULTS = [
    (sliced_twice, {}, "sharded twice"),
    (sliced_twice, {"processes": 2}, "sharded twice"),
    (sliced_twice, {"steps": 5}, "sharded twice"),
    (wrapped, {}, "sharded twice"),
    (not_divided, {}, "not sharded"),
    (not_divided, {"processes": 2, "steps": 4}, "not sharded"),
    (two_and_two, {}, "shared shards"),
    (fewer_files, {}, "starved processes"),
    (once_more, {}, "off by one at a restart"),
    (once_more, {"steps": 6, "resume_at": 4}, "off by one at a restart"),
    (one_too_far, {}, "off by one at a restart"),
    (always_from_the_start, {}, "restart from the beginning"),
    (same_in_every_worker, {"workers": 3}, "same seed in every worker"),
    (unseeded, {}, "another stream every time"),
    (contiguous, {"other_processes": 2}, "gaps or repeats at another process count"),
]


@pytest.mark.parametrize("function, options, kind", FAULTS)
def test_a_planted_fault_fails_and_is_named(function, options, kind):
    found = check(function, **options)
    assert (found["verdict"], kinds(found)[0]) == ("fail", kind), found["decided_by"]
    assert found["decided_by"].startswith(kind)


@pytest.mark.parametrize("function", dict.fromkeys(f for f, o, _ in FAULTS if set(o) & {"workers", "other_processes"}))
def test_the_same_function_passes_where_its_fault_is_not_asked_for(function):
    assert check(function)["verdict"] == "pass"


@pytest.mark.parametrize(
    "options", [{}, {"steps": 5}, {"processes": 1}, {"processes": 3}, {"resume_at": 0}, {"seed": 7}]
)
def test_a_right_loader_passes(options):
    found = check(right, **options)
    assert found["verdict"] == "pass" and not found["kinds"], found["decided_by"]
    assert found["order"]["steps_that_differ"] == 0


def test_a_right_loader_goes_on_with_other_processes_and_in_the_same_order():
    found = check(right, other_processes=2, same_order=True)
    assert found["verdict"] == "pass" and found["restart"]["other_processes_from"] == [10, 10]
    found = check(lambda p, n, seed, step: batches(shuffled(seed)[p::n], 3, step), other_processes=6)
    assert found["verdict"] == "pass" and found["restart"]["other_processes_from"] == [9, 6]


def test_another_order_passes_unless_the_same_is_asked_for():
    found = check(contiguous)
    assert found["verdict"] == "pass" and kinds(found) == ["shuffled within shards only"]
    assert check(contiguous, same_order=True)["verdict"] == "fail"


def test_too_few_steps_to_tell_are_inconclusive():
    found = check(contiguous, steps=3)
    assert found["verdict"] == "inconclusive" and "too short" in found["decided_by"]
    assert criterion(found, "records never seen")["on"] is False


def test_a_record_that_gets_lost_fails_and_a_remainder_does_not():
    def loses(count):
        return lambda p, n, seed, step: batches(shuffled(seed)[: N - count * (n > 1)][p::n], 1, step)

    found = check(loses(4))
    assert found["verdict"] == "fail" and criterion(found, "records never seen")["value"] == 4
    assert check(loses(0))["verdict"] == "pass"

    def drops(p, n, seed, step):
        return batches(shuffled(seed, 1003)[p::n], 8, step, drop=True)

    found = check(drops)
    assert found["verdict"] == "pass" and "8 records are dropped" in " ".join(found["notes"])
    few = check(lambda p, n, seed, step: batches(shuffled(seed, 45)[p::n], 8, step, drop=True))
    assert few["verdict"] == "inconclusive" and "a fault would look the same" in few["decided_by"]


def test_remainders_that_hidden_workers_may_have_dropped_leave_the_missing_records_open():
    def inner(p, n, seed, step, drop=True):
        mine = shuffled(seed, 2000)[p::n]
        made = [
            b for w in range(4) for b in batches(mine[w::4], 8 if n > 1 else 1, 0, drop)
        ]  # 4 workers in each process
        return iter(made[step:])

    found = check(inner)
    assert found["verdict"] == "inconclusive" and "80 of 2000 records are never seen" in found["decided_by"]
    assert check(lambda *a: inner(*a, drop=False))["verdict"] == "pass"

    def told(p, n, seed, step, workers=0):
        mine = shuffled(seed, 2000)[p::n]
        made = [b for w in range(workers or 1) for b in batches(mine[w :: workers or 1], 8 if n > 1 else 1, 0, True)]
        return iter(made[step:])

    assert check(told, workers=4)["verdict"] == "pass"


def test_uneven_processes_are_named():
    found = check(lambda p, n, seed, step: batches(np.split(np.arange(N), [150, 180, 200])[p], 2, step))
    assert kinds(found) == ["uneven processes"] and "process 3" not in found["decided_by"]
    assert "end after 10 to 75 batches" in " ".join(found["notes"])


def test_workers_that_share_a_seed_behind_the_functions_back_are_suspected():
    def inside(p, n, seed, step):
        return batches(np.repeat(shuffled(seed)[p::n], 2), 2, step)

    found = check(inside)
    assert found["verdict"] == "inconclusive" and "share a seed" in found["decided_by"]


def test_repeated_epochs_are_no_repeats():
    def twice(p, n, seed, step):
        mine = [shuffled(seed + epoch)[p::n] for epoch in (0, 1)]
        return batches(np.concatenate(mine), 5, step)

    assert check(twice)["verdict"] == "pass"


# Endless streams


def endless(p, n, seed, step, division=contiguous):
    for epoch in itertools.count():
        for batch in division(p, n, seed, 0):
            if step <= 0:
                yield batch
            step -= 1
        seed += 1
        assert epoch < 1000


@pytest.mark.parametrize("steps", [10, 25, 50])
def test_an_endless_loader_passes_once_every_process_saw_an_epoch(steps):
    found = check(endless, steps=steps)
    assert found["verdict"] == ("pass" if steps > 20 else "inconclusive"), found["decided_by"]
    assert found["coverage"]["compared"] == ("one epoch of an endless stream" if steps > 20 else "the first steps")


def test_an_endless_loader_that_shards_twice_repeats_its_part():
    def part(p, n, seed, step):
        mine = np.array_split(np.arange(N), n)[p]
        mine = np.array_split(mine, n)[p]
        return batches(mine[shuffled(seed, len(mine))], 3, step)

    found = check(lambda *a: endless(*a, division=part), steps=20)
    assert found["verdict"] == "fail" and kinds(found)[0] == "sharded twice"
    assert found["coverage"]["distinct"] == N // 4


def test_an_endless_loader_without_steps_is_refused(monkeypatch):
    monkeypatch.setattr("olmo_parity.parity.loader_simulation.MOST_RECORDS", 1000)
    with pytest.raises(BadInput, match="more than 1,000 records .* give --steps"):
        check(endless)


# Grain and torch


@pytest.fixture
def grain():
    return pytest.importorskip("grain")


class Source:
    def __init__(self, numbers=range(N)):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return record(self.numbers[i])

    def __repr__(self):
        return f"Source({self.numbers})"


class Nameless(Source):
    __repr__ = object.__repr__


def grain_loader(grain, p, n, seed, step, *, sampler_shards=False, source=None, workers=0, options=None):
    source = source or Source()
    shards = {"shard_options": grain.sharding.ShardOptions(p, n)} if sampler_shards else {}
    made = grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(len(source), shuffle=True, num_epochs=1, seed=seed, **shards),
        operations=[grain.transforms.Batch(STEP // n if STEP % n == 0 else 1)],
        worker_count=workers,
        **({} if options is None else {"shard_options": options}),
    )
    return itertools.islice(made, step, None) if step else made


def test_right_grain_pipelines_pass(grain):
    def by_the_loader(p, n, seed, step):
        return grain_loader(grain, p, n, seed, step, options=grain.sharding.ShardByJaxProcess())

    def by_the_sampler(p, n, seed, step):
        return grain_loader(grain, p, n, seed, step, sampler_shards=True)

    def map_dataset(p, n, seed, step):
        return grain.MapDataset.source(Source()).shuffle(seed=seed)[p::n].batch(STEP // n)[step:]

    def iter_dataset(p, n, seed, step):
        made = iter(grain.MapDataset.source(Source()).shuffle(seed=seed)[p::n].to_iter_dataset().batch(STEP // n))
        for _ in range(step):
            next(made)
        return made

    def repeated(p, n, seed, step):
        return grain.MapDataset.source(Source()).shuffle(seed=seed)[p::n].repeat().batch(STEP // n)[step:]

    for function, options in (
        (by_the_loader, {"other_processes": 2}),
        (by_the_sampler, {}),
        (map_dataset, {"other_processes": 3}),
        (iter_dataset, {}),
        (repeated, {"steps": 30}),
    ):
        found = check(function, **options)
        assert found["verdict"] == "pass", (function.__name__, found["decided_by"])
        restored = criterion(found, "batches that differ after the state")
        assert restored["on"] and restored["value"] == 0, function.__name__
    assert kinds(check(by_the_sampler)) == ["shuffled within shards only"]  # that is how Grain's sampler does it


def test_a_state_that_the_loader_itself_refuses_is_said(grain):
    found = check(lambda *a: grain_loader(grain, *a, source=Nameless(), options=grain.sharding.ShardByJaxProcess()))
    assert found["verdict"] == "pass" and not criterion(found, "batches that differ after the state")["on"]
    assert any("refuses its own saved state" in n and "DataSource" in n for n in found["notes"])


def test_grain_that_divides_twice_is_named(grain):
    def slice_and_sampler(p, n, seed, step):
        return grain_loader(grain, p, n, seed, step, sampler_shards=True, source=Source(range(N)[p::n]))

    def slice_and_jax_process(p, n, seed, step):
        options = grain.sharding.ShardByJaxProcess()
        return grain_loader(grain, p, n, seed, step, source=Source(range(N)[p::n]), options=options)

    for function in (slice_and_sampler, slice_and_jax_process):
        found = check(function)
        assert (found["verdict"], kinds(found)) == ("fail", ["sharded twice"])
        assert "60 of 240 records, 1 of 4" in found["decided_by"]


def test_grain_whose_sampler_alone_is_divided_is_named(grain):
    def mismatched(p, n, seed, step):
        return grain_loader(grain, p, n, seed, step, sampler_shards=True, options=grain.sharding.NoSharding())

    found = check(mismatched)
    assert (found["verdict"], kinds(found)) == ("fail", ["sharded by the sampler alone"])


def test_a_saved_state_that_is_off_by_one_fails():
    class Stateful:
        def __init__(self, made, ahead):
            self.made, self.ahead, self.at = list(made), ahead, 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == len(self.made):
                raise StopIteration
            self.at += 1
            return self.made[self.at - 1]

        def get_state(self):
            return self.at + self.ahead

        def set_state(self, at):
            self.at = at

    found = check(lambda p, n, seed, step: Stateful(right(p, n, seed, step), 0))
    assert found["verdict"] == "pass"
    found = check(lambda p, n, seed, step: Stateful(right(p, n, seed, step), 1))  # what was prefetched counts as seen
    assert found["verdict"] == "fail" and kinds(found) == ["off by one at a restart"]
    assert "one batch is left out" in found["decided_by"] and "saved state" in found["decided_by"]


def test_torch_loaders_and_tensors(tmp_path):
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return {"input_ids": torch.arange(i, i + 4), "scale": torch.ones(2, dtype=torch.bfloat16)}

    def loading(p, n, seed, step, twice=False):
        sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=n, rank=p, seed=seed)
        made = torch.utils.data.DataLoader(Rows(), batch_size=STEP // n, sampler=sampler)
        return itertools.islice(made, p * twice + step * (n if twice else 1), None, n if twice else 1)

    assert check(loading)["verdict"] == "pass"
    assert kinds(check(lambda *a: loading(*a, twice=True)))[0] == "sharded twice"


# What tells records apart


@dataclasses.dataclass
class Row:
    tokens: list


FORMS = {
    "numbers": lambda i: i,
    "text": lambda i: f"document {i}",
    "bytes": lambda i: b"document %d" % i,
    "lists": lambda i: [i, i + 1, 5],
    "arrays": lambda i: np.arange(i, i + 3, dtype=np.uint16),
    "pairs": lambda i: (np.arange(i, i + 3), np.ones(3)),
    "dataclasses": lambda i: Row([i, 7]),
    "nested": lambda i: {"inputs": {"tokens": np.arange(i, i + 3)}, "meta": {"document_id": f"d{i}"}, "rng": object()},
    "batches of text": lambda i: {"text": [f"a{i}", f"b{i}"]},
    "ragged batches": lambda i: {"tokens": [[i], [i, i]]},
    "lists of records": lambda i: [{"id": f"x{i}", "tokens": [1]}, {"id": f"y{i}", "tokens": [1]}],
    "one id over rows": lambda i: {"id": i, "tokens": np.full((3, 4), i) + np.arange(3)[:, None]},
    "unnamed batches": lambda i: {"x": np.full((2, 4), i) + 1000 * np.arange(2)[:, None], "y": np.zeros(2)},
    "a place within the shard": None,
}


@pytest.mark.parametrize("form", FORMS)
def test_records_of_any_form_are_told_apart(form):
    def made(numbers):
        if form == "a place within the shard":
            return ({"index": place, "tokens": [i]} for place, i in enumerate(numbers))
        return map(FORMS[form], numbers)

    def function(p, n, seed, step, division=lambda all_, p, n: all_[p::n]):
        return itertools.islice(made(division(shuffled(seed, 96).tolist(), p, n)), step, None)

    assert check(function)["verdict"] == "pass"
    found = check(lambda *a: function(*a, division=lambda all_, p, n: all_[p::n][p::n]))
    assert (found["verdict"], kinds(found)[0]) == ("fail", "sharded twice")
    found = check(lambda *a: function(*a, division=lambda all_, p, n: all_))
    assert (found["verdict"], kinds(found)[0]) == ("fail", "not sharded")


def test_jax_arrays_are_told_apart_too():
    jnp = pytest.importorskip("jax.numpy")
    found = check(lambda p, n, seed, step: (jnp.arange(i, i + 4) for i in range(p + n * step, 24, n)))
    assert found["verdict"] == "pass" and found["coverage"]["distinct"] == 24


def test_equal_documents_of_the_data_are_no_repeats():
    def some(p, n, seed, step, division=slice):
        numbers = shuffled(seed)[division(p, None, n)][step:]
        return ([7] if i < 20 else [int(i), 1] for i in numbers)

    found = check(some)
    assert found["verdict"] == "pass" and "19 of the single-process run's 240 records come again" in " ".join(
        found["notes"]
    )
    assert check(lambda *a: some(*a, division=lambda p, _, n: slice(None)))["verdict"] == "fail"


def test_a_few_equal_documents_in_few_steps_are_not_held_against_the_loader():
    def pieces(p, n, seed, step):
        return ([0] if i % 60 == 5 else [int(i), 1] for i in np.array_split(np.arange(N), n)[p][step:])

    found = check(pieces, steps=10)
    assert found["coverage"]["repeated"] == 2 and found["verdict"] == "inconclusive"  # two are expected


def test_changed_contents_are_judged_by_id_and_without_ids_left_open():
    def cropped(p, n, seed, step, ids=True):
        draw = np.random.default_rng((seed, p, n))
        rows = [(i, np.arange(i, i + 9)[draw.integers(0, 3) :]) for i in shuffled(seed)[p::n]]
        return ({"id": int(i), "tokens": t} if ids else t for i, t in rows[step:])

    found = check(cropped)
    assert found["verdict"] == "pass" and found["identity"]["contents_vary"]
    assert check(lambda *a: cropped(*a, ids=False))["verdict"] == "inconclusive"


# Packing


def documents(seed):
    draw = np.random.default_rng(3)
    lengths = draw.integers(3, 30, 400)
    return [np.random.default_rng((3, i)).integers(1, 500, lengths[i]) for i in shuffled(seed, 400)]


def joined(p, n, seed, step, mine=None):
    """Documents joined and cut into rows of 64 tokens: other rows in every process."""
    text = np.concatenate(documents(seed)[p::n] if mine is None else mine(documents(seed), p, n))
    return (text[a : a + 64] for a in range(64 * step, len(text) - 63, 64))


def test_packed_rows_are_judged_by_their_tokens():
    found = check(joined)
    assert found["verdict"] == "pass" and "by token counts" in found["decided_by"]
    found = check(lambda *a: joined(*a, mine=lambda d, p, n: d[p::n][p::n]))
    assert (found["verdict"], kinds(found)) == ("fail", ["sharded twice"])
    found = check(lambda *a: joined(*a, mine=lambda d, p, n: d))
    assert (found["verdict"], kinds(found)[0]) == ("fail", "not sharded")
    found = check(lambda *a: joined(*a, mine=lambda d, p, n: d[p : 340 if n > 1 else 400 : n]))
    assert found["verdict"] == "inconclusive" and "too seldom" in found["decided_by"]
    assert check(joined, steps=3)["verdict"] == "inconclusive"


def test_packed_rows_with_segment_ids_are_judged_by_document():
    def packed(p, n, seed, step, mine=lambda d, p, n: d[p::n]):
        rows, room = [], 0
        for document in mine(documents(seed), p, n):
            if len(document) > room:
                rows.append({"inputs": np.zeros(64, int), "inputs_segmentation": np.zeros(64, int)})
                room = 64
            at, row = 64 - room, rows[-1]
            row["inputs"][at : at + len(document)] = document
            row["inputs_segmentation"][at : at + len(document)] = row["inputs_segmentation"].max() + 1
            room -= len(document)
        return iter(rows[step:])

    found = check(packed)
    assert found["verdict"] == "pass" and found["coverage"]["expected"] == 400
    more = check(lambda *a: packed(*a, mine=lambda d, p, n: [*d[p::n], *d[:1]] if n > 1 else d))
    assert more["verdict"] == "fail" and more["coverage"]["repeated"] == 4


# Bad input


def bad(text):
    def function(p, n, seed, step):
        if text == "raises":
            raise RuntimeError("no such bucket")
        if text == "raises later":
            yield from right(p, n, seed, step)
            raise RuntimeError("lost connection")
        if text == "nothing":
            return
        yield {"None": None, "empty": {}, "object": object(), "other": record(1) if step or p else [1, 2]}[text]

    return function


@pytest.mark.parametrize(
    "function, said",
    [
        (bad("raises"), "batch 0 raised.*no such bucket"),
        (bad("raises later"), "process 0 of 4, batch 20 raised.*lost connection"),
        (bad("nothing"), "no records to any of 4 processes"),
        (bad("None"), "cannot be split into records: it is a NoneType"),
        (bad("empty"), "it is a dict"),
        (bad("object"), "records cannot be told apart"),
        (bad("other"), "another structure"),
        (lambda p, n, seed, step: 3, "gave a int for process 0"),
        (lambda p, n: iter([]), r"must take \(process_index, process_count, seed, step\)"),
        (lambda p, n, seed, step: 1 / 0, "the loader function raised for process 0 of 4.*ZeroDivisionError"),
    ],
)
def test_what_cannot_be_a_loader_is_refused_with_the_place(function, said):
    with pytest.raises(BadInput, match="(?s)" + said):
        check(function)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"steps": 1}, "2 or more"),
        ({"processes": 0}, "1 or more"),
        ({"workers": 2}, "no parameter named workers"),
        ({"resume_at": 21}, "the shortest of 4 processes has 20 batches"),
        ({"resume_at": 0, "other_processes": 2}, "leave --resume-at 0 out"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(BadInput, match=said):
        check(right, **options)


def test_a_restart_between_whole_steps_of_other_processes_is_refused():
    function = lambda p, n, seed, step: batches(shuffled(seed)[p::n], 3, step)  # noqa: E731
    with pytest.raises(BadInput, match="a multiple of 3 steps"):
        check(function, other_processes=3, resume_at=4)


# In a process of its own


CHILD = """
import random, time
def by_a_set(p, n, seed, step):
    return list({f"record {i}" for i in range(60)})[p::n][step:]
def right(p, n, seed, step):
    return range(p + n * step, 60, n)
def hangs(p, n, seed, step):
    for i in range(p, 60, n):
        if p == 1 and i > 20:
            time.sleep(600)
        yield i
def dies(p, n, seed, step):
    import os
    os._exit(3)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_loader.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)


def test_an_order_that_follows_a_set_is_another_on_every_host(module):
    found = run_loader("user_loader:by_a_set")
    assert (found["verdict"], kinds(found)[0]) == ("fail", "another stream every time")


def test_a_loader_that_hangs_or_dies_ends_in_a_sentence_with_the_place(module):
    started = time.monotonic()
    with pytest.raises(BadInput, match="hangs: nothing came for 2 seconds at process 1 of 4, batch 5"):
        run_loader("user_loader:hangs", LoaderOptions(patience=2))
    assert time.monotonic() - started < 20
    with pytest.raises(BadInput, match="exit code 3"):
        run_loader("user_loader:dies")
    with pytest.raises(BadInput, match="loader function user_loader:nothing: .* has no nothing"):
        run_loader("user_loader:nothing")


def test_the_example_and_the_command(grain, tmp_path, monkeypatch, capsys):
    from olmo_parity import cli

    monkeypatch.chdir(Path(__file__).parents[2] / "examples")
    monkeypatch.syspath_prepend(os.getcwd())
    import loaders

    assert check(loaders.map_dataset, processes=8, other_processes=4)["verdict"] == "pass"
    assert check(loaders.data_loader, processes=8)["verdict"] == "pass"
    report = tmp_path / "loader.json"
    arguments = ["olmo-parity", "loader", "loaders:sharded_twice", "--processes", "8", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.parity_main()
    said = capsys.readouterr().out
    assert ended.value.code == 1 and "FAIL  loader: sharded twice: all processes together see 64 of 512" in said
    assert json.loads(report.read_text())["stage"] == loader.STAGE


def test_the_stage_of_preflight_takes_its_table(module):
    Path("parity.toml").write_text('[preflight.loader]\nfunction = "user_loader:right"\nprocesses = 2\nresume_at = 0\n')
    found = settings.load(None, False)
    done = loader.run_stage(Preflight(settings=found), lambda _: None)
    assert (done["stage"], done["verdict"]) == ("loader", "pass") and len(done["processes"]) == 2
    assert done["function"]["name"] == "user_loader:right" and len(done["function"]["sha256"]) == 64
    nothing = loader.run_stage(Preflight(), lambda _: None)
    assert nothing["verdict"] == "not run" and "[preflight.loader]" in nothing["decided_by"]
    for text, said in (
        ("processes = 2", "no loader is named"),
        ('function = "a:b"\nprocess = 2', "unknown key 'process'"),
    ):
        Path("parity.toml").write_text(f"[preflight.loader]\n{text}\n")
        with pytest.raises(BadInput, match="(?s)" + re.escape(said)):
            preflight_options.choose({}, settings.load(None, False))
