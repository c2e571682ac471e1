"""Two real records of the bundled checkpoint, kept as JSON: a right conversion, and one with gate and up exchanged."""

import json
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "data" / "records"


def record(name="pass", **changes):
    found = json.loads((RECORDS / f"{name}.json").read_text())
    for key, value in changes.items():
        found[key] = value
    return found


def criterion(found, leg, name):
    return next(c for c in found["criteria"] if (c["leg"], c["name"]) == (leg, name))
