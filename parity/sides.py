"""The two sides of a run: opened, checked to belong together, given their sequences, and described for the record."""

from __future__ import annotations

from pathlib import Path

from ..convert import places
from ..convert.hub import hub_id
from ..convert.sources import open_source
from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import rope_tables, tables_hash
from . import batches, identity, token_files
from .candidate_fn import open_candidate
from .devices import Placement
from .legs import main_dtype, narrower
from .options import GateOptions
from .recorded import is_record, open_record
from .reference import require_torch


def open_sides(reference: Path, candidate: Path | None, options: GateOptions, place: Placement):
    """Reference, candidate's checkpoint (None where only its function reads it), the candidate function or None."""
    if is_record(reference):
        ref = open_record(reference)
        if options.batch is not None or options.only_batch:
            raise BadInput("a record brings its own prompts: leave --batch and --only-batch to olmo-parity record")
    else:
        require_torch()
        ref = open_source(reference, allow_unknown_keys=options.allow_unknown_keys)
    function = None
    if options.candidate_fn:
        function = open_candidate(options.candidate_fn, candidate, ref.config, options.allow_unknown_keys, place)
        cand = function.source
    else:
        cand = open_source(candidate, allow_unknown_keys=options.allow_unknown_keys, headers_only=True)
    faults = []
    if ref.kind not in ("hf", "record"):
        faults.append(
            f"--reference {reference} is of the {ref.kind} form; a Hugging Face folder or a record of one is wanted"
        )
    if cand and not function and cand.kind != "orbax":
        faults.append(f"--candidate {candidate} is of the {cand.kind} form; an Orbax tree is wanted")
    if cand and places.is_remote(cand.path) and cand.path.bucket.scheme == "s3" and place.spread:
        faults.append(
            f"--candidate {candidate}: onto a mesh Orbax restores it, and Orbax reads no s3://. Copy it here first"
        )
    if cand and ref.config.vocab_size != cand.config.vocab_size:
        faults.append(
            f"vocabularies differ: {ref.config.vocab_size} in the reference, {cand.config.vocab_size} in the candidate. "
            "Was a padded vocabulary converted, or another tokenizer's model?"
        )
    if faults:
        raise BadInput("these two cannot be compared", faults)
    if ref.kind == "record" and cand:
        ref.check_belongs(cand)
    return ref, cand, function


def on_this_machine(reference: Path | str, candidate: Path | None, options: GateOptions) -> Path:
    """The folder of a reference. One that is given as a hub id is fetched into the hub's cache, where transformers reads it."""
    if hub_id(reference) is None:
        if places.is_remote(places.place(reference)):
            raise BadInput(f"--reference {reference}: transformers reads local folders. Copy it here first")
        return Path(reference)
    require_torch()
    if candidate and not options.candidate_fn:  # its faults come before the download
        open_source(candidate, allow_unknown_keys=options.allow_unknown_keys, headers_only=True)
    return open_source(reference, allow_unknown_keys=options.allow_unknown_keys, quiet=False).path


def check_accepted(names: tuple[str, ...]) -> None:
    """Raise BadInput before the work where --accept-uncovered names something that no run has."""
    unknown = sorted(set(names) - set(batches.COVERAGE))
    if unknown:
        raise BadInput(
            f"--accept-uncovered {unknown[0]}: there is no such thing; known are {', '.join(batches.COVERAGE)}"
        )


def config_differences(ref, cand) -> list[tuple[str, object, object]]:
    """Fields that differ and decide what is computed, or which tokens end a text: (name, reference's, candidate's).

    An id that one side leaves out is no difference: OLMo-core's configs have no place for some.
    """
    ids, others = ref.config.token_ids, cand.config.token_ids
    names = [n for n, mine in ids.items() if mine is not None and others.get(n) is not None and others[n] != mine]
    return ref.config.differences(cand.config) + [(n, ids[n], others[n]) for n in names]


def sequences_of(ref, cand, options: GateOptions) -> list[batches.Sequence]:
    """The built-in sequences and the prompts of options.batch, or those of a record."""
    if options.only_batch and options.batch is None:
        raise BadInput(
            "--only-batch leaves out the built-in sequences, and no --batch was given: nothing would be compared"
        )
    if ref.kind == "record":
        return ref.sequences()
    found = [] if options.only_batch else batches.built_in(ref.config)
    if options.batch is not None and Path(options.batch).suffix == token_files.SUFFIX:
        found += token_files.read_token_file(
            options.batch, ref.config, length=options.max_tokens, most=token_files.MOST_WITH_LOGITS
        )[0]
    elif options.batch is not None:
        beside = (side.path / "tokenizer.json" for side in (ref, cand) if side)
        tokenizer = next((p for p in beside if p.is_file()), None)
        found += batches.read_prompts(options.batch, ref.config, tokenizer, options.max_tokens)
    return found


def describe_sequence(s: batches.Sequence) -> dict:
    """A sequence as the record has it: without its tokens, with their hash."""
    return {
        "id": s.id,
        "tokens": len(s.tokens),
        "first_position": s.first_position,
        "window": s.window,
        "built_in": s.built_in,
        "cut_from": s.cut_from,
        "sha256": s.sha256,
    }


def describe(source) -> dict:
    """A side as the record has it, hashes of config and weights included: all data is read."""
    if source.kind == "record":
        return source.side
    return {
        "path": str(source.path),
        "form": source.kind,
        "dtype": main_dtype(source),
        "tensors": len(source.tensors),
        "bytes": sum(t.nbytes for t in source.tensors.values()),
        "rotary_tables_sha256": tables_hash(rope_tables(source.config)),
        "config_sha256": identity.file_hash(source.config_file),
        "weights_sha256": identity.combined_hash(identity.tensor_hashes(source)),
    }


def notes(ref, cand, sequences: list[batches.Sequence], unknown: list[str]) -> list[str]:
    """What else a reader of the record should know; unknown: names in --accept-uncovered that mean nothing here."""
    found = [f"reference config: {n}" for n in ref.config.notes]
    found += [f"candidate config: {n}" for n in (cand.config.notes if cand else ()) if n not in ref.config.notes]
    for side, source in (("reference", ref), ("candidate", cand)):
        if source and source.config.allowed_unknown_keys:
            found.append(f"{side} config: let through unread: {', '.join(source.config.allowed_unknown_keys)}")
    own = [*ref.config.notes, *(cand.config.notes if cand else ())]
    found += [f"candidate: {n}" for n in (cand.notes if cand else ()) if n not in own]
    if cand and narrower(ref, cand):
        found.append(
            f"the candidate is stored in {main_dtype(cand)}, the reference in {main_dtype(ref)}: "
            "the reference's weights were rounded alike before they were compared and run"
        )
    found += [f"{s.id} was cut from {s.cut_from} to {len(s.tokens)} tokens" for s in sequences if s.cut_from]
    found += [f"--accept-uncovered {name}: no such thing to cover on this config" for name in unknown]
    return found
