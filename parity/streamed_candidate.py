"""The JAX side layer by layer: olmo_jax's own parts over an Orbax tree, of which one layer at a time is in memory."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..convert.orbax_io import TreeReader, open_item, resolve_tree
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.model import AttentionInputs, Embedding, Linear, attention_inputs, part_from_tree
from ..olmo_jax.tree import leaves, unflatten
from . import losses
from .batches import Sequence
from .candidate import padded_length, padded_row
from .streaming import SLICE_BYTES, rows_of, slices

HEAD_COLUMNS = 8192  # of the head, multiplied at a time: 134 MB of a 7B head in float32
EMBEDDING, HEAD = "embed_tokens/embedding", "lm_head/kernel"


def write_logits(
    path: Path, config: Olmo3Config, sequences: list[Sequence], *, dtype, keep: str = losses.LOGITS, folder: Path
) -> None:
    """Fill folder/<index>.npy, [T, V] float32 or what losses.py keeps of it; dtype is that of weights and activations.

    One function is compiled for each padded length: masks, rotary tables and weights are its arguments, and layers differ
    in nothing else. In memory are one layer, the activations [T, D] of every sequence, and what grows with T squared: one
    mask of bytes [T, T] for each layer type and kind of sequence, and for the sequence in work the scores [N, T, T] in
    dtype and float32 (at 512 tokens of the 7B model 32 MiB, at 8192 tokens 8 GiB).
    """
    reader = open_item(resolve_tree(path).item)
    rows = [padded_row(s, padded_length(len(s.tokens))) for s in sequences]
    x = embedded(reader, config, [tokens for tokens, _, _ in rows], dtype)
    inputs = {_kind(s, row): inputs_of(config, s, row) for s, row in zip(sequences, rows, strict=True)}
    for i, layer_type in enumerate(config.layer_types):
        layer = part_from_tree(config, f"layers.{i}", subtree(reader, config, f"layers/{i}/", dtype), dtype=dtype)
        for index, sequence in enumerate(sequences):
            x[index] = run_part(layer, x[index], inputs[_kind(sequence, rows[index])][layer_type])
        jax.block_until_ready(x)  # or the layer would still be in use while the next one is read
        del layer
    norm = part_from_tree(config, "norm", subtree(reader, config, "norm/", dtype), dtype=dtype)
    x = [run_part(norm, one) for one in x]
    files = [losses.place(keep, folder, i, s.tokens, config.vocab_size) for i, s in enumerate(sequences)]
    for start, stop, head in head_parts(reader, config, dtype):
        for file, one in zip(files, x, strict=True):
            file[:, start:stop] = np.asarray(_head(head, one)[0, : len(file)])


def run_part(part: nnx.Module, *arguments):
    """The compiled part. Not under nnx.jit, which gives the weights back as results: XLA would copy them."""
    return _compiled(*nnx.split(part), *arguments)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(graph, state, *arguments):
    return nnx.merge(graph, state)(*arguments)


def _head(part: Linear | Embedding, x) -> jax.Array:  # [1, T, D] -> [1, T, columns] float32
    return _compiled_head(*nnx.split(part), x)


@functools.partial(jax.jit, static_argnums=0)
def _compiled_head(graph, state, x):
    part = nnx.merge(graph, state)
    return (part.attend(x) if isinstance(part, Embedding) else part(x)).astype(jnp.float32)


def subtree(reader: TreeReader, config: Olmo3Config, prefix: str, dtype) -> dict:
    """The leaves below prefix, cast one by one: a layer is never held in two dtypes."""
    paths = [path for path in leaves(config) if path.startswith(prefix)]
    return unflatten({path.removeprefix(prefix): jnp.asarray(reader.read(path), dtype) for path in paths})


def _kind(sequence: Sequence, row: tuple) -> tuple:
    """What masks and rotary tables depend on."""
    return sequence.window, sequence.first_position, sequence.documents, row[0].shape[1]


def inputs_of(config: Olmo3Config, sequence: Sequence, row: tuple) -> dict[str, AttentionInputs]:
    own = config if sequence.window is None else config.replace(sliding_window=sequence.window)
    tokens, positions, segment_ids = row
    return attention_inputs(own, tokens.shape[1], positions, segment_ids)


def embedded(reader: TreeReader, config: Olmo3Config, tokens: list[np.ndarray], dtype) -> list[jax.Array]:
    """[1, T, D] for tokens [1, T] of every sequence, from the rows that occur."""
    leaf = reader.leaves[EMBEDDING]
    ids = np.unique(np.concatenate([one[0] for one in tokens]))
    step = _aligned(SLICE_BYTES * config.vocab_size // leaf.nbytes, leaf.chunk_shape[0])
    found = rows_of(lambda a, b: reader.read(EMBEDDING, (slice(a, b),)), config.vocab_size, ids, step)
    embed = Embedding({"embedding": jnp.asarray(found, dtype)}, dtype)
    return [run_part(embed, np.searchsorted(ids, one).astype(np.int32)) for one in tokens]


def head_parts(reader: TreeReader, config: Olmo3Config, dtype):
    """(start, stop, the part of the head that gives the logits of these tokens), slice by slice."""
    name = EMBEDDING if config.tie_word_embeddings else HEAD
    chunk = reader.leaves[name].chunk_shape[0 if config.tie_word_embeddings else 1]
    for start, stop in slices(config.vocab_size, _aligned(HEAD_COLUMNS, chunk)):
        if config.tie_word_embeddings:
            rows = reader.read(name, (slice(start, stop),))
            yield start, stop, Embedding({"embedding": jnp.asarray(rows, dtype)}, dtype)
        else:
            columns = reader.read(name, (slice(None), slice(start, stop)))
            yield start, stop, Linear({"kernel": jnp.asarray(columns, dtype)})


def _aligned(step: int, chunk: int) -> int:
    """At least one chunk, and whole chunks: a read costs whole ones."""
    return max(step // chunk, 1) * chunk
