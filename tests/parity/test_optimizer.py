"""The optimizer: right ones pass with room to spare, a wrong decay group, beta, epsilon or clip is caught and named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import (
    adamw,
    optimizer_explain,
    optimizer_jax,
    optimizer_probe,
    optimizer_steps,
    preflight_options,
    settings,
    step0,
)  # fmt: skip
from olmo_parity.parity.adamw import Recipe
from olmo_parity.parity.preflight_options import Preflight
from tests.parity.two_layers import two_layers

RECIPE = Recipe()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return two_layers(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def tree(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "0"
    hf2orbax(str(checkpoint), str(folder), quiet=True)
    return folder


@pytest.fixture
def probe(checkpoint, monkeypatch):
    """probe(make, recipe): the record and what explains it, of the optimizer that make(learning_rate, tree) returns."""
    config = open_source(checkpoint).config.replace(num_hidden_layers=1, layer_types=("full_attention",))

    def run(make=None, recipe=RECIPE):
        monkeypatch.setattr(optimizer_jax, "load", lambda spec, option: (make, None))
        given = optimizer_probe.inputs(config, recipe)
        with jax.disable_jit():  # all runs share their compiled operations; the whole stage runs as users run it
            got = optimizer_jax.probe(make and "mine:make", recipe, given)
        record = optimizer_probe.judge(given, got, recipe, "mine")
        return record, optimizer_probe.criteria(record), optimizer_explain.explain(given, got, recipe)

    return run


def by_name(tree, rule):
    return jax.tree_util.tree_map_with_path(lambda path, _: rule("/".join(k.key for k in path)), tree)


def decays(path):
    return "embed_tokens" not in path


def chain(clip=1.0, rule=decays, rate=None, b1=0.9, b2=0.95, eps=1e-8, wd=0.1, first=None, **more):
    """A user's function: AdamW with these hyperparameters."""

    def make(learning_rate, tree):
        return optax.chain(
            first or optax.clip_by_global_norm(clip),
            optax.adamw(rate or learning_rate, b1, b2, eps, weight_decay=wd, mask=by_name(tree, rule), **more),
        )

    return make


def assembled(learning_rate, tree):
    """The same written another way: a label for each group, an Adam state for each."""
    groups = {True: optax.adamw(learning_rate, b2=0.95, weight_decay=0.1), False: optax.adam(learning_rate, b2=0.95)}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(groups, by_name(tree, decays)))


def coupled(learning_rate, tree):
    decay = optax.add_decayed_weights(0.1, by_name(tree, decays))
    return optax.chain(optax.clip_by_global_norm(1.0), decay, optax.adam(learning_rate, b2=0.95))


def unscaled_decay(learning_rate, tree):
    adam = optax.chain(optax.scale_by_adam(b2=0.95), optax.scale(-learning_rate))
    return optax.chain(optax.clip_by_global_norm(1.0), adam, optax.add_decayed_weights(-0.1, by_name(tree, decays)))


def own_rate_of_the_embedding(learning_rate, tree):
    groups = {n: optax.adamw(r * learning_rate, b2=0.95, weight_decay=0.0) for n, r in ((True, 1.0), (False, 0.5))}
    decay = optax.add_decayed_weights(-0.1 * learning_rate, by_name(tree, decays))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(groups, by_name(tree, decays)), decay)


def uncorrected(learning_rate, tree):
    """Adam as it is without its bias correction."""

    def update(gradients, state, parameters):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], gradients)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state[1], gradients)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-8), m, v), (m, v)

    adam = optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p),) * 2, update)
    decay = optax.add_decayed_weights(0.1, by_name(tree, decays))
    return optax.chain(optax.clip_by_global_norm(1.0), adam, decay, optax.scale(-learning_rate))


def always_scaled(gradients, _):
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda g: g / norm, gradients)


@pytest.mark.parametrize("make", [None, chain(), assembled])
def test_a_right_optimizer_is_a_hundred_times_within_its_limits_and_its_moments_are_found(make, probe):
    record, criteria, _ = probe(make)
    assert len(criteria) == 5 and all(c.on and c.passed and c.margin > 100 for c in criteria)
    assert record["moment_dtypes"] == ["float32", "float32"]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(beta2=0.999),
        Recipe(beta2=0.9999),
        Recipe(clip=0.0),
        Recipe(epsilon=1e-6, weight_decay=0.0, no_decay=()),
        Recipe(no_decay=("embed_tokens", "scale", "lm_head"), learning_rate=1e-5),
        Recipe(beta1=0.0, beta2=0.0, clip=0.3),
    ],
)
def test_optax_follows_other_recipes_too(recipe, probe):
    assert all(c.passed and c.margin > 2 for c in probe(None, recipe)[1])


WRONG = {  # an optimizer, the runs that must show it, and the sentence that must name it
    "no decay on norms": (
        chain(rule=lambda p: decays(p) and not p.endswith("scale")),
        "ordinary",
        "the weight decay of every scale is 0, the recipe says 0.1",
    ),
    "decay on the embedding": (
        chain(rule=lambda p: True),
        "ordinary",
        "the weight decay of embed_tokens/embedding is 0.1, the recipe says 0",
    ),
    "no decay on the head": (
        chain(rule=lambda p: decays(p) and "lm_head" not in p),
        "ordinary",
        "the weight decay of lm_head/kernel is 0, the recipe says 0.1",
    ),
    "no decay on one leaf": (
        chain(rule=lambda p: decays(p) and p != "layers/0/mlp/up_proj/kernel"),
        "ordinary",
        "the weight decay of layers/0/mlp/up_proj/kernel is 0, the recipe says 0.1",
    ),
    "another decay": (chain(wd=0.11), "ordinary", "all leaves that decay is 0.11, the recipe says 0.1"),
    "decay in the gradient": (coupled, "ordinary", "all leaves that decay goes through the moments"),
    "decay without the rate": (unscaled_decay, "ordinary", "all leaves that decay is not multiplied by the learning rate"),
    "beta1": (chain(b1=0.95), "ordinary", "beta1 is 0.95 in the optimizer, 0.9 in the recipe"),
    "beta1, a little": (chain(b1=0.91), "ordinary", "beta1 is 0.91 in the optimizer"),
    "beta2": (chain(b2=0.999), "ordinary", "beta2 is 0.999 in the optimizer, 0.95 in the recipe"),
    "beta2, a little": (chain(b2=0.96), "ordinary", "beta2 is 0.96 in the optimizer"),
    "betas exchanged": (chain(b1=0.95, b2=0.9), "ordinary", "beta1 is 0.95 in the optimizer"),
    "epsilon 1e-7": (chain(eps=1e-7), "tiny", "epsilon is 1e-07 in the optimizer, 1e-08 in the recipe"),
    "epsilon 1e-6": (chain(eps=1e-6), "tiny", "epsilon is 1e-06 in the optimizer"),
    "epsilon 1e-5": (chain(eps=1e-5), "tiny", "epsilon is 1e-05 in the optimizer"),
    "epsilon 1e-10": (chain(eps=1e-10), "tiny", "epsilon is 1e-10 in the optimizer"),
    "epsilon under the root": (chain(eps=0.0, eps_root=1e-8), "tiny", "epsilon is added to v, under the root"),
    "epsilon squared": (chain(eps=0.0, eps_root=1e-16), "tiny", "epsilon is squared and stands under the root"),
    "no epsilon": (chain(eps=0.0), "tiny", "NaN or infinity"),
    "not clipped": (chain(first=optax.identity()), "clipped", "gradients are not clipped"),
    "clipped to 2": (chain(clip=2.0), "clipped", "gradients are clipped to 2, the recipe says 1.0"),
    "clipped by value": (chain(first=optax.clip(1.0)), "clipped", "gradients are clipped value by value"),
    "always scaled": (
        chain(first=optax.stateless(always_scaled)),
        "ordinary",
        "gradients are scaled to the norm, small ones too",
    ),
    "learning rate": (chain(rate=1e-3), "ordinary", "the learning rate is 0.001 in the optimizer, 0.0003 in the recipe"),
    "rate of a group": (own_rate_of_the_embedding, "ordinary", "the learning rate of embed_tokens/embedding is 0.5 times"),
    "Nesterov": (chain(nesterov=True), "ordinary", "the momentum is Nesterov's"),
    "no bias correction": (uncorrected, "ordinary", "there is no bias correction"),
    "a bfloat16 moment": (chain(mu_dtype=jnp.bfloat16), "ordinary", "the first moment is kept in bfloat16"),
    "two at once": (chain(b2=0.99, wd=0.05), "ordinary", "all leaves that decay is 0.05"),
    "another algorithm": (lambda rate, tree: optax.lion(rate, weight_decay=0.1), "ordinary", "it is not AdamW"),
    "a larger step at the end": (  # only the third step is off
        lambda rate, tree: optax.chain(chain()(rate, tree), optax.scale_by_schedule(lambda t: jnp.where(t < 2, 1.0, 1.01))),
        "ordinary",
        "it is not AdamW",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_optimizer_fails_within_three_steps_and_is_named(name, probe):
    make, run, words = WRONG[name]
    record, criteria, explained = probe(make)
    shown = next(c for c in criteria if optimizer_probe.ABOUT[run] in c.name)
    assert not shown.passed, shown
    assert any(words in sentence for sentence in explained), explained
    assert len(explained) <= 2, explained  # and nothing else is accused


def test_a_wrong_epsilon_is_all_but_invisible_on_gradients_of_ordinary_size(probe):
    """Why the probe has gradients of epsilon's size: at the released sizes ordinary ones are larger still."""
    _, criteria, _ = probe(chain(eps=1e-7))
    by_run = dict(zip(optimizer_probe.RUNS, criteria, strict=False))
    assert by_run["tiny"].value > 0.5 > 1e-2 > by_run["ordinary"].value


def test_moments_that_are_not_found_are_not_judged_and_the_updates_are(probe):
    def hidden(rate, tree):
        inner = chain(b2=0.999)(rate, tree)
        return optax.GradientTransformation(
            lambda p: [jax.tree.leaves(inner.init(p))],
            lambda g, s, p: rewrapped(inner, g, s, p),
        )

    def rewrapped(inner, gradients, state, parameters):
        whole = jax.tree.unflatten(jax.tree.structure(inner.init(parameters)), state[0])
        updates, whole = inner.update(gradients, whole, parameters)
        return updates, [jax.tree.leaves(whole)]

    record, criteria, explained = probe(hidden)
    assert record["moments"] == {"first": None, "second": None}
    assert [c.on for c in criteria] == [True] * 3 + [False] * 2 and not criteria[0].passed
    assert explained == ["beta2 is 0.999 in the optimizer, 0.95 in the recipe"]


def test_the_formula_is_that_of_torch(checkpoint):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from olmo_parity.parity import optimizer_torch

    for recipe in (RECIPE, Recipe(epsilon=1e-3, beta2=0.999, weight_decay=0.3, no_decay=("scale",), clip=0.2)):
        given = optimizer_probe.inputs(open_source(checkpoint).config, recipe)
        record = optimizer_probe.judge(given, optimizer_torch.probe(given, recipe), recipe, "torch")
        criteria = optimizer_probe.criteria(record)
        assert all(c.on and c.value < 1e-5 for c in criteria)  # 1e-6 of it is clip_grad_norm_'s own epsilon
        other = replace(recipe, beta2=0.9)
        wrong = optimizer_probe.judge(given, optimizer_torch.probe(given, other), recipe, "torch")
        assert not optimizer_probe.criteria(wrong)[0].passed


def test_one_step_of_the_formula_by_hand():
    (update, m, v), *_ = adamw.directions([np.array([3.0, 0.0])], [6.0], Recipe())  # clipped from 6 to 1
    assert m == pytest.approx([0.1 * 0.5, 0]) and v == pytest.approx([0.05 * 0.25, 0])
    assert update == pytest.approx([-3e-4 * 0.5 / (0.5 + 1e-8), 0])


def test_equal_axes_stay_equal_and_longer_ones_longer_in_the_probe(checkpoint):
    config = open_source(checkpoint).config
    shapes = optimizer_probe.leaf_shapes(config)
    v, d = shapes["embed_tokens/embedding"]
    assert shapes["lm_head/kernel"] == (d, v) and v > d and shapes["norm/scale"] == (d,)
    assert shapes["layers/0/mlp/up_proj/kernel"][1] > d and len(shapes) == 3 + 2 * 11


BAD = {
    "raises": ("def make(rate, tree):\n    raise RuntimeError('no mesh here')\n", "it raised[^$]*no mesh here"),
    "no transformation": ("def make(rate, tree):\n    return 3\n", "returned a int, an optax.GradientTransformation"),
    "update raises": (
        "import optax\ndef make(rate, tree):\n    return optax.GradientTransformation(lambda p: 0, lambda g, s, p: 1 / 0)\n",
        "update raised[^$]*ZeroDivisionError",
    ),
    "other leaves": (
        "import optax\ndef make(rate, tree):\n"
        "    return optax.GradientTransformation(lambda p: 0, lambda g, s, p: ({'w': g['norm']['scale']}, s))\n",
        "its updates are not like the parameters at embed_tokens/embedding",
    ),
    "no such function": ("def other(rate, tree): ...\n", "has no make; it has other"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_function_that_cannot_be_used_is_said_with_its_own_words(name, checkpoint, tmp_path, monkeypatch):
    text, words = BAD[name]
    module = f"mine_{abs(hash(name))}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = optimizer_probe.inputs(open_source(checkpoint).config, RECIPE)
    with pytest.raises(BadInput, match=rf"\[preflight\] optimizer {module}:make[^$]*{words}"):
        optimizer_jax.probe(f"{module}:make", RECIPE, given)


def toml(folder, text):
    (folder / "parity.toml").write_text(text)
    return settings.load(folder / "parity.toml", False)


def test_the_recipe_comes_from_parity_toml_and_is_checked(tmp_path):
    chosen, _ = preflight_options.choose(
        {}, toml(tmp_path, "[preflight.recipe]\nbeta2 = 0.99\nno_decay = []\nclip = 0\n")
    )
    assert chosen.recipe == replace(RECIPE, beta2=0.99, no_decay=(), clip=0.0)
    for text, words in (
        ("beta1 = 1.0", "beta1 is 1.0, below 1"), ("epsilon = 0", "epsilon is 0.0"), ("learning_rate = 0", "nothing would move"),
        ("beta3 = 1", "unknown key 'beta3'"), ("clip = -1", "at least 0"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=rf"\[preflight.recipe\][^$]*{words}"):
            preflight_options.choose({}, toml(tmp_path, f"[preflight.recipe]\n{text}\n"))


def test_a_name_without_decay_that_no_leaf_has_is_refused(checkpoint, tree):
    options = Preflight(reference=checkpoint, candidate=tree, recipe=Recipe(no_decay=("embeddings",)))
    with pytest.raises(BadInput, match="no_decay names 'embeddings', and no leaf has such a part"):
        step0.run_step0(options, print)


@pytest.fixture
def here(monkeypatch):
    """The probe in this process, for tests that are about something else."""

    def probe(config, given, recipe, spec, *_):
        return optimizer_jax.probe(spec, recipe, given), None

    monkeypatch.setattr(optimizer_jax, "run_probe", probe)


def quiet(_):
    pass


def run(checkpoint, tree, **more):
    return step0.run_step0(Preflight(reference=checkpoint, candidate=tree, **more), quiet)


def test_the_users_own_function_is_what_is_tested_in_both_parts(checkpoint, tree, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (tmp_path / "training.py").write_text(
        "import optax\n"
        "def optimizer(learning_rate, tree):\n"
        "    return optax.chain(optax.clip_by_global_norm(1.0),\n"
        "                       optax.adamw(learning_rate, 0.9, 0.999, 1e-8, weight_decay=0.1))\n"
    )
    monkeypatch.chdir(tmp_path)
    record = run(checkpoint, tree, optimizer="training:optimizer", keep_going=True)
    assert record["verdict"] == "fail" and record["decided_by"].startswith(
        "optimizer: training:optimizer: worst update"
    )
    assert record["where"][:2] == [
        "training:optimizer: beta2 is 0.999 in the optimizer, 0.95 in the recipe",
        "training:optimizer: the weight decay of embed_tokens/embedding is 0.1, the recipe says 0",
    ]
    assert record["function"]["file"] == str(tmp_path / "training.py") and len(record["function"]["sha256"]) == 64
    failed = {c["leg"] for c in record["criteria"] if not c["passed"]}
    assert failed == {"optimizer", "three steps"}
    monkeypatch.setattr(step0, "_against_torch", None)  # is not come to
    stopped = run(checkpoint, tree, optimizer="training:optimizer")
    assert stopped["verdict"] == "fail" and "the optimizer failed already" in stopped["not_run"][0]


def test_with_a_record_the_optimizer_is_judged_by_the_formula_and_torch_is_said_to_be_left_out(
    here, tree, tmp_path, monkeypatch
):
    recorded = tmp_path / "record"
    recorded.mkdir()
    monkeypatch.setattr(step0, "is_record", lambda path: path == recorded)
    monkeypatch.setattr(step0, "open_record", lambda path: open_source(tree))
    record = run(recorded, tree)
    assert record["verdict"] == "pass" and {c["leg"] for c in record["criteria"]} == {"optimizer"}
    assert "the reference is a record, which holds logits alone" in record["not_run"][0]


def test_models_that_do_not_fit_leave_the_optimizer_to_be_judged(here, checkpoint, tree, monkeypatch):
    monkeypatch.setattr(step0.gradients, "available_memory", lambda: 1 << 20)
    record = run(checkpoint, tree)
    assert record["verdict"] == "pass" and "GiB of memory" in record["not_run"][0]


def rows(error, noise=0.0):
    def kinds(value):
        return dict.fromkeys(optimizer_steps.COMPARED, value)

    steps = {"steps": [{"loss": 5.0, "global_norm": 1.0}] * 3, "settings": {}}
    errors, own = {"b": kinds(1e-5), "a": kinds(error)}, {"b": kinds(0.0), "a": kinds(noise)}
    found = optimizer_steps.judge(errors, own, *[steps] * 3)
    return found, optimizer_steps.criteria(found)


def test_a_parameter_may_differ_by_a_multiple_of_its_own_noise_and_nan_fails():
    assert all(c.passed for c in rows(1e-3 / 2)[1])
    assert not all(c.passed for c in rows(3e-3)[1])
    assert all(c.passed for c in rows(3e-3, noise=2e-4)[1])
    assert not all(c.passed for c in rows(float("nan"))[1])
    found, criteria = rows(1.4, noise=1.4)  # rounding noise alone: no verdict about it, and it says so
    assert found["unresolved"] == ["a"] and all(c.passed for c in criteria)
