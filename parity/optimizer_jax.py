"""The JAX optimizer, the user's own or optax.adamw, in a process of its own: the probe's gradients, and three real steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..convert.mapping import apply_layout, weights
from ..convert.sources import Source, open_source
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import from_hf, to_hf
from ..olmo_jax.errors import BadInput
from ..olmo_jax.tree import flatten, unflatten
from . import optimizer_probe
from .adamw import Recipe
from .batches import Sequence
from .candidate_fn import LAST_LINES, function_entry, load
from .children import run_children, serve
from .devices import jax_settings, start_jax
from .gradient_sides import jax_backward
from .optimizer_probe import RUNS, STEPS, Inputs, Outputs
from .optimizer_steps import KINDS, file_of

OPTION = "[preflight] optimizer"
OURS = "optax.adamw"


def run_probe(
    config: Olmo3Config, given: Inputs, recipe: Recipe, spec: str | None, folder: Path, device: str | None, env: dict
) -> tuple[Outputs, dict | None]:
    """The probe's runs in a child process, and candidate_fn.function_entry. spec: package.module:function, None for optax.adamw.

    Raises BadInput where the user's function cannot be used; wrong updates are for the verdict.
    """
    folder.mkdir()
    request = {"task": "probe", "spec": spec, "recipe": asdict(recipe), "config": to_hf(config), "device": device}
    answer = run_children(__name__, folder, _alone(request), env, f"the process of {spec or OURS}")
    return _read_probe(folder, answer, {path: x.shape for path, x in given.parameters.items()}), answer["function"]


def run_steps(
    source: Source,
    sequences: list[Sequence],
    folder: Path,
    recipe: Recipe,
    spec: str | None,
    device: str | None,
    env: dict,
) -> dict:
    """optimizer_torch.steps of olmo_jax on a tree, in a child process; `moments` says whether they were found."""
    folder.mkdir()
    request = {
        "task": "steps",
        "spec": spec,
        "recipe": asdict(recipe),
        "device": device,
        "target": str(source.path),
        "allow_unknown_keys": list(source.config.allowed_unknown_keys),
        "sequences": [s.to_json() for s in sequences],
    }
    return run_children(__name__, folder, _alone(request), env, "the JAX side in its three optimizer steps")


def _alone(request: dict) -> dict:
    return {**request, "mesh": None, "processes": 1}


def make(spec: str | None, recipe: Recipe, parameters: dict):
    """The transformation from raw gradients to updates: the user's, or optax's own by the recipe. parameters: the tree."""
    if spec is None:
        import optax

        decays = unflatten({path: bool(recipe.decay_of(path)) for path in flatten(parameters)})
        parts = [optax.clip_by_global_norm(recipe.clip)] if recipe.clip else []
        return optax.chain(
            *parts,
            optax.adamw(
                recipe.learning_rate,
                b1=recipe.beta1,
                b2=recipe.beta2,
                eps=recipe.epsilon,
                weight_decay=recipe.weight_decay,
                mask=decays,
            ),
        )
    function, _ = load(spec, OPTION)
    made = _called(spec, "it", function, recipe.learning_rate, parameters)
    if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
        raise BadInput(f"{OPTION} {spec} returned a {type(made).__name__}, an optax.GradientTransformation is wanted")
    return made


def moments_of(state, parameters: dict) -> dict[str, tuple]:
    """(first, second) moment by leaf path, wherever in an optax state they lie: every part with mu and nu is looked at."""
    import jax

    found: dict[str, tuple] = {}

    def holds(part) -> bool:
        return hasattr(part, "mu") and hasattr(part, "nu")

    for part in jax.tree.leaves(state, is_leaf=holds):
        if holds(part):
            try:
                mu, nu = _by_path(part.mu), _by_path(part.nu)
            except (AttributeError, TypeError):  # not laid out like the parameters
                continue
            found |= {path: (mu[path], nu[path]) for path in mu if path in nu}
    shapes = {path: x.shape for path, x in flatten(parameters).items()}
    return {path: both for path, both in found.items() if all(shapes.get(path) == x.shape for x in both)}


def _by_path(tree) -> dict:
    import jax

    return {"/".join(str(k.key) for k in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def probe(spec: str | None, recipe: Recipe, given: Inputs) -> Outputs:
    """The probe's runs, here."""
    import jax
    import jax.numpy as jnp

    start = jax.tree.map(jnp.asarray, unflatten(given.parameters))
    optimizer = make(spec, recipe, start)
    step = jax.jit(optimizer.update)
    updates: dict[int, dict] = {1: {}, -1: {}}
    moments: dict[str, list] = {}
    for sign in updates:
        parameters = jax.tree.map(lambda x, sign=sign: sign * x, start)
        for run in RUNS:
            state = _called(spec, "init", optimizer.init, parameters)
            updates[sign][run], moments[run] = [], []
            for arrays in given.gradients[run]:
                gradients = jax.tree.map(jnp.asarray, unflatten(arrays))
                update, state = _called(spec, "update", step, gradients, state, parameters)
                updates[sign][run].append(_fitting(spec, update, given.parameters))
                found = moments_of(state, parameters)
                moments[run].append({path: tuple(np.asarray(x) for x in both) for path, both in found.items()})
    found = moments["ordinary"][-1].values()
    dtypes = tuple(", ".join(sorted({str(both[j].dtype) for both in found})) for j in range(2)) if found else ()
    return Outputs(updates[1], updates[-1], moments, dtypes)


def _write_probe(outputs: Outputs, folder: Path) -> dict:
    """The arrays as two files, float64 [run, step, 2, values of all leaves]; what is left as an answer."""
    found = list(outputs.moments["ordinary"][-1])
    rows = [[[_joined(x[run][t]) for x in (outputs.updates, outputs.mirrored)] for t in range(STEPS)] for run in RUNS]
    np.save(folder / "updates.npy", np.array(rows))
    rows = [
        [[_joined({p: outputs.moments[run][t][p][j] for p in found}) for j in range(2)] for t in range(STEPS)]
        for run in RUNS
    ]
    np.save(folder / "moments.npy", np.array(rows))
    return {"moments": found, "moment_dtypes": list(outputs.moment_dtypes)}


def _read_probe(folder: Path, answer: dict, shapes: dict[str, tuple[int, ...]]) -> Outputs:
    updates, moments = (np.load(folder / f"{name}.npy") for name in ("updates", "moments"))

    def parts(row: np.ndarray, paths) -> dict[str, np.ndarray]:
        ends = np.cumsum([int(np.prod(shapes[path])) for path in paths])
        return (
            {p: x.reshape(shapes[p]) for p, x in zip(paths, np.split(row, ends[:-1]), strict=True)} if len(ends) else {}
        )

    def both(row: np.ndarray) -> dict[str, tuple]:
        first, second = (parts(values, answer["moments"]) for values in row)
        return {path: (first[path], second[path]) for path in first}

    by_run = list(enumerate(RUNS))
    return Outputs(
        *({run: [parts(updates[i, t, k], list(shapes)) for t in range(STEPS)] for i, run in by_run} for k in range(2)),
        {run: [both(moments[i, t]) for t in range(STEPS)] for i, run in by_run},
        tuple(answer["moment_dtypes"]),
    )


def _joined(parts: dict) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(x).astype(np.float64).ravel() for x in parts.values())])


def _fitting(spec: str | None, update, parameters: dict) -> dict[str, np.ndarray]:
    """Updates by leaf path in the order of the parameters. Raises BadInput where they are of other leaves or shapes."""
    flat = flatten(update) if isinstance(update, dict) else {}
    found = {path: getattr(flat.get(path), "shape", None) for path in [*parameters, *flat]}
    wrong = [path for path, shape in found.items() if path not in parameters or shape != parameters[path].shape]
    if wrong:
        raise BadInput(f"{OPTION} {spec}: its updates are not like the parameters at {', '.join(wrong[:3])}")
    return {path: np.asarray(flat[path]) for path in parameters}


def _steps(request: dict, folder: Path) -> dict:
    import jax
    import jax.numpy as jnp
    import optax

    from ..convert.orbax_io import read_tree

    spec, recipe = request["spec"], _recipe(request)
    source = open_source(Path(request["target"]), allow_unknown_keys=tuple(request["allow_unknown_keys"]))
    sequences = [Sequence.from_json(s) for s in request["sequences"]]
    start = read_tree(source.path)
    parameters = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), start)
    backward = jax_backward(source.config, sequences, recipe.z_loss)
    optimizer = make(spec, recipe, parameters)
    state = _called(spec, "init", optimizer.init, parameters)

    def step(gradients, state, parameters):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    step, rows = jax.jit(step, donate_argnums=(1, 2)), []
    for t in range(STEPS):
        gradients, nll, z = backward(parameters)
        if t == 0:
            _write(folder, "gradient", gradients, source.config)
        norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients))))
        rows.append({"loss": nll + z, "nll": nll, "z": z, "global_norm": norm})
        parameters, state = _called(spec, "update", step, gradients, state, parameters)
    moved = jax.tree.map(lambda after, before: np.asarray(after) - np.asarray(before, np.float32), parameters, start)
    _write(folder, "update", moved, source.config)
    found = moments_of(state, parameters)
    whole = found.keys() == flatten(parameters).keys()
    if whole:
        for j, kind in enumerate(("first moment", "second moment")):
            _write(folder, kind, unflatten({path: both[j] for path, both in found.items()}), source.config)
    settings = {"implementation": f"olmo_jax, jax.grad, {spec or OURS}", **jax_settings()}
    return {"steps": rows, "moments": whole, "settings": settings}


def _write(folder: Path, kind: str, tree: dict, config: Olmo3Config) -> None:
    """Leaves as folder/<kind>/<HF name>.npy, float32 in HF orientation."""
    assert kind in KINDS
    (folder / kind).mkdir()
    flat = flatten(tree)
    for weight in weights(config):
        array = apply_layout(weight.layout, np.asarray(flat[weight.jax]).astype(np.float32))
        np.save(file_of(folder, kind, weight.hf), np.ascontiguousarray(array))


def _called(spec: str | None, what: str, function: Callable, *arguments):
    try:
        return function(*arguments)
    except BadInput:
        raise
    except Exception:
        if spec is None:
            raise
        lines = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
        raise BadInput(f"{OPTION} {spec}: {what} raised\n" + "\n".join(lines)) from None


def _recipe(request: dict) -> Recipe:
    return Recipe(**{**request["recipe"], "no_decay": tuple(request["recipe"]["no_decay"])})


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process."""
    start_jax(request, index, address)  # before anything else of JAX
    if request["task"] == "steps":
        return _steps(request, folder)
    recipe = _recipe(request)
    given = optimizer_probe.inputs(from_hf(request["config"], "the request"), recipe)
    answer = _write_probe(probe(request["spec"], recipe, given), folder)
    return answer | {"function": function_entry(request["spec"], OPTION)}


if __name__ == "__main__":
    serve(_run)
