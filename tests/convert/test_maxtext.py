"""MaxText's layouts: written as its own converter writes them, read from its own trees, and a wrong tree does not pass."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from olmo_parity.convert import mapping, maxtext, pipeline
from olmo_parity.convert.describe import as_text, inspect
from olmo_parity.convert.diff import diff
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.orbax_io import TreeReader, open_item, read_tree
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import random_tensors, read_hf, run_convert, same_bits, tiny_config, write_hf

LAYOUTS = ["maxtext", "maxtext-unscanned"]
CASES = ["tiny-gqa/hf-bfloat16", "tiny-yarn/hf-float32", "tiny-trained/hf-float32-step900"]


def maxtext_tree(tensors: dict, config: dict, scanned: bool, layer_of=lambda c, b, blocks: c + 4 * b) -> dict:
    """MaxText's parameters by their dotted names, from its layout as it was measured, through no table of the package."""
    heads, kv, width = config["num_attention_heads"], config["num_key_value_heads"], config.get("head_dim")
    width = width or config["hidden_size"] // heads

    def layer(i: int) -> dict:
        hf = {k.split(f"layers.{i}.")[1]: v for k, v in tensors.items() if f".layers.{i}." in k}
        q, k, v, o = (hf[f"self_attn.{n}_proj.weight"].T for n in "qkvo")
        return {
            "attention.query.kernel": q.reshape(-1, heads, width),
            "attention.key.kernel": k.reshape(-1, kv, width),
            "attention.value.kernel": v.reshape(-1, kv, width),
            "attention.out.kernel": o.reshape(heads, width, -1),
            "attention.query_norm.scale": hf["self_attn.q_norm.weight"],
            "attention.key_norm.scale": hf["self_attn.k_norm.weight"],
            "mlp.wi_0.kernel": hf["mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": hf["mlp.up_proj.weight"].T,
            "mlp.wo.kernel": hf["mlp.down_proj.weight"].T,
            "post_self_attention_layer_norm.scale": hf["post_attention_layernorm.weight"],
            "post_mlp_layer_norm.scale": hf["post_feedforward_layernorm.weight"],
        }

    tree = {
        "token_embedder.embedding": tensors["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        tree["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    count = config["num_hidden_layers"]
    if not scanned:
        tree |= {f"decoder.layers_{i}.{k}": v for i in range(count) for k, v in layer(i).items()}
    for c in range(4 if scanned else 0):
        stack = [layer(layer_of(c, b, count // 4)) for b in range(count // 4)]
        tree |= {f"decoder.layers.layers_{c}.{k}": np.stack([one[k] for one in stack], axis=1) for k in stack[0]}
    return {f"params.params.{k}": np.ascontiguousarray(v) for k, v in tree.items()}


def nested(flat: dict) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def save(folder, flat: dict, config: dict | None = None, **beside):
    """A step folder as MaxText leaves it: one item, saved by plain Orbax; the config only if it is given."""
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(folder / "items", {**nested(flat), **beside})
    if config is not None:
        (folder / "olmo_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """An HF folder of eight layers, two blocks of four, every weight different; as (folder, tensors, config)."""
    config = tiny_config(num_hidden_layers=8)
    tensors = random_tensors(config)
    return write_hf(tmp_path_factory.mktemp("eight") / "hf", tensors, config), tensors, config


@pytest.fixture(scope="module", params=LAYOUTS)
def written(request, eight, tmp_path_factory):
    """(layout, step folder) of a conversion with several chunks a leaf."""
    step = tmp_path_factory.mktemp(request.param) / "run" / "0"
    hf2orbax(eight[0], step, layout=request.param, chunk_bytes=3000, quiet=True)
    return request.param, step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_every_array_is_what_maxtext_writes_read_with_tensorstore_alone(case, layout, fixture_path, tmp_path):
    import tensorstore as ts

    folder = fixture_path(case)
    hf2orbax(folder, tmp_path / "0", layout=layout, quiet=True)
    wanted = maxtext_tree(read_hf(folder), json.loads((folder / "config.json").read_text()), layout == "maxtext")
    wanted["step"] = np.zeros((), np.int64)
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/0/items/"}}
    keys = {k.decode() for k in ts.KvStore.open(base).result().list().result()}
    assert {k.removesuffix("/zarr.json") for k in keys if k.endswith("/zarr.json")} == set(wanted)
    for name, array in wanted.items():
        store = ts.open({"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}}).result()
        assert same_bits(store.read().result(), array), name
    back = orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True)
    assert back.verified
    tensors = read_hf(folder)
    found = read_hf(tmp_path / "back")
    assert found.keys() == tensors.keys() and all(same_bits(found[k], tensors[k]) for k in tensors)


def test_orbax_restores_it_three_ways_and_finds_the_counters(written, eight):
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    layout, step = written
    wanted = nested(maxtext_tree(*eight[1:], layout == "maxtext"))
    with ocp.CheckpointManager(step.parent) as manager:
        managed = manager.restore(0, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]
    for tree in (ocp.PyTreeCheckpointer().restore(step / "items"), managed, v1.load(step, checkpointable_name="items")):
        assert tree["opt_state"] == {} and tree["step"] == 0 and tree["step"].shape == ()
        flat, other = flatten(tree["params"]), flatten(wanted["params"])
        assert flat.keys() == other.keys() and all(same_bits(np.asarray(flat[k]), other[k]) for k in flat)
    assert v1.checkpointables_metadata(step).custom_metadata == {"scan_layers": layout == "maxtext"}


def flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def test_the_parameters_alone_are_restored_into_abstract_arrays_as_maxtext_loads_them(written, eight):
    """MaxText 0.2.5's two ways: the handler with restore arguments, and Orbax v1 with a partial load."""
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    layout, step = written
    wanted = {"params": nested(maxtext_tree(*eight[1:], layout == "maxtext"))["params"]}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=sharding), wanted)
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    old = handler.restore(
        step / "items", args=ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
    )
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        new = v1.load(step, target, checkpointable_name="items")
    for tree in (old, new):
        for name, value in flatten(tree).items():
            assert same_bits(np.asarray(value), flatten(wanted)[name].astype(np.float32)), name


def test_it_is_a_source_with_the_weights_of_every_layer(written, eight):
    layout, step = written
    source = open_source(step)
    assert source.kind == "orbax" and ("scanned: 2 blocks" in source.said) == (layout == "maxtext")
    for name, tensor in source.tensors.items():
        assert same_bits(tensor.read(), eight[1][name]), name
        assert same_bits(tensor.rows(3, 11), eight[1][name][3:11]), name  # across heads of 20
    assert diff(eight[0], step, quiet=True).equal
    assert verify(step, eight[0], quiet=True).equal and verify(eight[0], step, quiet=True).equal
    assert "layers_1/attention/query/kernel" in as_text(inspect(step))


def test_the_gate_sees_the_tree_that_the_usual_layout_gives(written, eight, tmp_path):
    import jax

    from olmo_parity.parity.candidate import on_mesh
    from olmo_parity.parity.identity import tensor_hashes

    _, step = written
    hf2orbax(eight[0], tmp_path / "0", quiet=True)
    ours, theirs = flatten(read_tree(tmp_path / "0")), flatten(read_tree(step))
    assert ours.keys() == theirs.keys() and all(same_bits(ours[k], theirs[k]) for k in ours)
    source = open_source(step)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    placed = flatten(on_mesh(step, source.config, mesh))
    assert placed.keys() == ours.keys() and all(same_bits(np.asarray(placed[k]), ours[k]) for k in ours)
    manifest = json.loads((step / "manifest.json").read_text())["tensors"]
    assert {k: v[2] for k, v in tensor_hashes(source).items()} == {
        entry["target_path"]: entry["target_sha256"] for entry in manifest
    }


def test_the_manifest_names_where_each_weight_is_stored(written):
    layout, step = written
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["layout"] == layout
    stored = {entry["source_name"]: entry["stored"] for entry in manifest["tensors"]}
    path = "params/params/decoder/layers/layers_1" if layout == "maxtext" else "params/params/decoder/layers_5"
    end = "[:, 1]" if layout == "maxtext" else ""
    assert stored["model.layers.5.mlp.up_proj.weight"] == f"{path}/mlp/wi_1/kernel{end}"


def test_a_flipped_bit_is_found_with_the_manifest_alone(written, tmp_path):
    assert verify_manifest(written[1], quiet=True).equal
    copy = shutil.copytree(written[1], tmp_path / "0")
    file = max((p for p in (copy / "items").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[300] ^= 1
    file.write_bytes(content)
    assert not verify_manifest(copy, quiet=True).equal


@pytest.mark.parametrize("chunk_bytes, dtype", [(700, None), (1 << 20, "float32")])
def test_any_chunk_size_gives_the_same_arrays(chunk_bytes, dtype, eight, tmp_path):
    hf2orbax(eight[0], tmp_path / "0", layout="maxtext", chunk_bytes=chunk_bytes, dtype=dtype, quiet=True)
    wanted = maxtext_tree(*eight[1:], scanned=True)
    reader = TreeReader(tmp_path / "0" / "items")
    for name, array in wanted.items():
        found = reader.read(name.replace(".", "/"))
        assert same_bits(found, array.astype(found.dtype)) and (dtype is None or found.dtype == dtype), name
        chunk = reader.leaf(name.replace(".", "/")).chunk_shape
        if "layers_" in name:
            assert chunk[1] == 1  # a block of a stack has chunks of its own


def test_a_stack_is_written_and_read_in_slices_of_one_layer(eight, tmp_path, monkeypatch):
    """No write holds more than a chunk, and reading a layer asks for no other block's values."""
    real, sizes = TreeReader.read, []

    def read(self, path, index=()):
        found = real(self, path, index)
        sizes.append((path, found.nbytes))
        return found

    monkeypatch.setattr(TreeReader, "read", read)
    hf2orbax(eight[0], tmp_path / "0", layout="maxtext", chunk_bytes=3000, quiet=True)
    assert max(size for _, size in sizes) <= 3000  # of the read-back: slices are chunks
    sizes.clear()
    tensor = open_source(tmp_path / "0").tensors["model.layers.6.mlp.gate_proj.weight"]
    tensor.rows(10, 20)
    assert sizes == [("params/params/decoder/layers/layers_2/mlp/wi_0/kernel", 10 * 64 * 2)]


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_run_resumes_in_the_middle_of_a_stack(stop_after, eight, tmp_path, monkeypatch):
    real, calls = pipeline.copy_group, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(pipeline, "copy_group", stopping)
    monkeypatch.setattr("olmo_parity.convert.copying.SMALL_BYTES", 1000)
    options = {"layout": "maxtext", "quiet": True, "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        hf2orbax(eight[0], tmp_path / "0", **options)
    assert not (tmp_path / "0").exists()
    monkeypatch.setattr(pipeline, "copy_group", real)
    record = hf2orbax(eight[0], tmp_path / "0", **options)
    assert record.resumed == stop_after
    assert verify(eight[0], tmp_path / "0", quiet=True).equal
    with pytest.raises(BadInput, match="exists"):
        hf2orbax(eight[0], tmp_path / "0", layout="maxtext-unscanned", quiet=True)


# A tree as MaxText itself saves it, or one that somebody got wrong.


@pytest.mark.parametrize("scanned", [True, False])
def test_a_right_tree_without_our_manifest_verifies(scanned, eight, tmp_path):
    save(tmp_path / "0", maxtext_tree(*eight[1:], scanned), eight[2], step=np.zeros((), np.int64), opt_state={})
    assert verify(eight[0], tmp_path / "0", quiet=True).equal


def planted(kind: str, tensors: dict, config: dict) -> dict:
    """A tree with every leaf in place and one thing wrong in it."""
    if kind == "block-major":
        return maxtext_tree(tensors, config, True, layer_of=lambda c, b, blocks: b + blocks * c)
    tree = maxtext_tree(tensors, config, True)
    if kind == "blocks reversed":
        name = "params.params.decoder.layers.layers_2.post_mlp_layer_norm.scale"
        tree[name] = np.ascontiguousarray(tree[name][:, ::-1])
    elif kind == "heads interleaved":  # as if the projection were (width, heads)
        name = "params.params.decoder.layers.layers_0.attention.query.kernel"
        d, b, n, h = tree[name].shape
        tree[name] = np.ascontiguousarray(tree[name].reshape(d, b, h, n).swapaxes(2, 3))
    elif kind == "out not transposed":
        name = "params.params.decoder.layers.layers_0.attention.out.kernel"
        n, b, h, d = tree[name].shape
        wrong = [tensors[f"model.layers.{4 * i}.self_attn.o_proj.weight"].reshape(n, h, d) for i in range(b)]
        tree[name] = np.ascontiguousarray(np.stack(wrong, axis=1))
    elif kind == "gate and up exchanged":
        gate, up = (f"params.params.decoder.layers.layers_3.mlp.wi_{i}.kernel" for i in (0, 1))
        tree[gate], tree[up] = tree[up], tree[gate]
    elif kind == "key and value exchanged":
        key, value = (f"params.params.decoder.layers.layers_1.attention.{n}.kernel" for n in ("key", "value"))
        tree[key], tree[value] = tree[value], tree[key]
    return tree


@pytest.mark.parametrize(
    "kind",
    [
        "block-major",
        "blocks reversed",
        "heads interleaved",
        "out not transposed",
        "gate and up exchanged",
        "key and value exchanged",
    ],
)
def test_a_tree_laid_out_wrongly_fails_verify(kind, eight, tmp_path):
    step = save(tmp_path / "0", planted(kind, *eight[1:]), eight[2])
    result = verify(eight[0], step, quiet=True)
    assert not result.equal and "differs from model.layers." in result.differences[0], kind


def test_a_reader_that_took_blocks_for_layers_would_be_found(eight, tmp_path, monkeypatch):
    """The table itself wrong, for writing and for reading alike: what was written no longer is what MaxText reads."""
    monkeypatch.setattr(mapping, "divmod", lambda layer, cycle: (layer % 2, layer // 2), raising=False)
    hf2orbax(eight[0], tmp_path / "0", layout="maxtext", quiet=True, verify=False)
    monkeypatch.undo()
    assert not verify(eight[0], tmp_path / "0", quiet=True).equal
    assert not verify_manifest(tmp_path / "0", quiet=True).equal


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("params.params.decoder.layers.layers_2.mlp.wo.kernel"), "layers.2.mlp.down_proj.weight is missing"),
        (lambda t: t.update({"params.params.decoder.layers.layers_0.mlp.extra": np.zeros(3, np.float32)}), "mlp/extra in .* is unexpected"),
        (lambda t: t.update({"params.params.vision_encoder.kernel": np.zeros(3, np.float32)}), "vision_encoder/kernel in .* is unexpected"),
        (lambda t: t.update({"params.params.decoder.layers_3.mlp.wo.kernel": np.zeros((96, 64), np.float32)}), "both hold layers/3/mlp/down_proj/kernel"),
        (lambda t: t.update({k: np.ascontiguousarray(v.swapaxes(0, 1)) for k, v in t.items() if "layers_" in k}), "param_scan_axis=1"),
        (lambda t: t.update({k: v[:, :1] for k, v in t.items() if "layers_1" in k}), "no common number of blocks"),
        (lambda t: t.update({k: v[:, :1] for k, v in t.items() if "layers_" in k}), "is missing"),
        (lambda t: t.update({k: v.reshape(64, 2, 8, 10) for k, v in t.items() if "query.kernel" in k}), "has heads of 20"),
        (lambda t: t.update({k: v.reshape(64, 2, 80) for k, v in t.items() if "query.kernel" in k}), "no common number"),
        (lambda t: t.update({"params.params.token_embedder.embedding": np.zeros((128, 64), np.float32)}), "vocabulary in the file is padded"),
    ],
)  # fmt: skip
def test_a_tree_that_is_not_this_model_is_refused(change, words, eight, tmp_path):
    tree = maxtext_tree(*eight[1:], scanned=True)
    change(tree)
    step = save(tmp_path / "0", tree, eight[2])
    with pytest.raises(BadInput, match=words):
        open_source(step)


def test_every_array_with_the_wrong_number_of_axes_is_named_with_its_weight(eight, tmp_path):
    tree = maxtext_tree(*eight[1:], scanned=False)
    for key in ("layers_2.mlp.wo.kernel", "layers_5.mlp.wo.kernel"):
        tree[f"params.params.decoder.{key}"] = np.zeros((2, 96, 32), np.float32)
    tree["params.params.token_embedder.embedding"] = np.zeros(7680, np.float32)
    with pytest.raises(BadInput, match=r"\(3 faults\)") as refused:
        open_source(save(tmp_path / "0", tree, eight[2]))
    for layer in (2, 5):
        assert f"2 axes are wanted for model.layers.{layer}.mlp.down_proj.weight" in str(refused.value)


@pytest.mark.parametrize("layout", ["olmo_jax", *LAYOUTS])
def test_a_tree_with_a_head_under_a_tied_config_is_refused_and_says_why(layout, tmp_path):
    untied = tiny_config()
    tensors = random_tensors(untied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = write_hf(tmp_path / "hf", tensors, untied)
    hf2orbax(source, tmp_path / "0", layout=layout, quiet=True)
    assert verify(source, tmp_path / "0", quiet=True).equal
    (tmp_path / "0" / "olmo_config.json").write_text(json.dumps({**untied, "tie_word_embeddings": True}))
    with pytest.raises(BadInput, match="a head of its own: set it to false if that is meant"):
        open_source(tmp_path / "0")


@pytest.mark.parametrize("prefix", ["params.params.", "params.", "model.", "base.", ""])
@pytest.mark.parametrize("leaf", ["", ".value"])
def test_the_keys_that_different_savers_wrap_around_the_weights_are_seen_through(prefix, leaf, eight, tmp_path):
    plain = maxtext_tree(*eight[1:], scanned=True)
    tree = {prefix + k.removeprefix("params.params.") + leaf: v for k, v in plain.items()}
    step = save(tmp_path / "0", tree, eight[2], rngs={"count": np.zeros(2, np.uint32)})
    source = open_source(step)
    assert any("rngs" in note for note in source.notes)
    assert all(same_bits(t.read(), eight[1][n]) for n, t in source.tensors.items())


def test_of_a_training_checkpoint_the_parameters_are_read_and_the_rest_is_named(eight, tmp_path):
    tree = maxtext_tree(*eight[1:], scanned=True)
    moments = nested({k.removeprefix("params."): np.zeros_like(v) for k, v in tree.items()})
    state = ({"count": np.zeros((), np.int32), "mu": moments, "nu": moments}, None)
    run = tmp_path / "checkpoints"
    save(run / "1000", tree, None, step=np.full((), 1000), opt_state=state)
    (run / "config.json").write_text(json.dumps(eight[2]))  # one for all steps
    source = open_source(run)
    assert source.config_file == run / "config.json"
    assert "of the tree opt_state is not read: only its parameters are" in source.notes
    assert any(str(run / "config.json") in note for note in source.notes)
    assert verify(eight[0], run / "1000", quiet=True).equal


def test_arrays_in_chunks_across_heads_and_blocks_are_read(eight, tmp_path):
    """As a run on many devices leaves them."""
    from orbax.checkpoint import v1

    context = v1.Context()
    context.array.saving.storage_options.chunk_byte_size = 600
    with context:
        v1.save(tmp_path / "0", nested(maxtext_tree(*eight[1:], scanned=True)))
    (tmp_path / "0" / "olmo_config.json").write_text(json.dumps(eight[2]))
    reader = TreeReader(tmp_path / "0" / "state")
    chunks = [reader.leaves[k].chunk_shape for k in reader.leaves if k.endswith("query/kernel")]
    assert all(chunk[1] == 2 or chunk[3] < 20 for chunk in chunks), chunks
    assert verify(eight[0], tmp_path / "0", quiet=True).equal
    assert verify(tmp_path / "0", eight[0], quiet=True).equal
    assert orbax2hf(tmp_path / "0", tmp_path / "back", quiet=True).verified


# The config, and what MaxText cannot do with it.


def test_a_tree_without_a_config_asks_for_one_and_takes_it(eight, tmp_path):
    source, tensors, config = eight
    step = save(tmp_path / "0", maxtext_tree(tensors, config, True))
    done = run_convert("verify", source, step)
    assert done.returncode == 2 and "--model-config" in done.stderr and "olmo_config.json" in done.stderr, done
    done = run_convert("verify", source, step, "--model-config", source)
    assert done.returncode == 0, done.stderr
    given = {"model_config": source / "config.json"}
    assert inspect(step, **given).source.config_file == source / "config.json"
    assert diff(step, source, quiet=True, **given).equal
    assert orbax2hf(step, tmp_path / "hf", quiet=True, **given).verified
    with pytest.raises(BadInput, match="nowhere"):
        inspect(step, model_config=tmp_path / "nowhere")
    (step / "config.json").write_text(json.dumps(config))
    assert any(str(step / "config.json") in note for note in open_source(step).notes)
    with pytest.raises(BadInput, match="was not used"):
        inspect(step, **given)


def test_the_usual_layout_still_wants_its_own_config_file(eight, tmp_path):
    hf2orbax(eight[0], tmp_path / "0", quiet=True)
    (tmp_path / "0" / "olmo_config.json").rename(tmp_path / "config.json")
    with pytest.raises(BadInput, match="olmo_config.json does not exist"):
        open_source(tmp_path / "0")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_hidden_layers": 6}, "6 layers are no whole number of blocks of 4"),
        ({"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4}, "layer 3 of this config is sliding_attention"),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "layer 0 of this config is full_attention"),
    ],
)  # fmt: skip
def test_layers_that_do_not_follow_the_cycle_are_refused_scanned_and_the_other_layout_is_proposed(
    changes, words, tmp_path
):
    config = tiny_config(**changes)
    source = write_hf(tmp_path / "hf", random_tensors(config), config)
    with pytest.raises(BadInput, match=words) as refused:
        hf2orbax(source, tmp_path / "0", layout="maxtext", quiet=True)
    assert "--layout maxtext-unscanned" in str(refused.value) and not (tmp_path / "0").exists()
    record = hf2orbax(source, tmp_path / "0", layout="maxtext-unscanned", quiet=True)
    off_pattern = "layer_types" in changes
    assert any("computes another function" in note for note in record.notes) == off_pattern
    assert verify(source, tmp_path / "0", quiet=True).equal


def test_layers_of_several_dtypes_are_refused_scanned_before_anything_is_written(eight, tmp_path):
    _, tensors, config = eight
    norm, kernel = "model.layers.5.self_attn.q_norm.weight", "model.layers.4.mlp.up_proj.weight"
    mixed = {name: array.astype(np.float32) if name in (norm, kernel) else array for name, array in tensors.items()}
    source = write_hf(tmp_path / "hf", mixed, config)
    with pytest.raises(BadInput, match=r"\(2 faults\)") as refused:
        hf2orbax(source, tmp_path / "0", layout="maxtext", quiet=True)
    for words in (
        "--dtype",
        "--layout maxtext-unscanned",
        f"{norm} in float32",
        f"{kernel} in float32",
        "layers.0.mlp",
    ):
        assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    hf2orbax(source, tmp_path / "cast", layout="maxtext", dtype="float32", quiet=True)
    hf2orbax(source, tmp_path / "unscanned", layout="maxtext-unscanned", quiet=True)
    # Between the layers of one block, and outside the layers, dtypes may differ.
    whole = {"model.norm.weight", *(norm.replace("5", str(layer)) for layer in (1, 5))}
    mixed = {name: array.astype(np.float32) if name in whole else array for name, array in tensors.items()}
    source = write_hf(tmp_path / "hf", mixed, config)
    hf2orbax(source, tmp_path / "1", layout="maxtext", quiet=True)
    assert verify(source, tmp_path / "1", quiet=True).equal


def test_the_command_takes_the_layout(eight, tmp_path):
    done = run_convert("hf2orbax", eight[0], tmp_path / "0", "--layout", "maxtext-unscanned", "--quiet")
    assert done.returncode == 0 and "not scanned" in open_source(tmp_path / "0").said, done.stderr


def test_an_unknown_layout_and_moments_in_maxtexts_are_refused(eight, fixture_path, tmp_path):
    with pytest.raises(BadInput, match="'scanned' is not known"):
        hf2orbax(eight[0], tmp_path / "0", layout="scanned", quiet=True)
    with pytest.raises(BadInput, match="leave --optimizer out"):
        core2orbax(fixture_path("tiny-gqa/native/step0"), tmp_path / "0", layout="maxtext", optimizer=True, quiet=True)


def test_ai2s_own_checkpoint_becomes_a_maxtext_tree_directly(fixture_path, tmp_path):
    native = fixture_path("tiny-gqa/native/step0")
    core2orbax(native, tmp_path / "0", layout="maxtext", quiet=True)
    assert verify(native, tmp_path / "0", quiet=True).equal
    assert open_item(tmp_path / "0" / "items").leaves["embed_tokens/embedding"].shape == (500, 96)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_head_is_left_out_and_its_flags_are_named(layout, tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    source = write_hf(tmp_path / "hf", random_tensors(config), config)
    record = hf2orbax(source, tmp_path / "0", layout=layout, quiet=True)
    assert not any("logits_dense" in path for path in TreeReader(tmp_path / "0" / "items").leaves)
    assert any("logits_via_embedding=true" in note for note in record.notes)
    assert verify(source, tmp_path / "0", quiet=True).equal


def test_that_maxtext_applies_yarn_to_sliding_layers_is_said_wherever_it_matters(fixture_path, eight, tmp_path):
    yarn = fixture_path("tiny-yarn/hf-float32")
    words = "to sliding layers too"
    record = hf2orbax(yarn, tmp_path / "0", layout="maxtext", quiet=True)
    assert any(words in note for note in record.notes)
    assert any(words in note for note in json.loads((tmp_path / "0" / "manifest.json").read_text())["notes"])
    assert words in as_text(inspect(tmp_path / "0"))
    assert not any(words in note for note in hf2orbax(yarn, tmp_path / "ours", quiet=True).notes)
    assert not any(words in note for note in hf2orbax(eight[0], tmp_path / "1", layout="maxtext", quiet=True).notes)


def test_every_row_of_the_table_has_a_place_of_its_own_in_maxtexts_tree():
    assert len({row.maxtext for row in mapping.ROWS}) == len(mapping.ROWS)
    for row, pattern in maxtext.PATTERNS:
        others = [r.maxtext for r in mapping.ROWS if r is not row]
        filled = [path.replace("{layer}", "layers/layers_11") for path in (row.maxtext, *others)]
        assert [bool(pattern.fullmatch(path)) for path in filled] == [True] + [False] * len(others)


def test_an_array_that_cannot_be_opened_is_named_and_the_others_are_still_checked(eight, tmp_path):
    step = tmp_path / "0"
    hf2orbax(eight[0], step, layout="maxtext", quiet=True)
    file = step / "items" / "_METADATA"
    text = file.read_text()
    file.write_text(text.replace("layers_1', 'mlp', 'wo'", "layers_1', 'mlp', 'gone'").replace('"wo"', '"gone"', 1))
    found = verify_manifest(step, quiet=True).differences
    assert any("mlp/gone/kernel" in text for text in found)
    assert not any("q_proj" in text for text in found), found
