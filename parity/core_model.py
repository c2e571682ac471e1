"""AI2's own OLMo-core Transformer as a side of the float32 leg, its weights read by our own reader."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..convert.mapping import weights
from ..convert.safetensors_io import DTYPES
from ..convert.sources import Source
from ..olmo_jax.errors import BadInput
from .batches import Sequence

CONFIG = "config.json"
PACKAGE = "ai2-olmo-core"
DROPPED = ("compile", "dp_config", "tp_config", "float8_config")  # keys of older configs that OLMo-core drops itself
CLASSES = "olmo_core."  # OLMo-core imports what `_CLASS_` names; nothing else may be named


def require_core() -> None:
    """Raise BadInput with what to install, where OLMo-core is missing. Does not import it."""
    found = sys.modules.get("olmo_core", ...)
    if found is None or (found is ... and importlib.util.find_spec("olmo_core") is None):
        raise BadInput(
            f"--also core: needs AI2's OLMo-core ({PACKAGE}), which is not installed: pip install 'olmo-parity[core]'"
        )


def run_core(
    source: Source, sequences: list[Sequence], *, stored: Mapping[str, str], round_to: str | None = None, folder: Path
) -> dict:
    """Write folder/<index>.npy, logits [T, V] float32 of OLMo-core's model in float32, a sequence each; returns its settings.

    source is a step folder opened with vocabulary="keep". Its weights are rounded as the reference's are: to the dtype that
    each is stored in there, by HF name, then to round_to. Each packed document runs alone, and a first position goes to the rotary modules as start_pos. Logits
    of the vocabulary's padding rows are cut off. One copy of the weights serves the models of all windows.
    """
    import torch

    folder.mkdir()
    state = {
        weight.core: torch.from_numpy(_rounded(source.tensors[weight.hf].read(), stored[weight.hf], round_to))
        for weight in weights(source.config)
    }
    models = {}
    with torch.no_grad():
        for index, sequence in enumerate(sequences):
            if sequence.window not in models:
                models[sequence.window] = _build(source.path / CONFIG, sequence.window, state)
            model = models[sequence.window]
            logits = [_forward(model, tokens, first, torch) for tokens, first in sequence.parts()]
            np.save(folder / f"{index}.npy", np.concatenate(logits)[:, : source.logical_vocab_size])
    del models, state
    gc.collect()
    return {
        "implementation": "OLMo-core Transformer",
        "version": importlib.metadata.version(PACKAGE),
        "attention": "torch",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "weights_rounded_to": round_to or next((name for name in stored.values() if name != "float32"), None),
    }


def _rounded(values: np.ndarray, *names: str | None) -> np.ndarray:
    by_name = {dtype.name: dtype for dtype in DTYPES.values()}
    for name in filter(None, names):
        values = values.astype(by_name[name])
    return np.ascontiguousarray(values, np.float32)


def _build(file: Path, window: int | None, state: dict):
    """OLMo-core's model by its own config, holding these very tensors; window stands in every sliding layer instead of its own."""
    logging.getLogger("olmo_core").setLevel(logging.ERROR)  # it says which GPU libraries are missing
    from olmo_core.nn.transformer.config import TransformerConfig

    raw = json.loads(file.read_text(encoding="utf-8"))["model"]
    _check_classes(raw, file)
    raw = {key: value for key, value in raw.items() if key not in DROPPED}
    try:
        model = TransformerConfig.from_dict(on_cpu(raw, window)).build(init_device="meta")
    except Exception as error:  # OLMo-core has several kinds
        raise BadInput(f"OLMo-core cannot build the model of {file}: {error}") from error
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def on_cpu(raw, window: int | None):
    """A model's config with what needs a GPU replaced by what computes the same, in float32; sliding layers see window tokens."""
    if isinstance(raw, list):
        return [on_cpu(value, window) for value in raw]
    if not isinstance(raw, Mapping):
        return raw
    changed = {key: on_cpu(value, window) for key, value in raw.items() if key != "use_flash"}
    if "n_heads" in raw:
        changed["backend"] = "torch"
    if "dtype" in raw:
        changed["dtype"] = "float32"
    if raw.get("name") == "fused_rms":
        changed["name"] = "rms"
    if "loss_implementation" in raw:
        changed["loss_implementation"] = "default"
    if window is not None and "pattern" in raw:
        changed["pattern"] = [tokens if tokens == -1 else window for tokens in raw["pattern"]]
    return changed


def _check_classes(raw, file: Path) -> None:
    if isinstance(raw, list):
        for value in raw:
            _check_classes(value, file)
    elif isinstance(raw, Mapping):
        name = raw.get("_CLASS_", CLASSES)
        if not str(name).startswith(CLASSES):
            raise BadInput(
                f"{file} names the class {name!r}, and OLMo-core would import it: only its own are let through"
            )
        for value in raw.values():
            _check_classes(value, file)


def _forward(model, tokens: np.ndarray, first: int, torch) -> np.ndarray:
    """Logits [T, V] float32 of one document alone, padding rows of the vocabulary included."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with _starting_at(model, first):
        return model(ids)[0].float().numpy()


@contextmanager
def _starting_at(model, first: int) -> Iterator[None]:
    """Token 0 at rotary position first: forward has no argument for it, the rotary modules have one."""
    if not first:
        yield
        return

    def shifted(module, args, kwargs):
        return args, {**kwargs, "start_pos": first}

    hooks = [
        block.attention.rope.register_forward_pre_hook(shifted, with_kwargs=True) for block in model.blocks.values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
