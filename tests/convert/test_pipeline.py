"""hf2orbax: every bit arrives, plain Orbax reads it three ways, and what lies beside the tree is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.convert.orbax_io import read_tree, tree_metadata
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.config_hf import from_hf, to_hf
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import BF16, random_tensors, read_hf, run_convert, same_bits, tiny_config, write_hf

CASES = [
    "tiny-step0/hf-bfloat16",
    "tiny-step0/hf-float32",
    "tiny-gqa/hf-bfloat16",
    "tiny-gqa/hf-float32",
    "tiny-yarn/hf-bfloat16",
    "tiny-yarn/hf-float32",
    "tiny-trained/hf-bfloat16-step900",
    "tiny-trained/hf-float32-step900",
    "tiny-sharded/hf-bfloat16",
    "tiny-sharded/hf-float32",
]


def leaf(tree: dict, path: str):
    for key in path.split("/"):
        tree = tree[key]
    return np.asarray(tree)


def assert_holds(tree: dict, tensors: dict[str, np.ndarray], config) -> None:
    """Every weight of the config is in the tree, bit for bit."""
    for weight in weights(config):
        assert same_bits(leaf(tree, weight.jax), apply_layout(weight.layout, tensors[weight.hf])), weight.jax


@pytest.mark.parametrize("case", CASES)
def test_every_fixture_is_restored_bit_for_bit_by_plain_orbax(case, fixture_path, tmp_path):
    from orbax.checkpoint import v1

    folder = fixture_path(case)
    record = hf2orbax(folder, tmp_path / "0", quiet=True)
    config = from_hf(json.loads((folder / "config.json").read_text()))
    assert_holds(v1.load(tmp_path / "0"), read_hf(folder), config)
    assert record.verified and record.tensors == len(weights(config))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """One conversion under RUN/0, with chunks small enough that every matrix has several."""
    root = tmp_path_factory.mktemp("converted")
    config = tiny_config()
    tensors = random_tensors(config)
    write_hf(root / "hf", tensors, config, shard_bytes=40_000)
    hf2orbax(root / "hf", root / "run" / "0", chunk_bytes=3000, quiet=True)
    return root / "run", tensors, from_hf(config)


def test_orbax_v1_reads_it(converted):
    from orbax.checkpoint import v1

    run, tensors, config = converted
    assert_holds(v1.load(run / "0"), tensors, config)


def test_pytree_checkpointer_reads_the_item(converted):
    import orbax.checkpoint as ocp

    run, tensors, config = converted
    assert_holds(ocp.PyTreeCheckpointer().restore(run / "0" / "state"), tensors, config)


def test_checkpoint_manager_reads_the_step(converted):
    import orbax.checkpoint as ocp

    run, tensors, config = converted
    with ocp.CheckpointManager(run) as manager:
        assert manager.latest_step() == 0
        restored = manager.restore(0, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
    assert_holds(restored["state"], tensors, config)


def test_a_restore_onto_a_device_gives_jax_arrays(converted):
    import jax
    from orbax.checkpoint import v1

    run, tensors, config = converted
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding), v1.metadata(run / "0").metadata
    )
    restored = v1.load(run / "0", target)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))
    assert_holds(restored, tensors, config)


def test_our_own_reader_agrees_and_metadata_reads_no_data(converted, monkeypatch):
    from olmo_parity.convert import orbax_io

    run, tensors, config = converted
    assert_holds(read_tree(run), tensors, config)
    monkeypatch.setattr(orbax_io.TreeReader, "read", None)
    metadata = tree_metadata(run / "0" / "state")
    assert metadata["embed_tokens/embedding"].shape == (120, 64)
    assert metadata["layers/0/self_attn/q_proj/kernel"].chunk_shape == (64, 20)  # 4 chunks of at most 3000 bytes


def test_only_files_lie_beside_the_item(converted):
    run, _, _ = converted
    assert [p.name for p in (run / "0").iterdir() if p.is_dir()] == ["state"]
    assert [p.name for p in run.iterdir()] == ["0"]


def test_the_config_beside_the_tree_is_to_hf_and_may_be_edited(converted, tmp_path):
    run, _, config = converted
    copy = shutil.copytree(run / "0", tmp_path / "0")
    raw = json.loads((copy / "olmo_config.json").read_text())
    assert raw == json.loads(json.dumps(to_hf(config)))
    raw["rms_norm_eps"] = 1e-5
    (copy / "olmo_config.json").write_text(json.dumps(raw))
    assert open_source(copy).config.rms_norm_eps == 1e-5


def test_an_orbax_tree_is_a_source_in_hf_orientation(converted):
    run, tensors, _ = converted
    source = open_source(run)
    assert source.kind == "orbax"
    for name, tensor in source.tensors.items():
        assert same_bits(tensor.read(), tensors[name])
        assert same_bits(tensor.rows(3, 11), tensors[name][3:11])


@pytest.mark.parametrize("given", ["run", "run/0", "run/0/state", "run/0/", "run/0/../0"])
def test_a_tree_is_found_by_step_parent_or_item(given, converted):
    run, _, _ = converted
    source = open_source(f"{run.parent}/{given}")
    assert source.path.resolve() == (run / "0").resolve()
    assert given.rstrip("/").rsplit("/")[-1] in source.said


def test_several_steps_are_not_guessed_among(converted, tmp_path):
    run, _, _ = converted
    shutil.copytree(run / "0", tmp_path / "many" / "0")
    shutil.copytree(run / "0", tmp_path / "many" / "200")
    with pytest.raises(BadInput, match="2 steps .0, 200."):
        open_source(tmp_path / "many")
    assert open_source(tmp_path / "many" / "200").path.name == "200"


def all_patterns() -> np.ndarray:
    """Every bfloat16 there is, NaN payloads, subnormals and both zeros among them. [1024, 64]"""
    return np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(1024, 64)


def with_all_patterns(folder, **changes):
    """An HF folder whose embedding, head (turned) and a matrix (turned) hold all bit patterns; returns its tensors."""
    config = tiny_config(vocab_size=1024, intermediate_size=1024, **changes)
    tensors = random_tensors(config)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.gate_proj.weight"):
        tensors[name] = all_patterns()
    write_hf(folder, tensors, config)
    return tensors


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 5000])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_all_bfloat16_bit_patterns_survive(chunk_bytes, compression, tmp_path):
    tensors = with_all_patterns(tmp_path / "hf")
    with pytest.raises(BadInput, match="non-finite"):
        hf2orbax(tmp_path / "hf", tmp_path / "0", quiet=True)
    options = {"allow_nonfinite": True, "compression": compression, "chunk_bytes": chunk_bytes}
    record = hf2orbax(tmp_path / "hf", tmp_path / "0", quiet=True, **options)
    assert record.verified
    from orbax.checkpoint import v1

    assert_holds(v1.load(tmp_path / "0"), tensors, open_source(tmp_path / "hf").config)
    entry = next(
        t
        for t in json.loads((tmp_path / "0" / "manifest.json").read_text())["tensors"]
        if "gate" in t["source_name"] and ".2." in t["source_name"]
    )
    assert entry["non_finite"] == 256  # all exponent bits set: 128 mantissas, two signs


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_each_dtype_is_kept(dtype, tmp_path):
    from orbax.checkpoint import v1

    config = tiny_config()
    tensors = random_tensors(config, np.dtype(dtype))
    hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", quiet=True)
    assert_holds(v1.load(tmp_path / "0"), tensors, from_hf(config))


def test_a_dtype_that_was_asked_for_is_rounded_as_numpy_rounds(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config, np.dtype(np.float32))
    hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", dtype="bfloat16", quiet=True)
    assert_holds(read_tree(tmp_path / "0"), {n: a.astype(BF16) for n, a in tensors.items()}, from_hf(config))


def test_a_cast_that_would_overflow_is_refused(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"][7] = 1e30
    with pytest.raises(BadInput, match="model.norm.weight.*1 values are beyond the range of float16"):
        hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", dtype="float16", quiet=True)


def test_wrong_options_are_refused_together(tiny, tmp_path):
    with pytest.raises(BadInput) as caught:
        hf2orbax(tiny, tmp_path / "0", dtype="int4", compression="gzip", quiet=True)
    assert len(caught.value.faults) == 2


def test_twelve_layers_in_shuffled_shards_arrive_in_order(tmp_path):
    config = tiny_config(num_hidden_layers=12)
    tensors = random_tensors(config)
    names = sorted(tensors, key=lambda n: hash(n) % 97)
    write_hf(tmp_path / "hf", {n: tensors[n] for n in names}, config, shard_bytes=60_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) >= 3
    hf2orbax(tmp_path / "hf", tmp_path / "0", quiet=True)
    assert_holds(read_tree(tmp_path / "0"), tensors, from_hf(config))


def test_a_tied_model_has_no_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    hf2orbax(write_hf(tmp_path / "hf", tensors, config), tmp_path / "0", quiet=True)
    assert "lm_head" not in read_tree(tmp_path / "0")


def test_files_beside_the_weights_are_carried_along(fixture_path, tmp_path):
    folder = fixture_path("tiny-trained/hf-bfloat16-step900")
    hf2orbax(folder, tmp_path / "0", quiet=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "0" / name).read_bytes() == (folder / name).read_bytes()


def test_a_hub_cache_of_symlinks_is_followed_and_recorded(ok_control, tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in ok_control.iterdir():
        shutil.move(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(blobs / f"blob-{file.name}")
    hf2orbax(snapshot, tmp_path / "0", quiet=True)
    files = json.loads((tmp_path / "0" / "manifest.json").read_text())["source"]["files"]
    assert files[0]["resolved"].endswith("blobs/blob-model.safetensors")


def test_spaces_and_a_home_folder_in_paths(ok_control, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ok_control.rename(tmp_path / "a b")
    hf2orbax("~/a b", "~/c d/0", quiet=True)
    assert open_source("~/c d").kind == "orbax"


def test_the_command_prints_a_summary_and_plain_progress_lines(tiny, tmp_path):
    done = run_convert("hf2orbax", tiny, tmp_path / "0", "--no-verify")
    assert done.returncode == 0, done.stderr
    for word in ("47 tensors", "bfloat16", "peak memory", "written in", "not verified"):
        assert word in done.stdout
    assert "\r" not in done.stderr


def test_inspect_shows_config_rotary_and_tensors_of_both_forms(fixture_path, tmp_path):
    folder = fixture_path("tiny-yarn/hf-float32")
    hf2orbax(folder, tmp_path / "0", quiet=True)
    shown = [run_convert("inspect", path) for path in (folder, tmp_path)]
    for done in shown:
        assert done.returncode == 0, done.stderr
        for word in (
            "8 layers",
            "full_attention (layers 3, 7): yarn",
            "factor 8",
            "lm_head.weight",
            "sliding window 16",
        ):
            assert word in done.stdout
    assert shown[0].stdout.splitlines()[1:8] == shown[1].stdout.splitlines()[1:8]
    raw = json.loads(run_convert("inspect", folder, "--json").stdout)
    assert len(raw["tensors"]) == 91 and raw["rotary"]["full_attention"]["layers"] == [3, 7]


def test_read_back_notices_what_was_laid_out_wrongly(tiny, tmp_path, monkeypatch):
    from olmo_parity.convert import copying

    def shifted(array):
        wrong = np.ascontiguousarray(array.T)
        wrong[0, 1], wrong[1, 0] = array[0, 0], array[1, 1]
        return wrong

    monkeypatch.setattr(copying, "transposed", shifted)
    with pytest.raises(BadInput, match="layers/0/self_attn/q_proj/kernel.*differs from model.layers.0"):
        hf2orbax(tiny, tmp_path / "0", quiet=True)
    assert list(tmp_path.iterdir()) == [tiny]


SAVE_ON_EIGHT_DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1
assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
tree = v1.load(sys.argv[1])
def spread(x):
    axes = [n if x.shape[i] % k == 0 else None for i, (n, k) in enumerate((("a", 2), ("b", 4))[: x.ndim])]
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
v1.save(sys.argv[2], jax.tree.map(spread, tree))
"""


def test_a_tree_that_eight_devices_saved_is_read_and_inspected_on_one(converted, tmp_path):
    run, tensors, config = converted
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVE_ON_EIGHT_DEVICES, str(run / "0"), str(tmp_path / "0")]
    subprocess.run(command, env=environment, check=True)
    shutil.copy(run / "0" / "olmo_config.json", tmp_path / "0")
    assert_holds(read_tree(tmp_path), tensors, config)
    done = run_convert("inspect", tmp_path)
    assert done.returncode == 0 and "47 tensors" in done.stdout, done.stderr
    source = open_source(tmp_path)
    assert all(same_bits(tensor.read(), tensors[name]) for name, tensor in source.tensors.items())


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, True), (True, False), (False, True), (False, False)])
def test_trees_that_orbax_saved_in_other_formats_are_read(ocdbt, zarr3, tmp_path):
    import orbax.checkpoint as ocp

    tree = {"layers": {"0": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)}}, "norm": np.ones(3, BF16)}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)).save(tmp_path / "t", tree)
    restored = read_tree(tmp_path / "t")
    assert same_bits(restored["layers"]["0"]["kernel"], tree["layers"]["0"]["kernel"])
    assert same_bits(restored["norm"], tree["norm"])
