"""Keeping freed buffers of the process, so that each slice does not fault in fresh pages."""

from __future__ import annotations

import contextlib
import ctypes

# Names of mallopt(3) in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Tell glibc to serve large buffers from one heap that does not shrink. Call once, before threads start.

    By default each 64 MiB slice is mapped, faulted in page by page, and unmapped: measured 0.87 against 0.14 seconds of
    system time for reading 0.5 GB of chunks. It is process-wide, so only the command line does it.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: slower, not wrong
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
