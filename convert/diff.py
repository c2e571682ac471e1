"""diff: how far two checkpoints of any two forms are apart, tensor by tensor, in slices."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from .checkpoint import Source, Tensor
from .layout import cast
from .mapping import weights
from .progress import Progress
from .sources import check_used, open_source

SLICE_VALUES = 1 << 21  # values of each side at once; they become float64, 16 MiB a piece


@dataclass(frozen=True)
class TensorDiff:
    """One weight on both sides. Distances are over values that are finite on both; None where there are none."""

    name: str  # HF name
    equal: bool  # bit for bit, dtype included
    max_abs: float | None
    relative_l2: float | None  # |b - a| / |a|; infinite where a is all zeros and b is not
    cosine: float | None  # None where a side is all zeros
    nan: tuple[int, int]
    infinite: tuple[int, int]
    dtypes: tuple[str, str]


@dataclass(frozen=True)
class CheckpointDiff:
    """Two checkpoints; tensors sorted by what moved most."""

    a: Source
    b: Source
    tensors: tuple[TensorDiff, ...]
    config: tuple[tuple[str, object, object], ...]
    unmatched: tuple[str, ...]  # names on one side alone, and shapes that differ

    @property
    def equal(self) -> bool:
        return not self.config and not self.unmatched and all(t.equal for t in self.tensors)

    def as_json(self) -> dict:
        """The record as JSON values; infinity becomes the string "inf"."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "equal": self.equal,
            "config": [{"name": n, "a": repr(x), "b": repr(y)} for n, x, y in self.config],
            "unmatched": list(self.unmatched),
            "tensors": [{k: "inf" if v == math.inf else v for k, v in asdict(t).items()} for t in self.tensors],
        }


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model_config: str | Path | None = None,
    allow_unknown_keys: Sequence[str] = (),
    workers: int | None = None,
    quiet: bool = False,
) -> CheckpointDiff:
    """Measure every weight of two checkpoints in float64. Forms and dtypes may differ; shapes must agree to be compared."""
    first, second = (open_source(path, allow_unknown_keys, quiet=quiet, model_config=model_config) for path in (a, b))
    check_used(model_config, first, second)
    names = [w.hf for w in weights(first.config)]
    names += [w.hf for w in weights(second.config) if w.hf not in first.tensors]
    unmatched, pairs = [], []
    for name in names:
        x, y = first.tensors.get(name), second.tensors.get(name)
        if x is None or y is None:
            unmatched.append(f"{name} is only in {first.name if y is None else second.name}")
        elif x.shape != y.shape:
            unmatched.append(f"{name} has shape {x.shape} and {y.shape}")
        else:
            pairs.append((x, y))
    progress = Progress("comparing", sum(x.nbytes for x, _ in pairs), quiet)
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 4)) as pool:
        found = list(pool.map(lambda pair: _measure(*pair, progress), pairs))
    progress.close()
    found.sort(key=lambda t: (-math.inf if t.relative_l2 is None else -t.relative_l2, t.name))
    changes = tuple(first.config.differences(second.config))
    return CheckpointDiff(first, second, tuple(found), changes, tuple(unmatched))


def as_text(record: CheckpointDiff, limit: int | None = None) -> str:
    """A table for people: the tensors that moved, most first."""
    moved = [t for t in record.tensors if not t.equal]
    lines = [
        f"{record.a.name} ({record.a.kind}, {record.a.dtype_name})",
        f"{record.b.name} ({record.b.kind}, {record.b.dtype_name})",
        "equal bit for bit" if record.equal else f"{len(moved)} of {len(record.tensors)} tensors differ",
    ]
    lines += [f"config: {name} is {x!r} and {y!r}" for name, x, y in record.config]
    lines += list(record.unmatched)
    if moved:
        width = max(len(t.name) for t in moved)
        lines.append(
            f"{'weight':<{width}}  {'max |delta|':>11}  {'relative L2':>11}  {'cosine':>10}  NaN and infinite (a, b)"
        )
    for t in moved[:limit]:
        odd = f"{t.nan[0]}+{t.infinite[0]}, {t.nan[1]}+{t.infinite[1]}" if any((*t.nan, *t.infinite)) else ""
        dtypes = f"  {t.dtypes[0]} and {t.dtypes[1]}" if t.dtypes[0] != t.dtypes[1] else ""
        numbers = f"{_number(t.max_abs):>11}  {_number(t.relative_l2):>11}  {_number(t.cosine, 8):>10}"
        lines.append(f"{t.name:<{width}}  {numbers}  {odd}{dtypes}".rstrip())
    if limit is not None and len(moved) > limit:
        lines.append(f"... and {len(moved) - limit} more (--all)")
    return "\n".join(lines)


def _measure(x: Tensor, y: Tensor, progress: Progress) -> TensorDiff:
    step = max(SLICE_VALUES // max(math.prod(x.shape[1:]), 1), 1)
    equal, biggest, finite = x.dtype == y.dtype, 0.0, 0
    delta2 = x2 = y2 = xy = 0.0
    nan, infinite = [0, 0], [0, 0]
    for start in range(0, x.shape[0], step):
        stop = min(start + step, x.shape[0])
        a, b = x.rows(start, stop), y.rows(start, stop)
        progress.add(a.nbytes)
        equal = equal and np.array_equal(a.view(np.uint8), b.view(np.uint8))
        a, b = cast(a, np.dtype(np.float64)).reshape(-1), cast(b, np.dtype(np.float64)).reshape(-1)
        both = np.isfinite(a) & np.isfinite(b)
        if not both.all():
            for side, values in enumerate((a, b)):
                nan[side] += int(np.isnan(values).sum())
                infinite[side] += int(np.isinf(values).sum())
            a, b = a[both], b[both]
        if not a.size:
            continue
        delta = b - a
        finite += a.size
        biggest = max(biggest, float(np.abs(delta).max()))
        delta2, x2, y2, xy = delta2 + delta @ delta, x2 + a @ a, y2 + b @ b, xy + a @ b
    relative = None if not finite else math.sqrt(delta2 / x2) if x2 else (math.inf if delta2 else 0.0)
    cosine = float(xy / math.sqrt(x2 * y2)) if x2 and y2 else None
    distance = biggest if finite else None
    return TensorDiff(
        x.hf, equal, distance, relative, cosine, tuple(nan), tuple(infinite), (x.dtype.name, y.dtype.name)
    )


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
