"""Whether the tensors that are stored are the weights that a config asks for: names, shapes, dtypes, the tied head."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..olmo_jax.config import Olmo3Config
from .mapping import Weight, weights
from .safetensors_io import DTYPES

if TYPE_CHECKING:
    from .checkpoint import Tensor

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEAD_LEAF = "lm_head/kernel"  # of an Orbax tree, where the config has no such weight
MANY = 20  # names of one kind that are listed; the count of the rest follows
UNCOMPARED = "could not be compared with"
COMPARE_ROWS = 4096  # rows of embedding and head held at once


@dataclass(frozen=True)
class Fit:
    """The tensors in the order of the config's weights, and everything that does not fit."""

    tensors: dict[str, Tensor]
    faults: list[str]
    notes: list[str]


def fit_tensors(
    config: Olmo3Config,
    tensors: dict[str, Tensor],
    config_file: Path,
    damaged: bool = False,
    headers_only: bool = False,
) -> Fit:
    """Match stored tensors with the config's weights. Every stored tensor must be used once, every weight be there.

    damaged: files are known to be incomplete, so missing weights are not listed and nothing is read. headers_only: the
    tensors' bytes are elsewhere, nothing is read.
    """
    wanted = {w.hf: w for w in weights(config)}
    faults: list[str] = []
    notes: list[str] = []
    ignored = set()
    if config.tie_word_embeddings and HEAD in tensors:
        ignored.add(HEAD)
        if headers_only:
            notes.append(f"{HEAD} is stored although the config ties it; it {UNCOMPARED} {EMBEDDING}")
        elif not damaged:
            _check_tied(tensors, config_file, faults, notes)
    missing = [] if damaged else [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted and name not in ignored]
    for name in missing[:MANY]:
        faults.append(f"{name} is missing: {config_file} asks for it{_tied_hint(name)}")
    if len(missing) > MANY:
        faults.append(f"... and {len(missing) - MANY} more weights are missing, {len(missing)} of {len(wanted)} in all")
    for name in unexpected[:MANY]:
        if config.tie_word_embeddings and name == HEAD_LEAF:
            why = (
                f"{config_file} ties the head to the embedding (tie_word_embeddings is true). A run that starts from this tree "
                "would train a head of its own: set it to false if that is meant, and take the head out of the tree if not"
            )
        else:
            near = _nearest(name, missing, wanted)
            why = "no weight of this model has that name" + (f"; the nearest is {near}" if near else "")
        faults.append(f"{tensors[name].name} in {tensors[name].file} is unexpected: {why}")
    if len(unexpected) > MANY:
        faults.append(f"... and {len(unexpected) - MANY} more tensors are unexpected, {len(unexpected)} in all")
    for name, tensor in tensors.items():
        if name in ignored:
            continue
        if tensor.code not in DTYPES:
            faults.append(
                f"{tensor.name} in {tensor.file} has dtype {tensor.code}, which is not supported (F32, BF16 and F16 "
                "are). Is the checkpoint quantised? Take the unquantised one: it is not cast silently"
            )
        elif name in wanted and tensor.shape != wanted[name].shape:
            faults.append(_shape_fault(tensor, wanted[name], config, config_file))
    return Fit({n: tensors[n] for n in wanted if n in tensors}, faults, notes)


def _shape_fault(tensor: Tensor, weight: Weight, config: Olmo3Config, config_file: Path) -> str:
    found, wanted = tensor.shape, weight.shape
    text = f"{tensor.name} in {tensor.file} has shape {found}, {config_file} asks for {wanted}."
    if weight.hf in (HEAD, EMBEDDING) and found[1:] == wanted[1:] and found[0] > wanted[0]:
        return (
            f"{text} The vocabulary in the file is padded: {found[0]} rows, {found[0] - wanted[0]} beyond vocab_size "
            f"{config.vocab_size}. Cut the rows, or is vocab_size the wrong number?"
        )
    if weight.hf.endswith(("q_norm.weight", "k_norm.weight")) and found == (config.head_dim,):
        return f"{text} OLMo normalises the whole projection before the split into heads, not each head by itself"
    if found == wanted[::-1]:
        return f"{text} Its axes are the other way round: is it a JAX kernel?"
    if weight.hf.endswith(("k_proj.weight", "v_proj.weight", "k_norm.weight")):
        return f"{text} Is num_key_value_heads {config.num_key_value_heads} right?"
    return f"{text} Does this config belong to these files?"


def _check_tied(tensors: dict[str, Tensor], config_file: Path, faults: list[str], notes: list[str]) -> None:
    """A tied config with a stored head is taken only where head and embedding are the same bits."""
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding is None or head.code not in DTYPES:
        return  # reported under its own name
    same = head.shape == embedding.shape != () and head.code == embedding.code
    for start in range(0, head.shape[0] if same else 0, COMPARE_ROWS):
        stop = min(start + COMPARE_ROWS, head.shape[0])
        if not np.array_equal(head.rows(start, stop).view(np.uint8), embedding.rows(start, stop).view(np.uint8)):
            same = False
            break
    if same:
        notes.append(f"{HEAD} is stored although the config ties it; its bits equal {EMBEDDING}, it was left out")
    else:
        faults.append(
            f"{config_file}: tie_word_embeddings is true, but {HEAD} is stored in {head.file} and differs from "
            f"{EMBEDDING}: the config would throw the head away. Set tie_word_embeddings to false if the head is trained"
        )


def _tied_hint(name: str) -> str:
    return ". Is the head tied? Then tie_word_embeddings must be true" if name == HEAD else ""


def _nearest(name: str, missing: list[str], wanted: dict[str, Weight]) -> str | None:
    """The missing weight with the longest common end, else the most similar of all."""
    parts = name.split(".")

    def common_end(other: str) -> int:
        theirs = other.split(".")
        count = 0
        while count < min(len(parts), len(theirs)) and parts[-1 - count] == theirs[-1 - count]:
            count += 1
        return count

    best = max(missing, key=common_end, default=None)
    if best and common_end(best) >= 2:
        return best
    close = difflib.get_close_matches(name, missing[:400] or list(wanted)[:400], n=1, cutoff=0.5)
    return close[0] if close else None
