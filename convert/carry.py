"""Tokenizer and generation files: which lie beside a source, whether they fit the config, and their copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..olmo_jax.config import Olmo3Config

PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


def carried_files(folder: Path) -> list[Path]:
    """The files of a folder that go along with a checkpoint, sorted by name."""
    return sorted({p for pattern in PATTERNS for p in folder.glob(pattern) if p.is_file()})


def copy_files(files: list[Path], target: Path) -> None:
    """Copy the contents (a hub cache holds symlinks)."""
    for file in files:
        (target / file.name).write_bytes(file.read_bytes())


def tokenizer_faults(files: list[Path], config: Olmo3Config) -> list[str]:
    """What keeps the tokenizer from belonging to this config: damaged files, ids beyond the vocabulary, other special ids."""
    faults: list[str] = []
    read = {file.name: _read_json(file, faults) for file in files if file.suffix == ".json"}
    paths = {file.name: file for file in files}
    tokenizer = read.get("tokenizer.json")
    if not isinstance(tokenizer, Mapping):
        return faults
    listed = tokenizer.get("added_tokens") or []
    if not isinstance(listed, list) or not all(
        isinstance(t, Mapping) and isinstance(t.get("content"), str) for t in listed
    ):
        return [*faults, f"{paths['tokenizer.json']} holds added_tokens that are no tokens: it is damaged"]
    added = {t["content"]: t.get("id") for t in listed}
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids = {**vocabulary, **added} if isinstance(vocabulary, Mapping) else added
    ids = {text: i for text, i in ids.items() if isinstance(i, int)}
    whole = list(ids.values())
    if whole and max(whole) >= config.vocab_size:
        faults.append(
            f"{paths['tokenizer.json']} has ids up to {max(whole)}, but vocab_size is {config.vocab_size}: "
            "a tokenizer of another model?"
        )
    said = read.get("tokenizer_config.json")
    generation = read.get("generation_config.json")
    for kind in ("eos", "pad", "bos"):
        token = said.get(f"{kind}_token") if isinstance(said, Mapping) else None
        token = token.get("content") if isinstance(token, Mapping) else token
        accepted = _as_ids(config.token_ids.get(f"{kind}_token_id"))
        if isinstance(generation, Mapping):  # instruction-tuned models end their turns with a second token
            accepted |= _as_ids(generation.get(f"{kind}_token_id"))
        if accepted and isinstance(token, str) and token in ids and ids[token] not in accepted:
            faults.append(
                f"the config's {kind}_token_id is {sorted(accepted)}, but {kind}_token {token!r} of "
                f"{paths['tokenizer_config.json']} has id {ids[token]}: tokenizer and config are out of step"
            )
    return faults


def _as_ids(value) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int)}


def _read_json(file: Path, faults: list[str]):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        head = file.open("rb").read(23)
        what = "is a Git LFS pointer: run `git lfs pull` there" if head == b"version https://git-lfs" else "is not JSON"
        faults.append(f"{file} {what}")
        return None
