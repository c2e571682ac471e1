"""Faults of single values, rows and rounding of weights, in the form of tensors.py. Values keep the dtype they are stored in."""

from __future__ import annotations

import math

import numpy as np

from ..batches import built_in
from .places import EMBEDDING

SEED = 20251202


def one_value(name: str, change):
    """change(value) of one value in the middle: the first from there on that is not zero."""

    def planted(c, t):
        flat = t[name].copy().reshape(-1)
        at = flat.size // 2 + int(np.argmax(flat[flat.size // 2 :] != 0))
        flat[at] = change(flat[at])
        return {name: flat.reshape(t[name].shape)}

    return planted


def steps(count: int):
    """So many steps of bfloat16 up, at the value's own size."""

    def change(value):
        size = abs(float(value)) or 1.0
        return float(value) + count * 2.0 ** (math.floor(math.log2(size)) - 7)

    return change


def one_own_step(value):
    """The next larger number of its own dtype."""
    unsigned = np.dtype(f"u{value.itemsize}")
    return (np.asarray(value).view(unsigned) + unsigned.type(1)).view(value.dtype)


def to(value: float):
    return lambda _: value


def sign_turned(value):
    return -value


def neighbours_exchanged(name: str):
    def change(c, t):
        flat = t[name].copy().reshape(-1)
        at = flat.size // 2
        flat[[at, at + 1]] = flat[[at + 1, at]]
        return {name: flat.reshape(t[name].shape)}

    return change


def noise(name: str, size: float):
    """Normal noise of `size` times the root mean square of the values."""

    def change(c, t):
        own = t[name].astype(np.float32)
        drawn = np.random.default_rng(SEED).standard_normal(own.shape, np.float32)
        return {name: (own + np.float32(size) * np.sqrt(np.mean(own**2)) * drawn).astype(t[name].dtype)}

    return change


def used_row(c, t):
    """One row of the embedding, of a token in the built-in sequences, is another's."""
    return _row(c, t, int(built_in(c)[0].tokens[0]))


def unused_row(c, t):
    return _row(c, t, unused_id(c))


def nan_in_unused_row(c, t):
    array = t[EMBEDDING].copy()
    array[unused_id(c), 0] = np.nan
    return {EMBEDDING: array}


def unused_id(c) -> int | None:
    """A token that no built-in sequence holds; None where all occur."""
    unused = np.setdiff1d(np.arange(c.vocab_size), np.concatenate([s.tokens for s in built_in(c)]))
    return int(unused[len(unused) // 2]) if unused.size else None


def _row(c, t, row):
    array = t[EMBEDDING].copy()
    array[row] = array[(row + 1) % len(array)]
    return {EMBEDDING: array}


def row_of_zeros(name: str):
    def change(c, t):
        array = t[name].copy()
        array[len(array) // 2] = 0
        return {name: array}

    return change


def last_rows_lost(name: str):
    """The last tenth of the rows is zero, as where a file was cut."""

    def change(c, t):
        array = t[name].copy()
        array[len(array) - max(1, len(array) // 10) :] = 0
        return {name: array}

    return change


def rounded(dtype, only=lambda name, array: True):
    """Through another dtype and back, to nearest even."""
    return lambda c, t: {n: _through(a, dtype) for n, a in t.items() if only(n, a)}


def only_norms(name, array):
    return array.ndim == 1


def truncated(c, t):
    """To bfloat16 by cutting the lower bits off."""
    bits = {n: a.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000) for n, a in t.items()}
    return {n: b.view(np.float32).astype(t[n].dtype) for n, b in bits.items()}


def small_flushed(c, t):
    """Values under float16's smallest normal number (6.1e-5) are zero."""
    return {n: np.where(np.abs(a.astype(np.float32)) < 2.0**-14, a.dtype.type(0), a) for n, a in t.items()}


def _through(array, dtype):
    with np.errstate(over="ignore"):
        return array.astype(dtype).astype(array.dtype)
