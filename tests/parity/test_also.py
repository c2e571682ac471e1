"""--also core:DIR: a third side, and which of three is the odd one out.

The logic is tested with stand-ins for all three sides. With AI2's own model it is tested where ai2-olmo-core is installed.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import also, batches, core_model, gate, legs, metrics, report, settings, sides
from olmo_parity.parity.options import GateOptions
from olmo_parity.parity.run import run_gate
from tests.conftest import find_fixture

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())
CHECKPOINT, NATIVE = "tiny-gqa/hf-bfloat16", "tiny-gqa/native/step0"
TABLE = {  # (reference, candidate), (reference, OLMo-core), (candidate, OLMo-core) agree: who stands apart, its words
    (True, True, True): None,
    (False, True, False): ("candidate", "reference and OLMo-core agree, the candidate differs"),
    (False, False, True): ("reference", "candidate and OLMo-core agree, the reference differs: do not believe"),
    (True, False, False): ("also", "reference and candidate agree, OLMo-core differs"),
    (False, False, False): (None, "all differ"),
    (True, True, False): (None, "candidate and OLMo-core differ, the third side is within the limit of both"),
    (True, False, True): (None, "reference and OLMo-core differ, the third side"),
    (False, True, True): (None, "reference and candidate differ, the third side"),
}


@pytest.mark.parametrize("agree", TABLE)
def test_the_odd_one_out_is_named(agree):
    found = also.odd_one_out(*agree)
    if TABLE[agree] is None:
        assert found is None
    else:
        side, words = TABLE[agree]
        assert found["side"] == side and words in found["sentence"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(str(find_fixture(CHECKPOINT)), str(folder), quiet=True)
    return folder


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(core_model, "require_core", lambda: None)


def stand_ins(monkeypatch, tmp_path, reference=0.0, candidate=0.0, core=0.0):
    """Three sides that give random logits, each with a fault of its own size in one logit."""

    def write(sequences, folder, vocabulary, fault):
        folder.mkdir()
        for index, sequence in enumerate(sequences):
            logits = np.random.default_rng(index).normal(size=(len(sequence.tokens), vocabulary)).astype(np.float32)
            logits[5, 3] += fault
            np.save(folder / f"{index}.npy", logits)
        return {"threads": 1, "device": "cpu", "devices": ["cpu"], "xla_flags": ""}

    def torch_side(path, config, sequences, *, folder, **_):
        return write(sequences, folder, config.vocab_size, reference)

    def jax_side(path, sequences, *, dtype, folder, **_):
        fault = candidate if dtype == "float32" else 0.0
        return write(sequences, folder, open_source(path).config.vocab_size, fault)

    def core_side(source, sequences, *, stored, round_to, folder):
        assert set(stored.values()) == {"bfloat16"} and round_to is None
        return write(sequences, folder, source.logical_vocab_size, core)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(legs, "run_reference", torch_side)
    monkeypatch.setattr(legs, "run_candidate", jax_side)
    monkeypatch.setattr(core_model, "run_core", core_side)
    monkeypatch.setattr(sides, "require_torch", lambda: None)


def gated(tree):
    options = GateOptions(trace=False, also=f"core:{find_fixture(NATIVE)}", streamed=False)
    record = run_gate(find_fixture(CHECKPOINT), tree, options)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(report.as_json(record)))
    return record


FAULTS = {
    "candidate": ({"candidate": 0.5}, "the candidate is wrong"),
    "reference": ({"reference": 0.5}, "do not believe the reference"),
    "also": ({"core": 0.5}, "reference and candidate agree, OLMo-core differs"),
    None: ({"reference": 0.5, "candidate": 1.0}, "all differ"),
    "also, not a number": ({"core": np.nan}, "reference and candidate agree, OLMo-core differs"),
}


@pytest.mark.parametrize("odd", FAULTS)
def test_the_gate_fails_and_says_who_stands_apart(odd, tree, tmp_path, monkeypatch, installed):
    faults, words = FAULTS[odd]
    stand_ins(monkeypatch, tmp_path, **faults)
    record = gated(tree)
    assert record["verdict"] == "fail"
    found = record["legs"]["float32"]["also"]["odd_one_out"]
    assert found["side"] == (odd and odd.split(",")[0])
    assert words in found["sentence"] and f"three sides: {found['sentence']}" in report.console(record)
    failed = {c["leg"] for c in record["criteria"] if c["on"] and not c["passed"]}
    assert ("reference" in failed) == (odd != "candidate")


def test_three_sides_that_agree_pass_with_their_numbers_in_the_report(tree, tmp_path, monkeypatch, installed):
    stand_ins(monkeypatch, tmp_path, candidate=1e-6)
    record = gated(tree)
    assert record["verdict"] == "pass" and record["legs"]["float32"]["also"]["odd_one_out"] is None
    assert [c["passed"] for c in record["criteria"] if c["leg"] == "reference"] == [True] * 3
    assert 0 < record["legs"]["float32"]["also"]["pairs"]["candidate_also"]["max_delta_of_spread"] < 1e-5
    for pair in ("reference against candidate", "reference against OLMo-core", "candidate against OLMo-core"):
        assert f"{pair}: max |delta logit| / spread" in report.console(record)


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "olmo_core", None)
    with pytest.raises(BadInput, match=r"not installed: pip install 'olmo-parity\[core\]'"):
        also.open_also(f"core:{find_fixture(NATIVE)}", open_source(find_fixture(CHECKPOINT)), [])


@pytest.mark.parametrize("text", ["tiny-gqa", "core:", "hf:tiny-gqa"])
def test_another_spelling_is_refused(text):
    with pytest.raises(BadInput, match="core:DIR is wanted"):
        also.folder_of(text)


def test_what_cannot_be_a_third_side_is_refused_before_the_work(installed, monkeypatch):
    source = open_source(find_fixture(CHECKPOINT))
    with pytest.raises(BadInput, match="is of the hf form"):
        also.open_also(f"core:{find_fixture(CHECKPOINT)}", source, [])

    class Record:
        kind = "record"

    with pytest.raises(BadInput, match="needs the live reference"):
        also.open_also(f"core:{find_fixture(NATIVE)}", Record(), [])
    monkeypatch.setattr(also.footprint, "available_bytes", lambda: 1 << 20)
    with pytest.raises(BadInput, match="0.0 are available: leave it out"):
        also.open_also(f"core:{find_fixture(NATIVE)}", source, batches.built_in(source.config))


def test_weights_that_are_not_the_references_are_refused_and_named(tmp_path, installed):
    path = shutil.copytree(find_fixture(CHECKPOINT), tmp_path / "hf")
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2] ^= 1  # the last value of the last tensor, by one step of bfloat16
    file.write_bytes(data)
    with pytest.raises(BadInput, match="1 of .* tensors differ") as caught:
        also.open_also(f"core:{find_fixture(NATIVE)}", open_source(path), [])
    assert "in OLMo-core" in caught.value.faults[0] and "in the reference" in caught.value.faults[0]


def test_parity_toml_takes_it_relative_to_itself(tmp_path):
    file = tmp_path / "parity.toml"
    file.write_text('also = "core:native/step0"\n')
    assert settings.load(file, False).values["also"] == f"core:{tmp_path / 'native/step0'}"
    file.write_text('also = "native/step0"\n')
    with pytest.raises(BadInput, match="core: and a path is wanted"):
        settings.load(file, False)


def test_a_config_for_gpus_becomes_one_for_the_cpu_and_takes_the_window():
    block = {
        "sequence_mixer": {"n_heads": 4, "use_flash": True, "backend": "flash_2", "dtype": "bfloat16",
                           "sliding_window": {"pattern": [4096, -1]}},
        "layer_norm": {"name": "fused_rms"},
    }  # fmt: skip
    found = core_model.on_cpu({"block": block}, 64)["block"]
    assert found["sequence_mixer"] == {"n_heads": 4, "backend": "torch", "dtype": "float32",
                                       "sliding_window": {"pattern": [64, -1]}}  # fmt: skip
    assert found["layer_norm"] == {"name": "rms"}
    assert core_model.on_cpu({"block": block}, None)["block"]["sequence_mixer"]["sliding_window"] == {
        "pattern": [4096, -1]
    }


def test_a_config_that_names_a_foreign_class_is_refused():
    with pytest.raises(BadInput, match="subprocess.Popen"):
        core_model._check_classes({"block": [{"_CLASS_": "subprocess.Popen"}]}, Path("config.json"))


needs_core = pytest.mark.skipif(
    importlib.util.find_spec("olmo_core") is None or importlib.util.find_spec("transformers") is None,
    reason="AI2's OLMo-core is not installed: pip install 'olmo-parity[core]'",
)
REAL = {
    "grouped heads, bfloat16": (CHECKPOINT, NATIVE),
    "yarn": ("tiny-yarn/hf-float32", "tiny-yarn/native/step0"),
    "trained": ("tiny-trained/hf-float32-step900", "tiny-trained/native/step900"),
}


def with_config(path, folder, **changes):
    """The checkpoint with another config.json: another function of the same weights."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def real(tmp_path, reference, candidate, native):
    """The three live models on the built-in sequences in float32; returns criteria and who stands apart."""
    import jax.numpy as jnp

    from olmo_parity.convert.mapping import apply_layout, weights
    from olmo_parity.olmo_jax.tree import unflatten
    from olmo_parity.parity.candidate import forward_of

    source, other = open_source(reference), open_source(candidate)
    leaves = {w.jax: np.array(apply_layout(w.layout, other.tensors[w.hf].read())) for w in weights(other.config)}
    sequences = batches.built_in(source.config)
    third = also.open_also(f"core:{native}", source, sequences)
    folder = tmp_path / "runs"
    folder.mkdir()
    legs.run_reference(source.path, source.config, sequences, dtype="float32", folder=folder / "ref32")
    shown = third.run(sequences, None, folder / "also32")
    assert shown["implementation"] == "OLMo-core Transformer"
    forward = forward_of(other.config, unflatten(leaves), jnp.float32)
    pairs, names = {}, {"reference": "ref32", "candidate": "cand32", "also": "also32"}
    (folder / "cand32").mkdir()
    for index, sequence in enumerate(sequences):
        np.save(folder / "cand32" / f"{index}.npy", forward(sequence))
    for pair in also.PAIRS:
        a, b = (folder / names[side] for side in pair.split("_"))
        stats = [
            metrics.token_stats(np.load(a / f"{i}.npy"), np.load(b / f"{i}.npy"), s.tokens)
            for i, s in enumerate(sequences)
        ]
        pairs[pair] = metrics.summarise(metrics.TokenStats.join(*stats), batches.positions(sequences))
    noise = {"max_abs_delta_logit_shift_free": 0.0, "spread_of_logits": 1.0, "kl_max": 0.0}  # then the floor decides
    return pairs, *also.judge(pairs, noise, gate.DEFAULT, {})


@needs_core
@pytest.mark.parametrize("name", REAL)
def test_ai2s_own_model_agrees_with_both_sides(name, tmp_path, fixture_path):
    path, native = map(fixture_path, REAL[name])
    pairs, criteria, odd = real(tmp_path, path, path, native)
    assert odd is None and all(c.passed for c in criteria), criteria
    assert all(gate.relative_delta(summary) < 1e-5 for summary in pairs.values())  # measured: 2e-6 to 8.1e-6


PLANTED = {  # by fixture: a change of config.json that makes another function of the same weights
    "grouped heads, bfloat16": {"sliding_window": 15},
    "yarn": {"rms_norm_eps": 1e-3},
    "trained": {"rms_norm_eps": 1e-4},
}


@needs_core
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("wrong", ["reference", "candidate", "also"])
def test_a_planted_fault_is_blamed_on_the_side_that_has_it(name, wrong, tmp_path, fixture_path):
    path, native = map(fixture_path, REAL[name])
    damaged = with_config(path, tmp_path / "damaged", **PLANTED[name])
    reference = path if wrong == "candidate" else damaged
    candidate = path if wrong == "reference" else damaged  # "also": both share the fault, and only AI2's model shows it
    _, criteria, odd = real(tmp_path, reference, candidate, native)
    assert odd["side"] == wrong
    assert all(c.passed for c in criteria) == (wrong == "candidate")
