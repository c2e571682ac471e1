"""OLMo-core's experiment config (2.x and 3.0 forms) to Olmo3Config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .config import FULL, SLIDING, Olmo3Config, RopeParameters
from .errors import BadInput
from .rope import default_attention_factor

# Per block of the config: keys that are used below, keys whose value must be one of those listed, keys without effect on
# the function. `_CLASS_` is OLMo-core's own type tag; anything else is refused by name.
NO = (None, False)
SPEC = {
    "model": (
        {"d_model", "vocab_size", "n_layers", "block", "block_overrides", "lm_head", "tie_word_embeddings"},
        {
            "name": ("default",),
            "embed_scale": NO,
            "embedding_norm": NO,
            "block_pattern": NO,
            "n_hyper_connections": NO,
        },
        {
            "dtype",
            "init_method",
            "init_seed",
            "init_std",
            "embedding_init_std",
            "freeze_params",
            "compile",
            "dp_config",
            "tp_config",
            "cp_config",
            "ep_config",
            "ac_config",
            "float8_config",
            "fused_ops",
        },
    ),
    "block": (
        {"sequence_mixer", "attention", "layer_norm", "feed_forward"},
        {
            "name": ("reordered_norm",),
            "feed_forward_moe": NO,
            "attention_residual_alpha": (None, 1),
            "feed_forward_residual_alpha": (None, 1),
            "dropout": (None, 0),
        },
        {"init_std"},
    ),
    "attention": (
        {"n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "sliding_window"},
        {
            "name": ("default",),
            "type": ("attention",),
            "bias": (False,),
            "gate": NO,
            "attention_sinks": NO,
            "scalable_softmax": NO,
            "use_head_qk_norm": NO,
            "clip_qkv": (None,),
            "softmax_scale": (None,),
            "dropout": (None, 0),
            "use_sinks": NO,
            "window_size": (None,),
        },
        {"backend", "dtype", "use_flash"},
    ),
    "layer_norm": (
        {"eps"},
        {"name": ("rms", "fused_rms"), "bias": (False,), "full_precision": (None, True)},
        {"dtype"},
    ),
    "feed_forward": (
        {"hidden_size"},
        {"name": ("default",), "bias": (False,), "activation": (None, "silu")},
        {"dtype"},
    ),
    "lm_head": ({"layer_norm"}, {"name": ("default",), "bias": (False,)}, {"dtype", "loss_implementation"}),
    "rope": (
        {"theta", "scaling"},
        {
            "name": ("default",),
            "full_precision": (True,),
            "no_global_rope": NO,
            "partial_rotary_factor": (None, 1),
        },
        set(),
    ),
    "scaling": ({"factor", "beta_fast", "beta_slow", "old_context_len"}, {}, set()),
    "sliding_window": (
        {"pattern", "force_full_attention_on_first_layer", "force_full_attention_on_last_layer"},
        {},
        set(),
    ),
}
YARN_CLASS = "YaRNRoPEScalingConfig"


def from_olmo_core(raw: Mapping, where: str = "config.json", allow_unknown_keys: Sequence[str] = ()) -> Olmo3Config:
    """Read the dictionary of OLMo-core's stepN/config.json (or a part of it holding `model` and `dataset.tokenizer`).

    Both forms are read: a block's `attention` (2.x) and `sequence_mixer` (3.0). vocab_size is the tokenizer's, without the
    padding rows that OLMo-core's embedding and head carry (`padded_vocab_size` gives those).

    Raises BadInput listing every fault.
    """
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where} holds a {type(raw).__name__}, a JSON object is wanted")
    faults, notes = [], []
    model = _child(raw, "model", "model", faults)
    dataset, train_module = (raw.get(k) if isinstance(raw.get(k), Mapping) else {} for k in ("dataset", "train_module"))
    tokenizer = raw.get("tokenizer") or dataset.get("tokenizer")
    if not isinstance(tokenizer, Mapping) or not isinstance(tokenizer.get("vocab_size"), int):
        faults.append("dataset.tokenizer.vocab_size is missing: it is the size of the vocabulary without padding rows")
        tokenizer = {}
    if model is None:
        raise BadInput(f"{where} cannot be used", faults)
    reader = _Reader(faults, set(allow_unknown_keys))
    reader.check(model, "model", "model")
    count = model.get("n_layers")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 10_000:
        raise BadInput(f"{where} cannot be used", [*faults, f"model.n_layers is {count!r}"])
    base = reader.block(model.get("block"), "model.block")
    overrides = model.get("block_overrides") or {}
    layers = [base] * count
    if not isinstance(overrides, Mapping):
        faults.append(f"model.block_overrides is {overrides!r}, an object by layer is wanted")
        overrides = {}
    for key, block in overrides.items():
        if not str(key).isdigit() or int(key) >= count:
            faults.append(f"model.block_overrides names layer {key!r}, the model has layers 0 to {count - 1}")
        else:
            layers[int(key)] = reader.block(block, f"model.block_overrides.{key}")
    head = _child(model, "lm_head", "model.lm_head", faults) or {}
    reader.check(head, "lm_head", "model.lm_head")
    head_norm = reader.norm(head.get("layer_norm"), "model.lm_head.layer_norm")
    if faults:
        raise BadInput(f"{where} cannot be used", faults)

    windows = [_window(layer["sliding_window"], i, count) for i, layer in enumerate(layers)]
    layer_types = tuple(FULL if window is None else SLIDING for window in windows)
    by_type: dict[str, set] = {}
    for layer_type, layer in zip(layer_types, layers, strict=True):
        by_type.setdefault(layer_type, set()).add(layer["rope"])
    for layer_type, ropes in by_type.items():
        if len(ropes) > 1:
            faults.append(f"{layer_type} layers have {len(ropes)} different rotary embeddings, one is supported")
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1:
        faults.append(f"layers have different sliding windows {sorted(sizes)}, one is supported")
    same = ("n_heads", "n_kv_heads", "head_dim", "intermediate_size", "eps")
    for name in same:
        values = {layer[name] for layer in layers} | ({head_norm} if name == "eps" else set())
        if len(values) > 1:
            faults.append(f"layers differ in {name}: {sorted(values, key=repr)}")
    if faults:
        raise BadInput(f"{where} cannot be used", faults)
    first = layers[0]
    width, heads = model.get("d_model"), first["n_heads"]
    head_dim = first["head_dim"]
    if head_dim is None:
        if not isinstance(width, int) or not isinstance(heads, int) or heads <= 0 or width % heads:
            raise BadInput(f"{where} cannot be used", [f"d_model {width!r} is not a multiple of n_heads {heads!r}"])
        head_dim = width // heads
    vocabulary = tokenizer["vocab_size"]
    padded = model.get("vocab_size")
    if not isinstance(padded, int) or padded < vocabulary:
        raise BadInput(
            f"{where} cannot be used",
            [f"model.vocab_size is {padded!r}, fewer rows than the tokenizer's {vocabulary} entries"],
        )
    rope = {layer_type: next(iter(ropes)) for layer_type, ropes in by_type.items()}
    length = train_module.get("max_sequence_length") or dataset.get("sequence_length")
    if length is None:
        notes.append("the training length is not stated; max_position_embeddings was taken from the rotary embedding")
        full = rope.get(FULL)
        length = int(full.factor * full.original_max_position_embeddings) if full and full.factor else 8192
    try:
        return Olmo3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=first["intermediate_size"],
            num_hidden_layers=count,
            num_attention_heads=heads,
            num_key_value_heads=first["n_kv_heads"] or heads,
            head_dim=head_dim,
            rms_norm_eps=first["eps"],
            layer_types=layer_types,
            sliding_window=next(iter(sizes), None),
            rope=rope,
            tie_word_embeddings=bool(model.get("tie_word_embeddings", False)),
            max_position_embeddings=length,
            dtype="float32",
            token_ids={k: tokenizer.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
            notes=tuple(notes),
            allowed_unknown_keys=tuple(sorted(reader.allowed)),
        )
    except BadInput as error:
        raise BadInput(f"{where} cannot be used", error.faults) from None


def padded_vocab_size(raw: Mapping) -> int:
    """Rows of OLMo-core's embedding and head, padding included."""
    return raw["model"]["vocab_size"]


class _Reader:
    """Reads the nested blocks, collecting faults and the unknown keys that were let through."""

    def __init__(self, faults: list[str], allow: set[str]):
        self.faults, self.allow, self.allowed = faults, allow, set()

    def check(self, block: Mapping, kind: str, path: str) -> None:
        used, fixed, harmless = SPEC[kind]
        for key, value in block.items():
            if key in used or key in harmless or key == "_CLASS_":
                continue
            if key in fixed:
                if value not in fixed[key]:
                    wanted = " or ".join(repr(v) for v in fixed[key])
                    self.faults.append(f"{path}.{key} {json.dumps(value)} is not supported (wanted: {wanted})")
            elif key in self.allow:
                self.allowed.add(key)
            else:
                self.faults.append(
                    f"{path} holds the unknown key {key!r}: it may change what the model computes. "
                    f"If you know that it does not, pass --allow-unknown-key {key}"
                )

    def block(self, block, path: str) -> dict:
        result = dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "intermediate_size", "eps", "sliding_window"))
        result["rope"] = None
        if not isinstance(block, Mapping):
            self.faults.append(f"{path} is {block!r}, an object is wanted")
            return result
        self.check(block, "block", path)
        present = [name for name in ("sequence_mixer", "attention") if block.get(name) is not None]
        if len(present) != 1:
            self.faults.append(f"{path} holds {' and '.join(present) or 'neither attention nor sequence_mixer'}")
            return result
        attention_path = f"{path}.{present[0]}"
        attention = _child(block, present[0], attention_path, self.faults) or {}
        self.check(attention, "attention", attention_path)
        feed_forward = _child(block, "feed_forward", f"{path}.feed_forward", self.faults) or {}
        self.check(feed_forward, "feed_forward", f"{path}.feed_forward")
        eps = self.norm(block.get("layer_norm"), f"{path}.layer_norm")
        qk_eps = self.norm(attention.get("qk_norm"), f"{attention_path}.qk_norm")
        if eps != qk_eps:
            self.faults.append(
                f"{path}: layer_norm.eps {eps!r} and qk_norm.eps {qk_eps!r} differ, one value is supported"
            )
        for name, value in (("n_heads", attention.get("n_heads")), ("hidden_size", feed_forward.get("hidden_size"))):
            if value is None:
                self.faults.append(f"{path}: {name} is missing")
            else:
                self.whole(value, f"{path}: {name}")
        for name in ("n_kv_heads", "head_dim"):
            if attention.get(name) is not None:
                self.whole(attention[name], f"{attention_path}.{name}")
        sliding = attention.get("sliding_window")
        if sliding is not None and not isinstance(sliding, Mapping):
            self.faults.append(f"{attention_path}.sliding_window is {sliding!r}, an object is wanted")
        elif sliding is not None:
            self.check(sliding, "sliding_window", f"{attention_path}.sliding_window")
            pattern = sliding.get("pattern")
            if not isinstance(pattern, list) or not pattern or not all(_is_window(w) for w in pattern):
                self.faults.append(f"{attention_path}.sliding_window.pattern is {pattern!r}, tokens or -1 are wanted")
        return {
            "n_heads": attention.get("n_heads"),
            "n_kv_heads": attention.get("n_kv_heads"),
            "head_dim": attention.get("head_dim"),
            "intermediate_size": feed_forward.get("hidden_size"),
            "eps": eps,
            "sliding_window": sliding,
            "rope": self.rope(attention.get("rope"), f"{attention_path}.rope"),
        }

    def whole(self, value, path: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.faults.append(f"{path} is {value!r}, a positive whole number is wanted")

    def number(self, value, path: str) -> float | None:
        """The value if it is a number, else None and a fault. Whether it can be used is checked by Olmo3Config."""
        if value is None:
            self.faults.append(f"{path} is missing")
        elif not isinstance(value, (int, float)) or isinstance(value, bool):
            self.faults.append(f"{path} is {value!r}, a number is wanted")
        else:
            return value
        return None

    def norm(self, block, path: str) -> float | None:
        if not isinstance(block, Mapping):
            self.faults.append(f"{path} is missing")
            return None
        self.check(block, "layer_norm", path)
        return self.number(block.get("eps"), f"{path}.eps")

    def rope(self, block, path: str) -> RopeParameters | None:
        if not isinstance(block, Mapping):
            self.faults.append(f"{path} is missing")
            return None
        self.check(block, "rope", path)
        theta, scaling = self.number(block.get("theta"), f"{path}.theta"), block.get("scaling")
        if scaling is None:
            return RopeParameters("default", theta)
        if not isinstance(scaling, Mapping):
            self.faults.append(f"{path}.scaling is {scaling!r}, an object is wanted")
            return None
        self.check(scaling, "scaling", f"{path}.scaling")
        kind = str(scaling.get("_CLASS_", YARN_CLASS)).rsplit(".", 1)[-1]
        missing = [k for k in ("factor", "beta_fast", "beta_slow", "old_context_len") if scaling.get(k) is None]
        if kind != YARN_CLASS or missing:
            self.faults.append(
                f"{path}.scaling is {kind}"
                + (f" without {', '.join(missing)}" if missing else "")
                + "; YaRN is supported"
            )
            return None
        names = ("factor", "old_context_len", "beta_fast", "beta_slow")
        factor, context, beta_fast, beta_slow = (self.number(scaling[k], f"{path}.scaling.{k}") for k in names)
        if factor is None:
            return None
        return RopeParameters(
            "yarn",
            theta,
            factor=factor,
            original_max_position_embeddings=context,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=default_attention_factor(factor),
            truncate=True,
        )


def _window(sliding: Mapping | None, layer: int, count: int) -> int | None:
    """Tokens layer sees, itself included, or None for all: OLMo-core's pattern with its forced first and last layers."""
    if sliding is None:
        return None
    first = bool(sliding.get("force_full_attention_on_first_layer", False))
    if (first and layer == 0) or (sliding.get("force_full_attention_on_last_layer", False) and layer == count - 1):
        return None
    pattern = sliding["pattern"]
    window = pattern[(layer - first) % len(pattern)]  # a forced first layer does not use up an entry
    return None if window == -1 else window


def _is_window(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == -1)


def _child(block: Mapping, key: str, path: str, faults: list[str]) -> Mapping | None:
    child = block.get(key)
    if not isinstance(child, Mapping):
        faults.append(f"{path} is {'missing' if child is None else repr(child)}, an object is wanted")
        return None
    return child
