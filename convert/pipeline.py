"""Source -> plan -> target: the conversions into an Orbax tree."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.errors import BadInput
from . import maxtext
from .bucket_staging import BucketStaging
from .carry import carried_files, copy_files, tokenizer_faults
from .checkpoint import Source
from .checksums import file_checksums, sha256_of_file
from .copying import Move, copy_group, group_moves, plan_move, run_all
from .hosts import Team
from .hub import hub_id
from .hub_commit import offline
from .manifest import config_hash, make_manifest, write_manifest
from .mapping import MAXTEXT_CYCLE, maxtext_place, weights
from .maxtext import OLMO_JAX
from .orbax_io import STEP_FILES
from .orbax_write import CHUNK_BYTES, COMPRESSION, OPTIMIZER, Leaf, TreeWriter, finish_step
from .places import fingerprint, is_remote, store_spec
from .progress import Progress
from .record import ConversionRecord
from .safetensors_io import DTYPES
from .shares import help_convert, make_writers, read_back, share, watched
from .sources import ORBAX_CONFIG, open_source
from .staging import Staging, check_apart, clean_target, whole_job
from .stream import check_streamable, copy_shards, hash_differences

DTYPE_NAMES = {dtype.name: dtype for dtype in DTYPES.values()}
MEMORY = 768 << 20  # bytes for slices: with imports (0.1 GB) it stays under 1 GiB
COPIES = 6  # of a slice for each worker: rows, laid out, encoded, decoded, read back (measured: 5.5 while verifying)


def hf2orbax(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    allow_unknown_keys: Sequence[str] = (),
    layout: str = OLMO_JAX,
    compression: str = "none",
    chunk_bytes: int = CHUNK_BYTES,
    workers: int | None = None,
    quiet: bool = False,
    processes: tuple[int, int] = (0, 1),
    stream: bool = False,
) -> ConversionRecord:
    """Convert an HF folder, or a commit of the hub, to an Orbax tree, in slices: olmo_jax's, or one of MaxText's layouts.

    dtype is kept unless named (float32, bfloat16, float16). Raises BadInput listing all faults; then no target is left.
    A run that was killed resumes when called again with the same arguments. stream: keep one shard of the hub at a time,
    beside the target, and none after. processes: which this is, and of how many that were started with the same arguments;
    all must see the target's folder.
    """
    with _team(target, processes) as team:  # before anything can be refused: the others hear of it
        if stream and team.count > 1:
            raise BadInput(
                "--stream is for one process: with --distributed each keeps the whole source in the hub's cache"
            )
        if stream and hub_id(source) is None:
            raise BadInput(f"{source} is no hub id: --stream is for those, any other source is read where it lies")
        # Off the network there is nothing to stream: the shards are read from the cache, and are checked there first.
        opened = open_source(source, allow_unknown_keys, headers_only=stream and not offline(), quiet=quiet)
        if opened.kind != "hf":
            raise BadInput(f"{opened.said}: hf2orbax wants an HF folder")
        if opened.shards_on_hub:
            check_streamable(opened)
        return convert(
            opened,
            team,
            dtype=dtype,
            verify=verify,
            overwrite=overwrite,
            allow_nonfinite=allow_nonfinite,
            layout=layout,
            compression=compression,
            chunk_bytes=chunk_bytes,
            workers=workers,
            quiet=quiet,
        )


def core2orbax(
    source: str | Path,
    target: str | Path,
    *,
    vocabulary: str = "cut",
    optimizer: bool = False,
    dtype: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    allow_unknown_keys: Sequence[str] = (),
    layout: str = OLMO_JAX,
    compression: str = "none",
    chunk_bytes: int = CHUNK_BYTES,
    workers: int | None = None,
    quiet: bool = False,
    processes: tuple[int, int] = (0, 1),
) -> ConversionRecord:
    """Convert OLMo-core's distributed checkpoint directly, without torch and without running its pickles.

    vocabulary: cut the padding rows of embedding and head (to the tokenizer's size in the config), keep them, or check that
    there are none. optimizer brings Adam's moments along as the item `optimizer`: exp_avg and exp_avg_sq, each a tree
    like `state`, always in their stored dtype; the step and the trainer's position are in the manifest.
    """
    with _team(target, processes) as team:
        opened = open_source(source, allow_unknown_keys, vocabulary=vocabulary, headers_only=True)
        if opened.kind != "core":
            raise BadInput(f"{opened.said}: core2orbax wants a step folder of OLMo-core")
        return convert(
            opened,
            team,
            optimizer=optimizer,
            vocabulary=vocabulary,
            dtype=dtype,
            verify=verify,
            overwrite=overwrite,
            allow_nonfinite=allow_nonfinite,
            layout=layout,
            compression=compression,
            chunk_bytes=chunk_bytes,
            workers=workers,
            quiet=quiet,
        )


def _team(target: str | Path, processes: tuple[int, int]) -> Team:
    target = clean_target(target)
    if is_remote(target) and processes[1] > 1:
        raise BadInput(
            f"{target}: several processes meet in a folder beside the target, which all must see, and a bucket has none. Convert "
            "into a bucket without --distributed"
        )
    return Team(target, *processes)


def convert(
    source: Source,
    team: Team,
    *,
    dtype: str | None,
    verify: bool,
    overwrite: bool,
    allow_nonfinite: bool,
    layout: str,
    compression: str,
    chunk_bytes: int,
    workers: int | None,
    quiet: bool,
    optimizer: bool = False,
    vocabulary: str | None = None,
) -> ConversionRecord:
    """Carry every tensor of an opened source over, then the files beside it; publish only what was read back equal."""
    target = team.target
    carried = carried_files(source.carry_from or source.path)
    _check_options(source, target, carried, dtype, layout, compression, chunk_bytes, optimizer)
    moves = plan(source, dtype, chunk_bytes, optimizer, layout)
    notes = (*source.notes, *(maxtext.notes(source.config) if layout != OLMO_JAX else ()))
    job = {
        "source": source.name,
        "files": source.hub.identity() if source.hub else _fingerprint(source, carried),
        "config": config_hash(source.config),
        "dtype": dtype,
        "layout": layout,
        "compression": compression,
        "chunk_bytes": chunk_bytes,
        "allow_nonfinite": allow_nonfinite,
        "vocabulary": vocabulary,
        "optimizer": optimizer,
    }
    started_ns, cpus = time.time_ns(), os.cpu_count() or 1
    workers = workers or max(1, min(cpus, MEMORY // (COPIES * max(chunk_bytes, 1))))
    before = _fingerprint(source, carried)

    def check_at_rest() -> None:
        if _fingerprint(source, carried) != before:
            raise BadInput(f"{source.path} was changed while it was converted: start again when it is at rest")

    # Not in the job: a run that goes on may verify or not, but the processes of one must agree.
    agreed = {**whole_job(job), "verify": verify}
    if team.index:
        options = {"compression": compression, "allow_nonfinite": allow_nonfinite}
        options |= {"verify": verify, "workers": workers, "quiet": quiet}
        helped = help_convert(team, source, moves, agreed, check_at_rest, **options)
        return _record(source, target, dtype, verify, notes, process=team.name, **helped)
    with ExitStack() as stack:
        staging = stack.enter_context(
            (BucketStaging if is_remote(target) else Staging)(target, job, overwrite=overwrite)
        )
        stack.push(team.end)
        resumed = len(staging.finished)
        waiting = [move for move in moves if move.key not in staging.finished]
        held = source.hub.largest if source.shards_on_hub else 0
        staging.check_space(sum(move.leaf.nbytes for move in waiting) + held)
        team.gather(agreed, list(staging.finished))
        staging.start()
        waiting = share(waiting, team.index, team.count)
        writers = make_writers(waiting if team.store else moves, staging.folder, team.store, compression)
        progress = Progress("writing", sum(move.tensor.nbytes for move in waiting), quiet)

        def copy(group: Sequence[Move]) -> list[dict]:
            return copy_group(group, writers, allow_nonfinite, watched(team, progress))

        def record(move: Move, entry: dict) -> None:
            entry["source_file"] = source.name_of(move.tensor.file)
            staging.record(move.key, {**entry, "store": team.store} if team.store else entry)

        def carry(group: Sequence[Move]) -> None:
            for move, entry in zip(group, copy(group), strict=True):
                record(move, entry)

        if source.shards_on_hub:
            more = {"verify": verify, "workers": workers, "quiet": quiet}
            copy_shards(source, waiting, staging.folder, writers[moves[0].item], copy, record, **more)
        else:
            run_all(group_moves(waiting), carry, workers)
        team.reached("written")
        team.wait("written")
        staging.take_journals()
        merge_stores(staging, moves, compression)
        items = sorted({move.item for move in moves}, reverse=True)
        for item in items:
            paths = [move.stored.path for move in moves if move.item == item]
            finish_item(TreeWriter(staging.folder / item, compression), paths, layout)
        seconds, verify_seconds = progress.close(), 0.0
        peak = progress.peak_anonymous
        check_at_rest()
        finish_step(staging.folder, items, started_ns, maxtext.step_metadata(layout))
        (staging.folder / ORBAX_CONFIG).write_text(json.dumps(to_hf(source.config), indent=2) + "\n", encoding="utf-8")
        team.reached("merged")
        if verify:
            if source.shards_on_hub:
                reading = Progress("verifying", sum(move.tensor.nbytes for move in moves), quiet)
                differences = hash_differences(staging.folder, moves, staging.finished, workers, reading.add)
            else:
                reading, differences = read_back(team, moves, staging.folder, workers, quiet)
            verify_seconds, peak = reading.close(), max(peak, reading.peak_anonymous)
            team.reached("verified")
            differences += [text for state in team.wait("verified") for text in state["differences"]]
            if differences:
                raise BadInput(f"{target} was not written: what was read back is not what was meant", differences)
        copy_files(carried, staging.folder)
        beside = {
            # What lies in a bucket is not read a third time: its arrays have hashes, and each chunk a crc32c.
            "tree_files": [] if is_remote(target) else file_checksums(staging.folder, [*items, *STEP_FILES], workers),
            "carried": [{"file": file.name, "sha256": sha256_of_file(file)} for file in carried],
        }
        write_manifest(staging.folder, _manifest(source, moves, staging.finished, job, verify, notes, beside))
        staging.publish()
    return _record(
        source,
        target,
        dtype,
        verify,
        notes,
        moves=moves,
        seconds=seconds,
        verify_seconds=verify_seconds,
        peak_memory=peak,
        resumed=resumed,
        process=team.name if team.count > 1 else "",
    )


def _record(
    source: Source, target: Path, dtype: str | None, verified: bool, notes: Sequence[str], moves: Sequence[Move], **more
) -> ConversionRecord:
    return ConversionRecord(
        source=source.name,
        target=target,
        kind=source.kind,
        said=source.said,
        tensors=len(moves),
        bytes=sum(move.leaf.nbytes for move in moves),
        dtype=dtype or source.dtype_name,
        verified=verified,
        notes=tuple(notes),
        **more,
    )


def merge_stores(staging: Staging, moves: Sequence[Move], compression: str) -> None:
    """Bring into each item what processes of a run, this one or one that was killed, wrote into stores of their own.

    Chunks of leaves that a killed one did not finish may come along: they hold what this run wrote too.
    """
    stores: dict[str, dict[str, list[str]]] = {}
    for move in moves:
        store = staging.finished.get(move.key, {}).get("store")
        if store:
            stores.setdefault(move.item, {}).setdefault(store, []).append(move.stored.path)
    for item, found in stores.items():
        TreeWriter(staging.folder / item, compression).merge(found)
    if stores:
        staging.note_merged()


def plan(
    source: Source, dtype: str | None, chunk_bytes: int, optimizer: bool = False, layout: str = OLMO_JAX
) -> list[Move]:
    """Every tensor to its leaf, in the order of the mapping. open_source has checked names, shapes and dtypes.

    Raises BadInput where the layout or the optimizer's state does not allow it."""
    wanted = DTYPE_NAMES[dtype] if dtype else None
    needed = weights(source.config)
    if layout != OLMO_JAX:
        cycle = MAXTEXT_CYCLE if layout == maxtext.SCANNED else None
        places = [maxtext_place(w, source.config, cycle) for w in needed]
        moves = [
            plan_move(w, source.tensors[w.hf], wanted, chunk_bytes, maxtext.ITEM, place=place)
            for w, place in zip(needed, places, strict=True)
        ]
        faults = maxtext.stack_faults(moves)
        if faults:
            raise BadInput(f"{source.path} cannot be written in layout {layout}", faults)
        return moves
    moves = [plan_move(w, source.tensors[w.hf], wanted, chunk_bytes) for w in needed]
    if not optimizer:
        return moves
    faults = [] if source.moments else [f"{source.path} holds no optimizer state: convert it without --optimizer"]
    for name, moments in source.moments.items():
        for weight in needed:
            moment = moments.get(weight.hf)
            if moment is None:
                faults.append(f"{name} of {weight.core} is missing in {source.path}")
            elif moment.code not in DTYPES or moment.shape != weight.shape:
                faults.append(f"{moment.name} is {moment.code} {moment.shape}, F32 {weight.shape} is wanted")
            else:
                moves.append(plan_move(weight, moment, None, chunk_bytes, OPTIMIZER, f"{name}/"))
    if faults:
        raise BadInput("the optimizer state cannot be converted", faults)
    return moves


def finish_item(writer: TreeWriter, paths: Sequence[str], layout: str) -> None:
    """What makes the arrays a tree of their layout."""
    if layout == OLMO_JAX:
        writer.finish(paths)
        return
    step = np.zeros(
        (), np.int64
    )  # MaxText's own converter writes these two: training starts at step 0, its optimizer anew
    writer.write(Leaf("step", step.shape, step.dtype, ()), step)
    writer.finish([*paths, "step"], empty=["opt_state"])


def _check_options(source, target, carried, dtype, layout, compression, chunk_bytes, optimizer) -> None:
    faults = maxtext.layout_faults(source.config, layout)
    if optimizer and layout in (maxtext.SCANNED, maxtext.UNSCANNED):
        faults.append(
            "the optimizer's moments can be brought along in the layout olmo_jax alone: leave --optimizer out"
        )
    if dtype is not None and dtype not in DTYPE_NAMES:
        faults.append(f"dtype {dtype!r} is not supported ({', '.join(sorted(DTYPE_NAMES))} are)")
    if compression not in COMPRESSION:
        faults.append(f"compression {compression!r} is not supported ({', '.join(COMPRESSION)} are)")
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        faults.append(f"chunk_bytes is {chunk_bytes!r}, a positive number of bytes is wanted")
    faults += tokenizer_faults(list(carried), source.config)
    if faults:
        raise BadInput(f"{source.path} cannot be converted", faults)
    check_apart(source.path, target)
    store_spec(target)  # refuses a name that cannot be written to


def _fingerprint(source: Source, carried: Sequence[Path]) -> list[list]:
    """Name, size and time of change of every file that is read: notices a source that is not the same any more."""
    if source.shards_on_hub:
        return source.hub.identity()  # a commit does not change
    files = {file for tensor in source.tensors.values() for file in tensor.files or (tensor.file,)} | set(carried)
    return fingerprint(files)


def _manifest(
    source: Source,
    moves: Sequence[Move],
    finished: dict[str, dict],
    job: dict,
    verified: bool,
    notes: Sequence[str],
    beside: dict,
) -> dict:
    return make_manifest(
        source={
            "kind": source.kind,
            "path": source.name,
            "revision": source.revision,
            **_where(source, job),
        },
        config=source.config,
        vocabulary={
            "logical": source.logical_vocab_size or source.config.vocab_size,
            "padded": source.padded_vocab_size or source.config.vocab_size,
            "rows": source.config.vocab_size,
            "policy": job["vocabulary"],
        },
        target_kind="orbax",
        layout=job["layout"],
        dtype=job["dtype"],
        compression=job["compression"],
        chunk_bytes=job["chunk_bytes"],
        allow_nonfinite=job["allow_nonfinite"],
        allowed_unknown_keys=list(source.config.allowed_unknown_keys),
        verified=verified,
        notes=list(notes),
        training=dict(source.training),
        **beside,
        tensors=[finished[move.key] for move in moves],
    )


def _where(source: Source, job: dict) -> dict:
    """The files that were read: of a hub commit their hashes there, of a folder where they really lie."""
    if source.hub:
        wanted, sha = source.hub.commit.wanted, source.hub.commit.sha
        files = [{"file": name, "hash": digest, "bytes": size} for name, digest, size in job["files"]]
        return {"hub": {"repo": wanted.repo, "asked": wanted.revision, "commit": sha}, "files": files}
    files = [{"file": f, "resolved": r, "bytes": size} for f, r, size, _ in job["files"]]
    return {"resolved_path": str(source.path.resolve()), "files": files}
