"""orbax2hf: an Orbax tree back to safetensors and a config.json, slice by slice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from .carry import carried_files, copy_files, tokenizer_faults
from .checkpoint import Source
from .checksums import file_checksums, sha256_of_file
from .compare import compare_moves
from .copying import Move, NonFinite, NonFiniteError, group_moves, run_all
from .hf_config import hf_config
from .layout import transposed
from .manifest import config_hash, make_manifest, write_manifest
from .mapping import weights
from .orbax_io import TREE_FILE, TreeReader, open_item, resolve_tree
from .orbax_write import Leaf
from .pipeline import COPIES, MEMORY
from .places import fingerprint, is_remote
from .progress import Progress
from .record import ConversionRecord
from .safetensors_io import DTYPE_CODES
from .safetensors_write import SHARD_BYTES, Place, create_files, lay_out, sync_files, write_rows
from .sources import CONFIG, check_used, open_source
from .staging import Staging, check_apart, clean_target

SLICE_BYTES = 64 << 20  # most that is read at once from a tree whose chunks are larger


def orbax2hf(
    source: str | Path,
    target: str | Path,
    *,
    transformers: str = "both",
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    model_config: str | Path | None = None,
    allow_unknown_keys: Sequence[str] = (),
    workers: int | None = None,
    quiet: bool = False,
) -> ConversionRecord:
    """Convert an Orbax tree to an HF folder, byte-equal per tensor to the one it was made from.

    transformers: which releases config.json must serve: both (4.57 and 5.13+), 4 or 5 alone. Raises BadInput listing all
    faults; then no target is left. A run that was killed resumes when called again with the same arguments.
    """
    opened = open_source(source, allow_unknown_keys, headers_only=True, model_config=model_config)
    check_used(model_config, opened)
    if opened.kind != "orbax":
        raise BadInput(f"{opened.said}: orbax2hf wants an Orbax tree")
    target = clean_target(target)
    if is_remote(target):
        raise BadInput(
            f"{target}: orbax2hf writes safetensors to a local folder (a shard is put together in place, which a bucket cannot "
            "do). Write it here, then copy it with aws s3 sync or gcloud storage rsync"
        )
    step = opened.carry_from
    check_apart(step, target)
    carried = carried_files(step)
    faults = tokenizer_faults(carried, opened.config)
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        faults.append(f"shard_bytes is {shard_bytes!r}, a positive number of bytes is wanted")
    if faults:
        raise BadInput(f"{opened.path} cannot be converted", faults)
    dtypes = {tensor.dtype.name for tensor in opened.tensors.values()}
    config = replace(opened.config, dtype=next(iter(dtypes)) if len(dtypes) == 1 else opened.config.dtype)
    raw = hf_config(config, transformers)
    reader = open_item(resolve_tree(opened.path).item)
    moves = [_move(opened, reader, weight) for weight in weights(config)]
    listed = [(m.weight.hf, DTYPE_CODES[m.leaf.dtype], m.weight.shape) for m in moves]
    shards, places = lay_out(listed, shard_bytes)
    job = {
        "source": str(opened.path),
        "files": _fingerprint(reader.item, carried),
        "config": config_hash(config),
        "transformers": transformers,
        "shard_bytes": shard_bytes,
        "allow_nonfinite": allow_nonfinite,
    }
    workers = workers or max(1, min(os.cpu_count() or 1, MEMORY // (COPIES * SLICE_BYTES)))
    with Staging(target, job, overwrite=overwrite) as staging:
        resumed = len(staging.finished)
        waiting = [move for move in moves if move.weight.hf not in staging.finished]
        if not resumed:
            staging.check_space(sum(shard.length for shard in shards))
        create_files(staging.folder, shards, places)
        progress = Progress("writing", sum(move.leaf.nbytes for move in waiting), quiet)

        def carry(group: Sequence[Move]) -> None:
            for move in group:
                entry = _copy(move, reader, staging.folder, places[move.weight.hf], allow_nonfinite, progress)
                staging.record(move.weight.hf, entry)

        run_all(group_moves(waiting), carry, workers)
        sync_files(staging.folder, shards)
        seconds, verify_seconds, peak = progress.close(), 0.0, progress.peak_anonymous
        if _fingerprint(reader.item, carried) != job["files"]:
            raise BadInput(f"{opened.path} was changed while it was converted: start again when it is at rest")
        (staging.folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        copy_files(carried, staging.folder)
        if verify:
            verify_seconds, here = _read_back(staging.folder, opened, reader.item, moves, workers, quiet)
            peak = max(peak, here)
        beside = {
            "tree_files": file_checksums(staging.folder, [shard.file for shard in shards], workers),
            "carried": [{"file": file.name, "sha256": sha256_of_file(file)} for file in carried],
        }
        manifest = make_manifest(
            source={"kind": "orbax", "path": str(opened.path), "resolved_path": str(opened.path.resolve())},
            config=config,
            target_kind="hf",
            transformers=transformers,
            dtype=None,
            allow_nonfinite=allow_nonfinite,
            allowed_unknown_keys=list(config.allowed_unknown_keys),
            verified=verify,
            notes=list(opened.notes),
            **beside,
            tensors=[staging.finished[move.weight.hf] for move in moves],
        )
        write_manifest(staging.folder, manifest)
        staging.publish()
    return ConversionRecord(
        source=opened.name,
        target=target,
        kind="orbax",
        said=opened.said,
        tensors=len(moves),
        bytes=sum(move.leaf.nbytes for move in moves),
        dtype=opened.dtype_name,
        seconds=seconds,
        verify_seconds=verify_seconds,
        peak_memory=peak,
        verified=verify,
        resumed=resumed,
        notes=opened.notes,
    )


def _move(source: Source, reader: TreeReader, weight) -> Move:
    """The same pairing as on the way in. Slices follow the tree's chunks, so that each is decoded once."""
    tensor = source.tensors[weight.hf]
    leaf = reader.leaves[weight.jax]
    row = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    axis = len(leaf.shape) - 1 if len(leaf.shape) == 2 and weight.layout == "TRANSPOSED" else 0
    step = min(leaf.chunk_shape[axis], max(2 * SLICE_BYTES // row, 1))
    chunk = tuple(step if i == axis else n for i, n in enumerate(leaf.shape))
    return Move(weight, tensor, Leaf(leaf.path, leaf.shape, leaf.dtype, chunk), reader.item.name)


def _copy(
    move: Move, reader: TreeReader, folder: Path, place: Place, allow_nonfinite: bool, progress: Progress
) -> dict:
    """Carry one leaf over; returns its manifest entry."""
    before, after, found = hashlib.sha256(), hashlib.sha256(), NonFinite()
    for start, stop in move.slices():
        kept = reader.read(move.leaf.path, move.index(start, stop))
        before.update(kept.view(np.uint8))
        rows = transposed(kept) if move.turned else kept
        found.look(rows, start)
        after.update(rows.view(np.uint8))
        write_rows(folder, place, start, rows)
        progress.add(rows.nbytes)
    if found.count and not allow_nonfinite:
        raise NonFiniteError([found.sentence(move.tensor)])
    return {
        "source_name": move.tensor.name,
        "source_file": str(move.tensor.file),
        "target_name": move.weight.hf,
        "target_file": place.file,
        "layout": move.weight.layout,
        "source_shape": list(move.leaf.shape),
        "shape": list(move.weight.shape),
        "dtype": move.leaf.dtype.name,
        "source_chunk_shape": list(move.leaf.chunk_shape),
        "source_sha256": before.hexdigest(),
        "target_sha256": after.hexdigest(),
        **({"non_finite": found.count} if found.count else {}),
    }


def _read_back(
    folder: Path, source: Source, item: Path, moves: Sequence[Move], workers: int, quiet: bool
) -> tuple[float, int]:
    """Open the new folder as any other and compare it with the tree. Returns seconds and peak memory."""
    written = open_source(folder, source.config.allowed_unknown_keys)
    differences = [f"config: {n} is {a!r}, read back as {b!r}" for n, a, b in source.config.differences(written.config)]
    reading = Progress("verifying", sum(move.leaf.nbytes for move in moves), quiet)
    pairs = [replace(move, tensor=written.tensors[move.weight.hf]) for move in moves]
    differences += compare_moves(item.parent, pairs, workers, reading.add)
    if differences:
        raise BadInput("the target was not written: what was read back is not what was meant", differences)
    return reading.close(), reading.peak_anonymous


def _fingerprint(item: Path, carried: Sequence[Path]) -> list[list]:
    files = [f for f in (item / TREE_FILE, item / "manifest.ocdbt") if f.exists()]
    return fingerprint([*files, *carried])
