"""Faults of one module as formulas, each computed in float64 from the reference's own inputs (NumPy alone).

A formula gives the module's output on one sequence. Constants (an epsilon, a factor, a scale) are solved for on one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from ..olmo_jax.config import SLIDING, Olmo3Config, RopeParameters
from ..olmo_jax.rope import rope_tables
from .batches import Sequence
from .traced_reference import Part

ROUNDS = "rounds "  # how the sentences of faults of rounding begin
NEAR = 3  # tokens that a window may be off by
# What a module of a layer is given: '' is the layer's own input.
GIVEN = {
    "self_attn.q_proj": ("",),
    "self_attn.k_proj": ("",),
    "self_attn.v_proj": ("",),
    "self_attn.q_norm": ("self_attn.q_proj",),
    "self_attn.k_norm": ("self_attn.k_proj",),
    "self_attn.q_rotary": ("self_attn.q_norm",),
    "self_attn.k_rotary": ("self_attn.k_norm",),
    "self_attn.mix": ("self_attn.q_rotary", "self_attn.k_rotary", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.mix",),
    "post_attention_layernorm": ("self_attn.o_proj",),
    "attention_residual": ("", "post_attention_layernorm"),
    "mlp.gate_proj": ("attention_residual",),
    "mlp.up_proj": ("attention_residual",),
    "mlp.swiglu": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.swiglu",),
    "post_feedforward_layernorm": ("mlp.down_proj",),
    "mlp_residual": ("attention_residual", "post_feedforward_layernorm"),
    "norm": ("",),
}


NORMS = ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Place:
    """One faulty module: where it stands, what the reference gave there, what the candidate gave from the same inputs."""

    config: Olmo3Config
    layer: int | None
    name: str  # within the layer, or 'norm', 'embed_tokens'
    sequences: list[Sequence]
    part: Part
    found: list[np.ndarray]  # by sequence
    limit: float  # relative


Formula = Callable[[int], np.ndarray]  # sequence -> output [T, ...]


def hypotheses(place: Place) -> Iterator[tuple[str, Formula]]:
    """Sentences and formulas of faults of such a module."""
    kind = place.name.rpartition(".")[2]
    if kind.endswith("norm"):
        yield from _norm(place)
    elif kind.endswith("rotary"):
        yield from _rotary(place)
    elif kind == "mix":
        yield from _mix(place)
    elif kind == "swiglu":
        yield from _swiglu(place)
    elif kind.endswith("residual"):
        yield from _residual(place)


def right(place: Place, index: int) -> np.ndarray:
    name = "" if place.layer is None else place.name
    return place.part.outputs[index][name]


def _given(place: Place, index: int) -> list[np.ndarray]:
    """The module's inputs on one sequence, [T, features] float64, from the reference."""
    if place.name not in GIVEN:
        return []
    outputs = place.part.outputs[index]
    arrays = [place.part.inputs[index] if name == "" else outputs[name] for name in GIVEN[place.name]]
    return [np.asarray(a, np.float64).reshape(len(a), -1) for a in arrays]


def _in(x: np.ndarray, dtype) -> np.ndarray:
    """x rounded to a dtype."""
    return x.astype(np.float32).astype(dtype).astype(np.float64) if dtype != np.float64 else x


def _from_round(value: float) -> list[float]:
    """A constant that was solved for, rounded more and less: what people write has few digits."""
    return list(dict.fromkeys([*(float(f"{value:.{digits}e}") for digits in range(4)), value]))


def _ratio(a: np.ndarray, b: np.ndarray) -> float:
    """The factor that makes b as like a as it can be."""
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return float(a @ b / (b @ b)) if (b @ b) else math.nan


# Norms


def _norm(place: Place) -> Iterator[tuple[str, Formula]]:
    eps, (x,) = place.config.rms_norm_eps, _given(place, 0)
    # The reference's own output over the normalised input is its scale, as far as that input is not zero.
    scale = _scale(place)
    squares = (x**2).mean(axis=-1)

    def normed(
        index: int, own_scale=scale, own_eps: float = eps, outside: float = 0.0, mean: float = 0.0, width: int = 0
    ):
        (x,) = _given(place, index)
        rows = x.reshape(len(x), -1, width) if width else x
        centred = rows - mean * rows.mean(axis=-1, keepdims=True)
        size = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + own_eps) + outside
        return (centred / size).reshape(x.shape) * own_scale

    # Solved on the token with the smallest input, where epsilon counts most.
    least = int(np.argmin(squares))
    factor = _ratio(place.found[0][least], normed(0, own_eps=0.0)[least])
    if factor and math.isfinite(factor):
        inside = _from_round(squares[least] / factor**2 - squares[least])
        outside = _from_round(math.sqrt(squares[least]) * (1 / factor - 1))
        for value in inside:
            if value >= 0:
                yield f"has epsilon {value:.3g}, the config says {eps:.3g}", lambda i, e=value: normed(i, own_eps=e)
        for value in outside:
            yield (
                f"adds an epsilon of {value:.3g} to the root, not to the mean square under it",
                lambda i, e=value: normed(i, own_eps=0.0, outside=e),
            )
    yield "multiplies by 1 + scale, OLMo 3 multiplies by scale", lambda i: normed(i, own_scale=1 + scale)
    yield "leaves out its scale", lambda i: normed(i, own_scale=1.0)
    for other in NORMS:
        if other != place.name and place.layer is not None:
            theirs = _scale(replace(place, name=other))
            if theirs.shape == scale.shape:
                yield f"multiplies by the scale of {other}", lambda i, w=theirs: normed(i, own_scale=w)
    yield "subtracts the mean, as LayerNorm does", lambda i: normed(i, mean=1.0)
    if place.name.startswith("self_attn"):
        yield (
            "normalises every head by itself, OLMo 3 all heads together",
            lambda i: normed(i, width=place.config.head_dim),
        )
    yield "does not normalise, it only scales", lambda i: _given(place, i)[0] * scale


def _scale(place: Place) -> np.ndarray:
    """A norm's scale [D] as the reference has it, from what it gives for what it is given."""
    numerator = denominator = 0.0
    for index in range(len(place.found)):
        (x,) = _given(place, index)
        y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + place.config.rms_norm_eps)
        numerator = numerator + (y * right(place, index)).sum(axis=0)
        denominator = denominator + (y**2).sum(axis=0)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


# Rotary embedding


def _rotary(place: Place) -> Iterator[tuple[str, Formula]]:
    config, layer_type = place.config, place.config.layer_types[place.layer]
    tables, own = rope_tables(config), rope_tables(config)[layer_type]
    parameters = config.rope[layer_type]
    width = config.head_dim

    def turned(
        index: int,
        table=own,
        shift: int = 0,
        interleaved: bool = False,
        restart: bool = False,
        table_dtype=np.float64,
        position_dtype=np.float32,
        given=lambda x: x,
    ):
        x = given(_given(place, index)[0])
        x = x.reshape(len(x), -1, width)
        positions = np.arange(len(x)) if restart else place.sequences[index].positions() + shift
        positions = positions.astype(position_dtype).astype(np.float32)
        angles = np.float64(positions[:, None] * table.inv_freq.astype(np.float32))  # as both sides round them
        cos, sin = (_in(f(angles) * table.attention_factor, table_dtype) for f in (np.cos, np.sin))
        turn = (cos + 1j * sin)[:, None, :]
        if interleaved:
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
        z = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    for gain in _from_round(_ratio(_norms(place.found[0]), _norms(turned(0))) * own.attention_factor):
        yield (
            f"has attention factor {gain:.5g}, the config's is {own.attention_factor:.5g}",
            lambda i, g=gain: turned(i, replace(own, attention_factor=g)),
        )
    for kind, table in tables.items():
        if kind != layer_type:
            what = "YaRN" if config.rope[kind].rope_type == "yarn" else "plain rotary"
            yield f"is turned as {kind} is ({what}), this layer is {layer_type}", lambda i, t=table: turned(i, t)
    if parameters.rope_type == "yarn":
        plain = _table(config, layer_type, RopeParameters("default", parameters.rope_theta))
        if all(not np.array_equal(plain.inv_freq, table.inv_freq) for table in tables.values()):
            yield "is turned without YaRN", lambda i: turned(i, plain)
        kept = replace(plain, attention_factor=own.attention_factor)
        yield "has YaRN's attention factor and plain frequencies", lambda i: turned(i, kept)
        other = _table(config, layer_type, replace(parameters, truncate=not parameters.truncate))
        yield (
            f"has the bounds of YaRN's ramp {'not ' if parameters.truncate else ''}cut to whole dimensions",
            lambda i: turned(i, other),
        )
        linear = replace(own, inv_freq=plain.inv_freq / np.float32(parameters.factor or 1), attention_factor=1.0)
        yield "divides every frequency by the factor, as linear scaling does", lambda i: turned(i, linear)
    for theta in _from_round(_theta(place)):
        if theta > 1 and theta != parameters.rope_theta:
            table = _table(config, layer_type, replace(parameters, rope_theta=theta))
            yield f"has theta {theta:.6g}, the config says {parameters.rope_theta:.6g}", lambda i, t=table: turned(i, t)
            if parameters.rope_type == "yarn":
                table = _table(config, layer_type, RopeParameters("default", theta))
                yield (
                    f"has theta {theta:.6g} without YaRN, the config says {parameters.rope_theta:.6g}",
                    lambda i, t=table: turned(i, t),
                )
    yield "pairs neighbouring dimensions, OLMo 3 pairs d with d + H/2", lambda i: turned(i, interleaved=True)
    for shift in (-1, 1):
        yield f"counts positions from {shift}", lambda i, s=shift: turned(i, shift=s)
    yield "counts positions from the start of the row, whatever it is given", lambda i: turned(i, restart=True)
    yield f"{ROUNDS}cos and sin to bfloat16", lambda i: turned(i, table_dtype=ml_dtypes.bfloat16)
    yield (
        f"{ROUNDS}what it is given to bfloat16, and what it gives",
        lambda i: _in(turned(i, given=lambda x: _in(x, ml_dtypes.bfloat16)), ml_dtypes.bfloat16),
    )
    yield f"{ROUNDS}positions to bfloat16", lambda i: turned(i, position_dtype=ml_dtypes.bfloat16)
    backwards = replace(own, inv_freq=-own.inv_freq)
    yield "turns the other way round", lambda i: turned(i, backwards)
    yield "is not turned at all", lambda i: _given(place, i)[0]


def _norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.asarray(x, np.float64).reshape(len(x), -1), axis=1)


def _table(config: Olmo3Config, layer_type: str, parameters: RopeParameters):
    return rope_tables(config.replace(rope={**config.rope, layer_type: parameters}))[layer_type]


def _theta(place: Place) -> float:
    """The theta that turns dimension 1 from position 0 to 1 as the candidate does, for plain frequencies; 0 where unknown."""
    half = place.config.head_dim // 2
    at = next(
        ((i, np.flatnonzero(s.positions() == 1)) for i, s in enumerate(place.sequences) if 1 in s.positions()), None
    )
    if at is None or half < 2:
        return 0.0
    index, where = at[0], int(at[1][0])
    x = _given(place, index)[0][where].reshape(-1, 2 * half)
    y = np.asarray(place.found[index][where], np.float64).reshape(-1, 2 * half)
    z = ((y[:, 1] + 1j * y[:, half + 1]) * np.conj(x[:, 1] + 1j * x[:, half + 1])).sum()
    angle = float(np.angle(z))
    return angle**-half if angle > 0 else 0.0


# Attention


def _mix(place: Place) -> Iterator[tuple[str, Formula]]:
    config = place.config
    kv, width = config.num_key_value_heads, config.head_dim
    heads, scale = config.num_attention_heads, config.head_dim**-0.5
    sliding = config.layer_types[place.layer] == SLIDING

    def mixed(
        index: int,
        off: int | None = 0,
        own_off: int = 0,
        factor: float = scale,
        tiled: bool = False,
        seen: Callable | None = None,
    ):
        """off: tokens added to a sliding layer's window, None: no window; own_off: where none is imposed on it alone."""
        q, k, v = _given(place, index)
        sequence, length = place.sequences[index], len(q)
        q, k, v = q.reshape(length, heads, width), k.reshape(length, kv, width), v.reshape(length, kv, width)
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        mask = distance >= 0
        if sliding and off is not None:
            mask &= distance < (sequence.window or config.sliding_window + own_off) + off
        documents = sequence.segment_ids()
        if documents is not None:
            mask &= documents[:, None] == documents[None, :]
        if seen:
            mask = seen(mask, distance, documents)
        group = heads // kv
        out = np.empty((length, heads, width))
        for head in range(heads):
            of = head % kv if tiled else head // group
            scores = np.where(mask, q[:, head] @ k[:, of].T * factor, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, of]
        return out

    if sliding:
        for off in sorted(range(-NEAR, NEAR + 1), key=abs):
            if off:
                yield (
                    f"has a window of {config.sliding_window + off}, the config says {config.sliding_window}",
                    lambda i, o=off: mixed(i, own_off=o),
                )
                yield (
                    f"sees a window {'wider' if off > 0 else 'narrower'} by {abs(off)}, the query's own token is one of the "
                    f"window's {config.sliding_window}",
                    lambda i, o=off: mixed(i, o),
                )
        yield "sees everything before it, the layer is sliding", lambda i: mixed(i, None)
    elif config.sliding_window:
        yield (
            "sees a sliding window, the layer is full",
            lambda i: mixed(i, seen=lambda m, d, _: m & (d < (place.sequences[i].window or config.sliding_window))),
        )
    yield (
        "lets packed documents see each other",
        lambda i: mixed(i, seen=lambda m, d, _: _one_row(place, i, d, sliding)),
    )
    yield "sees tokens after it: the mask is not causal", lambda i: mixed(i, seen=lambda m, d, _: m | (d < 0))
    yield (
        "does not see the query's own token",
        lambda i: mixed(i, seen=lambda m, d, _: m & ((d > 0) | ~m.any(1)[:, None])),
    )
    known = [(1 / width, ""), ((config.hidden_size / heads) ** -0.5, ", for hidden size over heads")]
    solved = [(value, "") for value in _from_round(_score_scale(place, heads, kv, width))]
    for factor, why in known + solved:
        if factor and math.isfinite(factor) and abs(factor / scale - 1) > 1e-6:
            yield (
                f"multiplies scores by {factor:.4g}{why}, the head width {width} asks for {scale:.4g}",
                lambda i, f=factor: mixed(i, factor=f),
            )
    if heads != kv:
        yield (
            "gives query head n the kv head n modulo their number, OLMo 3 n divided by the group",
            lambda i: mixed(i, tiled=True),
        )


def _one_row(place: Place, index: int, distance: np.ndarray, sliding: bool) -> np.ndarray:
    mask = distance >= 0
    return mask & (distance < (place.sequences[index].window or place.config.sliding_window)) if sliding else mask


def _score_scale(place: Place, heads: int, kv: int, width: int) -> float:
    """From the second token of a row, which sees two keys: how its attention is split says what scores were multiplied by."""
    q, k, v = _given(place, 0)
    if len(q) < 2:
        return math.nan
    q, k, v = q[1].reshape(heads, width), k[:2].reshape(2, kv, width), v[:2].reshape(2, kv, width)
    found = np.asarray(place.found[0][1], np.float64).reshape(heads, width)
    scales = []
    for head in range(heads):
        of = head // (heads // kv)
        share = _ratio(found[head] - v[0, of], v[1, of] - v[0, of])
        delta = q[head] @ (k[1, of] - k[0, of])
        if 0 < share < 1 and abs(delta) > 1e-3:
            scales.append(math.log(share / (1 - share)) / delta)
    return float(np.median(scales)) if scales else math.nan


# The rest


def _swiglu(place: Place) -> Iterator[tuple[str, Formula]]:
    def silu(x):
        return x / (1 + np.exp(-x))

    def gelu_tanh(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def gelu(x):
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))

    yield "takes up for gate and gate for up", lambda i: silu(_given(place, i)[1]) * _given(place, i)[0]
    for name, f in (("gelu", gelu), ("gelu by tanh", gelu_tanh), ("relu", lambda x: np.maximum(x, 0))):
        yield f"takes {name} for silu", lambda i, f=f: f(_given(place, i)[0]) * _given(place, i)[1]
    yield "leaves out silu", lambda i: _given(place, i)[0] * _given(place, i)[1]
    yield "leaves out up", lambda i: silu(_given(place, i)[0])


def _residual(place: Place) -> Iterator[tuple[str, Formula]]:
    yield "does not add what came before", lambda i: _given(place, i)[1]
    yield "does not add the layer's own part", lambda i: _given(place, i)[0]
    x, change = _given(place, 0)
    factor = _ratio(place.found[0].reshape(x.shape) - x, change)
    yield f"adds {factor:.4g} times its part", lambda i: _given(place, i)[0] + factor * _given(place, i)[1]


def of_any_module(place: Place) -> Iterator[tuple[str, Formula]]:
    """Sentences and formulas that say nothing of the kind of module: tried where no other fits."""
    factor = _ratio(place.found[0], right(place, 0))
    yield f"gives {factor:.4g} times what it should", lambda i: factor * right(place, i).astype(np.float64)
    if place.layer is not None:
        for name in place.part.outputs[0]:
            if name != place.name and name not in GIVEN.get(place.name, ()):
                yield f"gives what {name} should", lambda i, n=name: place.part.outputs[i][n]
    for given in range(len(_given(place, 0))):
        yield "gives what it was given", lambda i, k=given: _given(place, i)[k]
    offset = np.mean(
        [np.mean(f.astype(np.float64) - right(place, i), axis=0) for i, f in enumerate(place.found)], axis=0
    )
    if np.any(offset):
        yield "adds the same vector to every token, as a bias does", lambda i: right(place, i) + offset
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        yield f"{ROUNDS}what it gives to {name}", lambda i, d=dtype: _in(right(place, i), d)
