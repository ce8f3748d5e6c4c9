"""Where a request's text ends, and that no byte or id of it is said twice or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeinfer.core import Drain, Leave, Send, Tick
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.stage import build
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.messages import (
    Abort,
    Accepted,
    Delivered,
    Done,
    HandOver,
    Message,
    OpenStream,
    Recover,
    Recovered,
    Refused,
    StopHit,
    Text,
    TextRow,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, Topology
from pipeinfer.wire import pack, unpack

EOS = 353  # "<|end|>"


class Bench:
    """One core and what it said: rows to the gateways and hits to the schedulers, in order."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.core = DetokenizerCore(DecoderFactory(tokenizer))
        self.rows: list[TextRow] = []
        self.hits: list[tuple[str, StopHit]] = []
        self.texts: list[tuple[str, Text]] = []

    def say(self, event: Message) -> list[Message]:
        sends = self.core.handle(event, 0.0)
        for send in sends:
            if isinstance(send.message, Text):
                assert send.channel == "text"
                self.texts.append((send.to, send.message))
                self.rows.extend(send.message.rows)
            elif isinstance(send.message, StopHit):
                assert send.channel == "stops"
                self.hits.append((send.to, send.message))
        return [send.message for send in sends]

    def open(self, name: str = "r", attempt: int = 1, **rest: Any) -> None:
        own = ("gateway", "group", "token_offsets")
        fields = {key: rest.pop(key) for key in own if key in rest}
        params = RequestParams(**rest)
        gateway = fields.pop("gateway", 0)
        self.say(OpenStream(name, attempt, gateway, params, pack([1, 2, 3]), **fields))

    def row(
        self, ids: list[int], offset: int = 0, name: str = "r", group: int = -1, **rest: Any
    ) -> None:
        self.say(Tokens((TokenRow(name, offset, pack(ids), **rest),), group))

    def delivered(self, group: int = 0) -> list[Delivered]:
        """What a scheduler that was started again is told, without the brackets around it."""
        stage = f"scheduler-{group}"
        sends = self.core.handle(Recover(stage, 9), 0.0)
        assert {(send.channel, send.to) for send in sends} == {("recovery", stage)}
        first, *told, last = (send.message for send in sends)
        assert first == Recovered("detokenizer-0", 9, opening=True)
        assert last == Recovered("detokenizer-0", 9)
        return told  # type: ignore

    def ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def text(self) -> str:
        return "".join(row.text for row in self.rows)

    @property
    def token_ids(self) -> list[int]:
        return [token for row in self.rows for token in unpack(row.ids).tolist()]

    @property
    def last(self) -> TextRow:
        return self.rows[-1]


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def test_text_and_ids_go_to_the_gateway_that_asked(bench: Bench) -> None:
    bench.open("a", gateway=0)
    bench.open("b", gateway=1)
    bench.open("c", gateway=0)
    ids = bench.ids("hello world")
    assert len(ids) == 2
    bench.say(Tokens(tuple(TokenRow(name, 0, pack(ids), cached_tokens=2) for name in "abc")))
    assert [(to, [row.request_id for row in text.rows]) for to, text in bench.texts] == [
        ("gateway-0", ["a", "c"]),
        ("gateway-1", ["b"]),
    ]
    expected = TextRow("a", 1, "hello world", 0, 0, pack(ids), output_tokens=2, cached_tokens=2)
    assert bench.rows[0] == expected


def test_a_stop_string_beats_length_in_the_same_row(bench: Bench) -> None:
    bench.open(stop=("stop",), max_tokens=100)
    ids = bench.ids("hello stop the end")
    assert len(ids) == 4
    bench.row(ids, finish="length")
    assert bench.text == "hello "
    assert bench.token_ids == ids[:2]  # up to and including the one that completed it
    assert (bench.last.finish, bench.last.stop_reason) == ("stop", "stop")
    assert bench.last.output_tokens == 2
    assert bench.hits == [("scheduler-0", StopHit("r", 1, 2))]


def test_a_stop_string_over_several_rows_is_never_shown_and_later_rows_are_ignored(
    bench: Bench,
) -> None:
    bench.open(stop=("quick brown",), group=2)
    ids = bench.ids("the quick brown fox")
    for offset, token in enumerate(ids):
        bench.row([token], offset)
    assert bench.text == "the "
    assert bench.token_ids == ids[:3]
    assert bench.hits == [("scheduler-2", StopHit("r", 1, 3))]
    assert bench.core.idle()
    assert bench.core.stats()["late_rows_total"] == 1


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("stop", [(), ("fox jumps",), ("quick", "dog")])
def test_rows_say_where_the_text_of_each_token_begins(
    bench: Bench, size: int, stop: tuple[str, ...]
) -> None:
    """In letters of all that the tokens say, also where some of that waits or is never shown."""
    ids = bench.ids("the quick 🙂 brown fox jumpéd")
    whole = bench.core._decoders.open([1, 2, 3], True)  # type: ignore
    texts = [whole.step(token) for token in ids]
    begins = [len("".join(texts[:at])) for at in range(len(ids))]
    assert len(set(begins)) < len(ids)  # a character of several tokens begins with its first one
    bench.open(token_offsets=True, stop=stop)
    for at in range(0, len(ids), size):
        bench.row(ids[at : at + size], at)
    found = [at for row in bench.rows for at in unpack(row.offsets).tolist()]
    assert found == begins[: len(bench.token_ids)]
    assert all(len(row.offsets) == len(row.ids) for row in bench.rows)
    bench.open("plain")
    bench.row(ids, name="plain")
    assert bench.last.offsets == b""


def test_a_token_behind_half_a_character_begins_behind_what_stands_for_it(bench: Bench) -> None:
    half, marker = bench.ids("a🙂")[:-1], bench.ids("the")
    bench.open(token_offsets=True)
    bench.row([*half, *marker, *half, EOS], finish="length")
    assert bench.text == "a\ufffdthea\ufffd"
    first = [0, *[1] * (len(half) - 1)]
    offsets = unpack(bench.last.offsets).tolist()
    assert offsets == [*first, 2, *[at + 5 for at in first], 6]


def test_tokens_of_one_character_begin_where_it_begins(bench: Bench) -> None:
    ids = bench.ids("aے🙂")
    bench.open(token_offsets=True)
    for at, token in enumerate(ids):
        bench.row([token], at)
    offsets = [at for row in bench.rows for at in unpack(row.offsets).tolist()]
    assert bench.text == "aے🙂" and offsets == sorted(offsets) and set(offsets) == {0, 1, 2}


def test_a_stop_string_can_be_part_of_the_output(bench: Bench) -> None:
    bench.open(stop=("quick",), include_stop_str_in_output=True)
    bench.row(bench.ids("the quick brown fox"))
    assert bench.text == "the quick"
    assert bench.last.stop_reason == "quick"


def test_held_text_is_shown_when_the_request_ends_otherwise(bench: Bench) -> None:
    bench.open(stop=("the end of it",))
    ids = bench.ids("is the end")
    bench.row(ids[:2])
    assert bench.text == "is "
    assert bench.token_ids == ids[:2]  # ids do not wait with their text
    bench.row(ids[2:], 2, finish="length")
    assert bench.text == "is the end"
    assert (bench.last.finish, bench.last.stop_reason) == ("length", None)
    assert not bench.hits


def test_stop_strings_do_not_count_before_min_tokens(bench: Bench) -> None:
    bench.open(stop=("the",), min_tokens=2)
    ids = bench.ids("the the the fox")
    bench.row(ids)
    assert bench.text == "the the "
    assert bench.last.output_tokens == 3


def test_the_models_eos_is_counted_but_not_shown(bench: Bench) -> None:
    bench.open(skip_special_tokens=False)
    ids = bench.ids("hello world")
    bench.row([*ids, EOS], finish="stop", stop_token=EOS)
    assert (bench.text, bench.token_ids) == ("hello world", ids)
    assert (bench.last.finish, bench.last.stop_reason) == ("stop", None)
    assert bench.last.output_tokens == len(ids) + 1
    assert not bench.hits


def test_a_stop_token_of_the_request_is_its_stop_reason(bench: Bench) -> None:
    bench.open(stop_token_ids=(7,), stop=("hello world!",))
    bench.row(bench.ids("hello world"))
    bench.row([7], 2, finish="stop", stop_token=7)
    assert bench.text == "hello world"
    assert (bench.last.stop_reason, bench.last.output_tokens, bench.last.ids) == (7, 3, b"")


def test_a_character_that_never_came_whole_ends_as_replacement(bench: Bench) -> None:
    bench.open()
    ids = bench.ids("a🙂")
    bench.row(ids[:-1])
    assert bench.text == "a"
    bench.row([], len(ids) - 1, finish="abort")
    assert bench.text == "a\ufffd"
    assert bench.last.finish == "abort"


def test_a_stop_string_that_the_end_completes_counts_the_tokens_before_it(bench: Bench) -> None:
    """The tail of a character that never came whole is text like any other."""
    ids = [*bench.ids("hello"), *bench.ids("€")[:1]]
    bench.open(stop=("\ufffd",))
    bench.row(ids[:1])
    bench.row(ids[1:], 1, finish="length")
    assert (bench.text, bench.last.finish, bench.last.stop_reason) == ("hello", "stop", "\ufffd")
    assert bench.last.output_tokens == len(ids) and bench.token_ids == ids
    assert bench.hits == [("scheduler-0", StopHit("r", 1, len(ids)))]
    assert bench.delivered() == [Delivered("r", 1, pack(ids), True)]


def test_repeated_rows_are_dropped_and_overlapping_ones_trimmed(bench: Bench) -> None:
    bench.open()
    ids = bench.ids("the quick brown fox")
    bench.row(ids[:2])
    bench.row(ids[:2])
    bench.row(ids[:1])
    assert len(bench.rows) == 1
    bench.row(ids, finish="length")
    assert (bench.text, bench.token_ids) == ("the quick brown fox", ids)
    assert (bench.last.byte_offset, bench.last.token_offset) == (9, 2)


def test_lost_tokens_fail_the_request_and_end_it_upstream(bench: Bench) -> None:
    bench.open("r")
    bench.open("other")
    bench.row(bench.ids("the"))
    bench.row(bench.ids("fox"), 3)
    assert bench.last.finish == "error"
    assert "1 to 2 were lost" in bench.last.error
    assert bench.hits == [("scheduler-0", StopHit("r", 1, 1))]
    bench.row(bench.ids("fox"), 0, "other", finish="length")
    assert (bench.last.request_id, bench.last.finish) == ("other", "length")


def test_ids_that_cannot_be_decoded_fail_their_request_alone(bench: Bench) -> None:
    bench.open("good")
    bench.open("bad")
    ids = bench.ids("hello")
    bench.say(Tokens((TokenRow("bad", 0, pack([-5])), TokenRow("good", 0, pack(ids)))))
    assert [(row.request_id, row.finish) for row in bench.rows] == [
        ("bad", "error"),
        ("good", None),
    ]
    assert "decode" in bench.rows[0].error
    assert bench.core.stats()["failed_total"] == 1


def test_a_context_with_ids_that_are_no_tokens_ends_nothing(bench: Bench) -> None:
    bench.say(OpenStream("r", 1, 0, RequestParams(), pack([-5, 1, -(2**31)])))
    bench.row(bench.ids("hello"), finish="length")
    assert (bench.text, bench.last.finish) == ("hello", "length")


def test_an_error_of_the_scheduler_reaches_the_client(bench: Bench) -> None:
    bench.open()
    bench.row([], finish="error", error="the prompt does not fit")
    assert (bench.last.finish, bench.last.error) == ("error", "the prompt does not fit")
    assert bench.core.idle()
    assert not bench.hits


def test_a_second_open_changes_nothing_and_a_new_attempt_starts_over(bench: Bench) -> None:
    ids = bench.ids("hello world")
    bench.open()
    bench.row(ids[:1])
    bench.open()
    bench.row(ids[1:], 1)
    assert bench.text == "hello world"
    bench.open(attempt=2)
    bench.row(ids)
    assert (bench.last.attempt, bench.last.text, bench.last.byte_offset) == (2, "hello world", 0)


def test_an_aborted_request_is_forgotten_unless_a_later_attempt_runs(bench: Bench) -> None:
    bench.open(attempt=2)
    assert bench.say(Abort("r", 1)) == []
    assert not bench.core.idle()
    bench.say(Abort("r", 2))
    assert bench.core.idle()
    bench.row(bench.ids("hello"))
    assert not bench.rows


def test_an_abort_of_an_earlier_attempt_forgets_no_later_one_that_has_ended(bench: Bench) -> None:
    bench.open(attempt=2)
    bench.row(bench.ids("hello"), finish="length")
    bench.say(Abort("r", 1))
    assert [told.attempt for told in bench.delivered()] == [2]
    bench.say(Abort("r", 2))
    assert bench.delivered() == []


def test_a_restarted_scheduler_is_told_all_ids_of_its_groups_requests(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    bench.open("a", attempt=2)
    bench.open("silent")
    bench.open("other", group=1)
    bench.row(ids[:2], 0, "a")
    bench.row(ids[1:3], 1, "a")  # one of them again
    bench.row(ids, 0, "other")
    assert bench.delivered(0) == [Delivered("a", 2, pack(ids[:3])), Delivered("silent", 1, b"")]
    assert bench.delivered(1) == [Delivered("other", 1, pack(ids))]


def test_a_restarted_scheduler_is_told_how_requests_ended(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    for name in ("token", "length", "failed", "string"):
        bench.open(name, stop=("brown",) if name == "string" else ())
    bench.row([*ids[:2], EOS], 0, "token", finish="stop", stop_token=EOS)
    bench.row(ids[:1], 0, "length")
    bench.row(ids[1:], 1, "length", finish="length")
    bench.row([], 0, "failed", finish="error", error="too long")
    bench.row(ids, 0, "string", finish="length")
    assert bench.delivered() == [
        Delivered("token", 1, pack([*ids[:2], EOS]), True, "stop"),
        Delivered("length", 1, pack(ids), True, "length"),
        Delivered("failed", 1, b"", True, "error", "too long"),
        Delivered("string", 1, pack(ids[:3]), True),
    ]
    assert bench.core.idle(), "nothing of them is under way"
    bench.say(Done(("token", "string", "unknown")))
    assert [told.request_id for told in bench.delivered()] == ["length", "failed"]
    bench.say(Abort("length", 1))
    bench.say(Done(("failed",)))
    assert bench.delivered() == [] and bench.core.stats()["kept"] == 0


def test_an_ended_request_that_is_opened_and_sent_again_stays_ended(bench: Bench) -> None:
    ids = bench.ids("hello world")
    bench.open()
    bench.row(ids, finish="length")
    bench.open()
    bench.row(ids, finish="length")
    assert len(bench.rows) == 1 and len(bench.delivered()) == 1


def test_a_request_that_another_group_took_over_is_that_groups(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    bench.open(stop=("brown",))
    bench.row(ids[:1])
    bench.open(stop=("brown",), group=2)
    assert bench.delivered(0) == [] and bench.delivered(2) == [Delivered("r", 1, pack(ids[:1]))]
    bench.row(ids[1:], 1)
    assert bench.hits == [("scheduler-2", StopHit("r", 1, 3))]


def run_by_both(bench: Bench, ids: list[int]) -> None:
    """Group 0 has said one token; group 1 opened the request since."""
    bench.open(group=0, stop=("brown",))
    bench.row(ids[:1], group=0)
    bench.open(group=1, stop=("brown",))


def test_of_two_groups_that_run_a_request_the_one_that_says_more_goes_on_with_it(
    bench: Bench,
) -> None:
    ids = bench.ids("the quick brown fox")
    run_by_both(bench, ids)
    bench.row(ids[1:2], 1, group=0)
    bench.row(ids[:1], 0, group=1)  # group 0 has said more
    bench.row(ids[1:3], 1, group=1)
    assert bench.text == "the quick " and bench.token_ids == ids[:3]
    assert bench.hits == [("scheduler-1", StopHit("r", 1, 3))]
    assert bench.core.stats()["late_rows_total"] == 1


def test_a_group_that_says_the_end_of_a_request_ends_it_whoever_opened_it_last(
    bench: Bench,
) -> None:
    ids = bench.ids("the quick")
    run_by_both(bench, ids)
    bench.row(ids[1:], 1, group=0, finish="length")
    assert (bench.text, bench.last.finish) == ("the quick", "length")
    bench.row(ids, 0, group=1, finish="length")
    assert len(bench.rows) == 2 and bench.core.stats()["kept"] == 1
    bench.say(Abort("r", 1, "nobody asked for it", 1))
    assert bench.core.stats()["kept"] == 1, "group 0 has it"
    bench.say(Abort("r", 1, "nobody asked for it", 0))
    assert bench.core.stats()["kept"] == 0


@pytest.mark.parametrize("behind", [False, True])
def test_of_groups_with_different_tokens_none_is_right_but_what_the_client_has(
    bench: Bench, behind: bool
) -> None:
    ids = bench.ids("the quick brown fox")
    other = [ids[0], ids[3], ids[2]]
    run_by_both(bench, ids)
    bench.row(ids[1:2], 1, group=0)
    if behind:
        bench.row(other[:1], 0, group=1)
    (asked,) = bench.say(Tokens((TokenRow("r", int(behind), pack(other[behind:])),), 1))
    assert asked == HandOver("r", 1) and bench.token_ids == ids[:2]
    bench.row(ids[2:], 2, group=0, finish="length")
    assert bench.token_ids == ids[:2] and bench.delivered(0) == bench.delivered(1) == []
    bench.open(attempt=2, group=1)
    bench.row([*ids[:2], ids[0]], group=1, finish="length")
    assert bench.last.attempt == 2 and bench.last.text == "the quickthe"
    assert bench.core.stats()["diverged_total"] == 1


def test_a_scheduler_that_says_other_tokens_than_the_one_before_goes_on_with_neither(
    bench: Bench,
) -> None:
    ids = bench.ids("the quick brown fox")
    bench.open()
    bench.row(ids[:2], group=0)
    bench.open()
    bench.row(ids[:1], group=0)
    assert bench.say(Tokens((TokenRow("r", 1, pack(ids[2:3])),), 0)) == [HandOver("r", 1)]


def test_a_group_that_gives_a_request_up_leaves_it_to_the_other(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    run_by_both(bench, ids)
    bench.row(ids[:3], 0, group=1, name="stranger")
    bench.say(Abort("r", 1, "nobody asked for it", 1))
    assert len(bench.delivered(0)) == 1 and bench.delivered(1) == []
    bench.row(ids[1:2], 1, group=0)
    bench.row(ids[1:2], 1, group=1)  # it has left
    assert bench.token_ids == ids[:2]
    bench.say(Abort("r", 1, "nobody asked for it", 0))
    assert bench.core.idle()


def test_a_group_whose_rows_were_lost_does_not_go_on_with_what_another_runs(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    run_by_both(bench, ids)
    bench.row(ids[:2], 0, group=1)
    bench.row(ids[2:], 2, group=0, finish="length")  # its second token never came
    assert bench.token_ids == ids[:2] and bench.last.finish is None
    bench.row(ids[2:3], 2, group=1)
    assert bench.hits == [("scheduler-1", StopHit("r", 1, 3))]


def test_what_a_lost_group_says_when_another_goes_on_changes_nothing(bench: Bench) -> None:
    ids = bench.ids("the quick brown fox")
    bench.open()
    bench.row(ids[:2], group=0)
    bench.open(attempt=2, group=1)
    bench.row(ids[2:], 2, group=0, finish="length")
    bench.open()
    bench.say(Abort("r", 1))
    assert bench.delivered(0) == [], "a successor of its scheduler has nothing of it"
    bench.row(ids, 0, group=1, finish="length")
    begun, whole = bench.rows
    assert (begun.attempt, begun.text, begun.token_offset) == (1, "the quick", 0)
    assert (whole.attempt, whole.text, whole.token_offset) == (2, "the quick brown fox", 0)


def test_an_earlier_attempt_changes_nothing_of_a_later_one(bench: Bench) -> None:
    bench.open(attempt=2)
    bench.open(attempt=1, group=3)
    assert bench.delivered(3) == [] and len(bench.delivered(0)) == 1


def test_a_group_that_gives_an_earlier_attempt_up_leaves_the_later_one_where_it_is(
    bench: Bench,
) -> None:
    ids = bench.ids("the quick brown fox")
    bench.open(attempt=2, group=1)
    bench.open(attempt=2, group=0)
    bench.row(ids[:2], group=0)
    bench.say(Abort("r", 1, "nobody asked for it", 0))
    assert len(bench.delivered(0)) == 1 and bench.delivered(1) == []
    bench.say(Abort("r", 1, "nobody asked for it", 1))
    bench.row(ids[:3], group=1)
    assert bench.token_ids == ids[:3], "both groups still run the later attempt"
    bench.say(Abort("r", 3, "nobody asked for it", 1))
    assert bench.core.idle(), "a later attempt ends the earlier ones"


def test_the_end_of_a_request_that_nobody_opened_is_nothing(bench: Bench) -> None:
    assert bench.say(Abort("stranger", 1)) == bench.say(Done(("stranger",))) == []
    bench.row([1], 0, "stranger")
    assert bench.core.stats()["late_rows_total"] == 1 and bench.core.idle()


def test_a_detokenizer_that_drains_says_so_and_finishes(bench: Bench) -> None:
    bench.open()
    assert bench.core.state() == ("ready", "")
    bench.say(Drain())
    assert bench.core.state() == ("draining", "") and not bench.core.idle()
    bench.row(bench.ids("hello"), finish="length")
    assert bench.text == "hello" and bench.core.idle()


def test_done_forgets_a_stream_that_goes_on(bench: Bench) -> None:
    bench.open()
    bench.say(Done(("r",)))
    assert bench.core.idle() and bench.delivered() == []


def test_all_output_again_ends_as_it_did(bench: Bench, tokenizer: Tokenizer) -> None:
    """A request that a stop string ended is sent again with an end that only shows if none hits."""
    ids = bench.ids("the quick brown fox")
    bench.open(stop=("brown",))
    bench.row(ids[:2])
    bench.row(ids[2:], 2)
    [told] = bench.delivered()
    successor = Bench(tokenizer)
    successor.open(stop=("brown",))
    successor.row(unpack(told.ids).tolist(), finish="error", error="nobody knows how it ended")
    assert successor.text == bench.text == "the quick "
    assert (successor.last.finish, successor.last.stop_reason) == ("stop", "brown")
    assert successor.delivered() == [told]


def test_a_new_detokenizer_asks_the_schedulers_and_drops_rows_that_come_before() -> None:
    bench = Bench(None)
    bench.core = DetokenizerCore(DecoderFactory(None), "detokenizer-0", 7, ["scheduler-0"])
    question = Send("recovery", "scheduler-0", Recover("detokenizer-0", 7))
    assert bench.core.handle(Tick(), 0.0) == [question]
    bench.row([5], 4)
    bench.say(Recovered("scheduler-0", 7, opening=True))
    bench.open()
    bench.row([1, 2, 3, 4, 5])
    assert bench.token_ids == [1, 2, 3, 4, 5]
    assert bench.core.handle(Tick(), 2.0) == [question], "the end of the answer has not come"
    bench.say(Recovered("scheduler-0", 7))
    assert bench.core.handle(Tick(), 9.0) == []


def test_rows_that_come_before_their_groups_answer_break_no_stream_of_another_group() -> None:
    """Two groups run a request if a tokenizer died before anybody knew which it had chosen."""
    bench = Bench(None)
    schedulers = ["scheduler-0", "scheduler-1"]
    bench.core = DetokenizerCore(DecoderFactory(None), "detokenizer-0", 7, schedulers)
    bench.say(Recovered("scheduler-1", 7, opening=True))
    bench.open(group=1)
    bench.row([1], group=1)
    bench.say(Recovered("scheduler-1", 7))
    bench.row([4], 3, group=0)  # it has not heard the question yet
    assert bench.token_ids == [1] and bench.core.stats()["late_rows_total"] == 1
    bench.say(Recovered("scheduler-0", 7, opening=True))
    bench.open(group=0)
    bench.row([1, 2, 3, 4], group=0)
    bench.say(Recovered("scheduler-0", 7))
    bench.row([5], 4, group=0)
    assert bench.token_ids == [1, 2, 3, 4, 5]
    bench.row([9], 8, group=0)
    assert bench.last.finish == "error", "now it is a hole"


def test_a_new_detokenizer_keeps_nothing_of_what_a_scheduler_said_before_its_answer() -> None:
    """It may be the rest of what the process before it was told, by a scheduler that is dead: of
    requests that are over, whose ends nobody tells any more."""
    bench = Bench(None)
    bench.core = DetokenizerCore(DecoderFactory(None), "detokenizer-0", 7, ["scheduler-0"])
    for name in ("ended", "amid"):
        bench.open(name)
    bench.row([1, 2], 0, "ended", group=0, finish="length")
    bench.say(Recovered("scheduler-0", 6, opening=True))  # to the process before
    bench.row([1, 2], 0, "amid", group=0)
    bench.say(Recovered("scheduler-0", 7, opening=True))
    bench.open("live")
    bench.say(Recovered("scheduler-0", 7))
    assert [told.request_id for told in bench.delivered()] == ["live"]
    assert not bench.rows and bench.core.stats()["kept"] == 0
    assert bench.core.stats()["late_rows_total"] == 2


def test_a_detokenizer_that_leaves_is_idle_at_once(bench: Bench) -> None:
    bench.open()
    bench.row(bench.ids("hello"))
    bench.say(Leave())
    assert bench.core.idle() and bench.core.state()[0] == "draining"
    assert len(bench.delivered()) == 1


def test_a_refusal_is_passed_on_to_its_gateway(bench: Bench) -> None:
    refused = Refused("r", 1, 3, 400, "too long")
    sends = bench.core.handle(refused, 0.0)
    assert [(send.channel, send.to, send.message) for send in sends] == [
        ("text", "gateway-3", refused)
    ]


def test_without_a_tokenizer_ids_come_with_empty_text() -> None:
    bench = Bench(None)
    bench.open()
    bench.row([5, 6], finish="length")
    assert (bench.text, bench.token_ids, bench.last.finish) == ("", [5, 6], "length")


def test_a_message_of_another_stage_is_an_error(bench: Bench) -> None:
    with pytest.raises(TypeError, match="Accepted"):
        bench.core.handle(Accepted("r", 1, 0, 1), 0.0)


def test_the_stage_reads_the_tokenizer_of_its_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = Settings(model=str(tmp_path))
    context = StageContext(settings, Topology(()), Identity("detokenizer"), 1, lambda *_: None)
    bench = Bench(tokenizer)
    stage = build(context)
    assert isinstance(stage.core, DetokenizerCore)
    bench.core = stage.core
    bench.open()
    bench.row(bench.ids("hello world"))
    assert bench.text == "hello world"


WORDS = st.sampled_from(["the", " quick", "stop", " ", "🙂", "你", "né", "e\u0301", ".", "st"])


@examples(max_examples=200, deadline=None)
@given(
    text=st.lists(WORDS, max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    stop=st.lists(st.sampled_from(["stop", "the quick", "🙂你", ". "]), max_size=2),
    repeat=st.integers(0, 3),
)
def test_text_does_not_depend_on_how_the_ids_were_batched(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: list[str], repeat: int
) -> None:
    """Rows as they come (some ids again) against one row; offsets always continue."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole, parts = Bench(tokenizer), Bench(tokenizer)
    for bench in (whole, parts):
        bench.open(stop=tuple(stop))
    whole.row(ids, finish="length")
    edges = sorted({0, *(cut for cut in cuts if cut < len(ids))})
    for start, end in zip(edges, [*edges[1:], len(ids)], strict=True):
        again = max(start - repeat, 0)
        parts.row(ids[again:end], again, finish="length" if end == len(ids) else None)
    assert (parts.text, parts.token_ids) == (whole.text, whole.token_ids)
    end = ("finish", "stop_reason", "output_tokens")
    assert [getattr(parts.last, name) for name in end] == [
        getattr(whole.last, name) for name in end
    ]
    assert parts.hits == whole.hits
    sent_bytes = sent_tokens = 0
    for row in parts.rows:
        assert (row.byte_offset, row.token_offset) == (sent_bytes, sent_tokens)
        sent_bytes += len(row.text.encode())
        sent_tokens += len(row.ids) // 4


def test_every_request_is_open_or_counted_as_ended_once(bench: Bench) -> None:
    def counted() -> tuple[float, ...]:
        stats = bench.core.stats()
        ended = stats["finished_total"], stats["aborted_total"]
        assert stats["opened_total"] == stats["running"] + sum(ended)
        return ended

    for name in ("length", "string", "aborted", "done", "again", "refused"):
        bench.open(name, stop=(" x",))
        bench.open(name, stop=(" x",))
    bench.row(bench.ids("hello"), name="length", finish="length")
    bench.row(bench.ids("hello x"), name="string")
    assert counted() == (2, 0) and bench.core.stats()["stop_hits_total"] == 1
    bench.say(Abort("aborted", 1))
    bench.say(Abort("string", 1))
    bench.say(Done(("done", "length", "unknown")))
    bench.open("again", attempt=2)
    assert counted() == (2, 3) and bench.core.stats()["running"] == 2
    bench.say(Refused("refused", 1, 0, 400, "it never fits"))
    bench.open("length", attempt=2)
    assert counted() == (2, 4) and bench.core.stats()["opened_total"] == 8
