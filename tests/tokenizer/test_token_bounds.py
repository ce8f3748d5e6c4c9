"""What is refused by its length could not have been encoded to as few tokens as fit."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from vocabularies import CERTAIN, SPECIALS, byte_fallback, byte_level

from pipeinfer.tokenizer.prompts import NFC_SHRINK, token_length_bound

PIECES = (*SPECIALS, "<think>", "    ", "\n\n", "the ", "return ", "ΐ", "e\u0301", "\u1fbe")
texts = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from(PIECES)).flatmap(
        lambda piece: st.integers(1, 40).map(lambda times: piece * times)
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", CERTAIN)
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text="<|im_start|>" * 100)
@example(text=" " * 1000)
@example(text="\u1fbe\u0308\u0301" * 200)
@example(text="\u212a" * 200)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    tokenizer = CERTAIN[name]()
    bound = token_length_bound(tokenizer)
    assert bound is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= bound.min_token_count(text)


@pytest.mark.parametrize("name", CERTAIN)
def test_the_bound_is_of_use(name: str) -> None:
    bound = token_length_bound(CERTAIN[name]())
    assert bound is not None
    assert bound.max_token_bytes <= 64
    assert bound.min_token_count("x" * 1_000_000) >= 1_000_000 // 64


def test_no_character_is_spelled_in_more_bytes_than_nfc_is_taken_to_save() -> None:
    """Any text with the same NFC consists, for each of its decomposed characters, of at most the
    longest character that decomposes to it."""
    # Nothing above is composed or decomposed.
    everything = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    longest: dict[str, int] = {}
    for character in everything:
        decomposed = unicodedata.normalize("NFD", character)
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(character.encode()))

    def spelled(character: str) -> int:
        return sum(longest[part] for part in unicodedata.normalize("NFD", character))

    assert all(len(character.encode()) <= spelled(character) for character in everything)
    composed = (c for c in everything if unicodedata.normalize("NFC", c) == c)
    worst = max(spelled(character) / len(character.encode()) for character in composed)
    assert 3 < worst < NFC_SHRINK


def changed(change: Callable[[Tokenizer], object], fallback: bool = False) -> Tokenizer:
    source = byte_fallback(metaspace=False) if fallback else byte_level()
    tokenizer = Tokenizer.from_str(source.to_str())
    change(tokenizer)
    return tokenizer


def set_normalizer(normalizer: normalizers.Normalizer) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: setattr(tokenizer, "normalizer", normalizer)


def set_splitter(*splitters: pre_tokenizers.PreTokenizer) -> Callable[[Tokenizer], object]:
    whole = pre_tokenizers.Sequence([*splitters, pre_tokenizers.ByteLevel()])
    return lambda tokenizer: setattr(tokenizer, "pre_tokenizer", whole)


def added(**flags: bool) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: tokenizer.add_tokens([AddedToken("<x>", **flags)])


SWALLOWS = {
    "a token that takes the white space before it": (added(lstrip=True), " " * 5000 + "<x>"),
    "a token that takes the white space after it": (added(rstrip=True), "<x>" + " " * 5000),
    "Strip": (set_normalizer(normalizers.Strip()), " " * 5000),
    "NFKC": (set_normalizer(normalizers.NFKC()), ""),
    "Lowercase": (set_normalizer(normalizers.Lowercase()), ""),
    "StripAccents": (set_normalizer(normalizers.StripAccents()), ""),
    "Replace": (set_normalizer(normalizers.Replace("ab", "a")), ""),
    "Replace by a pattern": (set_normalizer(normalizers.Replace(Regex(" +"), " ")), " " * 5000),
    "WhitespaceSplit": (set_splitter(pre_tokenizers.WhitespaceSplit()), " " * 5000),
    "Whitespace": (set_splitter(pre_tokenizers.Whitespace()), " " * 5000),
    "Bert": (set_splitter(pre_tokenizers.BertPreTokenizer()), " " * 5000),
    "Split": (set_splitter(pre_tokenizers.Split(Regex("a+"), "removed")), "a" * 5000),
}


@pytest.mark.parametrize("name", SWALLOWS)
def test_there_is_no_bound_where_text_may_vanish(name: str) -> None:
    change, text = SWALLOWS[name]
    tokenizer = changed(change)
    assert token_length_bound(tokenizer) is None
    if text:
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) <= 3, "it does"


def test_there_is_no_bound_where_unknown_characters_become_one_token() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert token_length_bound(words) is None
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    assert token_length_bound(pieces) is None
    assert len(pieces.encode("é" * 5000).ids) == 1
    few = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    assert token_length_bound(few) is None
    assert len(few.encode("é" * 5000).ids) == 1
    silent = Tokenizer(models.BPE({"a": 0}, []))
    assert token_length_bound(silent) is None
    assert len(silent.encode("é" * 5000).ids) == 0
