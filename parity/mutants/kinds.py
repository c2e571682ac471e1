"""What a mutant is: a fault, the place where it is planted, and what a checkpoint must have for it to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...olmo_jax.config import FULL, SLIDING, Olmo3Config

FUNCTION, WEIGHTS, PRECISION, BENIGN = "function", "weights", "precision", "benign"
# Which leg of the gate must catch which kind; a benign variant must be caught by none.
LEGS = {FUNCTION: "float32", WEIGHTS: "weights", PRECISION: "bfloat16", BENIGN: None}
ANY = (SLIDING, FULL)
MODEL, ALL, FIRST, MIDDLE, LAST = "model", "all", "first", "middle", "last"
ONE = (FIRST, MIDDLE, LAST)
EVERY = (ALL, *ONE)


# What can be planted. Names of modules are relative to the layer, or those of the model's parts where the place is MODEL.
@dataclass(frozen=True)
class Config:
    """The candidate reads another config: change(config) -> config. In one layer: that layer does."""

    change: Callable[[Olmo3Config], Olmo3Config]


@dataclass(frozen=True)
class Inputs:
    """Another mask or rotary table: change(config, inputs, row, layer) -> AttentionInputs. Tables left alone stay the same arrays."""

    change: Callable


@dataclass(frozen=True)
class Steps:
    """Modules compute something else: change(config, module, *args) stands for module(*args). '' is the layer itself.

    shows: modules whose output is wrong when they are given the right input, where these are not the names.
    """

    names: tuple[str, ...]
    change: Callable
    shows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tensors:
    """Other weights: change(config, tensors) -> the changed ones, by module name, in HF orientation."""

    change: Callable[[Olmo3Config, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Rows:
    """The first row in another form, with the same tokens in it: change(row) -> row."""

    change: Callable


@dataclass(frozen=True)
class Whole:
    """The model run as one: build(config, tree, dtype) -> a function (tokens, positions, segment_ids, window) -> [B, T, V]."""

    build: Callable


Fault = Config | Inputs | Steps | Tensors | Rows | Whole


@dataclass(frozen=True)
class Facts:
    """What rules may look at: the right config and weights, and the layers of one mutant."""

    config: Olmo3Config
    tensors: Mapping[str, np.ndarray]  # by module name, HF orientation
    layers: tuple[int, ...]


Rule = Callable[[Facts], "str | None"]  # why not, or None


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    family: str
    name: str
    kind: str
    known: str  # classes of publicly known faults that it stands for, such as 'D1'
    fault: Fault
    at: tuple[str, ...] = (MODEL,)
    on: tuple[str, ...] = ANY  # types of the layers it is about
    needs: Rule | None = None  # why it cannot be planted in a checkpoint
    unless: Rule | None = None  # why it changes nothing there: decided from the checkpoint, whatever the run gives
    root: Callable[[float, float], float] | None = (
        None  # of a fault of epsilon: what (mean square, epsilon) is multiplied by
    )


@dataclass(frozen=True)
class Mutant:
    """An entry at one place."""

    entry: Entry
    place: str

    @property
    def name(self) -> str:
        return self.entry.name if self.place == MODEL else f"{self.entry.name}@{self.place}"

    def layers(self, config: Olmo3Config) -> tuple[int, ...]:
        """Indices of the layers it is planted in; () for the model's other parts, or where no layer is of its types."""
        if self.place == MODEL:
            return ()
        found = [i for i, kind in enumerate(config.layer_types) if kind in self.entry.on]
        if self.place == ALL or not found:
            return tuple(found)
        return (found[{FIRST: 0, MIDDLE: len(found) // 2, LAST: -1}[self.place]],)


@dataclass(frozen=True)
class Graded:
    """One fault in falling sizes: how small may it be and still be caught in the float32 leg?"""

    name: str
    unit: str
    sizes: tuple[float, ...]  # largest first
    fault: Callable[[float], Fault]
    place: str
    on: tuple[str, ...] = ANY
    needs: Rule | None = None

    def mutant(self, size: float) -> Mutant:
        name = f"{self.name}={size:g}"
        entry = Entry("graded", name, FUNCTION, "", self.fault(size), (self.place,), self.on, self.needs)
        return Mutant(entry, self.place)
