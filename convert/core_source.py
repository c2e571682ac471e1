"""An OLMo-core checkpoint as a source: its config, its vocabulary without padding rows, and Adam's moments."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_core import from_olmo_core, padded_vocab_size
from ..olmo_jax.errors import BadInput
from . import core_io
from .checkpoint import Source, Tensor, fit_source
from .mapping import Weight, weights
from .safetensors_io import DTYPE_CODES, kind_of, no_duplicates

CONFIG = "config.json"
TOKENIZER = "tokenizer"  # AI2's tokenizer export looks for <parent of the step folder>/tokenizer
VOCABULARY = ("cut", "keep", "check")
MOMENTS = ("exp_avg", "exp_avg_sq")
PADDED = ("embeddings.weight", "lm_head.w_out.weight")


def find_step(given: Path) -> Path | None:
    """The step folder that a path means: the step, its model_and_optim, or the parent of one step. None if it means none.

    Raises BadInput where it holds several steps.
    """
    if (given / core_io.METADATA).is_file():
        return given.parent
    if (given / core_io.FOLDER).is_dir():
        return given
    steps = sorted(p for p in given.iterdir() if (p / core_io.FOLDER / core_io.METADATA).is_file())
    if len(steps) > 1:
        names = ", ".join(p.name for p in steps)
        raise BadInput(f"{given} holds {len(steps)} steps of OLMo-core ({names}): name one of them")
    return steps[0] if steps else None


def open_core(given: Path, step: Path, allow_unknown_keys: Sequence[str], strict: bool, vocabulary: str) -> Source:
    """Open a step folder. Nothing in its pickles is run."""
    if vocabulary not in VOCABULARY:
        raise BadInput(f"vocabulary policy {vocabulary!r} is not supported ({', '.join(VOCABULARY)} are)")
    faults: list[str] = []
    config, padded = _read_config(step / CONFIG, allow_unknown_keys, faults)
    folder = step / core_io.FOLDER
    if not (folder / core_io.METADATA).is_file():
        raise BadInput(f"{folder / core_io.METADATA} does not exist: nothing says where its tensors lie", faults)
    stored = core_io.read_metadata(folder, faults)
    if config is None:
        raise BadInput(f"{step} cannot be used", faults)
    logical = config.vocab_size
    rows = logical if vocabulary == "cut" else padded
    if vocabulary == "check" and padded != logical:
        faults.append(f"the vocabulary is padded: {padded} rows for {logical} entries of the tokenizer (policy: check)")
    config = config.replace(vocab_size=rows)
    names = {w.core: w for w in weights(config)}
    tensors, moments = {}, {name: {} for name in MOMENTS}
    for name, tensor in stored.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            weight = names.get(rest)
            built = _as_tensor(tensor, weight, padded, faults)
            tensors[weight.hf if weight else name] = built
        elif name.startswith("optim.state."):
            core, _, field = name.removeprefix("optim.state.").rpartition(".")
            if field in MOMENTS and core in names:
                moments[field][names[core].hf] = _as_tensor(tensor, names[core], padded, faults)
    said = f"{step} is a step folder of OLMo-core" if given == step else f"{given}: step folder {step} was taken"
    notes = [f"the vocabulary was cut from {padded} stored rows to the tokenizer's {logical}"] if rows < padded else []
    training = dict(core_io.trainer_position(step))
    adam = _adam_step(stored, faults)
    if adam is not None:
        training["optimizer_step"] = adam
    return fit_source(
        "core",
        step,
        said,
        step / CONFIG,
        config,
        tensors,
        faults,
        strict,
        notes=notes,
        padded_vocab_size=padded,
        logical_vocab_size=logical,
        carry_from=_tokenizer_folder(step),
        moments={name: found for name, found in moments.items() if found},
        training=training,
    )


def _read_config(file: Path, allow_unknown_keys: Sequence[str], faults: list[str]) -> tuple[Olmo3Config | None, int]:
    if file.exists() and not file.is_file():
        faults.append(f"{file} is {kind_of(file)}, a JSON file is wanted")
        return None, 0
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
        return from_olmo_core(raw, str(file), allow_unknown_keys), padded_vocab_size(raw)
    except FileNotFoundError:
        faults.append(f"{file} does not exist: without it nothing says what the model computes")
    except BadInput as error:
        faults.extend(f"{file}: {fault}" for fault in error.faults or [error.headline])
    except (ValueError, RecursionError) as error:
        faults.append(f"{file} is not JSON that can be read: {error}")
    return None, 0


def _as_tensor(tensor: core_io.CoreTensor, weight: Weight | None, padded: int, faults: list[str]) -> Tensor:
    """The tensor under its HF name; embedding and head lose the rows beyond the config's vocabulary."""
    dtype = core_io.NUMPY_DTYPES.get(tensor.dtype)
    code = DTYPE_CODES[dtype] if dtype is not None else tensor.dtype
    shape = tensor.shape
    if weight is not None and weight.core in PADDED and len(shape) == 2:
        if shape[0] != padded:
            faults.append(f"{tensor.name} has {shape[0]} rows, the config's model.vocab_size is {padded}")
        elif shape[0] > weight.shape[0]:
            shape = (weight.shape[0], *shape[1:])

    def fetch(start: int, stop: int) -> np.ndarray:
        return tensor.read(start, stop)

    return Tensor(weight.hf if weight else tensor.name, tensor.name, tensor.file, code, shape, fetch, tensor.files)


def _adam_step(stored: dict[str, core_io.CoreTensor], faults: list[str]) -> int | None:
    """Adam's own step count, which all weights must share."""
    steps = {}
    for name, tensor in stored.items():
        if name.startswith("optim.state.") and name.endswith(".step") and tensor.dtype == "float32":
            value = float(tensor.read()) if tensor.shape == () else math.nan
            if not math.isfinite(value):
                faults.append(f"{name} in {tensor.file} has shape {tensor.shape}, one finite number is wanted")
                return None
            steps.setdefault(value, name)
    if len(steps) > 1:
        faults.append(
            f"the optimizer's step differs between weights: {', '.join(f'{n} {s:g}' for s, n in steps.items())}"
        )
    return int(next(iter(steps))) if len(steps) == 1 else None


def _tokenizer_folder(step: Path) -> Path:
    beside = step.parent / TOKENIZER
    return beside if beside.is_dir() else step
