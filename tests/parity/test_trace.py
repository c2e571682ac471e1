"""The trace names the module that is wrong, says what it computes instead, and finds nothing in a right conversion."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax import layers as L
from olmo_parity.olmo_jax.config import FULL, SLIDING
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, trace_report, trace_run
from olmo_parity.parity.envelopes import FORCED, Distance, Envelope, float32_envelope
from olmo_parity.parity.options import GateOptions
from olmo_parity.parity.trace import first_divergence, record_of, trace_parts
from tests.conftest import find_fixture

pytest.importorskip("torch")
pytest.importorskip("transformers")

TRAINED, YARN, GROUPED, STEP0 = (
    "tiny-trained/hf-float32-step900", "tiny-yarn/hf-float32", "tiny-gqa/hf-bfloat16", "tiny-step0/hf-float32"
)  # fmt: skip
TOKENS = 160  # enough to pass the fixtures' windows of 16 and the imposed one of 64


class InMemory:
    """Leaves in memory, read as a TreeReader reads them from disk."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.leaves = {
            p: SimpleNamespace(nbytes=a.nbytes, chunk_shape=a.shape, shape=a.shape) for p, a in arrays.items()
        }

    def read(self, path, index=()):
        return self.arrays[path][index] if index else self.arrays[path]


@functools.cache
def reference(name):
    """Source, shortened built-in sequences, the reference's parts, and the leaves of a right conversion."""
    from olmo_parity.parity.traced_reference import reference_parts

    source = open_source(find_fixture(name))
    sequences = [
        s if s.documents else dataclasses.replace(s, tokens=s.tokens[:TOKENS]) for s in batches.built_in(source.config)
    ]
    leaves = {
        w.jax: np.ascontiguousarray(apply_layout(w.layout, source.tensors[w.hf].read())) for w in weights(source.config)
    }
    return source, sequences, list(reference_parts(source, sequences)), leaves


def trace(name, config=None, calls=None, change=None):
    """Rows of a trace with a fault in the candidate's config, modules or leaves."""
    from olmo_parity.parity.traced_candidate import TracedCandidate

    source, sequences, parts, leaves = reference(name)
    leaves = dict(leaves)
    if change:
        change(leaves)
    candidate = TracedCandidate(InMemory(leaves), config or source.config, sequences, calls=calls)
    return trace_parts(parts, candidate, source)


def faulty(rows):
    return [r.name for r in rows if r.own.left]


def at(layers, name, instead):
    """instead(module, *args) in the place of one module's calls, in some layers."""

    def call(called, module, *args):
        return instead(module, *args) if called == name else module(*args)

    return {f"layers.{i}": call for i in layers}


@pytest.mark.parametrize("name", [TRAINED, YARN, GROUPED, STEP0])
def test_a_right_conversion_stays_inside_every_envelope_with_room_to_spare(name):
    rows = trace(name)
    assert not faulty(rows) and first_divergence(rows) is None
    assert len(rows) == 17 * 8 + 3
    assert max(r.own.error / r.own.limit for r in rows) < 0.3
    assert max(r.carried.error / r.carried.limit for r in rows) < 0.3


def turned_by_neighbours(module, x, inputs):
    cos, sin, a, b = inputs.cos[:, :, None], inputs.sin[:, :, None], x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def with_rope(config, **by_type):
    return config.replace(rope={**config.rope, **by_type})


def theta_10000(config):
    return config.replace(rope={t: dataclasses.replace(r, rope_theta=1e4) for t, r in config.rope.items()})


def no_factor(config):
    return with_rope(config, **{FULL: dataclasses.replace(config.rope[FULL], attention_factor=1.0)})


def tiled(module, q, k, v, inputs):
    order = np.arange(q.shape[2]).reshape(-1, k.shape[2]).T.reshape(-1)  # query head n where the mistake reads n % K
    return module(q[:, :, order], k, v, inputs)[:, :, np.argsort(order)]


# what is wrong, on which checkpoint, in the config or in which module, what the trace must name first, and say
FAULTS = [
    ("epsilon", TRAINED, lambda c: c.replace(rms_norm_eps=1e-5), None, "layers.0.self_attn.q_norm", "has epsilon 1e-05"),
    ("window", TRAINED, lambda c: c.replace(sliding_window=15), None, "layers.0.self_attn.mix", "has a window of 15, the config says 16"),
    ("pattern", TRAINED, lambda c: c.replace(layer_types=(FULL, *c.layer_types[1:])), None, "layers.0.self_attn.mix", "the layer is sliding"),
    ("theta", STEP0, theta_10000, None, "layers.0.self_attn.q_rotary", "has theta 10000, the config says 500000"),
    ("YaRN everywhere", YARN, lambda c: with_rope(c, **{SLIDING: c.rope[FULL]}), None, "layers.0.self_attn.q_rotary", "is turned as full_attention is (YaRN)"),
    ("no YaRN", YARN, lambda c: with_rope(c, **{FULL: c.rope[SLIDING]}), None, "layers.3.self_attn.q_rotary", "is turned as sliding_attention is (plain rotary)"),
    ("attention factor", YARN, no_factor, None, "layers.3.self_attn.q_rotary", "has attention factor 1, the config's is 1.2079"),
    ("interleaved", TRAINED, None, at([3], "self_attn.q_rotary", turned_by_neighbours), "layers.3.self_attn.q_rotary", "pairs neighbouring dimensions"),
    ("rotary in bfloat16", TRAINED, None, at([3], "self_attn.k_rotary", lambda m, x, i: m(x.astype(jnp.bfloat16), i).astype(x.dtype)), "layers.3.self_attn.k_rotary", "rounds what it is given to bfloat16"),
    ("gate for up", TRAINED, None, at([7], "mlp.swiglu", lambda m, gate, up: m(up, gate)), "layers.7.mlp.swiglu", "takes up for gate"),
    ("gelu", STEP0, None, at([1], "mlp.swiglu", lambda m, gate, up: jax.nn.gelu(gate, approximate=False) * up), "layers.1.mlp.swiglu", "takes gelu for silu"),
    ("score scale", TRAINED, None, at([2], "self_attn.mix", lambda m, q, *rest: m(q * 2, *rest)), "layers.2.self_attn.mix", "multiplies scores by 0.5, the head width 16 asks for 0.25"),
    ("head groups", GROUPED, None, at([4], "self_attn.mix", tiled), "layers.4.self_attn.mix", "the kv head n modulo their number"),
    ("one plus", TRAINED, None, at([5], "post_attention_layernorm", lambda m, x: L.rms_norm(x, 1 + m.scale[...], 1e-6)), "layers.5.post_attention_layernorm", "multiplies by 1 + scale"),
    ("norm a head", TRAINED, None, at([0], "self_attn.q_norm", lambda m, x: L.rms_norm(x.reshape(*x.shape[:2], -1, 16), m.scale[...].reshape(-1, 16), 1e-6).reshape(x.shape)), "layers.0.self_attn.q_norm", "normalises every head by itself"),
    ("residual", STEP0, None, at([6], "mlp_residual", lambda m, x, change: change), "layers.6.mlp_residual", "does not add what came before"),
    ("half", STEP0, None, at([6], "self_attn.o_proj", lambda m, x: m(x) / 2), "layers.6.self_attn.o_proj", "gives 0.5 times what it should"),
    ("NaN", STEP0, None, at([2], "self_attn.v_proj", lambda m, x: m(x).at[0, 9, 0].set(jnp.nan)), "layers.2.self_attn.v_proj", "NaN or infinity in"),
]  # fmt: skip


@pytest.mark.parametrize("what, name, config, calls, first, said", FAULTS, ids=[f[0] for f in FAULTS])
def test_a_planted_fault_is_named_and_explained(what, name, config, calls, first, said):
    rows = trace(name, config and config(reference(name)[0].config), calls)
    assert first_divergence(rows) == first
    row = next(r for r in rows if r.name == first)
    assert any(said in sentence for sentence in row.because), row.because
    if calls:  # one module is wrong: with the reference's inputs all others are right
        assert faulty(rows) == [first]


def test_a_second_fault_behind_the_first_is_seen_too():
    calls = at([2], "mlp.swiglu", lambda m, gate, up: m(up, gate)) | at(
        [5], "self_attn.o_proj", lambda m, x: m(x) * 1.001
    )
    rows = trace(TRAINED, calls=calls)
    assert faulty(rows) == ["layers.2.mlp.swiglu", "layers.5.self_attn.o_proj"]
    carried = [r.name for r in rows if r.carried.left]
    assert carried[0] == "layers.2.mlp.swiglu" and "layers.3.self_attn.q_proj" in carried


def test_a_fault_without_a_formula_is_named_and_not_guessed_at():
    noise = np.random.default_rng(0).normal(size=(1, 256, 64)).astype(np.float32)
    calls = at([1], "self_attn.o_proj", lambda m, x: m(x) + 1e-3 * noise[:, : x.shape[1]])
    rows = trace(STEP0, calls=calls)
    assert faulty(rows) == ["layers.1.self_attn.o_proj"]
    assert next(r for r in rows if r.name == faulty(rows)[0]).because == ()


def test_an_output_of_another_width_is_a_fault_and_not_a_crash():
    rows = trace(STEP0, calls=at([7], "self_attn.v_proj", lambda m, x: m(x)[..., :32].repeat(2, -1)))
    assert faulty(rows) == ["layers.7.self_attn.v_proj"]
    rows = trace(STEP0, calls=at([7], "mlp.gate_proj", lambda m, x: m(x)[..., :1]))
    row = next(r for r in rows if r.name == "layers.7.mlp.gate_proj")
    assert row.own.left and "gives (1,) a token, (128,) is wanted" in row.because


@pytest.mark.parametrize(
    "change, module, said",
    [
        (lambda p: exchange(p, "layers/5/mlp/gate_proj/kernel", "layers/5/mlp/up_proj/kernel"), "layers.5.mlp.gate_proj", "holds model.layers.5.mlp.up_proj.weight"),
        (lambda p: p.update({"layers/3/self_attn/q_proj/kernel": p["layers/3/self_attn/q_proj/kernel"].T}), "layers.3.self_attn.q_proj", "is transposed"),
        (lambda p: p.update({"layers/0/self_attn/o_proj/kernel": p["layers/1/self_attn/o_proj/kernel"]}), "layers.0.self_attn.o_proj", "holds model.layers.1.self_attn.o_proj.weight"),
        (lambda p: p.update({"norm/scale": p["norm/scale"] + 1}), "norm", "has 1 added to every value"),
        (lambda p: p.update({"lm_head/kernel": np.roll(p["lm_head/kernel"], 1, axis=1)}), "lm_head", "has its rows moved on by 1"),
        (lambda p: p.update({"embed_tokens/embedding": np.roll(p["embed_tokens/embedding"], 2, axis=0)}), "embed_tokens", "has its rows moved on by 2"),
    ],
)  # fmt: skip
def test_a_wrong_weight_is_named_and_it_is_said_in_what_way_it_is_wrong(change, module, said):
    rows = trace(TRAINED, change=change)
    assert first_divergence(rows) == module
    row = next(r for r in rows if r.name == module)
    assert len(row.weights) == 1 and row.because[0] == f"{row.weights[0]} {said}"


def exchange(leaves, a, b):
    leaves[a], leaves[b] = leaves[b], leaves[a]


CASTS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
from jax import lax
from tests.parity import test_trace as t
from olmo_parity.parity.traced_candidate import TracedCandidate
from olmo_parity.parity.traced_reference import reference_parts

def casts_first(norm, x):
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + norm.eps)).astype(x.dtype)
    return norm.scale[...].astype(x.dtype) * y

source, sequences, _, leaves = t.reference(t.TRAINED)
parts = list(reference_parts(source, sequences, dtype="bfloat16"))
for calls in (None, t.at([3], "self_attn.k_norm", casts_first)):
    candidate = TracedCandidate(t.InMemory(leaves), source.config, sequences, "bfloat16", calls=calls)
    print(t.faulty(t.trace_parts(parts, candidate, source, "bfloat16")))
"""


def test_in_bfloat16_a_cast_before_the_scale_is_named_though_float32_cannot_show_it():
    env = {**os.environ, "XLA_FLAGS": "--xla_allow_excess_precision=false"}
    root = str(trace_run.Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", CASTS, root], env=env, cwd=root, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "['layers.3.self_attn.k_norm']"], done.stderr[-2000:]


def test_nan_leaves_the_envelope():
    found, noise = Distance(), Distance()
    found.add(np.ones((2, 3), np.float32), np.array([[1, 1, 1], [1, np.nan, 1]], np.float32))
    noise.add(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))
    assert float32_envelope(found, noise, FORCED).left
    assert Envelope(np.nan, 0.0, 1.0).left and not Envelope(0.5, 0.0, 1.0).left
    zeros = Distance()
    zeros.add(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32))
    assert zeros.largest == 0
    zeros.add(np.zeros((1, 3), np.float32), np.full((1, 3), 1e-9, np.float32))
    assert zeros.largest == np.inf


def test_prompts_are_traced_worst_first_and_cut_where_they_are_long():
    config = reference(STEP0)[0].config
    prompts = [batches.Sequence(f"p{i}", np.zeros(2000 if i == 7 else 5, np.int32)) for i in range(9)]
    found = trace_run.chosen([*batches.built_in(config), *prompts], ["p7", "p8"])
    assert [s.id for s in found[3:]] == ["p7", "p8", "p0", "p1"]
    assert len(found[3].tokens) == trace_run.MOST_TOKENS and found[3].cut_from == 2000


def test_the_report_says_layers_together_and_each_reason_once():
    rows = trace(YARN, theta_10000(reference(YARN)[0].config))
    text = "\n".join(trace_report.details(record_of(rows, "float32", [])))
    assert text.count("has theta 10000, the config says 500000") == 1
    assert "layers.{0-7}.self_attn.q_rotary" in text
    assert trace_report.advice(record_of(rows, "float32", []))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    target = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(find_fixture(TRAINED), target, quiet=True)
    return target


def change_config(tree, tmp_path, **fields):
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tree.iterdir():
        (changed / file.name).symlink_to(file)
    config = json.loads((tree / "olmo_config.json").read_text()) | fields
    (changed / "olmo_config.json").unlink()
    (changed / "olmo_config.json").write_text(json.dumps(config))
    return changed


def test_the_command_passes_a_right_tree_and_fails_a_wrong_one(tree, tmp_path):
    passed = trace_run.run_trace(find_fixture(TRAINED), tree)
    assert (passed["verdict"], passed["exit_code"]) == ("pass", 0)
    assert "all 139 modules stay inside" in trace_report.console(passed)
    wrong = change_config(tree, tmp_path, rms_norm_eps=1e-5)
    failed = trace_run.run_trace(find_fixture(TRAINED), wrong)
    text = trace_report.console(failed)
    assert failed["exit_code"] == 1 and text.startswith("FAIL  layers.0.self_attn.q_norm is the first module")
    assert "config: rms_norm_eps is 1e-06 in the reference, 1e-05 in the candidate" in text
    assert "has epsilon 1e-05, the config says 1e-06" in text and "try: look at epsilon" in text


def test_a_candidate_function_that_names_its_layers_is_traced_by_layer(tree, monkeypatch):
    monkeypatch.chdir(trace_run.Path(__file__).parents[2] / "examples")
    record = trace_run.run_trace(find_fixture(TRAINED), tree, GateOptions(candidate_fn="inhouse:make"))
    names = [m["name"] for m in record["trace"]["modules"]]
    assert names == ["embed_tokens", *(f"layers.{i}.mlp_residual" for i in range(8)), "norm", "lm_head"]
    assert record["exit_code"] == 0 and all(m["inputs"] == "its own" for m in record["trace"]["modules"])


def test_what_cannot_be_traced_is_said(tree, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="--dtype float64"):
        trace_run.run_trace(find_fixture(TRAINED), tree, dtype="float64")
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(BadInput, match="is a record: it holds logits, and no activations"):
        trace_run.run_trace(tmp_path, tree)
    (tmp_path / "silent.py").write_text("def make(*_):\n    return None\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="names no activations"):
        trace_run.run_trace(find_fixture(TRAINED), tree, GateOptions(candidate_fn="silent:make"))
