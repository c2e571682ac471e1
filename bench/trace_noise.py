"""How far right modules are from their envelopes: transformers against olmo_jax on random weights, module by module.

    python bench/trace_noise.py [--wide] [--bfloat16]

Prints one line a case: over all modules the largest error by itself and carried, each also over the noise that its limit is made
of (float32) and as a share of its limit. bfloat16 runs with XLA's excess precision off.
"""

import os
import sys
import tempfile
from pathlib import Path

BFLOAT16 = "--bfloat16" in sys.argv
if BFLOAT16:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import json  # noqa: E402 - the flags come before JAX

import jax  # noqa: E402
from float32_noise import CASES, WIDE  # noqa: E402
from random_models import build, raw_config  # noqa: E402

from olmo_parity.convert.orbax_io import TreeReader, resolve_tree  # noqa: E402
from olmo_parity.convert.pipeline import hf2orbax  # noqa: E402
from olmo_parity.convert.sources import open_source  # noqa: E402
from olmo_parity.parity import batches  # noqa: E402
from olmo_parity.parity.trace import trace_parts  # noqa: E402
from olmo_parity.parity.traced_candidate import TracedCandidate  # noqa: E402
from olmo_parity.parity.traced_reference import reference_parts  # noqa: E402


def measure(name: str, shape: dict, seed: int, spread: bool) -> None:
    raw = raw_config(**shape)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "hf", Path(folder) / "0"
        model, _, _ = build(raw, seed, spread)
        model.save_pretrained(source)
        (source / "config.json").write_text(json.dumps(raw))
        del model
        hf2orbax(source, target, verify=False, quiet=True)
        opened, dtype = open_source(source), "bfloat16" if BFLOAT16 else "float32"
        sequences = batches.built_in(opened.config)
        reader = TreeReader(resolve_tree(target).item)
        candidate = TracedCandidate(reader, opened.config, sequences, dtype)
        rows = trace_parts(reference_parts(opened, sequences, dtype=dtype), candidate, opened, dtype)
    line = f"{name:11} {'spread' if spread else 'step 0'}  seed {seed}"
    for what, envelopes in (("by itself", [r.own for r in rows]), ("carried", [r.carried for r in rows])):
        line += f"  {what} {max(e.error for e in envelopes):.1e}, {max(e.error / e.limit for e in envelopes):.2f} of the limit"
        if not BFLOAT16:
            line += f", {max(e.error / max(e.noise, 3e-7) for e in envelopes):.2f} times the noise"
    print(line, flush=True)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    wide = "--wide" in sys.argv
    for name, shape in (WIDE if wide else CASES).items():
        for seed in range(1 if wide else 3):
            for spread in (False, True):
                measure(name, shape, seed, spread)
