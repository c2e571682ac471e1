"""diff: distances between checkpoints of any two forms, most moved first."""

from __future__ import annotations

import json

import numpy as np
import pytest

from olmo_parity.convert.diff import diff
from olmo_parity.convert.pipeline import core2orbax, hf2orbax

from .conftest import random_tensors, run_convert, tiny_config, write_hf


def test_a_checkpoint_equals_itself_in_another_form(tiny, tmp_path):
    hf2orbax(tiny, tmp_path / "0", quiet=True)
    record = diff(tiny, tmp_path / "0", quiet=True)
    assert record.equal and all(t.max_abs == 0 and t.relative_l2 == 0 for t in record.tensors)
    assert run_convert("diff", tiny, tmp_path / "0").returncode == 0


def test_distances_are_those_of_numpy_and_sorted_by_what_moved_most(tmp_path):
    config = tiny_config()
    a = random_tensors(config, np.dtype(np.float32))
    b = {name: array.copy() for name, array in a.items()}
    b["model.norm.weight"] = a["model.norm.weight"] * 1.5
    b["lm_head.weight"] = a["lm_head.weight"] + np.float32(0.01)
    write_hf(tmp_path / "a", a, config)
    write_hf(tmp_path / "b", b, config)
    record = diff(tmp_path / "a", tmp_path / "b", quiet=True)
    assert [t.name for t in record.tensors[:2]] == ["model.norm.weight", "lm_head.weight"]
    for t in record.tensors[:2]:
        x, y = a[t.name].astype(np.float64).ravel(), b[t.name].astype(np.float64).ravel()
        assert t.max_abs == np.abs(y - x).max()
        assert t.relative_l2 == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
        assert t.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert all(t.equal for t in record.tensors[2:])
    done = run_convert("diff", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1 and "2 of 47 tensors differ" in done.stdout
    raw = json.loads(run_convert("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert raw["tensors"][0]["name"] == "model.norm.weight" and raw["equal"] is False


def test_nan_and_infinite_values_are_counted_and_left_out_of_distances(tmp_path):
    config = tiny_config()
    a = random_tensors(config, np.dtype(np.float32))
    b = {name: array.copy() for name, array in a.items()}
    b["model.norm.weight"][:3] = [np.nan, np.inf, -np.inf]
    write_hf(tmp_path / "a", a, config)
    write_hf(tmp_path / "b", b, config)
    found = next(t for t in diff(tmp_path / "a", tmp_path / "b", quiet=True).tensors if t.name == "model.norm.weight")
    assert (found.nan, found.infinite, found.max_abs, found.equal) == ((0, 1), (0, 2), 0.0, False)


def test_config_and_names_that_differ_are_listed(tmp_path):
    small, large = tiny_config(), tiny_config(num_hidden_layers=5, rms_norm_eps=1e-5, intermediate_size=112)
    write_hf(tmp_path / "a", random_tensors(small), small)
    write_hf(tmp_path / "b", random_tensors(large), large)
    record = diff(tmp_path / "a", tmp_path / "b", quiet=True)
    assert {"rms_norm_eps", "num_hidden_layers"} <= {name for name, _, _ in record.config}
    assert any("layers.4" in text and "only in" in text for text in record.unmatched)
    assert any("has shape (96, 64) and (112, 64)" in text for text in record.unmatched)


def test_a_native_checkpoint_differs_from_its_bfloat16_form_by_rounding_alone(fixture_path, tmp_path):
    native, hf = fixture_path("tiny-gqa/native/step0"), fixture_path("tiny-gqa/hf-bfloat16")
    core2orbax(native, tmp_path / "0", quiet=True)
    for path in (native, tmp_path / "0"):
        record = diff(path, hf, quiet=True)
        assert not record.equal and not record.config and not record.unmatched
        assert max(t.relative_l2 for t in record.tensors) < 2**-8  # half a step of bfloat16 is 2**-9
