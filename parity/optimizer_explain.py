"""What is wrong with an optimizer whose updates are off: its hyperparameters, fitted; its form; its decay, measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .adamw import FORMS, PUBLISHED, Form, Recipe, directions, global_norm
from .optimizer_probe import Inputs, Outputs, expected, limit_of

FITTED_LEAVES = 6  # leaves that hyperparameters are fitted to
STARTS = tuple(10.0**k for k in range(-3, 7))  # times the recipe's epsilon
SAME = 2e-3  # hyperparameters closer than that are the same: what a fit to float32 numbers can tell


def explain(given: Inputs, got: Outputs, recipe: Recipe) -> list[str]:
    """What is wrong with an optimizer whose updates are off, in sentences: dtypes, hyperparameters, form, decay."""
    if not all(np.isfinite(u).all() for steps in got.updates.values() for step in steps for u in step.values()):
        return ["its updates hold NaN or infinity: is a gradient of zero divided by an epsilon of zero?"]
    found = [
        f"the {name} moment is kept in {dtype}"
        for name, dtype in zip(("first", "second"), got.moment_dtypes, strict=False)
        if dtype != "float32"
    ]
    with np.errstate(all="ignore"):  # a fit tries anything on its way
        fitted = _fit(given, got, recipe)
        decays, coupled = _decays(given, got, recipe, fitted[0].learning_rate if fitted else recipe.learning_rate)
    own_rates = [] if fitted or found else _own_rates(given, got, recipe)
    if not (fitted or found or own_rates or coupled):
        found.append("it is not AdamW with any hyperparameters, nor with a mistake that is known")
    return found + (fitted[1] if fitted else own_rates) + coupled + decays


def _fit(given: Inputs, got: Outputs, recipe: Recipe) -> tuple[Recipe, list[str]] | None:
    """The hyperparameters that make the formula give these updates, their decay apart, and what of them is not the recipe's.

    The published form is tried first, then each known mistake; what needs the fewest words wins. None where nothing fits.
    """
    paths = list(given.parameters)
    paths = paths[:: max(1, len(paths) // FITTED_LEAVES)]
    runs = []  # (gradients, norms of all leaves, norms of the leaf, updates), each by step, values of all paths in a row
    for run, steps in given.gradients.items():
        of_leaf = [np.concatenate([np.full(g[p].size, np.linalg.norm(g[p])) for p in paths]) for g in steps]
        means = [
            _row({p: _mean(a, b, p) for p in paths}) for a, b in zip(got.updates[run], got.mirrored[run], strict=True)
        ]
        runs.append(([_row({p: g[p] for p in paths}) for g in steps], [global_norm(g) for g in steps], of_leaf, means))
    largest = max(max(norms) for _, norms, _, _ in runs)

    def residual(tried: Recipe, form: Form) -> np.ndarray:
        parts = []
        for gradients, norms, of_leaf, means in runs:
            computed = directions(gradients, of_leaf if form.clipping == "leaf" else norms, tried, form)
            for mean, (update, _, _) in zip(means, computed, strict=True):
                parts.append((update - mean) / max(_size(mean), 1e-300))
        return np.concatenate(parts)

    fits = []
    for form in FORMS:
        # A fit does not find an epsilon that is far away by itself.
        near = min(
            (recipe.epsilon * factor for factor in STARTS),
            key=lambda e: _size(residual(replace(recipe, epsilon=e), form)),
        )
        tried = _least_squares(residual, replace(recipe, epsilon=near), form)
        if _size(residual(tried, form)) <= limit_of(recipe) and tried.epsilon <= 1:
            fits.append((tried, _changed(recipe, tried, form, largest)))
            if form is PUBLISHED:
                break
    return min(fits, key=lambda fit: len(fit[1]), default=None)


def _size(values: np.ndarray) -> float:
    """Their root mean square."""
    return float(np.sqrt(np.mean(values**2)))


def _row(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.astype(np.float64).ravel() for x in arrays.values()])


def _least_squares(residual, recipe: Recipe, form: Form) -> Recipe:
    from scipy.optimize import least_squares

    rate, base = math.log(recipe.learning_rate), recipe.clip or 1.0
    start = np.array([0.0, _logit(recipe.beta1), _logit(recipe.beta2), math.log(recipe.epsilon), math.log(base)])

    def tried(x: np.ndarray) -> Recipe:
        factor, b1, b2, e, clip = np.clip(x, -60, 60)
        return replace(
            recipe,
            learning_rate=math.exp(rate + factor),
            beta1=_logistic(b1),
            beta2=_logistic(b2),
            epsilon=math.exp(e),
            clip=base if form.clipping == "always" else math.exp(clip),  # there it is what epsilon is, too
        )

    try:
        return tried(least_squares(lambda x: residual(tried(x), form), start, max_nfev=60).x)
    except ValueError:  # a residual that is not finite
        return recipe


def _changed(recipe: Recipe, tried: Recipe, form: Form, largest: float) -> list[str]:
    """The form where it is not the published one, and hyperparameters that are not the recipe's. largest: norm there was."""
    unclipped = tried.clip > largest * (1 - SAME)
    found = [] if form is PUBLISHED else [form.name]
    if unclipped and recipe.clip and form.clipping == "global":
        found.append("gradients are not clipped")
    for name, a, b in (
        ("the learning rate", recipe.learning_rate, tried.learning_rate),
        ("beta1", recipe.beta1, tried.beta1),
        ("beta2", recipe.beta2, tried.beta2),
        ("epsilon", recipe.epsilon, tried.epsilon),
    ):
        small = (1 - a, 1 - b) if name.startswith("beta") else (a, b)
        if abs(small[1] - small[0]) > SAME * small[0]:
            found.append(f"{name} is {b:.4g} in the optimizer, {a:.4g} in the recipe")
    if not unclipped and form.clipping != "none" and abs(tried.clip - recipe.clip) > SAME * recipe.clip:
        found.append(f"gradients are clipped to {tried.clip:.4g}, the recipe says {recipe.clip or 'not at all'}")
    return found


def _own_rates(given: Inputs, got: Outputs, recipe: Recipe) -> list[str]:
    """Leaves whose updates are the formula's but for a factor: a learning rate of their own."""
    wanted, factors = expected(given, recipe), {}
    for path in given.parameters:
        mean = _mean(got.updates["ordinary"][0], got.mirrored["ordinary"][0], path)
        right = wanted["ordinary"][path][0][0]
        factor = float((mean * right).sum() / (right * right).sum())
        if abs(factor - 1) > SAME and np.linalg.norm(mean - factor * right) <= SAME * np.linalg.norm(mean):
            factors.setdefault(f"{factor:.3g}", []).append(path)
    return [
        f"the learning rate of {_named(paths, given, recipe)} is {factor} times the recipe's"
        for factor, paths in factors.items()
    ]


def _decays(given: Inputs, got: Outputs, recipe: Recipe, rate: float) -> tuple[list[str], list[str]]:
    """(leaves whose weight decay is not the recipe's, measured from the difference of the two updates; those whose decay
    is no share of the parameter), in sentences. rate: the learning rate that multiplies it."""
    measured: dict[tuple[float, float], list[str]] = {}
    coupled = []
    for path, parameter in given.parameters.items():
        p = parameter.astype(np.float64)
        half = (got.updates["ordinary"][0][path].astype(np.float64) - got.mirrored["ordinary"][0][path]) / 2
        decay = -float((half * p).sum() / (p * p).sum()) / rate
        if (
            np.linalg.norm(half + rate * decay * p) > 0.05 * np.linalg.norm(half)
            and np.linalg.norm(half) > limit_of(recipe) * rate
        ):
            coupled.append(path)
        elif abs(decay - recipe.decay_of(path)) > SAME * max(recipe.weight_decay, 0.01):
            measured.setdefault((float(f"{decay:.3g}"), recipe.decay_of(path)), []).append(path)
    which = _named(coupled, given, recipe) if coupled else ""
    gone = f"the weight decay of {which} goes through the moments: it is added to the gradient"
    found = []
    for (decay, wanted), paths in measured.items():
        if wanted and abs(decay * rate / wanted - 1) <= 10 * SAME:
            found.append(f"the weight decay of {_named(paths, given, recipe)} is not multiplied by the learning rate")
        else:
            shown = 0.0 if abs(decay) < 1e-4 else decay
            found.append(
                f"the weight decay of {_named(paths, given, recipe)} is {shown:.3g}, the recipe says {wanted:.3g}"
            )
    return found, [gone] if coupled else []


def _named(paths: list[str], given: Inputs, recipe: Recipe) -> str:
    """Which leaves: all of a group, one, or a kind of leaf in all layers."""
    last = {path.rsplit("/", 1)[-1] for path in paths}
    groups = {
        "all leaves": set(given.parameters),
        "all leaves that decay": {p for p in given.parameters if recipe.decay_of(p)},
        f"every {min(last)}": {p for p in given.parameters if p.endswith(f"/{min(last)}")},
    }
    for name, group in groups.items():
        if set(paths) == group and len(paths) > 1:
            return name
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault("/".join("*" if part.isdigit() else part for part in path.split("/")), []).append(path)
    listed = [f"{kind} ({len(found)} leaves)" if len(found) > 1 else found[0] for kind, found in kinds.items()]
    more = f" and {len(listed) - 4} more kinds" if len(listed) > 4 else ""
    return ", ".join(listed[:4]) + more


def _mean(updates: dict, mirrored: dict, path: str) -> np.ndarray:
    """The update without its decay."""
    return (updates[path].astype(np.float64) + mirrored[path]) / 2


def _logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))
