"""Log-probs keep to their tokens: none is lost or comes twice, and the cut is that of the ids."""

from __future__ import annotations

import numpy as np
import pytest
from test_detokenizer_core import EOS, Bench

from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.text import DecoderFactory, TokenTexts
from pipeinfer.messages import (
    LogprobTexts,
    PromptTokens,
    Recovered,
    TextRow,
    TokenRow,
    Tokens,
)
from pipeinfer.wire import logprob_bytes, no_logprob, pack, unpack

MOST = 1


def entry(token: int, most: int = MOST) -> bytes:
    """Says which token it is of."""
    own = np.array([-token / 8], "<f4").view("<i4")
    others = np.array([-1.0] * most, "<f4").view("<i4")
    return np.concatenate((own, [1], [token] * most, others)).astype("<i4").tobytes()


def feed(bench: Bench, ids: list[int], offset: int = 0, **rest) -> TextRow:
    raw = b"".join(map(entry, ids))
    bench.say(Tokens((TokenRow("r", offset, pack(ids), logprobs=raw, **rest),)))
    return bench.last


def check(bench: Bench) -> None:
    """Every id that came out has its own entry, its text and that of its alternative."""
    for row in bench.rows:
        ids = unpack(row.ids).tolist()
        if not ids:
            assert row.logprobs is None
            continue
        assert row.logprobs is not None
        assert row.logprobs.logprobs == b"".join(map(entry, ids))
        texts = TokenTexts(bench.tokenizer)
        assert row.logprobs.texts == tuple(texts[token] for token in ids for _ in range(1 + MOST))
        assert len(row.logprobs.offsets) == 4 * len(ids)


def offsets(bench: Bench) -> list[int]:
    shown = [row.logprobs for row in bench.rows if row.logprobs is not None]
    return [n for one in shown for n in unpack(one.offsets).tolist()]


@pytest.fixture
def bench(tokenizer) -> Bench:
    return Bench(tokenizer)


def test_tokens_of_one_character_have_an_entry_each_when_they_come(bench: Bench) -> None:
    ids = bench.ids("aé你🙂b")
    bench.open(logprobs=MOST)
    for n, token in enumerate(ids):
        feed(bench, [token], n)
    feed(bench, [], len(ids), finish="length")
    check(bench)
    assert bench.token_ids == ids and bench.text == "aé你🙂b"
    places = offsets(bench)
    assert len(places) == len(ids) and places == sorted(places)
    for place, token in zip(places, ids, strict=True):
        text = TokenTexts(bench.tokenizer)[token]
        whole = text.decode(errors="ignore")
        if whole.encode() == text:
            assert bench.text[place:].startswith(whole)


def test_entries_do_not_wait_for_text_that_may_be_a_stop_string(bench: Bench) -> None:
    ids = bench.ids("ab")
    bench.open(logprobs=MOST, stop=("abc",))
    row = feed(bench, ids)
    assert row.text == "" and row.logprobs is not None
    feed(bench, bench.ids("d"), len(ids), finish="length")
    check(bench)
    assert bench.text == "abd"


def test_a_stop_string_cuts_entries_where_it_cuts_ids(bench: Bench) -> None:
    ids = bench.ids("xSTOPyz")
    bench.open(logprobs=MOST, stop=("STOP",))
    feed(bench, ids)
    check(bench)
    assert bench.token_ids == ids[: bench.hits[0][1].length]
    assert bench.last.finish == "stop" and len(bench.token_ids) < len(ids)
    (told,) = bench.delivered()
    assert told.ids == pack(bench.token_ids)
    assert told.logprobs == b"".join(map(entry, bench.token_ids))


def test_a_stop_token_has_no_entry_but_is_kept_for_a_new_scheduler(bench: Bench) -> None:
    ids = [*bench.ids("ok"), EOS]
    bench.open(logprobs=MOST)
    feed(bench, ids, finish="stop", stop_token=EOS)
    check(bench)
    assert bench.token_ids == ids[:-1]
    (told,) = bench.delivered()
    assert told.logprobs == b"".join(map(entry, ids))


def test_what_comes_again_after_a_death_is_shown_once(bench: Bench) -> None:
    ids = bench.ids("hello")
    bench.open(logprobs=MOST)
    feed(bench, ids[:3])
    feed(bench, ids, 0)
    feed(bench, ids[1:], 1, finish="length")
    check(bench)
    assert bench.token_ids == ids
    (told,) = bench.delivered()
    assert told.logprobs == b"".join(map(entry, ids))


def test_a_row_that_was_seen_in_part_keeps_the_entries_of_its_new_tokens(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    assert len(set(ids)) == len(ids) > 3
    bench.open(logprobs=MOST)
    feed(bench, ids[:2])
    feed(bench, ids[1:3], 1)
    feed(bench, ids, 0, finish="length")
    check(bench)
    assert bench.token_ids == ids
    (told,) = bench.delivered()
    assert told.logprobs == b"".join(map(entry, ids))


def test_entries_are_kept_once_where_the_end_completes_a_stop_string(bench: Bench) -> None:
    """The tail of a character that never came whole is text like any other."""
    ids = [*bench.ids("hello"), *bench.ids("€")[:1]]
    bench.open(logprobs=MOST, stop=("\ufffd",))
    feed(bench, ids[:1])
    feed(bench, ids[1:], 1, finish="length")
    check(bench)
    assert bench.last.stop_reason == "\ufffd"
    (told,) = bench.delivered()
    assert told.logprobs == b"".join(map(entry, ids))


def test_a_prompts_log_probs_are_those_of_the_attempt_that_asked(bench: Bench) -> None:
    ids = bench.ids("the fox")
    bench.open(attempt=2, prompt_logprobs=MOST)
    prompt(bench, 0, ids)  # of the first attempt
    assert not bench.rows


def test_log_probs_and_rows_say_alike_where_the_text_of_a_token_begins(bench: Bench) -> None:
    half, marker = bench.ids("a🙂")[:-1], bench.ids("the")
    ids = [*half, *marker, *half, *marker]
    bench.open(logprobs=MOST, token_offsets=True)
    feed(bench, ids[:-1])
    feed(bench, ids[-1:], len(ids) - 1)
    found = [at for row in bench.rows for at in unpack(row.offsets).tolist()]
    assert bench.text == "a\ufffdthea\ufffdthe"
    assert found[-1] == bench.text.rindex("the")
    assert offsets(bench) == found


def test_who_asks_for_none_gets_none(bench: Bench) -> None:
    bench.open()
    bench.row(bench.ids("ab"))
    assert bench.last.logprobs is None and bench.last.prompt is None


def test_special_tokens_that_are_hidden_have_names_in_log_probs(bench: Bench) -> None:
    bench.open(logprobs=MOST, ignore_eos=True)
    (end,) = bench.ids("<|end|>")
    row = feed(bench, [end, *bench.ids("a")])
    assert row.text == "a" and row.logprobs is not None
    assert row.logprobs.texts[0] == b"<|end|>"
    assert unpack(row.logprobs.offsets).tolist() == [0, 0]


# -------------------------------------------------------------------------------------- the prompt


def prompt(bench: Bench, first: int, ids: list[int], group: int = -1) -> None:
    raw = b"".join(entry(t) if n + first else no_logprob(MOST) for n, t in enumerate(ids))
    bench.say(PromptTokens("r", 1, first, pack(ids), raw, group))


def test_a_prompts_tokens_come_before_the_output_and_each_once(bench: Bench) -> None:
    text = "Zoë says 你好"
    ids = bench.ids(text)
    bench.open(prompt_logprobs=MOST)
    prompt(bench, 0, ids[:1])
    prompt(bench, 1, ids[1:5])
    prompt(bench, 3, ids[3:])  # of a new scheduler
    prompt(bench, 0, ids[:2])
    bench.row(bench.ids("!"))
    shown: list[LogprobTexts] = [row.prompt for row in bench.rows if row.prompt is not None]
    assert b"".join(one.ids for one in shown) == pack(ids)
    assert b"".join(one.logprobs for one in shown)[logprob_bytes(MOST) :] == b"".join(
        map(entry, ids[1:])
    )
    assert [row.prompt_offset for row in bench.rows if row.prompt is not None] == [0, 1, 5]
    assert b"".join(piece for one in shown for piece in one.texts[::2]).decode() == text
    assert bench.text == "!" and bench.last.prompt is None
    (told,) = bench.delivered()
    assert told.prompt_logprobs == no_logprob(MOST) + b"".join(map(entry, ids[1:]))


def test_output_of_another_group_never_overtakes_a_prompts_log_probs(bench: Bench) -> None:
    """Two groups run one request; one has told all, while the rest of what the other had told a
    detokenizer before this one arrives."""
    schedulers = ["scheduler-0", "scheduler-1"]
    decoders = DecoderFactory(bench.tokenizer)
    bench.core = DetokenizerCore(decoders, "detokenizer-0", 7, schedulers)
    text, output = bench.ids("the fox"), bench.ids("!")
    bench.say(Recovered("scheduler-1", 7, opening=True))
    bench.open(prompt_logprobs=MOST, group=1)
    prompt(bench, 0, text[:1], group=1)
    bench.say(Recovered("scheduler-1", 7))
    prompt(bench, 2, text[2:], group=0)
    bench.row(output, group=0)
    bench.say(Recovered("scheduler-0", 7, opening=True))
    bench.open(prompt_logprobs=MOST, group=0)
    prompt(bench, 0, text, group=0)
    bench.row(output, group=0)
    bench.say(Recovered("scheduler-0", 7))
    shown = [pack([]) if row.prompt is None else row.prompt.ids for row in bench.rows]
    assert shown == [pack(text[:1]), pack(text[1:]), b""]
    assert bench.token_ids == output and bench.text == "!"


def test_a_hole_in_a_prompts_log_probs_fails_the_request(bench: Bench) -> None:
    bench.open(prompt_logprobs=MOST)
    prompt(bench, 0, [65])
    prompt(bench, 3, [66])
    assert bench.last.finish == "error" and "before 3 were lost" in bench.last.error
    assert len(bench.hits) == 1


# ------------------------------------------------------------------------------- texts of tokens


def test_bytes_of_a_byte_level_token_are_its_own(tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("naïve 🙂", add_special_tokens=False).ids
    assert b"".join(texts[token] for token in ids) == "naïve 🙂".encode()
    assert texts[10**6] == b""


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_tokens_together_say_what_their_texts_say(tokenizers_by_kind, kind: str) -> None:
    """Spaces included, also that of the first word, which decoders strip."""
    tokenizer = tokenizers_by_kind[kind]
    texts = TokenTexts(tokenizer)
    for text in ("hello world", "the quick <tool call> dog"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(texts[token] for token in ids).decode().lstrip(" ") == text
    end = tokenizer.token_to_id("<|end|>")
    assert texts[end] == b"<|end|>"


def test_a_byte_that_has_no_character_is_a_byte(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte-fallback"]
    texts = TokenTexts(tokenizer)
    assert texts[tokenizer.token_to_id("<0xE4>")] == b"\xe4"
    assert texts[tokenizer.token_to_id("<0x41>")] == b"A"


def test_without_a_tokenizer_tokens_have_no_bytes() -> None:
    assert TokenTexts(None)[7] == b""
