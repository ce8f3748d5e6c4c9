"""Text that arrives in pieces is the text that one decode at the end would give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeinfer.detokenizer.text import MAX_PENDING, DecoderFactory, WindowDecoder

KINDS = ("byte-level", "byte-fallback", "metaspace")
PIECES = ["the", " quick", "hello", " ", "  ", "né", "<tool call>", "<|end|>", "你好", "🙂", "\n"]
JOINED = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "e\u0301", "🇩🇪", "न\u094dदे"]
# U+FFFD itself is left out: a decoder cannot tell it from a character that is still incomplete.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
TEXTS = st.lists(
    st.one_of(st.sampled_from(PIECES + JOINED), st.text(CHARACTERS, max_size=6)), max_size=12
).map("".join)
quick = settings(max_examples=80, deadline=None)


def deltas(
    tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None, skip: bool = True
) -> list[str]:
    decoder = DecoderFactory(tokenizer).open(context or [], skip)
    return [*(decoder.step(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(text=TEXTS, skip=st.booleans())
def test_deltas_add_up_to_the_one_shot_decode(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str, skip: bool
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text).ids
    pieces = deltas(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    # Byte-level decoders take the added token "né" for the bytes 6E E9, also in one shot.
    assert "\ufffd" not in whole or "né" in text


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(text=TEXTS.filter(lambda text: "né" not in text), share=st.floats(0, 1))
def test_output_is_what_follows_the_whole_characters_of_its_context(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str, share: float
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text).ids
    split = int(share * len(ids))
    whole = (tokenizer.decode(ids[:end]) for end in range(split, -1, -1))
    shown = next(text for text in whole if not text.endswith("\ufffd"))
    pieces = deltas(tokenizer, ids[split:], ids[:split])
    assert shown + "".join(pieces) == tokenizer.decode(ids)


@quick
@given(data=st.data(), skip=st.booleans())
def test_any_byte_level_ids_decode_as_in_one_shot(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    # Padding ids past the vocabulary included: models have more logits than tokenizers have ids.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    pieces = deltas(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS[1:])
@quick
@given(data=st.data())
def test_any_ids_whatsoever_give_text_and_no_error(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    known = st.integers(0, tokenizer.get_vocab_size() + 3)
    if kind == "byte-fallback":  # ASCII comes from letters alone, not from bytes, see below
        known = known.filter(lambda token: not 1 <= token <= 128)
    ids = data.draw(st.lists(known, max_size=40))
    text = "".join(deltas(tokenizer, ids))
    whole = tokenizer.decode(ids)
    if "\ufffd" not in whole:
        assert text == whole
    # One invalid byte makes byte fallback give up all bytes around it, also those that were shown.
    assert [c for c in text if c.isascii()] == [c for c in whole if c.isascii()]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_character_in_several_tokens_comes_whole(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("🙂").ids
    assert len(ids) > 2
    assert [piece for piece in deltas(tokenizer, ids) if piece.strip()] == ["🙂"]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_character_cut_off_at_the_end_is_flushed_as_one_shot_decode_shows_it(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("hello🙂").ids[:-1]
    pieces = deltas(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "\ufffd" in pieces[-1]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_the_first_word_keeps_its_space_after_a_context(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    for kind in KINDS:
        tokenizer = tokenizers_by_kind[kind]
        context = tokenizer.encode("hello").ids
        ids = tokenizer.encode("hello world").ids[len(context) :]
        assert "".join(deltas(tokenizer, ids, context)) == " world"


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_prompt_that_ends_within_a_character_is_not_shown_again(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("hello🙂dog").ids
    start = len(tokenizer.encode("hello").ids) + 1
    assert "".join(deltas(tokenizer, ids[start:], ids[:start])) == "🙂dog"


def test_endless_invalid_bytes_cost_no_more_per_token() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "\ufffd" * len(ids)

    decoder = WindowDecoder(decode, frozenset(), [])
    text = "".join(decoder.step(7) for _ in range(500)) + decoder.flush()
    assert text == "\ufffd" * 500
    assert longest <= 2 * MAX_PENDING


def test_without_a_tokenizer_all_text_is_empty() -> None:
    decoder = DecoderFactory(None).open([1, 2], True)
    assert [decoder.step(5), decoder.step(6), decoder.flush()] == ["", "", ""]
