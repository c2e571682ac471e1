"""Can the functions that a parity.toml names be imported? Asked once, in a process of its own, before long work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .candidate_fn import load
from .children import run_children, serve


def check_imports(functions: Mapping[str, str]) -> None:
    """functions: package.module:function by the option that named it. Raises BadInput for the first that cannot be used."""
    if functions:
        with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
            request = {"functions": dict(functions), "processes": 1}
            run_children(__name__, Path(folder), request, dict(os.environ), "the process that imports your functions")


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    for option, spec in request["functions"].items():
        load(spec, option)
    return {"imported": True}


if __name__ == "__main__":
    serve(_run)
