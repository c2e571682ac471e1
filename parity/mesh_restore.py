"""The stage restore: the tree on the wanted mesh, bit for bit, computing the same; and again on a smaller mesh."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

from ..convert import places
from ..convert.orbax_io import open_item, resolve_tree
from ..convert.sources import ORBAX_CONFIG, Source, open_source
from ..olmo_jax.errors import BadInput
from . import batches, gate, metrics
from .candidate_fn import LAST_LINES, function_entry, load
from .children import run_children, serve
from .devices import JAX_PLATFORMS, full_float32_jax, parse_mesh
from .footprint import SHARE, available_bytes, candidate_bytes
from .mesh_leaves import KINDS, find_faults
from .preflight_options import WHOLE, Preflight
from .stage import judged, not_run

NAME = LEG = "restore"
OPTION = "[preflight] restore"
SMALLER = 4  # a restart on a quarter of the devices, where nobody names another mesh
# What right implementations differ by at most (gate.DEFAULT, bench/float32_noise.py): leaves are equal bit for bit before this
# is looked at, so what is left to find are faults of function, many times above.
NOISE = {"max_abs_delta_logit_shift_free": 1.5e-5, "spread_of_logits": 1.0, "kl_max": 2.5e-11}
ADVICE = "restore with abstract arrays that carry shape, dtype and sharding of every leaf (docs/preflight.md)"


def run_restore(options: Preflight, say) -> dict:
    """Restore onto the mesh and onto a smaller one, from the tree and from what the first mesh saved; compare bits and logits."""
    started = time.monotonic()
    text = options.mesh or options.gate.mesh
    if text is None:
        return not_run(NAME, "no mesh is named")
    if options.candidate is None:
        return not_run(NAME, "no --candidate was given beside --candidate-fn")
    meshes = meshes_of(text, options.restart_mesh)
    source = open_source(options.candidate, options.gate.allow_unknown_keys)
    if source.kind != "orbax":
        raise BadInput(f"--candidate {options.candidate} is of the {source.kind} form, an Orbax tree is wanted")
    if places.is_remote(source.path) and source.path.bucket.scheme == "s3" and options.restore is None:
        raise BadInput(
            f"--candidate {options.candidate}: onto a mesh Orbax restores it, and Orbax reads no s3://. Copy it here first"
        )
    folder = Path(tempfile.mkdtemp(prefix="olmo-parity-"))
    try:
        left = _left_out(source, folder)
        runs, saved = [], None
        for number, axes in enumerate(meshes):
            first = number == 0
            request = {
                "path": str(source.path),
                "again": str(saved) if saved else None,
                "save": str(folder / "saved" / "0") if first and len(meshes) > 1 and not left["save"] else None,
                "logits": not left["logits"],
                "alone": first,
                "axes": axes,
                "spec": options.restore,
                "rules": dict(options.rules),
                "allow_unknown_keys": list(options.gate.allow_unknown_keys),
            }
            saved = Path(request["save"]) if request["save"] else None
            say(f"restoring onto {_name(axes)}")
            runs.append(_child(request, folder / str(number), options.gate.candidate_device))
        criteria, where = _judge(runs, folder, source, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    parts = [why for why in left.values() if why]
    if options.restore and not options.rules:
        parts.append(f"whether {options.restore} lays leaves out as wanted, and not only alike: name [preflight.rules]")
    if len(meshes) == 1:
        parts.append("a restart on another mesh: one device is the smallest there is, name restart_mesh")
    return judged(
        NAME,
        started,
        criteria,
        parts_not_run=parts,
        said=[_described(run) for run in runs],
        where=where,
        advice=[ADVICE],
        function=runs[0]["function"],
        meshes=[{key: run[key] for key in ("axes", "devices", "simulated", "peak_memory", "parameters_per_device")} for run in runs],
        leaves=runs[0]["restored"][0]["leaves"],
    )  # fmt: skip


def meshes_of(text: str, restart: str | None) -> list[dict[str, int]]:
    """The mesh, and the one of the restart: by default a quarter of the devices, or as few as the axes can be divided to."""
    faults: list[str] = []  # what stands in parity.toml was checked when it was read
    axes, other = parse_mesh(text, faults), parse_mesh(restart, faults) if restart else None
    if faults:
        raise BadInput("the meshes of preflight cannot be used", faults)
    return [axes] + [m for m in [other or smaller(axes)] if m != axes]


def smaller(axes: dict[str, int]) -> dict[str, int]:
    """A mesh of a quarter of the devices, taken from the axes in order; half, or one device along an axis, if need be."""
    found, factor = dict(axes), SMALLER
    for axis, size in axes.items():
        common = math.gcd(size, factor)
        found[axis], factor = size // common, factor // common
    if found == axes:
        found[max(axes, key=axes.get)] = 1
    return found


def _left_out(source: Source, folder: Path) -> dict[str, str]:
    """Why a part cannot be run here, by part; "" where it can."""
    needed = 2 * candidate_bytes(source, _sequences(source), "float32")
    memory, disk = available_bytes() * SHARE, shutil.disk_usage(folder).free
    gib = 2**30
    return {
        "logits": ""
        if needed <= memory
        else f"logits on the mesh: they need about {needed / gib:.1f} GiB, {memory / gib:.1f} are to be had",
        "save": ""
        if source.nbytes * 1.1 <= disk
        else f"a tree saved by one mesh and restored by the other: {source.nbytes / gib:.1f} GiB do not fit in {folder.parent}",
    }


def _sequences(source: Source) -> list[batches.Sequence]:
    """Packed documents: the shortest of the built-in sequences."""
    return batches.built_in(source.config)[-1:]


def _child(request: dict, folder: Path, device: str | None) -> dict:
    folder.mkdir()
    count = math.prod(request["axes"].values())
    environment = dict(os.environ)
    if device:
        environment["JAX_PLATFORMS"] = JAX_PLATFORMS[device]
    # Of no effect where real devices are used. Of two contrary flags the last counts.
    simulate = f"--xla_force_host_platform_device_count={count}"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {simulate}".strip()
    what = f"the process that restores onto {_name(request['axes'])}"
    return run_children(__name__, folder, {**request, "processes": 1}, environment, what)


def _judge(
    runs: list[dict], folder: Path, source: Source, options: Preflight
) -> tuple[list[gate.Criterion], list[str]]:
    criteria, where = [], []
    for run in runs:
        for restored in run["restored"]:
            for kind, what in KINDS.items():
                faults = restored["faults"][kind]
                criteria.append(gate.count_criterion(f"{restored['what']}: {what}", LEG, len(faults), "leaves"))
                where += [f"{restored['what']}: {fault}" for fault in faults]
    if not runs[0]["logits"]:
        return criteria, where
    tokens = _sequences(source)[0].tokens
    alone = np.load(folder / "0" / "alone.npy", mmap_mode="r")
    for number, run in enumerate(runs):
        if run["logits"]:
            stats = metrics.token_stats(alone, np.load(folder / str(number) / "mesh.npy", mmap_mode="r"), tokens)
            summary = metrics.summarise(metrics.TokenStats.join(stats), np.arange(len(tokens)))
            for c in gate.float32_criteria(summary, NOISE, gate.PROFILES[options.gate.profile], options.gate.limits):
                name = f"{_name(run['axes'])} against one device: {c.name}"
                criteria.append(gate.Criterion(**{**vars(c), "name": name, "leg": LEG}))
    return criteria, where


def _name(axes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _described(run: dict) -> str:
    simulated = "simulated " if run["simulated"] else ""
    return (
        f"{_name(run['axes'])}: {len(run['devices'])} {simulated}devices ({run['devices'][0]}), parameters "
        f"{run['parameters_per_device'] / 2**20:.4g} MiB on one of them, peak memory of the process {run['peak_memory'] / 2**30:.2f} GiB"
    )


def _mesh(axes: dict[str, int]):
    """(mesh, is it simulated): of real devices where there are enough, else of the host's."""
    import jax
    from jax.sharding import AxisType, Mesh

    count = math.prod(axes.values())
    try:
        devices = jax.devices()
        if len(devices) < count:
            devices = jax.devices("cpu")
    except Exception as error:  # a platform that is not there ends in an AssertionError without a word
        platforms = os.environ.get("JAX_PLATFORMS") or "not set"
        raise BadInput(f"JAX does not start with JAX_PLATFORMS {platforms}: {error or type(error).__name__}") from None
    if len(devices) < count:
        raise BadInput(f"mesh {_name(axes)} is {count} devices, JAX finds {len(devices)} and simulates no more")
    grid = np.array(devices[:count]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes)), devices[0].platform == "cpu"


def _restored(spec: str | None, path, source: Source, mesh, rules: dict):
    """The tree by the user's function, or by ours."""
    from .candidate import on_mesh

    if spec is None:
        return on_mesh(path, source.config, mesh, rules)
    function, _ = load(spec, OPTION)
    try:
        return function(str(path), mesh)
    except Exception:
        lines = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
        raise BadInput(f"{OPTION} {spec} raised for {path}\n" + "\n".join(lines)) from None


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process: restore, compare, run, save."""
    import jax
    import jax.numpy as jnp

    from ..olmo_jax.sharding import RULES, shardings
    from ..olmo_jax.tree import flatten, leaves, unflatten
    from .candidate import logits_function, row_logits

    full_float32_jax()
    spec = request["spec"]
    mesh, simulated = _mesh(request["axes"])
    source = open_source(request["path"], tuple(request["allow_unknown_keys"]))
    reader = open_item(resolve_tree(source.path).item)
    wanted = leaves(source.config)
    rules = {**RULES, **{name: None if axis == WHOLE else axis for name, axis in request["rules"].items()}}
    placed = shardings(source.config, mesh, rules) if spec is None or request["rules"] else None
    answer = {"restored": [], "logits": False, "axes": request["axes"], "simulated": simulated}
    trees = {f"onto {_name(request['axes'])}": source.path}
    if request["again"]:
        trees[f"what the first mesh saved, onto {_name(request['axes'])}"] = Path(request["again"])
    tree = None
    for what, path in trees.items():
        got = _restored(spec, path, source, mesh, rules)
        faults, found = find_faults(got, wanted, mesh, placed, reader.read)
        answer["restored"].append({"what": what, "faults": faults, "leaves": found})
        tree = got if tree is None else tree
    whole = not any(
        faults for kind, faults in answer["restored"][0]["faults"].items() if kind in ("absent", "abstract")
    )
    if whole and request["logits"]:
        with jax.default_device(mesh.devices.flat[0]):
            row = _sequences(source)[0]
            np.save(folder / "mesh.npy", row_logits(logits_function(source.config, tree, jnp.float32), row))
            if request["alone"]:
                plain = unflatten({path: reader.read(path) for path in wanted})
                np.save(folder / "alone.npy", row_logits(logits_function(source.config, plain, jnp.float32), row))
        answer["logits"] = True
    if whole and request["save"]:
        _save(tree, source, Path(request["save"]))
    held = sum(s.data.nbytes for x in flatten(tree).values() for s in x.addressable_shards[:1]) if whole else 0
    return answer | {
        "devices": [d.device_kind for d in mesh.devices.flat],
        "parameters_per_device": held,
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "function": function_entry(spec, OPTION),
    }


def _save(tree, source: Source, step: Path) -> None:
    """As a training run on this mesh would, in our layout."""
    import orbax.checkpoint as ocp

    step.parent.mkdir()
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state"))
    checkpointer.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
    (step / ORBAX_CONFIG).write_bytes(source.config_file.read_bytes())


if __name__ == "__main__":
    serve(_run)
