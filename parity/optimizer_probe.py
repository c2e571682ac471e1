"""An optimizer alone, on gradients made for it: its updates and moments against the formula.

Real gradients hide much: Adam's first step is nearly their sign, epsilon shows only where sqrt(v) is of its size, and
clipping only where its factor changes from step to step. So three short runs have gradients of ordinary size, gradients
that are clipped to different degrees, and gradients of epsilon's size; each is run with the parameters and with their
negatives, so that the half difference of the two updates is the decay alone, and their mean the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..convert.mapping import weights
from ..olmo_jax.config import Olmo3Config
from .adamw import Recipe, directions, global_norm
from .gate import Criterion, count_criterion

LEG = "optimizer"
STEPS = 3
SEED = 1711
SHORTEST = 8  # values along the shortest axis of a probe leaf
LIMIT = 1e-4
REASON = (
    "over 200 times the largest difference measured between optax in float32 and the formula in float64 (5e-7 on shapes of "
    "the fixtures, the 7B and the 32B); a weight decay one percent off is 1e-3, beta2 0.951 for 0.95 is 4e-4, epsilon 10% off 5e-2"
)
# Global norm of each step's gradients, in units of the clip; for `tiny` the size of a single value, in units of epsilon.
RUNS = {
    "ordinary": (0.9, 0.3, 0.6),
    "clipped":  (10.0, 0.5, 3.0),
    "tiny":     (1.0, 3.0, 0.5),
}  # fmt: skip
ABOUT = {
    "ordinary": "gradients of ordinary size",
    "clipped": "gradients to be clipped",
    "tiny": "gradients of epsilon's size",
}
SPIKE = 2.0  # times the norm of everything else


@dataclass(frozen=True)
class Inputs:
    """What an optimizer is given: arrays by leaf path, float32."""

    parameters: dict[str, np.ndarray]
    gradients: dict[str, list[dict[str, np.ndarray]]]  # by run, one a step


@dataclass(frozen=True)
class Outputs:
    """What it gave, by run, step by step, by leaf path."""

    updates: dict[str, list[dict[str, np.ndarray]]]
    mirrored: dict[str, list[dict[str, np.ndarray]]]  # updates with the parameters' negatives
    moments: dict[
        str, list[dict[str, tuple[np.ndarray, np.ndarray]]]
    ]  # (first, second); leaves whose moments were found
    moment_dtypes: tuple[str, ...] = ()  # of the two, where they were found


def leaf_shapes(config: Olmo3Config) -> dict[str, tuple[int, ...]]:
    """The leaves of a model of this config, small: equal axes stay equal, longer ones longer, names and ranks are kept.

    That is what a rule for a leaf's weight decay can look at.
    """
    found = {w.jax: w.jax_shape for w in weights(config)}
    lengths = sorted({n for shape in found.values() for n in shape})
    return {path: tuple(SHORTEST + lengths.index(n) for n in shape) for path, shape in found.items()}


def inputs(config: Olmo3Config, recipe: Recipe) -> Inputs:
    """The same for the same config and recipe. One row of the embedding has no gradient, as a token that never occurs."""
    rng = np.random.default_rng(SEED)
    shapes = leaf_shapes(config)
    parameters = {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()}
    gradients = {}
    for run, scales in RUNS.items():
        gradients[run] = []
        for scale in scales:
            g = {path: rng.standard_normal(shape) for path, shape in shapes.items()}
            for path, values in g.items():
                if path.endswith("/embedding"):
                    values[-1] = 0.0
                    if run == "clipped":  # a spike: shows whether single values or leaves are clipped
                        values[0, 0] = SPIKE * global_norm(g)
            size = scale * recipe.epsilon if run == "tiny" else scale * (recipe.clip or 1.0) / global_norm(g)
            gradients[run].append({path: (size * values).astype(np.float32) for path, values in g.items()})
    return Inputs(parameters, gradients)


def expected(given: Inputs, recipe: Recipe) -> dict[str, dict[str, list]]:
    """By run and leaf: adamw.directions of it."""
    found = {}
    for run, steps in given.gradients.items():
        norms = [global_norm(g) for g in steps]
        found[run] = {path: directions([g[path] for g in steps], norms, recipe) for path in given.parameters}
    return found


def limit_of(recipe: Recipe) -> float:
    """The limit of every relative error. 1 - beta^t loses digits in float32: measured 1e-5 with beta2 0.999, 1e-4 with 0.9999."""
    return max(LIMIT, 2.0**-23 / (1 - max(recipe.beta1, recipe.beta2)))


def judge(given: Inputs, got: Outputs, recipe: Recipe, who: str) -> dict:
    """The largest relative L2 errors of updates and moments against the formula, by run and by moment; no arrays.

    who: whose optimizer it is.
    """
    wanted, updates, moments = expected(given, recipe), [], {"first": [], "second": []}
    for run in RUNS:
        for path, steps in wanted[run].items():
            decay = -recipe.learning_rate * recipe.decay_of(path) * given.parameters[path].astype(np.float64)
            for t, (direction, *both) in enumerate(steps):
                at = {"run": run, "leaf": path, "step": t + 1}
                for side, sign in ((got.updates, 1), (got.mirrored, -1)):
                    updates.append(at | {"relative_error": _relative(side[run][t][path], direction + sign * decay)})
                for name, mine, right in zip(moments, got.moments[run][t].get(path, ()), both, strict=False):
                    moments[name].append(at | {"relative_error": _relative(mine, right)})
    return {
        "optimizer": who,
        "leaves": len(given.parameters),
        "worst": {run: _worst([row for row in updates if row["run"] == run]) for run in RUNS},
        "moments": {name: _worst(rows) for name, rows in moments.items()},
        "moment_dtypes": list(got.moment_dtypes),
        "limit": limit_of(recipe),
    }


def criteria(record: dict, leg: str = LEG) -> list[Criterion]:
    """Of the record of `judge`: one for each run, one for each moment where they were found."""
    who, found = record["optimizer"], []
    rows = [(f"worst update, {ABOUT[run]}", row) for run, row in record["worst"].items()]
    rows += [(f"worst {name} moment", row) for name, row in record["moments"].items()]
    for what, row in rows:
        if row is None:
            why = "no mu and nu were found in its state"
            found.append(count_criterion(f"{who}: {what}", leg, 0, "of its norm", unread=why))
        else:
            name = f"{who}: {what} ({row['leaf']}, step {row['step']})"
            found.append(Criterion(name, leg, row["relative_error"], record["limit"], "of its norm", REASON))
    return found


def _worst(rows: list[dict]) -> dict | None:
    """The row with the largest error; one that is NaN is the worst. None where there is none."""
    return max(
        rows,
        key=lambda r: r["relative_error"] if r["relative_error"] == r["relative_error"] else math.inf,
        default=None,
    )


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """‖got - wanted‖ / ‖wanted‖; NaN where got is not finite, which fails."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = float(np.linalg.norm(got.astype(np.float64) - wanted))
    size = float(np.linalg.norm(wanted))
    return error / size if size else (0.0 if error == 0 else math.inf if error == error else math.nan)
