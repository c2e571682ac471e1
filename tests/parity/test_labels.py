"""A fault of precision is labelled as one: float32 agrees, bfloat16 does not. (Labels of function: test_faults.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import find_fixture

pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
CHECKPOINT = "tiny-trained/hf-bfloat16-step900"

EARLY_CASTS = """
import inhouse
import jax
import jax.numpy as jnp

def rms_norm(x, scale, eps):  # all of it in the activation dtype: in float32 nothing changes
    y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True, dtype=x.dtype) + jnp.asarray(eps, x.dtype))
    return (y.astype(x.dtype) * scale).astype(x.dtype)

def rotate(x, turn):
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = (t.astype(x.dtype) for t in turn)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

inhouse.rms_norm, inhouse.rotate = rms_norm, rotate
make = inhouse.make
"""


def test_early_casts_fail_in_bfloat16_alone_and_are_labelled_as_precision(tmp_path):
    (tmp_path / "early.py").write_text(EARLY_CASTS)
    source = find_fixture(CHECKPOINT)
    binary = Path(sys.executable).parent
    subprocess.run([binary / "olmo-convert", "hf2orbax", source, tmp_path / "tree"], check=True, capture_output=True)
    done = subprocess.run(
        [binary / "olmo-parity", "--reference", source, "--candidate", tmp_path / "tree", "--candidate-fn", "early:make",
         "--json", tmp_path / "r.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "examples")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert {c["leg"] for c in record["criteria"] if c["on"] and not c["passed"]} == {"bfloat16"}
    assert any("precision" in label for label in record["labels"])
