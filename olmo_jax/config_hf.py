"""Hugging Face config.json to Olmo3Config and back, in every spelling of rotary parameters that was ever released."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from .config import FULL, LAYER_TYPES, SIZES, SLIDING, Olmo3Config, RopeParameters
from .errors import BadInput
from .rope import default_attention_factor

REQUIRED = tuple(name for name in SIZES if name != "head_dim") + ("rms_norm_eps",)
USED = REQUIRED + (
    "model_type",
    "head_dim",
    "layer_types",
    "sliding_window",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Keys that must hold one of these values: any other would be another function.
FIXED = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "clip_qkv": (None,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "per_layer_config": (None,),
}
# Written by transformers 4.x or 5.x into the config of any model, without effect on what it computes:
# provenance, labels, output switches, and the generation settings that 4.x kept in the model config.
HARMLESS = frozenset(
    """
    architectures transformers_version _name_or_path name_or_path _commit_hash _attn_implementation_autoset
    attn_implementation _attn_implementation _from_model_config _output_attentions initializer_range use_cache
    use_return_dict return_dict output_attentions output_hidden_states torchscript use_bfloat16 id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss use_flash_attn
    """.split()
)
ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
)
ROPE_NUMBERS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
ROPE_NUMBERS += ("mscale", "mscale_all_dim")


def from_hf(raw: Mapping, where: str = "config.json", allow_unknown_keys: Sequence[str] = ()) -> Olmo3Config:
    """Read the dictionary of a config.json.

    Rotary parameters are accepted as transformers 4.57 (flat rope_theta and rope_scaling), 5.0 to 5.12 (flat
    rope_parameters) and 5.13+ (rope_parameters per layer type) write them; where a file holds more than one spelling they
    must agree. In both flat spellings the scaling belongs to full-attention layers only, as AI2's models were trained.

    Raises BadInput listing every fault: missing numbers, unknown keys (unless named in allow_unknown_keys), values that
    would be another function.
    """
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where} holds a {type(raw).__name__}, a JSON object is wanted")
    faults, notes = [], []
    if raw.get("model_type") != "olmo3":
        faults.append(f"model_type is {raw.get('model_type')!r}, 'olmo3' is wanted")
    faults += [f"{name} is missing" for name in REQUIRED if raw.get(name) is None]
    if "hidden_act" not in raw:
        faults.append("hidden_act is missing, 'silu' is wanted")
    for key, wanted in FIXED.items():
        if key in raw and raw[key] not in wanted:
            faults.append(f"{key} {raw[key]!r} is not supported (wanted: {' or '.join(repr(v) for v in wanted)})")
    known = HARMLESS.union(USED, FIXED)
    unknown = sorted(set(raw) - known)
    faults += [
        f"unknown key {key!r}: it may change what the model computes. "
        f"If you know that it does not, pass --allow-unknown-key {key}"
        for key in unknown
        if key not in allow_unknown_keys
    ]
    tied = raw.get("tie_word_embeddings")
    if not isinstance(tied, bool):
        faults.append(f"tie_word_embeddings is {tied!r}, true or false is wanted")
    layer_types = _layer_types(raw, faults, notes)
    head_dim = _head_dim(raw, faults)
    used_types = [t for t in LAYER_TYPES if t in layer_types]
    rope = _rope(raw, used_types, faults, notes)
    dtypes = {raw[key] for key in ("dtype", "torch_dtype") if isinstance(raw.get(key), str)}
    if len(dtypes) > 1:
        faults.append(f"dtype is {raw['dtype']!r} but torch_dtype is {raw['torch_dtype']!r}")
    if faults:
        raise BadInput(f"{where} cannot be used", faults)
    try:
        config = Olmo3Config(
            **{name: raw[name] for name in REQUIRED},
            head_dim=head_dim,
            layer_types=layer_types,
            sliding_window=raw.get("sliding_window"),
            rope=rope,
            tie_word_embeddings=tied,
            dtype=next(iter(dtypes), None),
            token_ids={k: raw.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
            allowed_unknown_keys=tuple(key for key in unknown if key in allow_unknown_keys),
        )
    except BadInput as error:
        raise BadInput(f"{where} cannot be used", error.faults) from None
    return config.replace(notes=(*notes, *_oddities(config)))


def _oddities(config: Olmo3Config) -> list[str]:
    """What is allowed but seldom meant."""
    notes = []
    length, sliding, full = config.max_position_embeddings, config.rope.get(SLIDING), config.rope.get(FULL)
    if sliding and sliding.rope_type != "default":
        notes.append(f"{SLIDING} layers have {sliding.rope_type} rotary: AI2's OLMo 3 keeps plain rotary there")
    if full and full.rope_type == "default" and length > 8192:
        notes.append(
            f"max_position_embeddings is {length} without YaRN: none was added. OLMo 3 was "
            "trained at 8192 tokens before its long-context stage; was the rotary block lost on the way?"
        )
    if full and full.rope_type == "yarn" and full.original_max_position_embeddings * full.factor < length:
        notes.append(
            f"max_position_embeddings {length} is more than YaRN's "
            f"{full.factor:g} x {full.original_max_position_embeddings} tokens"
        )
    return notes


def to_hf(config: Olmo3Config) -> dict:
    """The config.json that transformers 5.13+ reads as the same function; every number written out."""
    raw = {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **config.token_ids,
        "dtype": config.dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "olmo3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            layer_type: {k: v for k, v in vars(rope).items() if v is not None}
            for layer_type, rope in config.rope.items()
        },
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }
    return raw


def _layer_types(raw: Mapping, faults: list[str], notes: list[str]) -> tuple[str, ...]:
    stated = raw.get("layer_types")
    if stated is None:
        count = raw.get("num_hidden_layers")
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 10_000:
            return ()
        notes.append("layer_types is not stated: three sliding layers then one full, as transformers derives it")
        return tuple(FULL if i % 4 == 3 else SLIDING for i in range(count))
    if not isinstance(stated, (list, tuple)) or not all(isinstance(t, str) for t in stated):
        faults.append(f"layer_types is {stated!r}, a list of layer types is wanted")
        return ()
    return tuple(stated)


def _head_dim(raw: Mapping, faults: list[str]) -> int:
    if raw.get("head_dim") is not None:
        return raw["head_dim"]
    width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads <= 0:
        return 2  # the missing or wrong number is reported under its own name
    if width % heads:
        faults.append(
            f"head_dim is not stated and hidden_size {width} is not a multiple of num_attention_heads {heads}"
        )
    return max(width // heads, 1)


def _rope(raw: Mapping, layer_types: list[str], faults: list[str], notes: list[str]) -> dict[str, RopeParameters]:
    """Every spelling that is present, resolved; they must agree."""
    spellings = []  # (name, {layer type: parameters})
    parameters = raw.get("rope_parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        faults.append(f"rope_parameters is {parameters!r}, an object is wanted")
        parameters = None
    parameters = parameters or {}
    by_type = {k: v for k, v in parameters.items() if k in LAYER_TYPES}
    flat = {k: v for k, v in parameters.items() if k not in LAYER_TYPES}
    before = len(faults)
    if by_type:
        resolved = {}
        for layer_type in layer_types:
            block, name = by_type.get(layer_type), f"rope_parameters.{layer_type}"
            if not isinstance(block, Mapping):
                faults.append(f"{name} is {'missing' if block is None else repr(block)}, the model has such layers")
            else:
                resolved[layer_type] = _block(block, block.get("rope_theta"), name, faults)
        spellings.append(("rope_parameters by layer type", resolved))
    if flat:
        resolved = _flat(flat, flat.get("rope_theta", raw.get("rope_theta")), "rope_parameters", layer_types, faults)
        spellings.append(("flat rope_parameters", resolved))
    scaling = raw.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        faults.append(f"rope_scaling is {scaling!r}, an object or null is wanted")
        scaling = None
    if scaling is not None or (raw.get("rope_theta") is not None and not spellings):
        resolved = _flat(scaling or {}, raw.get("rope_theta"), "rope_scaling", layer_types, faults)
        spellings.append(("rope_theta and rope_scaling", resolved))
    elif raw.get("rope_theta") is not None:
        for name, resolved in spellings:
            stated = [r.rope_theta for r in resolved.values()]
            if any(theta != raw["rope_theta"] for theta in stated):
                faults.append(f"rope_theta is {raw['rope_theta']!r} but {name} says {sorted(set(stated))}")
    if not spellings:
        faults.append("rope_theta is missing: neither rope_parameters nor rope_theta states the rotary embedding")
        return {}
    if len(faults) > before:
        return {}
    first_name, first = spellings[0]
    for name, other in spellings[1:]:
        if other != first:
            faults.append(
                f"the file states its rotary embedding twice and differently: {first_name} gives {_say(first)}; "
                f"{name} gives {_say(other)}. Keep the one the model was trained with"
            )
    if first_name == "flat rope_parameters" and any(r.rope_type != "default" for r in first.values()):
        notes.append(
            "flat rope_parameters: the scaling was taken for full-attention layers only, as OLMo 3 was trained. "
            "transformers 5.0 to 5.12 apply it to every layer, 5.13 and later ignore it"
        )
    return first


def _flat(block: Mapping, theta, name: str, layer_types: list[str], faults: list[str]) -> dict[str, RopeParameters]:
    """Both flat spellings: scaling on full-attention layers, plain rotary with the same theta on sliding ones."""
    full = _block(block, theta, name, faults)
    plain = RopeParameters("default", full.rope_theta)
    return {t: full if t == FULL else plain for t in layer_types}


def _block(block: Mapping, theta, name: str, faults: list[str]) -> RopeParameters:
    """One rotary block. Numbers that belong to the checkpoint are never filled in."""
    for key in sorted(set(block) - set(ROPE_KEYS)):
        faults.append(f"{name} holds the unknown key {key!r}: it may change the rotary embedding")
    if theta is None:
        faults.append(f"rope_theta is missing in {name}" if name != "rope_scaling" else "rope_theta is missing")
        theta = 2.0
    elif "rope_theta" in block and block["rope_theta"] != theta:
        faults.append(f"{name}.rope_theta is {block['rope_theta']!r} but rope_theta is {theta!r}")
    if block.get("partial_rotary_factor", 1) not in (1, None):
        faults.append(f"{name}.partial_rotary_factor {block['partial_rotary_factor']!r} is not supported (1 is)")
    rope_type = block.get("rope_type", block.get("type"))
    if "type" in block and block["type"] != rope_type:
        faults.append(f"{name} says rope_type {rope_type!r} and type {block['type']!r}")
    if rope_type is None:
        if any(block.get(key) is not None for key in ROPE_KEYS[3:-1]):
            faults.append(f"rope_type is missing in {name}")
        rope_type = "default"
    stated = {"rope_theta": theta, **{key: block.get(key) for key in ROPE_NUMBERS}}
    wrong = [key for key, value in stated.items() if value is not None and not _is_number(value)]
    if wrong:
        faults += [f"{key} is {stated[key]!r} in {name}, a number is wanted" for key in wrong]
        return RopeParameters("default", 2.0)  # never used: there are faults
    numbers = {key: block.get(key) for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}
    attention_factor, truncate = block.get("attention_factor"), block.get("truncate")
    if rope_type == "yarn":
        if truncate is None:
            truncate = True
        if attention_factor is None and isinstance(numbers["factor"], (int, float)):
            attention_factor = default_attention_factor(
                numbers["factor"], block.get("mscale"), block.get("mscale_all_dim")
            )
    elif block.get("mscale") is not None or block.get("mscale_all_dim") is not None:
        faults.append(f"{name} holds mscale, but rope_type {rope_type} does not use it")
    return RopeParameters(rope_type, theta, **numbers, attention_factor=attention_factor, truncate=truncate)


def _is_number(value) -> bool:
    """A finite number that fits a float; NaN fails both comparisons."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _say(rope: Mapping[str, RopeParameters]) -> str:
    return ", ".join(
        f"{layer_type} {r.rope_type} theta {r.rope_theta:g}" + (f" factor {r.factor:g}" if r.factor else "")
        for layer_type, r in rope.items()
    )
