"""Loss and gradients: right models pass, wrong backward passes fail although their forward pass is right."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_parity.convert.mapping import apply_layout, weights
from olmo_parity.convert.pipeline import hf2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.olmo_jax import layers, model
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.olmo_jax.tree import unflatten
from olmo_parity.parity import gate, gradient_sides, gradients
from olmo_parity.parity.batches import Sequence
from olmo_parity.parity.options import GateOptions
from tests.conftest import find_fixture

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Z_LOSS = 1e-5
FIXTURE = "tiny-yarn/hf-float32"  # grouped heads and trained norms are in the models made here
VOCABULARY, PAD = 320, 5


def rows(vocab_size):
    """Three packed documents with a window of 5 imposed; the pad token is a target and an input. One shape to compile."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 128, dtype=np.int32)
    tokens[3:40:7] = PAD
    return [Sequence("packed", tokens, window=5, documents=(41, 37, 50))]


def checkpoint(folder, tied):
    """A two-layer model with grouped heads, no norm at one, saved as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.Olmo3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, tie_word_embeddings=tied, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=PAD, bos_token_id=None, eos_token_id=1,
        rms_norm_eps=1e-6, attention_bias=False,
    )  # fmt: skip
    built = transformers.Olmo3ForCausalLM(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(1, 0.1) if parameter.ndim == 1 else parameter.normal_(0, 0.1)
    built.save_pretrained(folder)
    return folder


def reference(path, folder, sequences, z_loss=Z_LOSS):
    source = open_source(path)
    result = gradient_sides.torch_gradients(source.path, source.config, sequences, folder, z_loss=z_loss)
    return SimpleNamespace(source=source, folder=folder, sequences=sequences, result=result)


def judge(ref, folder, z_loss=Z_LOSS):
    """Criteria by a short name, of olmo_jax as it is patched now against a reference that was run before.

    Without jit all runs share their compiled operations; the whole leg at the end runs as users run it.
    """
    config = ref.source.config
    leaves = {w.jax: np.array(apply_layout(w.layout, ref.source.tensors[w.hf].read())) for w in weights(config)}
    with jax.disable_jit():
        found = gradient_sides.jax_gradients(config, unflatten(leaves), ref.sequences, folder, z_loss=z_loss)
    record = gradients.compare(ref.folder, folder, [w.hf for w in weights(config)], ref.result, found)
    record["z_loss"] = Z_LOSS
    names = ("missing", "finite", "loss", "z", "norm", "worst")
    criteria = dict(zip(names, gradients.gradient_criteria(record), strict=True))
    verdict = gate.judge(list(criteria.values()), [], 1)
    return SimpleNamespace(record=record, exit_code=verdict.exit_code, sentence=verdict.sentence, **criteria)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return reference(checkpoint(folder / "hf", tied=False), folder / "reference", rows(VOCABULARY))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    return reference(checkpoint(folder / "hf", tied=True), folder / "reference", rows(VOCABULARY))


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_the_models_of_the_planted_faults_pass_without_them(kind, request, tmp_path):
    result = judge(request.getfixturevalue(kind), tmp_path / "candidate")
    assert result.exit_code == gate.PASS, result.sentence
    assert result.worst.margin > 10 and result.z.value < 1e-6


def stop_a_norm_scale(monkeypatch):
    right, calls = layers.rms_norm, []

    def wrong(x, scale, eps):
        calls.append(1)
        return right(x, jax.lax.stop_gradient(scale) if len(calls) == 1 else scale, eps)

    monkeypatch.setattr(layers, "rms_norm", wrong)


def stop_the_variance_of_norms(monkeypatch):
    def wrong(x, scale, eps):
        y = x.astype(jnp.float32)
        y = y * jax.lax.stop_gradient(jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps))
        return (scale * y).astype(x.dtype)

    monkeypatch.setattr(layers, "rms_norm", wrong)


def stop_attention_probabilities(monkeypatch):
    right = jax.nn.softmax
    monkeypatch.setattr(jax.nn, "softmax", lambda *a, **k: jax.lax.stop_gradient(right(*a, **k)))


def scale_the_gradient_of_values(monkeypatch):
    """A backward pass one percent off, as a kernel with a wrong constant has it."""
    right = layers.attention

    def wrong(q, k, v, mask):
        return right(q, k, 1.01 * v - jax.lax.stop_gradient(0.01 * v), mask)

    monkeypatch.setattr(layers, "attention", wrong)


BACKWARD = (stop_a_norm_scale, stop_the_variance_of_norms, stop_attention_probabilities, scale_the_gradient_of_values)


@pytest.mark.parametrize("plant", BACKWARD)
def test_a_wrong_backward_pass_fails_though_the_loss_agrees(plant, plain, tmp_path, monkeypatch):
    plant(monkeypatch)
    result = judge(plain, tmp_path / "candidate")
    assert result.exit_code == gate.FAIL
    assert result.loss.passed and result.z.passed and not result.worst.passed
    if plant is stop_a_norm_scale:
        assert "model.layers.0.self_attn.q_norm.weight" in result.worst.name
        assert result.worst.value == pytest.approx(1) and result.record["worst"][0]["cosine"] is None


def test_a_tied_head_without_its_share_of_the_embedding_fails(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(
        model.Embedding, "attend", lambda self, x: layers.linear(x, jax.lax.stop_gradient(self.embedding[...]).T)
    )
    result = judge(tied, tmp_path / "candidate")
    assert result.exit_code == gate.FAIL and result.loss.passed
    assert "model.embed_tokens.weight" in result.worst.name


def test_an_embedding_whose_pad_row_does_not_learn_fails(plain, tmp_path, monkeypatch):
    """transformers leaves that row out; the reference here, like OLMo-core, does not."""
    right = layers.embed

    def wrong(tokens, embedding, dtype):
        x = right(tokens, embedding, dtype)
        return jnp.where((tokens == PAD)[..., None], jax.lax.stop_gradient(x), x)

    monkeypatch.setattr(layers, "embed", wrong)
    assert not judge(plain, tmp_path / "candidate").worst.passed


LOSSES = {
    "shifted by one": lambda right: lambda x, t, real: right(x, jnp.roll(t, 1), real),
    "a sum, not a mean": lambda right: lambda x, t, real: tuple(127.0 * part for part in right(x, t, real)),
    "every position, crossing documents": lambda right: lambda x, t, real: right(x, t, jnp.ones_like(real)),
}


@pytest.mark.parametrize("fault", LOSSES)
def test_a_wrong_loss_fails(fault, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_sides, "summed_loss", LOSSES[fault](gradient_sides.summed_loss))
    result = judge(plain, tmp_path / "candidate")
    assert result.exit_code == gate.FAIL
    assert not result.loss.passed and not result.worst.passed


@pytest.mark.parametrize("z_loss, error", [(None, 1), (2 * Z_LOSS, 1), (1.01 * Z_LOSS, 0.01)])
def test_a_z_loss_that_is_missing_doubled_or_one_percent_off_fails_by_itself(z_loss, error, plain, tmp_path):
    result = judge(plain, tmp_path / "candidate", z_loss=z_loss)
    assert result.exit_code == gate.FAIL and not result.z.passed
    assert result.z.value == pytest.approx(error, rel=1e-3)
    assert result.loss.passed == (error < 1)  # one percent of it is under the limit of the whole loss


def test_a_z_loss_hidden_by_another_error_of_the_loss_fails():
    """The total loss agrees to the last bit, its two terms do not."""
    sides = {"reference": {"loss": 6.0, "nll": 5.999, "z": 0.001}, "candidate": {"loss": 6.0, "nll": 6.0, "z": 0.0}}
    z = z_criterion(sides, Z_LOSS)
    assert z.on and not z.passed


def test_a_z_loss_that_both_sides_leave_out_fails_where_it_was_asked_for_and_is_off_where_not():
    none = {side: {"loss": 6.0, "nll": 6.0, "z": 0.0} for side in ("reference", "candidate")}
    assert not z_criterion(none, Z_LOSS).passed
    off = z_criterion(none, None)
    assert not off.on and off.reason == "no --z-loss was given"
    unasked = {**none, "candidate": {"loss": 6.0, "nll": 6.0, "z": 1e-3}}
    assert z_criterion(unasked, None).on and not z_criterion(unasked, None).passed
    assert not z_criterion({**none, "candidate": {**none["candidate"], "z": float("nan")}}, None).passed


def z_criterion(loss, z_loss):
    record = {"loss": loss, "global_norm": {"reference": 1.0, "candidate": 1.0}, "faults": [], "parameters": [],
              "worst": [], "z_loss": z_loss}  # fmt: skip
    return next(c for c in gradients.gradient_criteria(record) if c.name.startswith("z-loss"))


def test_documents_that_see_each_other_fail(plain, tmp_path, monkeypatch):
    right = layers.documents

    def wrong(segment_ids):
        document, position = right(segment_ids)
        return jnp.zeros_like(document), position

    monkeypatch.setattr(layers, "documents", wrong)
    assert not judge(plain, tmp_path / "candidate").worst.passed


def test_the_loss_is_the_mean_over_targets_in_nats_with_the_z_loss_beside_it(plain):
    """Against torch's own cross entropy, document by document."""
    config = transformers.AutoConfig.from_pretrained(plain.source.path)
    config._attn_implementation = "eager"
    total, count, squares = 0.0, 0, 0.0
    for sequence in plain.sequences:
        config.sliding_window = sequence.window
        built = transformers.Olmo3ForCausalLM.from_pretrained(plain.source.path, config=config).eval()
        for tokens, _ in sequence.parts():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                logits = built(ids).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            squares += float(torch.logsumexp(logits, -1).square().sum())
            count += ids.shape[1] - 1
    assert plain.result["nll"] == pytest.approx(total / count, rel=1e-6)
    assert plain.result["z"] == pytest.approx(Z_LOSS * squares / count, rel=1e-6)
    assert plain.result["loss"] == pytest.approx(plain.result["nll"] + plain.result["z"], rel=1e-9)


def test_gradients_that_are_zero_but_for_rounding_do_not_fail_a_right_model(plain, tmp_path):
    """One token repeated: all values are equal, so q and k cannot matter."""
    same = [Sequence("same", np.full(64, 7, np.int32))]
    ref = reference(plain.source.path, tmp_path / "reference", same)
    result = judge(ref, tmp_path / "candidate")
    assert result.exit_code == gate.PASS, result.sentence
    total = result.record["global_norm"]["reference"]
    by_own_norm = [
        r["relative_error"] * gradients.SHARE * total / r["norm_reference"]
        for r in result.record["parameters"]
        if 0 < r["norm_reference"] < gradients.SHARE * total
    ]
    assert max(by_own_norm) > 0.1  # the usual denominator would have failed it
    covered = gradients.gradient_coverage(result.record)
    assert not covered["covered"] and "q_proj" in covered["detail"]  # and a right verdict is not claimed of them


def test_the_whole_leg_passes_a_right_conversion_with_room_to_spare_in_a_process_of_its_own(tmp_path):
    tree = tmp_path / "tree" / "0"
    hf2orbax(str(find_fixture(FIXTURE)), str(tree), quiet=True)
    source, candidate = open_source(find_fixture(FIXTURE)), open_source(tree)
    sequences = rows(source.config.vocab_size)
    record = gradients.run_gradients(source, candidate, sequences, tmp_path / "run", Z_LOSS)
    criteria = gradients.gradient_criteria(record)
    assert gate.judge(criteria, [], 1).exit_code == gate.PASS
    assert all(c.margin > 10 for c in criteria if c.value) and not record["unresolved"]
    assert all(row["cosine"] > 1 - 1e-8 for row in record["parameters"])
    assert record["targets"] == 125 and record["candidate"]["matmul_precision"] == "highest"
    json.dumps(record)
    (tree / "olmo_config.json").unlink()
    with pytest.raises(BadInput, match="cannot be used"):
        gradient_sides.run_jax_gradients(tree, sequences, tmp_path / "broken")


SETTINGS = {"loss": 1.0, "nll": 1.0, "z": 0.0, "settings": {}}


def compared(folder, a, b, first=SETTINGS, second=SETTINGS):
    for side, arrays in (("a", a), ("b", b)):
        (folder / side).mkdir()
        for name, values in arrays.items():
            np.save(gradient_sides.file_of(folder / side, name), np.asarray(values, np.float32))
    record = gradients.compare(folder / "a", folder / "b", list(a), first, second)
    return record, gate.judge(gradients.gradient_criteria(record), [], 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_gradient_that_is_not_finite_fails(bad, side, tmp_path):
    good, wrong = {"x": [3.0, 4.0], "y": [1.0]}, {"x": [3.0, 4.0], "y": [bad]}
    record, verdict = compared(tmp_path, *((wrong, good) if side == "reference" else (good, wrong)))
    assert verdict.exit_code == gate.FAIL
    assert not any(c.passed for c in gradients.gradient_criteria(record)[3:] if "worst" in c.name)
    assert record["worst"][0]["name"] == "y"
    json.dumps({k: v for k, v in record.items() if k != "parameters"})


def test_a_loss_that_is_not_finite_fails(tmp_path):
    _, verdict = compared(tmp_path, {"x": [1.0]}, {"x": [1.0]}, second={**SETTINGS, "loss": float("nan")})
    assert verdict.exit_code == gate.FAIL and "loss" in verdict.sentence


def test_missing_unexpected_and_misshapen_gradients_fail(tmp_path):
    record, verdict = compared(
        tmp_path, {"x": [1.0], "y": [1.0], "z": [1.0]}, {"x": [1.0], "y": [1.0, 2.0], "w": [1.0]}
    )
    assert verdict.exit_code == gate.FAIL and "missing or unexpected is 3" in verdict.sentence
    assert len(record["faults"]) == 3


def test_equal_gradients_have_no_error_and_a_zero_one_fails_only_where_the_reference_has_one(tmp_path):
    record, verdict = compared(tmp_path, {"x": [3.0, 4.0], "y": [0.0]}, {"x": [3.0, 4.0], "y": [0.0]})
    assert verdict.exit_code == gate.PASS and record["worst"][0]["relative_error"] == 0
    assert record["unresolved"] == ["y"]
    (tmp_path / "more").mkdir()
    _, verdict = compared(tmp_path / "more", {"x": [3.0, 4.0], "y": [0.01]}, {"x": [3.0, 4.0], "y": [0.0]})
    assert verdict.exit_code == gate.FAIL


def test_a_gradient_that_is_zero_everywhere_compares_nothing(tmp_path):
    with pytest.raises(BadInput, match="nothing would be compared"):
        compared(tmp_path, {"x": [0.0]}, {"x": [0.0]})


def options(**more):
    return GateOptions(**{"gradients": True, **more})


def test_gradients_that_cannot_be_had_are_refused_before_the_work(plain):
    check, source, sequences = gradients.check, plain.source, plain.sequences
    check(options(), source, sequences)
    for chosen, given, words in (
        (options(), [Sequence("one", np.zeros(1, np.int32))], "no token is predicted"),
        (options(candidate_fn="a:b"), sequences, "logits alone"),
        (options(gradients=False, z_loss=1e-5), sequences, "--z-loss belongs to --gradients"),
    ):
        with pytest.raises(BadInput, match=words):
            check(chosen, source, given)
    with pytest.raises(BadInput, match="0.0 GiB are available"):
        gradients.check_memory(source, sequences, available=1000)
