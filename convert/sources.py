"""Opening a checkpoint of any form: HF folder, OLMo-core's distributed folder, or Orbax tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.errors import BadInput
from . import core_source, maxtext, orbax_io, safetensors_io
from .checkpoint import Source, Tensor, fit_source, read_config
from .hub import HubId, hub_id, revision_of, training_start_note
from .layout import transposed
from .mapping import TRANSPOSED, weights
from .maxtext import MaxTextReader
from .places import is_remote, place
from .safetensors_io import DTYPE_CODES, DTYPES

CONFIG = "config.json"
ORBAX_CONFIG = "olmo_config.json"


def open_source(
    path: str | Path,
    allow_unknown_keys: Sequence[str] = (),
    *,
    strict: bool = True,
    vocabulary: str = "cut",
    headers_only: bool = False,
    quiet: bool = True,
    model_config: str | Path | None = None,
) -> Source:
    """Open a checkpoint: an HF folder, OLMo-core's distributed folder, an Orbax tree (step, parent or item), or a hub id.

    Reads headers and metadata only. Every fault of the config, of the files and of how they fit each other is raised in
    one BadInput; with strict=False faults of the tensors are kept in `Source.faults` instead. vocabulary says what becomes
    of the padding rows of OLMo-core's embedding and head: cut, keep, or check (refuse where there are any). model_config is
    a config.json, or an HF folder with one, for an Orbax tree that has none beside it.
    The shards of a hub id are downloaded into the hub's cache once their headers are known to fit, unless headers_only.
    """
    wanted = hub_id(path)
    if wanted is not None:
        return _open_hub(wanted, allow_unknown_keys, strict, headers_only, quiet)
    given = place(path)
    if not str(path).strip() or not given.exists():
        if is_remote(given):
            raise BadInput(
                f"{given} does not exist, or {given.bucket.right('list')} is missing: nothing is listed there"
            )
        raise BadInput(f"{str(path)!r} does not exist" if not given.is_symlink() else f"{given} is a dangling symlink")
    if not given.is_dir():
        raise BadInput(f"{given} is a file, a checkpoint folder is wanted: {given.parent}?")
    given = given.absolute()
    if not any(given.iterdir()):
        raise BadInput(f"{given} is empty, a checkpoint folder is wanted")
    if _is_hf(given):
        return _open_hf(given, allow_unknown_keys, strict)
    step = core_source.find_step(given)
    if step is not None:
        return core_source.open_core(given, step, allow_unknown_keys, strict, vocabulary)
    if orbax_io.is_tree(given):
        return _open_orbax(given, allow_unknown_keys, strict, model_config)
    if (given / CONFIG).is_file():
        return _open_hf(given, allow_unknown_keys, strict)  # says which weights are missing
    raise BadInput(
        f"{given} is no checkpoint of a known form: neither {CONFIG} with safetensors, nor "
        f"OLMo-core's {core_source.core_io.FOLDER}, nor an Orbax tree"
    )


def _is_hf(folder: Path) -> bool:
    return (folder / safetensors_io.INDEX).exists() or any(folder.glob("*.safetensors"))


def _open_hub(
    wanted: HubId, allow_unknown_keys: Sequence[str], strict: bool, headers_only: bool, quiet: bool
) -> Source:
    from . import hub_commit, hub_files

    if hub_commit.offline():
        source = _open_hf(hub_files.cached_folder(wanted), allow_unknown_keys, strict)
        if not headers_only:
            hub_files.check_cached([tensor.file for tensor in source.tensors.values()])
        return replace(source, said=f"{wanted} was taken from the hub's cache, off the network: {source.said}")
    commit = hub_commit.resolve(wanted)
    checkout = hub_files.Checkout(commit)
    source = _open_hf(checkout.folder, allow_unknown_keys, strict, commit.revision, checkout.sizes)
    said = f"{wanted} is commit {commit.sha}"
    if headers_only:
        return replace(source, said=f"{said}, its shards on the hub", hub=checkout, shards_on_hub=True)
    folder = checkout.download(quiet)
    source = _open_hf(folder, allow_unknown_keys, strict, commit.revision)
    return replace(source, said=f"{said}, fetched into {folder}", hub=checkout)


def _open_hf(
    folder: Path,
    allow_unknown_keys: Sequence[str],
    strict: bool,
    revision: str | None = None,
    sizes: Mapping[Path, int] | None = None,
) -> Source:
    """sizes: the true lengths of the shards, where only their headers are in the folder."""
    faults: list[str] = []
    config = read_config(folder / CONFIG, allow_unknown_keys, faults)
    entries = safetensors_io.list_folder(folder, faults, sizes)
    tensors = {name: _hf_tensor(entry) for name, entry in entries.items()}
    revision = revision or revision_of(folder)
    note = training_start_note(folder, revision, {tensor.code for tensor in tensors.values()})
    said = f"{folder} is an HF folder"
    more = {"revision": revision, "notes": [note] if note else [], "headers_only": sizes is not None}
    return fit_source("hf", folder, said, folder / CONFIG, config, tensors, faults, strict, **more)


def _hf_tensor(entry: safetensors_io.Entry) -> Tensor:
    def fetch(start: int, stop: int) -> np.ndarray:
        return safetensors_io.read_rows(entry, DTYPES[entry.code], start, stop)

    return Tensor(entry.name, entry.name, entry.file, entry.code, entry.shape, fetch)


def tree_config(step: Path) -> Path:
    """The config of an Orbax tree: olmo_config.json beside it. MaxText writes none, so beside its trees a config.json counts
    too, and one for all steps of a run."""
    places = [folder / name for folder in (step, step.parent) for name in (ORBAX_CONFIG, CONFIG)]
    return next((file for file in places if file.is_file()), places[0])


def check_used(model_config: str | Path | None, *sources: Source) -> None:
    """Refuse a model_config that no source needed: it would be taken for one that was looked at."""
    if model_config is not None and not any(source.config_file == _config_in(model_config) for source in sources):
        raise BadInput(
            f"--model-config {model_config} was not used, a config lies beside the weights: "
            f"{', '.join(str(source.config_file) for source in sources)}. Leave it out"
        )


def _config_in(given: str | Path) -> Path:
    path = place(given)
    return path / CONFIG if path.is_dir() else path


def _open_orbax(
    folder: Path, allow_unknown_keys: Sequence[str], strict: bool, model_config: str | Path | None
) -> Source:
    resolved = orbax_io.resolve_tree(folder)
    faults: list[str] = []
    more: dict = {}
    said = resolved.said
    reader = orbax_io.open_item(resolved.item)
    file = resolved.step / ORBAX_CONFIG
    if isinstance(reader, MaxTextReader):
        said = f"{said}; it is {reader.said}"
        file = tree_config(resolved.step)
    if model_config is not None and not file.is_file():
        file = _config_in(model_config)
    if isinstance(reader, MaxTextReader) and model_config is None and not file.exists():
        raise BadInput(
            f"{resolved.item} is a MaxText tree and no config lies beside it, so nothing says what the model computes: copy the "
            f"config.json of the Hugging Face model to {resolved.step / ORBAX_CONFIG}, or name it with olmo-convert's --model-config"
        )
    config = read_config(file, allow_unknown_keys, faults)
    if config and isinstance(reader, MaxTextReader):
        faults += reader.faults(config)
        more["notes"] = _maxtext_notes(reader, config, file, resolved.step)
    names = {w.jax: w for w in weights(config)} if config else {}
    tensors = {}
    for path, leaf in reader.leaves.items():
        weight = names.get(path)
        tensor = _orbax_tensor(
            reader, leaf, weight.hf if weight else path, bool(weight and weight.layout == TRANSPOSED)
        )
        tensors[tensor.hf] = tensor
    more["carry_from"] = resolved.step
    return fit_source("orbax", resolved.path, said, file, config, tensors, faults, strict, **more)


def _maxtext_notes(reader: MaxTextReader, config: Olmo3Config, file: Path, step: Path) -> list[str]:
    found = [] if file == step / ORBAX_CONFIG else [f"the config was taken from {file}: the tree has none of its own"]
    if reader.left_out:
        found.append(f"of the tree {', '.join(reader.left_out)} is not read: only its parameters are")
    return found + maxtext.notes(config)


def _orbax_tensor(
    reader: orbax_io.TreeReader | MaxTextReader, leaf: orbax_io.LeafMetadata, hf: str, turned: bool
) -> Tensor:
    def fetch(start: int, stop: int) -> np.ndarray:
        if turned:
            return transposed(reader.read(leaf.path, (slice(None), slice(start, stop))))
        return reader.read(leaf.path, (slice(start, stop),))

    code = DTYPE_CODES.get(leaf.dtype, leaf.dtype.name)
    return Tensor(hf, leaf.name, reader.item, code, leaf.shape[::-1] if turned else leaf.shape, fetch)
