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
from .batches import Sequence, mask_length, probe_positions

# XLA leaves out casts to bfloat16 inside fused code unless told not to: then "where the reference casts, we cast" is true.
NO_EXCESS_PRECISION = "--xla_allow_excess_precision=false"
LENGTH_STEP = 128  # tokens; sequences are padded on the right to a multiple, so that few lengths are compiled


def run_candidate(
    target: Path,
    sequences: list[Sequence],
    *,
    dtype: str,
    folder: Path,
    exact_casts: bool = True,
    streamed: bool = False,
    allow_unknown_keys: tuple[str, ...] = (),
) -> dict:
    """Compute float32 logits of every sequence into folder/<index>.npy, in a child process; returns its settings.

    dtype, float32 or bfloat16, is that of weights and activations. exact_casts turns XLA's excess precision off; without it
    XLA_FLAGS are taken as found, which is what the user's training would run with. Padding stands after the real tokens, which cannot
    see it, and is cut off before anything is written. streamed holds one layer at a time (streamed_candidate.py). Raises BadInput with the child's own sentence.
    """
    folder.mkdir()
    request = {
        "target": str(target),
        "dtype": dtype,
        "streamed": streamed,
        "folder": str(folder),
        "allow_unknown_keys": list(allow_unknown_keys),
        "sequences": [{**vars(s), "tokens": s.tokens.tolist()} for s in sequences],
    }
    (folder / "request.json").write_text(json.dumps(request))
    found = os.environ.get("XLA_FLAGS", "")
    flags = f"{found} {NO_EXCESS_PRECISION}".strip() if exact_casts else found  # of two contrary flags the last counts
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
    dtype = getattr(jnp, request["dtype"])
    sequences = [
        Sequence(**{**s, "tokens": np.asarray(s["tokens"], np.int32), "documents": tuple(s["documents"])})
        for s in request["sequences"]
    ]
    if request["streamed"]:
        from .streamed_candidate import write_logits

        write_logits(source.path, source.config, sequences, dtype=dtype, folder=folder)
    else:
        forward = forward_of(source.config, read_tree(source.path), dtype)
        for index, sequence in enumerate(sequences):
            np.save(folder / f"{index}.npy", forward(sequence))
    return {
        "implementation": "olmo_jax",
        "dtype": request["dtype"],
        "streamed": request["streamed"],
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "visible_keys": visible_keys(source.config),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "versions": {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax")},
    }


def forward_of(config: Olmo3Config, tree: dict, dtype) -> Callable[[Sequence], np.ndarray]:
    """A function from a sequence of T tokens to logits [T, V] float32 of olmo_jax on these leaves.

    dtype is that of weights and activations.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ..olmo_jax.model import from_tree

    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
    models = {}

    @nnx.jit
    def logits_of(model, tokens, positions, segment_ids):
        return model(tokens, positions, segment_ids).astype(jnp.float32)

    def forward(sequence: Sequence) -> np.ndarray:
        window = sequence.window
        if window not in models:
            own = config if window is None else config.replace(sliding_window=window)
            models[window] = from_tree(own, tree, dtype=dtype)
        length = len(sequence.tokens)
        logits = logits_of(models[window], *padded_row(sequence, padded_length(length)))
        return np.asarray(logits[0, :length])

    return forward


def padded_length(tokens: int) -> int:
    """The length a row of so many tokens is run at."""
    return -(-tokens // LENGTH_STEP) * LENGTH_STEP


def padded_row(sequence: Sequence, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Tokens, positions and segment ids [1, length] int32, padded on the right; the padding is a document of its own."""
    missing = length - len(sequence.tokens)
    tokens = np.pad(sequence.tokens.astype(np.int32), (0, missing))
    positions = sequence.positions()
    positions = np.concatenate([positions, positions[-1] + 1 + np.arange(missing, dtype=np.int32)])
    segments = sequence.segment_ids()
    segments = None if segments is None else np.pad(segments, (0, missing), constant_values=segments[-1] + 1)[None]
    return tokens[None], positions[None], segments


def visible_keys(config: Olmo3Config) -> dict[str, list[list[int]]]:
    """By layer type, [position, keys seen] in the masks that olmo_jax builds; see reference.visible_keys."""
    from ..olmo_jax.layers import attention_mask

    counts = {}
    for layer_type in sorted(set(config.layer_types)):
        window = config.window(config.layer_types.index(layer_type))
        seen = np.asarray(attention_mask(mask_length(config), window))[0].sum(-1)
        counts[layer_type] = [[p, int(seen[p])] for p in probe_positions(config)]
    return counts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
