"""Which axis of which leaf lies along which axis of the device mesh, and restoring an Orbax tree straight onto a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .config import Olmo3Config
from .errors import BadInput
from .tree import check_tree, flatten, leaves, unflatten

# Logical axis to mesh axis, None for copies everywhere. Change it by passing your own.
RULES: Mapping[str, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
}


def shardings(config: Olmo3Config, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict:
    """A NamedSharding for every leaf, as a tree like the parameters'.

    Mesh axes that the mesh does not have are left out. A dimension that its mesh axis does not divide stays whole along it:
    OLMo's vocabulary of 100278 is 2 x 3^4 x 619. Raises BadInput for rules that lack a logical axis,
    and for a mesh with explicit axes.
    """
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]
    if explicit:  # jax.make_mesh makes explicit axes unless told otherwise; then the model's lookups would not compile
        raise BadInput(
            f"mesh axes {', '.join(explicit)} are not automatic: the compiler lays out this model's activations. "
            "Make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
        )
    found, faults = {}, set()
    for path, leaf in leaves(config).items():
        spec = []
        for length, logical in zip(leaf.shape, leaf.logical, strict=True):
            if logical not in rules:
                faults.add(f"the rules have no entry for the logical axis {logical!r}; None means copies everywhere")
            axis = rules.get(logical)
            divides = axis in mesh.shape and length % mesh.shape[axis] == 0
            spec.append(axis if divides else None)
        found[path] = NamedSharding(mesh, PartitionSpec(*spec))
    if faults:
        raise BadInput("parameters cannot be laid out on the mesh", sorted(faults))
    return unflatten(found)


def restore(path: str | Path, config: Olmo3Config, mesh: Mesh, *, rules: Mapping = RULES, param_dtype=None) -> dict:
    """The tree of an Orbax step folder, or of an item that is named, as it was written, each device reading its own part.

    param_dtype None keeps each leaf's stored dtype. Raises BadInput naming every leaf that the folder lacks or has too
    many, that has another shape, or that did not come back as a concrete array of the wanted sharding.
    """
    from orbax.checkpoint import v1 as ocp

    if "://" not in str(path):
        path = Path(path).absolute()
        if not path.is_dir():
            raise BadInput(f"{path} is not a folder")
        if "\\" in str(path):  # Orbax's store takes it for a slash, and reads another folder
            raise BadInput(f"{path} has a backslash in its name: rename the folder, or name a link to it")
    # One of several items of a step is loaded by its name: as a path of its own Orbax takes it for no checkpoint.
    which = {}
    if isinstance(path, Path) and (path / "_METADATA").is_file() and (path.parent / "_CHECKPOINT_METADATA").is_file():
        path, which = path.parent, {"checkpointable_name": path.name}
    stored = flatten(ocp.metadata(path, **which).metadata)
    wanted, placed = leaves(config), flatten(shardings(config, mesh, rules))
    # Before anything is read: Orbax itself would cut or pad a leaf to the shape that is asked for.
    faults = [f"{name} is missing" for name in wanted if name not in stored]
    faults += [f"{name} is unexpected: the config has no such leaf" for name in stored if name not in wanted]
    faults += [
        f"{name} has shape {tuple(stored[name].shape)}, the config asks for {leaf.shape}"
        for name, leaf in wanted.items()
        if name in stored and tuple(stored[name].shape) != leaf.shape
    ]
    if faults:
        raise BadInput(f"{path} does not fit the config", faults)
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, param_dtype or stored[name].dtype, sharding=placed[name])
        for name, leaf in wanted.items()
    }
    tree = ocp.load(path, unflatten(target), **which)
    check_restored(tree, config, unflatten(placed), f"what was restored from {path}")
    return tree


def check_restored(tree: Mapping, config: Olmo3Config, wanted: Mapping, what: str = "the restored tree") -> None:
    """Every leaf a concrete jax.Array of its wanted sharding. A leaf that Orbax skipped stays a ShapeDtypeStruct, without
    a word; training would start from whatever fills its place.

    wanted: a tree of shardings. Raises BadInput naming every leaf at fault.
    """
    flat, shards = check_tree(leaves(config), tree, what), flatten(wanted)
    faults = []
    for path, array in flat.items():
        if not isinstance(array, jax.Array):
            faults.append(f"{path} is a {type(array).__name__} on the host, a jax.Array on the mesh is wanted")
        elif not array.sharding.is_equivalent_to(shards[path], array.ndim):
            faults.append(f"{path} has sharding {array.sharding}, wanted {shards[path]}")
    if faults:
        raise BadInput(f"{what} is not laid out as wanted", faults)
