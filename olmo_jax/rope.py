"""Resolved rotary tables per layer type: plain, linear and YaRN, from the config alone (NumPy)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from .config import LAYER_TYPES, Olmo3Config, RopeParameters


@dataclass(frozen=True)
class RopeTable:
    """What one layer type turns its queries and keys by.

    inv_freq [H/2] float32, radians per token; cos and sin are multiplied by attention_factor.
    """

    inv_freq: np.ndarray
    attention_factor: float


def rope_tables(config: Olmo3Config) -> dict[str, RopeTable]:
    """The table of every layer type that occurs in the config."""
    return {t: resolve(config.rope[t], config.head_dim) for t in LAYER_TYPES if t in config.layer_types}


def resolve(rope: RopeParameters, head_dim: int) -> RopeTable:
    """Inverse frequencies [head_dim/2] and attention factor of one layer type.

    Plain: RoFormer (arXiv 2104.09864); linear: position interpolation (arXiv 2306.15595); yarn: NTK-by-parts of
    YaRN (arXiv 2309.00071, section 3.2). Float32 step by step as AI2's code has it, so that tables are bit-equal
    to the reference's at the released sizes: one unit in the last place of a frequency is 4e-3 radians at position 65536.
    """
    # The power in float64, rounded once: NumPy's own float32 power is up to two units off (13 of 64 at theta 500000).
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelength = np.power(np.float64(rope.rope_theta), exponent.astype(np.float64)).astype(np.float32)  # tokens / 2 pi
    plain = np.float32(1) / wavelength
    if rope.rope_type == "default":
        return RopeTable(plain, 1.0)
    if rope.rope_type == "linear":
        return RopeTable(plain / np.float32(rope.factor), 1.0)
    stretched = np.float32(1) / (np.float32(rope.factor) * wavelength)
    low, high = yarn_ramp(rope, head_dim)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    inv_freq = stretched * (np.float32(1) - kept) + plain * kept
    return RopeTable(inv_freq, float(rope.attention_factor))


def yarn_ramp(rope: RopeParameters, head_dim: int) -> tuple[float, float]:
    """Dimensions (of head_dim/2) between which YaRN blends: before the first kept, after the second divided by factor.

    A dimension turns beta times over the original context where
    dim = head_dim * ln(context / (2 pi beta)) / (2 ln theta) (YaRN, appendix A.2).
    """

    def dimension(beta: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (beta * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does: a step, not a division by zero
    return low, high


def default_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's attention factor where the config states none: 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22).

    With both mscale and mscale_all_dim the ratio of the two scaled forms, as transformers computes it.
    """

    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scaled(mscale) / scaled(mscale_all_dim)
    return scaled(1.0)


def tables_hash(tables: dict[str, RopeTable]) -> str:
    """sha256 over every table's bytes and attention factor, by layer type in a fixed order."""
    digest = hashlib.sha256()
    for layer_type in LAYER_TYPES:
        if layer_type in tables:
            table = tables[layer_type]
            digest.update(f"{layer_type} {table.attention_factor!r} ".encode())
            digest.update(table.inv_freq.astype("<f4").tobytes())
    return digest.hexdigest()
