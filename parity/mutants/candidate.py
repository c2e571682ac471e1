"""The candidate of a mutant: olmo_jax part by part, where only what a fault touches, and what comes after it, is run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...convert.mapping import apply_layout, weights
from ...olmo_jax.config import Olmo3Config
from ...olmo_jax.model import RMSNorm, part_from_tree, with_calls
from ...olmo_jax.tree import unflatten
from ..streamed_candidate import run_part
from .places import EMBEDDING, HEAD, NORM
from .planting import Planted, Row, part_of


class Candidate:
    """The right model in one dtype on some rows: what every part was given, and the logits. parts: those of another Candidate.

    Parts of right code are compiled, once for all layers; those with a step replaced run op by op: to compile each would
    take most of the time. Without excess precision both give the same bits in bfloat16. In memory are the weights, and the
    activations between layers.
    """

    def __init__(self, config: Olmo3Config, tensors: Mapping[str, np.ndarray], dtype, rows: list[Row], parts=None):
        self.config, self.tensors, self.dtype, self.rows = config, tensors, jnp.dtype(dtype), rows
        self.order = [EMBEDDING, *(f"layers.{i}" for i in range(config.num_hidden_layers)), NORM, HEAD]
        self.parts = parts or {name: self._part(config, name, {}) for name in self.order}
        self.inputs = [row.inputs(config) for row in rows]
        self.given: dict[str, list] = {}  # by part: what it is given, a row each
        x = [jnp.asarray(row.tokens) for row in rows]
        for name in self.order:
            self.given[name] = x
            x = [_run(self.parts[name], one, self._inputs(name, k)) for k, one in enumerate(x)]
        self.right = [_cut(one, row) for one, row in zip(x, rows, strict=True)]

    def logits(self, planted: Planted) -> list[np.ndarray]:
        """[T, V] float32 of every row, with the fault."""
        if planted.build:
            return self._whole(planted.build)
        if planted.change_row:
            return [self._changed_row(planted.change_row(self.rows[0])), *self.right[1:]]  # one row is enough
        changed = planted.parts | (
            {HEAD} if self.config.tie_word_embeddings and EMBEDDING in planted.tensors else set()
        )
        if not changed:
            return self.right
        start = min(self.order.index(name) for name in changed)
        x = self.given[self.order[start]]
        for name in self.order[start:]:
            run = self.planted_part(planted, name) if name in changed else self.parts[name]
            for k, row in enumerate(self.rows):
                inputs = self._inputs(name, k)
                if planted.change_inputs and name in changed and inputs is not None:
                    layer = int(name.split(".")[1])
                    if layer in planted.input_layers:
                        inputs = planted.change_inputs(layer, inputs, row)
                x = [*x[:k], _run(run, x[k], inputs), *x[k + 1 :]]
        return [_cut(one, row) for one, row in zip(x, self.rows, strict=True)]

    @functools.cached_property
    def smallest_squares(self) -> dict[str, float]:
        """The smallest mean square that each norm is given, by its name, over all tokens of all rows."""
        found: dict[str, float] = {}

        def see(name, module, *args):
            if isinstance(module, RMSNorm):
                least = float(jnp.mean(jnp.square(args[0].astype(jnp.float32)), axis=-1).min())
                found[name] = min(found.get(name, least), least)
            return module(*args)

        for name in self.order:
            for k, x in enumerate(self.given[name]):
                if name == NORM:
                    see(NORM, self.parts[NORM], x)
                elif name.startswith("layers."):
                    with_calls(self.parts[name], see, f"{name}.")(x, self._inputs(name, k))
        return found

    def planted_part(self, planted: Planted, name: str) -> Callable:
        """A part with its fault: a callable of what the part is called with."""
        if any(part_of(n) == name for n in planted.tensors) or (name == HEAD and EMBEDDING in planted.tensors):
            part = self._part(self.config, name, planted.tensors)
        else:
            part = self.parts[name]
        call = planted.calls.get(name)
        if call is None:
            return part
        inner = with_calls(part, call, "") if name.startswith("layers.") else part
        return lambda *args: call("", inner, *args)

    def _part(self, config: Olmo3Config, name: str, planted: Mapping[str, np.ndarray]):
        own = EMBEDDING if name == HEAD and config.tie_word_embeddings else name
        flat = {}
        for w in weights(config):
            path, leaf = w.jax.rsplit("/", 1)
            module = path.replace("/", ".")
            if part_of(module) == own:
                array = apply_layout(w.layout, planted.get(module, self.tensors[module]))
                flat[f"{path}/{leaf}".removeprefix(own.replace(".", "/") + "/")] = jnp.asarray(array, self.dtype)
        part = part_from_tree(config, own, unflatten(flat), dtype=self.dtype)
        return part.attend if own != name else part

    def _inputs(self, name: str, row: int):
        return self.inputs[row][self._type(name)] if name.startswith("layers.") else None

    def _type(self, name: str) -> str:
        return self.config.layer_types[int(name.split(".")[1])]

    def _changed_row(self, row: Row) -> np.ndarray:
        inputs = row.inputs(self.config)
        x = jnp.asarray(row.tokens)
        for name in self.order:
            own = inputs[self._type(name)] if name.startswith("layers.") else None
            x = _run(self.parts[name], x, own)
        return _cut(x, row)

    def _whole(self, build: Callable) -> list[np.ndarray]:
        flat = {}
        for w in weights(self.config):
            module = w.jax.rsplit("/", 1)[0].replace("/", ".")
            flat[w.jax] = np.ascontiguousarray(apply_layout(w.layout, self.tensors[module]))
        logits_of = build(self.config, unflatten(flat), self.dtype)
        return [
            logits_of(r.tokens, r.positions, r.segment_ids, window=r.window)[r.index, : r.length] for r in self.rows
        ]


def _run(part: Callable, x, inputs):
    arguments = (x,) if inputs is None else (x, inputs)
    return run_part(part, *arguments) if isinstance(part, nnx.Module) else part(*arguments)


def _cut(x: jax.Array, row: Row) -> np.ndarray:
    return np.asarray(x[row.index, : row.length].astype(jnp.float32))
