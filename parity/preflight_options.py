"""What may be chosen for a run of preflight: the gate's options, and the [preflight] table of parity.toml."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..olmo_jax.errors import BadInput
from . import heldout, loader, settings
from .adamw import Recipe
from .devices import MESH_AXES, parse_mesh
from .options import DEFAULTS, GateOptions

SECTION = "preflight"
STAGES = {  # in the order they run; what each looks at
    "weights": "weights, bit for bit",
    "logits":  "logits, both legs of the gate",
    "step0":   "loss, gradients and three optimizer steps",
    "restore": "restore on the mesh, and a restart on another",
    "loader":  "data loader, as several processes and after a restart",
    "heldout": "loss on held-out text, over a series of checkpoints",
}  # fmt: skip
KEYS = {  # of [preflight]; kinds as in settings.KEYS
    "loader":       settings.TABLE,  # of loader.KEYS
    "source":       settings.PATH,   # what the weights are verified against, where that is not the reference
    "optimizer":    settings.TEXT,   # package.module:function, docs/preflight.md
    "recipe":       settings.TABLE,  # of RECIPE_KEYS
    "restore":      settings.TEXT,   # package.module:function, docs/preflight.md
    "mesh":         settings.TEXT,   # fsdp=4,tensor=2
    "restart_mesh": settings.TEXT,   # of the restart; a quarter of the devices where it is left out
    "rules":        settings.TABLE,  # of RULE_KEYS: mesh axis by logical axis
    "strict":       settings.FLAG,
    "keep_going":   settings.FLAG,
    "json":         settings.PATH,   # of preflight; those beside reference and candidate are the gate's
    "junit":        settings.PATH,
    "markdown":     settings.PATH,
}  # fmt: skip
RECIPE_KEYS = {f.name: settings.TEXTS if f.name == "no_decay" else settings.NUMBER for f in fields(Recipe)}
RULE_KEYS = dict.fromkeys(("embed", "vocab", "heads", "kv_heads", "mlp", "norm"), settings.TEXT)
WHOLE = "whole"  # of a rule: not split
SMALLEST_EPSILON = 1e-15  # float32 still holds its square
REPORTS = ("json", "junit", "markdown")
GATES_OWN = ("json", "junit", "markdown", "html", "gradients", "z_loss")  # loss and gradients are the stage step0


@dataclass(frozen=True)
class Preflight:
    """Everything that one run of preflight needs. A stage takes what is its own, and says "not run" where that is lacking."""

    reference: Path | None = None  # Hugging Face folder, or a record of one
    candidate: Path | None = None  # Orbax tree
    gate: GateOptions = DEFAULTS
    only: tuple[str, ...] = ()  # of STAGES; () means all
    keep_going: bool = False  # run the stages after one that failed
    strict: bool = False  # what is not run makes the run inconclusive
    source: Path | None = None
    optimizer: str | None = None  # package.module:function, instead of optax.adamw by the recipe
    recipe: Recipe = Recipe()
    restore: str | None = None  # package.module:function, instead of olmo_jax.sharding.restore
    mesh: str | None = None
    restart_mesh: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)  # over olmo_jax.sharding.RULES
    settings: settings.Settings = settings.Settings(None, {})  # for tables that belong to one stage

    def functions(self) -> dict[str, tuple[str, str]]:
        """The user's functions by the stage that calls them: (what named it, package.module:function)."""
        table = self.settings.sections.get(SECTION, {}).get("loader", {})
        found = {"step0": self.optimizer, "restore": self.restore, "loader": table.get("function")}
        names = {
            "step0": "[preflight] optimizer",
            "restore": "[preflight] restore",
            "loader": f"[{loader.SECTION}] function",
        }
        return {stage: (names[stage], spec) for stage, spec in found.items() if spec}

    @property
    def inputs(self) -> list[Path | None]:
        """Files that no report may overwrite."""
        return [self.reference, self.candidate, self.source, self.gate.batch, self.settings.file]


def choose(given: dict, found: settings.Settings) -> tuple[Preflight, dict[str, Path | None]]:
    """The options given on the command line over those of the file; and the reports that were asked for.

    Raises BadInput before any work for everything that can be told from the options alone.
    """
    for name in given.get("only", []):
        if name not in STAGES:
            near = difflib.get_close_matches(name, STAGES, n=1, cutoff=0)[0]
            raise BadInput(f"--only {name}: there is no such stage, was {near} meant? Known: {', '.join(STAGES)}")
    own = found.section(SECTION, KEYS) | {k: v for k, v in given.items() if k in KEYS}
    _check_meshes(own)
    own["recipe"] = _recipe(found)
    own["rules"] = _rules(found)
    if own.pop("loader", None):  # its stage reads it when its turn comes
        loader.chosen({}, found.section(loader.SECTION, loader.KEYS))
    found.section(heldout.SECTION, heldout.KEYS)  # its faults come before the work
    sides = {k: v for k, v in given.items() if k in settings.KEYS and k not in KEYS}
    values = {k: v for k, v in (found.values | sides).items() if k not in GATES_OWN}
    reference, candidate, options = settings.sides_and_options(values, found.file)
    reports = {name: own.pop(name, None) for name in REPORTS}
    only = tuple(name for name in STAGES if name in given.get("only", []))
    return Preflight(reference, candidate, options, only=only, settings=found, **own), reports


def _recipe(found: settings.Settings) -> Recipe:
    """[preflight.recipe] over OLMo 3's own. Raises BadInput for numbers with which AdamW does not go."""
    given = found.section(f"{SECTION}.recipe", RECIPE_KEYS)
    recipe = Recipe(**{k: tuple(v) if isinstance(v, list) else float(v) for k, v in given.items()})
    faults = [] if recipe.learning_rate > 0 else ["learning_rate is 0: nothing would move"]
    faults += [f"{b} is {getattr(recipe, b)}, below 1 is wanted" for b in ("beta1", "beta2") if getattr(recipe, b) >= 1]
    if not SMALLEST_EPSILON <= recipe.epsilon <= 1:
        faults.append(f"epsilon is {recipe.epsilon}, {SMALLEST_EPSILON} to 1 is wanted")
    if faults:
        raise BadInput(f"[{SECTION}.recipe] in {found.file} cannot be used", faults)
    return recipe


def _check_meshes(own: dict) -> None:
    faults: list[str] = []
    for key in ("mesh", "restart_mesh"):
        if key in own:
            parse_mesh(own[key], faults)
    if faults:
        raise BadInput("the meshes of preflight cannot be used", faults)


def _rules(found: settings.Settings) -> dict[str, str]:
    """[preflight.rules]: along which mesh axis a logical axis of the parameters lies."""
    rules = found.section(f"{SECTION}.rules", RULE_KEYS)
    known = (*MESH_AXES, WHOLE)
    faults = [
        f"{name} is {axis!r}, one of {', '.join(known)} is wanted" for name, axis in rules.items() if axis not in known
    ]
    if faults:
        raise BadInput(f"[{SECTION}.rules] in {found.file} cannot be used", faults)
    return rules
