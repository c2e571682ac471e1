"""Three real optimizer steps of both frameworks, compared parameter by parameter, against the reference's own noise.

Adam divides a gradient by its own size, so rounding noise in a gradient that is nearly zero becomes an update of full size:
no fixed limit fits all parameters. The reference is therefore run a second time with changes that must not matter, and a
parameter may differ by a multiple of what it moved by.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from .gate import Criterion
from .gradients import LOSS, Limit, _relative, _sums

LEG = "three steps"
KINDS = ("gradient", "first moment", "second moment", "update")  # of step 1; after step 3; after step 3; of all three
COMPARED = KINDS[1:]  # the gradient is judged by gradients.py
MULTIPLE = 30  # of the parameter's own noise
FLOORS = {  # relative L2
    "first moment": Limit(1e-3, "measured up to 6e-5; beta1 0.91 for 0.9 is 9e-2"),
    "second moment": Limit(1e-3, "measured up to 5e-5; beta2 0.999 for 0.95 is 1"),
    "update": Limit(
        2e-3, "measured up to 8e-4 (bench/optimizer_noise.py); a decay on the embedding that should have none is 6e-3"
    ),
}
RESOLVED = 0.3  # a larger limit would pass an update that is another one


def file_of(folder: Path, kind: str, name: str) -> Path:
    """Where an array of a weight lies. HF names hold no slash."""
    return folder / kind / f"{name}.npy"


def compare(reference: Path, candidate: Path, names: list[str], kinds=COMPARED) -> dict[str, dict[str, float]]:
    """By weight and kind, the relative L2 error ‖candidate - reference‖ / ‖reference‖; NaN where a value is not finite."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = {}
        for kind in kinds:
            a, b = (np.load(file_of(folder, kind, name), mmap_mode="r") for folder in (reference, candidate))
            sums = _sums(a, b)
            size, error = sums["norm_reference"], sums["error"]
            found[name][kind] = (
                error / size if size else (0.0 if error == 0 else math.inf if error == error else math.nan)
            )
    return found


def judge(errors: dict, noise: dict, first: dict, second: dict, benign: dict) -> dict:
    """The record: errors and limits of every parameter, loss and global norm of every step on both sides.

    errors and noise as `compare` gives them; first, second, benign: what the sides' steps returned.
    """
    rows = []
    for name, kinds in errors.items():
        limits = {kind: max(FLOORS[kind].value, MULTIPLE * noise[name][kind]) for kind in kinds}
        rows.append({"name": name, "errors": kinds, "noise": noise[name], "limits": limits})
    judged = [row for row in rows if all(not limit > RESOLVED for limit in row["limits"].values())]
    return {
        "steps": {"reference": first["steps"], "candidate": second["steps"], "benign": benign["steps"]},
        "parameters": rows,
        "unresolved": [row["name"] for row in rows if row not in judged],
        "reference": first["settings"],
        "candidate": second["settings"],
    }


def criteria(record: dict) -> list[Criterion]:
    """Of the record of `judge`: the loss of every step, and the worst parameter of every kind that was compared."""
    found = []
    steps = record["steps"]
    for t, (mine, theirs, again) in enumerate(
        zip(*(steps[k] for k in ("reference", "candidate", "benign")), strict=True)
    ):
        noise = _relative(mine["loss"], again["loss"])
        limit = max(LOSS.value, MULTIPLE * noise)
        reason = LOSS.reason if limit == LOSS.value else f"{MULTIPLE} times the reference's own noise of {noise:.2g}"
        value = _relative(mine["loss"], theirs["loss"])
        found.append(Criterion(f"loss difference / loss, step {t + 1}", LEG, value, limit, "of the loss", reason))
    rows = [row for row in record["parameters"] if row["name"] not in record["unresolved"]]
    for kind in rows[0]["errors"] if rows else ():
        worst = max(rows, key=lambda row: _share(row["errors"][kind], row["limits"][kind]))
        value, limit, noise = (worst[key][kind] for key in ("errors", "limits", "noise"))
        reason = (
            f"{MULTIPLE} times this parameter's own noise of {noise:.2g}"
            if limit > FLOORS[kind].value
            else FLOORS[kind].reason
        )
        found.append(Criterion(f"worst {kind} ({worst['name']})", LEG, value, limit, "of its norm", reason))
    return found


def _share(error: float, limit: float) -> float:
    """How much of its limit an error takes; NaN is the worst."""
    return error / limit if error == error else math.inf
