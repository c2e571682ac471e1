"""Prompts in, token sequences out, and what each can and cannot show."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..olmo_jax.config import SLIDING, Olmo3Config
from ..olmo_jax.errors import BadInput

BUILT_IN = "built-in-"  # how their ids begin
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
    documents: tuple[int, ...] = ()  # tokens of each packed document; () where the row is one document
    built_in: bool = False
    cut_from: int | None = None  # tokens before it was cut short
    text_bytes: int | None = None  # UTF-8 bytes of its text after the first token; None where tokens were given

    def parts(self) -> list[tuple[np.ndarray, int]]:
        """The documents alone, as (tokens, first position): what a packed row must be equal to."""
        if not self.documents:
            return [(self.tokens, self.first_position)]
        ends = np.cumsum(self.documents)
        return [(self.tokens[end - length : end], 0) for length, end in zip(self.documents, ends, strict=True)]

    def positions(self) -> np.ndarray:
        """Rotary position of every token [T]: counted from 0 in every document."""
        return np.concatenate([first + np.arange(len(tokens)) for tokens, first in self.parts()]).astype(np.int32)

    def segment_ids(self) -> np.ndarray | None:
        """Document of every token [T], from 1; None where the row is one document."""
        return (
            np.repeat(np.arange(1, len(self.documents) + 1), self.documents).astype(np.int32)
            if self.documents
            else None
        )

    def to_json(self) -> dict:
        return {**vars(self), "tokens": self.tokens.tolist()}

    @staticmethod
    def from_json(raw: dict) -> Sequence:
        """The sequence of to_json."""
        return Sequence(**{**raw, "tokens": np.asarray(raw["tokens"], np.int32), "documents": tuple(raw["documents"])})

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


def positions(sequences: list[Sequence]) -> np.ndarray:
    """Position of every token within its document, all sequences one after another."""
    return np.concatenate([np.arange(len(tokens)) for s in sequences for tokens, _ in s.parts()])


def built_in(config: Olmo3Config) -> list[Sequence]:
    """The sequences that always run: 512 random tokens, again with a window of 64 where layers slide, and packed documents.

    Tokens are drawn evenly over the vocabulary, so rare and high ids occur; id 0, the last id and the special tokens are
    put in by hand. With YaRN the second one's positions pass the end of the original context, which 512 tokens from
    position 0 would not reach at the released sizes.
    """
    rng = np.random.default_rng(BUILT_IN_SEED)
    tokens = rng.integers(0, config.vocab_size, BUILT_IN_TOKENS, dtype=np.int32)
    special = sorted({0, config.vocab_size - 1, *special_ids(config)})
    tokens[rng.choice(np.arange(1, BUILT_IN_TOKENS - 1), len(special), replace=False)] = special
    sequences = [Sequence("built-in-512", tokens, built_in=True)]
    original = original_context(config)
    first = max(0, original - BUILT_IN_TOKENS // 2) if original and original >= BUILT_IN_TOKENS else 0
    if SLIDING in config.layer_types:
        name = f"built-in-512-window-{IMPOSED_WINDOW}"
        sequences.append(Sequence(name, tokens, first, window=IMPOSED_WINDOW, built_in=True))
    elif first:
        sequences.append(Sequence(f"built-in-512-from-{first}", tokens, first, built_in=True))
    sequences.append(packed(tokens))
    return sequences


def packed(tokens: np.ndarray) -> Sequence:
    """Three documents in one row; the reference runs each alone. Lengths are odd so that no block or window hides an edge."""
    lengths = (101, 37, 118)
    return Sequence("built-in-packed", tokens[: sum(lengths)], documents=lengths, built_in=True)


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
            if identity.startswith(BUILT_IN):
                raise ValueError(f"id {identity!r}: names that begin with {BUILT_IN} are the built-in sequences'")
            if identity in seen:
                raise ValueError(f"id {identity!r} was used on line {seen[identity]} already")
            seen[identity] = number
            if "text" in entry:
                encode = encode or _encoder(tokenizer, path)
                encoded = encode(entry["text"])
                sequence = _sequence(identity, encoded.ids, config, max_tokens)
                sequences.append(replace(sequence, text_bytes=_bytes_after_first(entry["text"], encoded, sequence)))
            else:
                sequences.append(_sequence(identity, entry["tokens"], config, max_tokens))
        except (ValueError, RecursionError) as error:  # brackets in brackets, a thousand deep
            if isinstance(error, BadInput):
                raise
            no_json = isinstance(error, (json.JSONDecodeError, RecursionError))
            what = f"is not JSON: {error}" if no_json else str(error)
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
    str(entry["id"]).encode()  # half of a surrogate pair would break reports after the run; ValueError says where
    if len(kinds) != 1:
        raise ValueError(f"holds {' and '.join(kinds) or 'neither text nor tokens'}, one of text and tokens is wanted")
    unknown = sorted(set(entry) - {"id", "text", "tokens"})
    if unknown:
        raise ValueError(f"holds the unknown key {unknown[0]!r}")
    if kinds == ["text"] and not isinstance(entry["text"], str):
        raise ValueError(f"text is {entry['text']!r}, a string is wanted")
    if kinds == ["text"]:
        entry["text"].encode()
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


def _bytes_after_first(text: str, encoded, sequence: Sequence) -> int:
    """Bytes of the text that tokens 1 to T - 1 stand for: those that a loss is about."""
    ends = [encoded.offsets[i][1] for i in (0, len(sequence.tokens) - 1)]  # in characters of the text
    return len(text[ends[0] : ends[1]].encode())


def _encoder(tokenizer: Path | None, path: Path):
    if tokenizer is None:
        raise BadInput(
            f"{path} holds text, but neither checkpoint has a tokenizer.json beside it. "
            'Give {"id": ..., "tokens": [...]} or put the tokenizer there'
        )
    try:
        from tokenizers import Tokenizer  # only where text is given
    except ImportError:
        raise BadInput(f"{path} holds text, and tokenizers is not installed: pip install tokenizers") from None
    try:
        loaded = Tokenizer.from_str(tokenizer.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise BadInput(f"{tokenizer} cannot be read as a tokenizer: {error}") from None
    loaded.no_truncation()
    loaded.no_padding()

    def encode(text: str):
        try:
            return loaded.encode(text, add_special_tokens=False)
        except Exception as error:  # as above
            raise ValueError(f"cannot be encoded with {tokenizer}: {error}") from None

    return encode


# Everything that a run may leave uncovered, in whichever module its item is made.
COVERAGE = (
    "attention", "packed", "grouped_heads", "window", "yarn", "high_token_ids", "special_tokens", "bfloat16_interval",
    "gradients",
)  # fmt: skip


def coverage(config: Olmo3Config, sequences: list[Sequence]) -> list[dict]:
    """What these sequences can show on this config: {what, covered, detail}; `what` is the name for --accept-uncovered.

    Things that the config does not have (no sliding layer, no YaRN, no special tokens) are not listed.
    """
    longest = max(len(tokens) for s in sequences for tokens, _ in s.parts())
    seen = np.unique(np.concatenate([s.tokens for s in sequences]))
    items = [
        _item(
            "attention",
            longest > 1,
            f"longest document {longest} tokens; position 0 sees one key, so shows no attention fault",
        ),
        _item(
            "packed", any(s.documents for s in sequences), "several documents in one row, which must not see each other"
        ),
    ]
    if config.num_attention_heads != config.num_key_value_heads:
        group = config.num_attention_heads // config.num_key_value_heads
        detail = f"{group} query heads share each of {config.num_key_value_heads} kv heads; shown by any 2 tokens"
        items.append(_item("grouped_heads", longest > 1, detail))
    if SLIDING in config.layer_types:
        past = max(len(tokens) - (s.window or config.sliding_window) for s in sequences for tokens, _ in s.parts())
        own = max(len(tokens) for s in sequences for tokens, _ in s.parts() if s.window is None or s.built_in)
        how = "" if own > config.sliding_window else f" (a window of {IMPOSED_WINDOW} stands in for it)"
        detail = f"window {config.sliding_window} tokens{how}; {max(past, 0)} positions lie past a window's edge"
        items.append(_item("window", past > 0, detail))
    original = original_context(config)
    if original:
        last = max(s.first_position + len(tokens) for s in sequences for tokens, _ in s.parts())
        items.append(_item("yarn", last > original, f"original context {original} tokens; positions reach {last - 1}"))
    high = int(seen[-1])
    detail = f"{len(seen)} different ids up to {high} of {config.vocab_size}"
    items.append(_item("high_token_ids", high >= config.vocab_size - max(1, config.vocab_size // 100), detail))
    special = special_ids(config)
    if special:
        missing = sorted(set(special) - set(seen.tolist()))
        detail = f"special ids {special}" + (f", of which {missing} do not occur" if missing else " all occur")
        items.append(_item("special_tokens", not missing, detail))
    return items


def mask_length(config: Olmo3Config) -> int:
    """Tokens of the mask in which visible keys are counted: past the window by a few."""
    return (config.sliding_window if SLIDING in config.layer_types else IMPOSED_WINDOW) + 4


def probe_positions(config: Olmo3Config) -> list[int]:
    """Query positions whose visible keys are counted: the first, and those around the edge of the window."""
    length = mask_length(config)
    return sorted({0, *range(max(0, length - 8), length)})


def expected_keys(config: Olmo3Config) -> dict[str, list[list[int]]]:
    """By layer type, [position, keys seen] as the config has it: the current token and what lies before it."""
    return {
        t: [[p, min(p + 1, config.sliding_window) if t == SLIDING else p + 1] for p in probe_positions(config)]
        for t in sorted(set(config.layer_types))
    }


def special_ids(config: Olmo3Config) -> list[int]:
    """Ids of the beginning, end and padding tokens that the config names."""
    found = set()
    for value in config.token_ids.values():
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    return sorted(v for v in found if 0 <= v < config.vocab_size)


def _item(what: str, covered: bool, detail: str) -> dict:
    return {"what": what, "covered": bool(covered), "detail": detail}
