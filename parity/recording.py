"""The reference run alone, and kept for later gates (recorded.py says how it is stored)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ..convert.sources import open_source
from ..olmo_jax.errors import BadInput
from . import calibrate, devices, footprint, sides
from .identity import versions
from .legs import main_dtype
from .options import DEFAULTS, GateOptions
from .recorded import write_record
from .reference import require_torch, run_reference


def record_reference(
    reference: Path | str, target: Path, options: GateOptions = DEFAULTS, say: Callable[[str], None] = lambda _: None
) -> dict:
    """Run the reference alone and keep what a gate needs of it in the folder target; returns what was written.

    `run_gate(target, candidate)` then needs no torch. Raises BadInput.
    """
    require_torch()
    reference = sides.on_this_machine(reference, None, options)
    source = open_source(reference, allow_unknown_keys=options.allow_unknown_keys)
    if source.kind != "hf":
        raise BadInput(f"{reference} is of the {source.kind} form; a Hugging Face folder is wanted")
    sequences = sides.sequences_of(source, source, options)
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
                weights=facts["side"]["weights_sha256"],
                plain=plain,
                run=lambda chosen, folder: run("float32", None, folder, chosen, benign=True),
                folder=Path(folder) / "benign",
                facts=[versions()],
                again=options.recalibrate,
            )

    facts = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": main_dtype(source),
        "side": sides.describe(source),
        "versions": versions(),
    }
    return write_record(target, source, sequences, run, noise, facts)
