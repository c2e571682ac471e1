"""The gate from end to end: two checkpoints and prompts in, one record out."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ..olmo_jax.config import SLIDING
from ..olmo_jax.errors import BadInput
from . import also, batches, devices, footprint, gate, gradients, identity, overrides, sides, trace_run
from .candidate import run_candidate
from .candidate_fn import CandidateFn
from .legs import Legs, narrower
from .options import DEFAULTS, GateOptions
from .recorded import is_record
from .weights import nonfinite_weights, weight_differences

SCHEMA = "olmo-parity/report/1"


def run_gate(
    reference: Path | str,
    candidate: Path | None,
    options: GateOptions = DEFAULTS,
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """Compare a Hugging Face folder, a hub id, or a record of one, with an Orbax tree; returns the record that every report is made from.

    With options.candidate_fn the model tested is that function's, and candidate, which may be None, is what it is given.
    say gets a line about each step. Raises BadInput where no verdict can be given.
    """
    sides.check_accepted(options.accept_uncovered)
    changed = overrides.parse(options.override)
    reference = sides.on_this_machine(reference, candidate, options)
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
    ref, cand, function = sides.open_sides(reference, candidate, options, place)
    sequences = sides.sequences_of(ref, cand, options)
    gradients.check(options, ref, sequences)
    third = also.open_also(options.also, ref, sequences, options.allow_unknown_keys) if options.also else None
    if place.chosen and not function:  # a function was imported there already
        say("trying the candidate's devices")
        with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
            run_candidate(cand.path, [], dtype="float32", folder=Path(folder) / "devices", placement=place)
    unread = function.unread if function else ""  # why config and weights are not compared
    differing = sides.config_differences(ref, cand) if cand else []
    criteria = [
        gate.count_criterion("config fields that differ", "config", len(differing), "fields", unread=unread),
        gate.count_criterion(
            "layer types with scaling that must not have it", "config", _scaled_sliding(ref.config), "layer types"
        ),
    ]
    say("hashing both sides")
    judged = {  # before the run: check-report sees a later change
        "reference": sides.describe(ref),
        "candidate": sides.describe(cand) if cand else {},
    }
    if function:
        judged["candidate"] = function.side(judged["candidate"])
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
    nonfinite = nonfinite_weights(cand) if cand else []
    criteria.append(
        gate.count_criterion("weights with NaN or infinity", "weights", len(nonfinite), "tensors", unread=unread)
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
            identity.versions(),
            options.recalibrate,
            streamed,
            place,
            options.allow_unknown_keys,
            say,
            judged["reference"]["weights_sha256"],
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
    for side in ("reference", "candidate"):
        criteria += gate.mask_criteria(side, batches.expected_keys(ref.config), float32[side].get("visible_keys"))
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
    traced, untraced = None, []
    if options.trace and verdict.exit_code == gate.FAIL:
        traced, untraced = _trace(criteria, ref, function or cand, sequences, legs, place, options, say)
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
        "trace": traced,
        "profile": profile.name,
        "published_kl": gate.PUBLISHED_KL,
        "labels": gate.labels(criteria, float32["statistics"]),
        "config_differences": [{"field": n, "reference": a, "candidate": b} for n, a, b in differing],
        "weight_differences": weights,
        "coverage": covered,
        "accepted_uncovered": sorted(options.accept_uncovered),
        "sequences": [sides.describe_sequence(s) for s in sequences],
        **judged,
        "settings_file": str(options.settings_file) if options.settings_file else None,
        "settings_sha256": identity.file_hash(options.settings_file) if options.settings_file else None,
        "notes": sides.notes(ref, cand, sequences, unknown)
        + [f"the candidate's {sentence}" for sentence in nonfinite]
        + ([f"run {why}"] if why else [])
        + untraced,
        "versions": identity.versions(),
        "code_sha256": identity.code_hash(),
        "seconds": round(time.monotonic() - started, 2),
    }


def _trace(
    criteria, ref, cand, sequences, legs: dict, place, options: GateOptions, say
) -> tuple[dict | None, list[str]]:
    """The trace of the first leg that failed, None where none did; and why there is none where there should be one.

    A trace that cannot be made takes nothing from the verdict.
    """
    failed = {c.leg for c in criteria if c.on and not c.passed}
    dtype = next((leg for leg in trace_run.DTYPES if leg in failed), None)
    if dtype is None:
        return None, []
    if ref.kind == "record":
        return None, ["no trace: the reference is a record, which holds logits and no activations"]
    if isinstance(cand, CandidateFn) and not cand.imported["names_activations"]:
        return None, [f"no trace: {cand.spec} names no activations (docs/candidate-fn.md)"]
    worst = list(dict.fromkeys(w["sequence"] for w in legs[dtype]["worst"]))
    try:
        chosen = trace_run.chosen(sequences, worst)
        return trace_run.trace_sides(ref, cand, chosen, dtype, place, options.allow_unknown_keys, say), []
    except BadInput as error:
        return None, [f"no trace: {error.headline}"]


def _scaled_sliding(config) -> int:
    """1 where the reference's own config scales the rotary embedding of sliding layers, which no OLMo 3 does.

    Two sides that agree on it would both be wrong.
    """
    sliding = config.rope.get(SLIDING)
    return int(sliding is not None and sliding.rope_type != "default")
