"""Prompts: bad lines are refused by number, built-in sequences reach what can go wrong."""

import json

import numpy as np
import pytest

from olmo_parity.olmo_jax.config_hf import from_hf
from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import batches


@pytest.fixture
def config(fixture_path):
    return from_hf(json.loads((fixture_path("tiny-trained/hf-bfloat16-step900") / "config.json").read_text()))


@pytest.fixture
def yarn_7b(fixture_path):
    return from_hf(json.loads((fixture_path("manifests/7b/hf-stage3-yarn") / "config.json").read_text()))


def read(tmp_path, config, *lines, tokenizer=None, max_tokens=None):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return batches.read_prompts(path, config, tokenizer, max_tokens)


def test_text_and_tokens_are_read_and_no_token_is_added(tmp_path, config, fixture_path):
    tokenizer = fixture_path("tiny-trained/hf-bfloat16-step900") / "tokenizer.json"
    lines = [{"id": "a", "text": "Hi é"}, "", {"id": 2, "tokens": [1, 2, 256]}]
    first, second = read(tmp_path, config, *lines, tokenizer=tokenizer)
    assert first.tokens.tolist() == list("Hi é".encode())
    assert (second.id, second.tokens.tolist()) == ("2", [1, 2, 256])


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path, config, fixture_path):
    tokenizer = fixture_path("tiny-trained/hf-bfloat16-step900") / "tokenizer.json"
    line = json.dumps({"id": "a", "text": "one\u2028two"}, ensure_ascii=False)
    assert len(read(tmp_path, config, line, tokenizer=tokenizer)) == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "not JSON"),
        ("[1]", "an object is wanted"),
        ({"tokens": [1]}, "id is missing"),
        ({"id": None, "tokens": [1]}, "id is None"),
        ({"id": "a"}, "neither text nor tokens"),
        ({"id": "a", "text": "x", "tokens": [1]}, "text and tokens"),
        ({"id": "a", "tokens": []}, "no tokens"),
        ({"id": "a", "tokens": [259]}, "token id 259 is outside the vocabulary of 259"),
        ({"id": "a", "tokens": [-1]}, "token id -1"),
        ({"id": "a", "tokens": [1.0]}, "whole numbers"),
        ({"id": "a", "tokens": [True]}, "whole numbers"),
        ({"id": "a", "tokens": "12"}, "whole numbers"),
        ({"id": "a", "text": 3}, "a string is wanted"),
        ({"id": "a", "tokens": [1], "label": 1}, "unknown key 'label'"),
        ({"id": "good", "tokens": [1]}, "used on line 1"),
        ({"id": "a", "tokens": [1] * 257}, "257 tokens, the model has 256 positions"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, config, line, words):
    with pytest.raises(BadInput, match="line 2: ") as error:
        read(tmp_path, config, {"id": "good", "tokens": [1]}, line)
    assert words in str(error.value)


def test_all_bad_lines_are_named_together(tmp_path, config):
    with pytest.raises(BadInput) as error:
        read(tmp_path, config, "{", {"id": "a", "tokens": [1]}, "[]")
    assert len(error.value.faults) == 2


def test_an_empty_file_is_an_error(tmp_path, config):
    with pytest.raises(BadInput, match="nothing would be compared"):
        read(tmp_path, config, "", "  ")


def test_a_missing_or_binary_file_is_a_sentence(tmp_path, config):
    with pytest.raises(BadInput, match="No such file"):
        batches.read_prompts(tmp_path / "none.jsonl", config, None, None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    with pytest.raises(BadInput, match="not UTF-8"):
        batches.read_prompts(tmp_path / "binary", config, None, None)


def test_text_without_a_tokenizer_is_refused(tmp_path, config):
    with pytest.raises(BadInput, match="tokenizer.json"):
        read(tmp_path, config, {"id": "a", "text": "x"})


def test_a_prompt_that_is_cut_says_so(tmp_path, config):
    (sequence,) = read(tmp_path, config, {"id": "a", "tokens": [1] * 300}, max_tokens=100)
    assert (len(sequence.tokens), sequence.cut_from) == (100, 300)


def test_built_in_sequences_pass_every_window_and_hold_the_special_tokens(config, yarn_7b):
    for c in (config, yarn_7b):
        own, windowed, packed = batches.built_in(c)
        assert len(own.tokens) == len(windowed.tokens) == 512
        assert len(packed.documents) == 3 and sum(packed.documents) == len(packed.tokens)
        assert (own.window, windowed.window) == (None, 64)
        special = {0, c.vocab_size - 1, c.token_ids["eos_token_id"], c.token_ids["pad_token_id"]}
        assert special <= set(own.tokens.tolist())
        assert all(item["covered"] for item in batches.coverage(c, [own, windowed, packed]))


def test_built_in_positions_pass_the_original_context_of_a_real_model(yarn_7b):
    windowed = batches.built_in(yarn_7b)[1]
    assert windowed.first_position < 8192 < windowed.first_position + 512


def covered(config, *sequences):
    return {item["what"]: item["covered"] for item in batches.coverage(config, list(sequences))}


def test_short_prompts_leave_almost_everything_uncovered(yarn_7b):
    short = batches.Sequence("short", np.arange(12, dtype=np.int32))
    assert covered(yarn_7b, short) == {
        "attention": True,
        "packed": False,
        "window": False,
        "yarn": False,
        "high_token_ids": False,
        "special_tokens": False,
    }
    assert not covered(yarn_7b, batches.Sequence("one", np.zeros(1, np.int32)))["attention"]


def test_short_documents_in_a_long_row_cover_no_window(config):
    row = batches.Sequence("row", np.zeros(40, np.int32), documents=(16, 16, 8))
    assert not covered(config, row)["window"] and covered(config, row)["packed"]


def test_grouped_heads_are_listed_where_there_are_any(fixture_path, config):
    grouped = from_hf(json.loads((fixture_path("tiny-gqa/hf-bfloat16") / "config.json").read_text()))
    assert covered(grouped, *batches.built_in(grouped))["grouped_heads"]
    assert "grouped_heads" not in covered(config, *batches.built_in(config))


def test_positions_and_segments_start_again_in_every_document():
    row = batches.Sequence("row", np.arange(5, dtype=np.int32), documents=(3, 2))
    assert row.positions().tolist() == [0, 1, 2, 0, 1]
    assert row.segment_ids().tolist() == [1, 1, 1, 2, 2]
    assert [tokens.tolist() for tokens, _ in row.parts()] == [[0, 1, 2], [3, 4]]
    assert batches.Sequence("plain", np.arange(2, dtype=np.int32), first_position=7).positions().tolist() == [7, 8]


def test_keys_seen_are_counted_around_the_true_window(yarn_7b):
    expected = batches.expected_keys(yarn_7b)
    assert [4095, 4096] in expected["sliding_attention"] and [4096, 4096] in expected["sliding_attention"]
    assert [4096, 4097] in expected["full_attention"]


def test_a_prompt_that_only_touches_the_window_does_not_cover_it(config):
    at = batches.Sequence("at", np.zeros(16, np.int32))
    past = batches.Sequence("past", np.zeros(17, np.int32))
    assert [covered(config, s)["window"] for s in (at, past)] == [False, True]
