"""The model against AI2's own float32 logits, and against itself: scanned, packed, part by part."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from olmo_parity.convert.mapping import weights
from olmo_parity.olmo_jax import layers as L
from olmo_parity.olmo_jax.config import FULL, FUNCTION_FIELDS, SLIDING, RopeParameters, layer_period
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.model import (
    attention_inputs,
    from_tree,
    module_outputs,
    part_from_tree,
    random_model,
    to_tree,
)
from olmo_parity.olmo_jax.tree import flatten, leaves, unflatten

# case, weights, config (None: the weights' own), step, largest |delta logit| allowed.
# At step 0 two right implementations are 1e-6 apart; trained logits reach 18, where float32 itself is 1e-5 from float64.
CASES = [
    ("tiny-step0", "hf-float32", None, "step0", 3e-6),
    ("tiny-gqa", "hf-float32", None, "step0", 3e-6),
    ("tiny-yarn", "hf-float32", None, "step0", 3e-6),
    ("tiny-yarn", "hf-float32", "hf-float32-legacy-config", "step0", 3e-6),
    ("tiny-sharded", "hf-float32", None, "step0", 3e-6),
    ("tiny-trained", "hf-float32-step0", None, "step0", 3e-6),
    ("tiny-trained", "hf-float32-step150", None, "step150", 2e-5),
    ("tiny-trained", "hf-float32-step900", None, "step900", 6e-5),
]
MAX_KL = 1e-10  # nats; measured under 1e-12
NOISE = 2e-5  # float32, lively parameters, logits of about 5: 10x what compiling the same sum otherwise makes

forward = nnx.jit(lambda model, tokens, positions=None, segment_ids=None: model(tokens, positions, segment_ids))


def logits_of(config, tree, tokens, *, scan_layers=False, **kwargs):
    """Compiled. For a small model that is seen once, running op by op (`logits_by_op`) is several times faster."""
    return np.asarray(forward(from_tree(config, tree, dtype=jnp.float32, scan_layers=scan_layers), tokens, **kwargs))


def logits_by_op(config, tree, tokens, **kwargs):
    return np.asarray(from_tree(config, tree, dtype=jnp.float32)(tokens, **kwargs))


def some_tokens(config):  # [2, 16]; one shape for all, or most of the time would go into compiling
    return np.random.default_rng(7).integers(0, config.vocab_size, (2, 16)).astype(np.int32)


@pytest.fixture
def case_of(fixture_path, checkpoint, batch):
    def load(case, form, config_form, step):
        config, tree = checkpoint(
            fixture_path(f"{case}/{form}"), fixture_path(f"{case}/{config_form}") if config_form else None
        )
        logits = fixture_path(f"{case}/logits/olmo_core_fp32.{step}.safetensors")
        return config, tree, *batch(fixture_path(f"{case}/token_ids.safetensors").parent, logits)

    return load


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(("case", "form", "config_form", "step", "limit"), CASES)
def test_float32_logits_are_ai2s(optimised, case_of, compared, case, form, config_form, step, limit, scan_layers):
    config, tree, tokens, reference = case_of(case, form, config_form, step)
    worst, divergence = compared(reference, logits_of(config, tree, tokens, scan_layers=scan_layers))
    assert worst <= limit
    assert divergence.max() <= MAX_KL


MISTAKES = {
    "eps": lambda c: c.replace(rms_norm_eps=1.1e-6),
    "window one too small": lambda c: c.replace(sliding_window=c.sliding_window - 1),
    "window one too large": lambda c: c.replace(sliding_window=c.sliding_window + 1),
    "all layers full": lambda c: c.replace(layer_types=(FULL,) * c.num_hidden_layers),
    "YaRN on sliding layers": lambda c: c.replace(rope={SLIDING: c.rope[FULL], FULL: c.rope[FULL]}),
    "no YaRN": lambda c: c.replace(rope={SLIDING: c.rope[SLIDING], FULL: c.rope[SLIDING]}),
    "no attention factor": lambda c: c.replace(
        rope={SLIDING: c.rope[SLIDING], FULL: dataclasses.replace(c.rope[FULL], attention_factor=1.0)}
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_float32_limits_fail_a_wrong_config(case_of, compared, mistake):
    config, tree, tokens, reference = case_of("tiny-yarn", "hf-float32", None, "step0")
    worst, _ = compared(reference, logits_of(MISTAKES[mistake](config), tree, tokens))
    assert worst > 30 * 3e-6


def test_the_float32_limits_fail_exchanged_norms_on_trained_weights(case_of, compared):
    config, tree, tokens, reference = case_of("tiny-trained", "hf-float32-step900", None, "step900")
    layer = tree["layers"]["2"]
    one, other = "post_attention_layernorm", "post_feedforward_layernorm"
    layer[one], layer[other] = layer[other], layer[one]
    worst, divergence = compared(reference, logits_of(config, tree, tokens))
    assert worst > 100 * 6e-5
    assert divergence.max() > MAX_KL


def test_it_agrees_with_transformers_on_shapes_that_no_fixture_has(tiny_config, lively_tree):
    """Head width other than D / N, GQA, an odd pattern of layers, tied and untied head, eps that matters."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", "5.13")
    from olmo_parity.convert.mapping import apply_layout
    from olmo_parity.olmo_jax.config_hf import to_hf

    for tied in (False, True):
        config = tiny_config(
            layer_types=(FULL, SLIDING, SLIDING, FULL, SLIDING), tie_word_embeddings=tied, rms_norm_eps=1e-3
        )
        tree = lively_tree(config)
        hf_config = transformers.Olmo3Config.from_dict(to_hf(config) | {"dtype": "float32", "pad_token_id": None})
        hf_config._attn_implementation = "eager"
        model = transformers.Olmo3ForCausalLM(hf_config)
        flat = flatten(tree)
        state = {w.hf: torch.tensor(apply_layout(w.layout, flat[w.jax]).copy()) for w in weights(config)}
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        tokens = some_tokens(config)
        with torch.no_grad():
            wanted = model.eval()(torch.tensor(tokens).long()).logits.numpy()
        found = logits_of(config, tree, tokens)
        assert np.abs(found - wanted).max() <= NOISE
        wrong = logits_of(config.replace(rms_norm_eps=1.1e-3), tree, tokens)  # the control
        assert np.abs(wrong - wanted).max() > NOISE


# --- every field of the config counts ---


ROPE_CHANGES = {
    "rope_type": RopeParameters("default", 10000.0),
    "rope_theta": {"rope_theta": 5000.0},
    "factor": {"factor": 5.0},
    "original_max_position_embeddings": {"original_max_position_embeddings": 32},
    "beta_fast": {"beta_fast": 2.0},
    "beta_slow": {"beta_slow": 1.0},
    "attention_factor": {"attention_factor": 1.1},
    "truncate": {"truncate": False},
}
FUNCTION_CHANGES = {
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "layer_types": {"layer_types": (SLIDING, FULL, SLIDING, SLIDING)},
    "sliding_window": {"sliding_window": 5},
    "num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},  # the same leaves
    "tie_word_embeddings": {"tie_word_embeddings": True},
}
SHAPE_CHANGES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def test_the_changes_below_are_of_every_field_that_decides_what_is_computed():
    assert set(FUNCTION_CHANGES) | set(SHAPE_CHANGES) | {"rope"} == set(FUNCTION_FIELDS)
    assert set(ROPE_CHANGES) == {f.name for f in dataclasses.fields(RopeParameters)}


@pytest.mark.parametrize("name", [*FUNCTION_CHANGES, *(f"rope.{name}" for name in ROPE_CHANGES)])
def test_changing_a_field_changes_the_logits(tiny_config, lively_tree, name):
    config = tiny_config()
    tree = lively_tree(config)
    if name.startswith("rope."):
        change = ROPE_CHANGES[name.removeprefix("rope.")]
        full = dataclasses.replace(config.rope[FULL], **change) if isinstance(change, dict) else change
        changed = config.replace(rope={**config.rope, FULL: full})
    else:
        changed = config.replace(**FUNCTION_CHANGES[name])
    tokens = some_tokens(config)
    own = {path: value for path, value in flatten(tree).items() if path in leaves(changed)}
    delta = np.abs(logits_by_op(config, tree, tokens) - logits_by_op(changed, unflatten(own), tokens))
    assert delta.max() > 50 * NOISE
    assert [d[0] for d in config.differences(changed)]


@pytest.mark.parametrize("name", SHAPE_CHANGES)
def test_changing_a_size_makes_the_old_parameters_refused(tiny_config, lively_tree, name):
    config = tiny_config()
    changes = {name: SHAPE_CHANGES[name]}
    if name == "num_hidden_layers":
        changes["layer_types"] = (*config.layer_types, SLIDING)
    changed = config.replace(**changes)
    with pytest.raises(BadInput, match="does not fit the config"):
        from_tree(changed, lively_tree(config), dtype=jnp.float32)
    assert logits_by_op(changed, lively_tree(changed), some_tokens(config) % 60).shape == (2, 16, changed.vocab_size)


# --- scanning ---


PATTERNS = {
    "period 4, no rest": (SLIDING, SLIDING, SLIDING, FULL) * 2,
    "period 4, rest of 3": (SLIDING, SLIDING, SLIDING, FULL) * 2 + (SLIDING, SLIDING, FULL),
    "period 3": (FULL, SLIDING, SLIDING) * 3,
    "period 1": (FULL,) * 5,
    "first layer full": (FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL),
    "nothing repeats": (FULL, SLIDING),
    "one layer": (SLIDING,),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scanned_and_unrolled_agree(tiny_config, lively_tree, pattern):
    types = PATTERNS[pattern]
    base = tiny_config()
    config = tiny_config(layer_types=types, rope={t: base.rope[t] for t in set(types)})
    tree = lively_tree(config)
    tokens = some_tokens(config)
    segments = np.array([[0] * 4 + [1] * 12, [3] * 16], np.int32)
    scanned = from_tree(config, tree, dtype=jnp.float32, scan_layers=True)
    assert len(scanned.layers) + scanned.period * scanned.repeats == len(types)
    found = forward(scanned, tokens, None, segments)
    wanted = logits_by_op(config, tree, tokens, segment_ids=segments)
    assert np.abs(found - wanted).max() <= NOISE
    exchanged = dict(tree["layers"])  # the control: two layers in each other's place
    if len(types) > 1:
        exchanged["0"], exchanged["1"] = exchanged["1"], exchanged["0"]
        wrong = forward(
            from_tree(config, tree | {"layers": exchanged}, dtype=jnp.float32, scan_layers=True), tokens, None, segments
        )
        assert np.abs(wrong - wanted).max() > 100 * NOISE


def test_scanning_stacks_whole_periods_and_leaves_the_rest(tiny_config, lively_tree):
    config = tiny_config(layer_types=PATTERNS["period 4, rest of 3"])
    model = from_tree(config, lively_tree(config), dtype=jnp.float32, scan_layers=True)
    assert (model.period, model.repeats, len(model.stacked), len(model.layers)) == (4, 2, 4, 3)
    assert model.stacked[1].mlp.up_proj.kernel.shape == (2, 32, 48)
    text = str(jax.make_jaxpr(lambda tokens: model(tokens))(jnp.zeros((1, 3), jnp.int32)))
    assert text.count("scan[") == 1


@pytest.mark.parametrize(
    ("types", "wanted"),
    [
        ("sssfsssf", (4, 2)),
        ("sssfsssfssf", (4, 2)),
        ("sssssf", (1, 5)),
        ("fsfsf", (2, 2)),
        ("fffff", (1, 5)),
        ("sf", (2, 1)),
        ("s", (1, 1)),
        ("sssf" * 8, (4, 8)),
        ("ssfss", (3, 1)),
    ],
)
def test_the_period_leaves_as_few_layers_as_possible_unrolled(types, wanted):
    period, repeats = layer_period(tuple(types))
    if wanted[1] == 1:
        assert repeats == 1 or period * repeats < len(types)
    else:
        assert (period, repeats) == wanted


# --- packing, positions, windows ---


def test_a_packed_row_equals_its_documents_run_alone(tiny_config, lively_tree):
    config = tiny_config()
    tree = lively_tree(config)
    tokens = some_tokens(config)
    lengths = [5, 1, 6, 4]
    # The last document uses the id of the first one again: a run of equal ids is a document, not an id.
    segments = np.repeat([[4, 2, 9, 4]], lengths, axis=1).repeat(2, axis=0).astype(np.int32)
    packed = logits_by_op(config, tree, tokens, segment_ids=segments)
    begin = 0
    for length in lengths:
        alone = np.roll(tokens, -begin, axis=1)  # what follows the document does not change it
        found = packed[:, begin : begin + length]
        assert np.abs(found - logits_by_op(config, tree, alone)[:, :length]).max() <= NOISE
        begin += length
    unpacked = logits_by_op(config, tree, tokens)  # the control
    assert np.abs(packed - unpacked)[:, lengths[0] :].max() > 100 * NOISE


def test_packed_documents_do_not_see_each_other_at_all(tiny_config, lively_tree):
    config = tiny_config()
    tree = lively_tree(config)
    tokens = some_tokens(config)
    other = tokens.copy()
    other[:, :5] = (other[:, :5] + 1) % config.vocab_size
    segments = np.array([[1] * 5 + [2] * 11] * 2, np.int32)
    one = logits_by_op(config, tree, tokens, segment_ids=segments)
    two = logits_by_op(config, tree, other, segment_ids=segments)
    assert (one[:, 5:] == two[:, 5:]).all()
    assert not (one[:, :5] == two[:, :5]).all()


def test_positions_turn_the_rotary_embedding_and_do_not_change_who_sees_whom(tiny_config, lively_tree):
    config = tiny_config()
    tree = lively_tree(config)
    tokens = some_tokens(config)
    counted = logits_by_op(config, tree, tokens)
    positions = np.arange(16, dtype=np.int32)[None]
    assert np.abs(logits_by_op(config, tree, tokens, positions=positions) - counted).max() <= NOISE
    shifted = logits_by_op(config, tree, tokens, positions=positions + 37)  # rotary is relative
    assert np.abs(shifted - counted).max() <= 5 * NOISE
    stretched = logits_by_op(config, tree, tokens, positions=3 * positions)
    assert np.abs(stretched - counted).max() > 100 * NOISE
    assert np.abs(stretched[:, 0] - counted[:, 0]).max() <= NOISE  # alone with itself, at any angle
    masks = [attention_inputs(config, 16, p)[SLIDING].mask for p in (None, jnp.asarray(3 * positions))]
    assert (masks[0] == masks[1]).all()


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_a_query_sees_exactly_window_tokens_itself_included(window):
    mask = np.asarray(L.attention_mask(20, window))[0]
    assert mask.sum(-1).tolist() == [min(window, t + 1) for t in range(20)]
    assert mask.diagonal().all()
    assert (L.attention_mask(20)[0] == np.tri(20, dtype=bool)).all()


def test_a_token_reaches_through_a_sliding_layer_exactly_window_positions(tiny_config, lively_tree):
    """The same, seen from outside: one layer, one token changed."""
    config = tiny_config(layer_types=(SLIDING,), rope={SLIDING: RopeParameters("default", 10000.0)})
    tree = lively_tree(config)
    tokens = some_tokens(config)
    other = tokens.copy()
    other[0, 3] = (other[0, 3] + 1) % config.vocab_size
    changed = np.abs(logits_by_op(config, tree, tokens) - logits_by_op(config, tree, other)).max(-1)[0] > 0
    assert np.flatnonzero(changed).tolist() == [3, 4, 5, 6]  # window 4


def test_tokens_after_a_row_do_not_change_it(tiny_config, lively_tree):
    config = tiny_config()
    tree = lively_tree(config)
    tokens = some_tokens(config)
    other = np.concatenate([tokens[:, :9], tokens[:, 9:] * 0], axis=1)
    one, two = logits_by_op(config, tree, tokens), logits_by_op(config, tree, other)
    assert (one[:, :9] == two[:, :9]).all()
    assert (one[:, 9:] != two[:, 9:]).any()


def test_a_token_outside_the_vocabulary_gives_nan_and_not_another_token(tiny_config, lively_tree):
    config = tiny_config()
    for wrong in (config.vocab_size, -1):
        logits = logits_by_op(config, lively_tree(config), np.array([[wrong] * 16, [1] * 16], np.int32))
        assert np.isnan(logits[0]).all()
        assert np.isfinite(logits[1]).all()


# --- trees in and out, parts, outputs of modules ---


@pytest.mark.parametrize("tied", [False, True])
def test_the_leaves_are_those_of_the_mapping_table(tiny_config, tied):
    config = tiny_config(tie_word_embeddings=tied)
    assert {w.jax: (w.jax_shape, w.logical) for w in weights(config)} == leaves(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_to_tree_gives_back_every_bit(tiny_config, lively_tree, scan_layers, dtype):
    config = tiny_config(layer_types=PATTERNS["period 4, rest of 3"], tie_word_embeddings=dtype == "bfloat16")
    tree = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), lively_tree(config))
    given, back = flatten(tree), flatten(to_tree(from_tree(config, tree, dtype=jnp.float32, scan_layers=scan_layers)))
    assert list(back) == list(leaves(config))
    for path, array in given.items():
        assert back[path].dtype == array.dtype and np.asarray(back[path]).tobytes() == array.tobytes(), path


def test_every_fault_of_a_tree_is_named_in_one_error(tiny_config, lively_tree):
    config = tiny_config()
    flat = flatten(lively_tree(config))
    del flat["layers/2/mlp/up_proj/kernel"]
    flat["layers/4/mlp/up_proj/kernel"] = flat["norm/scale"]
    flat["norm/bias"] = flat["norm/scale"]
    flat["norm/scale"] = jax.ShapeDtypeStruct((32,), jnp.float32)
    flat["embed_tokens/embedding"] = flat["embed_tokens/embedding"].T
    flat["lm_head/kernel"] = flat["lm_head/kernel"].tolist()
    flat["layers/0/self_attn/q_norm/scale"] = flat["layers/0/self_attn/q_norm/scale"].astype(np.int32)
    flat["layers/0/self_attn/k_norm/scale"] = flat["layers/0/self_attn/k_norm/scale"].astype(np.float64)
    with pytest.raises(BadInput) as caught:
        from_tree(config, unflatten(flat), dtype=jnp.float32)
    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 8
    for said in (
        "layers/2/mlp/up_proj/kernel is missing",
        "layers/4/mlp/up_proj/kernel is unexpected",
        "norm/bias is unexpected",
        "norm/scale is only a shape",
        "embed_tokens/embedding has shape (32, 61), the config asks for (61, 32)",
        "lm_head/kernel is a list",
        "layers/0/self_attn/q_norm/scale has dtype int32",
        "layers/0/self_attn/k_norm/scale has dtype float64",
    ):
        assert said in faults


def test_parameters_and_activations_have_their_own_dtypes(tiny_config, lively_tree):
    config = tiny_config()
    tree = lively_tree(config)
    tokens = some_tokens(config)
    model = from_tree(config, tree, dtype=jnp.bfloat16)
    assert model(tokens).dtype == jnp.bfloat16 and model.norm.scale.dtype == jnp.float32
    model = from_tree(config, tree, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    assert model(tokens).dtype == jnp.float32 and model.norm.scale.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.bfloat16 for x in flatten(to_tree(model)).values())


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_run_one_after_another_are_the_model(tiny_config, lively_tree, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tree = lively_tree(config)
    tokens = some_tokens(config)
    inputs = attention_inputs(config, 16)
    embedding = part_from_tree(config, "embed_tokens", tree["embed_tokens"], dtype=jnp.float32)
    x = embedding(tokens)
    for i, layer_type in enumerate(config.layer_types):
        x = part_from_tree(config, f"layers.{i}", tree["layers"][str(i)], dtype=jnp.float32)(x, inputs[layer_type])
    x = part_from_tree(config, "norm", tree["norm"], dtype=jnp.float32)(x)
    head = embedding.attend if tied else part_from_tree(config, "lm_head", tree["lm_head"], dtype=jnp.float32)
    assert np.abs(head(x) - logits_by_op(config, tree, tokens)).max() <= NOISE
    for name in ("layers", "layers.4", "rotary_emb", *(["lm_head"] if tied else [])):
        with pytest.raises(BadInput, match="has no part"):
            part_from_tree(config, name, {}, dtype=jnp.float32)
    with pytest.raises(BadInput, match="layers.1 does not fit"):
        part_from_tree(config, "layers.1", tree["layers"]["1"] | {"bias": tree["norm"]}, dtype=jnp.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_every_module_gives_its_output_by_its_name(tiny_config, lively_tree, tied):
    config = tiny_config(tie_word_embeddings=tied)
    model = from_tree(config, lively_tree(config), dtype=jnp.float32)
    tokens = some_tokens(config)
    outputs = module_outputs(model, tokens)
    modules = {path.rpartition("/")[0].replace("/", ".") for path in leaves(config)}
    parents = {f"layers.{i}{part}" for i in range(4) for part in ("", ".mlp", ".self_attn")}
    steps = ("self_attn.q_rotary", "self_attn.k_rotary", "self_attn.mix", "mlp.swiglu")
    steps += ("attention_residual", "mlp_residual")
    without_weights = {f"layers.{i}.{step}" for i in range(4) for step in steps}
    assert set(outputs) == modules | parents | without_weights | {"lm_head"}
    assert list(outputs)[:2] == ["embed_tokens", "layers.0.self_attn.q_proj"] and list(outputs)[-1] == "lm_head"
    assert (outputs["lm_head"] == model(tokens)).all()
    layer = outputs["layers.1"] + outputs["layers.2.post_attention_layernorm"]
    layer += outputs["layers.2.post_feedforward_layernorm"]
    assert np.abs(layer - outputs["layers.2"]).max() <= NOISE
    jitted = nnx.jit(module_outputs)(model, tokens)
    for name, output in outputs.items():
        assert np.abs(jitted[name] - output).max() <= NOISE * max(1, np.abs(output).max()), name
    assert type(model.norm).__name__ == "RMSNorm" and type(model.layers[0].mlp).__name__ == "MLP"  # left as it was
    assert all((outputs[f"layers.{i}"] == outputs[f"layers.{i}.mlp_residual"]).all() for i in range(4))
    with pytest.raises(BadInput, match="scan_layers=False"):
        scanned = from_tree(
            config.replace(layer_types=(FULL,) * 4), lively_tree(config), dtype=jnp.float32, scan_layers=True
        )
        module_outputs(scanned, tokens)


def test_random_parameters_are_those_that_olmo_starts_from(tiny_config):
    config = tiny_config(vocab_size=4096, layer_types=(FULL, FULL))
    model = random_model(config, nnx.Rngs(3), dtype=jnp.float32, scan_layers=True)
    flat = flatten(to_tree(model))
    assert all((array == 1).all() for path, array in flat.items() if path.endswith("scale"))
    matrices = [np.asarray(a) for path, a in flat.items() if not path.endswith("scale")]
    values = np.concatenate([m.ravel() for m in matrices])
    assert 0.058 < np.abs(values).max() <= 0.06
    # A normal of std 0.02 cut at 3 std has 0.9866 of its spread left; OLMo does not scale it back up.
    assert abs(values.std() / (0.02 * 0.98658) - 1) < 0.005
    assert len({m.ravel()[:8].tobytes() for m in matrices}) == len(matrices)  # no two leaves drawn alike


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_gradients_reach_every_parameter(tiny_config, lively_tree, scan_layers):
    config = tiny_config()
    model = from_tree(config, lively_tree(config), dtype=jnp.float32, scan_layers=scan_layers)
    grads = nnx.jit(nnx.grad(lambda model, tokens: (model(tokens) ** 2).mean()))(model, some_tokens(config))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_every_product_asks_for_full_precision_and_a_float32_sum(tiny_config, lively_tree):
    """Invisible on a CPU; on GPUs and TPUs float32 would be rounded to TF32 or bfloat16 first."""
    config = tiny_config()
    model = from_tree(config, lively_tree(config), dtype=jnp.bfloat16)
    text = str(jax.make_jaxpr(lambda tokens: model(tokens))(some_tokens(config)))
    products = text.count("dot_general[")
    assert products == 4 * (4 + 2 + 3) + 1  # projections, scores and mix, MLP; the head
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
    assert text.count("preferred_element_type=float32") == products
