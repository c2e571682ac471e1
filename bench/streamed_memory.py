"""Peak anonymous memory of each side, layer by layer and whole, at OLMo 3's true layer shapes and vocabulary.

    python bench/streamed_memory.py FOLDER [--shape 32b] [--layers 2] [--stored float32] [--no-whole]

Makes the checkpoint and its Orbax tree in FOLDER (2.5 GB each at 7B shapes with two layers in bfloat16), then runs each
side in a process of its own on the gate's built-in sequences. Prints a line a run: the largest RssAnon of any one process,
sampled every 10 ms. Streamed, one layer is in memory at a time, so two layers show what 32 or 64 would need.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.parity.batches import built_in
from olmo_parity.parity.candidate import run_candidate
from olmo_parity.parity.reference import run_reference

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import DTYPES, SHAPES, make

GIB = 2**30


def run_one(folder: Path, side: str, dtype: str, streamed: bool) -> None:
    """One run in this process (the candidate's works in a child of it). Logits go to a folder that is removed."""
    source = open_source(folder / "hf")
    sequences = built_in(source.config)
    logits = Path(tempfile.mkdtemp(dir=folder)) / "logits"
    try:
        if side == "reference":
            run_reference(source.path, source.config, sequences, dtype=dtype, streamed=streamed, folder=logits)
        else:
            run_candidate(folder / "tree", sequences, dtype=dtype, streamed=streamed, folder=logits)
    finally:
        shutil.rmtree(logits.parent)


def peak_of(command: list[str]) -> tuple[int, float]:
    """Largest RssAnon of any one process of the command, in bytes, and its seconds."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max([peak, *map(rss_anon, family(process.pid))])
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return peak, time.monotonic() - started


def family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
    return found


def rss_anon(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stored", choices=DTYPES, default="bfloat16")
    parser.add_argument("--no-whole", action="store_true", help="layer by layer alone")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # side, dtype, how: a child of this script
    options = parser.parse_args()
    if options.one:
        side, dtype, how = options.one
        return run_one(options.folder, side, dtype, how == "streamed")
    if not (options.folder / "hf").exists():
        make(options.folder / "hf", options.shape, options.layers, options.stored)
        hf2orbax(options.folder / "hf", options.folder / "tree", verify=False, quiet=True)
    source = open_source(options.folder / "hf")
    print(f"{options.shape} shapes, {source.config.num_hidden_layers} layers, {source.nbytes / GIB:.2f} GiB stored")
    for side in ("reference", "candidate"):
        for dtype in DTYPES:
            for how in ("streamed", "whole")[: 1 if options.no_whole else 2]:
                command = [sys.executable, __file__, str(options.folder), "--one", side, dtype, how]
                peak, seconds = peak_of(command)
                print(f"{side:9} {dtype:8} {how:8} {peak / GIB:6.2f} GiB {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
