"""The reference's side of a run, kept in a folder, to be replayed where torch is not installed (a TPU host).

Kept per token and vocabulary entry: the float32 logits (4 bytes), the bfloat16 ones as their bits (2 bytes), and for a
float32 checkpoint the float32 logits of the weights rounded to bfloat16 (4 bytes). Nothing is lost, so a replay gives the
verdict of the live run. At 100,278 entries that is 0.6 MB a token (bfloat16 checkpoint) or 1.0 MB.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..convert.sources import Source
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import from_hf, to_hf
from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import rope_tables, tables_hash
from .batches import Sequence
from .identity import file_hash, hf_hashes
from .losses import Losses

SCHEMA = "olmo-parity/record/1"
FILE = "record.json"
ROWS_AT_ONCE = 256  # tokens widened from bfloat16 at a time


@dataclass(frozen=True)
class Recorded:
    """An opened record. It stands where a live reference Source stands in a run."""

    path: Path
    config: Olmo3Config
    record: dict

    kind = "record"
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype the reference's weights are stored in."""
        return self.record["dtype"]

    @property
    def side(self) -> dict:
        """The reference as the live run's record described it."""
        return {**self.record["side"], "recorded_at": self.record["created"], "record": str(self.path)}

    @property
    def noise(self) -> dict:
        return self.record["noise"]

    def sequences(self) -> list[Sequence]:
        """The sequences that were recorded."""
        return [Sequence.from_json(s) for s in self.record["sequences"]]

    def restore(self, dtype: str, round_to: str | None, folder: Path) -> dict:
        """Put the logits of one run at folder/<index>.npy, float32 [T, V]; returns the run's settings."""
        run, files = self._run(dtype, round_to)
        folder.mkdir()
        for index in range(len(files)):
            kept = self._logits(files, run, index)
            if kept.dtype == np.float32:
                (folder / f"{index}.npy").symlink_to(files[index])
                continue
            wide = np.lib.format.open_memmap(folder / f"{index}.npy", "w+", np.float32, kept.shape)
            for start in range(0, len(kept), ROWS_AT_ONCE):
                wide[start : start + ROWS_AT_ONCE] = _widened(kept[start : start + ROWS_AT_ONCE])
            wide.flush()
        return run["settings"]

    def losses(self, dtype: str, round_to: str | None, folder: Path, sequences: list[Sequence]) -> dict:
        """Put the losses of some of its sequences in one run at folder/<place in sequences>.npy; returns the run's settings."""
        run, files = self._run(dtype, round_to)
        folder.mkdir()
        recorded = {s.id: index for index, s in enumerate(self.sequences())}
        for place, sequence in enumerate(sequences):
            kept = self._logits(files, run, recorded[sequence.id])
            found = Losses(folder, place, sequence.tokens, kept.shape[1])
            for start in range(0, len(kept), ROWS_AT_ONCE):
                found[start : start + ROWS_AT_ONCE, :] = _widened(kept[start : start + ROWS_AT_ONCE])
        return run["settings"]

    def _run(self, dtype: str, round_to: str | None) -> tuple[dict, list[Path]]:
        """One run of the record, and where its logits lie."""
        name = run_name(dtype, round_to, self.dtype)
        if name not in self.record["runs"]:
            raise BadInput(
                f"{self.path} holds no run in {dtype}" + (f" with weights rounded to {round_to}" if round_to else "")
            )
        run = self.record["runs"][name]
        return run, [self.path / name / f"{index}.npy" for index in range(len(run["files"]))]

    def _logits(self, files: list[Path], run: dict, index: int) -> np.ndarray:
        """The logits of one sequence as they were kept, mapped, if they are what was recorded."""
        if file_hash(files[index]) != run["files"][index]:
            raise BadInput(f"{files[index]} is not what was recorded: it was cut short or changed. Record again")
        return np.load(files[index], mmap_mode="r")

    def weight_differences(self, candidate: Source) -> list[dict]:
        """As weights.weight_differences, from hashes: it can say which weights differ, not where."""
        dtype = _dtype_of(candidate)
        rounded = self.record["weights_rounded"] if dtype == "bfloat16" != self.dtype else None
        stored = rounded or self.record["weights"]
        widened = dtype == "float32" != self.dtype  # a conversion to float32 keeps every value
        found = hf_hashes(candidate, self.dtype if widened else None, exact=widened)
        return [
            {
                "weight": name,
                "values": None,
                "first": None,
                "sentence": f"{name} has other bytes than the recorded reference's (sha256 {stored.get(name, 'none')[:12]}, "
                f"found {found.get(name, 'none')[:12]})",
            }
            for name in {**stored, **found}
            if stored.get(name) != found.get(name)
        ]

    def check_belongs(self, candidate: Source) -> None:
        """Raise BadInput where the record is of another model: stale, not a bad conversion."""
        faults = [
            f"{name} is {a!r} in the record, {b!r} in the candidate's config"
            for name, a, b in self.config.differences(candidate.config)
        ]
        tables = tables_hash(rope_tables(candidate.config))
        if tables != self.record["rotary_tables_sha256"]:
            faults.append(
                f"the rotary tables differ: sha256 {self.record['rotary_tables_sha256'][:12]} in the record, {tables[:12]} "
                "from the candidate's config"
            )
        if faults:
            raise BadInput(
                f"the record {self.path} does not belong to this candidate: it is stale, or of another model", faults
            )


def _widened(kept: np.ndarray) -> np.ndarray:
    """Logits as float32; those of a bfloat16 run are kept as their bits."""
    return kept if kept.dtype == np.float32 else (kept.astype(np.uint32) << 16).view(np.float32)


def is_record(path: Path) -> bool:
    return (path / FILE).is_file()


def open_record(path: Path) -> Recorded:
    """Raises BadInput where record.json cannot be read or is of another schema."""
    file = path / FILE
    try:
        record = json.loads(file.read_text())
        if record["schema"] != SCHEMA:
            raise BadInput(f"{file} is of schema {record['schema']!r}, {SCHEMA!r} is wanted: record again")
        config = from_hf(record["config"], str(file))
        for key in (
            "dtype",
            "side",
            "noise",
            "sequences",
            "runs",
            "weights",
            "rotary_tables_sha256",
            "created",
            "versions",
        ):
            record[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} cannot be read as a record: {type(error).__name__} {error}") from None
    return Recorded(path.absolute(), config, record)


def run_name(dtype: str, round_to: str | None, stored: str) -> str:
    """The name of a run; rounding weights to what they are stored in is no rounding."""
    return dtype if round_to in (None, stored) or dtype != "float32" else f"{dtype}-rounded-to-{round_to}"


def write_record(
    target: Path,
    source: Source,
    sequences: list[Sequence],
    run: Callable[[str, str | None, Path], dict],
    noise: Callable[[Path], dict],
    facts: dict,
) -> dict:
    """Make the record at target: staged beside it, renamed when whole. Returns what was written.

    run(dtype, round_to, folder) writes the logits of one run; noise(folder) measures the reference's own noise with the
    float32 logits in folder. facts: dtype, side, versions, created. Raises BadInput where target exists.
    """
    if target.exists():
        raise BadInput(f"{target} exists already: a record is not written over, move it away")
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        staging.mkdir()
        wanted = [("float32", None), ("bfloat16", None)]
        if facts["dtype"] != "bfloat16":
            wanted.insert(1, ("float32", "bfloat16"))
        runs = {}
        for dtype, round_to in wanted:
            name = run_name(dtype, round_to, facts["dtype"])
            settings = run(dtype, round_to, staging / name)
            if dtype == "bfloat16":
                for index in range(len(sequences)):
                    _keep_bits(staging / name / f"{index}.npy")
            files = [file_hash(staging / name / f"{i}.npy") for i in range(len(sequences))]
            runs[name] = {"settings": settings, "files": files}
        record = {
            "schema": SCHEMA,
            **facts,
            "config": to_hf(source.config),
            "rotary_tables_sha256": tables_hash(rope_tables(source.config)),
            "weights": hf_hashes(source),
            "weights_rounded": hf_hashes(source, "bfloat16") if facts["dtype"] != "bfloat16" else None,
            "noise": noise(staging / "float32"),
            "sequences": [s.to_json() for s in sequences],
            "runs": runs,
        }
        (staging / FILE).write_text(json.dumps(record))
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return record


def _keep_bits(file: Path) -> None:
    """Replace float32 logits that came from bfloat16 by their upper 16 bits; raises ValueError if that would lose any."""
    wide = np.load(file, mmap_mode="r")
    partial = file.with_suffix(".bits")
    narrow = np.lib.format.open_memmap(partial, "w+", np.uint16, wide.shape)
    for start in range(0, len(wide), ROWS_AT_ONCE):
        bits = np.ascontiguousarray(wide[start : start + ROWS_AT_ONCE]).view(np.uint32)
        if (bits & 0xFFFF).any():
            raise ValueError(f"{file} holds logits that are not bfloat16")
        narrow[start : start + ROWS_AT_ONCE] = bits >> 16
    narrow.flush()
    del wide
    partial.rename(file)


def _dtype_of(source: Source) -> str:
    from .legs import main_dtype

    return main_dtype(source)
