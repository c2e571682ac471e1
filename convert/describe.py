"""inspect: a checkpoint's config, resolved rotary embedding and tensors, from metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..olmo_jax.config import LAYER_TYPES
from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.rope import rope_tables, tables_hash
from .checkpoint import Source
from .manifest import config_hash
from .progress import in_bytes
from .safetensors_io import DTYPES
from .sources import check_used, open_source


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds. `faults` say what keeps it from being converted."""

    source: Source
    rotary: dict[str, dict]  # by layer type
    config_sha256: str
    rotary_tables_sha256: str

    def as_json(self) -> dict:
        """The record as JSON values."""
        source = self.source
        return {
            "kind": source.kind,
            "path": source.name,
            "taken": source.said,
            "config": to_hf(source.config),
            "config_sha256": self.config_sha256,
            "rotary": self.rotary,
            "rotary_tables_sha256": self.rotary_tables_sha256,
            "vocabulary": {
                "logical": source.config.vocab_size,
                "padded": source.padded_vocab_size or source.config.vocab_size,
            },
            "tensors": [
                {
                    "name": tensor.hf,
                    "stored_name": tensor.name,
                    "file": source.name_of(tensor.file),
                    "dtype": tensor.code,
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes if tensor.code in DTYPES else None,
                }
                for tensor in source.tensors.values()
            ],
            "notes": list(source.notes),
            "faults": list(source.faults),
        }


def inspect(
    path: str | Path, allow_unknown_keys: Sequence[str] = (), *, model_config: str | Path | None = None
) -> Inspection:
    """Describe a checkpoint of any form. Tensors that do not fit the config are listed as faults, not raised."""
    source = open_source(path, allow_unknown_keys, strict=False, headers_only=True, model_config=model_config)
    check_used(model_config, source)
    config = source.config
    tables = rope_tables(config)
    rotary = {}
    for layer_type in LAYER_TYPES:
        if layer_type not in tables:
            continue
        rope, table = config.rope[layer_type], tables[layer_type]
        rotary[layer_type] = {
            "layers": [i for i, t in enumerate(config.layer_types) if t == layer_type],
            **{k: v for k, v in vars(rope).items() if v is not None},
            "attention_factor": table.attention_factor,
            "inv_freq_first": float(table.inv_freq[0]),
            "inv_freq_last": float(table.inv_freq[-1]),
        }
    return Inspection(source, rotary, config_hash(config), tables_hash(tables))


def as_text(inspection: Inspection) -> str:
    """The record for people."""
    source, config = inspection.source, inspection.source.config
    known = [t for t in source.tensors.values() if t.code in DTYPES]
    lines = [
        source.said,
        f"  {config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} query heads and "
        f"{config.num_key_value_heads} kv heads of {config.head_dim}, MLP {config.intermediate_size}",
        f"  vocabulary {config.vocab_size}"
        + (f" ({source.padded_vocab_size} rows stored)" if source.padded_vocab_size else "")
        + f", head {'tied to the embedding' if config.tie_word_embeddings else 'of its own'}, "
        f"RMSNorm eps {config.rms_norm_eps:g}, {config.max_position_embeddings} positions",
        f"  sliding window {config.sliding_window} tokens, the current one included"
        if config.sliding_window
        else "  no layer slides",
        "rotary, resolved from the config alone:",
    ]
    for layer_type, rope in inspection.rotary.items():
        details = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in rope.items()
            if key not in ("layers", "rope_type")
        )
        lines.append(f"  {layer_type} (layers {_ranges(rope['layers'])}): {rope['rope_type']}, {details}")
    lines.append(f"  tables sha256 {inspection.rotary_tables_sha256}")
    lines.append(f"{len(source.tensors)} tensors, {in_bytes(sum(t.nbytes for t in known))}, {source.dtype_name}:")
    width = max((len(t.hf) for t in source.tensors.values()), default=0)
    for tensor in source.tensors.values():
        stored = "" if tensor.name == tensor.hf else f"  stored as {tensor.name}"
        lines.append(
            f"  {tensor.hf:<{width}}  {tensor.code:<4}  {str(list(tensor.shape)):<16}  {tensor.file.name}{stored}"
        )
    lines += [f"note: {note}" for note in source.notes]
    lines += [f"fault: {fault}" for fault in source.faults]
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """0-2, 4-6: consecutive layers together."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
