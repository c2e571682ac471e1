"""The torch side of the trace: what every module of transformers' own model gives, part by part, and how far noise moves it.

Names are olmo_jax's, which are transformers' where it has a module: 'layers.3.self_attn.q_proj'. Steps without a module of
their own there (rotary embedding, attention, SwiGLU, residuals) are taken where they enter the next one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..convert.sources import Source
from .batches import Sequence
from .envelopes import Distance
from .reference import HEAD_ROWS, check_reference, import_torch, impose_window
from .streamed_reference import (
    EMBEDDING,
    HEAD,
    all_stand_aside,
    check_names,
    embedding_rows,
    empty_model,
    taking_part,
    tensor_of,
)
from .streaming import slices

# olmo_jax's name <- the module of a decoder layer whose output, or whose input, it is.
OUTPUTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_feedforward_layernorm",
)  # fmt: skip
INPUTS = {"self_attn.o_proj": "self_attn.mix", "mlp.down_proj": "mlp.swiglu", "mlp": "attention_residual"}
ROTARY = ("self_attn.q_rotary", "self_attn.k_rotary")
LAST = "mlp_residual"  # what the layer gives
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7}  # one unit in the last place at most, relative
SEED = 20251120


@dataclass
class Part:
    """One part of the model on every sequence: embed_tokens, layers.<i>, norm, or a slice of lm_head's columns.

    outputs, a sequence each: name within the part ('' for the part itself) -> [T, ...] float32. free and forced: how far
    rounding noise moves each output, where it is carried along from the first layer on and where every module gets
    the reference's own input.
    """

    name: str
    outputs: list[dict[str, np.ndarray]]
    inputs: list[np.ndarray]  # [T, D], what the part is given; of embed_tokens the tokens [T]
    free: dict[str, Distance] = field(default_factory=dict)
    forced: dict[str, Distance] = field(default_factory=dict)
    columns: tuple[int, int] | None = None  # of the vocabulary


def reference_parts(
    source: Source, sequences: list[Sequence], *, dtype: str = "float32", round_to: str | None = None
) -> Iterator[Part]:
    """The parts in the order of the computation, one layer's weights in memory at a time, on the CPU.

    Noise is the reference itself with every module's output moved at random by up to one unit in the last place: what
    another right implementation does by rounding otherwise, as far as that can be known from one side alone.
    Documents of a packed row are run alone and stand one after another in the outputs.
    """
    torch, transformers = import_torch()
    model = empty_model(source.path, torch, transformers)
    check_reference(model, source.config, transformers.__version__)
    check_names(model, source.tensors, source.path, tied=source.config.tie_word_embeddings)
    with torch.no_grad():
        yield from _Run(model, source, sequences, dtype, round_to, torch).parts()


class _Run:
    def __init__(self, model, source: Source, sequences: list[Sequence], dtype: str, round_to: str | None, torch):
        self.model, self.inner, self.source, self.config = model, model.model, source, source.config
        self.sequences, self.torch, self.dtype = sequences, torch, dtype
        self.weight = lambda array: tensor_of(array, dtype, round_to, torch)
        self.random = torch.Generator().manual_seed(SEED)
        self.pieces = [(index, *piece) for index, s in enumerate(sequences) for piece in s.parts()]

    def parts(self) -> Iterator[Part]:
        all_stand_aside(self.inner)
        plain = self._embedded()
        noisy = list(plain)
        tokens = [s.tokens for s in self.sequences]
        yield Part("embed_tokens", [{"": x} for x in self._joined(plain)], tokens, *self._still(plain))
        for i, module in enumerate(self.inner.layers):
            name = f"layers.{i}"
            inputs = self._joined(plain)
            with taking_part(module, self._weights(name, module)), _captured(module) as capture:
                outputs, free, forced = self._three(capture, plain, noisy)
            yield Part(name, outputs, inputs, free, forced)
        inputs = self._joined(plain)
        with taking_part(self.inner.norm, self._weights("norm", self.inner.norm)):
            moved = [self._noise(x) for x in plain]
            before = plain
            plain, noisy, again = ([self._forward(k, x) for k, x in enumerate(xs)] for xs in (plain, noisy, moved))
            del before, moved
            noisy = [self._noise(x) for x in noisy]
            free, forced = self._distance(plain, noisy), self._distance(plain, again)
        yield Part("norm", [{"": x} for x in self._joined(plain)], inputs, {"": free}, {"": forced})
        yield from self._head(plain, noisy)

    def _head(self, plain: list, noisy: list) -> Iterator[Part]:
        inputs = self._joined(plain)
        head = self.source.tensors[EMBEDDING if self.config.tie_word_embeddings else HEAD]
        moved = [self._noise(x) for x in plain]
        for start, stop in slices(self.config.vocab_size, HEAD_ROWS):
            rows = self.weight(head.rows(start, stop))
            here, away, again = ([self.torch.nn.functional.linear(x, rows) for x in xs] for xs in (plain, noisy, moved))
            free, forced = self._distance(here, away), self._distance(here, again)
            outputs = [{"": x} for x in self._joined(here)]
            yield Part("lm_head", outputs, inputs, {"": free}, {"": forced}, (start, stop))

    def _three(self, capture: _Capture, plain: list, noisy: list):
        """A layer three times: as it is, with its noise carried along, and with the reference's own values in every place.

        plain and noisy, one tensor a piece, become what the layer gives.
        """
        gathered: list[dict] = [{} for _ in self.sequences]
        free: dict[str, Distance] = {}
        forced: dict[str, Distance] = {}
        for k, (index, _, _) in enumerate(self.pieces):
            right = capture.of(lambda k=k: self._forward(k, plain[k]), lambda _, x: x)
            carried = capture.of(lambda k=k: self._forward(k, noisy[k]), lambda _, x: self._noise(x))
            own = capture.of(
                lambda k=k: self._forward(k, self._noise(plain[k])), lambda n, _, right=right: self._noise(right[n])
            )
            for name, x in right.items():
                gathered[index].setdefault(name, []).append(_array(name, x))
                free.setdefault(name, Distance()).add(*(_array(name, y) for y in (x, carried[name])))
                forced.setdefault(name, Distance()).add(*(_array(name, y) for y in (x, own[name])))
            plain[k], noisy[k] = right[LAST], self._noise(carried[LAST])
        outputs = [{name: np.concatenate(xs) for name, xs in one.items()} for one in gathered]
        return outputs, free, forced

    def _forward(self, k: int, hidden):
        """Olmo3Model.forward itself, so that masks and rotary tables are transformers' own, on one piece [1, T, D]."""
        index, tokens, first = self.pieces[k]
        impose_window(self.model, self.config, self.sequences[index].window)
        positions = self.torch.arange(first, first + len(tokens))[None]
        return self.inner(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state

    def _embedded(self) -> list:
        ids = np.unique(np.concatenate([tokens for _, tokens, _ in self.pieces]))
        table = self.weight(embedding_rows(self.source, ids))
        return [table[self.torch.from_numpy(np.searchsorted(ids, tokens))][None] for _, tokens, _ in self.pieces]

    def _weights(self, name: str, module) -> dict:
        return {k: self.weight(self.source.tensors[f"model.{name}.{k}"].read()) for k in module.state_dict()}

    def _noise(self, x):
        amount = self.torch.rand(x.shape, generator=self.random) * 2 - 1
        return (x.float() * (1 + ROUNDING[self.dtype] * amount)).to(x.dtype)

    def _still(self, plain: list) -> tuple[dict, dict]:
        return ({"": self._distance(plain, plain)},) * 2  # looked up, not computed: no noise

    def _distance(self, a: list, b: list) -> Distance:
        found = Distance()
        for x, y in zip(a, b, strict=True):
            found.add(_array("", x), _array("", y))
        return found

    def _joined(self, pieces: list) -> list[np.ndarray]:
        """[T, D] of every sequence."""
        parts: list[list] = [[] for _ in self.sequences]
        for (index, _, _), x in zip(self.pieces, pieces, strict=True):
            parts[index].append(_array("", x))
        return [np.concatenate(p) for p in parts]


def _array(name: str, x) -> np.ndarray:
    """[1, T, ...] as float32 [T, ...]. transformers has heads before tokens where olmo_jax has tokens before heads."""
    x = x[0].transpose(0, 1) if name in ROTARY else x[0]
    return np.ascontiguousarray(x.float().numpy())


class _Capture:
    """What the modules of one layer give in a forward pass, and what is put in the place of it."""

    def __init__(self):
        self.given: dict = {}
        self.replace: Callable = lambda name, x: x

    def see(self, name: str, x):
        self.given[name] = x
        return self.replace(name, x)

    def of(self, forward: Callable, replace: Callable) -> dict:
        """Every output, by its name within the layer, of a pass in which replace(name, output) goes on in its place."""
        self.given, self.replace = {}, replace
        forward()
        return self.given


@contextmanager
def _captured(layer) -> Iterator[_Capture]:
    """A decoder layer with hooks at every module, and at the rotary embedding of its file."""
    capture = _Capture()
    handles = [
        layer.get_submodule(name).register_forward_hook(lambda _, __, x, name=name: capture.see(name, x))
        for name in OUTPUTS
    ]
    handles += [
        layer.get_submodule(at).register_forward_pre_hook(
            lambda _, given, name=name: (capture.see(name, given[0]), *given[1:])
        )
        for at, name in INPUTS.items()
    ]
    handles.append(layer.register_forward_hook(lambda _, __, x: capture.see(LAST, x)))
    file = importlib.import_module(type(layer).__module__)
    rotate = file.apply_rotary_pos_emb

    def seen(*args, **kwargs):
        return tuple(capture.see(name, x) for name, x in zip(ROTARY, rotate(*args, **kwargs), strict=True))

    file.apply_rotary_pos_emb = seen
    try:
        yield capture
    finally:
        file.apply_rotary_pos_emb = rotate
        for handle in handles:
            handle.remove()
