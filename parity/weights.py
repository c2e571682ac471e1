"""Are the weights of two checkpoints equal, bit for bit, before anything is computed with them?"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..convert import mapping
from ..convert.sources import Source
from ..convert.verify import differing
from .identity import MOST_WORKERS
from .weight_kinds import weight_kinds

SLICE_BYTES = 64 << 20  # read at a time from each side
MOST_KINDS = 8  # weights of which it is said in what way they differ: each is compared with all it could be


def weight_differences(
    reference: Source, candidate: Source, sides: tuple[str, str] = ("the reference", "the candidate")
) -> list[dict]:
    """One entry for every weight whose bits differ, as bit_differences gives them; the first ones say in what way."""
    found = bit_differences(reference, candidate, sides)
    for entry in [e for e in found if e["values"]][:MOST_KINDS]:
        kinds = kinds_of_difference(reference, entry["weight"], candidate.tensors[entry["weight"]].read())
        entry["sentence"] += f"; it {' and '.join(kinds)}" if kinds else ""
    return found


def bit_differences(
    reference: Source, candidate: Source, sides: tuple[str, str] = ("the reference", "the candidate")
) -> list[dict]:
    """One entry for every weight whose bits differ: weight, values (how many differ), first (HF index), sentence.

    Where the candidate is stored in another dtype, the reference is cast to it first (to nearest even, as a conversion
    does). Both are read in HF orientation. sides are their names in sentences.
    """
    found = []
    for name in reference.tensors.keys() | candidate.tensors.keys():
        entry = _compare(name, reference.tensors.get(name), candidate.tensors.get(name), *sides)
        if entry:
            found.append(entry)
    order = {name: i for i, name in enumerate(reference.tensors)}
    return sorted(found, key=lambda e: (order.get(e["weight"], len(order)), e["weight"]))


def kinds_of_difference(reference: Source, name: str, found: np.ndarray) -> list[str]:
    """In what way a weight of the candidate, [out, in] or [width], is another: transposed, another tensor, scaled ...

    The reference's tensor and those it may have been exchanged with are read: of its layer, and of its kind in all layers.
    """
    config = reference.config
    own = next(w for w in mapping.weights(config) if w.hf == name)
    alike = [
        (w.hf, reference.tensors[w.hf].read)
        for w in mapping.weights(config)
        if w.hf != name
        and sorted(w.shape) == sorted(own.shape)
        and (w.layer == own.layer or w.hf.split(".")[3:] == name.split(".")[3:])
    ]
    return weight_kinds(name, reference.tensors[name].read(), found, config, alike)


def nonfinite_weights(source: Source) -> list[str]:
    """A sentence for every weight that holds NaN or infinity.

    Logits alone do not show one in the embedding of a token that no sequence holds, and both sides may be equal in it.
    """

    def one(tensor) -> int:
        step = max(1, SLICE_BYTES * tensor.shape[0] // max(tensor.nbytes, 1))
        parts = (tensor.rows(a, min(a + step, tensor.shape[0])) for a in range(0, tensor.shape[0], step))
        return sum(int(part.size - np.isfinite(part).sum()) for part in parts)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        counts = zip(source.tensors, pool.map(one, source.tensors.values()), strict=True)
        return [f"{name} holds {count} NaN or infinite values" for name, count in counts if count]


def _compare(name: str, a, b, first_side: str, second_side: str) -> dict | None:
    if a is None or b is None:
        side = first_side if a is None else second_side
        return {"weight": name, "values": None, "first": None, "sentence": f"{name} is missing in {side}"}
    if a.shape != b.shape:
        sentence = f"{name} has shape {a.shape} in {first_side}, {b.shape} in {second_side}"
        return {"weight": name, "values": None, "first": None, "sentence": sentence}
    count, first = 0, None
    step = max(1, SLICE_BYTES * a.shape[0] // max(a.nbytes, 1))
    for start in range(0, a.shape[0], step):
        stop = min(start + step, a.shape[0])
        mine, theirs = a.rows(start, stop), b.rows(start, stop)
        here, index = differing(mine if mine.dtype == theirs.dtype else mine.astype(theirs.dtype), theirs)
        if here and first is None:
            first = [index[0] + start, *index[1:]]
            values = (float(mine[index]), float(theirs[index]))
        count += here
    if not count:
        return None
    sentence = (
        f"{name} differs in {count} of {math.prod(a.shape)} values, first at HF index {first}: "
        f"{values[0]:.6g} in {first_side}, {values[1]:.6g} in {second_side}"
    )
    return {"weight": name, "values": count, "first": first, "sentence": sentence}
