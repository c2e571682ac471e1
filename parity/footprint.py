"""Does the whole model fit into this machine's memory, or must it be run layer by layer?"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from pathlib import Path

from ..convert.mapping import weights
from ..convert.sources import Source
from ..olmo_jax.config import Olmo3Config
from .batches import Sequence

PROCESS = 1 << 30  # bytes: Python with torch or JAX and their threads; measured 0.4 to 0.6 GiB
SHARE = 0.8  # of the available memory that a run may take: the estimate is off by a tenth, and other programs grow
DTYPES = ("float32", "bfloat16")  # of the gate's runs
ITEM = {"float32": 4, "bfloat16": 2}  # bytes
NO_LIMIT = 1 << 60  # version 1 of cgroups says "no limit" with a number near 2^63


def choose_streamed(
    reference: Source | None, candidate: Source | None, sequences: Rows[Sequence], chosen: bool | None
) -> tuple[bool, str | None]:
    """Whether the gate's runs go layer by layer, and the sentence that says why where nobody chose.

    All runs or none, so that the two sides and their noise are made alike. A side that is None is not run by us.
    """
    if chosen is not None:
        return chosen, None
    needs = [reference_bytes(reference.config, sequences, dtype) for dtype in DTYPES if reference]
    needs += [candidate_bytes(candidate, sequences, dtype) for dtype in DTYPES if candidate]
    need, available = max(needs, default=0), available_bytes()
    if need <= SHARE * available:
        return False, None
    return True, (
        f"layer by layer: the whole model would take about {need / 2**30:.1f} GiB, {available / 2**30:.1f} are available"
    )


def reference_bytes(config: Olmo3Config, sequences: Rows[Sequence], dtype: str) -> int:
    """Peak of a whole reference run: weights in dtype, the largest of them twice while it is cast, activations.

    from_pretrained reads tensor by tensor from mapped files, whose pages are not counted: they can be dropped.
    """
    sizes = [math.prod(w.shape) for w in weights(config)]
    return PROCESS + ITEM[dtype] * sum(sizes) + 4 * max(sizes) + _activations(config, sequences, dtype)


def candidate_bytes(candidate: Source, sequences: Rows[Sequence], dtype: str) -> int:
    """Peak of a whole candidate run: the tree as stored and again in dtype, activations.

    On the CPU XLA multiplies bfloat16 in float32, the largest weight included.
    """
    largest = max(math.prod(t.shape) for t in candidate.tensors.values())
    count = sum(math.prod(t.shape) for t in candidate.tensors.values())
    held = candidate.nbytes + ITEM[dtype] * count
    return PROCESS + held + 4 * largest + _activations(candidate.config, sequences, dtype)


def _activations(config: Olmo3Config, sequences: Rows[Sequence], dtype: str) -> int:
    """Of the longest sequence: logits [T, V] in dtype and float32, twice while they are copied; scores [N, T, T] in dtype,
    masked, and their softmax in float32; the MLP's three [T, F]."""
    length = max(len(s.tokens) for s in sequences)
    logits = length * config.vocab_size * (ITEM[dtype] + 8)
    scores = config.num_attention_heads * length**2 * (2 * ITEM[dtype] + 4)
    return logits + scores + 3 * ITEM[dtype] * length * config.intermediate_size


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be taken: MemAvailable, or what the process's control groups leave where that is less.

    root is where /proc and /sys lie. A machine without /proc (macOS) is taken to have enough.
    """
    found = [NO_LIMIT]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            found += _group_limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            found += _group_limits(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(found)


def _group_limits(base: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """What this group and every one above it leaves. In a container the path may be the host's: then base alone counts."""
    group = base / path.strip("/")
    left = []
    for folder in (group, *group.parents):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None and most < NO_LIMIT:
            # Pages of files that were not used lately go before anything else does: they are no use of memory.
            files = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(f"{cache} ")]
            left.append(max(most - used + sum(files), 0))
        if folder == base:
            break
    return left


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or where it says "max"."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
