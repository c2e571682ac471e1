"""What a data loader yields, split into records that can be told apart: by id, and by a hash of their tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ..olmo_jax.errors import BadInput

# Names of a leaf; the first that occurs counts. An id that turns out to be none (a place within the shard) is seen later.
IDS = (
    "id", "uid", "uuid", "record_id", "example_id", "instance_id", "sample_id", "sequence_id", "global_index", "index",
    "idx", "record_index", "record_key", "key", "document_id", "doc_id",
)  # fmt: skip
TOKENS = ("tokens", "input_ids", "inputs", "input_tokens", "token_ids", "text", "content", "document", "bytes")
SEGMENTS = ("segment_ids", "segmentation", "segments")  # also as an ending: tokens_segment_ids, inputs_segmentation
DIGEST = 16  # bytes: among 2^40 records the chance that any two share a hash is 2^-49
LeafPath = tuple[str, ...]  # names on the way to a leaf within an element


class Record(NamedTuple):
    """One training instance."""

    id: str | None  # as the loader names it
    content: bytes  # hash of its tokens, or of everything but its id where no leaf is called tokens


class Batch(NamedTuple):
    """One element of a loader's stream."""

    records: list[Record]
    tokens: np.ndarray | None  # its token ids, in any shape; None where it holds no whole numbers
    told_by: tuple[str, ...]  # the leaves that tell records apart


def batch_of(element) -> Batch:
    """Split what a loader yields into its records.

    A record is a mapping, tuple, dataclass, array, list of whole numbers, text or bytes; a batch has a leading axis [B, ...]
    in its leaves, or is a list of records. A leaf of segment ids beside the tokens splits packed rows into their documents.
    Raises BadInput for something that holds no data.
    """
    if isinstance(element, list) and all(isinstance(e, (Mapping, tuple)) for e in element):  # also one of no records
        parts = [batch_of(e) for e in element]
        tokens = [p.tokens.reshape(-1) for p in parts if p.tokens is not None]
        records = [r for p in parts for r in p.records]
        return Batch(records, np.concatenate(tokens) if tokens else None, parts[0].told_by if parts else ())
    raw = dict(_leaves(element, ()))
    if not raw:
        raise BadInput(f"it is {_short(element)}; records are wanted: mappings, arrays, lists, text or bytes")
    id_path, token_path = _named(raw, IDS), _named(raw, TOKENS)
    if raw.keys() == {()} and isinstance(raw[()], Integral):
        id_path = ()  # a bare number is the record's own
    content = [p for p in raw if p != id_path] if token_path is None else [token_path]
    leaves = {p: _array(raw[p]) for p in (content or [id_path])}  # anything else may be of a type that nobody reads
    ids = None if id_path is None else _array(raw[id_path])
    told_by = tuple("/".join(p) or "the element itself" for p in ([id_path] if id_path is not None else []) + content)
    tokens = next((v for v in leaves.values() if v.dtype.kind in "iu" and v.size), None)
    segments = _segments(raw, leaves.get(token_path), token_path)
    if segments is not None:
        return Batch(_documents(leaves[token_path], segments), tokens[segments != 0], told_by)
    size = _batch_size(leaves, ids, token_path)
    if size is None:
        return Batch([Record(None if ids is None else _id(ids), _hash(leaves))], tokens, told_by)
    rows = [{p: v[i] if _has_rows(v, size) else v for p, v in leaves.items()} for i in range(size)]
    if ids is None:
        names = [None] * size
    elif ids.ndim and len(ids) == size:
        names = [_id(i) for i in ids]
    else:  # one id over several rows
        names = [f"{_id(ids)}/{i}" for i in range(size)]
    return Batch([Record(name, _hash(row)) for name, row in zip(names, rows, strict=True)], tokens, told_by)


def _leaves(element, path: LeafPath) -> Iterator[tuple[LeafPath, object]]:
    """(path, value) of everything in an element."""
    if isinstance(element, Mapping):
        children = element.items()
    elif hasattr(element, "_asdict"):
        children = element._asdict().items()
    elif dataclasses.is_dataclass(element) and not isinstance(element, type):
        children = ((f.name, getattr(element, f.name)) for f in dataclasses.fields(element))
    elif isinstance(element, tuple) or (isinstance(element, list) and _is_structure(element)):
        children = enumerate(element)
    else:
        if element is not None:
            yield path, element
        return
    for name, child in children:
        yield from _leaves(child, (*path, str(name)))


def _is_structure(element: list) -> bool:
    """Is this list [inputs, targets], each with a batch axis of its own, and not a batch of rows?"""
    return bool(element) and all(getattr(e, "ndim", 0) > 1 for e in element)


def _array(value) -> np.ndarray:
    """A leaf as an array. Text and bytes have no axes; rows of unequal length stand in an array of objects [B]."""
    if isinstance(value, (str, bytes, bytearray)):
        return _objects(value, ())
    if hasattr(value, "detach"):  # torch: with a gradient, on a device, or of a type that NumPy lacks
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if isinstance(value, list):
        lengths = {None if not hasattr(v, "__len__") else len(v) for v in value}
        if len(lengths) > 1 or any(isinstance(v, (str, bytes)) for v in value):
            return _objects([v if isinstance(v, (str, bytes)) else _array(v) for v in value], len(value))
    try:
        return np.asarray(value)
    except Exception as error:  # of the user's own type
        raise BadInput(f"{_short(value)} is no array: {type(error).__name__} {error}") from None


def _objects(values, shape) -> np.ndarray:
    array = np.empty(shape, object)
    if shape == ():
        array[()] = values
    else:
        for index, value in enumerate(values):  # one by one: NumPy would stack rows of equal length
            array[index] = value
    return array


def _named(raw: dict, names: tuple[str, ...]) -> LeafPath | None:
    """The path of the first leaf whose last part is one of names, in their order."""
    return next((p for name in names for p in raw if p and p[-1].lower() == name), None)


def _segments(raw: dict, tokens: np.ndarray | None, token_path: LeafPath | None) -> np.ndarray | None:
    """Document of every token, of the tokens' shape, 0 where there is padding; None where rows are not packed."""
    if tokens is None or tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        return None
    for path, value in raw.items():
        name = path[-1].lower() if path else ""
        if path != token_path and (name in SEGMENTS or name.endswith(tuple(f"_{s}" for s in SEGMENTS))):
            found = _array(value)
            if found.shape == tokens.shape and found.dtype.kind in "iu":
                return found
    return None


def _batch_size(leaves: dict[LeafPath, np.ndarray], ids: np.ndarray | None, token_path: LeafPath | None) -> int | None:
    """B of leaves [B, ...]; None where the element is one record."""
    if token_path is not None:
        tokens = leaves[token_path]
        return len(tokens) if tokens.ndim > (0 if tokens.dtype.kind in "OSU" else 1) else None
    if ids is not None:
        return len(ids) if ids.ndim else None
    if any(v.ndim == 0 for v in leaves.values()) or len({len(v) for v in leaves.values()}) > 1:
        return None
    rows = any(v.ndim > 1 or v.dtype.kind in "OSU" for v in leaves.values())
    return len(next(iter(leaves.values()))) if rows else None


def _has_rows(leaf: np.ndarray, size: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == size


def _documents(tokens: np.ndarray, segments: np.ndarray) -> list[Record]:
    """The documents of packed rows [T] or [B, T], each by the hash of its own tokens; padding (segment 0) is left out."""
    found = []
    for row, ids in zip(np.atleast_2d(tokens), np.atleast_2d(segments), strict=True):
        edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        found += [Record(None, _hash({(): row[a:b]})) for a, b in itertools.pairwise(edges) if b > a and ids[a] != 0]
    return found


def _id(value) -> str:
    value = np.asarray(value).tolist()
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return bytes(value).decode("utf-8", "backslashreplace") if isinstance(value, (bytes, bytearray)) else str(value)


def _hash(leaves: dict[LeafPath, np.ndarray]) -> bytes:
    """Of names, values and shapes. Whole numbers count by value: the same tokens as int32 and int64 are one record."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    for path, leaf in leaves.items():
        digest.update(f"{'/'.join(path)}\0".encode())
        _feed(digest, leaf)
    return digest.digest()


def _feed(digest, value) -> None:
    if isinstance(value, (str, bytes, bytearray)):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        digest.update(b"%d:" % len(data) + data)
        return
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        parts = array.reshape(-1).tolist()
        if array.ndim:
            digest.update(str(array.shape).encode())
        elif not isinstance(parts[0], (str, bytes, bytearray)):
            raise BadInput(f"it holds {_short(parts[0])}, by which records cannot be told apart")
        for part in parts:
            _feed(digest, part)
        return
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array
    digest.update(f"{array.dtype.kind}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def _short(value) -> str:
    text = repr(value)
    return f"a {type(value).__name__}, {text[:57]}..." if len(text) > 60 else f"a {type(value).__name__}, {text}"
