"""The gate from end to end: two checkpoints and prompts in, one record out."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..convert.sources import open_source
from ..olmo_jax.config import SLIDING
from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import rope_tables, tables_hash
from . import also, batches, calibrate, devices, footprint, gate, gradients, identity, overrides
from .candidate import run_candidate
from .candidate_fn import open_candidate
from .legs import Legs, main_dtype, narrower
from .recorded import is_record, open_record, write_record
from .reference import require_torch, run_reference
from .weights import weight_differences

SCHEMA = "olmo-parity/report/1"
PACKAGES = ("olmo-parity", "torch", "transformers", "jax", "jaxlib", "flax", "orbax-checkpoint", "tensorstore", "numpy")


@dataclass(frozen=True)
class GateOptions:
    """What may be chosen. The defaults are the gate that a launch should stand behind."""

    batch: Path | None = None  # prompts.jsonl, run beside the built-in sequences
    only_batch: bool = False  # leave the built-in sequences out
    max_tokens: int | None = None  # cut longer prompts, and say so
    accept_uncovered: tuple[str, ...] = ()
    weights_may_differ: bool = False
    allow_unknown_keys: tuple[str, ...] = ()
    profile: str = "default"  # of gate.PROFILES
    limits: Mapping[str, float] = field(default_factory=dict)  # by gate.LIMIT_NAMES, instead of the profile's
    also: str | None = None  # core:DIR, AI2's own OLMo-core model as a third side of the float32 leg
    candidate_fn: str | None = None  # package.module:function, the candidate instead of olmo_jax
    gradients: bool = False  # loss and the gradient of every parameter too
    z_loss: float | None = None  # its coefficient in the loss; None leaves it out
    streamed: bool | None = None  # layer by layer; None: where the whole model does not fit into memory
    candidate_device: str | None = None  # cpu, gpu or tpu; None: what JAX finds by itself
    reference_device: str | None = None  # cpu or cuda; None: cpu
    mesh: str | None = None  # fsdp=4,tensor=2: devices that the candidate is spread over
    processes: int | None = None  # of the candidate, under jax.distributed
    override: tuple[str, ...] = ()  # KEY=VALUE, changed in the config of both sides
    recalibrate: bool = False  # measure the reference's noise again, whatever the cache holds
    settings_file: Path | None = None  # the parity.toml that some of these came from


def run_gate(
    reference: Path,
    candidate: Path | None,
    options: GateOptions = GateOptions(),
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """Compare a Hugging Face folder, or a record of one, with an Orbax tree; returns the record that every report is made from.

    With options.candidate_fn the model tested is that function's, and candidate, which may be None, is what it is given.
    say gets a line about each step. Raises BadInput where no verdict can be given.
    """
    changed = overrides.parse(options.override)
    if not changed:
        return _run_gate(reference, candidate, options, say) | {"overrides": {}}
    if options.also:
        raise BadInput(
            "--override changes the config of both sides, and --also's third side has its own: leave one out"
        )
    with overrides.applied(reference, candidate, changed) as (changed_reference, changed_candidate):
        record = _run_gate(changed_reference, changed_candidate, options, say)
    for side, path in (("reference", reference), ("candidate", candidate)):
        if path:
            record[side]["path"] = str(path.absolute())
    record["notes"].insert(0, f"changed on both sides, so not the model of the files: {', '.join(options.override)}")
    return record | {"overrides": changed}


def _run_gate(reference: Path, candidate: Path | None, options: GateOptions, say: Callable[[str], None]) -> dict:
    started = time.monotonic()
    place = devices.placement(
        options.candidate_device,
        options.reference_device,
        options.mesh,
        options.processes,
        streamed=options.streamed,
        function=options.candidate_fn is not None,
        recorded=is_record(reference),
        gradients=options.gradients,
    )
    ref, cand, function = _open(reference, candidate, options, place)
    sequences = _sequences(ref, cand, options)
    gradients.check(options, ref, sequences)
    third = also.open_also(options.also, ref, sequences, options.allow_unknown_keys) if options.also else None
    if place.chosen and not function:  # a function was imported there already
        say("trying the candidate's devices")
        with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
            run_candidate(cand.path, [], dtype="float32", folder=Path(folder) / "devices", placement=place)
    unread = function.unread if function else ""  # why config and weights are not compared
    differing = ref.config.differences(cand.config) if cand else []
    criteria = [
        gate.count_criterion("config fields that differ", "config", len(differing), "fields", unread=unread),
        gate.count_criterion(
            "layer types with scaling that must not have it", "config", _scaled_sliding(ref.config), "layer types"
        ),
    ]
    say("hashing both sides")
    sides = {
        "reference": _side(ref),
        "candidate": _side(cand) if cand else {},
    }  # before the run: check-report sees a later change
    if function:
        sides["candidate"] = function.side(sides["candidate"])
    weights = []
    if cand:
        say("comparing weights")
        recorded = ref.kind == "record"
        weights = ref.weight_differences(cand) if recorded else weight_differences(ref, cand)
    criteria.append(
        gate.count_criterion(
            "weights that differ", "weights", len(weights), "tensors", not options.weights_may_differ, unread=unread
        )
    )
    whole = place.spread or place.reference == "cuda"  # layer by layer runs on one device, the reference's on the CPU
    streamed, why = footprint.choose_streamed(
        None if ref.kind == "record" else ref,
        None if function else cand,
        sequences,
        False if whole else options.streamed,
    )
    if why:
        say(why)
    folder = Path(tempfile.mkdtemp(prefix="olmo-parity-"))
    try:
        legs = Legs(
            ref,
            function or cand,
            sequences,
            folder,
            versions(),
            options.recalibrate,
            streamed,
            place,
            options.allow_unknown_keys,
            say,
            also=third,
        ).run()
        trained = None
        if options.gradients:
            round_to, into = narrower(ref, cand), folder / "gradients"
            trained = gradients.run_gradients(
                ref, cand, sequences, into, options.z_loss, round_to, say, place.environment(exact_casts=False)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    profile = gate.PROFILES[options.profile]
    float32, bfloat16 = legs["float32"], legs["bfloat16"]
    criteria += _mask_criteria(ref.config, legs)
    criteria += gate.float32_criteria(float32["statistics"], float32["noise"], profile, options.limits)
    if float32["packed"]:
        criteria += gate.packed_criteria(float32["packed"], float32["noise"], profile, options.limits)
    unpadded = "a candidate function is given one row at a time" if function else "layer by layer, a row at a time"
    criteria += gate.padded_criteria(float32["padded"], float32["noise"], profile, options.limits, unpadded)
    if third:
        pairs = float32["also"]["pairs"]
        against, odd = also.judge(pairs, float32["noise"], profile, options.limits)
        criteria += against
        float32["also"]["odd_one_out"] = odd
    criteria += gate.bfloat16_criteria(
        bfloat16["statistics"], bfloat16["own_noise"], bfloat16["ratio"], profile, options.limits
    )
    covered = [*batches.coverage(ref.config, sequences), gate.interval_coverage(bfloat16["ratio"]["blocks"])]
    if trained:
        criteria += gradients.gradient_criteria(trained)
        covered.append(gradients.gradient_coverage(trained))
    uncovered = [c["what"] for c in covered if not c["covered"] and c["what"] not in options.accept_uncovered]
    unknown = sorted(set(options.accept_uncovered) - {c["what"] for c in covered})
    open_questions = gate.noise_faults(float32["noise"], profile)
    if uncovered:
        open_questions.append(f"this run could not show faults of: {', '.join(uncovered)}")
    verdict = gate.judge(criteria, open_questions, sum(len(s.tokens) for s in sequences))
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict.name,
        "exit_code": verdict.exit_code,
        "decided_by": verdict.sentence,
        "open_questions": open_questions,
        "criteria": [c.record() for c in criteria],
        "legs": legs,
        "gradients": trained,
        "profile": profile.name,
        "published_kl": gate.PUBLISHED_KL,
        "labels": gate.labels(criteria, float32["statistics"]),
        "config_differences": [{"field": n, "reference": a, "candidate": b} for n, a, b in differing],
        "weight_differences": weights,
        "coverage": covered,
        "accepted_uncovered": sorted(options.accept_uncovered),
        "sequences": [_sequence_record(s) for s in sequences],
        **sides,
        "settings_file": str(options.settings_file) if options.settings_file else None,
        "notes": _notes(ref, cand, sequences, unknown) + ([f"run {why}"] if why else []),
        "versions": versions(),
        "code_sha256": identity.code_hash(),
        "seconds": round(time.monotonic() - started, 2),
    }


def record_reference(
    reference: Path, target: Path, options: GateOptions = GateOptions(), say: Callable[[str], None] = lambda _: None
) -> dict:
    """Run the reference alone and keep what a gate needs of it in the folder target; returns what was written.

    `run_gate(target, candidate)` then needs no torch. Raises BadInput.
    """
    require_torch()
    source = open_source(reference, allow_unknown_keys=options.allow_unknown_keys)
    if source.kind != "hf":
        raise BadInput(f"{reference} is of the {source.kind} form; a Hugging Face folder is wanted")
    sequences = _sequences(source, source, options)
    place = devices.placement(reference=options.reference_device, streamed=options.streamed)
    whole = place.reference == "cuda"
    streamed, why = footprint.choose_streamed(source, None, sequences, False if whole else options.streamed)
    if why:
        say(why)

    def run(dtype: str, round_to: str | None, folder: Path, chosen=None, benign: bool = False) -> dict:
        say(f"reference in {dtype}" + (", benignly changed" if benign else ""))
        return run_reference(
            source.path,
            source.config,
            chosen or sequences,
            dtype=dtype,
            round_to=round_to,
            benign=benign,
            streamed=streamed,
            device=place.reference,
            folder=folder,
        )

    def noise(plain: Path) -> dict:
        with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
            return calibrate.reference_noise(
                source,
                sequences,
                plain=plain,
                run=lambda chosen, folder: run("float32", None, folder, chosen, benign=True),
                folder=Path(folder) / "benign",
                facts=[versions()],
                again=options.recalibrate,
            )

    facts = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": main_dtype(source),
        "side": _side(source),
        "versions": versions(),
    }
    return write_record(target, source, sequences, run, noise, facts)


def versions() -> dict[str, str]:
    """Versions of Python, the platform and every package that takes part, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _open(reference: Path, candidate: Path | None, options: GateOptions, place: devices.Placement):
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
        cand = open_source(candidate, allow_unknown_keys=options.allow_unknown_keys)
    faults = []
    if ref.kind not in ("hf", "record"):
        faults.append(
            f"--reference {reference} is of the {ref.kind} form; a Hugging Face folder or a record of one is wanted"
        )
    if cand and not function and cand.kind != "orbax":
        faults.append(f"--candidate {candidate} is of the {cand.kind} form; an Orbax tree is wanted")
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


def _sequences(ref, cand, options: GateOptions) -> list[batches.Sequence]:
    if options.only_batch and options.batch is None:
        raise BadInput(
            "--only-batch leaves out the built-in sequences, and no --batch was given: nothing would be compared"
        )
    if ref.kind == "record":
        return ref.sequences()
    found = [] if options.only_batch else batches.built_in(ref.config)
    if options.batch is not None:
        beside = (Path(side.path) / "tokenizer.json" for side in (ref, cand) if side)
        tokenizer = next((p for p in beside if p.is_file()), None)
        found += batches.read_prompts(options.batch, ref.config, tokenizer, options.max_tokens)
    return found


def _scaled_sliding(config) -> int:
    """1 where the reference's own config scales the rotary embedding of sliding layers, which no OLMo 3 does.

    Two sides that agree on it would both be wrong.
    """
    sliding = config.rope.get(SLIDING)
    return int(sliding is not None and sliding.rope_type != "default")


def _mask_criteria(config, legs: dict) -> list[gate.Criterion]:
    """Keys that each query sees around the edge of the true window, counted on both sides, against the config."""
    expected = batches.expected_keys(config)
    criteria = []
    for side in ("reference", "candidate"):
        counted = legs["float32"][side].get("visible_keys")
        if counted is None:
            continue
        wrong = sum(
            [position, keys] not in counted.get(layer_type, [])
            for layer_type, rows in expected.items()
            for position, keys in rows
        )
        criteria.append(
            gate.count_criterion(f"queries of the {side} that see other keys", "mask", wrong, "of the probed queries")
        )
    return criteria


def _sequence_record(s) -> dict:
    return {
        "id": s.id,
        "tokens": len(s.tokens),
        "first_position": s.first_position,
        "window": s.window,
        "built_in": s.built_in,
        "cut_from": s.cut_from,
        "sha256": s.sha256,
    }


def _side(source) -> dict:
    if source.kind == "record":
        return source.side
    return {
        "path": str(source.path),
        "form": source.kind,
        "dtype": main_dtype(source),
        "tensors": len(source.tensors),
        "bytes": sum(t.nbytes for t in source.tensors.values()),
        "rotary_tables_sha256": tables_hash(rope_tables(source.config)),
        "config_sha256": identity.file_hash(identity.config_file(source)),
        "weights_sha256": identity.combined_hash(identity.tensor_hashes(source)),
    }


def _notes(ref, cand, sequences: Sequence, unknown: list[str]) -> list[str]:
    notes = [f"reference config: {n}" for n in ref.config.notes]
    notes += [f"candidate config: {n}" for n in (cand.config.notes if cand else ()) if n not in ref.config.notes]
    for side, source in (("reference", ref), ("candidate", cand)):
        if source and source.config.allowed_unknown_keys:
            notes.append(f"{side} config: let through unread: {', '.join(source.config.allowed_unknown_keys)}")
    if cand and narrower(ref, cand):
        notes.append(
            f"the candidate is stored in {main_dtype(cand)}, the reference in {main_dtype(ref)}: "
            "the reference's weights were rounded alike before they were compared and run"
        )
    notes += [f"{s.id} was cut from {s.cut_from} to {len(s.tokens)} tokens" for s in sequences if s.cut_from]
    notes += [f"--accept-uncovered {name}: no such thing to cover on this config" for name in unknown]
    return notes
