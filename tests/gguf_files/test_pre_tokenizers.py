"""The rules behind the names in tokenizer.ggml.pre cut texts as the models' own tokenizers do."""

from __future__ import annotations

import json

import pytest
from hostile_texts import hostile_texts
from small_metadata import build, byte_level
from tokenizers import Tokenizer, decoders
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from pipeinfer.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_json
from pipeinfer.settings import ConfigurationError


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "it's 12345  (ok)\n\n x", "it|'s| 12345| | (|ok|)|\n\n| x"),
        ("default", "it's 12345+=$x", "it|'|s| |123|45|+=$|x"),
        ("smollm", "it's 123  ½", "it|'s| |1|2|3|  |½"),
        ("llama-bpe", "IT'S 12345 .x?\n\n\ny", "IT|'S| |123|45| .|x|?\n\n\n|y"),
        ("dbrx", "IT'S 12345", "IT|'S| |123|45"),
        ("qwen2", "IT'S 12 .x?\n\ny", "IT|'S| |1|2| .|x|?\n\n|y"),
        ("qwen35", "a\u0301\u0323b", "\u1ea1\u0301b"),
        ("tekken", "camelCase's 12a/\n", "camel|Case|'s| |1|2|a|/\n"),
        ("gpt-4o", "aB's 1234/\n", "a|B's| |123|4|/\n"),
        ("deepseek-llm", " été\n12 日本\uff01", " é|t|é|\n|12| |日本|\uff01"),
        ("deepseek-coder", " été\n12 ?!", " été|\n|1|2| ?!"),
        ("deepseek-v3", "12345日本x.y ~z", "123|45|日本|x|.y| ~|z"),
        ("falcon", "a`b 12345", "a|`|b| |123|45"),
        ("seed-coder", "a?\n\n12", "a|?|\n\n|1|2"),
        ("bloom", "a b, c", "a| b|,| c"),
        ("viking", "a 12,c", "a| |1|2|,|c"),
    ],
)
def test_a_name_cuts_text_as_its_model_does(name: str, text: str, pieces: str) -> None:
    tokenizer = build(byte_level(name))
    normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.pre_tokenizer is not None
    spelled = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]
    assert [decoders.ByteLevel().decode([piece]) for piece in spelled] == pieces.split("|")


@pytest.mark.parametrize(("name", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_ids_equal_those_of_the_models_own_class(
    name: str, kind: type[GPT2Tokenizer | Qwen2Tokenizer]
) -> None:
    metadata = byte_level(name)
    model = json.loads(json.dumps(tokenizer_json(metadata)))["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    own = kind(vocab=model["vocab"], merges=merges).backend_tokenizer
    texts = [text for text in hostile_texts(4000) if "<" not in text]
    assert _ids(build(metadata), texts) == _ids(own, texts)


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_rule_loses_a_character(name: str) -> None:
    tokenizer = build(byte_level(name))
    for text in hostile_texts(60):
        expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_whole_words_need_no_merges_where_the_model_has_them_so() -> None:
    for name, tokens in (("llama-bpe", [" zq"]), ("gpt-2", [" ", "z", "q"])):
        metadata = byte_level(name)
        words, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        assert isinstance(words, list) and isinstance(kinds, list)
        metadata["tokenizer.ggml.tokens"] = [*words, "Ġzq"]
        metadata["tokenizer.ggml.token_type"] = [*kinds, 1]
        tokenizer = build(metadata)
        ids = tokenizer.encode(" zq", add_special_tokens=False).ids
        assert [tokenizer.decode([number]) for number in ids] == tokens


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigurationError, match=r"tokenizer\.ggml\.pre: 'x' is not known, .*qwen2"
    ):
        tokenizer_json(byte_level("x"))
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ConfigurationError, match=r"tokenizer\.ggml\.pre: missing"):
        tokenizer_json(metadata)
