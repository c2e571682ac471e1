"""Two layers of the trained fixture, one sliding and one full: a fourth of its time to compile."""

import json

import pytest

from tests.conftest import find_fixture

CHECKPOINT = "tiny-trained/hf-bfloat16-step900"  # window 16
TAKEN = {"model.layers.0.": "model.layers.0.", "model.layers.3.": "model.layers.1."}


def two_layers(folder):
    """Writes the Hugging Face checkpoint into folder; returns folder."""
    numpy = pytest.importorskip("safetensors.numpy")
    whole, tensors = find_fixture(CHECKPOINT), {}
    for file in whole.glob("*.safetensors"):
        tensors |= numpy.load_file(file)
    kept = {n: t for n, t in tensors.items() if ".layers." not in n}
    for old, new in TAKEN.items():
        kept |= {n.replace(old, new): t for n, t in tensors.items() if n.startswith(old)}
    numpy.save_file(kept, folder / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
