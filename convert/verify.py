"""verify: two checkpoints bit for bit, or a tree against its own manifest; both read again from the start."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import rope_tables, tables_hash
from .checkpoint import Source, Tensor, read_config
from .checksums import array_sha256, file_checksums, sha256_of_file
from .compare import compare_moves, differing
from .copying import Move
from .layout import cast
from .manifest import MANIFEST, config_hash, read_manifest
from .mapping import weights
from .orbax_io import STEP_FILES, TreeReader, is_tree, open_item, resolve_tree
from .orbax_write import OPTIMIZER, Leaf
from .places import place
from .progress import Progress
from .safetensors_io import DTYPES, list_folder, read_rows
from .sources import CONFIG, ORBAX_CONFIG, check_used, open_source

SLICE_BYTES = 32 << 20  # of each side at once
DTYPE_NAMES = {dtype.name: dtype for dtype in DTYPES.values()}
MANY = 20  # faults of one manifest that are listed
# What verify reads of a manifest's rows.
FILE_ENTRY = {"file": str, "bytes": int, "crc32": str}
HF_ENTRY = {"target_name": str, "target_sha256": str}
ORBAX_ENTRY = {
    "item": str,
    "target_path": str,
    "source_name": str,
    "dtype": str,
    "shape": list,
    "chunk_shape": list,
    "target_sha256": str,
}


@dataclass(frozen=True)
class Verification:
    """What verify found. Equal where differences is empty."""

    source: Path | None  # None where only the manifest was asked
    target: Path
    tensors: int
    bytes: int
    seconds: float
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def verify(
    source: str | Path,
    target: str | Path,
    *,
    model_config: str | Path | None = None,
    allow_unknown_keys: Sequence[str] = (),
    dtype: str | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Verification:
    """Compare two checkpoints of any forms: config, names, shapes, dtypes, and every bit of every tensor.

    Where the target's manifest says that a dtype was asked for, the source is cast the same way first, and a note says so.
    dtype says so for a target without a manifest.
    """
    b = open_source(target, allow_unknown_keys, quiet=quiet, model_config=model_config)
    a = _open_like(source, b, allow_unknown_keys, quiet, model_config)
    check_used(model_config, a, b)
    differences = [
        f"config: {name} is {x!r} in {a.path}, {y!r} in {b.path}" for name, x, y in a.config.differences(b.config)
    ]
    notes = [a.said, b.said]
    asked = _asked_dtype(b) or dtype
    pairs = [(w, a.tensors[w.hf], b.tensors[w.hf]) for w in weights(b.config) if w.hf in a.tensors]
    differences += [f"{w.hf} is missing in {a.path}" for w in weights(b.config) if w.hf not in a.tensors]
    differences += [f"{name} is missing in {b.path}" for name in a.tensors if name not in b.tensors]
    for _, x, y in pairs:
        if x.shape != y.shape:
            differences.append(f"{x.hf} has shape {x.shape} in {a.path}, {y.shape} in {b.path}")
        elif x.dtype != y.dtype and y.dtype.name != asked:
            differences.append(f"{x.hf} is {x.dtype.name} in {a.path}, {y.dtype.name} in {b.path}")
    if asked and any(x.dtype != y.dtype for _, x, y in pairs):
        why = "was cast to {} on request" if _asked_dtype(b) else "is stored in {}"
        notes.append(f"the target {why.format(asked)}: the source was cast the same way before comparing")
    comparable = [
        p for p in pairs if p[1].shape == p[2].shape and (p[1].dtype == p[2].dtype or p[2].dtype.name == asked)
    ]
    workers = workers or min(os.cpu_count() or 1, 4)
    progress = Progress("verifying", sum(x.nbytes for _, x, _ in comparable), quiet)
    count = len(comparable)
    if b.kind == "orbax" and a.kind != "orbax":
        item = resolve_tree(b.path).item
        moves = _moves(item, comparable)
        extra = _moment_moves(a, b)
        differences += compare_moves(item.parent, [*moves, *extra], workers, progress.add)
        count += len(extra)
    else:
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda pair: _compare_tensors(pair[1], pair[2], progress), comparable)
            differences += [text for text in found if text]
    seconds = progress.close()
    return Verification(a.path, b.path, count, progress.done, seconds, tuple(differences), tuple(notes))


def verify_manifest(target: str | Path, *, workers: int | None = None, quiet: bool = False) -> Verification:
    """Compare a converted tree with the hashes in its manifest, without its source: finds any flipped bit.

    An array whose bytes do not decode is a difference too, named like the others.
    """
    folder = place(target)
    if (folder / CONFIG).is_file() and not is_tree(folder):
        return _verify_hf_manifest(folder.absolute(), workers or min(os.cpu_count() or 1, 4), quiet)
    resolved = resolve_tree(target)
    if resolved.step == resolved.item:
        raise BadInput(f"{resolved.said}, and a manifest is of a whole step: name the step that a conversion wrote")
    manifest = _whole_manifest(resolved.step, ORBAX_ENTRY)
    workers = workers or min(os.cpu_count() or 1, 4)
    differences, notes = [], [resolved.said]
    items = sorted({entry["item"] for entry in manifest["tensors"]})
    entries = {(entry["item"], entry["target_path"]): entry for entry in manifest["tensors"]}
    total = sum(math.prod(e["shape"]) * DTYPE_NAMES[e["dtype"]].itemsize for e in entries.values())
    listed = {entry["file"]: entry for entry in manifest["tree_files"]}
    _check_config(resolved.step / ORBAX_CONFIG, manifest, differences)
    names = [*items, *(name for name in STEP_FILES if (resolved.step / name).exists())]
    if listed:
        _check_files(resolved.step, names, listed, workers, differences)
    else:
        notes.append(
            "the files between the arrays were not compared: written to a bucket, the tree has no checksums of them"
        )
    progress = Progress("verifying", total, quiet)
    for item in items:
        reader = open_item(resolved.step / item)
        try:
            found = reader.leaves
        except BadInput as error:
            differences += list(error.faults) or [error.headline]
            found = reader.readable
        planned = {path: entry for (i, path), entry in entries.items() if i == item}
        differences += [f"{path} of {item} is missing" for path in planned if path not in found]
        differences += [f"{path} of {item} is not in the manifest" for path in found if path not in planned]

        def one(path: str, reader=reader, planned=planned) -> str | None:
            return _check_array(reader, path, planned[path], progress)

        with ThreadPoolExecutor(workers) as pool:
            differences += [text for text in pool.map(one, [p for p in planned if p in found]) if text]
    seconds = progress.close()
    return Verification(None, resolved.step, len(entries), progress.done, seconds, tuple(differences), tuple(notes))


def _whole_manifest(folder: Path, entry: Mapping[str, type]) -> dict:
    """The manifest, with everything in it that is looked at here. Raises BadInput naming what is missing or no such thing."""
    manifest = read_manifest(folder)
    faults = [f"{key} is missing" for key in ("config_sha256", "rotary_tables_sha256") if key not in manifest]
    tables = {"tensors": entry, "tree_files": FILE_ENTRY, "carried": {"file": str, "sha256": str}}
    for table, wanted in tables.items():
        rows = manifest.get(table, [] if table == "carried" else None)
        for i, row in enumerate(rows if isinstance(rows, list) else [None]):
            for key, kind in wanted.items():
                value = row.get(key) if isinstance(row, dict) else None
                whole = kind is not list or all(type(n) is int and n >= 0 for n in value or [])
                if not isinstance(value, kind) or not whole or (key == "dtype" and value not in DTYPE_NAMES):
                    faults.append(f"{table}[{i}].{key} is {value!r}")
    if not isinstance(manifest.get("allowed_unknown_keys", []), list):
        faults.append(f"allowed_unknown_keys is {manifest['allowed_unknown_keys']!r}")
    if faults:
        raise BadInput(f"{folder / MANIFEST} is damaged", faults[:MANY])
    return manifest


def _verify_hf_manifest(folder: Path, workers: int, quiet: bool) -> Verification:
    """The same for a folder that orbax2hf wrote."""
    manifest, differences = _whole_manifest(folder, HF_ENTRY), []
    entries = {entry["target_name"]: entry for entry in manifest["tensors"]}
    listed = {entry["file"]: entry for entry in manifest["tree_files"]}
    _check_config(folder / CONFIG, manifest, differences)
    _check_files(folder, [name for name in listed if (folder / name).is_file()], listed, workers, differences)
    faults: list[str] = []
    found = list_folder(folder, faults)
    differences += faults + [f"{name} is missing" for name in entries if name not in found]
    differences += [f"{name} is not in the manifest" for name in found if name not in entries]
    odd = [name for name, entry in found.items() if entry.code not in DTYPES or not entry.shape]
    differences += [f"{name} is {found[name].code} {found[name].shape}, which no conversion writes" for name in odd]
    known = [name for name in entries if name in found and name not in odd and not faults]
    progress = Progress("verifying", sum(found[name].stop - found[name].start for name in known), quiet)

    def one(name: str) -> str | None:
        entry, digest = found[name], hashlib.sha256()
        row = max((entry.stop - entry.start) // max(entry.shape[0], 1), 1)
        step = max(SLICE_BYTES // row, 1)
        for start in range(0, entry.shape[0], step):
            rows = read_rows(entry, DTYPES[entry.code], start, min(start + step, entry.shape[0]))
            digest.update(rows.view(np.uint8))
            progress.add(rows.nbytes)
        if digest.hexdigest() != entries[name]["target_sha256"]:
            return f"{name} in {entry.file} has sha256 {digest.hexdigest()}, the manifest says {entries[name]['target_sha256']}"
        return None

    with ThreadPoolExecutor(workers) as pool:
        differences += [text for text in pool.map(one, known) if text]
    return Verification(None, folder, len(entries), progress.done, progress.close(), tuple(differences), ())


def as_text(result: Verification) -> str:
    """The record for people: verdict first."""
    against = "its manifest" if result.source is None else str(result.source)
    if result.equal:
        verdict = f"equal: {result.tensors} tensors, {result.bytes} bytes compared in {result.seconds:.1f} s"
    else:
        verdict = f"different: {len(result.differences)} differences"
    lines = [f"{verdict} ({result.target} against {against})"]
    lines += [f"  - {text}" for text in result.differences]
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def _open_like(
    source: str | Path,
    target: Source,
    allow_unknown_keys: Sequence[str],
    quiet: bool,
    model_config: str | Path | None,
) -> Source:
    """The source; an OLMo-core one with its padding rows where the target has them too."""
    opened = open_source(source, allow_unknown_keys, quiet=quiet, model_config=model_config)
    if opened.kind == "core" and target.config.vocab_size == opened.padded_vocab_size != opened.config.vocab_size:
        return open_source(source, allow_unknown_keys, vocabulary="keep")
    return opened


def _asked_dtype(target: Source) -> str | None:
    try:
        return read_manifest(target.path).get("dtype")
    except BadInput:
        return None


def _moves(item: Path, pairs) -> list[Move]:
    reader = open_item(item)
    found = []
    for weight, tensor, _ in pairs:
        leaf = reader.leaves[weight.jax]
        found.append(Move(weight, tensor, Leaf(leaf.path, leaf.shape, leaf.dtype, leaf.chunk_shape), reader.item.name))
    return found


def _moment_moves(source: Source, target: Source) -> list[Move]:
    """Adam's moments, where both sides have them."""
    if not source.moments or not (target.path / OPTIMIZER).is_dir():
        return []
    reader = TreeReader(target.path / OPTIMIZER)
    found = []
    for name, moments in source.moments.items():
        for weight in weights(source.config):
            leaf = reader.leaves.get(f"{name}/{weight.jax}")
            if leaf is not None and weight.hf in moments:
                kept = Leaf(leaf.path, leaf.shape, leaf.dtype, leaf.chunk_shape)
                found.append(Move(weight, moments[weight.hf], kept, OPTIMIZER))
    return found


def _compare_tensors(a: Tensor, b: Tensor, progress: Progress) -> str | None:
    step = max(SLICE_BYTES // max(a.nbytes // max(a.shape[0], 1), 1), 1)
    count, first = 0, None
    for start in range(0, a.shape[0], step):
        stop = min(start + step, a.shape[0])
        try:
            x, y = a.rows(start, stop), b.rows(start, stop)
        except BadInput as error:
            return str(error)
        here, index = differing(cast(x, y.dtype), y)
        if here and first is None:
            first = (index[0] + start, *index[1:])
        count += here
        progress.add(x.nbytes)
    return f"{a.hf} differs in {count} values, first at {list(first)}, between {a.file} and {b.file}" if count else None


def _check_array(reader: TreeReader, path: str, entry: dict, progress: Progress) -> str | None:
    leaf = reader.leaf(path)
    if list(leaf.shape) != entry["shape"] or leaf.dtype.name != entry["dtype"]:
        return f"{path} is {leaf.dtype.name} {leaf.shape}, the manifest says {entry['dtype']} {tuple(entry['shape'])}"
    try:
        found = array_sha256(reader, path, entry["chunk_shape"], progress.add)
    except BadInput as error:
        return str(error)
    if found != entry["target_sha256"]:
        return f"{path} ({entry['source_name']}) has sha256 {found}, the manifest says {entry['target_sha256']}"
    return None


def _check_files(step: Path, names: list[str], listed: dict, workers: int, differences: list[str]) -> None:
    found = {e["file"]: e for e in file_checksums(step, names, workers)}
    differences += [f"file {name} is missing" for name in sorted(listed.keys() - found.keys())]
    differences += [f"file {name} is not in the manifest" for name in sorted(found.keys() - listed.keys())]
    for name in sorted(found.keys() & listed.keys()):
        if found[name] != listed[name]:
            was, now = listed[name], found[name]
            differences.append(
                f"file {name} has {now['bytes']} bytes and crc32 {now['crc32']}, the manifest says {was['bytes']} and {was['crc32']}"
            )


def _check_config(file: Path, manifest: dict, differences: list[str]) -> None:
    faults: list[str] = []
    config = read_config(file, manifest.get("allowed_unknown_keys", ()), faults)
    differences += faults
    if config is not None and config_hash(config) != manifest["config_sha256"]:
        rotary = tables_hash(rope_tables(config)) != manifest["rotary_tables_sha256"]
        differences.append(
            f"{file} was edited since the conversion: its hash is not the manifest's"
            + (", and its rotary tables differ" if rotary else "")
        )
    for carried in manifest.get("carried", []):
        beside = file.parent / carried["file"]
        if not beside.is_file() or sha256_of_file(beside) != carried["sha256"]:
            differences.append(f"{beside} is missing or was edited since the conversion")


def as_json(result: Verification) -> str:
    """The record as JSON."""
    record = {**vars(result), "source": result.source and str(result.source), "target": str(result.target)}
    return json.dumps({**record, "equal": result.equal}, indent=1)
