"""The folder that a user names is the one that is read and written, whatever characters its name has."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from olmo_parity.convert.describe import inspect
from olmo_parity.convert.diff import diff
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.orbax_io import TreeReader, read_leaf, read_tree
from olmo_parity.convert.orbax_write import Leaf, TreeWriter
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.places import store_spec
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.tree import flatten
from olmo_parity.parity.candidate import on_mesh
from olmo_parity.parity.identity import tensor_hashes

from .conftest import random_tensors, tiny_config, write_hf

BACKSLASH, BYTES = "a\\b", os.fsdecode(b"a\xff")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[Path]:
    """Two checkpoints of one config with other weights."""
    folder, config = tmp_path_factory.mktemp("places"), tiny_config(num_hidden_layers=1)
    return [write_hf(folder / str(seed), random_tensors(config, seed=seed), config) for seed in (0, 1)]


@pytest.mark.parametrize("name", ["x%20y", "x%2Fy", "x#y", "x?y", "100%", "%zz", "x%y z", "ü|'\"", "a:b@c"])
def test_a_tree_is_written_to_and_read_from_the_folder_that_is_named(name, sources, tmp_path):
    as_url = urllib.parse.unquote(name).partition("#")[0].partition("?")[0]
    if as_url != name:
        hf2orbax(sources[1], tmp_path / as_url / "0", quiet=True)
    hf2orbax(sources[0], tmp_path / name / "0", verify=False, quiet=True)
    assert verify(sources[0], tmp_path / name / "0", quiet=True).equal
    assert not verify(sources[1], tmp_path / name / "0", quiet=True).equal
    orbax2hf(tmp_path / name / "0", tmp_path / "hf", quiet=True)
    assert verify(sources[0], tmp_path / "hf", quiet=True).equal


def test_plain_arrays_outside_a_store_are_read_from_the_folder_that_is_named(tmp_path):
    """Trees that were saved with use_ocdbt=False."""
    import tensorstore as ts

    item = tmp_path / "x%20y"
    writer = TreeWriter(item)
    for folder, value in ((item, 1.0), (tmp_path / "x y", 2.0)):
        spec = writer.spec(Leaf("a", (2,), np.dtype(np.float32), (2,)))
        spec["kvstore"] = {"driver": "file", "path": f"{folder}/a/"}
        ts.open(spec, create=True).result().write(np.full(2, value, np.float32)).result()
    writer.finish(["a"])
    text = (item / "_METADATA").read_text()
    (item / "_METADATA").write_text(text.replace('"use_ocdbt": true', '"use_ocdbt": false'))
    assert read_leaf(item, "a").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("key", ["/etc/x", "../y", BACKSLASH, "a\0b", BYTES])
@pytest.mark.parametrize("ocdbt", ["true", "false"])
def test_no_key_of_a_tree_leads_out_of_it_or_to_a_traceback(ocdbt, key, tmp_path):
    writer = TreeWriter(tmp_path / "0")
    writer.write(leaf := Leaf("a", (2,), np.dtype(np.float32), (2,)), np.zeros(2, np.float32))
    writer.finish([leaf.path])
    file = tmp_path / "0" / "_METADATA"
    raw = json.loads(file.read_text().replace('"use_ocdbt": true', f'"use_ocdbt": {ocdbt}'))
    raw["tree_metadata"]["b"] = {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": {}}
    file.write_text(json.dumps(raw))
    with pytest.raises(BadInput, match="cannot be opened"):
        TreeReader(tmp_path / "0").leaves  # noqa: B018


@pytest.mark.parametrize("name", [BACKSLASH, BYTES])
def test_a_name_that_the_store_would_read_as_another_is_refused_before_anything_is_written(name, sources, tmp_path):
    hf2orbax(sources[1], tmp_path / "a" / "b", quiet=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match="backslash|UTF-8"):
        hf2orbax(sources[0], tmp_path / name, verify=False, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before
    shutil.copytree(tmp_path / "a" / "b", tmp_path / name)
    for read in (verify_manifest, lambda path, quiet: verify(sources[1], path, quiet=quiet), _reader):
        with pytest.raises(BadInput, match="backslash|UTF-8"):
            read(tmp_path / name, quiet=True)


@pytest.mark.parametrize("name", [BACKSLASH, BYTES])
def test_a_link_names_a_folder_whose_own_name_cannot_be_used(name, sources, tmp_path):
    hf2orbax(sources[1], tmp_path / "a" / "b" / "0", quiet=True)
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(name)
    hf2orbax(sources[0], tmp_path / "link" / "0", quiet=True)
    assert verify(sources[0], tmp_path / "link" / "0", quiet=True).equal
    assert (tmp_path / name / "0" / "manifest.json").is_file()


@pytest.mark.parametrize("layout", ["olmo_jax", "maxtext-unscanned"])
def test_a_tree_without_a_step_folder_is_one_for_every_command(layout, sources, tmp_path):
    for number, name in enumerate(("right", "wrong")):
        hf2orbax(sources[number], tmp_path / "steps" / name, layout=layout, quiet=True)
        item = next((tmp_path / "steps" / name).glob("*/_METADATA")).parent
        shutil.copytree(item, tmp_path / name / "tree")
        shutil.copy(item.parent / "olmo_config.json", tmp_path / name / "tree")
    right, wrong = (tmp_path / name / "tree" for name in ("right", "wrong"))
    assert inspect(right).source.path == right
    assert verify(sources[0], right, quiet=True).equal and verify(right, sources[0], quiet=True).equal
    found = verify(sources[0], wrong, quiet=True)
    assert len(found.differences) == found.tensors
    orbax2hf(right, tmp_path / "hf", quiet=True)
    assert verify(sources[0], tmp_path / "hf", quiet=True).equal
    assert diff(right, sources[0], quiet=True).equal
    assert tensor_hashes(open_source(right)) == tensor_hashes(open_source(tmp_path / "steps" / "right"))
    with pytest.raises(BadInput, match="without a step folder"):
        verify_manifest(right, quiet=True)


@pytest.mark.parametrize("beside", ["state", "items", "another"])
def test_of_several_trees_in_a_step_the_one_that_is_named_is_read(beside, sources, tmp_path):
    step = hf2orbax(sources[1], tmp_path / "0", quiet=True).target
    hf2orbax(sources[0], tmp_path / "1", quiet=True)
    (step / "state").rename(step / beside)
    shutil.copytree(tmp_path / "1" / "state", step / "ema")
    assert verify(sources[0], step / "ema", quiet=True).equal
    assert not verify(sources[1], step / "ema", quiet=True).equal
    assert verify(sources[1], step / beside, quiet=True).equal
    orbax2hf(step / "ema", tmp_path / "hf", quiet=True)
    assert verify(sources[0], tmp_path / "hf", quiet=True).equal
    named = open_source(step / "ema")
    assert tensor_hashes(named) == tensor_hashes(open_source(tmp_path / "1"))
    # What goes to another process is a path alone.
    assert tensor_hashes(open_source(named.path)) == tensor_hashes(named)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    restored, wanted = flatten(on_mesh(named.path, named.config, mesh)), flatten(read_tree(tmp_path / "1"))
    assert all(np.asarray(restored[path]).tobytes() == array.tobytes() for path, array in wanted.items())


def test_a_working_folder_of_such_a_name_is_refused_too(sources, tmp_path, monkeypatch):
    (tmp_path / BACKSLASH).mkdir()
    monkeypatch.chdir(tmp_path / BACKSLASH)
    with pytest.raises(BadInput, match="backslash"):
        hf2orbax(sources[0], "0", quiet=True)


def test_no_spec_of_a_folder_is_a_url(tmp_path):
    assert store_spec(tmp_path / "a%20b", "c") == {"driver": "file", "path": f"{tmp_path}/a%20b/c/"}
    assert store_spec(Path("/")) == {"driver": "file", "path": "/"}


def _reader(path: Path, quiet: bool) -> TreeReader:
    return TreeReader(path / "state")
