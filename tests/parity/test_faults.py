"""Planted faults of function die in the float32 leg; the same runs without a fault pass.

The reference is transformers on the built-in sequences; each fault is put into the candidate's config or weights alone.
Faults and fixtures are those measured against AI2's own model (tests/data/*/measured.json: mistakes).
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.config import FULL, SLIDING, RopeParameters
from olmo_parity.parity import batches, gate, metrics
from tests.conftest import find_fixture

pytest.importorskip("torch")
pytest.importorskip("transformers")

CASES = {
    "step 0": "tiny-step0/hf-float32",
    "yarn": "tiny-yarn/hf-float32",
    "trained": "tiny-trained/hf-float32-step900",
    "grouped": "tiny-gqa/hf-bfloat16",
}


@functools.cache
def reference_run(name):
    """Source, sequences, logits of the reference, and its own noise."""
    from olmo_parity.parity.reference import run_reference

    source = open_source(find_fixture(name))
    sequences = batches.built_in(source.config)
    with tempfile.TemporaryDirectory() as folder:
        logits = []
        for benign in (False, True):
            run = Path(folder) / str(benign)
            run_reference(source.path, source.config, sequences, dtype="float32", benign=benign, folder=run)
            logits.append([np.load(run / f"{i}.npy") for i in range(len(sequences))])
    return source, sequences, logits[0], compare(sequences, *logits)[0]


def compare(sequences, expected, found):
    """Statistics of the plain rows and of the packed one."""
    stats = [metrics.token_stats(a, b, s.tokens) for a, b, s in zip(expected, found, sequences, strict=True)]
    joined = [
        metrics.TokenStats.join(*(t for t, s in zip(stats, sequences, strict=True) if bool(s.documents) == packed))
        for packed in (False, True)
    ]
    return [metrics.summarise(j, np.arange(len(j)) % batches.BUILT_IN_TOKENS) for j in joined]


def judge(name, config=None, change=None, forward=None):
    """The float32 leg's verdict with a changed config, tensors (HF names and orientation) or model in the candidate."""
    import jax.numpy as jnp

    from olmo_parity.olmo_jax.tree import unflatten
    from olmo_parity.parity.candidate import forward_of

    source, sequences, expected, noise = reference_run(name)
    tensors = {hf: t.read() for hf, t in source.tensors.items()}
    if change:
        change(tensors, source.config)
    tree = unflatten(
        {w.jax: np.ascontiguousarray(apply_layout(w.layout, tensors[w.hf])) for w in weights(source.config)}
    )
    run = forward_of(config or source.config, tree, jnp.float32)
    plain, packed = compare(sequences, expected, [run(forward(s) if forward else s) for s in sequences])
    criteria = gate.float32_criteria(plain, noise) + gate.packed_criteria(packed, noise)
    tokens = sum(len(s.tokens) for s in sequences)
    return SimpleNamespace(
        exit_code=gate.judge(criteria, gate.noise_faults(noise), tokens).exit_code,
        criteria=criteria,
        labels=gate.labels(criteria, plain),
    )


def config_of(name):
    return open_source(find_fixture(name)).config


@pytest.mark.parametrize("name", CASES.values(), ids=CASES.keys())
def test_a_right_conversion_passes_with_room_to_spare(name):
    result = judge(name)
    assert result.exit_code == gate.PASS and result.labels == []
    assert min(c.margin for c in result.criteria if c.margin) > 5


def with_rope(config, **by_type):
    return config.replace(rope={**config.rope, **by_type})


def theta_10000(config):
    return config.replace(rope={t: dataclasses.replace(r, rope_theta=10000.0) for t, r in config.rope.items()})


CONFIG_FAULTS = {
    "window - 1": lambda c: c.replace(sliding_window=c.sliding_window - 1),
    "window + 1": lambda c: c.replace(sliding_window=c.sliding_window + 1),
    "all layers full": lambda c: c.replace(layer_types=(FULL,) * len(c.layer_types)),
    "one sliding layer full": lambda c: c.replace(layer_types=(FULL, *c.layer_types[1:])),
    "rope_theta 10000": theta_10000,
    "rms_norm_eps 1e-5": lambda c: c.replace(rms_norm_eps=1e-5),
}
YARN_FAULTS = {
    "YaRN on sliding layers too": lambda c: with_rope(c, **{SLIDING: c.rope[FULL]}),
    "YaRN ignored": lambda c: with_rope(c, **{FULL: c.rope[SLIDING]}),
    "attention_factor left out": lambda c: with_rope(
        c, **{FULL: dataclasses.replace(c.rope[FULL], attention_factor=1.0)}
    ),
    "linear scaling instead of YaRN": lambda c: with_rope(
        c, **{FULL: RopeParameters("linear", c.rope[FULL].rope_theta, factor=c.rope[FULL].factor)}
    ),
}


def exchange(tensors, a, b):
    tensors[a], tensors[b] = tensors[b], tensors[a]


def swap_gate_and_up(tensors, config):
    for i in range(config.num_hidden_layers):
        exchange(tensors, f"model.layers.{i}.mlp.gate_proj.weight", f"model.layers.{i}.mlp.up_proj.weight")


def swap_gate_and_up_in_one_layer(tensors, config):
    exchange(tensors, "model.layers.5.mlp.gate_proj.weight", "model.layers.5.mlp.up_proj.weight")


def transpose_q(tensors, config):
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].shape[0] == tensors[name].shape[1]
    tensors[name] = tensors[name].T


def swap_block_norms(tensors, config):
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}.post_"
        exchange(tensors, prefix + "attention_layernorm.weight", prefix + "feedforward_layernorm.weight")


def interleave_q_and_k(tensors, config):
    """Rows as interleaved rotary wants them: the halves of each head dealt out in turn."""
    for i in range(config.num_hidden_layers):
        for name, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            key = f"model.layers.{i}.self_attn.{name}.weight"
            rows = tensors[key].reshape(heads, 2, config.head_dim // 2, -1)
            tensors[key] = rows.transpose(0, 2, 1, 3).reshape(tensors[key].shape)


def exchange_a_pair_of_heads(tensors, config):
    rows = tensors["model.layers.3.self_attn.q_proj.weight"]
    rows = rows.reshape(config.num_attention_heads, config.head_dim, -1).copy()
    rows[[0, 1]] = rows[[1, 0]]
    tensors["model.layers.3.self_attn.q_proj.weight"] = rows.reshape(-1, rows.shape[-1])


def add_one_to_the_final_norm(tensors, config):
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1


WEIGHT_FAULTS = {
    "gate and up swapped": swap_gate_and_up,
    "gate and up swapped in one layer": swap_gate_and_up_in_one_layer,
    "q_proj transposed": transpose_q,
    "q/k rows permuted as for interleaved rotary": interleave_q_and_k,
    "two query heads exchanged": exchange_a_pair_of_heads,
    "one added to the final norm": add_one_to_the_final_norm,
}


@pytest.mark.parametrize("case", ["step 0", "yarn", "trained"])
@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_wrong_config_fails(case, fault):
    assert judge(CASES[case], config=CONFIG_FAULTS[fault](config_of(CASES[case]))).exit_code == gate.FAIL


@pytest.mark.parametrize("fault", YARN_FAULTS)
def test_wrong_yarn_fails(fault):
    assert judge(CASES["yarn"], config=YARN_FAULTS[fault](config_of(CASES["yarn"]))).exit_code == gate.FAIL


@pytest.mark.parametrize("case", ["step 0", "yarn", "trained"])
@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_wrong_weights_fail(case, fault):
    assert judge(CASES[case], change=WEIGHT_FAULTS[fault]).exit_code == gate.FAIL


def test_exchanged_block_norms_fail_on_trained_weights_and_are_invisible_at_step_0():
    assert judge(CASES["trained"], change=swap_block_norms).exit_code == gate.FAIL
    assert judge(CASES["step 0"], change=swap_block_norms).exit_code == gate.PASS


def test_kv_heads_repeated_in_the_wrong_order_fail():
    """Query head n belongs to kv head n // group; n % kv_heads is the usual mistake."""

    def tile_order(tensors, config):
        group = config.num_attention_heads // config.num_key_value_heads
        order = np.arange(config.num_attention_heads).reshape(-1, group).T.reshape(-1)
        for i in range(config.num_hidden_layers):
            key = f"model.layers.{i}.self_attn.q_proj.weight"
            rows = tensors[key].reshape(config.num_attention_heads, config.head_dim, -1)
            tensors[key] = np.ascontiguousarray(rows[order]).reshape(tensors[key].shape)

    assert judge(CASES["grouped"], change=tile_order).exit_code == gate.FAIL


def test_documents_that_see_each_other_fail_and_only_the_packed_row_says_so():
    result = judge(CASES["trained"], forward=lambda s: dataclasses.replace(s, documents=()))
    assert result.exit_code == gate.FAIL
    failed = [c for c in result.criteria if not c.passed]
    assert failed and all(c.name.startswith("packed") for c in failed)
    assert any("documents see each other" in label for label in result.labels)


@pytest.mark.parametrize("fault", ["window - 1", "rope_theta 10000", "all layers full"])
def test_a_fault_of_attention_is_labelled_as_such(fault):
    result = judge(CASES["trained"], config=CONFIG_FAULTS[fault](config_of(CASES["trained"])))
    assert any("position 0 agrees" in label for label in result.labels)


@pytest.mark.parametrize("fault", ["gate and up swapped", "one added to the final norm"])
def test_a_fault_outside_attention_is_not_labelled_as_one(fault):
    assert not judge(CASES["trained"], change=WEIGHT_FAULTS[fault]).labels
