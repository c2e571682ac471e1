"""What a conversion did, and its summary for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .places import BucketPath
from .progress import in_bytes


@dataclass(frozen=True)
class ConversionRecord:
    """What a conversion did. bytes are of the target's arrays; peak_memory is anonymous memory in bytes."""

    source: str  # the folder, or the commit on the hub
    target: Path | BucketPath
    kind: str  # of the source: hf, core or orbax
    said: str  # which folder was taken as the source, and why
    tensors: int
    bytes: int
    dtype: str
    seconds: float  # reading, laying out and writing
    verify_seconds: float
    peak_memory: int
    verified: bool
    resumed: int  # leaves that an earlier, killed run had finished
    notes: tuple[str, ...]
    process: str = (
        ""  # which one, where several convert: tensors, bytes, seconds and memory of 0 are of all it finished
    )


def summary(record: ConversionRecord) -> str:
    """A few lines: what was written, how fast, and whether it was read back."""
    rate = record.bytes / max(record.seconds, 1e-9)
    lines = [
        f"{record.process + ', ' if record.process else ''}{record.target}: {record.tensors} tensors, {in_bytes(record.bytes)}, {record.dtype}",
        f"source: {record.said}",
        f"written in {record.seconds:.1f} s ({in_bytes(rate)}/s), peak memory {in_bytes(record.peak_memory)}",
    ]
    if record.resumed:
        lines.append(f"resumed: {record.resumed} tensors had been finished by an earlier run")
    if record.verified:
        lines.append(f"verified: read back in {record.verify_seconds:.1f} s, every tensor equal bit for bit")
    else:
        lines.append("not verified (--no-verify)")
    return "\n".join([*lines, *(f"note: {note}" for note in record.notes)])
