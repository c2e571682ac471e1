"""The damaged folders of the fixtures, made from ok-control: each differs from it in one way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

NORM = "model.norm.weight"


def _header(folder: Path) -> tuple[dict, bytes]:
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _write(file: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _rebuild(folder: Path, change: Callable[[dict], None], file: str = "model.safetensors", index: dict | None = None):
    """Write the file again after change(tensors), where a tensor is [dtype code, shape, bytes]."""
    header, data = _header(folder)
    header.pop("__metadata__", None)
    tensors = {
        name: [info["dtype"], info["shape"], data[slice(*info["data_offsets"])]] for name, info in header.items()
    }
    change(tensors)
    out, blob = {"__metadata__": {"format": "pt"}}, b""
    for name, (code, shape, content) in tensors.items():
        out[name] = {"dtype": code, "shape": shape, "data_offsets": [len(blob), len(blob) + len(content)]}
        blob += content
    _write(folder / file, out, blob)


def _config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "delete"}))


def _shards(folder: Path, first: Callable[[str], bool], both: tuple[str, ...] = ()) -> dict[str, str]:
    """Cut model.safetensors into two shards; returns the weight map."""
    names = list(_header(folder)[0])
    names.remove("__metadata__") if "__metadata__" in names else None
    weight_map = {
        n: "model-00001-of-00002.safetensors" if first(n) else "model-00002-of-00002.safetensors" for n in names
    }

    def keep(shard: str):
        def change(tensors: dict) -> None:
            for name in list(tensors):
                if weight_map[name] != shard and name not in both:
                    del tensors[name]
                elif name in both and weight_map[name] != shard:
                    tensors[name][2] = np.frombuffer(tensors[name][2], np.uint16).__add__(64).tobytes()

        return change

    for shard in sorted(set(weight_map.values())):
        _rebuild(folder, keep(shard), shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def truncated_file(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) * 6 // 10])


def missing_shard(folder: Path) -> None:
    _shards(folder, lambda name: "layers.1" in name)
    (folder / "model-00002-of-00002.safetensors").unlink()


def missing_tensor(folder: Path) -> None:
    _rebuild(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))


def extra_tensor(folder: Path) -> None:
    _rebuild(folder, lambda t: t.update({"model.layers.0.self_attn.sinks": ["BF16", [4], bytes(8)]}))


def wrong_shape(folder: Path) -> None:
    def cut(tensors: dict) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"][1:] = [[64, 48], bytes(64 * 48 * 2)]

    _rebuild(folder, cut)


def nan_in_tensor(folder: Path) -> None:
    def spoil(tensors: dict) -> None:
        values = np.frombuffer(tensors["model.layers.3.mlp.gate_proj.weight"][2], np.uint16).copy()
        values[777] = 0x7FC0
        tensors["model.layers.3.mlp.gate_proj.weight"][2] = values.tobytes()

    _rebuild(folder, spoil)


def fp8_tensor(folder: Path) -> None:
    def store(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"] = ["F8_E4M3", [64, 64], bytes(64 * 64)]

    _rebuild(folder, store)


def int8_tensor(folder: Path) -> None:
    _rebuild(folder, lambda t: t.update({"lm_head.weight": ["I8", [1000, 64], bytes(64000)]}))


def config_missing_key(folder: Path) -> None:
    _config(folder, num_attention_heads="delete")


def layer_types_length(folder: Path) -> None:
    _config(folder, layer_types=["sliding_attention"] * 3)


def tied_embeddings(folder: Path) -> None:
    _config(folder, tie_word_embeddings=True)


def duplicate_key_in_shards(folder: Path) -> None:
    _shards(folder, lambda name: "layers.1" in name or name == NORM, both=(NORM,))


def header_length(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((2**40 + 17).to_bytes(8, "little") + content[8:])


def path_traversal(folder: Path) -> None:
    weight_map = _shards(folder, lambda name: "layers.1" in name)
    weight_map[NORM] = "../../etc/passwd"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def attention_bias(folder: Path) -> None:
    _config(folder, attention_bias=True)


# What the sentence must name, by folder of the fixtures.
BROKEN = {
    "truncated-file": (truncated_file, ["model.safetensors", "short", "model.layers"]),
    "missing-shard": (missing_shard, ["model-00002-of-0000", "does not exist", "tensors"]),
    "missing-tensor": (missing_tensor, ["model.layers.2.mlp.up_proj.weight", "missing"]),
    "extra-tensor": (extra_tensor, ["model.layers.0.self_attn.sinks", "unexpected", "model.safetensors"]),
    "wrong-shape": (wrong_shape, ["model.layers.1.self_attn.o_proj.weight", "(64, 48)", "(64, 64)"]),
    "nan-in-tensor": (nan_in_tensor, ["model.layers.3.mlp.gate_proj.weight", "1 non-finite value", "[12, 9]"]),
    "fp8-tensor": (fp8_tensor, ["F8_E4M3", "model.layers.0.self_attn.v_proj.weight"]),
    "int8-tensor": (int8_tensor, ["I8", "lm_head.weight"]),
    "config-missing-key": (config_missing_key, ["config.json", "num_attention_heads is missing"]),
    "layer-types-length": (layer_types_length, ["layer_types has 3 entries", "num_hidden_layers is 4"]),
    "tied-embeddings": (tied_embeddings, ["tie_word_embeddings", "lm_head.weight", "differs"]),
    "duplicate-key-in-shards": (duplicate_key_in_shards, [NORM, "two shards"]),
    "header-length": (header_length, ["model.safetensors", "header length 1099511627793"]),
    "path-traversal": (path_traversal, ["../../etc/passwd", NORM]),
    "attention-bias": (attention_bias, ["config.json", "attention_bias"]),
}
