"""Safetensors files read without the safetensors package: every header is checked before a tensor is believed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np

from .places import is_remote

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Bits of the dtypes that are recognised but not converted, so that a header's sizes can be checked all the same.
OTHER_BITS = {"F64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
OTHER_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64}
MAX_HEADER = 100 << 20  # bytes; the format's own limit
LFS_POINTER = b"version https://git-lfs"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor of one file. start and stop are byte offsets in the file."""

    name: str
    file: Path
    code: str  # as the header spells the dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def list_folder(folder: Path, faults: list[str], sizes: Mapping[Path, int] | None = None) -> dict[str, Entry]:
    """Every tensor of an HF folder by name: one model.safetensors, or the shards that its index names.

    Appends to faults; a shard that cannot be read is one fault, so that all shards are looked at. sizes: the true length
    of files of which only the header lies there.
    """
    sizes = sizes or {}
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        entries = _list_shards(folder, index, faults, sizes)
        if single.exists() and single.name not in {e.file.name for e in entries.values()}:
            faults.append(
                f"{folder} holds both {SINGLE} and {INDEX}, and the index does not name {SINGLE}: "
                "which of them is the model? Move the other one away"
            )
        return entries
    if single.exists():
        return {entry.name: entry for entry in read_header(single, faults, sizes.get(single))}
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        only = folder / found[0]
        return {entry.name: entry for entry in read_header(only, faults, sizes.get(only))}
    other = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for p in folder.glob(pattern))
    hint = (
        f"found only {', '.join(other[:4])}: save it as safetensors first" if other else "was the download cut short?"
    )
    if found:
        hint = f"{len(found)} .safetensors files lie there, but no index says which tensors belong to the model"
    faults.append(f"{folder} holds neither {SINGLE} nor {INDEX}; {hint}")
    return {}


def read_header(file: Path, faults: list[str], size: int | None = None) -> list[Entry]:
    """The tensors of one file, in the order of their bytes. A damaged file appends faults and gives what can be told.

    size: the file's true length, where only its header lies here.
    """
    if not file.is_file():
        faults.append(f"{file} is {kind_of(file)}, a safetensors file is wanted")
        return []
    size = file.stat().st_size if size is None else size
    with naming(file), file.open("rb") as stream:
        first = stream.read(len(LFS_POINTER))
        if first.startswith(LFS_POINTER):
            faults.append(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` there")
            return []
        if size < 8:
            faults.append(f"{file} has {size} bytes, a safetensors file has at least 8: was the download cut short?")
            return []
        length = int.from_bytes(first[:8], "little")
        if length > size - 8:
            faults.append(
                f"{file}: the header length {length} is larger than the file ({size} bytes): "
                "not a safetensors file, or cut inside its header"
            )
            return []
        if length > MAX_HEADER:
            faults.append(f"{file}: the header length {length} is above the format's limit of {MAX_HEADER} bytes")
            return []
        stream.seek(8)
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        faults.append(f"{file}: the header is not the JSON that the format asks for ({error})")
        return []
    if not isinstance(header, dict):
        faults.append(f"{file}: the header is a {type(header).__name__}, a JSON object is wanted")
        return []
    header.pop("__metadata__", None)
    entries = []
    for name, info in header.items():
        problem, entry = _entry(file, name, info, 8 + length)
        if problem:
            faults.append(f"{name} in {file}: {problem}")
        else:
            entries.append(entry)
    entries.sort(key=lambda e: (e.start, e.stop))
    if len(entries) == len(header):
        _check_offsets(file, entries, 8 + length, size, faults)
    return entries


def read_rows(entry: Entry, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the first axis, by pread into memory of their own: no mapping, so no page is kept."""
    row = (entry.stop - entry.start) // max(entry.shape[0], 1) if entry.shape else entry.stop - entry.start
    out = np.empty((stop - start) * row, np.uint8)
    pread_into(entry.file, entry.start + start * row, out)
    return out.view(dtype).reshape((stop - start, *entry.shape[1:]) if entry.shape else ())


def pread_into(file: Path, offset: int, out: np.ndarray) -> None:
    """Fill out (bytes) from the file. Raises OSError naming the file where it ends early."""
    view = memoryview(out)
    if is_remote(file):
        view[:] = file.read_span(offset, offset + len(view))
        return
    handle = os.open(file, os.O_RDONLY)
    try:
        with naming(file):
            while len(view):
                count = os.preadv(handle, [view[: 1 << 30]], offset)
                if count == 0:
                    raise OSError(5, f"the file ended {len(view)} bytes early: was it changed while it was read?")
                view, offset = view[count:], offset + count
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """A read that fails in the middle (a bad disk) does not say of which file: add it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def kind_of(path: Path) -> str:
    """What is there instead of a file. Opening a pipe would wait for ever."""
    if path.is_dir():
        return "a folder"
    if path.exists():
        return "no regular file"
    return "a dangling symlink" if path.is_symlink() else "missing"


def read_index(index: Path, faults: list[str]) -> dict[str, str]:
    """Which file an index says each tensor is in; empty after appending a fault."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TypeError("weight_map is not an object of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        faults.append(f"{index} is not an index of safetensors shards: {error!r}")
        return {}
    return weight_map


def plain_name(name: str) -> bool:
    """Whether a name stays inside the folder it is put to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _list_shards(folder: Path, index: Path, faults: list[str], sizes: Mapping[Path, int]) -> dict[str, Entry]:
    weight_map = read_index(index, faults)
    entries: dict[str, Entry] = {}
    listed: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, []).append(name)
    for shard, names in sorted(listed.items()):
        if not plain_name(shard):
            faults.append(
                f"{index} maps {names[0]} to {shard}, which leaves the checkpoint folder: refused before opening it"
            )
            continue
        file = folder / shard
        if not file.exists():
            missing = "is a dangling symlink" if file.is_symlink() else "does not exist"
            faults.append(
                f"{file} {missing}, but {INDEX} says that it holds {len(names)} tensors, {names[0]} among them"
            )
            continue
        held = {entry.name: entry for entry in read_header(file, faults, sizes.get(file))}
        for name in names:
            if held and name not in held:
                faults.append(f"{name} is not in {file}, where {INDEX} says it is")
        for name, entry in held.items():
            if name in entries:
                faults.append(
                    f"{name} is stored in two shards, {entries[name].file.name} and {shard}: which one counts?"
                )
            elif name not in weight_map:
                faults.append(f"{name} in {file} is not listed in {INDEX}: does the index belong to these files?")
            entries.setdefault(name, entry)
    return entries


def _entry(file: Path, name: str, info, data_start: int) -> tuple[str | None, Entry | None]:
    try:
        code, shape, (start, stop) = info["dtype"], info["shape"], info["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return f"dtype, shape and data_offsets are wanted, found {info!r}", None
    if not isinstance(code, str):
        return f"dtype is {code!r}, a name is wanted", None
    numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        return f"shape {shape!r} and data_offsets [{start!r}, {stop!r}] must be whole numbers", None
    bits = DTYPES[code].itemsize * 8 if code in DTYPES else OTHER_BITS.get(code)
    wanted = -(-math.prod(shape) * bits // 8) if bits else stop - start
    if stop - start != wanted:
        return f"shape {tuple(shape)} of {code} takes {wanted} bytes, its data_offsets span {stop - start}", None
    return None, Entry(name, file, code, tuple(shape), data_start + start, data_start + stop)


def _check_offsets(file: Path, entries: list[Entry], data_start: int, size: int, faults: list[str]) -> None:
    """The format wants the tensors' bytes side by side, from the header's end to the end of the file."""
    end = data_start
    for entry in entries:
        if entry.start != end:
            what = (
                "overlaps the one before it" if entry.start < end else f"leaves {entry.start - end} bytes unaccounted"
            )
            faults.append(f"{entry.name} in {file}: its data starts at byte {entry.start}, {end} is wanted: it {what}")
            return
        end = entry.stop
    if end > size:
        cut = next(entry for entry in entries if entry.stop > size)
        faults.append(
            f"{file} is cut short: its header describes {end} bytes, it has {size} ({end - size} short). "
            f"The first tensor that is cut is {cut.name}"
        )
    elif end < size:
        faults.append(f"{file} has {size - end} bytes after the last tensor that its header describes")


class _DuplicateError(ValueError):
    """A JSON object that says the same key twice."""


def no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    """For json.loads: two values under one name are refused, readers would not agree on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise _DuplicateError(f"the name {twice!r} occurs twice")
    return found
