"""The torch side layer by layer: transformers' own model, in which one layer at a time holds weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from ..convert.sources import Source, open_source
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.errors import BadInput
from . import losses
from .batches import Sequence
from .reference import BENIGN_PADDING, HEAD_ROWS, head_part, impose_window, other_thread_count, require_olmo3
from .streaming import SLICE_BYTES, rows_of, slices

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def empty_model(source: Path, torch, transformers):
    """Olmo3ForCausalLM as from_pretrained builds it, eager, with parameters on the meta device and real rotary tables."""
    require_olmo3(transformers)
    hf_config = transformers.Olmo3Config.from_pretrained(source, attn_implementation="eager", local_files_only=True)
    with torch.device("meta"):
        model = transformers.Olmo3ForCausalLM(hf_config)
    # On the meta device the rotary tables have no values. The same constructor makes them for a model without layers.
    small = copy.deepcopy(hf_config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 0, 1, None
    made = transformers.Olmo3ForCausalLM(small).model
    for name in ("rotary_emb", "rotary_embs"):  # 5.13 and later: one module, 4.57: one a layer type
        if hasattr(made, name):
            setattr(model.model, name, getattr(made, name))
    return model.eval()


def write_logits(
    model,
    source: Path,
    config: Olmo3Config,
    sequences: list[Sequence],
    *,
    dtype: str,
    round_to: str | None,
    benign: bool,
    keep: str = losses.LOGITS,
    folder: Path,
) -> None:
    """Fill folder/<index>.npy, [T, V] float32 or what losses.py keeps of it, from an empty model and the safetensors of source. Call under no_grad.

    Every layer goes through Olmo3Model.forward itself, so masks and rotary embedding are transformers' own: all other
    layers stand aside. In memory are one layer, the activations [T, D] of every sequence, and for one sequence at a time
    what grows with T squared: two masks [T, T] and the scores [N, T, T], each in dtype, and their softmax in float32
    (at 512 tokens of the 7B model 32 MiB, at 8192 tokens 8 GiB).
    """
    import torch

    opened = open_source(source, allow_unknown_keys=config.allowed_unknown_keys)
    check_names(model, opened.tensors, source, tied=config.tie_word_embeddings)

    def weight(array: np.ndarray):
        return tensor_of(array, dtype, round_to, torch)

    inner = model.model
    all_stand_aside(inner)
    # A document that occurs twice is run once.
    pieces = {_key(s, *part): (s.window, *part) for s in sequences for part in s.parts()}
    ids = np.unique(
        np.concatenate([[0], *(tokens for _, tokens, _ in pieces.values())])
    )  # 0 is what padding is made of
    table = weight(embedding_rows(opened, ids))
    hidden = {}
    for key, (_, tokens, _) in pieces.items():
        padded = np.pad(tokens, (0, BENIGN_PADDING if benign else 0))
        hidden[key] = table[torch.from_numpy(np.searchsorted(ids, padded))][None]
    with other_thread_count(torch) if benign else nullcontext():
        for name, module in (*((f"layers.{i}", m) for i, m in enumerate(inner.layers)), ("norm", inner.norm)):
            own = {k: weight(opened.tensors[f"model.{name}.{k}"].read()) for k in module.state_dict()}
            with taking_part(module, own):
                for key, (window, _, first) in pieces.items():
                    impose_window(model, config, window)
                    positions = torch.arange(first, first + hidden[key].shape[1])[None]
                    hidden[key] = inner(
                        inputs_embeds=hidden[key], position_ids=positions, use_cache=False
                    ).last_hidden_state
        files = [losses.place(keep, folder, i, s.tokens, config.vocab_size) for i, s in enumerate(sequences)]
        head = opened.tensors[EMBEDDING if config.tie_word_embeddings else HEAD]
        for start, stop in slices(config.vocab_size, HEAD_ROWS):
            rows = weight(head.rows(start, stop))
            for key, (_, tokens, _) in pieces.items():
                logits = head_part(model.lm_head, rows, hidden[key][0, : len(tokens)], benign, torch).float().numpy()
                for file, offset in _places(sequences, files, key):
                    file[offset : offset + len(tokens), start:stop] = logits


def embedding_rows(opened: Source, ids: np.ndarray) -> np.ndarray:
    """Rows ids (ascending, each once) of the embedding, [len(ids), D] as stored."""
    embedding = opened.tensors[EMBEDDING]
    count = embedding.shape[0]
    return rows_of(embedding.rows, count, ids, max(SLICE_BYTES * count // embedding.nbytes, 1))


def _key(sequence: Sequence, tokens: np.ndarray, first: int) -> tuple:
    return sequence.window, first, tokens.tobytes()


def _places(sequences: list[Sequence], files: list, key: tuple) -> Iterator[tuple[np.ndarray | losses.Losses, int]]:
    """Every (logits file, first row) where the document of this key stands."""
    for sequence, file in zip(sequences, files, strict=True):
        offset = 0
        for tokens, first in sequence.parts():
            if _key(sequence, tokens, first) == key:
                yield file, offset
            offset += len(tokens)


def all_stand_aside(inner) -> None:
    """No layer and no final norm of an Olmo3Model does anything until it is taking_part."""
    for module in (*inner.layers, inner.norm):
        module.forward = _stand_aside


def _stand_aside(hidden_states, *_, **__):
    return hidden_states


@contextmanager
def taking_part(module, weights: dict) -> Iterator[None]:
    """The module with its weights and its own forward; afterwards without both."""
    module.load_state_dict(weights, assign=True)
    weights.clear()  # or the caller's dictionary would hold this layer while the next one is read
    del module.forward
    try:
        yield
    finally:
        module.forward = _stand_aside
        module.to("meta")


def check_names(model, tensors: dict, source: Path, *, tied: bool) -> None:
    """Every parameter of the live module has its tensor, of its shape, and every tensor its parameter."""
    live = {n: tuple(p.shape) for n, p in model.state_dict().items() if not (tied and n == HEAD)}
    faults = [f"{n} is in the module, not in the checkpoint" for n in live if n not in tensors]
    faults += [f"{n} is in the checkpoint, not in the module" for n in tensors if n not in live]
    faults += [
        f"{n} has shape {tensors[n].shape} in the checkpoint, {shape} in the module"
        for n, shape in live.items()
        if n in tensors and tensors[n].shape != shape
    ]
    if faults:
        raise BadInput(f"{source} does not fit the module that transformers builds from its config", faults[:12])


def tensor_of(array: np.ndarray, dtype: str, round_to: str | None, torch):
    """A tensor in dtype, its values rounded to those of round_to on the way. torch cannot take NumPy's bfloat16."""
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    tensor = tensor.to(getattr(torch, dtype))
    return tensor.to(getattr(torch, round_to)).to(tensor.dtype) if round_to else tensor
