"""Token files as OLMo-core writes them, raw numbers with the suffix .npy, and true .npy files: rows of tokens to run.

OLMo-core's .npy files have no header: they are the bytes of a NumPy array (`np.memmap(..., dtype=uint32)`), little-endian, all
documents one after another with the end-of-text token behind each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.errors import BadInput
from .batches import MAX_FAULTS, Sequence

SUFFIX = ".npy"
MAGIC = b"\x93NUMPY"
DTYPES = ("uint8", "uint16", "uint32", "uint64")
LENGTH = 1024  # tokens of a row, where nothing is chosen
MOST_TOKENS = 32_768  # of a file, where nothing is chosen: token files hold billions
MOST_WITH_LOGITS = 4096  # of a file whose logits are kept: up to 1 MB a token
CHECKED = 1 << 20  # values that show which type a file was written in
FEWEST = 16  # values that show it at all
MOSTLY = 0.5  # share of tokens within the vocabulary of a file that was read as it was written, and holds some that do not belong


def read_token_file(
    path: Path,
    config: Olmo3Config,
    *,
    dtype: str | None = None,
    length: int | None = None,
    most: int | None = None,
) -> tuple[list[Sequence], dict]:
    """The first `most` tokens of a file in rows of `length`, and what is to be said about them.

    The last row is as long as the tokens last; one token alone predicts nothing and is left out. Rows are cut without regard to
    documents, and nothing separates the documents of a row, as in OLMo-core's own training without document masking. A
    two-dimensional true .npy [rows, T] keeps its rows. Raises BadInput for what is no token file, and for tokens outside
    the vocabulary with their positions.
    """
    path = Path(path)
    values, form = _open(path, config, dtype)
    total = values.size
    if values.ndim == 2:
        if length is not None and length != values.shape[1]:
            raise BadInput(f"{path} holds rows of {values.shape[1]} tokens, {length} were asked for")
        length = values.shape[1]
    length = min(LENGTH, config.max_position_embeddings) if length is None else length
    if length > config.max_position_embeddings:
        raise BadInput(f"rows of {length} tokens: the model has {config.max_position_embeddings} positions")
    if length < 2:
        raise BadInput(f"rows of {length} tokens predict nothing: 2 or more are wanted")
    most = most or MOST_TOKENS
    used = np.asarray(values[: -(-most // length)] if values.ndim == 2 else values[:most]).reshape(-1)[:most]
    _check(used, config.vocab_size, path, values.dtype.name)
    rows = [used[a : a + length].astype(np.int32) for a in range(0, used.size, length)]
    left_out = rows.pop() if len(rows[-1]) < 2 else rows[-1][:0]
    if not rows:
        raise BadInput(f"{path} holds {total} tokens: 2 or more are wanted")
    sequences = [Sequence(f"{path.name}[{a * length}:{a * length + len(row)}]", row) for a, row in enumerate(rows)]
    ends = config.token_ids.get("eos_token_id")
    ends = [] if ends is None else np.atleast_1d(ends).tolist()
    return sequences, {
        "file": str(path),
        "form": form,
        "dtype": values.dtype.name,
        "tokens_in_file": int(total),
        "tokens": int(used.size),
        "row_length": int(length),
        "rows": len(rows),
        "last_row": len(rows[-1]),
        "left_out": int(left_out.size),
        "end_of_text_tokens": int(np.isin(used, ends).sum()),
    }


def _open(path: Path, config: Olmo3Config, dtype: str | None) -> tuple[np.ndarray, str]:
    """All tokens of a file, mapped, and how they were found to be stored."""
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"--tokens-dtype {dtype}: {', '.join(DTYPES)} are known")
    try:
        with open(path, "rb") as file:
            start = file.read(len(MAGIC))
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    if not size:
        raise BadInput(f"{path} is empty")
    if start == MAGIC:
        return _npy(path, dtype), "NumPy file with a header"
    if dtype is None:
        return _deduced(path, config.vocab_size, size)
    width = np.dtype(dtype).itemsize
    if size % width:
        raise BadInput(f"{path} has {size} bytes, which is no whole number of {dtype}")
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r"), "raw, its type stated"


def _npy(path: Path, dtype: str | None) -> np.ndarray:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises several kinds
        raise BadInput(f"{path} begins like a NumPy file and cannot be read as one: {error}") from None
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2) or not values.size:
        raise BadInput(f"{path} holds {values.dtype} {values.shape}; whole numbers [T] or [rows, T] are wanted")
    if dtype is not None and values.dtype.name != dtype:
        raise BadInput(f"{path} is a NumPy file of {values.dtype.name} by its own header, --tokens-dtype says {dtype}")
    return values


def _deduced(path: Path, vocab_size: int, size: int) -> tuple[np.ndarray, str]:
    """The widest type in which every token lies within the vocabulary.

    Read too wide, two tokens make one number beyond any vocabulary, unless every second one is 0; read too narrow, every
    second one is 0. So a wider type that fits is the one that was written.
    """
    likely = None
    for dtype in reversed(DTYPES):
        if size % np.dtype(dtype).itemsize or np.iinfo(dtype).max < vocab_size - 1:
            continue
        values = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
        inside = float((values[:CHECKED] < vocab_size).mean())
        if inside == 1:
            if values.size < FEWEST or not values[:CHECKED].any():
                raise BadInput(f"{path} holds too little to tell its type from ({size} bytes): give --tokens-dtype")
            return values, f"raw, its type deduced from the vocabulary of {vocab_size}"
        if likely is None and inside > MOSTLY:
            likely = values  # to name the tokens that do not belong there
    if likely is None:
        kinds = " or ".join(d for d in DTYPES if np.iinfo(d).max >= vocab_size - 1)
        raise BadInput(
            f"{path} ({size} bytes) holds no tokens of a vocabulary of {vocab_size}, read as {kinds}. Is it of another "
            "tokenizer? Is it no token file?"
        )
    return likely, "raw, its type the likeliest"


def _check(tokens: np.ndarray, vocab_size: int, path: Path, dtype: str) -> None:
    outside = np.flatnonzero((tokens >= vocab_size) | (tokens < 0))
    if outside.size:
        faults = [f"token {tokens[i]} at position {i}" for i in outside[:MAX_FAULTS]]
        if outside.size > MAX_FAULTS:
            faults.append(f"and {outside.size - MAX_FAULTS} more")
        raise BadInput(
            f"{path}, read as {dtype}: {outside.size} of {tokens.size} tokens lie outside the vocabulary of {vocab_size}. "
            "Is it of another tokenizer, or its type another (--tokens-dtype)?",
            faults,
        )
