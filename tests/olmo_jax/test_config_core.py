"""OLMo-core configs in both forms: the same model as the Hugging Face form, and every refusal."""

from __future__ import annotations

import copy
import json

import pytest

from olmo_parity.olmo_jax.config import FULL, SLIDING, RopeParameters
from olmo_parity.olmo_jax.config_core import from_olmo_core, padded_vocab_size
from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput

YARN = {
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "old_context_len": 32,
    "_CLASS_": "olmo_core.nn.rope.YaRNRoPEScalingConfig",
}


def norm() -> dict:
    return {"name": "rms", "eps": 1e-6, "bias": False, "dtype": "float32", "_CLASS_": "x.LayerNormConfig"}


def block(form="sequence_mixer", scaling=None) -> dict:
    attention = {
        "name": "default",
        "n_heads": 4,
        "bias": False,
        "rope": {"name": "default", "theta": 500000, "full_precision": True},
        "qk_norm": norm(),
        "backend": "torch",
        "dtype": "float32",
        "sliding_window": {
            "pattern": [16, 16, 16, -1],
            "force_full_attention_on_first_layer": False,
            "force_full_attention_on_last_layer": True,
        },
    }
    if scaling:
        attention["rope"]["scaling"] = dict(scaling)
    if form == "sequence_mixer":
        attention |= {
            "type": "attention",
            "use_head_qk_norm": False,
            "scalable_softmax": False,
            "attention_sinks": False,
        }
    return {
        form: attention,
        "layer_norm": norm(),
        "feed_forward": {"hidden_size": 128, "name": "default", "bias": False, "dtype": "float32"},
        "name": "reordered_norm",
    }


def base(form="sequence_mixer", layers=4) -> dict:
    return {
        "model": {
            "d_model": 64,
            "vocab_size": 512,
            "n_layers": layers,
            "block": block(form),
            "lm_head": {"name": "default", "layer_norm": norm(), "bias": False, "dtype": "float32"},
            "name": "default",
            "dtype": "float32",
            "init_method": "normal",
            "init_seed": 0,
        },
        "dataset": {"tokenizer": {"vocab_size": 500, "eos_token_id": 498, "pad_token_id": 499}},
        "train_module": {"max_sequence_length": 256},
    }


def put(raw: dict, path: str, value) -> dict:
    raw = copy.deepcopy(raw)
    *parents, last = path.split(".")
    node = raw
    for key in parents:
        node = node[key]
    node[last] = value
    return raw


def refusal(raw, **kwargs) -> str:
    with pytest.raises(BadInput) as caught:
        from_olmo_core(raw, **kwargs)
    return str(caught.value)


def test_both_forms_are_the_same_config():
    assert from_olmo_core(base("attention")) == from_olmo_core(base("sequence_mixer"))


def test_what_is_read():
    config = from_olmo_core(base())
    assert (config.vocab_size, padded_vocab_size(base())) == (500, 512)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (64, 128, 16)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)
    assert config.layer_types == (SLIDING, SLIDING, SLIDING, FULL) and config.sliding_window == 16
    assert config.max_position_embeddings == 256 and config.token_ids["eos_token_id"] == 498
    raw = put(put(base(), "model.block.sequence_mixer.n_kv_heads", 2), "model.block.sequence_mixer.head_dim", 32)
    assert (from_olmo_core(raw).num_key_value_heads, from_olmo_core(raw).head_dim) == (2, 32)


@pytest.mark.parametrize(
    ("layers", "first", "last", "pattern", "wanted"),
    [
        (4, False, True, [16, 16, 16, -1], "sssf"),
        (6, False, True, [16, 16, 16, -1], "sssfsf"),  # the last layer is full whatever the pattern says
        (6, False, False, [16, 16, 16, -1], "sssfss"),
        (6, True, True, [16, 16, 16, -1], "fsssff"),  # the pattern begins at layer 1
        (6, True, False, [16, 16, 16, -1], "fsssfs"),
        (3, False, False, [-1], "fff"),
        (5, False, False, [16, -1], "sfsfs"),
    ],
)
def test_forced_full_layers(layers, first, last, pattern, wanted):
    raw = base(layers=layers)
    raw["model"]["block"]["sequence_mixer"]["sliding_window"] = {
        "pattern": pattern,
        "force_full_attention_on_first_layer": first,
        "force_full_attention_on_last_layer": last,
    }
    found = from_olmo_core(raw).layer_types
    assert "".join("f" if t == FULL else "s" for t in found) == wanted


def test_no_sliding_window_means_that_all_layers_are_full():
    config = from_olmo_core(put(base(), "model.block.sequence_mixer.sliding_window", None))
    assert config.layer_types == (FULL,) * 4 and config.sliding_window is None


def test_yarn_comes_in_by_overrides_of_the_full_layers():
    raw = put(base(), "model.block_overrides", {"3": block(scaling=YARN)})
    config = from_olmo_core(raw)
    assert config.rope[FULL] == RopeParameters("yarn", 500000, 8.0, 32, 32, 1, 1.2079441541679836, True)
    assert config.rope[SLIDING] == RopeParameters("default", 500000)
    assert "full_attention layers have 2 different rotary" in refusal(
        put(base(layers=8), "model.block_overrides", {"3": block(scaling=YARN)})
    )
    assert "block_overrides names layer '4'" in refusal(put(base(), "model.block_overrides", {"4": block()}))
    everywhere = put(base(), "model.block", block(scaling=YARN))  # not how AI2 trained, but said plainly
    assert from_olmo_core(everywhere).rope[SLIDING].rope_type == "yarn"


ATTENTION = "model.block.sequence_mixer"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (f"{ATTENTION}.rope.no_global_rope", True, "no_global_rope true is not supported"),
        (f"{ATTENTION}.rope.partial_rotary_factor", 0.5, "partial_rotary_factor 0.5 is not supported"),
        (f"{ATTENTION}.rope.name", "complex", 'rope.name "complex" is not supported'),
        (f"{ATTENTION}.rope.full_precision", False, "full_precision false is not supported"),
        (f"{ATTENTION}.rope.theta", None, "rope.theta is missing"),
        (f"{ATTENTION}.rope.scaling", {"_CLASS_": "x.ABFRoPEScalingConfig", "new_theta": 8e6}, "ABFRoPEScalingConfig"),
        (f"{ATTENTION}.rope.scaling", {k: v for k, v in YARN.items() if k != "factor"}, "without factor"),
        (f"{ATTENTION}.gate", {"granularity": "headwise"}, "gate"),
        (f"{ATTENTION}.attention_sinks", True, "attention_sinks true is not supported"),
        (f"{ATTENTION}.scalable_softmax", True, "scalable_softmax true is not supported"),
        (f"{ATTENTION}.use_head_qk_norm", True, "use_head_qk_norm true is not supported"),
        (f"{ATTENTION}.clip_qkv", 8.0, "clip_qkv 8.0 is not supported"),
        (f"{ATTENTION}.bias", True, "bias true is not supported"),
        (f"{ATTENTION}.softmax_scale", 0.5, "softmax_scale 0.5 is not supported"),
        (f"{ATTENTION}.dropout", 0.1, "dropout 0.1 is not supported"),
        (f"{ATTENTION}.name", "fused", 'name "fused" is not supported'),
        (f"{ATTENTION}.type", "gated_delta_net", "type"),
        (f"{ATTENTION}.qk_norm", None, "qk_norm is missing"),
        (f"{ATTENTION}.qk_norm.eps", 1e-5, "qk_norm.eps 1e-05 differ"),
        (f"{ATTENTION}.qk_norm.name", "default", "qk_norm.name"),
        (f"{ATTENTION}.n_heads", None, "n_heads is missing"),
        (f"{ATTENTION}.sliding_window.pattern", [16, 32, -1], "different sliding windows [16, 32]"),
        (f"{ATTENTION}.sliding_window.pattern", [], "sliding_window.pattern is []"),
        (f"{ATTENTION}.mystery", 1, "unknown key 'mystery'"),
        ("model.block.name", "default", 'block.name "default" is not supported'),
        ("model.block.attention", block()["sequence_mixer"], "sequence_mixer and attention"),
        ("model.block.layer_norm", None, "layer_norm is missing"),
        ("model.block.feed_forward.bias", True, "feed_forward.bias true"),
        ("model.block.feed_forward.activation", "gelu", "activation"),
        ("model.block.feed_forward.hidden_size", None, "hidden_size is missing"),
        ("model.block.feed_forward_moe", {"num_experts": 8}, "feed_forward_moe"),
        ("model.block.dropout", 0.1, "dropout 0.1"),
        ("model.block", {"a": block()}, "unknown key 'a'"),
        ("model.block_pattern", ["a"], "block_pattern"),
        ("model.embed_scale", 8.0, "embed_scale 8.0 is not supported"),
        ("model.embedding_norm", norm(), "embedding_norm"),
        ("model.name", "moe", 'model.name "moe" is not supported'),
        ("model.lm_head.layer_norm", None, "lm_head.layer_norm is missing"),
        ("model.lm_head.bias", True, "lm_head.bias true"),
        ("model.lm_head.layer_norm.eps", 1e-5, "layers differ in eps"),
        ("model.n_layers", None, "n_layers is None"),
        ("model.vocab_size", 499, "fewer rows than the tokenizer's 500"),
        ("model", None, "model is missing"),
        ("dataset.tokenizer", None, "tokenizer.vocab_size is missing"),
    ],
)
def test_what_would_be_another_function_is_refused_by_name(path, value, said):
    assert said in refusal(put(base(), path, value))


def test_a_tied_head_is_honoured():
    assert from_olmo_core(put(base(), "model.tie_word_embeddings", True)).tie_word_embeddings is True
    assert from_olmo_core(base()).tie_word_embeddings is False


def test_an_unknown_key_can_be_let_through_by_name():
    raw = put(base(), "model.mystery", 1)
    assert from_olmo_core(raw, allow_unknown_keys=["mystery"]).allowed_unknown_keys == ("mystery",)


@pytest.mark.parametrize("size", ["7b", "32b"])
@pytest.mark.parametrize("stage", ["stage1", "stage3-yarn"])
def test_the_released_sizes_are_the_same_model_in_all_forms(fixture_path, size, stage):
    native = fixture_path(f"manifests/{size}/native-{stage}")
    found = [
        from_olmo_core(json.loads((native / name).read_text()))
        for name in ("config.json", "config.v2-model-and-tokenizer.json")
    ]
    hf = from_hf(json.loads((fixture_path(f"manifests/{size}/hf-{stage}") / "config.json").read_text()))
    assert found[0].differences(hf) == [] and found[1].differences(hf) == []
    changed = hf.replace(sliding_window=4095)  # the control
    assert found[0].differences(changed) == [("sliding_window", 4096, 4095)]


@pytest.mark.parametrize("case", ["tiny-yarn", "tiny-gqa", "tiny-step0", "tiny-trained", "tiny-sharded"])
def test_a_fixture_is_the_same_model_in_all_forms(fixture_path, case):
    form = {"tiny-gqa": "hf-bfloat16", "tiny-sharded": "hf-bfloat16", "tiny-trained": "hf-float32-step900"}
    hf = from_hf(json.loads(fixture_path(f"{case}/{form.get(case, 'hf-float32')}/config.json").read_text()))
    old = from_olmo_core(json.loads(fixture_path(f"{case}/native-config-v2.json").read_text()))
    assert old.differences(hf) == []
    step = "step900" if case == "tiny-trained" else "step0"
    new = from_olmo_core(json.loads(fixture_path(f"{case}/native/{step}/config.json").read_text()))
    assert new.differences(hf) == []


ODD = [None, True, -1, 0, 1.5, float("nan"), float("inf"), "text", [], [1], {}, {"a": 1}, 10**30]


def places(node, path=()):
    """Paths of every key of nested dictionaries."""
    for key, value in node.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def test_no_value_however_odd_escapes_as_another_exception():
    raw, escaped = put(base(), "model.block_overrides", {"3": block(scaling=YARN)}), []
    for path in places(raw):
        for value in ODD:
            try:
                from_olmo_core(put(raw, ".".join(path), value))
            except BadInput:
                pass
            except Exception as error:
                escaped.append(f"{'.'.join(path)} = {value!r}: {error!r}")
    assert not escaped
    for other in (None, [], "text", 3):
        refusal(other)
