"""olmo-parity trace from end to end: both sides in one child process, part by part, and a record of every module."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ..convert.orbax_io import open_item, resolve_tree
from ..convert.sources import open_source
from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.errors import BadInput
from . import devices, gate, identity, overrides, sides
from .batches import Sequence
from .candidate_fn import CandidateFn, load
from .children import run_children, serve
from .devices import Placement, start_jax
from .legs import narrower
from .options import DEFAULTS, GateOptions
from .recorded import is_record

SCHEMA = "olmo-parity/trace/1"
DTYPES = ("float32", "bfloat16")
MOST_PROMPTS = 4  # beside the built-in sequences
MOST_TOKENS = 1024  # of one prompt; scores grow with the square


def run_trace(
    reference: Path,
    candidate: Path | None,
    options: GateOptions = DEFAULTS,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """Trace an Orbax tree, or a candidate function that names its activations, beside a Hugging Face folder.

    Returns the record, with a verdict: pass where every module stays in its envelope. Raises BadInput where nothing can
    be traced: a record holds logits and no activations.
    """
    started = time.monotonic()
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}: {' and '.join(DTYPES)} are known")
    if is_record(reference):
        raise BadInput(f"{reference} is a record: it holds logits, and no activations to trace. Give the checkpoint")
    changed = overrides.parse(options.override)
    if changed:
        with overrides.applied(reference, candidate, changed) as (a, b):
            record = run_trace(a, b, replace(options, override=()), dtype, say)
        return record | {"reference": str(reference), "candidate": str(candidate), "overrides": changed}
    place = devices.placement(
        options.candidate_device, None, None, None, streamed=True, function=options.candidate_fn is not None
    )
    ref, cand, function = sides.open_sides(reference, candidate, options, place)
    found = trace_sides(
        ref,
        function or cand,
        chosen(sides.sequences_of(ref, cand, options)),
        dtype,
        place,
        options.allow_unknown_keys,
        say,
    )
    out = [m["name"] for m in found["modules"] if m["left"] or m["carried"]["left"]]
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": gate.VERDICTS[gate.FAIL if out else gate.PASS],
        "exit_code": gate.FAIL if out else gate.PASS,
        "reference": str(ref.path),
        "candidate": str(candidate or options.candidate_fn),
        "overrides": {},
        "trace": found,
        "notes": _config_notes(ref, cand) + sides.notes(ref, cand, [], []),
        "versions": identity.versions(),
        "seconds": round(time.monotonic() - started, 2),
    }


def _config_notes(reference, candidate) -> list[str]:
    """Fields in which the two configs differ: what is certain of a module may come from there."""
    found = sides.config_differences(reference, candidate) if candidate else []
    return [f"config: {field} is {a!r} in the reference, {b!r} in the candidate" for field, a, b in found]


def chosen(sequences: list[Sequence], worst_first: list[str] = ()) -> list[Sequence]:
    """What is traced: the built-in sequences and a few prompts, those named first before others, none of them too long."""
    prompts = [s for s in sequences if not s.built_in]
    order = {identity: rank for rank, identity in enumerate(worst_first)}
    prompts.sort(key=lambda s: order.get(s.id, len(order)))
    cut = [
        s
        if len(s.tokens) <= MOST_TOKENS
        else replace(s, tokens=s.tokens[:MOST_TOKENS], cut_from=s.cut_from or len(s.tokens))
        for s in prompts[:MOST_PROMPTS]
    ]
    return [s for s in sequences if s.built_in] + cut


def trace_sides(
    reference,
    candidate,
    sequences: list[Sequence],
    dtype: str,
    place: Placement,
    allow_unknown_keys: tuple[str, ...],
    say: Callable[[str], None],
) -> dict:
    """The trace of opened sides. Both run in one child process, one layer of each in memory; torch on the CPU.

    candidate: a Source, or a CandidateFn. Raises BadInput where a candidate function names no activations.
    """
    function = isinstance(candidate, CandidateFn)
    say(f"trace in {dtype}: both sides, module by module")
    request = {
        "reference": str(reference.path),
        "target": None if function else str(candidate.path),
        "spec": candidate.spec if function else None,
        "checkpoint": str(candidate.checkpoint.absolute()) if function and candidate.checkpoint else None,
        "dtype": dtype,
        "round_to": narrower(reference, candidate) if dtype == "float32" else None,
        "device": place.candidate,
        "mesh": None,
        "processes": 1,
        "allow_unknown_keys": list(allow_unknown_keys),
        "sequences": [{**vars(s), "tokens": s.tokens.tolist()} for s in sequences],
    }
    with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
        alone = replace(place, mesh=None, processes=1, reference="cpu")
        return run_children(__name__, Path(folder), request, alone.environment(), f"the trace in {dtype}")


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process."""
    start_jax(request, index, address)
    from .trace import record_of, trace_parts  # these import JAX
    from .traced_reference import reference_parts

    keys, dtype = tuple(request["allow_unknown_keys"]), request["dtype"]
    reference = open_source(Path(request["reference"]), allow_unknown_keys=keys)
    sequences = [
        Sequence(**{**s, "tokens": np.asarray(s["tokens"], np.int32), "documents": tuple(s["documents"])})
        for s in request["sequences"]
    ]
    candidate = _function(request, reference, sequences) if request["spec"] else _tree(request, keys, sequences)
    parts = reference_parts(reference, sequences, dtype=dtype, round_to=request["round_to"])
    rows = trace_parts(parts, candidate, reference, dtype)
    if not rows:
        raise BadInput(
            "the candidate's activations have none of the names that could be compared, such as layers.0.self_attn.q_proj; "
            f"they have {', '.join(sorted(candidate.outputs[0])[:5])}"
        )
    return record_of(rows, dtype, [s.id for s in sequences])


def _tree(request: dict, keys: tuple[str, ...], sequences: list[Sequence]):
    from .traced_candidate import TracedCandidate

    opened = open_source(Path(request["target"]), allow_unknown_keys=keys)
    return TracedCandidate(open_item(resolve_tree(opened.path).item), opened.config, sequences, request["dtype"])


def _function(request: dict, reference, sequences: list[Sequence]):
    from .traced_function import NamedActivations

    _, activations = load(request["spec"])
    if activations is None:
        raise BadInput(
            f"--candidate-fn {request['spec']} names no activations, so nothing can be traced: put a factory "
            f"{request['spec'].rpartition(':')[2]}_activations beside it (docs/candidate-fn.md)"
        )
    checkpoint = Path(request["checkpoint"]) if request["checkpoint"] else None
    return NamedActivations(activations, checkpoint, to_hf(reference.config), request["dtype"], sequences)


if __name__ == "__main__":
    serve(_run)
