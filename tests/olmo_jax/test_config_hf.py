"""Hugging Face configs: every spelling, every refusal, and back."""

from __future__ import annotations

import copy
import json

import pytest

from olmo_parity.olmo_jax.config import FULL, SLIDING, Olmo3Config, RopeParameters
from olmo_parity.olmo_jax.config_hf import FIXED, REQUIRED, from_hf, to_hf
from olmo_parity.olmo_jax.errors import BadInput

YARN_4_57 = {
    "attention_factor": 1.25,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_type": "yarn",
}
YARN = RopeParameters("yarn", 500000, 8.0, 32, 32, 1, 1.25, True)
WANTED = {SLIDING: RopeParameters("default", 500000), FULL: YARN}


def base(**changes) -> dict:
    """A config.json as transformers 5.13+ writes it; changes to None stay, `drop` removes keys."""
    drop = changes.pop("drop", ())
    raw = {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 498,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "max_position_embeddings": 256,
        "model_type": "olmo3",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 499,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {**YARN_4_57, "rope_theta": 500000},
            SLIDING: {"rope_theta": 500000.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "vocab_size": 500,
    }
    return {key: value for key, value in (raw | changes).items() if key not in drop}


def refusal(raw, **kwargs) -> str:
    with pytest.raises(BadInput) as caught:
        from_hf(raw, **kwargs)
    assert str(caught.value).startswith("config.json")
    return str(caught.value)


def legacy(**changes) -> dict:  # 4.57
    return base(**{"rope_theta": 500000, "rope_scaling": dict(YARN_4_57), "drop": ("rope_parameters",)} | changes)


def flat(**changes) -> dict:  # 5.0 to 5.12
    return base(**{"rope_parameters": {**YARN_4_57, "rope_theta": 500000}} | changes)


def test_all_three_rotary_spellings_are_the_same_config():
    assert from_hf(base()).rope == from_hf(legacy()).rope == from_hf(flat()).rope == WANTED
    assert from_hf(base()) == from_hf(legacy()) == from_hf(flat())


def test_scaling_in_a_flat_spelling_is_for_full_layers_only_and_said_so():
    assert from_hf(flat()).rope[SLIDING].rope_type == "default"
    assert any("5.0 to 5.12 apply it to every layer" in note for note in from_hf(flat()).notes)
    assert from_hf(base(), "x").notes == ()


def test_plain_rotary_in_each_spelling():
    plain = {SLIDING: RopeParameters("default", 10000), FULL: RopeParameters("default", 10000)}
    block = {"rope_type": "default", "rope_theta": 10000}
    for raw in (
        base(rope_parameters={FULL: block, SLIDING: block}),
        base(rope_parameters=block),
        base(rope_theta=10000, rope_scaling=None, drop=("rope_parameters",)),
        base(rope_theta=10000, drop=("rope_parameters",)),
    ):
        assert from_hf(raw).rope == plain


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (base(rope_theta=10000.0), "rope_theta is 10000.0 but rope_parameters by layer type says [500000.0]"),
        (base(rope_theta=500000, rope_scaling={**YARN_4_57, "factor": 4.0}), "twice and differently"),
        (flat(rope_theta=500000, rope_scaling={**YARN_4_57, "factor": 4.0}), "twice and differently"),
        (
            base(rope_parameters={**base()["rope_parameters"], "rope_type": "default", "rope_theta": 10000}),
            "twice and differently",
        ),
        (legacy(rope_theta=10000) | {"rope_scaling": {**YARN_4_57, "rope_theta": 500000}}, "rope_theta is"),
        (flat(rope_theta=10000), "rope_theta"),
        (legacy() | {"rope_scaling": {**YARN_4_57, "type": "linear"}}, "rope_type 'yarn' and type 'linear'"),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(raw, said):
    assert said in refusal(raw)


def test_spellings_that_agree_are_read():
    assert from_hf(base(rope_theta=500000, rope_scaling=dict(YARN_4_57))).rope == WANTED
    assert from_hf(base(rope_theta=500000.0)).rope == WANTED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mystery": 1}, "unknown key 'mystery'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "factor is missing"),
        ({"rope_parameters": {**YARN_4_57}}, "rope_theta is missing"),
        ({"rope_parameters": {**YARN_4_57, "rope_theta": 5e5, "rope_type": "llama3"}}, "'llama3' is not supported"),
        ({"rope_parameters": {**YARN_4_57, "rope_theta": 5e5, "rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ({"rope_parameters": {**YARN_4_57, "rope_theta": 5e5, "high_freq_factor": 4}}, "'high_freq_factor'"),
        ({"rope_parameters": {**YARN_4_57, "rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "0.5 is not supported"),
        ({"rope_parameters": {"factor": 8.0, "rope_theta": 5e5}}, "rope_type is missing"),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0, "rope_theta": 5e5}}, "does not use it"),
        ({"rope_parameters": {FULL: {**YARN_4_57, "rope_theta": 5e5}}}, f"rope_parameters.{SLIDING} is missing"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
        ({"layer_types": [SLIDING, FULL]}, "layer_types has 2 entries but num_hidden_layers is 4"),
        ({"layer_types": [SLIDING, SLIDING, "chunked_attention", FULL]}, "layer_types holds 'chunked_attention'"),
        ({"layer_types": "full_attention"}, "a list of layer types is wanted"),
        ({"num_attention_heads": 6}, "not a multiple of num_key_value_heads"[:10]),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim is 15, an even number is wanted"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"sliding_window": None}, "sliding_window is None although some layers slide"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"max_position_embeddings": "256"}, "max_position_embeddings is '256'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None, true or false is wanted"),
        ({"torch_dtype": "bfloat16"}, "dtype is 'float32' but torch_dtype is 'bfloat16'"),
        ({"model_type": "olmo2"}, "model_type is 'olmo2', 'olmo3' is wanted"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_would_be_another_function_is_refused_by_name(change, said):
    assert said in refusal(base(**change))


@pytest.mark.parametrize("key", FIXED)
def test_every_key_with_one_supported_value_is_checked(key):
    assert f"{key} 'other' is not supported" in refusal(base(**{key: "other"}))
    for value in FIXED[key]:
        from_hf(base(**{key: value}))


@pytest.mark.parametrize("key", [*REQUIRED, "tie_word_embeddings", "rope_parameters", "hidden_act", "model_type"])
def test_no_number_of_the_checkpoint_has_a_default(key):
    name = "rope_theta" if key == "rope_parameters" else key
    assert name in refusal(base(drop=(key,)))


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
def test_no_number_of_yarn_has_a_default(key):
    for raw in (base(), legacy(), flat()):
        for block in (raw.get("rope_scaling"), raw.get("rope_parameters"), raw.get("rope_parameters", {}).get(FULL)):
            (block or {}).pop(key, None)
        assert f"{key} is missing" in refusal(raw)


def test_an_attention_factor_is_taken_as_stated_or_from_the_papers_formula():
    raw = base()
    assert from_hf(raw).rope[FULL].attention_factor == 1.25
    del raw["rope_parameters"][FULL]["attention_factor"]
    assert from_hf(raw).rope[FULL].attention_factor == 1.2079441541679836
    raw["rope_parameters"][FULL]["truncate"] = False
    assert from_hf(raw).rope[FULL].truncate is False


def test_an_unknown_key_can_be_let_through_by_name_and_is_remembered():
    raw = base(mystery=1, riddle=2)
    said = refusal(raw)
    assert "'mystery'" in said and "'riddle'" in said and "--allow-unknown-key riddle" in said
    assert "'mystery'" not in refusal(raw, allow_unknown_keys=["mystery"])
    config = from_hf(raw, allow_unknown_keys=["mystery", "riddle", "absent"])
    assert config.allowed_unknown_keys == ("mystery", "riddle")
    assert config == from_hf(base())
    # A known key cannot be let through.
    assert "attention_bias" in refusal(base(attention_bias=True), allow_unknown_keys=["attention_bias"])


def test_all_faults_are_in_one_error():
    raw = base(mystery=1, attention_bias=True, hidden_act="gelu", drop=("vocab_size", "rms_norm_eps"))
    said = refusal(raw)
    assert "(5 faults)" in said
    for fault in ("mystery", "attention_bias", "gelu", "vocab_size is missing", "rms_norm_eps is missing"):
        assert fault in said


def test_layer_types_left_out_are_three_sliding_and_one_full_with_a_note():
    config = from_hf(base(num_hidden_layers=6, drop=("layer_types",)))
    assert config.layer_types == (SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING)
    assert any("layer_types is not stated" in note for note in config.notes)


def test_head_dim_is_the_stated_one_or_width_over_heads():
    assert from_hf(base()).head_dim == 16
    assert from_hf(base(head_dim=None)).head_dim == 16
    assert from_hf(base(head_dim=32)).head_dim == 32
    assert "not a multiple of num_attention_heads 6" in refusal(base(num_attention_heads=6))


def test_windows_by_layer():
    config = from_hf(base())
    assert [config.window(i) for i in range(4)] == [16, 16, 16, None]


def test_what_transformers_writes_into_any_config_is_harmless():
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the 4.x form is in the manifests")
    raw = json.loads(transformers.Olmo3Config.from_dict(base()).to_json_string(use_diff=False))
    assert from_hf(raw) == from_hf(base())


def test_long_positions_without_yarn_get_a_note():
    block = {"rope_type": "default", "rope_theta": 5e5}
    config = from_hf(base(max_position_embeddings=65536, rope_parameters={FULL: block, SLIDING: block}))
    assert any("without YaRN" in note for note in config.notes)
    assert any("more than YaRN's 8 x 32" in note for note in from_hf(base(max_position_embeddings=257)).notes)


@pytest.mark.parametrize("size", ["7b", "32b"])
@pytest.mark.parametrize("stage", ["hf-stage1", "hf-stage3-yarn"])
def test_the_released_sizes_are_read_in_both_forms(fixture_path, size, stage):
    folder = fixture_path(f"manifests/{size}/{stage}")
    new, old = (json.loads((folder / f).read_text()) for f in ("config.json", "config.legacy-v4.json"))
    config = from_hf(new)
    assert config == from_hf(old)
    assert (config.head_dim, config.sliding_window, config.vocab_size) == (128, 4096, 100278)
    assert config.rope[SLIDING] == RopeParameters("default", 500000)
    assert config.rope[FULL].rope_type == ("yarn" if "yarn" in stage else "default")
    assert config.layer_types[:4] == (SLIDING, SLIDING, SLIDING, FULL)


@pytest.mark.parametrize(
    "raw",
    [
        base(),
        base(head_dim=32, tie_word_embeddings=True),
        base(layer_types=[FULL] * 4, sliding_window=None),
        base(layer_types=[SLIDING] * 4),
        base(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        base(rope_parameters={**YARN_4_57, "rope_theta": 1e4, "truncate": False}),
    ],
)
def test_written_and_read_again_a_config_is_the_same(raw):
    config = from_hf(raw)
    written = json.loads(json.dumps(to_hf(config)))
    assert from_hf(written) == config
    assert isinstance(from_hf(written), Olmo3Config) and hash(from_hf(written)) == hash(config)


ODD = [None, True, -1, 0, 1.5, float("nan"), float("inf"), "text", [], [1], {}, {"a": 1}, 10**30]


def places(node, path=()):
    """Paths of every key of nested dictionaries."""
    for key, value in node.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("raw", [base(), legacy(), flat()], ids=["5.13", "4.57", "5.0"])
def test_no_value_however_odd_escapes_as_another_exception(raw):
    escaped = []
    for path in places(raw):
        for value in ODD:
            changed = copy.deepcopy(raw)
            node = changed
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            try:
                from_hf(changed)
            except BadInput:
                pass
            except Exception as error:
                escaped.append(f"{'.'.join(path)} = {value!r}: {error!r}")
    assert not escaped
    for other in (None, [], "text", 3):
        refusal(other)
