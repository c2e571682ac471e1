"""The reference is checked against the config before a logit of it is believed."""

import json
import shutil

import numpy as np
import pytest

from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches, reference
from tests.conftest import find_fixture

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
YARN = "tiny-yarn/hf-float32"


@pytest.fixture
def live():
    source = open_source(find_fixture(YARN))
    return reference._load(source.path, torch.float32, torch, transformers), source.config


def refused(model, config, *words):
    with pytest.raises(BadInput) as error:
        reference.check_reference(model, config, transformers.__version__)
    for word in (transformers.__version__, *words):
        assert word in str(error.value)


def test_a_right_reference_is_believed(live):
    reference.check_reference(*live, transformers.__version__)


def test_yarn_on_sliding_layers_as_in_5_0_to_5_12_is_refused(live):
    model, config = live
    rotary = model.model.rotary_emb
    rotary.sliding_attention_inv_freq.copy_(rotary.full_attention_inv_freq)
    rotary.sliding_attention_attention_scaling = rotary.full_attention_attention_scaling
    refused(model, config, "sliding_attention", "1.2079")


def test_yarn_ignored_as_flat_parameters_are_by_5_13_is_refused(tmp_path):
    shutil.copytree(find_fixture(YARN), tmp_path / "flat")
    file = tmp_path / "flat" / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"] = raw["rope_parameters"]["full_attention"]
    file.write_text(json.dumps(raw))
    source = open_source(tmp_path / "flat")
    sequences = batches.built_in(source.config)
    with pytest.raises(BadInput, match="full_attention") as error:
        reference.run_reference(source.path, source.config, sequences, dtype="float32", folder=tmp_path / "logits")
    assert "proves nothing" in str(error.value) or "prove nothing" in str(error.value)


def test_casting_a_built_model_rounds_its_frequencies_and_is_refused(live):
    model, config = live
    refused(model.to(torch.bfloat16), config, "bfloat16, float32 is wanted")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: setattr(m.model.layers[2].self_attn, "sliding_window", 15), "layer 2: sliding_window is 15"),
        (lambda m: setattr(m.model.layers[3].self_attn, "sliding_window", 16), "layer 3: sliding_window is 16"),
        (lambda m: setattr(m.model.layers[1].self_attn.q_norm, "variance_epsilon", 1e-5), "layer 1: self_attn.q_norm"),
        (lambda m: setattr(m.model.norm, "variance_epsilon", 1e-5), "final norm"),
        (lambda m: setattr(m.model.layers[0].self_attn, "scaling", 1.0), "score scale"),
        (lambda m: setattr(m.model.rotary_emb, "full_attention_attention_scaling", 1.0), "attention factor"),
        (lambda m: m.model.rotary_emb.full_attention_inv_freq[3].fill_(float("nan")), "frequencies"),
    ],
)
def test_a_module_that_differs_from_the_config_is_refused(live, change, words):
    model, config = live
    change(model)
    refused(model, config, words)


def test_a_frequency_two_units_off_in_the_last_place_is_right_and_64_are_not(live):
    model, config = live
    inv_freq = model.model.rotary_emb.full_attention_inv_freq
    inv_freq[1] *= 1 + 2 * 2**-23
    reference.check_reference(model, config, "x")
    inv_freq[1] *= 1 + 64 * 2**-23
    refused(model, config, "frequencies")


def logits_of(source, sequences, folder, **options):
    reference.run_reference(source.path, source.config, sequences, dtype="float32", folder=folder, **options)
    return [np.load(folder / f"{i}.npy") for i in range(len(sequences))]


def test_an_imposed_window_changes_the_logits_and_goes_again(tmp_path):
    source = open_source(find_fixture(YARN))
    tokens = batches.built_in(source.config)[0].tokens[:100]
    sequences = [batches.Sequence(str(w), tokens, window=w) for w in (None, 64, None)]
    logits = logits_of(source, sequences, tmp_path / "logits")
    np.testing.assert_array_equal(logits[0], logits[2])
    np.testing.assert_array_equal(logits[0][:16], logits[1][:16])
    assert np.abs(logits[0] - logits[1]).max() > 0.01


def test_rounded_weights_are_those_of_bfloat16(tmp_path):
    source = open_source(find_fixture(YARN))
    sequences = [batches.Sequence("a", np.arange(20, dtype=np.int32))]
    (stored,), (rounded,) = (
        logits_of(source, sequences, tmp_path / str(dtype), round_to=dtype) for dtype in (None, "bfloat16")
    )
    assert 1e-5 < np.abs(stored - rounded).max() < 0.1
