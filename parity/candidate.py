"""The JAX side: olmo_jax from an Orbax tree, in a process of its own, so that XLA's flags are its own too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from . import losses, padded
from .batches import Sequence, mask_length, probe_positions
from .children import run_children, serve
from .devices import Placement, gathered, jax_settings, start_jax

LENGTH_STEP = 128  # tokens; sequences are padded on the right to a multiple, so that few lengths are compiled


def run_candidate(
    target: Path,
    sequences: list[Sequence],
    *,
    dtype: str,
    folder: Path,
    exact_casts: bool = True,
    streamed: bool = False,
    keep: str = losses.LOGITS,
    allow_unknown_keys: tuple[str, ...] = (),
    placement: Placement | None = None,
) -> dict:
    """Compute float32 logits of every sequence into folder/<index>.npy, in a child process; returns its settings.

    dtype, float32 or bfloat16, is that of weights and activations. exact_casts turns XLA's excess precision off; without it
    XLA_FLAGS are taken as found, which is what the user's training would run with. Padding stands after the real tokens, which cannot
    see it, and is cut off before anything is written. streamed holds one layer at a time (streamed_candidate.py). A whole
    float32 run also writes the two of padded.py. keep: logits, or the losses of losses.py alone.
    placement: its mesh and processes are for whole runs. Without sequences
    only the devices are tried. Raises BadInput with the child's own sentence.
    """
    folder.mkdir()
    placement = placement or Placement()
    request = {
        "target": str(target),
        "dtype": dtype,
        "streamed": streamed,
        "keep": keep,
        "device": placement.candidate,
        "mesh": placement.mesh,
        "processes": placement.processes,
        "allow_unknown_keys": list(allow_unknown_keys),
        "sequences": [s.to_json() for s in sequences],
    }
    environment = placement.environment(exact_casts=exact_casts)
    return run_children(__name__, folder, request, environment, f"the JAX side in its {dtype} run")


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process: write logits, return settings."""
    mesh = start_jax(request, index, address)  # before anything else of JAX
    import jax.numpy as jnp

    from ..convert.orbax_io import read_tree
    from ..convert.sources import open_source

    if not request["sequences"]:
        return jax_settings(mesh)
    source = open_source(Path(request["target"]), allow_unknown_keys=tuple(request["allow_unknown_keys"]))
    dtype = getattr(jnp, request["dtype"])
    sequences = [Sequence.from_json(s) for s in request["sequences"]]
    row = None
    if request["streamed"]:
        from .streamed_candidate import write_logits

        write_logits(source.path, source.config, sequences, dtype=dtype, keep=request["keep"], folder=folder)
    else:
        tree = read_tree(source.path) if mesh is None else on_mesh(source.path, source.config, mesh)
        logits_of = logits_function(source.config, tree, dtype)
        for number, sequence in enumerate(sequences):
            logits = row_logits(logits_of, sequence)
            if index == 0:
                losses.write(request["keep"], folder, number, sequence.tokens, logits)
        judged = request["dtype"] == "float32" and request["keep"] == losses.LOGITS
        row = padded.row_of(sequences) if judged else None
        if row:
            padded.write_rows(logits_of, row, folder if index == 0 else None)
    return {
        "implementation": "olmo_jax",
        "dtype": request["dtype"],
        "streamed": request["streamed"],
        "padded_row": row.id if row else None,
        "visible_keys": visible_keys(source.config),
        **jax_settings(mesh),
        "versions": {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax")},
    }


def on_mesh(path: Path, config: Olmo3Config, mesh, rules: Mapping | None = None) -> dict:
    """The tree on a mesh: Orbax's own restore, and for MaxText's layout each device's part of each weight. rules: of sharding.py."""
    import jax

    from ..convert.orbax_io import MaxTextReader, open_item, resolve_tree
    from ..olmo_jax.sharding import RULES, restore, shardings
    from ..olmo_jax.tree import flatten, unflatten

    rules = rules or RULES
    reader = open_item(resolve_tree(path).item)
    if not isinstance(reader, MaxTextReader):
        return restore(path, config, mesh, rules=rules)
    return unflatten(
        {
            name: jax.make_array_from_callback(
                reader.leaves[name].shape, sharding, functools.partial(reader.read, name)
            )
            for name, sharding in flatten(shardings(config, mesh, rules)).items()
        }
    )


def forward_of(config: Olmo3Config, tree: dict, dtype) -> Callable[[Sequence], np.ndarray]:
    """A function from a sequence of T tokens to logits [T, V] float32 of olmo_jax on these leaves.

    dtype is that of weights and activations.
    """
    logits_of = logits_function(config, tree, dtype)
    return lambda sequence: row_logits(logits_of, sequence)


def row_logits(logits_of: Callable, sequence: Sequence) -> np.ndarray:
    """Logits [T, V] of one sequence, run padded on the right."""
    length = len(sequence.tokens)
    return logits_of(*padded_row(sequence, padded_length(length)), window=sequence.window)[0, :length]


def logits_function(config: Olmo3Config, tree: dict, dtype) -> Callable[..., np.ndarray]:
    """A function (tokens, positions, segment_ids, window=None), [B, T] -> float32 [B, T, V], of olmo_jax on these leaves.

    Leaves that lie on a mesh stay there, and the compiler lays out the rest; the logits come back whole.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ..olmo_jax.model import from_tree

    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
    models = {}

    # Not nnx.jit: it gives the parameters back as results, and XLA makes a copy of all weights for every window.
    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, state, tokens, positions, segment_ids):
        return nnx.merge(graph, state)(tokens, positions, segment_ids).astype(jnp.float32)

    def logits_of(tokens, positions, segment_ids, window: int | None = None) -> np.ndarray:
        if window not in models:
            own = config if window is None else config.replace(sliding_window=window)
            models[window] = nnx.split(from_tree(own, tree, dtype=dtype))
        return gathered(run(*models[window], tokens, positions, segment_ids))

    return logits_of


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
    serve(_run)
