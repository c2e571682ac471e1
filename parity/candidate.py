"""The JAX side: olmo_jax from an Orbax tree, in a process of its own, so that XLA's flags are its own too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.errors import BadInput
from .batches import Sequence

# XLA leaves out casts to bfloat16 inside fused code unless told not to: then "where the reference casts, we cast" is true.
NO_EXCESS_PRECISION = "--xla_allow_excess_precision=false"
LENGTH_STEP = 128  # tokens; sequences are padded on the right to a multiple, so that few lengths are compiled


def run_candidate(
    target: Path,
    sequences: list[Sequence],
    *,
    dtype: str,
    folder: Path,
    allow_unknown_keys: tuple[str, ...] = (),
) -> dict:
    """Compute float32 logits of every sequence into folder/<index>.npy, in a child process; returns its settings.

    dtype, float32 or bfloat16, is that of weights and activations. Padding stands after the real tokens, which cannot
    see it, and is cut off before anything is written. Raises BadInput with the child's own sentence.
    """
    folder.mkdir()
    request = {
        "target": str(target),
        "dtype": dtype,
        "folder": str(folder),
        "allow_unknown_keys": list(allow_unknown_keys),
        "sequences": [
            {"tokens": s.tokens.tolist(), "first_position": s.first_position, "window": s.window} for s in sequences
        ],
    }
    (folder / "request.json").write_text(json.dumps(request))
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), NO_EXCESS_PRECISION]))
    child = subprocess.run(
        [sys.executable, "-m", "olmo_parity.parity.candidate", str(folder)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    answer = folder / "answer.json"
    result = json.loads(answer.read_text()) if answer.exists() else {}
    if "faults" in result:
        raise BadInput(result["headline"], result["faults"])
    if child.returncode or not result:
        ending = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        hint = " (out of memory?)" if child.returncode == -9 else ""
        raise BadInput(f"the JAX side ended with {ending}{hint} in its {dtype} run: {child.stderr.strip()[-2000:]}")
    return result


def main(folder: Path) -> None:
    """The child process: read request.json, write logits and answer.json."""
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = _run(request, folder)
    except BadInput as error:
        answer = {"headline": error.headline, "faults": list(error.faults)}
    partial = folder / "answer.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(folder / "answer.json")


def _run(request: dict, folder: Path) -> dict:
    import jax
    import jax.numpy as jnp

    from ..convert.orbax_io import read_tree
    from ..convert.sources import open_source

    jax.config.update("jax_default_matmul_precision", "highest")  # float32 is float32 on GPU and TPU too
    source = open_source(Path(request["target"]), allow_unknown_keys=tuple(request["allow_unknown_keys"]))
    forward = forward_of(source.config, read_tree(source.path), getattr(jnp, request["dtype"]))
    for index, sequence in enumerate(request["sequences"]):
        tokens = np.asarray(sequence["tokens"], np.int32)
        logits = forward(tokens, sequence["first_position"], sequence["window"])
        np.save(folder / f"{index}.npy", logits)
    return {
        "implementation": "olmo_jax",
        "dtype": request["dtype"],
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "versions": {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax")},
    }


def forward_of(config: Olmo3Config, tree: dict, dtype) -> Callable[[np.ndarray, int, int | None], np.ndarray]:
    """A function (tokens [T], first position, imposed window) -> logits [T, V] float32 of olmo_jax on these leaves.

    dtype is that of weights and activations.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ..olmo_jax.model import from_tree

    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
    models = {}

    @nnx.jit
    def logits_of(model, tokens, positions):
        return model(tokens, positions).astype(jnp.float32)

    def forward(tokens: np.ndarray, first_position: int, window: int | None) -> np.ndarray:
        if window not in models:
            own = config if window is None else config.replace(sliding_window=window)
            models[window] = from_tree(own, tree, dtype=dtype)
        padded = -(-len(tokens) // LENGTH_STEP) * LENGTH_STEP
        row = np.zeros((1, padded), np.int32)
        row[0, : len(tokens)] = tokens
        positions = np.arange(first_position, first_position + padded, dtype=np.int32)[None]
        logits = logits_of(models[window], row, positions)
        return np.asarray(logits[0, : len(tokens)])

    return forward


if __name__ == "__main__":
    main(Path(sys.argv[1]))
