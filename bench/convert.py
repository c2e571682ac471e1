"""Speed and memory of the converter beside `cp` of the same bytes: wall, CPU, peak anonymous memory, ratio to cp.

Checkpoints have OLMo 3's true layer shapes and any number of layers; runs are interleaved and the median is printed.
Anonymous memory (RssAnon) is sampled from outside, every 20 ms.

    python bench/convert.py --shape 7b --layers 4 --repeat 5
    python bench/convert.py --quick
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import DTYPES, SHAPES, make  # beside this file

SAMPLE_SECONDS = 0.02
CONVERT = [sys.executable, "-c", "from olmo_parity.cli import convert_main; convert_main()"]


@dataclass(frozen=True)
class Run:
    """One run of one command. cpu is user and system time; peak is the largest RssAnon that was seen, in bytes."""

    wall: float
    cpu: float
    peak: int


def measure(command: list[str]) -> Run:
    """Run a command and watch its memory. Ends with sync, so that written bytes are on the disk for every contender."""
    before, started = os.times(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(SAMPLE_SECONDS)
    error = process.stderr.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{error}")
    os.sync()
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(wall, cpu, peak)


def anonymous(pid: int) -> int:
    """RssAnon of a process in bytes, 0 where it has just ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def contenders(root: Path) -> dict[str, tuple[list[str], Path]]:
    """Name to (command, what it writes)."""
    source, tree = str(root / "source"), root / "tree" / "0"
    to_tree = [*CONVERT, "hf2orbax", source, str(tree), "--quiet"]
    return {
        "cp": (["cp", "-r", source, str(root / "copy")], root / "copy"),
        "hf2orbax, no verification": ([*to_tree, "--no-verify"], root / "tree"),
        "hf2orbax": (to_tree, root / "tree"),
        "hf2orbax zstd, no verification": ([*to_tree, "--no-verify", "--compression", "zstd"], root / "tree"),
        "orbax2hf": ([*CONVERT, "orbax2hf", str(root / "kept" / "0"), str(root / "back"), "--quiet"], root / "back"),
        "verify --manifest": ([*CONVERT, "verify", "--manifest", str(root / "kept" / "0"), "--quiet"], root / "none"),
    }


def table(results: dict[str, list[Run]], size: int) -> str:
    """Markdown rows: the median of each column, cp first."""
    base = statistics.median(run.wall for run in results["cp"])
    lines = ["| what | wall s | CPU s | peak anonymous MB | times cp | GB/s |", "|---|---|---|---|---|---|"]
    for name, runs in results.items():
        wall, cpu = statistics.median(r.wall for r in runs), statistics.median(r.cpu for r in runs)
        peak = max(r.peak for r in runs)
        lines.append(
            f"| {name} | {wall:.1f} ({min(r.wall for r in runs):.1f} to {max(r.wall for r in runs):.1f}) | {cpu:.1f} "
            f"| {peak / 1e6:.0f} | {wall / base:.1f} | {size / wall / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one layer, small vocabulary, one run each")
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.repeat = 1, 1
    root = Path(tempfile.mkdtemp(prefix="olmo-convert-bench-", dir=options.folder))
    try:
        vocabulary = {"vocab_size": 8000} if options.quick else {}
        size = make(root / "source", options.shape, options.layers, options.dtype, **vocabulary)
        subprocess.run([*CONVERT, "hf2orbax", root / "source", root / "kept" / "0", "--quiet"], check=True)
        os.sync()
        chosen = {n: c for n, c in contenders(root).items() if n == "cp" or not options.only or n in options.only}
        results: dict[str, list[Run]] = {name: [] for name in chosen}
        for _ in range(options.repeat):
            for name, (command, written) in chosen.items():
                shutil.rmtree(written, ignore_errors=True)
                results[name].append(measure(command))
                shutil.rmtree(written, ignore_errors=True)
        load = os.getloadavg()[0]
        print(f"{options.shape} shapes, {options.layers} layers, {options.dtype}, {size / 1e9:.2f} GB")
        print(f"{os.cpu_count()} CPUs, {platform.machine()}, load {load:.1f}, Python {platform.python_version()}")
        print(table(results, size))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
