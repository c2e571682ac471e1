"""Random faults of the catalogue on random models, through the whole pipeline: convert, plant, judge, trace.

A few fixed examples by default; OLMO_PARITY_EXAMPLES=300 runs so many random ones.
"""

import os
import tempfile
from pathlib import Path

import jax
import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.parity.mutants.catalogue import CONTROL, MUTANTS
from olmo_parity.parity.mutants.judge import status_of, why_small
from olmo_parity.parity.mutants.kinds import BENIGN, PRECISION, Config, Inputs, Steps, Tensors
from olmo_parity.parity.mutants.planting import CannotPlant, part_of, plant, why_invisible
from tests.parity.random_checkpoints import SLIDE, WIDE, judging, raw_config, write_checkpoint, yarn

EXAMPLES = int(os.environ.get("OLMO_PARITY_EXAMPLES", 0))
FAULTS = 5  # of one model
NAMES = [
    m.name for m in MUTANTS if m.entry.kind != PRECISION and isinstance(m.entry.fault, (Config, Inputs, Steps, Tensors))
]
# The trace runs one row at a time without padding, looks up tokens that occur, and is told nothing of one float32 step.
UNTRACED = (
    "mask-of-first-row",
    "rotary-of-first-row",
    "row-of-unused-token",
    "nan-in-unused-row",
    "one-value-own-step",
)


@st.composite
def models(draw):
    """A config and a seed of its weights."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([8, 16]))
    types = draw(st.lists(st.sampled_from([SLIDE, WIDE]), min_size=1, max_size=5))
    vocabulary = draw(st.sampled_from([61, 120, 500]))
    raw = raw_config(
        hidden_size=draw(st.sampled_from([heads * head_dim, 24, 48])),
        intermediate_size=draw(st.sampled_from([24, 40])),
        layer_types=types,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=draw(st.sampled_from([10000.0, 500000.0])),
        rope_scaling=draw(st.sampled_from([None, yarn(8.0, 32), yarn(4.0, 256)])),
        sliding_window=draw(st.sampled_from([2, 16, 100, 600])),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=vocabulary,
        eos_token_id=draw(st.sampled_from([1, vocabulary - 1])),
    )
    return raw, draw(st.integers(0, 2**16))


@pytest.fixture(autouse=True)
def compiled_fast():
    """Every example compiles another model: most of the time would go into optimising it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@settings(
    max_examples=EXAMPLES or 1,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # no shrinking: an example takes seconds, and is small
    suppress_health_check=list(HealthCheck),
)
@given(models(), st.lists(st.sampled_from(NAMES), min_size=FAULTS, max_size=FAULTS, unique=True))
@example(
    (raw_config(), 0),
    ["window-minus-one@first", "kv-heads-tiled@middle", "gate-and-up-exchanged@last", "norms-before@last"],
)
def test_a_right_conversion_passes_and_a_planted_fault_is_killed_and_named(model, names):
    raw, seed = model
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        source = write_checkpoint(folder / "hf", raw, seed)
        hf2orbax(source, folder / "run" / "0", quiet=True)
        (folder / "logits").mkdir()
        run = judging(source, folder / "logits", folder / "run" / "0")
        for name in [CONTROL.name, *names]:
            check(run, next(m for m in MUTANTS if m.name == name))


def check(run, mutant):
    try:
        planted = plant(mutant, run.config, run.tensors)
    except CannotPlant:
        return
    hidden = why_invisible(planted, run.config, run.tensors)
    small = None
    if mutant.entry.root:
        small = why_small(planted, run.config.rms_norm_eps, run.float32.smallest_squares, run.judge.delta_limit)
    criteria = run.judge.files(planted) + run.float32_criteria(planted)
    status = status_of(mutant.entry.kind, criteria, hidden, small)
    values = mutant.name, [(c.name, c.value, c.limit) for c in criteria]
    assert status != "survived", values
    assert not (hidden and status == "killed"), (hidden, values)
    assert mutant.entry.kind != BENIGN or status == "passed", values
    trace = run.tracer(mutant.entry.kind).trace(planted)
    if not trace or mutant.entry.name in UNTRACED:
        return
    assert trace["right"] or status != "killed", (mutant.name, trace, sorted(planted.places))
    if trace["first"]:
        order = run.float32.order
        assert order.index(part_of(trace["first"])) >= min(order.index(part_of(p)) for p in planted.places)
