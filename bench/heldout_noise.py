"""How far apart the held-out losses of right implementations are: per token, in the mean, in float32 and in bfloat16.

    python bench/heldout_noise.py [--random] [CHECKPOINT ...]

CHECKPOINT: Hugging Face folders; by default the trained and other fixtures (tests/data, or OLMO_PARITY_FIXTURES). --random
adds random models of other widths. Byte-level checkpoints (259 entries) read Python's own standard library, others random tokens.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.parity import heldout_stats as stats
from olmo_parity.parity.batches import Sequence
from olmo_parity.parity.devices import Placement
from olmo_parity.parity.heldout_runs import Runs
from olmo_parity.parity.identity import versions

FIXTURES = Path(os.environ.get("OLMO_PARITY_FIXTURES", Path(__file__).parents[1] / "tests" / "data"))
ROWS, LENGTH = 40, 128


def rows(vocabulary: int) -> list[Sequence]:
    if vocabulary == 259:
        text = b"".join(f.read_bytes() for f in sorted(Path(os.__file__).parent.glob("s*.py"))[:10])
        tokens = np.frombuffer(text, np.uint8)[: ROWS * LENGTH].astype(np.int32)
    else:
        tokens = np.random.default_rng(1).integers(0, vocabulary, ROWS * LENGTH).astype(np.int32)
    return [Sequence(f"row {i}", row) for i, row in enumerate(tokens.reshape(ROWS, LENGTH))]


def measure(name: str, checkpoint: Path, folder: Path) -> None:
    tree = folder / "tree" / "0"
    hf2orbax(str(checkpoint), str(tree), overwrite=True, quiet=True)
    reference, candidate = open_source(checkpoint), open_source(tree)
    sequences = rows(reference.config.vocab_size)
    block = stats.blocks(sequences)

    def runs(into: str) -> Runs:
        (folder / into).mkdir()
        return Runs(
            reference,
            candidate,
            sequences,
            folder / into,
            False,
            Placement(),
            (),
            versions(),
            name,
            True,
            lambda _: None,
        )

    with tempfile.TemporaryDirectory(dir=folder) as into:
        both = runs(f"{into}/32")
        first, second = both.float32()
        noise = both.noise()
        delta = second.loss - first.loss
        mean, error = stats.mean_and_error(delta, block)
        print(
            f"{name:24} float32   loss {first.loss.mean():.4f}  rms {stats.rms(delta):.2e}  mean {mean:+.1e} +- {error:.1e}  "
            f"own noise rms {noise['observed_logprob_delta_rms']:.2e} mean {-noise['observed_logprob_delta_mean']:+.1e}  "
            f"rms over own {stats.rms(delta) / noise['observed_logprob_delta_rms']:.2f}",
            flush=True,
        )
        wide, own, theirs = runs(f"{into}/16").bfloat16()
        criteria, _, _ = stats.bfloat16_criteria("", wide, own, theirs, sequences)
        print(
            f"{'':24} bfloat16  own rms {stats.rms(own.loss - wide.loss):.2e}  candidate {stats.rms(theirs.loss - wide.loss):.2e}  "
            f"mean square ratio, upper end {criteria[0].value:.3f}  bias {criteria[1].value:.2f} standard errors",
            flush=True,
        )


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--random"]
    found = [Path(a) for a in arguments] or sorted(FIXTURES.glob("tiny-*/hf-*float*"))
    with tempfile.TemporaryDirectory() as scratch:
        for path in found:
            measure(f"{path.parent.name} {path.name.removeprefix('hf-')}"[:24], path, Path(scratch))
        if "--random" in sys.argv:
            from float32_noise import CASES
            from random_models import build, raw_config

            for case, shape in CASES.items():
                for spread in (False, True):
                    model, _, _ = build(raw_config(**shape), 0, spread)
                    model.save_pretrained(Path(scratch) / "hf")
                    del model
                    measure(f"{case} {'spread' if spread else 'step 0'}", Path(scratch) / "hf", Path(scratch))
