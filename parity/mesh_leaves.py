"""What is wrong with the leaves of a tree that was restored onto a mesh: each against the tree read plainly, on every device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from ..olmo_jax.tree import Leaf, flatten

KINDS = {  # of faults: the criterion, and what is counted
    "absent": "leaves missing, unexpected or of another shape",
    "abstract": "leaves that are no array on the devices",
    "layout": "leaves laid out otherwise than wanted",
    "bits": "leaves that differ from the tree read plainly",
}


def find_faults(
    tree: object, wanted: Mapping[str, Leaf], mesh, shardings: Mapping | None, plain: Callable[[str], np.ndarray]
) -> tuple[dict[str, list[str]], dict[str, dict]]:
    """(sentences by kind, what was found of every leaf by path).

    shardings: a tree of the wanted ones; None where the restore has rules of its own: then every leaf must lie on all devices
    of the mesh, and leaves of one kind alike in all layers. plain reads one leaf by path. Every device's copy is compared.
    """
    import jax

    faults: dict[str, list[str]] = {kind: [] for kind in KINDS}
    flat = flatten(tree) if isinstance(tree, Mapping) else {}
    if not isinstance(tree, Mapping):
        faults["absent"].append(f"the restore gave a {type(tree).__name__}, a nested dict of arrays is wanted")
    faults["absent"] += [f"{path} is unexpected: the config has no such leaf" for path in flat if path not in wanted]
    arrays = {}
    for path, leaf in wanted.items():
        array = flat.get(path)
        if array is None:
            if isinstance(tree, Mapping):
                faults["absent"].append(f"{path} is missing")
        elif isinstance(array, jax.ShapeDtypeStruct):
            faults["abstract"].append(f"{path} is only a shape (ShapeDtypeStruct), its values were never restored")
        elif not isinstance(array, jax.Array):
            host = " on the host" if isinstance(array, np.ndarray) else ""
            faults["abstract"].append(f"{path} is a {type(array).__name__}{host}, a jax.Array on the mesh is wanted")
        elif array.is_deleted():
            faults["abstract"].append(f"{path} was deleted (donated to another computation?)")
        elif tuple(array.shape) != leaf.shape:
            faults["absent"].append(f"{path} has shape {tuple(array.shape)}, the config asks for {leaf.shape}")
        else:
            arrays[path] = array
    faults["layout"] += _layout_faults(arrays, mesh, shardings)
    found, differing = {}, {}
    for path, array in arrays.items():
        right = plain(path)
        found[path] = {
            "sha256": _sha256(right),
            "dtype": str(array.dtype),
            "sharding": str(getattr(array.sharding, "spec", array.sharding)),
        }
        fault = _differs(array, right)
        if fault:
            differing[path] = fault, array
    hashes = {entry["sha256"]: path for path, entry in found.items()}
    for path, (fault, array) in differing.items():
        faults["bits"].append(f"{path} {_looks_like(np.asarray(array), plain(path), path, hashes) or fault}")
    return faults, found


def _layout_faults(arrays: Mapping, mesh, shardings: Mapping | None) -> list[str]:
    devices = set(mesh.devices.flat)
    if shardings is not None:
        flat = flatten(shardings)
        return [
            f"{path} has sharding {array.sharding}, wanted {flat[path]}"
            for path, array in arrays.items()
            if not array.sharding.is_equivalent_to(flat[path], array.ndim)
        ]
    faults = []
    kinds: dict[str, dict[str, tuple]] = {}
    for path, array in arrays.items():
        if array.sharding.device_set != devices:
            faults.append(f"{path} lies on {len(array.sharding.device_set)} devices of the mesh's {len(devices)}")
        kind = "/".join("*" if part.isdigit() else part for part in path.split("/"))
        kinds.setdefault(kind, {})[path] = _places(array)
    for kind, places in kinds.items():
        usual, count = Counter(places.values()).most_common(1)[0]
        faults += [
            f"{path} is laid out otherwise than {count} of {len(places)} leaves {kind}: {arrays[path].sharding}"
            for path, own in places.items()
            if own != usual
        ]
    return faults


def _places(array) -> tuple:
    """Which part of it each device holds, in a form that can be compared."""
    by_device = array.sharding.devices_indices_map(array.shape)
    return tuple(
        sorted(
            (device.id, tuple(s.indices(n)[:2] for s, n in zip(index, array.shape, strict=True)))
            for device, index in by_device.items()
        )
    )


def _differs(array, right: np.ndarray) -> str:
    """What is not the same bit for bit on some device; "" where all of it is. A wider dtype that holds every value is the same."""
    if array.dtype.itemsize < right.dtype.itemsize:
        return f"is {array.dtype}, stored as {right.dtype}: its values were rounded"
    cast = right.astype(array.dtype)
    if not np.array_equal(_bits(cast.astype(right.dtype)), _bits(right)):
        return f"is {array.dtype}, stored as {right.dtype}: that does not hold its values"
    for shard in array.addressable_shards:
        mine, theirs = _bits(np.asarray(shard.data)), _bits(cast[shard.index])
        if not np.array_equal(mine, theirs):
            count = int((mine != theirs).sum())
            return f"differs in {count} of {mine.size} values on device {shard.device.id}"
    return ""


def _looks_like(got: np.ndarray, right: np.ndarray, path: str, hashes: Mapping[str, str]) -> str:
    """What a wrong leaf is instead, where that can be told."""
    if not np.any(got):
        return "is zero everywhere"
    other = hashes.get(_sha256(got.astype(right.dtype)))
    if other and other != path:
        return f"holds the values of {other}"
    if got.ndim == 2 and got.shape[0] == got.shape[1] and np.array_equal(_bits(got), _bits(right.T.astype(got.dtype))):
        return "is transposed"
    return ""


def _bits(array: np.ndarray) -> np.ndarray:
    """As integers, so that NaN equals itself and -0 differs from 0."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
