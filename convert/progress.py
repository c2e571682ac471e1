"""Progress of a long copy: a bar with bytes and rate on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time

LINE_SECONDS = 10.0  # between plain lines: a log of a ten-minute run stays readable
BAR_SECONDS = 0.1


class Progress:
    """Counts bytes from any thread and shows them on stderr. Also watches anonymous memory, which peaks in mid-run."""

    def __init__(self, label: str, total_bytes: int, quiet: bool = False):
        self.label, self.total, self.quiet = label, total_bytes, quiet
        self.done = self.peak_anonymous = 0
        self.started = self._shown = time.monotonic()
        self._lock = threading.Lock()
        self._terminal = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """Count bytes that are finished."""
        with self._lock:
            self.done += count
            self.peak_anonymous = max(self.peak_anonymous, anonymous_memory())
            now = time.monotonic()
            if self.quiet or now - self._shown < (BAR_SECONDS if self._terminal else LINE_SECONDS):
                return
            self._shown = now
            self._show(end="\r" if self._terminal else "\n")

    def close(self) -> float:
        """Show the last state and return the seconds since the start."""
        seconds = time.monotonic() - self.started
        if not self.quiet and self._terminal:
            with self._lock:
                self._show(end="\n")
        return seconds

    def _show(self, end: str) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        share = self.done / self.total if self.total else 1.0
        bar = f"[{'#' * int(30 * share):<30}] " if self._terminal else ""
        text = f"{self.label} {bar}{share:4.0%} {in_bytes(self.done)} of {in_bytes(self.total)}, {in_bytes(self.done / seconds)}/s"
        print(f"{text:<100}" if self._terminal else text, end=end, file=sys.stderr, flush=True)


def in_bytes(count: float) -> str:
    """A count of bytes for people: 14.6 GB, 405 MB, 12 kB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def anonymous_memory() -> int:
    """Bytes of anonymous memory of this process now (RssAnon); 0 where /proc does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
