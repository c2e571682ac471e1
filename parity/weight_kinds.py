"""In what way two tensors of one name differ, where that can be told from their bits (NumPy alone)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from ..olmo_jax.config import Olmo3Config

FEW = 8  # rows, heads or values that are named one by one
PROBE = 4  # rows compared before two whole matrices are
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


def weight_kinds(
    name: str,
    right: np.ndarray,
    found: np.ndarray,
    config: Olmo3Config,
    others: Iterable[tuple[str, Callable[[], np.ndarray]]] = (),
) -> list[str]:
    """Sentences, each of which turns `right` into `found` to the last bit. Empty where they are equal, or no sentence does.

    Both in HF orientation, [out, in] or [width]. `right` is rounded to the dtype of `found` first, as a conversion does.
    others: names of further weights of the same or the transposed shape, and what reads them.
    """
    if right.shape != found.shape:
        return [f"has shape {found.shape}, {right.shape} is wanted"]
    exact = right
    right = _cast(right, found.dtype)
    if _equal(right, found):
        return []
    said: list[str] = []
    if not np.isfinite(found.astype(np.float32)).all():
        count = int((~np.isfinite(found.astype(np.float32))).sum())
        said.append(f"holds NaN or infinity in {count} values")
    if right.ndim == 2:
        said += _turned(name, right, found, config)
    said += [
        f"holds {other}{' transposed' if turned else ''}" for other, read in others for turned in _holds(read, found)
    ]
    said += _arithmetic(exact, right, found)
    return said or _where(right, found)


def _turned(name: str, a: np.ndarray, b: np.ndarray, config: Olmo3Config) -> list[str]:
    said = []
    if a.shape[0] == a.shape[1] and _equal(a.T, b):
        said.append("is transposed")
    kind = name.split(".")[-2]
    if kind in HEADS:
        heads, width = getattr(config, HEADS[kind]), config.head_dim
        x, y = a.reshape(heads, width, -1), b.reshape(heads, width, -1)
        said += _permuted(x, y, "heads")
        interleaved = x.reshape(heads, 2, width // 2, -1).transpose(0, 2, 1, 3).reshape(x.shape)
        halved = x.reshape(heads, width // 2, 2, -1).transpose(0, 2, 1, 3).reshape(x.shape)
        if _equal(interleaved, y):
            said.append("has the halves of every head interleaved, as for rotary embedding of neighbouring dimensions")
        if _equal(halved, y):
            said.append("has the even rows of every head before the odd ones")
        return said or _permuted(a, b, "rows")
    if kind == "o_proj":
        heads = config.num_attention_heads
        x, y = (m.T.reshape(heads, config.head_dim, -1) for m in (a, b))
        said += _permuted(x, y, "heads (columns)")
    return said or _permuted(a, b, "rows") or _permuted(a.T, b.T, "columns")


def _permuted(a: np.ndarray, b: np.ndarray, what: str) -> list[str]:
    """Whether b holds a's entries along the first axis in another order."""
    by_bits: dict[bytes, list[int]] = {}
    for i, row in enumerate(a):
        by_bits.setdefault(np.ascontiguousarray(row).tobytes(), []).append(i)
    order = []
    for row in b:
        at = by_bits.get(np.ascontiguousarray(row).tobytes())
        if not at:
            return []
        order.append(at.pop(0))
    moved = [i for i, j in enumerate(order) if i != j]
    shift = (order[0] - 0) % len(order)
    if len(moved) == 2:
        return [f"has {what} {moved[0]} and {moved[1]} exchanged"]
    if all(j == (i + shift) % len(order) for i, j in enumerate(order)):
        return [f"has its {what} moved on by {len(order) - shift}"]
    shown = ", ".join(map(str, order[:FEW])) + (", ..." if len(order) > FEW else "")
    return [f"has its {what} in another order: {shown}"]


def _holds(read: Callable[[], np.ndarray], found: np.ndarray) -> Iterable[bool]:
    """Whether found is that weight as it is (False) or transposed (True)."""
    other = _cast(read(), found.dtype)
    if other.shape == found.shape and _equal(other[:PROBE], found[:PROBE]) and _equal(other, found):
        yield False
    turned = other.T
    if (
        other.ndim == 2
        and turned.shape == found.shape
        and _equal(turned[:PROBE], found[:PROBE])
        and _equal(turned, found)
    ):
        yield True


def _arithmetic(exact: np.ndarray, right: np.ndarray, found: np.ndarray) -> list[str]:
    """Scaled, offset, rounded: each computed as it would have been, and rounded to the dtype it is stored in."""
    said = []
    if not found.astype(np.float32).any():
        return ["is all zeros"]
    for dtype in (ml_dtypes.bfloat16, np.float16):
        if found.dtype != dtype and _equal(_cast(_cast(exact, np.dtype(dtype)), found.dtype), found):
            said.append(f"was rounded to {np.dtype(dtype).name}")
    x, y = right.astype(np.float64), found.astype(np.float64)
    with np.errstate(all="ignore"):
        used = np.isfinite(x) & np.isfinite(y) & (x != 0)
        if not used.any():
            return said
        # The mean of many rounded quotients is nearer to the factor than any one of them; a round number is tried too.
        factor, offset = float(np.median(y[used] / x[used])), float(np.median((y - x)[used]))
        for value in dict.fromkeys((factor, float(f"{factor:.3g}"))):
            if value not in (0.0, 1.0) and _near(right.astype(np.float64) * value, found):
                said.append(f"is {value:.6g} times what it should be")
                break
        for value in dict.fromkeys((offset, float(f"{offset:.3g}"))):
            if value and _near(right.astype(np.float64) + value, found):
                said.append(f"has {value:.6g} added to every value")
                break
    return said


def _near(guess: np.ndarray, found: np.ndarray) -> bool:
    """Equal to within one step of the dtype found is stored in: where the product was rounded is not known."""
    step = np.spacing(np.abs(guess).astype(np.float32)) if found.dtype == np.float32 else np.abs(guess) * 2.0**-7
    return bool((np.abs(found.astype(np.float64) - guess) <= step).all())


def _where(right: np.ndarray, found: np.ndarray) -> list[str]:
    """Nothing explains it: at least where it is, where that is narrow."""
    wrong = right.view(_bits(right)) != found.view(_bits(found))
    count = int(wrong.sum())
    if count <= FEW:
        places = ", ".join(str([int(i) for i in at]) for at in np.argwhere(wrong))
        return [f"differs in {count} value{'s' if count > 1 else ''}, at HF index {places}"]
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    if right.ndim == 2 and len(rows) <= FEW:
        return [f"differs in the row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}, {count} values"]
    size = np.linalg.norm(found.astype(np.float64) - right.astype(np.float64)) / np.linalg.norm(
        right.astype(np.float64)
    )
    return [f"differs in {count} of {right.size} values, by {size:.3g} of its norm"]


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(array if array.dtype == dtype else array.astype(dtype))


def _bits(array: np.ndarray) -> str:
    return f"u{array.dtype.itemsize}"


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return np.array_equal(a.view(_bits(a)), b.view(_bits(b)))
