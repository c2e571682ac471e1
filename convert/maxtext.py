"""MaxText's tree: which of its leaves hold which weights, and a reader that shows them as leaves of olmo_jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..olmo_jax.config import FULL, SLIDING, Olmo3Config
from ..olmo_jax.errors import BadInput
from .mapping import MAXTEXT_CYCLE, ROWS, SPLIT_AXIS, STACK_AXIS, Place, Row, join_heads, maxtext_place, weights

if TYPE_CHECKING:
    from .copying import Move
    from .orbax_io import LeafMetadata, TreeReader

OLMO_JAX, SCANNED, UNSCANNED = "olmo_jax", "maxtext", "maxtext-unscanned"
LAYOUTS = (OLMO_JAX, SCANNED, UNSCANNED)  # that a tree can be written in
ITEM = "items"  # of the step, where MaxText looks for it
WRAPPERS = ("params", "model", "base")  # keys around the modules: one or two of them, or none, by who saved the tree
VALUE = "value"  # below each leaf where an NNX state was saved as it is
LAYER = r"layers(?:_(?P<layer>\d+)|/layers_(?P<within>\d+))"
PATTERNS = [(row, re.compile(re.escape(row.maxtext).replace(re.escape("{layer}"), LAYER))) for row in ROWS]
MODULES = sorted({row.maxtext.split("/")[0] for row in ROWS})  # decoder, token_embedder
PATTERN = tuple(FULL if i % MAXTEXT_CYCLE == MAXTEXT_CYCLE - 1 else SLIDING for i in range(MAXTEXT_CYCLE))


class MaxTextReader:
    """The weights of an item that MaxText wrote, or that was written for it, under olmo_jax's paths and in its axes.

    Like TreeReader, which it reads through. What belongs to no weight keeps its stored path, so that it is found to be
    unexpected; what lies beside the parameters and the step is in `left_out`.
    """

    def __init__(self, tree: TreeReader):
        self.item = tree.item
        self.left_out = sorted({keys[0] for keys in tree.keys if not _is_weight(keys)} - {"step"})
        self._places: dict[str, Place] = {}
        self._tree = tree
        tree.keys = [keys for keys in tree.keys if _is_weight(keys)]
        self.readable: dict[str, LeafMetadata] = {}

    @cached_property
    def leaves(self) -> dict[str, LeafMetadata]:
        """Every weight by its olmo_jax path. No data is read. Raises BadInput where an array cannot be opened, or where the
        stacked leaves make no layers."""
        try:
            self.readable = self._as_weights(self._tree.leaves)
        except BadInput:
            self.readable = self._as_weights(self._tree.readable)
            raise
        return self.readable

    def _as_weights(self, stored: dict[str, LeafMetadata]) -> dict[str, LeafMetadata]:
        found = {path: _row_of(path) for path in stored}
        blocks, cycle = _scan(found, stored, self.item)
        leaves: dict[str, LeafMetadata] = {}
        faults, ranks = [], []
        for path, (row, layer, within) in found.items():
            if row is None:
                leaves[path] = stored[path]
                continue
            if within is None and len(stored[path].shape) != _rank(row):
                shape, weight = stored[path].shape, row.hf.replace("{i}", str(layer))
                ranks.append(f"{path} has shape {shape}, {_rank(row)} axes are wanted for {weight}")
                continue
            layers = [layer] if within is None else [within + cycle * block for block in range(blocks)]
            for block, number in enumerate(layers):
                place = _place(stored[path], row, None if within is None else block)
                name = row.jax.replace("{i}", str(number))
                if name in leaves:
                    faults.append(f"{path} and {leaves[name].name} both hold {name}")
                leaves[name] = _as_ours(stored[path], name, place)
                self._places[name] = place
        if faults or ranks:
            text = "holds a weight twice" if faults else "holds arrays that are not MaxText's"
            raise BadInput(f"{self.item} {text}", faults + ranks)
        return leaves

    @property
    def said(self) -> str:
        """For the user: which of MaxText's layouts this is."""
        blocks = [place.block for place in self._places.values() if place.block is not None] if self.leaves else []
        return f"in MaxText's layout, {f'scanned: {max(blocks) + 1} blocks' if blocks else 'not scanned'}"

    def faults(self, config: Olmo3Config) -> list[str]:
        """Leaves whose heads are not split as the config says: joined, the heads of any split have the same shape."""
        found = []
        for weight in weights(config):
            place = self._places.get(weight.jax) if weight.jax in self.leaves else None
            wanted = maxtext_place(weight, config, None)
            if place and place.shape != wanted.shape and math.prod(place.shape) == math.prod(wanted.shape):
                found.append(
                    f"{place.name} in {self.item} has shape {place.shape}, {wanted.shape} is wanted: "
                    f"{weight.hf} has heads of {config.head_dim}"
                )
        return found

    def leaf(self, path: str) -> LeafMetadata:
        """One weight's metadata."""
        return self.readable[path]

    def read(self, path: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One weight in olmo_jax's axes, or a part of it by slices: no other block of a stack is read for it than its own,
        beyond what its chunks hold."""
        if not self.readable:
            self.leaves  # noqa: B018 - finds where everything lies
        place = self._places.get(path)
        if place is None:
            return self._tree.read(path, index)
        stored, shape, cut = place.select(index)
        return np.ascontiguousarray(self._tree.read(place.path, stored).reshape(shape)[cut])


def is_maxtext(keys: Iterable[tuple[str, ...]]) -> bool:
    """Whether these leaves are MaxText's: some lie below its decoder or its embedding."""
    return any(path and _inner(path)[0] in MODULES for path in keys)


def step_metadata(layout: str) -> dict[str, bool]:
    """Orbax's custom_metadata of a step, from which MaxText sees that a tree is scanned or not before it reads it."""
    return {} if layout == OLMO_JAX else {"scan_layers": layout == SCANNED}


def layout_faults(config: Olmo3Config, layout: str) -> list[str]:
    """Why a model cannot be written in a layout; empty where it can."""
    if layout not in LAYOUTS:
        return [f"layout {layout!r} is not known ({', '.join(LAYOUTS)} are)"]
    if layout != SCANNED:
        return []
    other = f"write --layout {UNSCANNED}, and train with scan_layers=false"
    if config.num_hidden_layers % MAXTEXT_CYCLE:
        return [
            f"{config.num_hidden_layers} layers are no whole number of blocks of {MAXTEXT_CYCLE}, over which MaxText scans: "
            f"{other}"
        ]
    odd = _off_pattern(config)
    if odd:
        return [f"MaxText scans over blocks of {_pattern()}, and {odd}: {other}"]
    return []


def stack_faults(moves: Sequence[Move]) -> list[str]:
    """Stacked leaves whose layers would be stored in several dtypes: an array has one."""
    stacks: dict[str, dict[str, list[str]]] = {}
    for move in moves:
        if move.shared:
            stacks.setdefault(move.place.path, {}).setdefault(move.leaf.dtype.name, []).append(move.tensor.name)

    def some(dtype: str, names: list[str]) -> str:
        return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} in {dtype}"

    return [
        f"{path} stacks {'; '.join(some(dtype, names) for dtype, names in sorted(found.items()))}: name one dtype for all "
        f"with --dtype, or write --layout {UNSCANNED}, and train with scan_layers=false"
        for path, found in stacks.items()
        if len(found) > 1
    ]


def notes(config: Olmo3Config) -> list[str]:
    """What a user of MaxText should know before a run starts from a tree of this model in its layout."""
    found = []
    sliding, full = config.rope.get(SLIDING), config.rope.get(FULL)
    if sliding is not None and full is not None and sliding != full:
        found.append(
            "MaxText's olmo3 (source of August 2026 and before, PyPI 0.2.5) has one rotary for all layers: it applies "
            f"{full.rope_type} to sliding layers too, which this config does not. A run of it that starts from this tree "
            "computes another function (measured on a tiny model with YaRN: mean KL 0.22 nats per token)"
        )
    odd = _off_pattern(config)
    if odd:
        found.append(
            f"MaxText's olmo3 has layers of {_pattern()}, and {odd}: it computes another function than this config"
        )
    if config.tie_word_embeddings:
        found.append(
            "the head is tied: the tree has no logits_dense, and MaxText needs logits_via_embedding=true and "
            "normalize_embedding_logits=false"
        )
    return found


def _off_pattern(config: Olmo3Config) -> str:
    for i, kind in enumerate(config.layer_types):
        if kind != PATTERN[i % MAXTEXT_CYCLE]:
            return f"layer {i} of this config is {kind}"
    return ""


def _pattern() -> str:
    return f"{PATTERN.count(SLIDING)} {SLIDING} and {PATTERN.count(FULL)} {FULL}"


def _inner(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys from the module on."""
    start = 0
    while start < len(keys) - 1 and keys[start] in WRAPPERS:
        start += 1
    return tuple(keys[start:])


def _is_weight(keys: tuple[str, ...]) -> bool:
    """Whether a leaf lies where parameters lie, and must then be one that is known."""
    inner = _inner(keys)
    return bool(keys) and (inner[0] in MODULES or inner != keys)


def _row_of(path: str) -> tuple[Row | None, int | None, int | None]:
    """(row, layer, None) for a leaf of one layer, (row, None, place in its block) for a stacked one, and a row without
    either outside the layers; (None, None, None) for a leaf that holds no weight of this model."""
    keys = _inner(path.split("/"))
    inner = "/".join(keys[:-1] if keys[-1] == VALUE else keys)
    for row, pattern in PATTERNS:
        match = pattern.fullmatch(inner)
        if match:
            numbers = match.groupdict()
            return row, *(None if numbers.get(k) is None else int(numbers[k]) for k in ("layer", "within"))
    return None, None, None


def _scan(found: dict[str, tuple], stored: dict[str, LeafMetadata], item: Path) -> tuple[int, int]:
    """How many blocks are stacked, and how many layers each has; (0, 0) where nothing is."""
    stacked = {path: (row, within) for path, (row, _, within) in found.items() if within is not None}
    if not stacked:
        return 0, 0
    lengths: dict[int | None, str] = {}
    for path, (row, _) in stacked.items():
        shape = stored[path].shape
        lengths.setdefault(shape[STACK_AXIS] if len(shape) == _rank(row) + 1 else None, f"{path} {shape}")
    if len(lengths) != 1 or None in lengths:
        raise BadInput(
            f"the stacked leaves of {item} have no common number of blocks along axis {STACK_AXIS} "
            f"({'; '.join(lengths.values())}): a tree scanned along that axis (MaxText's param_scan_axis={STACK_AXIS}) "
            "is wanted"
        )
    return next(iter(lengths)), max(within for _, within in stacked.values()) + 1


def _rank(row: Row) -> int:
    """Axes of MaxText's leaf of one layer."""
    return len(row.axes) + (row.split in SPLIT_AXIS)


def _place(leaf: LeafMetadata, row: Row, block: int | None) -> Place:
    shape = leaf.shape if block is None else _without_stack(leaf.shape)
    return Place(leaf.path, row.split, shape, block, None if block is None else leaf.shape[STACK_AXIS])


def _as_ours(leaf: LeafMetadata, path: str, place: Place) -> LeafMetadata:
    """The metadata in olmo_jax's axes. A chunk that cuts through heads counts as whole heads."""
    chunk = list(leaf.chunk_shape if place.block is None else _without_stack(leaf.chunk_shape))
    axis = SPLIT_AXIS.get(place.split)
    if axis is not None:
        chunk[axis + 1] = place.shape[axis + 1]
    shapes = join_heads(place.split, place.shape), join_heads(place.split, tuple(chunk))
    return replace(leaf, path=path, shape=shapes[0], chunk_shape=shapes[1], stored=place.name)


def _without_stack(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:STACK_AXIS], *shape[STACK_AXIS + 1 :])
