"""Where the test checkpoints lie: tests/data, and the full set where OLMO_PARITY_FIXTURES names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
