"""--override KEY=VALUE: both checkpoints with a changed config, in temporary folders of links to their own files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..convert.orbax_io import is_tree, resolve_tree
from ..convert.places import is_remote, place
from ..convert.sources import CONFIG, ORBAX_CONFIG, tree_config
from ..olmo_jax.errors import BadInput
from .recorded import is_record


def parse(pairs: tuple[str, ...]) -> dict[str, object]:
    """('sliding_window=64', 'rope_parameters.full_attention.rope_theta=1e6') by key, values read as JSON."""
    found, faults = {}, []
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            faults.append(f"--override {pair}: KEY=VALUE is wanted, with a name of config.json")
            continue
        if key in found:
            faults.append(f"--override {pair}: {key} was given already")
        try:
            found[key] = json.loads(text)
        except ValueError:
            faults.append(f'--override {pair}: the value is read as JSON, so text stands in quotes: {key}="{text}"')
    if faults:
        raise BadInput("the overrides cannot be used", faults)
    return found


@contextmanager
def applied(
    reference: Path, candidate: Path | None, overrides: dict[str, object]
) -> Iterator[tuple[Path, Path | None]]:
    """Folders that stand for both checkpoints while the context lasts, each with every override in its config.

    A candidate that has no config file (a candidate function's own form) stays as it is: its function is handed the
    reference's config. Raises BadInput where a config lacks a key, and for a record, whose logits are computed already.
    """
    if is_record(reference):
        raise BadInput(f"--override changes both sides, and {reference} is a record: its logits are computed already")
    with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
        faults: list[str] = []
        sides = {"reference": reference, "candidate": candidate}
        for name, path in sides.items():
            if path and is_remote(place(path)):
                raise BadInput(
                    f"--override puts links in the place of files, and {path} is in a bucket: copy it here first"
                )
            home, file = _config_of(path) if path else (None, None)
            if file is not None:
                sides[name] = _changed(home, file, overrides, Path(folder) / name, faults)
        if faults:
            raise BadInput("--override names what a config does not have", faults)
        yield sides["reference"], sides["candidate"]


def _config_of(path: Path) -> tuple[Path | None, Path | None]:
    """A checkpoint's folder and its config file; None where there is none, which opening the checkpoint will say if it matters."""
    try:
        if is_tree(path):
            step = resolve_tree(path).step
            file = tree_config(step)
            return step, file if file.is_file() else None
    except (BadInput, OSError):
        return None, None
    return path, path / CONFIG if (path / CONFIG).is_file() else None


def _changed(home: Path, file: Path, overrides: dict[str, object], folder: Path, faults: list[str]) -> Path:
    """A folder of links to everything in the checkpoint's own, and the config with the overrides."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    for key, value in overrides.items():
        *outer, last = key.split(".")
        inner = config
        for part in outer:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last not in inner:
            here = f"; {'.'.join(outer) or 'it'} has {', '.join(sorted(inner))}" if isinstance(inner, dict) else ""
            faults.append(f"{file} has no {key}{here}")
        else:
            inner[last] = value
    folder.mkdir()
    name = CONFIG if file == home / CONFIG else ORBAX_CONFIG  # one for all steps of a run lies elsewhere
    for beside in home.absolute().iterdir():
        if beside.name != name:
            (folder / beside.name).symlink_to(beside)
    (folder / name).write_text(json.dumps(config, indent=2) + "\n")
    return folder
