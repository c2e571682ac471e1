"""A restore onto a mesh: a leaf that is zeroed, exchanged, wrongly laid out or never restored is caught and named."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.sharding import shardings
from olmo_parity.olmo_jax.tree import flatten, leaves, unflatten
from olmo_parity.parity import mesh_leaves, mesh_restore, preflight_options, settings, stage
from olmo_parity.parity.preflight_options import Preflight
from tests.parity.two_layers import two_layers

Q = "layers/1/self_attn/q_proj/kernel"  # square: nothing about its shape tells it from k, v, o or its transpose


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(str(two_layers(tmp_path_factory.mktemp("hf"))), str(folder), quiet=True)
    return folder


@pytest.fixture(scope="module")
def restored(tree):
    """(config, one-device mesh, leaves by path on it, the same read plainly)."""
    config = open_source(tree).config
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    plain = flatten(read_tree(tree))
    return config, mesh, flatten(jax.device_put(unflatten(plain), shardings(config, mesh))), plain


def faults_of(restored, plant):
    """Sentences by kind, of the leaves after plant(leaves) was at them."""
    config, mesh, right, plain = restored
    flat = dict(right)
    changed = plant(flat)
    got = unflatten(flat) if changed is None else changed
    faults, _ = mesh_leaves.find_faults(got, leaves(config), mesh, shardings(config, mesh), plain.__getitem__)
    return {kind: found for kind, found in faults.items() if found}


def test_a_right_restore_has_no_faults_and_every_leaf_its_hash(restored):
    config, mesh, right, plain = restored
    faults, found = mesh_leaves.find_faults(
        unflatten(right), leaves(config), mesh, shardings(config, mesh), plain.__getitem__
    )
    assert not any(faults.values()) and found.keys() == plain.keys()
    assert all(len(entry["sha256"]) == 64 for entry in found.values())


def swap(a, b):
    def plant(flat):
        flat[a], flat[b] = flat[b], flat[a]

    return plant


def one_bit(flat):
    values = np.array(flat[Q])
    values.view(np.uint16)[3, 4] ^= 1
    flat[Q] = jnp.asarray(values)


def minus_zero(flat):
    """Equal as a number, another bit."""
    values = np.array(flat["norm/scale"])
    values[0] = 0.0
    flat["norm/scale"] = jnp.asarray(-values)


def deleted(flat):
    flat[Q] = jnp.array(flat[Q], copy=True)
    flat[Q].delete()


PLANTS = {
    "zeroed": (lambda f: f.update({Q: jnp.zeros_like(f[Q])}), "bits", f"{Q} is zero everywhere"),
    "another layer's": (
        swap(Q, "layers/0/self_attn/q_proj/kernel"),
        "bits",
        f"{Q} holds the values of layers/0/self_attn/q_proj/kernel",
    ),
    "another projection": (
        swap(Q, "layers/1/self_attn/k_proj/kernel"),
        "bits",
        f"{Q} holds the values of layers/1/self_attn/k_proj/kernel",
    ),
    "transposed": (lambda f: f.update({Q: f[Q].T}), "bits", f"{Q} is transposed"),
    "one bit": (one_bit, "bits", f"{Q} differs in 1 of 4096 values on device 0"),
    "signs": (minus_zero, "bits", "norm/scale differs in 64 of 64"),
    "rounded": (
        lambda f: f.update({Q: f[Q].astype(jnp.float8_e4m3fn)}),
        "bits",
        f"{Q} is float8_e4m3fn, stored as bfloat16: its values were rounded",
    ),
    "float16": (lambda f: f.update({"norm/scale": f["norm/scale"].astype(jnp.float16) * 0 + 1}), "bits", "norm/scale"),
    "only a shape": (
        lambda f: f.update({Q: jax.ShapeDtypeStruct(f[Q].shape, f[Q].dtype)}),
        "abstract",
        f"{Q} is only a shape",
    ),
    "on the host": (lambda f: f.update({Q: np.asarray(f[Q])}), "abstract", f"{Q} is a ndarray on the host"),
    "deleted": (deleted, "abstract", f"{Q} was deleted"),
    "missing": (lambda f: [f.pop(Q), None][1], "absent", f"{Q} is missing"),
    "too many": (lambda f: f.update({"lm_head/bias": f["norm/scale"]}), "absent", "lm_head/bias is unexpected"),
    "another shape": (lambda f: f.update({Q: f[Q][:-1]}), "absent", f"{Q} has shape (63, 64)"),
    "no tree": (lambda f: list(f.values()), "absent", "the restore gave a list"),
    "nothing": (lambda f: {}, "absent", f"{Q} is missing"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_one_wrong_leaf_is_caught_and_named(name, restored):
    plant, kind, words = PLANTS[name]
    found = faults_of(restored, plant)
    assert any(words in sentence for sentence in found[kind]), found
    assert set(found) == {kind}


def test_zero_of_the_other_sign_differs_and_nan_equals_itself():
    right = np.array([0.0, np.nan, 1.0], np.float32)
    assert not mesh_leaves._differs(jnp.asarray(right), right)
    assert "differs in 1 of 3" in mesh_leaves._differs(jnp.asarray(np.array([-0.0, np.nan, 1.0], np.float32)), right)


def test_a_wider_dtype_that_holds_every_value_is_the_same(restored):
    assert not faults_of(restored, lambda f: f.update({path: x.astype(jnp.float32) for path, x in f.items()}))


LAYOUTS = """
import json, sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.sharding import shardings
from olmo_parity.olmo_jax.tree import flatten, leaves, unflatten
from olmo_parity.parity.mesh_leaves import find_faults

config, plain = open_source(sys.argv[1]).config, flatten(read_tree(sys.argv[1]))
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
wanted = flatten(shardings(config, mesh))
right = {p: jax.device_put(x, wanted[p]) for p, x in plain.items()}
q = "layers/1/self_attn/q_proj/kernel"
copies = [jax.device_put(plain[q], d) for d in jax.devices()]
copies[5] = copies[5] * 0
plants = {
    "right": right[q],
    "turned": jax.device_put(plain[q], NamedSharding(mesh, P("tensor", "fsdp"))),
    "whole": jax.device_put(plain[q], NamedSharding(mesh, P())),
    "one device": jax.device_put(plain[q], jax.devices()[0]),
    "one copy zeroed": jax.make_array_from_single_device_arrays(plain[q].shape, NamedSharding(mesh, P()), copies),
}
said = {}
for name, array in plants.items():
    for rules in (True, False):
        got = unflatten({**right, q: array})
        faults, _ = find_faults(got, leaves(config), mesh, unflatten(wanted) if rules else None, plain.__getitem__)
        said[f"{name} {rules}"] = {k: v for k, v in faults.items() if v}
print(json.dumps(said))
"""


def test_on_eight_devices_a_leaf_laid_out_wrongly_and_a_wrong_copy_are_caught(tree):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", LAYOUTS, tree], env=environment, capture_output=True, text=True)
    said = json.loads(done.stdout or done.stderr)
    assert said["right True"] == said["right False"] == {}
    for name in ("turned", "whole", "one device"):
        assert set(said[f"{name} True"]) == {"layout"} and Q in said[f"{name} True"]["layout"][0]
        alike = said[f"{name} False"]["layout"]  # without rules: not like the other layer's
        assert all(sentence.startswith(("layers/0/self_attn/q_proj", Q)) for sentence in alike), alike
    assert "lies on 1 devices of the mesh's 8" in said["one device False"]["layout"][0]
    copies = said["one copy zeroed True"]
    assert "on device 5" in copies["bits"][0] and f"{Q} differs" in copies["bits"][0]


def run(tree, **more):
    record = mesh_restore.run_restore(Preflight(candidate=tree, **more), lambda _: None)
    json.dumps(record)
    return record


RESTORES = """
import jax
from pathlib import Path
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.sharding import restore, shardings

def right(path, mesh):
    return restore(Path(path), open_source(path).config, mesh)

def forgets_a_norm_at_the_restart(path, mesh):
    tree = right(path, mesh)
    if mesh.size == 2 and "saved" in path:
        tree["layers"]["1"]["self_attn"]["q_norm"]["scale"] *= 0
    return tree

def raises(path, mesh):
    raise ValueError("no bucket here")
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "restores.py").write_text(RESTORES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_users_restore_that_zeroes_one_leaf_at_the_restart_alone_is_caught(tree, users):
    record = run(tree, mesh="fsdp=2,tensor=2", restart_mesh="fsdp=2", restore="restores:forgets_a_norm_at_the_restart")
    assert record["verdict"] == "fail"
    assert record["where"] == [
        "what the first mesh saved, onto fsdp=2: layers/1/self_attn/q_norm/scale is zero everywhere"
    ]
    assert record["function"]["file"] == str(users / "restores.py") and len(record["function"]["sha256"]) == 64
    assert "lays leaves out as wanted" in record["not_run"][0]  # no rules were given


def test_a_restore_that_raises_is_said_with_its_own_words(tree, users):
    with pytest.raises(BadInput, match=r"\[preflight\] restore restores:raises raised for[^$]*no bucket here"):
        run(tree, mesh="fsdp=2", restore="restores:raises")


def test_without_a_mesh_or_a_tree_it_is_not_run(tree):
    assert run(tree)["verdict"] == stage.NOT_RUN
    record = mesh_restore.run_restore(Preflight(mesh="fsdp=2"), print)
    assert record["verdict"] == stage.NOT_RUN


def test_what_does_not_fit_is_left_out_and_said(tree, monkeypatch):
    monkeypatch.setattr(mesh_restore, "available_bytes", lambda: 0)
    monkeypatch.setattr(mesh_restore.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    monkeypatch.setattr(mesh_restore, "_child", lambda request, folder, device: fake(request))
    record = run(tree, mesh="fsdp=2")
    assert record["verdict"] == "pass" and len(record["not_run"]) == 2
    assert "logits on the mesh: they need" in record["not_run"][0] and "do not fit in" in record["not_run"][1]


def fake(request):
    """A child that found everything right and ran nothing it was not asked for."""
    assert not request["logits"] and not request["save"]
    restored = [{"what": "onto", "faults": {kind: [] for kind in mesh_leaves.KINDS}, "leaves": {}}]
    return {
        "restored": restored, "logits": False, "axes": request["axes"], "simulated": True, "devices": ["cpu"],
        "parameters_per_device": 1, "peak_memory": 1, "function": None,
    }  # fmt: skip


def test_the_restart_is_on_a_quarter_of_the_devices_where_nothing_else_is_named():
    cases = {
        "fsdp=4,tensor=2": {"fsdp": 1, "tensor": 2}, "fsdp=64,tensor=8": {"fsdp": 16, "tensor": 8}, "tensor=8": {"tensor": 2},
        "fsdp=2,tensor=2": {"fsdp": 1, "tensor": 1}, "fsdp=2": {"fsdp": 1}, "fsdp=3": {"fsdp": 1}, "fsdp=6": {"fsdp": 3},
    }  # fmt: skip
    for text, wanted in cases.items():
        assert mesh_restore.meshes_of(text, None)[1] == wanted
    assert mesh_restore.meshes_of("fsdp=1", None) == [{"fsdp": 1}]
    assert mesh_restore.meshes_of("fsdp=2", "tensor=2") == [{"fsdp": 2}, {"tensor": 2}]
    for text, restart in (("data=4", None), ("fsdp=4", "fsdp=0"), ("fsdp", None)):
        with pytest.raises(BadInput, match="the meshes of preflight cannot be used"):
            mesh_restore.meshes_of(text, restart)


def test_rules_come_from_parity_toml_and_are_checked(tmp_path):
    def chosen(text):
        (tmp_path / "parity.toml").write_text(text)
        return preflight_options.choose({}, settings.load(tmp_path / "parity.toml", False))[0]

    found = chosen('mesh = "fsdp=8"\n[preflight]\nmesh = "fsdp=2"\n[preflight.rules]\nnorm = "fsdp"\nvocab = "whole"\n')
    assert found.rules == {"norm": "fsdp", "vocab": "whole"} and (found.mesh, found.gate.mesh) == ("fsdp=2", "fsdp=8")
    with pytest.raises(BadInput, match=r"\[preflight.rules\][^$]*norm is 'data', one of fsdp, tensor, whole"):
        chosen('[preflight.rules]\nnorm = "data"\n')
    for key in ("mesh", "restart_mesh"):
        with pytest.raises(BadInput, match="'data=2' is not one of"):
            chosen(f'[preflight]\n{key} = "data=2"\n')
    with pytest.raises(BadInput, match="unknown key 'norms'"):
        chosen('[preflight.rules]\nnorms = "fsdp"\n')
