"""How far apart the gradients of two right float32 implementations are: transformers (torch.autograd) and olmo_jax.

    python bench/gradient_noise.py [--wide] [HF_FOLDER ...]

Without folders: random models, as at step 0 (std 0.02, norms ones) and spread (matrices std 2 / sqrt(width), norms
1 + 0.1 N). One line a case: loss, relative difference of loss and of the global norm, the largest relative L2 error of a
parameter with the gate's denominator and with the parameter's own norm alone, and the same for sequences whose gradient
of q and k is zero but for rounding (one token repeated).
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
from float32_noise import CASES, WIDE
from random_models import build, raw_config

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.tree import unflatten
from olmo_parity.parity import batches
from olmo_parity.parity.gradient_sides import jax_gradients, torch_gradients
from olmo_parity.parity.gradients import compare, gradient_criteria

Z_LOSS = 1e-5


def measure(what: str, path: Path, sequences: list) -> list[float]:
    """Prints a line; returns loss, norm and parameter errors as the gate judges them."""
    source = open_source(path)
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        first = torch_gradients(source.path, source.config, sequences, a, z_loss=Z_LOSS)
        flat = {w.jax: np.array(apply_layout(w.layout, source.tensors[w.hf].read())) for w in weights(source.config)}
        second = jax_gradients(source.config, unflatten(flat), sequences, b, z_loss=Z_LOSS)
        record = compare(a, b, [w.hf for w in weights(source.config)], first, second)
    loss, _, norm, error = (c.value for c in gradient_criteria(record)[2:])  # _: the z-loss alone
    rows = [r for r in record["parameters"] if r["share_of_global_norm"] > 0]
    total = record["global_norm"]["reference"]
    own = max(r["relative_error"] * max(1, 1e-3 / r["share_of_global_norm"]) for r in rows)
    print(
        f"{what:44} loss {first['loss']:6.3f} differs {loss:.1e}  norm {total:8.3g} differs {norm:.1e}"
        f"  worst {error:.1e} ({record['worst'][0]['name']})  by own norm {own:.1e}"
        f"  smallest share {min(r['share_of_global_norm'] for r in rows):.1e}  unresolved {len(record['unresolved'])}",
        flush=True,
    )
    return [loss, norm, error]


def all_measures():
    folders = [Path(a) for a in sys.argv[1:] if not a.startswith("-")]
    for folder in folders:
        yield from both(str(folder), folder)
    wide = "--wide" in sys.argv
    for name, shape in {} if folders else (WIDE if wide else CASES).items():
        for seed in range(1 if wide else 2):
            for spread in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    build(raw_config(**shape), seed, spread)[0].save_pretrained(folder)
                    what = f"{name} {'spread' if spread else 'step 0'} seed {seed}"
                    yield from both(what, Path(folder), 256 if shape["width"] > 1000 else 512)


def both(what: str, path: Path, tokens: int = 512):
    """The built-in sequences, of wide models the first one alone and cut, and one token repeated."""
    sequences = batches.built_in(open_source(path).config)
    if tokens < 512:
        sequences = [dataclasses.replace(sequences[0], tokens=sequences[0].tokens[:tokens])]
    yield measure(what, path, sequences)
    yield measure(what + ", one token", path, [batches.Sequence("same", np.full(64, 7, np.int32))])


if __name__ == "__main__":
    largest = np.max(list(all_measures()), axis=0)
    print("largest: loss {:.1e}, global norm {:.1e}, parameter {:.1e}".format(*largest))
