"""The stage step0: the JAX optimizer alone, loss and gradients of both frameworks, and three real steps."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..convert.mapping import weights
from ..convert.sources import Source, open_source
from ..olmo_jax.errors import BadInput
from . import batches, gradients, optimizer_jax, optimizer_probe, optimizer_steps, sides
from .adamw import Recipe
from .devices import Placement, placement
from .gate import Criterion
from .legs import narrower
from .optimizer_explain import explain
from .preflight_options import Preflight
from .recorded import is_record, open_record
from .report import gradient_lines
from .stage import judged, not_run

NAME = "step0"
REFERENCE_LEG = "torch optimizer"
ADVICE = {  # by leg
    optimizer_probe.LEG: "bring the optimizer and [preflight.recipe] together: the function must also clip, docs/preflight.md",
    REFERENCE_LEG: "torch.optim.AdamW is not what it should be in this environment: reinstall torch",
    gradients.LEG: "where the logits agree: look at the loss, custom gradients and stop_gradient",
    optimizer_steps.LEG: "where optimizer and gradients agree: look at what comes between two steps",
}


@dataclass(frozen=True)
class Run:
    """What the parts of the stage share."""

    recipe: Recipe
    spec: str | None  # the user's optimizer
    place: Placement
    folder: Path

    @property
    def who(self) -> str:
        return self.spec or optimizer_jax.OURS

    @property
    def environment(self) -> dict[str, str]:
        return self.place.environment(exact_casts=False)


def run_step0(options: Preflight, say) -> dict:
    """The optimizer against the formula; with a live reference also loss, gradients and three steps against torch's."""
    started = time.monotonic()
    reference, candidate, why_not = _sides(options)
    if reference is None and candidate is None:
        return not_run(NAME, why_not)
    _check_names(options.recipe, (candidate or reference).config)
    place = placement(options.gate.candidate_device)
    folder = Path(tempfile.mkdtemp(prefix="olmo-parity-"))
    run = Run(options.recipe, options.optimizer, place, folder)
    try:
        record, criteria, where = _probe(run, (candidate or reference).config, say)
        wrong = any(c.on and not c.passed for c in criteria)
        if not why_not and wrong and not options.keep_going:
            why_not = "the optimizer failed already, and --keep-going was not given"
        if not why_not:
            why_not = _room(reference, folder)
        questions, left, said = [], [], []
        if why_not:
            left.append(f"loss, gradients and three steps against torch: {why_not}")
        else:
            more, others, trained = _against_torch(run, reference, candidate, say)
            record |= more
            criteria += others
            where += gradient_lines({"gradients": trained}) if _failed(others, gradients.LEG) else []
            coverage = gradients.gradient_coverage(trained)
            if not coverage["covered"] and coverage["what"] not in options.gate.accept_uncovered:
                questions.append(coverage["detail"])
            unresolved = more["steps"]["unresolved"]
            if len(unresolved) == len(more["steps"]["parameters"]):
                questions.append("every parameter's update is rounding noise: no limit fits any of them")
            elif unresolved:
                said.append(
                    f"not judged, moved by rounding noise alone: {', '.join(unresolved[:3])}, {len(unresolved)} in all"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    advice = [line for leg, line in ADVICE.items() if _failed(criteria, leg)]
    return judged(
        NAME,
        started,
        criteria,
        open_questions=questions,
        parts_not_run=left,
        where=where,
        advice=advice,
        said=said,
        **record,
    )


def _sides(options: Preflight) -> tuple[object | None, Source | None, str]:
    """Reference, candidate, and why the two cannot be run against each other: "" where they can."""
    keys = options.gate.allow_unknown_keys
    reference, why_not = None, "no reference is named"
    if options.reference is not None and is_record(options.reference):
        reference, why_not = open_record(options.reference), "the reference is a record, which holds logits alone"
    elif options.reference is not None:
        local = sides.on_this_machine(options.reference, options.candidate, options.gate)
        reference, why_not = open_source(local, keys), ""
        if reference.kind != "hf":
            raise BadInput(
                f"--reference {options.reference} is of the {reference.kind} form, a Hugging Face folder is wanted"
            )
    if options.gate.candidate_fn:
        return reference, None, "a candidate function gives logits alone"
    candidate = open_source(options.candidate, keys)
    if candidate.kind != "orbax":
        raise BadInput(f"--candidate {options.candidate} is of the {candidate.kind} form, an Orbax tree is wanted")
    differing = [name for name, _, _ in reference.config.differences(candidate.config)] if reference else []
    if differing and not why_not:
        raise BadInput(f"the configs of reference and candidate differ in {', '.join(differing)}: see the stage logits")
    return reference, candidate, why_not


def _check_names(recipe: Recipe, config) -> None:
    """A misspelt name would leave no leaf out: everything would be said to decay."""
    parts = {part for w in weights(config) for part in w.jax.split("/")}
    unknown = [name for name in recipe.no_decay if name not in parts]
    if unknown:
        known = ", ".join(sorted(part for part in parts if not part.isdigit()))
        raise BadInput(f"[preflight.recipe] no_decay names {unknown[0]!r}, and no leaf has such a part. Known: {known}")


def _probe(run: Run, config, say) -> tuple[dict, list[Criterion], list[str]]:
    """(record, criteria, where) of the optimizer alone."""
    say(f"{run.who} on gradients made for it")
    given = optimizer_probe.inputs(config, run.recipe)
    got, function = optimizer_jax.run_probe(
        config, given, run.recipe, run.spec, run.folder / "probe", run.place.candidate, run.environment
    )
    found = optimizer_probe.judge(given, got, run.recipe, run.who)
    criteria = optimizer_probe.criteria(found)
    wrong = any(c.on and not c.passed for c in criteria)
    explained = explain(given, got, run.recipe) if wrong else []
    record = {"function": function, "recipe": asdict(run.recipe), "probe": {**found, "explained_by": explained}}
    return record, criteria, [f"{run.who}: {sentence}" for sentence in explained]


def _against_torch(run: Run, reference: Source, candidate: Source, say) -> tuple[dict, list[Criterion], dict]:
    """(record, criteria, the record of gradients) of what needs the live reference."""
    from . import optimizer_torch

    say(f"{optimizer_torch.WHO} on the same gradients")
    given = optimizer_probe.inputs(reference.config, run.recipe)
    own = optimizer_probe.judge(given, optimizer_torch.probe(given, run.recipe), run.recipe, optimizer_torch.WHO)
    sequences = batches.built_in(reference.config)[-2:]  # an imposed window where layers slide, and packed documents
    round_to, names = narrower(reference, candidate), [w.hf for w in weights(reference.config)]
    folders = {side: run.folder / side for side in ("reference", "benign", "candidate")}

    def torch_steps(side: str) -> dict:
        return optimizer_torch.steps(reference, sequences, folders[side], run.recipe, round_to, benign=side == "benign")

    say("three steps of the reference in float32")
    first = torch_steps("reference")
    say("and again with changes that must not matter")
    again = torch_steps("benign")
    noise = optimizer_steps.compare(folders["reference"], folders["benign"], names)
    shutil.rmtree(folders["benign"])
    say("three steps of the candidate in float32")
    second = optimizer_jax.run_steps(
        candidate, sequences, folders["candidate"], run.recipe, run.spec, run.place.candidate, run.environment
    )
    kinds = optimizer_steps.COMPARED if second["moments"] else ("update",)
    errors = optimizer_steps.compare(folders["reference"], folders["candidate"], names, kinds)
    steps = optimizer_steps.judge(errors, noise, first, second, again)
    at_start = [{**side["steps"][0], "settings": side["settings"]} for side in (first, second)]
    trained = gradients.compare(folders["reference"] / "gradient", folders["candidate"] / "gradient", names, *at_start)
    trained |= {"z_loss": run.recipe.z_loss, "sequences": [s.id for s in sequences]}
    criteria = optimizer_probe.criteria(own, REFERENCE_LEG)
    criteria += gradients.gradient_criteria(trained) + optimizer_steps.criteria(steps)
    return {"torch_probe": own, "gradients": trained, "steps": steps}, criteria, trained


def _room(reference: Source, folder: Path) -> str:
    """Why whole models with their optimizer state do not fit here; "" where they do."""
    size = 4 * sum(w.shape[0] * (w.shape[1] if len(w.shape) > 1 else 1) for w in weights(reference.config))
    # Beside what gradients need: two moments, an update, the values before it.
    needed = gradients.memory_needed(reference, batches.built_in(reference.config)) + 4 * size
    free = gradients.available_memory()
    if needed > free:
        return f"they need about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are available"
    on_disk, room = 2 * len(optimizer_steps.KINDS) * size, shutil.disk_usage(folder).free
    if on_disk > room:
        return f"they need {on_disk / 2**30:.1f} GiB in {folder.parent}, {room / 2**30:.1f} GiB are free (set TMPDIR)"
    return ""


def _failed(criteria: list[Criterion], leg: str) -> bool:
    return any(c.leg == leg and c.on and not c.passed for c in criteria)
