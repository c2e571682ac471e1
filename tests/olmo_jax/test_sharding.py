"""Parameters on a mesh of eight simulated devices: where they lie, and that restoring leaves nothing behind."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.sharding import RULES, check_restored, restore, shardings
from olmo_parity.olmo_jax.tree import flatten, unflatten

SCRIPT = """
import tempfile
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.model import from_tree
from olmo_parity.olmo_jax.sharding import restore, shardings
from olmo_parity.olmo_jax.tree import flatten, random_tree

config, said = make_tiny_config(vocab_size=60, layer_types=("sliding_attention", "full_attention") * 2), {}
tree = make_lively_tree(config)
tokens = np.arange(24).reshape(4, 6)
forward = nnx.jit(lambda model, tokens: model(tokens))
alone = forward(from_tree(config, tree, dtype=jnp.float32), tokens)
folder = Path(tempfile.mkdtemp()) / "0"
ocp.Checkpointer(ocp.CompositeCheckpointHandler("state")).save(folder, ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
restored = restore(folder, config, mesh)
flat = flatten(restored)
said["devices"] = len(flat["lm_head/kernel"].sharding.device_set)
said["part"] = flat["lm_head/kernel"].addressable_shards[0].data.shape
said["specs"] = {path: str(tuple(array.sharding.spec)) for path, array in flat.items() if "layers/1/" in path}
said["same bits"] = all(np.asarray(flat[p]).tobytes() == x.tobytes() for p, x in flatten(tree).items())
for scan in (False, True):
    model = from_tree(config, restored, dtype=jnp.float32, scan_layers=scan)
    batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))
    said[f"delta {scan}"] = float(np.abs(forward(model, batch) - alone).max())
said["stacked"] = str(tuple(model.stacked[0].mlp.down_proj.kernel[...].sharding.spec))
said["cast"] = str(flatten(restore(folder, config, mesh, param_dtype=jnp.bfloat16))["norm/scale"].dtype)
made = jax.jit(lambda key: random_tree(config, key), out_shardings=shardings(config, mesh))(jax.random.key(0))
said["made"] = str(tuple(made["lm_head"]["kernel"].sharding.spec))
wrong = make_tiny_config(vocab_size=58, layer_types=("sliding_attention", "full_attention") * 3, tie_word_embeddings=True)
try:
    restore(folder, wrong, mesh)
except BadInput as error:
    said["faults"] = error.faults
try:
    restore(folder / "no", config, mesh)
except BadInput as error:
    said["nowhere"] = str(error)
print(json.dumps(said))
"""


def test_a_tree_is_restored_onto_eight_devices_and_computes_the_same(run_alone):
    said = run_alone(SCRIPT, flags="--xla_force_host_platform_device_count=8")
    assert said["devices"] == 8
    assert said["part"] == [8, 30]  # [32, 60] over fsdp 4 and tensor 2
    assert said["specs"] == {
        "layers/1/self_attn/q_proj/kernel": "('fsdp', 'tensor')",
        "layers/1/self_attn/k_proj/kernel": "('fsdp', 'tensor')",
        "layers/1/self_attn/v_proj/kernel": "('fsdp', 'tensor')",
        "layers/1/self_attn/o_proj/kernel": "('tensor', 'fsdp')",
        "layers/1/self_attn/q_norm/scale": "(None,)",
        "layers/1/self_attn/k_norm/scale": "(None,)",
        "layers/1/mlp/gate_proj/kernel": "('fsdp', 'tensor')",
        "layers/1/mlp/up_proj/kernel": "('fsdp', 'tensor')",
        "layers/1/mlp/down_proj/kernel": "('tensor', 'fsdp')",
        "layers/1/post_attention_layernorm/scale": "(None,)",
        "layers/1/post_feedforward_layernorm/scale": "(None,)",
    }
    assert said["same bits"]
    assert said["delta False"] <= 2e-5 and said["delta True"] <= 2e-5
    assert said["stacked"] == "(None, 'tensor', 'fsdp')"
    assert said["cast"] == "bfloat16"
    assert said["made"] == "('fsdp', 'tensor')"
    assert len(said["faults"]) == 2 * 11 + 2  # two layers missing, the embedding's shape, a head too many
    assert "lm_head/kernel is unexpected: the config has no such leaf" in said["faults"]
    assert "layers/5/mlp/up_proj/kernel is missing" in said["faults"]
    assert "embed_tokens/embedding has shape (60, 32), the config asks for (58, 32)" in said["faults"]
    assert "no is not a folder" in said["nowhere"]


def one_device_mesh(*kinds):
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"), axis_types=kinds or None)


def test_every_leaf_must_be_concrete_and_where_it_was_wanted(tiny_config, lively_tree):
    config = tiny_config()
    wanted = shardings(config, one_device_mesh())
    tree = jax.device_put(lively_tree(config), wanted)
    check_restored(tree, config, wanted)
    flat = flatten(tree)
    flat["norm/scale"] = jax.ShapeDtypeStruct((32,), np.float32)
    with pytest.raises(BadInput, match="norm/scale is only a shape"):
        check_restored(unflatten(flat), config, wanted)
    flat = flatten(tree)
    flat["norm/scale"] = np.ones(32, np.float32)
    with pytest.raises(BadInput, match="norm/scale is a ndarray on the host"):
        check_restored(unflatten(flat), config, wanted)


def test_a_dimension_that_the_mesh_does_not_divide_stays_whole(tiny_config):
    mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {path: s.spec for path, s in flatten(shardings(tiny_config(), mesh)).items()}
    assert specs["lm_head/kernel"] == PartitionSpec("fsdp", None)  # 61 tokens over 2
    assert specs["layers/0/mlp/up_proj/kernel"] == PartitionSpec("fsdp", "tensor")


def test_the_users_own_rules_and_mesh_axes_count(tiny_config):
    config, mesh = tiny_config(), jax.sharding.AbstractMesh((2,), ("model",), axis_types=(AxisType.Auto,))
    own = flatten(shardings(config, mesh, {**RULES, "mlp": "model"}))
    assert own["layers/0/mlp/up_proj/kernel"] == NamedSharding(mesh, PartitionSpec(None, "model"))
    assert own["layers/0/self_attn/q_proj/kernel"].spec == PartitionSpec(None, None)
    with pytest.raises(BadInput, match="no entry for the logical axis 'vocab'"):
        shardings(config, mesh, {name: None for name in RULES if name != "vocab"})


def test_a_mesh_with_explicit_axes_is_refused_with_the_way_out(tiny_config):
    with pytest.raises(BadInput, match="fsdp, tensor are not automatic.*axis_types"):
        shardings(tiny_config(), one_device_mesh(AxisType.Explicit, AxisType.Explicit))


def test_a_folder_that_orbax_would_take_for_another_is_not_restored(tmp_path):
    (tmp_path / "a\\b").mkdir()
    with pytest.raises(BadInput, match="backslash"):
        restore(tmp_path / "a\\b", None, None)
