"""Where the test checkpoints lie: tests/data, and the full set where OLMO_PARITY_FIXTURES names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests compile the same few programs over and over, many of them in child processes: they share what was compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
DATA = Path(__file__).parent / "data"
FULL_SET = os.environ.get("OLMO_PARITY_FIXTURES")


def find_fixture(relative: str) -> Path | None:
    """A file or folder of the fixtures, from the full set if it is there, else from tests/data, else None."""
    for root in filter(None, (FULL_SET, DATA)):
        if (Path(root) / relative).exists():
            return Path(root) / relative
    return None


@pytest.fixture
def fixture_path():
    """fixture_path('tiny-yarn/hf-float32'): its path, or a skip where only the full set has it."""

    def find(relative: str) -> Path:
        path = find_fixture(relative)
        if path is None:
            pytest.skip(f"{relative} is only in the full set of fixtures (set OLMO_PARITY_FIXTURES)")
        return path

    return find
