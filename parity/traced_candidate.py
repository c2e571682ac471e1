"""The JAX side of the trace: olmo_jax part by part beside the reference, freely and with the reference's values put in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..convert.orbax_io import TreeReader
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.model import AttentionInputs, Embedding, Linear, part_from_tree, with_calls
from .batches import Sequence
from .candidate import padded_length, padded_row
from .envelopes import Distance
from .streamed_candidate import EMBEDDING, HEAD, embedded, inputs_of, subtree
from .traced_reference import Part

Call = (
    Callable  # call(name within the part, module, *args) in the place of module(*args), as in olmo_jax.model.with_calls
)


class TracedCandidate:
    """olmo_jax over a tree, one part in memory at a time, in the order in which the reference's parts come.

    reader: a TreeReader, or anything with its `leaves` and `read`. Faults are planted by calls, what stands by the name of
    a part in the place of its modules' calls and of its own ('' is the part), and change_inputs(layer index, sequence index,
    AttentionInputs) -> AttentionInputs. Where every part differs, compiling takes longer than compiled=False, op by op.
    """

    def __init__(
        self,
        reader: TreeReader,
        config: Olmo3Config,
        sequences: list[Sequence],
        dtype: str = "float32",
        calls: Mapping[str, Call] | None = None,
        change_inputs: Callable[[int, int, AttentionInputs], AttentionInputs] | None = None,
        compiled: bool = True,
    ):
        self.reader, self.config, self.sequences = reader, config, sequences
        self.dtype = jnp.dtype(dtype)
        self.layer_outputs, self.plain = (f if compiled else f.__wrapped__ for f in (_outputs, _plain))
        self.calls, self.change_inputs = dict(calls or {}), change_inputs
        self.rows = [padded_row(s, padded_length(len(s.tokens))) for s in sequences]
        self.inputs = [inputs_of(config, s, row) for s, row in zip(sequences, self.rows, strict=True)]
        self.x: list[jax.Array] = []  # what the last part gave, carried along

    def compare(self, part: Part) -> tuple[dict[str, Distance], dict[str, Distance], dict[str, list[np.ndarray]]]:
        """This side's distances from one of the reference's parts, freely and with its values put in; and the latter's outputs.

        Outputs are float32 [T, ...] by sequence. An output of another size than the reference's is infinitely far off.
        """
        free: dict[str, Distance] = {name: Distance() for name in part.outputs[0]}
        forced: dict[str, Distance] = {name: Distance() for name in part.outputs[0]}
        given: dict[str, list[np.ndarray]] = {name: [] for name in part.outputs[0]}
        for index, right in enumerate(part.outputs):
            own, put_in = self._both(part, index)
            for name, array in right.items():
                free[name].add(array, like(array, own.get(name)))
                forced[name].add(array, like(array, put_in.get(name)))
                if name in put_in:
                    same = np.size(put_in[name]) == array.size
                    given[name].append(np.reshape(put_in[name], array.shape) if same else np.asarray(put_in[name]))
        return free, forced, given

    def _both(self, part: Part, index: int) -> tuple[dict, dict]:
        """By name: outputs [T, ...] of one sequence, free and with the reference's values put in."""
        length = len(self.sequences[index].tokens)
        call = self.calls.get(part.name)
        if part.name == "embed_tokens":
            if not self.x:
                rows = [tokens for tokens, _, _ in self.rows]
                self.x = self._embedded(rows, call)
            out = _cut(self.x[index], length)
            return {"": out}, {"": out}
        here = jnp.asarray(_padded(part.inputs[index], self.rows[index][0].shape[1]), self.dtype)
        module = self._part(part)
        if part.name.startswith("layers."):
            number = int(part.name.split(".")[1])
            inputs = self.inputs[index][self.config.layer_types[number]]
            if self.change_inputs:
                inputs = self.change_inputs(number, index, inputs)
            graph, state = nnx.split(module)
            self.x[index], own = self.layer_outputs(graph, call, length, state, self.x[index], inputs, {})
            right = {n: jnp.asarray(a) for n, a in part.outputs[index].items()}
            _, put_in = self.layer_outputs(graph, call, length, state, here, inputs, right)
            return jax.device_get((own, put_in))
        if part.name == "norm":
            self.x[index], again = (self.plain(*nnx.split(module), call, x) for x in (self.x[index], here))
            return {"": _cut(self.x[index], length)}, {"": _cut(again, length)}
        own, again = (_cut(self.plain(*nnx.split(module), call, x), length) for x in (self.x[index], here))
        return {"": own}, {"": again}

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one part, for all sequences
    def _part_named(self, name: str, columns: tuple[int, int] | None) -> nnx.Module:
        if name != "lm_head":
            tree = subtree(self.reader, self.config, name.replace(".", "/") + "/", self.dtype)
            return part_from_tree(self.config, name, tree, dtype=self.dtype)
        span = slice(*columns)
        if self.config.tie_word_embeddings:
            rows = self.reader.read(EMBEDDING, (span,))
            return Embedding({"embedding": jnp.asarray(rows, self.dtype)}, self.dtype)
        return Linear({"kernel": jnp.asarray(self.reader.read(HEAD, (slice(None), span)), self.dtype)})

    def _part(self, part: Part) -> nnx.Module:
        return self._part_named(part.name, part.columns)

    def _embedded(self, rows: list[np.ndarray], call: Call | None) -> list[jax.Array]:
        def lookup(tokens):
            return embedded(self.reader, self.config, [np.asarray(tokens)], self.dtype)[0]

        if call is None:
            return embedded(self.reader, self.config, rows, self.dtype)
        return [call("", lookup, row) for row in rows]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _outputs(graph, call: Call | None, length: int, state, x, inputs: AttentionInputs, right: Mapping):
    """What a layer gives, and every module's output of the first `length` tokens in float32, [T, ...].

    Where `right` has a module's output, that goes on in the place of the module's own.
    """
    outputs = {}

    def see(name, module, *args):
        own = module(*args) if call is None else call(name, module, *args)
        outputs[name] = own[0, :length].astype(jnp.float32)
        there = right.get(name)
        if there is None or there.size != outputs[name].size:
            return own
        return own.at[0, :length].set(there.reshape(outputs[name].shape).astype(own.dtype))

    layer = with_calls(nnx.merge(graph, state), see)
    return layer(x, inputs) if call is None else call("", layer, x, inputs), outputs


@functools.partial(jax.jit, static_argnums=(0, 2))
def _plain(graph, state, call: Call | None, x):
    part = nnx.merge(graph, state)
    run = part.attend if isinstance(part, Embedding) else part
    return run(x) if call is None else call("", run, x)


def _cut(x, length: int) -> np.ndarray:  # [1, T, ...] -> [length, ...] float32
    return np.asarray(x[0, :length].astype(jnp.float32))


def _padded(x: np.ndarray, length: int) -> np.ndarray:  # [T, D] -> [1, length, D]
    """Padding stands after the real tokens, which cannot see it; ones, so that no norm of it is NaN."""
    return np.concatenate([x, np.ones((length - len(x), *x.shape[1:]), x.dtype)])[None]


def like(right: np.ndarray, found) -> np.ndarray:
    """found in the shape [T, ...] of right; all infinite where it is missing or of another size."""
    if found is None or np.size(found) != right.size:
        return np.full(right.shape, np.inf, np.float32)
    return np.asarray(found).reshape(right.shape)
