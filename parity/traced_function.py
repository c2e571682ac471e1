"""A candidate function in the trace: what it names of its activations, beside the reference's modules of the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from .batches import Sequence
from .candidate import padded_length
from .candidate_fn import called, function_row
from .devices import gathered
from .envelopes import Distance
from .traced_candidate import like
from .traced_reference import Part

# What a module of modules gives is what its last step gives.
ENDS = {"": "mlp_residual", ".self_attn": "self_attn.o_proj", ".mlp": "mlp.down_proj"}
PREFIX = "model."  # that Hugging Face puts before every name but lm_head


class NamedActivations:
    """All activations of all sequences, in memory, from a factory like that of the logits (docs/candidate-fn.md).

    A function runs as a whole: the reference's values cannot be put into it, so only carried errors are known.
    """

    def __init__(self, make: Callable, checkpoint: Path | None, config: dict, dtype: str, sequences: list[Sequence]):
        self.sequences = sequences
        self.outputs: list[dict[str, np.ndarray]] = []
        models: dict[int | None, Callable] = {}
        for sequence in sequences:
            window = sequence.window
            if window not in models:
                models[window] = called("activations factory", make, checkpoint, config, dtype, window)
            row = function_row(sequence, padded_length(len(sequence.tokens)))
            named = called("activations", models[window], *row)
            if not isinstance(named, dict):
                raise BadInput(
                    f"the candidate's activations are a {type(named).__name__}; a dictionary of module name: array "
                    "[B, T, ...] is wanted (docs/candidate-fn.md)"
                )
            self.outputs.append({str(n).removeprefix(PREFIX): _row(n, a, sequence) for n, a in named.items()})

    def compare(self, part: Part) -> tuple[dict[str, Distance], dict, dict]:
        """Carried distances from one of the reference's parts, of the modules that the function names."""
        free: dict[str, Distance] = {}
        for right, own in zip(part.outputs, self.outputs, strict=True):
            for name, array in right.items():
                found = own.get(f"{part.name}.{name}" if name else part.name)
                for end, last in ENDS.items():
                    if found is None and name == last:
                        found = own.get(part.name + end)
                if found is not None:
                    found = found[:, slice(*part.columns)] if part.columns and found.ndim == 2 else found
                    free.setdefault(name, Distance()).add(array, like(array, found))
        return free, {}, {}


def _row(name: str, array, sequence: Sequence) -> np.ndarray:
    """[T, ...] float32 of an activation [1, padded T, ...]."""
    found = gathered(array)
    if found.ndim < 2 or found.shape[0] != 1 or found.shape[1] < len(sequence.tokens):
        raise BadInput(f"the candidate's activation {name} has shape {found.shape}, [B, T, ...] is wanted with B = 1")
    return found[0, : len(sequence.tokens)].astype(np.float32)
