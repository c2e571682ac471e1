"""--override reaches both sides, and only what a config has can be changed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import gate, metrics, overrides, settings
from olmo_parity.parity.batches import Sequence
from olmo_parity.parity.candidate import forward_of, visible_keys
from olmo_parity.parity.options import GateOptions
from olmo_parity.parity.reference import run_reference
from tests.parity.two_layers import two_layers

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return two_layers(tmp_path_factory.mktemp("two-layers"))


@pytest.fixture(scope="module")
def tree(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    command = [BIN / "olmo-convert", "hf2orbax", reference, folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_both_configs_are_changed_and_nothing_else(reference, tree):
    nested = "rope_parameters.full_attention.rope_theta"
    with overrides.applied(reference, tree, {"sliding_window": 24, nested: 1e4}) as changed:
        for path, original in zip(changed, (reference, tree), strict=True):
            found, before = open_source(path), open_source(original)
            assert found.config.sliding_window == 24 and before.config.sliding_window == 16
            assert found.config.rope["full_attention"].rope_theta == 1e4
            fields = {name for name, *_ in before.config.differences(found.config)}
            assert len(fields) == 2, fields
            name, tensor = next(iter(found.tensors.items()))
            assert (tensor.read() == before.tensors[name].read()).all()
            assert {p.name for p in path.iterdir()} == {p.name for p in original.iterdir()}
    assert not changed[0].exists() and not changed[1].exists()


@pytest.mark.parametrize("part", ["parent", "item"])
def test_a_tree_may_be_named_by_its_parent_or_its_item(reference, tree, part):
    named = tree.parent if part == "parent" else tree / "state"
    with overrides.applied(reference, named, {"sliding_window": 24}) as (_, changed):
        assert open_source(changed).config.sliding_window == 24


@pytest.mark.parametrize(
    "pairs, words",
    [
        (["sliding_windw=3"], "2 faults"),
        (["rope_parameters.full_attention.theta=3"], "it has|full_attention has rope_theta, rope_type"),
        (["sliding_window.x=3"], "has no sliding_window.x"),
        (["sliding_window"], "KEY=VALUE is wanted"),
        (["=3"], "KEY=VALUE is wanted"),
        (["hidden_act=silu"], 'hidden_act="silu"'),
        (["sliding_window=3", "sliding_window=4"], "was given already"),
    ],
)
def test_what_cannot_be_changed_is_refused(reference, tree, pairs, words):
    with (
        pytest.raises(BadInput, match=words),
        overrides.applied(reference, tree, overrides.parse(tuple(pairs))),
    ):
        pass


def test_a_record_refuses_it(tree, tmp_path):
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(BadInput, match="is a record"), overrides.applied(tmp_path, tree, {"sliding_window": 24}):
        pass


def test_a_candidate_of_its_functions_own_form_stays_as_it_is(reference, tmp_path):
    (tmp_path / "own").mkdir()
    with overrides.applied(reference, tmp_path / "own", {"sliding_window": 24}) as (_, candidate):
        assert candidate == tmp_path / "own"
    with overrides.applied(reference, None, {"sliding_window": 24}) as (_, candidate):
        assert candidate is None


def test_the_file_and_the_command_line_may_say_it(tmp_path):
    file = tmp_path / "parity.toml"
    text = 'reference = "hf"\ncandidate = "tree"\noverride = ["sliding_window=24"]\nmesh = "fsdp=4"\nprocesses = 2\n'
    file.write_text(text + 'candidate_device = "cpu"\nreference_device = "cpu"\n')
    options = settings.choose({}, settings.load(file, False)).options
    assert options == GateOptions(
        override=("sliding_window=24",), mesh="fsdp=4", processes=2, candidate_device="cpu", reference_device="cpu",
        settings_file=file,
    )  # fmt: skip
    assert settings.choose({"override": []}, settings.load(file, False)).options.override == ()


def verdict(reference, candidate, sequence, folder):
    """Of the float32 leg on one sequence, and the keys that the last probed query sees on both sides."""
    import jax.numpy as jnp

    ref, cand = open_source(reference), open_source(candidate)
    settings = run_reference(ref.path, ref.config, [sequence], dtype="float32", folder=folder)
    expected = np.load(folder / "0.npy")
    found = forward_of(cand.config, read_tree(cand.path), jnp.float32)(sequence)
    quiet, stats = (
        metrics.summarise(metrics.TokenStats.join(metrics.token_stats(expected, x, sequence.tokens)), np.arange(len(x)))
        for x in (expected, found)
    )
    seen = [keys["sliding_attention"][-1][1] for keys in (settings["visible_keys"], visible_keys(cand.config))]
    return gate.judge(gate.float32_criteria(stats, quiet), [], len(found)).name, seen


def test_the_same_change_on_both_sides_agrees_and_on_one_side_fails(reference, tree, tmp_path):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # threads of tiny products wait for each other longer than they compute
    row = Sequence("a", np.arange(30, dtype=np.int32) * 7)
    assert verdict(reference, tree, row, tmp_path / "as-it-is") == ("pass", [16, 16])
    with overrides.applied(reference, tree, {"sliding_window": 3}) as (changed_reference, changed_tree):
        assert verdict(changed_reference, changed_tree, row, tmp_path / "both") == ("pass", [3, 3])
        assert verdict(changed_reference, tree, row, tmp_path / "reference") == ("fail", [3, 16])
        assert verdict(reference, changed_tree, row, tmp_path / "candidate") == ("fail", [16, 3])


def test_check_report_does_not_take_it_for_the_files():
    from olmo_parity.parity import check
    from tests.parity.records import record

    with pytest.raises(check._No, match="changed config"):
        check._check_judged(record("pass", overrides={"sliding_window": 3}), Path("r.json"))
