"""Data loaders as olmo-parity loader calls them, right ones and the mistake that cost a published run weeks.

olmo-parity loader loaders:map_dataset --processes 8                                       (from this folder; pip install grain)
olmo-parity loader loaders:sharded_twice --processes 8
"""

import itertools

import grain
import numpy as np

GLOBAL_BATCH = 32  # records a step, over all processes


class Records:
    """Stands for your token files: few records, read by the code of the training run, with an id in each."""

    def __init__(self, numbers=range(512)):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        number = self.numbers[i]
        return {"id": number, "tokens": np.random.default_rng(number).integers(0, 100_278, 64, dtype=np.uint32)}

    def __repr__(self):  # Grain compares it when a saved state is put back
        return f"Records({self.numbers})"


def map_dataset(process_index, process_count, seed, step):
    """Shuffled as a whole, then divided: the records of every step are the same at any number of processes."""
    records = grain.MapDataset.source(Records()).shuffle(seed=seed)
    return records[process_index::process_count].batch(GLOBAL_BATCH // process_count)[step:]


def data_loader(process_index, process_count, seed, step, workers=0):
    """Grain's DataLoader, divided by DataLoader alone. A real restart puts back a saved state; this one counts."""
    loader = grain.DataLoader(
        data_source=Records(),
        sampler=grain.samplers.IndexSampler(len(Records()), shuffle=True, seed=seed, num_epochs=1),
        shard_options=grain.sharding.ShardOptions(process_index, process_count),
        operations=[grain.transforms.Batch(GLOBAL_BATCH // process_count)],
        worker_count=workers,
    )
    return itertools.islice(loader, step, None) if step else iter(loader)


def sharded_twice(process_index, process_count, seed, step):
    """Divided by a slice of the source, and then by the sampler: each process sees 1 of process_count of its own records."""
    mine = Records(range(512)[process_index::process_count])
    shard = grain.sharding.ShardOptions(process_index, process_count)
    loader = grain.DataLoader(
        data_source=mine,
        sampler=grain.samplers.IndexSampler(len(mine), shard_options=shard, shuffle=True, seed=seed, num_epochs=1),
        operations=[grain.transforms.Batch(GLOBAL_BATCH // process_count)],
    )
    return itertools.islice(loader, step, None) if step else iter(loader)
