"""Olmo3Config: what one checkpoint's model computes, with no number taken from a library's defaults."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import BadInput

SLIDING = "sliding_attention"
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)
ROPE_TYPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer type. `resolve` in rope.py turns it into a table.

    factor and the fields after it are None for plain rotary; linear (position interpolation) uses factor alone.
    """

    rope_type: str  # default, linear or yarn
    rope_theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None  # tokens
    beta_fast: float | None = None  # rotations over the original context; above it a frequency is kept
    beta_slow: float | None = None  # rotations; below it a frequency is divided by factor
    attention_factor: float | None = None  # multiplies cos and sin
    truncate: bool | None = None  # whether the ramp's bounds are rounded to whole dimensions


@dataclass(frozen=True)
class Olmo3Config:
    """Shapes and numbers of one OLMo 3 model. Read it with `config_hf.from_hf` or `config_core.from_olmo_core`.

    Letters: V vocabulary, D width, N query heads, K kv heads, H head width, F MLP width.
    """

    vocab_size: int  # V, logical: the tokenizer's entries, without padding rows
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float
    layer_types: tuple[str, ...]  # sliding_attention or full_attention, one a layer
    sliding_window: int | None  # tokens, the current one included; None where no layer slides
    rope: Mapping[str, RopeParameters]  # by layer type, only the types that occur
    tie_word_embeddings: bool
    # What follows does not change what the model computes.
    max_position_embeddings: int  # tokens
    dtype: str | None = None  # what the file says of the stored weights; the weights themselves decide
    token_ids: Mapping[str, object] = field(default_factory=dict)  # bos_token_id, eos_token_id, pad_token_id
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was derived or is odd, as sentences
    allowed_unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self):
        faults = _faults(self)
        if faults:
            raise BadInput("the model config cannot be used", faults)

    def __hash__(self):  # NNX hashes a module's static attributes; the generated hash would fail on the dictionaries
        return hash((self.vocab_size, self.hidden_size, self.layer_types, tuple(sorted(self.rope))))

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer may see, itself included; None where it sees all before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def differences(self, other: Olmo3Config) -> list[tuple[str, object, object]]:
        """Fields that decide what is computed and differ, as (name, own value, other value)."""
        found = []
        for name in FUNCTION_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "rope":
                for layer_type in LAYER_TYPES:
                    a, b = mine.get(layer_type), theirs.get(layer_type)
                    if a != b:
                        found += [
                            (f"rope.{layer_type}.{f.name}", getattr(a, f.name, None), getattr(b, f.name, None))
                            for f in dataclasses.fields(RopeParameters)
                            if getattr(a, f.name, None) != getattr(b, f.name, None)
                        ]
            elif name == "layer_types" and len(mine) == len(theirs):
                found += [
                    (f"layer_types[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b
                ]
            elif mine != theirs:
                found.append((name, mine, theirs))
        return found

    def replace(self, **changes) -> Olmo3Config:
        """A copy with some fields changed, checked like any other config."""
        return dataclasses.replace(self, **changes)


FUNCTION_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "layer_types",
    "sliding_window",
    "rope",
    "tie_word_embeddings",
)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LARGEST = 1 << 24  # of any size; a damaged one must end in a sentence, not in an array that does not fit the machine


def layer_period(layer_types: tuple[str, ...]) -> tuple[int, int]:
    """How to scan over layers: (period, repeats), with as few layers as possible left to run unrolled.

    The first period * repeats layers repeat their first `period` types. Scanning needs each layer's window to be
    static, so only equal types share a step. (len, 1) means that nothing repeats.
    """
    total = len(layer_types)
    best = (total, 1)
    covered = 0
    for period in range(1, total // 2 + 1):
        repeats = 1
        while layer_types[repeats * period : (repeats + 1) * period] == layer_types[:period]:
            repeats += 1
        if repeats > 1 and repeats * period > covered:
            best, covered = (period, repeats), repeats * period
    return best


def _faults(config: Olmo3Config) -> list[str]:
    faults = []
    for name in SIZES:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            faults.append(f"{name} is {value!r}, a positive whole number is wanted")
        elif value > LARGEST:
            faults.append(f"{name} is {value}, no model has more than {LARGEST}: is the file damaged?")
    if faults:
        return faults  # the checks below divide by these
    if config.num_attention_heads % config.num_key_value_heads:
        faults.append(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}: every kv head serves the same number of query heads"
        )
    if config.head_dim % 2:
        faults.append(f"head_dim is {config.head_dim}, an even number is wanted: rotary turns pairs of dimensions")
    if not _positive(config.rms_norm_eps):
        faults.append(f"rms_norm_eps is {config.rms_norm_eps!r}, a positive number is wanted")
    if len(config.layer_types) != config.num_hidden_layers:
        faults.append(
            f"layer_types has {len(config.layer_types)} entries but num_hidden_layers is {config.num_hidden_layers}"
        )
    for layer_type in sorted(set(config.layer_types) - set(LAYER_TYPES), key=str):
        faults.append(f"layer_types holds {layer_type!r}; OLMo 3 has {SLIDING} and {FULL}")
    if SLIDING in config.layer_types:
        window = config.sliding_window
        if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
            faults.append(
                f"sliding_window is {window!r} although some layers slide: a positive number of tokens is wanted"
            )
    for layer_type in LAYER_TYPES:
        if layer_type in config.layer_types and layer_type not in config.rope:
            faults.append(f"rotary parameters for {layer_type} are missing")
    for layer_type, rope in config.rope.items():
        faults += [f"rotary of {layer_type}: {fault}" for fault in _rope_faults(rope)]
    return faults


def _rope_faults(rope: RopeParameters) -> list[str]:
    faults = []
    if rope.rope_type not in ROPE_TYPES:
        return [f"rope_type {rope.rope_type!r} is not supported (default, linear and yarn are)"]
    if not _positive(rope.rope_theta) or rope.rope_theta <= 1:
        faults.append(f"rope_theta is {rope.rope_theta!r}, a number above 1 is wanted")
    needed = {"default": (), "linear": ("factor",), "yarn": YARN_FIELDS}[rope.rope_type]
    for name in YARN_FIELDS:
        value = getattr(rope, name)
        if name in needed and value is None:
            faults.append(f"{name} is missing, rope_type {rope.rope_type} needs it")
        elif name not in needed and value is not None:
            faults.append(f"{name} is {value!r}, but rope_type {rope.rope_type} does not use it")
        elif name in needed and name != "truncate" and not _positive(value):
            faults.append(f"{name} is {value!r}, a positive number is wanted")
    if rope.rope_type == "yarn" and not faults:
        if not isinstance(rope.truncate, bool):
            faults.append(f"truncate is {rope.truncate!r}, true or false is wanted")
        if rope.factor < 1:
            faults.append(f"factor is {rope.factor!r}, at least 1 is wanted")
        if rope.beta_fast <= rope.beta_slow:
            faults.append(f"beta_fast {rope.beta_fast!r} must be above beta_slow {rope.beta_slow!r}")
    return faults


YARN_FIELDS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate")


def _positive(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
