"""In what way a tensor is another: each kind is told apart from its neighbours, and nothing is said that is not so."""

import ml_dtypes
import numpy as np
import pytest

from olmo_parity.convert.sources import open_source
from olmo_parity.parity.weight_kinds import weight_kinds
from tests.conftest import find_fixture

CONFIG = open_source(find_fixture("tiny-step0/hf-float32")).config
Q, OUT, UP = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"))


def matrix(seed=0, shape=(64, 64), dtype=np.float32):
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(dtype)


def heads(order):
    return lambda a: a.reshape(4, 16, -1)[list(order)].reshape(a.shape)


def one(a, index, value):
    a = a.copy()
    a[index] = value
    return a


KINDS = [
    # weight, what happened to it, what is said
    (Q, lambda a: a.T, "is transposed"),
    (Q, heads([1, 0, 2, 3]), "has heads 0 and 1 exchanged"),
    (Q, heads([1, 2, 3, 0]), "has its heads moved on by 3"),
    (Q, heads([3, 1, 0, 2]), "has its heads in another order: 3, 1, 0, 2"),
    (OUT, lambda a: heads([0, 3, 2, 1])(a.T).T, "has heads (columns) 1 and 3 exchanged"),
    (Q, lambda a: a.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(a.shape), "has the halves of every head interleaved"),
    (Q, lambda a: a.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(a.shape), "has the even rows of every head before the odd"),
    (UP, lambda a: np.roll(a, 1, axis=0), "has its rows moved on by 1"),
    (UP, lambda a: a[:, ::-1], "has its columns in another order: 63, 62"),
    (UP, lambda a: a * np.float32(0.125), "is 0.125 times what it should be"),
    (UP, lambda a: -a, "is -1 times what it should be"),
    (UP, lambda a: a + np.float32(0.5), "has 0.5 added to every value"),
    (UP, lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32), "was rounded to bfloat16"),
    (UP, lambda a: a.astype(np.float16).astype(np.float32), "was rounded to float16"),
    (UP, np.zeros_like, "is all zeros"),
    (UP, lambda a: one(a, (3, 5), np.nan), "holds NaN or infinity in 1 values"),
    (UP, lambda a: one(a, (3, 5), a[3, 5] * 1.01), "differs in 1 value, at HF index [3, 5]"),
    (UP, lambda a: one(a, 7, a[7] * 1.5), "differs in the row 7, 64 values"),
    (UP, lambda a: a + matrix(9, a.shape) / 100, "differs in 8192 of 8192 values, by 0.01"),
    (UP, lambda a: a[:, :32], "has shape (128, 32), (128, 64) is wanted"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, said", KINDS, ids=[k[2] for k in KINDS])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_the_kind_is_told(name, change, said, dtype):
    right = matrix(shape=(128, 64) if name == UP else (64, 64))
    if dtype != np.float32:
        if "rounded" in said or "8192 of" in said or "0.5 added" in said or "1.01" in said:
            pytest.skip("says nothing in bfloat16")
        right = right.astype(dtype).astype(np.float32)
    found = np.ascontiguousarray(change(right)).astype(dtype)
    assert any(kind.startswith(said) for kind in weight_kinds(name, right, found, CONFIG)), weight_kinds(
        name, right, found, CONFIG
    )


def test_an_equal_tensor_has_no_kind_whatever_its_dtype():
    right = matrix()
    assert weight_kinds(Q, right, right.copy(), CONFIG) == []
    assert weight_kinds(Q, right, right.astype(ml_dtypes.bfloat16), CONFIG) == []  # a conversion to bfloat16


def test_another_tensor_is_recognised_as_it_is_and_transposed():
    right, other = matrix(0), matrix(1)
    others = [("model.layers.1.self_attn.q_proj.weight", lambda: other)]
    assert weight_kinds(Q, right, other, CONFIG, others) == ["holds model.layers.1.self_attn.q_proj.weight"]
    turned = np.ascontiguousarray(other.T)
    assert weight_kinds(Q, right, turned, CONFIG, others) == ["holds model.layers.1.self_attn.q_proj.weight transposed"]
    assert weight_kinds(Q, right, matrix(2), CONFIG, others)[0].startswith("differs in 4096 of 4096 values")
