"""Planting a mutant in a right checkpoint: what the candidate then reads, computes and is given, and in which modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...convert.sources import Source
from ...olmo_jax import layers as L
from ...olmo_jax.config import Olmo3Config
from ...olmo_jax.model import AttentionInputs, attention_inputs
from ...olmo_jax.rope import rope_tables
from ..batches import Sequence
from ..candidate import padded_length, padded_row
from .kinds import ALL, MODEL, Config, Facts, Inputs, Mutant, Rows, Steps, Tensors, Whole
from .places import MIX, NORM, NORMS, QK_ROTARY


@dataclass(frozen=True)
class Row:
    """A row of tokens as the candidate runs it, arrays [B, T] int32; what is compared is row `index`'s first `length` tokens."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray | None
    window: int | None  # imposed
    length: int
    index: int = 0

    def config(self, config: Olmo3Config) -> Olmo3Config:
        return config if self.window is None else config.replace(sliding_window=self.window)

    def inputs(self, config: Olmo3Config) -> dict[str, AttentionInputs]:
        """By layer type, of a config as it is (with the row's window)."""
        return attention_inputs(self.config(config), self.tokens.shape[1], self.positions, self.segment_ids)


def rows_of(sequences: list[Sequence]) -> list[Row]:
    """Sequences padded as run_candidate pads them, all to one length: every step is compiled for it alone."""
    length = max(padded_length(len(s.tokens)) for s in sequences)
    return [Row(*padded_row(s, length), s.window, len(s.tokens)) for s in sequences]


@dataclass(frozen=True)
class Planted:
    """A candidate with one fault in it. What is not named here is as it was.

    places: the modules that compute something else from the same input; none where only rows or the way of running change.
    """

    mutant: Mutant
    config: Olmo3Config  # as the candidate's file would have it
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)  # by module name, HF orientation
    calls: Mapping[str, Callable] = field(default_factory=dict)  # by part: call(name within the part, module, *args)
    change_inputs: Callable[[int, AttentionInputs, Row], AttentionInputs] | None = None
    change_row: Callable[[Row], Row] | None = None
    build: Callable | None = None  # of the whole model
    input_layers: tuple[int, ...] = ()  # whose inputs change
    places: frozenset[str] = frozenset()

    @property
    def parts(self) -> set[str]:
        """Parts of the model that are not as they were."""
        return {part_of(n) for n in self.tensors} | set(self.calls) | {f"layers.{i}" for i in self.input_layers}


class CannotPlant(Exception):
    """The checkpoint has no place for the fault; says why."""


def part_of(module: str) -> str:
    """'layers.3.self_attn.q_proj' -> 'layers.3'; other modules are parts themselves."""
    return ".".join(module.split(".")[:2])


def module_tensors(source: Source) -> dict[str, np.ndarray]:
    """Every weight of a checkpoint by the name of its module, in HF orientation."""
    return {module_of(name): tensor.read() for name, tensor in source.tensors.items()}


def module_of(hf: str) -> str:
    return hf.removeprefix("model.").removesuffix(".weight")


def plant(mutant: Mutant, config: Olmo3Config, tensors: Mapping[str, np.ndarray]) -> Planted:
    """The candidate with this fault. Raises CannotPlant where the checkpoint has no place for it."""
    layers = mutant.layers(config)
    if mutant.place != MODEL and not layers:
        raise CannotPlant(f"no layer is of type {' or '.join(mutant.entry.on)}")
    why = mutant.entry.needs and mutant.entry.needs(Facts(config, tensors, layers))
    if why:
        raise CannotPlant(why)
    return PLANTING[type(mutant.entry.fault)](mutant, config, tensors, layers)


def why_invisible(planted: Planted, config: Olmo3Config, tensors: Mapping[str, np.ndarray]) -> str | None:
    """Why this fault changes nothing on this checkpoint, by rules that look at the checkpoint alone; None where it may."""
    rule = planted.mutant.entry.unless
    layers = planted.mutant.layers(config)
    found = rule and rule(Facts(config, tensors, layers))
    if found:
        return found
    fault = planted.mutant.entry.fault
    if isinstance(fault, Tensors) and not planted.tensors:
        return "it changes no bit of these weights"
    if isinstance(fault, Config) and not planted.places:
        return "this config already says what the fault would make of it"
    return None


def _plant_config(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    change = mutant.entry.fault.change
    changed = change(config)
    other_eps = changed.rms_norm_eps != config.rms_norm_eps
    places: set[str] = set()
    for i in layers:
        if config.window(i) != changed.window(i):
            places |= {f"layers.{i}.{n}" for n in MIX}
        if not _same_table(_table(config, i), _table(changed, i)):
            places |= {f"layers.{i}.{n}" for n in QK_ROTARY}
        if other_eps:
            places |= {f"layers.{i}.{n}" for n in NORMS}
    if other_eps and mutant.place == ALL:
        places.add(NORM)

    def change_inputs(i: int, inputs: AttentionInputs, row: Row) -> AttentionInputs:
        own = change(row.config(config))
        found = attention_inputs(own, row.tokens.shape[1], row.positions, row.segment_ids)
        return found[own.layer_types[i]]

    calls = {}
    if other_eps:
        eps = changed.rms_norm_eps
        named = {part_of(n) for n in places}
        calls = {part: _call(NORMS if part != NORM else ("",), functools.partial(_norm_with, eps)) for part in named}
    other_inputs = tuple(i for i in layers if any(f"layers.{i}.{n}" in places for n in (*MIX, *QK_ROTARY)))
    return Planted(
        mutant,
        # A file says one thing for all layers of a type: one layer that differs is a fault of the code.
        changed if mutant.place == ALL else config,
        calls=calls,
        change_inputs=change_inputs if other_inputs else None,
        input_layers=other_inputs,
        places=frozenset(places),
    )


def _plant_inputs(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    change = mutant.entry.fault.change

    def change_inputs(i: int, inputs: AttentionInputs, row: Row) -> AttentionInputs:
        return change(row.config(config), inputs, row, i)

    # Which of the two it changes is seen on two short rows: what is left alone is the same array.
    probe = Row(*(np.arange(8, dtype=np.int32).reshape(2, 4) for _ in range(3)), None, 4)
    right = probe.inputs(config)[config.layer_types[layers[0]]]
    found = change_inputs(layers[0], right, probe)
    names = MIX if found.mask is not right.mask else ()
    names += QK_ROTARY if found.cos is not right.cos or found.sin is not right.sin else ()
    places = frozenset(f"layers.{i}.{n}" for i in layers for n in names)
    return Planted(mutant, config, change_inputs=change_inputs, input_layers=layers, places=places)


def _plant_steps(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    fault = mutant.entry.fault
    change = functools.partial(fault.change, config)
    if mutant.place == MODEL:
        calls = {name: _call(("",), change) for name in fault.names}
        return Planted(mutant, config, calls=calls, places=frozenset(fault.shows or fault.names))
    calls = {f"layers.{i}": _call(fault.names, change) for i in layers}
    shows = (f"layers.{i}.{n}".removesuffix(".") for i in layers for n in fault.shows or fault.names)
    return Planted(mutant, config, calls=calls, places=frozenset(shows))


def _plant_tensors(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    change, changed = mutant.entry.fault.change, {}
    if mutant.place == MODEL:
        changed = change(config, tensors)
    for i in layers:
        prefix = f"layers.{i}."
        own = {n.removeprefix(prefix): array for n, array in tensors.items() if n.startswith(prefix)}
        changed |= {prefix + n: array for n, array in change(config, own).items()}
    for name, array in changed.items():
        if array.shape != tensors[name].shape:
            raise CannotPlant(
                f"{name} would be {array.shape} and not {tensors[name].shape}, which is refused before a run"
            )
    changed = {n: np.ascontiguousarray(a) for n, a in changed.items() if not _same_bits(a, tensors[n])}
    places = set(changed)
    if config.tie_word_embeddings and "embed_tokens" in places:
        places.add("lm_head")
    return Planted(mutant, config, tensors=changed, places=frozenset(places))


def _plant_rows(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    return Planted(mutant, config, change_row=mutant.entry.fault.change)


def _plant_whole(mutant: Mutant, config: Olmo3Config, tensors, layers) -> Planted:
    return Planted(mutant, config, build=mutant.entry.fault.build)


PLANTING = {
    Config: _plant_config,
    Inputs: _plant_inputs,
    Steps: _plant_steps,
    Tensors: _plant_tensors,
    Rows: _plant_rows,
    Whole: _plant_whole,
}


def _call(names: tuple[str, ...], change: Callable) -> Callable:
    def call(name, module, *args):
        return change(module, *args) if name in names else module(*args)

    return call


def _norm_with(eps: float, norm, x):
    return L.rms_norm(x, norm.scale[...], eps)


def _table(config: Olmo3Config, layer: int):
    return rope_tables(config)[config.layer_types[layer]]


def _same_table(a, b) -> bool:
    return np.array_equal(a.inv_freq, b.inv_freq) and a.attention_factor == b.attention_factor


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
