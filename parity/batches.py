"""Prompts in, token sequences out, and what each can and cannot show."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..olmo_jax.config import SLIDING, Olmo3Config
from ..olmo_jax.errors import BadInput

BUILT_IN_TOKENS = 512
IMPOSED_WINDOW = 64  # tokens; small enough that 512 tokens pass it eight times at any model size
BUILT_IN_SEED = 20251120
MAX_FAULTS = 20  # bad lines named before the rest are only counted


@dataclass(frozen=True)
class Sequence:
    """One row of tokens, run alone and unpadded on the reference."""

    id: str
    tokens: np.ndarray  # [T] int32
    first_position: int = 0  # rotary position of token 0
    window: int | None = None  # imposed on the sliding layers of both sides; None keeps the model's own
    built_in: bool = False
    cut_from: int | None = None  # tokens before it was cut short

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


def built_in(config: Olmo3Config) -> list[Sequence]:
    """The sequences that always run: 512 random tokens, and again with a window of 64 where layers slide.

    Tokens are drawn evenly over the vocabulary, so rare and high ids occur; id 0, the last id and the special tokens are
    put in by hand. With YaRN the second one's positions pass the end of the original context, which 512 tokens from
    position 0 would not reach at the released sizes.
    """
    rng = np.random.default_rng(BUILT_IN_SEED)
    tokens = rng.integers(0, config.vocab_size, BUILT_IN_TOKENS, dtype=np.int32)
    special = [0, config.vocab_size - 1]
    for value in config.token_ids.values():
        special += value if isinstance(value, list) else [value]
    special = sorted({v for v in special if isinstance(v, int) and 0 <= v < config.vocab_size})
    tokens[rng.choice(np.arange(1, BUILT_IN_TOKENS - 1), len(special), replace=False)] = special
    sequences = [Sequence("built-in-512", tokens, built_in=True)]
    original = original_context(config)
    first = max(0, original - BUILT_IN_TOKENS // 2) if original and original >= BUILT_IN_TOKENS else 0
    if SLIDING in config.layer_types:
        name = f"built-in-512-window-{IMPOSED_WINDOW}"
        sequences.append(Sequence(name, tokens, first, window=IMPOSED_WINDOW, built_in=True))
    elif first:
        sequences.append(Sequence(f"built-in-512-from-{first}", tokens, first, built_in=True))
    return sequences


def original_context(config: Olmo3Config) -> int | None:
    """Tokens of YaRN's original context, None where no layer has YaRN."""
    contexts = [r.original_max_position_embeddings for r in config.rope.values() if r.rope_type == "yarn"]
    return max(contexts, default=None)


def read_prompts(path: Path, config: Olmo3Config, tokenizer: Path | None, max_tokens: int | None) -> list[Sequence]:
    """Read a prompts.jsonl: one object a line, {"id", "text"} or {"id", "tokens"}.

    Text is encoded with the tokenizer.json given, and no token is added. A sequence longer than max_tokens is cut and
    says so. Raises BadInput listing the bad lines by number: not JSON, wrong keys, duplicate ids, empty, ids outside the
    vocabulary, longer than the model's positions.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}. --batch wants a file of one JSON object a line") from None
    encode = None
    faults: list[str] = []
    seen: dict[str, int] = {}
    sequences = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError(f"holds a {type(entry).__name__}, an object is wanted")
            _check_keys(entry)
            identity = str(entry["id"])
            if identity in seen:
                raise ValueError(f"id {identity!r} was used on line {seen[identity]} already")
            seen[identity] = number
            if "text" in entry:
                encode = encode or _encoder(tokenizer, path)
                ids = encode(entry["text"])
            else:
                ids = entry["tokens"]
            sequences.append(_sequence(identity, ids, config, max_tokens))
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            what = f"is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            faults.append(f"line {number}: {what}")
    if len(faults) > MAX_FAULTS:
        faults = [*faults[:MAX_FAULTS], f"and {len(faults) - MAX_FAULTS} more lines"]
    if faults:
        raise BadInput(f"{path} cannot be used", faults)
    if not sequences:
        raise BadInput(f"{path} holds no prompts: nothing would be compared")
    return sequences


def _check_keys(entry: dict) -> None:
    kinds = [key for key in ("text", "tokens") if key in entry]
    if "id" not in entry:
        raise ValueError("id is missing")
    if not isinstance(entry["id"], (str, int)) or isinstance(entry["id"], bool):
        raise ValueError(f"id is {entry['id']!r}, text or a whole number is wanted")
    if len(kinds) != 1:
        raise ValueError(f"holds {' and '.join(kinds) or 'neither text nor tokens'}, one of text and tokens is wanted")
    unknown = sorted(set(entry) - {"id", "text", "tokens"})
    if unknown:
        raise ValueError(f"holds the unknown key {unknown[0]!r}")
    if kinds == ["text"] and not isinstance(entry["text"], str):
        raise ValueError(f"text is {entry['text']!r}, a string is wanted")
    if kinds == ["tokens"] and not (
        isinstance(entry["tokens"], list)
        and all(isinstance(t, int) and not isinstance(t, bool) for t in entry["tokens"])
    ):
        raise ValueError("tokens is not a list of whole numbers")


def _sequence(identity: str, ids: list[int], config: Olmo3Config, max_tokens: int | None) -> Sequence:
    if not ids:
        raise ValueError("has no tokens")
    outside = [t for t in ids if not 0 <= t < config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    kept = ids[:max_tokens] if max_tokens else ids
    if len(kept) > config.max_position_embeddings:
        raise ValueError(
            f"has {len(kept)} tokens, the model has {config.max_position_embeddings} positions "
            f"(--max-tokens {config.max_position_embeddings} would cut it, and say so)"
        )
    cut_from = len(ids) if len(kept) < len(ids) else None
    return Sequence(identity, np.asarray(kept, np.int32), cut_from=cut_from)


def _encoder(tokenizer: Path | None, path: Path):
    if tokenizer is None:
        raise BadInput(
            f"{path} holds text, but neither checkpoint has a tokenizer.json beside it. "
            'Give {"id": ..., "tokens": [...]} or put the tokenizer there'
        )
    from tokenizers import Tokenizer  # only where text is given

    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises bare Exception
        raise BadInput(f"{tokenizer} cannot be read as a tokenizer: {error}") from None
    loaded.no_truncation()
    loaded.no_padding()
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def coverage(config: Olmo3Config, sequences: list[Sequence]) -> list[dict]:
    """What these sequences can show on this config: {what, covered, detail}; `what` is the name for --accept-uncovered."""
    longest = max(sequences, key=lambda s: len(s.tokens))
    items = [
        {
            "what": "attention",
            "covered": len(longest.tokens) > 1,
            "detail": f"longest sequence: {len(longest.tokens)} tokens; position 0 sees one key and shows no attention fault",
        }
    ]
    if SLIDING in config.layer_types:
        past = max(len(s.tokens) - (s.window or config.sliding_window) for s in sequences)
        how = "" if config.sliding_window < BUILT_IN_TOKENS else f" (a window of {IMPOSED_WINDOW} stands in for it)"
        items.append(
            {
                "what": "window",
                "covered": past > 0,
                "detail": f"window {config.sliding_window} tokens{how}; {max(past, 0)} positions lie past a window's edge",
            }
        )
    original = original_context(config)
    if original:
        last = max(s.first_position + len(s.tokens) for s in sequences)
        items.append(
            {
                "what": "yarn",
                "covered": last > original,
                "detail": f"original context {original} tokens; positions reach {last - 1}",
            }
        )
    return items
