"""Metadata that lies is refused in one line; it costs neither time nor memory."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_metadata import byte_level, sentence_piece
from tokenizers import Tokenizer

from pipeinfer.gguf.tokenizer import load_tokenizer, tokenizer_config, tokenizer_json
from pipeinfer.settings import ConfigurationError

KEY = "tokenizer.ggml."


def _tiny(kind: str) -> dict[str, Any]:
    """So small that mutations often meet what matters."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "aba", "  "]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 4],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.remove_extra_whitespaces": False,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.rag": "{{ documents }}",
        "tokenizer.ggml.merges": ["a b", "ab a"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -1.0, -5.0, -2.0, 0.0],
    }
    named = ("bos", "eos", "unknown", "padding", "seperator", "mask")
    return metadata | {f"{KEY}{name}_token_id": number % 3 for number, name in enumerate(named)}


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=6),
    st.sampled_from(["", "a", "ab", "▁", "  ", "\ud800", "a b", "#version: 1", "<0x4>", "llama"]),
    st.just([]),
    st.just({}),
    st.just(b"ab"),
)


@st.composite
def _lies(draw: st.DrawFn) -> dict[str, Any]:
    metadata = copy.deepcopy(_tiny(draw(st.sampled_from(["gpt2", "llama"]))))
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(sorted(metadata)))
        value = metadata.get(key)
        change = draw(st.sampled_from(["drop", "replace", "entry", "shorter", "longer", "again"]))
        if change == "drop":
            del metadata[key]
        elif change == "replace" or not isinstance(value, list) or not value:
            metadata[key] = draw(st.one_of(ODD, st.lists(ODD, max_size=10)))
        elif change == "entry":
            value[draw(st.integers(0, len(value) - 1))] = draw(ODD)
        elif change == "shorter":
            value.pop()
        elif change == "longer":
            value.append(draw(ODD))
        else:
            value[draw(st.integers(0, len(value) - 1))] = value[0]
    return metadata


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(_lies())
def test_any_metadata_gives_a_tokenizer_or_one_line(metadata: dict[str, Any]) -> None:
    for read in (tokenizer_json, tokenizer_config):
        try:
            value = json.dumps(read(metadata))
        except ConfigurationError as error:
            assert "\n" not in str(error) and len(str(error)) < 700
            assert "tokenizer." in str(error)
            continue
        if read is tokenizer_json:
            tokenizer = load_tokenizer(metadata)
            assert json.loads(Tokenizer.from_str(value).to_str()) == json.loads(tokenizer.to_str())
            ids = tokenizer.encode("<s> aba  b\n", "x").ids
            tokenizer.decode(ids)
            assert tokenizer.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("gpt2", "model", "bert", "'bert' is not known, only: gpt2, llama"),
        ("gpt2", "model", None, "missing"),
        ("gpt2", "tokens", ["a", "b", "a"], "0 and 2 are the same, 'a'"),
        ("gpt2", "tokens", [], "empty"),
        ("gpt2", "tokens", ["a", 1], "holds something that is not a text"),
        ("gpt2", "tokens", ["a", "\udc80"], r"entry 1 is not Unicode: '\udc80'"),
        ("gpt2", "token_type", [1] * 8, "has 8 entries for 9 tokens"),
        ("gpt2", "token_type", [1] * 8 + [7], "must be one of 0 to 6, not 7"),
        ("gpt2", "token_type", [1] * 8 + [True], "not a whole number"),
        ("gpt2", "merges", ["a c"], "entry 0 names an unknown token: 'a c'"),
        ("gpt2", "merges", ["a b", "b b"], "entry 1 names an unknown token: 'b b'"),
        ("gpt2", "merges", ["ab"], "entry 0 is not two tokens: 'ab'"),
        ("gpt2", "merges", None, "missing"),
        ("gpt2", "bos_token_id", 9, "no token has this id, there are 9"),
        ("gpt2", "bos_token_id", -1, "no token has this id, there are 9"),
        ("gpt2", "eos_token_id", 1.0, "not a whole number but float"),
        ("gpt2", "eos_token_id", None, "missing"),
        ("gpt2", "add_bos_token", 1, "not true or false but int"),
        ("llama", "scores", [0.0] * 8 + [float("nan")], "not a number"),
        ("llama", "scores", [0.0] * 10, "has 10 entries for 9 tokens"),
        ("llama", "scores", None, "missing"),
        ("llama", "token_type", [6] + [1] * 8, "0 is a byte but reads '<unk>'"),
    ],
)
def test_what_is_wrong_is_named(kind: str, key: str, value: object, words: str) -> None:
    metadata = _tiny(kind) | {KEY + key: value}
    if value is None:
        del metadata[KEY + key]
    with pytest.raises(ConfigurationError) as caught:
        tokenizer_json(metadata)
    assert KEY + key in str(caught.value) and words in str(caught.value)


def test_a_key_that_is_no_name_stays_on_one_line() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^the GGUF file's '.*x\\nx': not a text but int$"
    ):
        tokenizer_config(_tiny("gpt2") | {"tokenizer.chat_template.x\nx": 1})


def _with_pieces(pieces: list[str], kind: int) -> dict[str, Any]:
    metadata: dict[str, Any] = sentence_piece(prefix=False)
    size = len(pieces)
    metadata["tokenizer.ggml.tokens"] = ["<unk>", "<s>", "</s>", *pieces]
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [kind] * size
    metadata["tokenizer.ggml.scores"] = [0.0] * (size + 3)
    return metadata


@pytest.mark.parametrize(
    ("pieces", "kind", "words"),
    [
        (["x" * 10_000_000], 1, "3 has 10000000 characters, more than 512"),
        (["x" * 10_000_000], 3, "3 has 10000000 characters, more than 512"),
        (["x" * length for length in range(1, 513)], 1, "pairs of tokens make another token"),
        ([f"{number:0500}" for number in range(4000)], 4, "exceed 1048576 characters"),
    ],
    ids=["long", "long control", "every pair", "many"],
)
def test_vocabularies_made_to_cost_much_are_refused_at_once(
    pieces: list[str], kind: int, words: str
) -> None:
    metadata = _with_pieces(pieces, kind)
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match=words):
        tokenizer_json(metadata)
    assert time.monotonic() - started < 5


def test_an_empty_token_keeps_its_id() -> None:
    metadata: dict[str, Any] = byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], ""]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
    last = tokenizer.get_vocab_size() - 1
    assert tokenizer.id_to_token(last) == f"[EMPTY_{last}]"
