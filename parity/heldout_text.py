"""The held-out text of a comparison: prompts, token files, or what the records of the references hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..convert import places
from ..olmo_jax.errors import BadInput
from . import batches, token_files
from .batches import Sequence
from .identity import file_hash


def read(opened: list[tuple], options) -> tuple[list[Sequence], list[dict]]:
    """The sequences that every pair is compared on, and an entry for each file. options: HeldoutOptions.

    opened: (pair, reference, candidate). Raises BadInput where the pairs cannot share tokens.
    """
    sizes = {pair.step: reference.config.vocab_size for pair, reference, _ in opened}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{size} at step {step}" for step, size in sizes.items())
        raise BadInput(f"the checkpoints have several vocabularies ({text}): they cannot read the same tokens")
    records = [(pair, reference) for pair, reference, _ in opened if reference.kind == "record"]
    if records and options.files:
        raise BadInput("a record brings its own text: leave the files out, or give them to olmo-parity record --batch")
    if not records and not options.files:
        raise BadInput("no held-out text is named: files of JSON lines, or token files (.npy)")
    if records:
        sequences, files = _of_records(records)
    else:
        sequences, files = _of_files(opened, options)
    if not any(len(s.tokens) > 1 for s in sequences):
        raise BadInput("every sequence of the held-out text is one token: nothing is predicted")
    names = [s.id for s in sequences]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"two files hold a sequence {twice[0]}: rename one, so that a report can tell them apart")
    return sequences, files


def _of_files(opened: list[tuple], options) -> tuple[list[Sequence], list[dict]]:
    config = min((side.config for _, *both in opened for side in both), key=lambda c: c.max_position_embeddings)
    sequences, files = [], []
    for file in map(Path, options.files):
        if file.suffix == token_files.SUFFIX:
            found, entry = token_files.read_token_file(
                file, config, dtype=options.tokens_dtype, length=options.sequence_length, most=options.max_tokens
            )
        else:
            found = batches.read_prompts(file, config, _tokenizer(opened), options.max_tokens)
            entry = {"file": str(file), "form": "JSON lines", "rows": len(found), "tokens": _tokens(found)}
        sequences += found
        files.append({**entry, "sha256_of_tokens": _hash(found)})
    return sequences, files


def _of_records(records: list[tuple]) -> tuple[list[Sequence], list[dict]]:
    """What was recorded beside the built-in sequences, which are random tokens and no text."""
    found = {pair.step: [s for s in record.sequences() if not s.built_in] for pair, record in records}
    (first, sequences), *others = found.items()
    if not sequences:
        raise BadInput(f"{records[0][1].path} holds no text: olmo-parity record --batch FILE would have kept some")
    for step, theirs in others:
        if [s.sha256 for s in theirs] != [s.sha256 for s in sequences]:
            raise BadInput(
                f"the records of step {first} and step {step} hold different text: record both with the same --batch"
            )
    path = str(records[0][1].path)
    return sequences, [
        {"file": path, "form": "record", "rows": len(sequences), "tokens": _tokens(sequences), "sha256_of_tokens": _hash(sequences)}
    ]  # fmt: skip


def _tokenizer(opened: list[tuple]) -> Path | None:
    """The tokenizer.json beside the checkpoints. Raises BadInput where they have different ones."""
    here = [side.path for _, *both in opened for side in both if not places.is_remote(side.path)]
    beside = [Path(path) / "tokenizer.json" for path in here]
    there = [file for file in beside if file.is_file()]
    hashes = {file_hash(file): file for file in there}
    if len(hashes) > 1:
        a, b, *_ = hashes.values()
        raise BadInput(f"{a} and {b} are different tokenizers: give tokens, so that every step reads the same")
    return there[0] if there else None


def notes(files: list[dict], sequences: list[Sequence]) -> list[str]:
    """What a reader should know about how the text was cut."""
    found = []
    for f in files:
        if "row_length" in f:
            rest = (
                ""
                if f["tokens"] == f["tokens_in_file"]
                else f", the first {f['tokens']:,} of {f['tokens_in_file']:,} tokens"
            )
            last = "" if f["last_row"] == f["row_length"] else f", the last of {f['last_row']}"
            left = ", one token left out" if f["left_out"] else ""
            found.append(
                f"{f['file']}: {f['dtype']} ({f['form']}){rest}, {f['rows']} rows of {f['row_length']} tokens{last}{left}; "
                f"documents are not separated ({f['end_of_text_tokens']} end-of-text tokens)"
            )
    found += [f"{s.id} was cut from {s.cut_from} to {len(s.tokens)} tokens" for s in sequences if s.cut_from]
    single = sum(len(s.tokens) == 1 for s in sequences)
    if single:
        found.append(f"{single} sequences are one token, of which nothing is predicted")
    return found


def _tokens(sequences: list[Sequence]) -> int:
    return sum(len(s.tokens) for s in sequences)


def _hash(sequences: list[Sequence]) -> str:
    return hashlib.sha256("".join(s.sha256 for s in sequences).encode()).hexdigest()
