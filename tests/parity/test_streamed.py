"""Layer by layer, both sides give what the whole model gives, and a fault fails in the same way."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.config import FULL, SLIDING
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, footprint, reference, run, streamed_reference
from olmo_parity.parity.candidate import forward_of, run_candidate
from olmo_parity.parity.streaming import logits_file, rows_of, slices
from tests.conftest import find_fixture

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TRAINED, YARN, GROUPED = "tiny-trained/hf-bfloat16-step900", "tiny-yarn/hf-float32", "tiny-gqa/hf-bfloat16"
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of tiny products wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """tree(fixture): its Orbax step folder, in chunks of a few rows so that slices meet their edges."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("tree") / "0"
            command = [BIN / "olmo-convert", "hf2orbax", find_fixture(name), made[name], "--chunk-bytes", "2000"]
            subprocess.run(command, check=True, capture_output=True)
        return made[name]

    return of


def sequences_of(config):
    """The built-in ones, and two from a late position that differ in their windows alone."""
    tokens = np.arange(150, dtype=np.int32) * 7 % config.vocab_size
    late = [batches.Sequence(f"late {w}", tokens, first_position=100, window=w) for w in (5, 9)]
    return [*batches.built_in(config), *late]


def reference_logits(name, folder, **options):
    source = open_source(find_fixture(name))
    sequences = sequences_of(source.config)
    settings = reference.run_reference(source.path, source.config, sequences, folder=folder, **options)
    return [np.load(folder / f"{i}.npy") for i in range(len(sequences))], settings


def candidate_logits(path, folder, dtype, streamed, config=None):
    sequences = sequences_of(config or open_source(path).config)
    settings = run_candidate(path, sequences, dtype=dtype, folder=folder, streamed=streamed)
    return [np.load(folder / f"{i}.npy") for i in range(len(sequences))], settings


def worst(a, b):
    assert [(x.shape, x.dtype) for x in a] == [(y.shape, np.float32) for y in b]
    return max(np.abs(x - y).max() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "name, how",
    [
        (YARN, {"dtype": "float32"}),
        (YARN, {"dtype": "float32", "round_to": "bfloat16"}),
        (YARN, {"dtype": "float32", "benign": True}),
        (TRAINED, {"dtype": "bfloat16"}),
        (GROUPED, {"dtype": "float32"}),
    ],
)
def test_the_reference_is_equal_to_the_whole_model(name, how, tmp_path):
    whole, settings = reference_logits(name, tmp_path / "whole", **how)
    assert settings["streamed"] is False
    streamed, settings = reference_logits(name, tmp_path / "streamed", **how, streamed=True)
    assert settings["streamed"] is True
    assert worst(whole, streamed) == 0
    assert settings["attention"] == ("sdpa" if how.get("benign") else "eager")


def streamed_in_process(path, config, folder):
    """Sequences, and their float32 logits by the JAX side layer by layer, in this process."""
    import jax.numpy as jnp

    from olmo_parity.parity import streamed_candidate

    sequences = sequences_of(config)[1:]  # every window costs the whole model a compilation
    folder.mkdir()
    streamed_candidate.write_logits(path, config, sequences, dtype=jnp.float32, folder=folder)
    return sequences, [np.load(folder / f"{i}.npy") for i in range(len(sequences))]


@pytest.mark.parametrize("name", [YARN, GROUPED])
def test_the_candidate_is_equal_to_the_whole_model(name, tree, tmp_path):
    import jax.numpy as jnp

    config = open_source(tree(name)).config
    sequences, streamed = streamed_in_process(tree(name), config, tmp_path / "logits")
    forward = forward_of(config, read_tree(tree(name)), jnp.float32)
    assert worst([forward(s) for s in sequences], streamed) == 0


def test_the_candidate_is_equal_in_bfloat16_in_a_process_of_its_own(tree, tmp_path):
    whole, settings = candidate_logits(tree(TRAINED), tmp_path / "whole", "bfloat16", streamed=False)
    assert settings["streamed"] is False
    streamed, settings = candidate_logits(tree(TRAINED), tmp_path / "streamed", "bfloat16", streamed=True)
    assert settings["streamed"] is True
    assert worst(whole, streamed) == 0


def test_a_layer_of_the_other_type_shows_in_the_streamed_candidate(tree, tmp_path):
    config = open_source(tree(YARN)).config
    types = (*config.layer_types[:2], FULL, *config.layer_types[3:])
    _, right = streamed_in_process(tree(YARN), config, tmp_path / "right")
    _, wrong = streamed_in_process(tree(YARN), config.replace(layer_types=types), tmp_path / "wrong")
    assert worst(right, wrong) > 1e-3


def test_a_slice_boundary_inside_the_vocabulary_changes_nothing(monkeypatch, tmp_path):
    whole, _ = reference_logits(YARN, tmp_path / "whole", dtype="float32")
    monkeypatch.setattr(streamed_reference, "HEAD_ROWS", 100)
    monkeypatch.setattr(streamed_reference, "SLICE_BYTES", 1000)
    streamed, _ = reference_logits(YARN, tmp_path / "streamed", dtype="float32", streamed=True)
    assert worst(whole, streamed) < 1e-5


def test_slices_of_the_candidates_head_change_nothing_either(tree, tmp_path, monkeypatch):
    from olmo_parity.parity import streamed_candidate

    config = open_source(tree(YARN)).config
    _, one = streamed_in_process(tree(YARN), config, tmp_path / "one")
    monkeypatch.setattr(streamed_candidate, "HEAD_COLUMNS", 100)
    _, many = streamed_in_process(tree(YARN), config, tmp_path / "many")
    assert worst(one, many) < 1e-5


def test_no_more_than_one_layer_holds_weights(monkeypatch, tmp_path):
    real, held = streamed_reference.impose_window, []

    def count(model, *arguments):
        held.append([i for i, m in enumerate(model.model.layers) if not any(p.is_meta for p in m.parameters())])
        assert model.lm_head.weight.is_meta and model.model.embed_tokens.weight.is_meta
        real(model, *arguments)

    monkeypatch.setattr(streamed_reference, "impose_window", count)
    reference_logits(YARN, tmp_path / "streamed", dtype="float32", streamed=True)
    assert {len(one) for one in held[:-1]} == {0, 1}  # none: the final norm's turn
    assert sorted({i for one in held for i in one}) == list(range(8))


@pytest.mark.parametrize("layer, other", [(3, SLIDING), (2, FULL)])
def test_a_layer_streamed_as_the_other_type_is_refused_and_would_give_other_logits(layer, other, monkeypatch, tmp_path):
    whole, _ = reference_logits(YARN, tmp_path / "whole", dtype="float32")
    real = streamed_reference.empty_model

    def mistaken(*arguments):
        model = real(*arguments)
        types = list(model.config.layer_types)
        types[layer] = other
        model.config.layer_types = types
        attention = model.model.layers[layer].self_attn
        attention.attention_type = other
        attention.sliding_window = model.config.sliding_window if other == SLIDING else None
        return model

    monkeypatch.setattr(streamed_reference, "empty_model", mistaken)
    with pytest.raises(BadInput, match=f"layer {layer}: sliding_window"):
        reference_logits(YARN, tmp_path / "refused", dtype="float32", streamed=True)
    monkeypatch.setattr(reference, "check_reference", lambda *_: None)
    streamed, _ = reference_logits(YARN, tmp_path / "streamed", dtype="float32", streamed=True)
    assert worst(whole, streamed) > 1e-3


def test_a_wrong_rotary_table_is_refused_in_the_streamed_form_too(tmp_path):
    shutil.copytree(find_fixture(YARN), tmp_path / "flat")
    file = tmp_path / "flat" / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"] = raw["rope_parameters"]["full_attention"]  # ignored by 5.13 and later
    file.write_text(json.dumps(raw))
    source = open_source(tmp_path / "flat")
    with pytest.raises(BadInput, match="full_attention"):
        reference.run_reference(
            source.path, source.config, [], dtype="float32", folder=tmp_path / "logits", streamed=True
        )


def test_a_module_that_wants_other_tensors_is_refused(tmp_path):
    source = open_source(find_fixture(YARN))
    tensors = dict(source.tensors)
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors.pop("model.norm.weight")
    model = streamed_reference.empty_model(source.path, torch, pytest.importorskip("transformers"))
    with pytest.raises(BadInput) as error:
        streamed_reference.check_names(model, tensors, source.path, tied=False)
    assert "model.norm.weight is in the module" in str(error.value)
    assert "q_proj.bias is in the checkpoint" in str(error.value)


def test_the_gate_passes_a_right_conversion_and_fails_a_planted_fault(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    candidate = tmp_path / "0"
    shutil.copytree(tree(TRAINED), candidate)
    right = run.run_gate(find_fixture(TRAINED), candidate, run.GateOptions(streamed=True))
    assert right["verdict"] == "pass"
    config = json.loads((candidate / "olmo_config.json").read_text())
    config["sliding_window"] -= 1
    (candidate / "olmo_config.json").write_text(json.dumps(config))
    wrong = run.run_gate(find_fixture(TRAINED), candidate, run.GateOptions(streamed=True, trace=False))
    assert wrong["verdict"] == "fail"
    assert "float32" in {c["leg"] for c in wrong["criteria"] if not c["passed"]}
    for record in (right, wrong):
        for leg in record["legs"].values():
            assert leg["reference"]["streamed"] and leg["candidate"]["streamed"]


def test_layers_of_one_model_are_compiled_once_for_each_length(tree, tmp_path, monkeypatch):
    import jax
    import jax.numpy as jnp

    from olmo_parity.olmo_jax import model
    from olmo_parity.parity import streamed_candidate

    jax.clear_caches()  # tests before this one compiled the same function
    source, traced = open_source(tree(YARN)), []
    real = model.DecoderLayer.__call__
    monkeypatch.setattr(model.DecoderLayer, "__call__", lambda *a: traced.append(a[1].shape) or real(*a))
    sequences = sequences_of(source.config)
    streamed_candidate.write_logits(source.path, source.config, sequences, dtype=jnp.float32, folder=tmp_path)
    assert sorted(traced) == [(1, 256, 64), (1, 512, 64)]


def test_a_tied_head_is_the_embedding(tmp_path):
    """Orbax trees and folders without lm_head: both sides take their head from the embedding."""
    import jax.numpy as jnp
    from safetensors.numpy import save_file

    from olmo_parity.convert.mapping import apply_layout, weights
    from olmo_parity.olmo_jax.tree import unflatten

    source = open_source(find_fixture(YARN))
    tensors = {name: t.read() for name, t in source.tensors.items() if name != "lm_head.weight"}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source.path / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    subprocess.run([BIN / "olmo-convert", "hf2orbax", tmp_path / "hf", tmp_path / "0"], check=True, capture_output=True)
    tied = open_source(tmp_path / "hf")
    sequences = sequences_of(tied.config)[-1:]
    forward = forward_of(
        tied.config,
        unflatten({w.jax: np.ascontiguousarray(apply_layout(w.layout, tensors[w.hf])) for w in weights(tied.config)}),
        jnp.float32,
    )
    expected = forward(sequences[0])
    reference.run_reference(tied.path, tied.config, sequences, dtype="float32", folder=tmp_path / "r", streamed=True)
    run_candidate(tmp_path / "0", sequences, dtype="float32", folder=tmp_path / "c", streamed=True)
    for side in ("r", "c"):
        assert np.abs(np.load(tmp_path / side / "0.npy") - expected).max() < 2e-5


def test_rows_are_looked_up_in_slices(tmp_path):
    matrix, reads = np.arange(40).reshape(10, 4), []

    def read(start, stop):
        reads.append((start, stop))
        return matrix[start:stop]

    ids = np.array([0, 3, 9])
    np.testing.assert_array_equal(rows_of(read, 10, ids, 3), matrix[ids])
    assert reads == [(0, 3), (3, 6), (9, 10)]
    assert list(slices(5, 2)) == [(0, 2), (2, 4), (4, 5)]
    file = logits_file(tmp_path, 7, 3, 5)
    file[:, 2:4] = 1
    del file
    assert np.load(tmp_path / "7.npy").sum() == 6


# --- which of the two is taken


def machine(root, available, **groups):
    """A root with /proc/meminfo (bytes) and control groups: path -> (limit, used, inactive file pages)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    for path, (limit, used, cached) in groups.items():
        folder = root / "sys/fs/cgroup" / path.replace("_", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    return root


MIB = 1 << 20


@pytest.mark.parametrize(
    "groups, left",
    [
        ({}, 100),
        ({"a_b": (60 * MIB, 20 * MIB, 0)}, 40),
        ({"a_b": (60 * MIB, 20 * MIB, 15 * MIB)}, 55),  # pages that can be dropped are no use
        ({"a_b": ("max", 20 * MIB, 0), "a": (30 * MIB, 29 * MIB, 0)}, 1),  # a group above counts too
        ({"a_b": (10 * MIB, 20 * MIB, 0)}, 0),
    ],
)
def test_available_memory_is_the_least_of_the_machine_and_its_groups(groups, left, tmp_path):
    assert footprint.available_bytes(machine(tmp_path, 100 * MIB, **groups)) == left * MIB


def test_groups_of_version_1_count(tmp_path):
    root = machine(tmp_path, 100 * MIB)
    (root / "proc/self/cgroup").write_text("4:cpu:/\n5:memory:/x\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(50 * MIB))
    (folder / "memory.usage_in_bytes").write_text(str(20 * MIB))
    assert footprint.available_bytes(root) == 30 * MIB
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # how version 1 says "no limit"
    assert footprint.available_bytes(root) == 100 * MIB


def test_a_model_that_does_not_fit_is_streamed_unless_told_otherwise(tree, monkeypatch):
    source, candidate = open_source(find_fixture(TRAINED)), open_source(tree(TRAINED))
    sequences = batches.built_in(source.config)
    need = footprint.candidate_bytes(candidate, sequences, "float32")
    for available, streamed in ((2 * need, False), (need, True)):
        monkeypatch.setattr(footprint, "available_bytes", lambda available=available: available)
        chosen, why = footprint.choose_streamed(source, candidate, sequences, None)
        assert chosen is streamed and ("GiB" in (why or "")) is streamed
        assert footprint.choose_streamed(source, candidate, sequences, not streamed) == (not streamed, None)


def test_the_estimate_of_the_7b_model_counts_weights_and_casts():
    """7.3e9 parameters: 27.2 GiB in float32; a candidate stored in bfloat16 is held beside its cast."""
    config = open_source(find_fixture(TRAINED)).config.replace(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, vocab_size=100278, layer_types=((SLIDING,) * 3 + (FULL,)) * 8,
    )  # fmt: skip
    sequences = [batches.Sequence("a", np.zeros(512, np.int32))]
    gib = 1 << 30
    assert 29 * gib < footprint.reference_bytes(config, sequences, "float32") < 33 * gib
    assert 15 * gib < footprint.reference_bytes(config, sequences, "bfloat16") < 19 * gib
    longer = [batches.Sequence("a", np.zeros(8192, np.int32))]
    grown = footprint.reference_bytes(config, longer, "float32") - footprint.reference_bytes(
        config, sequences, "float32"
    )
    assert grown > 32 * 8192**2 * 12  # scores [N, T, T]
