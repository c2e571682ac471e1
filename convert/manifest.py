"""manifest.json: where every byte of a converted tree came from, and the hashes to check it by without the source."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import rope_tables, tables_hash

MANIFEST = "manifest.json"
FORMAT = 1
PACKAGES = ("olmo-parity", "numpy", "ml-dtypes", "tensorstore", "orbax-checkpoint", "jax", "flax")


def config_hash(config: Olmo3Config) -> str:
    """sha256 of the config as olmo_config.json holds it, keys sorted: the same however the file is spelled or indented."""
    return hashlib.sha256(json.dumps(to_hf(config), sort_keys=True).encode()).hexdigest()


def make_manifest(*, source: dict, config: Olmo3Config, tensors: list[dict], **more) -> dict:
    """The manifest as a dictionary.

    A tensor's source_sha256 is over its bytes as stored, rows in order (of a vocabulary that was cut: the rows kept);
    its target_sha256 is over its chunks of chunk_shape in order, the last one without its padding, each in C order.
    """
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": source,
        "config_sha256": config_hash(config),
        "rotary_tables_sha256": tables_hash(rope_tables(config)),
        **more,
        "versions": {"python": platform.python_version(), **versions()},
        "tensors": tensors,
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed (everything with a hand in a conversion), importing none of them."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_manifest(folder: Path, manifest: dict) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict:
    """The manifest beside a tree. Raises BadInput where there is none, or one that another version wrote."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest["tensors"], list):
            raise TypeError(f"tensors is a {type(manifest['tensors']).__name__}")
        if manifest["format"] != FORMAT:
            raise BadInput(f"{file} has format {manifest['format']!r}, this version reads {FORMAT}")
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: was the tree written by olmo-convert, and did it finish?") from None
    except (KeyError, TypeError) as error:
        raise BadInput(f"{file} is not a manifest: {error!r}") from None
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} is not JSON: {error}") from None
    return manifest
