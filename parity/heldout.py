"""The held-out comparison: next-token loss of both frameworks on text that neither was trained on, over a series of checkpoints.

Logits at position t predict token t + 1; every predicted token counts once in the mean. Rows run alone, without padding on the
reference and with padding behind them on the candidate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from . import batches, devices, footprint, heldout_text, settings, sides
from . import heldout_stats as stats
from .gate import Criterion, count_criterion
from .heldout_pairs import Pair, pairs_of, split_pair
from .heldout_runs import Runs
from .identity import versions
from .options import GateOptions
from .recorded import is_record
from .stage import judged, not_run

STAGE = SECTION = "heldout"
KEYS = {  # of that table in parity.toml; kinds as in settings.KEYS
    "files":           settings.PATHS,
    "pairs":           settings.PAIRS,
    "reference":       settings.PATH,  # a checkpoint, or a folder of them; by default the gate's
    "candidate":       settings.PATH,
    "dtype":           settings.TEXT,
    "tokens_dtype":    settings.TEXT,
    "sequence_length": settings.COUNT,
    "max_tokens":      settings.COUNT,
    "loss_limit":      settings.NUMBER,
}  # fmt: skip
# What the gate's own part of parity.toml says for this comparison too.
OF_THE_GATE = (
    "reference", "candidate", "streamed", "candidate_device", "reference_device", "mesh", "processes", "allow_unknown_key",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")
Say = Callable[[str], None]


@dataclass(frozen=True)
class HeldoutOptions:
    """What may be chosen. Where and how both sides run is the gate's: streamed, devices, mesh, processes, unknown keys."""

    files: tuple[Path, ...] = ()  # prompts as JSON lines, or token files; none where records bring their own
    dtype: str = "float32"
    tokens_dtype: str | None = None  # of raw token files; None: deduced from the vocabulary
    sequence_length: int | None = None  # of rows cut from token files
    max_tokens: int | None = None  # of a token file that are used; a longer prompt is cut to it
    loss_limit: float | None = None  # nat: for checkpoints of two training runs, instead of what noise allows
    gate: GateOptions = GateOptions()


def run_stage(options, say: Say) -> dict:
    """The stage of preflight (options: preflight_options.Preflight): what [heldout] of parity.toml asks for."""
    table = options.settings.section(SECTION, KEYS)
    if not table:
        return not_run(STAGE, f"there is no [{SECTION}]")
    if options.gate.candidate_fn:
        return not_run(STAGE, "a candidate function is not run on held-out text")
    both = {"reference": options.reference, "candidate": options.candidate}
    return run_heldout(*chosen({k: v for k, v in both.items() if v is not None} | table, options.gate), say)


def from_settings(given: dict, found: settings.Settings) -> tuple[list[Pair], list[str], HeldoutOptions]:
    """What the command line gives over [heldout] of parity.toml, and that over what the file says of the gate."""
    given = dict(given)
    own = {name: given.pop(name) for name in list(given) if name in KEYS or name == "pair"}
    reference, candidate, choice = settings.sides_and_options(
        {k: v for k, v in found.values.items() if k in OF_THE_GATE}
        | {k: v for k, v in given.items() if k in OF_THE_GATE},
        found.file,
    )
    values = {k: v for k, v in (("reference", reference), ("candidate", candidate)) if v is not None}
    values |= found.section(SECTION, KEYS)
    if own.keys() & {"reference", "candidate", "pair"}:
        values.pop("pairs", None)
    if "pair" in own:
        own["pairs"] = [split_pair(text) for text in own.pop("pair")]
    return chosen(values | own, choice)


def chosen(values: dict, gate: GateOptions) -> tuple[list[Pair], list[str], HeldoutOptions]:
    """Pairs, notes about checkpoints without a twin, and options. values: by KEYS. Raises BadInput."""
    values = dict(values)
    pairs, notes = pairs_of(values.pop("pairs", ()), values.pop("reference", None), values.pop("candidate", None))
    values["files"] = tuple(Path(f) for f in values.pop("files", ()))
    options = HeldoutOptions(**values, gate=gate)
    if options.dtype not in DTYPES:
        raise BadInput(f"--dtype {options.dtype}: {' and '.join(DTYPES)} are known")
    return pairs, notes, options


def run_heldout(pairs: list[Pair], notes: list[str], options: HeldoutOptions, say: Say = lambda _: None) -> dict:
    """Compare every pair on the same tokens; returns the stage's record, with a row for each step. Raises BadInput."""
    started = time.monotonic()
    choice = options.gate
    place = devices.placement(
        choice.candidate_device, choice.reference_device, choice.mesh, choice.processes, streamed=choice.streamed,
        recorded=all(is_record(Path(pair.reference)) for pair in pairs),
    )  # fmt: skip
    opened = [(pair, *_open(pair, choice)) for pair in pairs]
    sequences, files = heldout_text.read(opened, options)
    rows, criteria, unclear = [], [], []
    for pair, reference, candidate in opened:
        found, judging, reasons = _step(pair, reference, candidate, sequences, options, place, say)
        rows.append(found)
        criteria += judging
        unclear += reasons
    worst = max(rows, key=lambda r: np.nan_to_num(abs(r["difference"]), nan=np.inf))
    return judged(
        STAGE,
        started,
        criteria,
        open_questions=unclear,
        passed=f"{len(rows)} {'step' if len(rows) == 1 else 'steps'}, {rows[0]['tokens']:,} tokens each: the mean losses differ by at "
        f"most {abs(worst['difference']):.2g} nat (step {worst['step']})",
        where=[line(r) for r in rows if not r["passed"]],
        advice=["olmo-parity --reference ... --candidate ... on the first step that differs says where"],
        dtype=options.dtype,
        loss_limit=options.loss_limit,
        steps=rows,
        files=files,
        sequences=[sides.describe_sequence(s) for s in sequences],
        notes=notes + heldout_text.notes(files, sequences),
        versions=versions(),
    )


def _open(pair: Pair, choice: GateOptions):
    """Reference and candidate of a pair. Raises BadInput, with the step, where these two cannot be compared."""
    try:
        reference, candidate, _ = sides.open_sides(
            sides.on_this_machine(pair.reference, pair.candidate, choice), pair.candidate,
            replace(choice, batch=None, only_batch=False), devices.Placement(),
        )  # fmt: skip
    except BadInput as error:
        raise BadInput(f"step {pair.step}: {error.headline}", error.faults) from None
    return reference, candidate


def _step(
    pair: Pair, reference, candidate, sequences: list[batches.Sequence], options: HeldoutOptions, place, say: Say
) -> tuple[dict, list[Criterion], list[str]]:
    """One pair: its row, its criteria, and what it leaves open."""
    choice = options.gate
    say(f"step {pair.step}: {reference.path} and {candidate.path}")
    judged_sides = {"reference": sides.describe(reference), "candidate": sides.describe(candidate)}
    whole = place.spread or place.reference == "cuda"
    streamed, why = footprint.choose_streamed(
        None if reference.kind == "record" else reference, candidate, sequences, False if whole else choice.streamed
    )
    if why:
        say(why)
    with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
        runs = Runs(
            reference, candidate, sequences, Path(folder), streamed, place, choice.allow_unknown_keys, versions(),
            judged_sides["reference"]["weights_sha256"], choice.recalibrate, say,
        )  # fmt: skip
        if options.dtype == "float32":
            first, second = runs.float32()
            found = stats.row(first, second, sequences)
            if options.loss_limit is None:
                criteria, unclear, noise = stats.float32_criteria(pair.step, found, runs.noise())
        else:
            wide, first, second = runs.bfloat16()
            found = stats.row(first, second, sequences)
            criteria, unclear, noise = stats.bfloat16_criteria(pair.step, wide, first, second, sequences)
    if options.loss_limit is not None:
        criteria, unclear, noise = *stats.training_criteria(pair.step, found, options.loss_limit), None
    differing = sides.config_differences(reference, candidate)
    criteria = [
        count_criterion(f"step {pair.step}: config fields that differ", stats.LEG, len(differing), "fields"),
        count_criterion(
            f"step {pair.step}: NaN or infinite logits", stats.LEG, first.nonfinite + second.nonfinite, "logits"
        ),
        *criteria,
    ]
    return {
        "step": pair.step,
        "passed": all(c.passed for c in criteria if c.on),
        **found,
        "noise": noise,
        "config_differences": [{"field": n, "reference": a, "candidate": b} for n, a, b in differing],
        **judged_sides,
        "runs": runs.settings,
    }, criteria, unclear  # fmt: skip


def line(found: dict) -> str:
    """One step in a sentence."""
    return (
        f"step {found['step']}: mean loss {found['loss_reference']:.6f} and {found['loss_candidate']:.6f} nat, difference "
        f"{found['difference']:+.2g} +- {found['standard_error']:.2g}, rms of a token {found['rms_difference']:.2g}, same most "
        f"likely token {found['same_top']:.2%}"
    )


def table(record: dict) -> list[str]:
    """The steps as rows of text, the published marks beside them."""
    head = (
        "step",
        "tokens",
        "loss",
        "candidate",
        "difference",
        "+- (1 se)",
        "rms",
        "accuracy",
        "same top",
        "0.01 nat",
        "0.005",
    )
    rows = [head]
    for r in record["steps"]:
        rows.append((
            r["step"], f"{r['tokens']:,}", f"{r['loss_reference']:.5f}", f"{r['loss_candidate']:.5f}", f"{r['difference']:+.2e}",
            f"{r['standard_error']:.1e}", f"{r['rms_difference']:.1e}", f"{r['accuracy_reference']:.4f}", f"{r['same_top']:.2%}",
            *("within" if r[f"within_published_{what}"] else "beyond" for what in ("loss", "accuracy")),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    if record["steps"][0]["bits_per_byte_reference"] is not None:
        lines.append("bits per byte: " + ", ".join(
            f"{r['bits_per_byte_reference']:.5f} and {r['bits_per_byte_candidate']:.5f} (step {r['step']})" for r in record["steps"]
        ))  # fmt: skip
    return lines
