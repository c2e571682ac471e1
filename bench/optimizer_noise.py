"""How far apart three AdamW steps of two right implementations are, and the reference from itself.

    python bench/optimizer_noise.py [HF_FOLDER ...]

Without folders: random models, as at step 0 and spread (see gradient_noise.py). One line a case: the largest difference of a
loss; for both moments and the update the largest relative L2 error of a parameter, the largest share of its limit that a
parameter takes, and how many have a limit too wide to judge by; then optax and torch against the formula.
"""

import sys
import tempfile
from pathlib import Path

from float32_noise import CASES
from random_models import build, raw_config

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.parity import optimizer_steps
from olmo_parity.parity.preflight_options import Preflight
from olmo_parity.parity.step0 import run_step0


def measure(what: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree" / "0"
        hf2orbax(str(path), str(tree), quiet=True)
        record = run_step0(Preflight(reference=path, candidate=tree), lambda _: None)
    steps, parts = record["steps"], []
    for kind in optimizer_steps.COMPARED:
        errors = [row["errors"][kind] for row in steps["parameters"]]
        shares = [row["errors"][kind] / row["limits"][kind] for row in steps["parameters"]]
        parts.append(f"{kind} {max(errors):.1e} ({max(shares):.1%} of its limit)")
    loss = max(c["value"] for c in record["criteria"] if c["name"].startswith("loss difference / loss, step"))
    alone = [max(row["relative_error"] for row in record[k]["worst"].values()) for k in ("probe", "torch_probe")]
    print(
        f"{what:28} {record['verdict']}  loss {loss:.1e}  {'  '.join(parts)}  unresolved {len(steps['unresolved'])}"
        f"  alone: optax {alone[0]:.1e} torch {alone[1]:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        measure(folder, Path(folder))
    for name, shape in {} if sys.argv[1:] else CASES.items():
        for spread in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                build(raw_config(**shape), 0, spread)[0].save_pretrained(folder)
                measure(f"{name} {'spread' if spread else 'step 0'}", Path(folder))
