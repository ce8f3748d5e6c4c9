"""The text of kept requests: the same rows for each gateway, within bounds of bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detokenizer.conftest import byte_level
from pipeinfer.core import Send
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.retained_outputs import OUTPUT_BYTES, OutputBounds
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.messages import (
    Abort,
    Accepted,
    Adopt,
    Delivered,
    Done,
    OpenStream,
    PromptTokens,
    Recover,
    Recovered,
    Retention,
    StopHit,
    Submit,
    Text,
    TextRow,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams, choice_ids
from pipeinfer.trace.snapshot import snapshot
from pipeinfer.wire import logprob_bytes, pack

KEPT = Retention(stream="s", owner="alice", seconds=30.0)
TOKENIZER = byte_level()
DECODERS = DecoderFactory(TOKENIZER)
WORDS = TOKENIZER.encode("hello world é 你 🙂 stop the quick end", add_special_tokens=False).ids


def opened(name: str = "r", gateway: int = 0, owner: str = "alice", **params: Any) -> OpenStream:
    retention = Retention(stream=name, owner=owner, seconds=30.0)
    context = pack([1, 2, 3])
    return OpenStream(name, 1, gateway, RequestParams(**params), context, retention=retention)  # type: ignore[call-arg]


def rows_of(sends: list[Send], gateway: int = 0) -> list[TextRow]:
    texts = [send.message for send in sends if isinstance(send.message, Text)]
    assert {s.to for s in sends if isinstance(s.message, Text)} <= {f"gateway-{gateway}"}
    return [row for text in texts for row in text.rows]


def same(rows: list[TextRow]) -> list[TextRow]:
    """Only the last row's cached tokens are read."""
    return [
        row if row.finish is not None else msgspec.structs.replace(row, cached_tokens=0)
        for row in rows
    ]


def told(core: DetokenizerCore, gateway: int = 0) -> list[TextRow]:
    """What a gateway that is started again is told."""
    sends = core.handle(Recover(f"gateway-{gateway}", 5), 1.0)
    assert sends[0].message == Recovered("detokenizer-0", 5, opening=True)
    assert sends[-1].message == Recovered("detokenizer-0", 5)
    return rows_of(sends[1:-1], gateway)


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.sampled_from(WORDS), min_size=1, max_size=25),
    cuts=st.sets(st.integers(1, 25)),
    stop=st.sampled_from([(), ("stop",), ("the q",), ("\ufffd",)]),
    finish=st.sampled_from([None, "length", "stop", "abort", "error"]),
    with_logprobs=st.booleans(),
    alone=st.booleans(),
)
def test_rows_are_the_same_however_tokens_came(
    ids, cuts, stop, finish, with_logprobs, alone
) -> None:
    """Live, told again at any time, and by a detokenizer that got all tokens at once."""
    width = logprob_bytes(1) if with_logprobs else 0
    params = {"stop": stop, "logprobs": 1 if with_logprobs else None}
    logprobs = b"".join(bytes([n % 7]) * width for n in range(len(ids)))
    core = DetokenizerCore(DECODERS)
    core.handle(opened(**params), 0.0)
    live: list[TextRow] = []

    def say(begin: int, end: int, finish: Any = None) -> None:
        stop_token = ids[end - 1] if finish == "stop" and end > begin else None
        row = TokenRow(
            request_id="r", offset=begin, ids=pack(ids[begin:end]), finish=finish,
            stop_token=stop_token, error="it broke" if finish == "error" else "",
            logprobs=logprobs[width * begin : width * end], cached_tokens=2,
        )  # fmt: skip
        live.extend(rows_of(core.handle(Tokens((row,), 0), 0.0)))

    places = sorted({0, *(cut for cut in cuts if cut < len(ids)), len(ids)})
    for begin, end in pairwise(places):
        last = end == len(ids)
        say(begin, end, finish if last and not alone else None)
        if core.stats()["running"]:
            assert told(core) == same(live)
    if finish is not None and alone and core.stats()["running"]:
        say(len(ids), len(ids), finish)
    assert same(told(core)) == same(live)
    assert sum(row.finish is not None for row in live) <= 1
    assert all(len(row.ids) <= 4 for row in live), "a row for each token"
    other = DetokenizerCore(DECODERS)
    other.handle(opened(**params), 0.0)
    stop_token = ids[-1] if finish == "stop" and not alone else None
    whole = TokenRow(
        request_id="r", offset=0, ids=pack(ids), finish=finish, stop_token=stop_token,
        error="it broke" if finish == "error" else "", logprobs=logprobs, cached_tokens=2,
    )  # fmt: skip
    assert same(rows_of(other.handle(Tokens((whole,), 0), 0.0))) == same(live)


def test_a_gateway_is_told_its_own_requests_alone_and_none_that_are_not_kept() -> None:
    core = DetokenizerCore(DECODERS)
    for name, gateway in (("a", 0), ("b", 1)):
        core.handle(opened(name, gateway), 0.0)
        core.handle(Tokens((TokenRow(name, 0, pack(WORDS[:3])),), 0), 0.0)
    core.handle(OpenStream("plain", 1, 0, RequestParams(), b""), 0.0)
    core.handle(Tokens((TokenRow("plain", 0, pack(WORDS[:3])),), 0), 0.0)
    assert {row.request_id for row in told(core)} == {"a"}
    assert {row.request_id for row in told(core, 1)} == {"b"}
    core.handle(Done(("a", "b")), 0.0)
    assert told(core) == told(core, 1) == []


def test_a_gateway_hears_what_a_tokenizer_knew_of_each_choice_before_its_text() -> None:
    """As it is now: another group may have gone on with it."""
    core = DetokenizerCore(DECODERS)
    submit = Submit("r", 1, 0, RequestParams(), seed=7, text="hello", choices=(0, 1, 2))
    adopt = Adopt("tokenizer-0", submit, Accepted("r", 1, 0, 5, choices=(0, 1, 2)))
    for name, origin, attempt, group in (
        ("r", msgspec.msgpack.encode(adopt), 1, 0), ("r/1", b"", 2, 1), ("x", b"no Adopt", 1, 0),
    ):  # fmt: skip
        retention = Retention(stream="s", owner="alice", seconds=30.0, origin=origin)
        again = msgspec.structs.replace(
            opened(name), retention=retention, attempt=attempt, group=group
        )
        core.handle(again, 0.0)
        row = TokenRow(name, 0, pack(WORDS[:3]), "length" if name == "r" else None)
        core.handle(Tokens((row,), group), 0.0)
    sends = core.handle(Recover("gateway-0", 5), 1.0)[1:-1]
    assert {send.to for send in sends} == {"gateway-0"}
    adopts, behind = dict[str, Adopt](), set[str]()
    for message in (send.message for send in sends):
        if isinstance(message, Adopt):
            [name] = choice_ids("r", message.submit.choices)
            assert name not in behind
            adopts[name] = message
        elif isinstance(message, Text):
            behind |= {row.request_id for row in message.rows}
    assert behind == {"r", "r/1", "x"}
    assert {
        name: (one.submit.attempt, one.submit.group, one.accepted and one.accepted.group)
        for name, one in adopts.items()
    } == {"r": (1, 0, 0), "r/1": (2, 1, 1)}


def test_log_probs_of_the_prompt_come_before_the_text_again() -> None:
    core = DetokenizerCore(DECODERS)
    core.handle(opened(prompt_logprobs=0, logprobs=0), 0.0)
    width = logprob_bytes(0)
    live: list[TextRow] = []
    for first in (0, 2):
        prompt = PromptTokens("r", 1, first, pack(WORDS[first : first + 2]), bytes(2 * width), 0)
        live += rows_of(core.handle(prompt, 0.0))
    row = TokenRow("r", 0, pack(WORDS[:2]), "length", logprobs=bytes(2 * width))
    live += rows_of(core.handle(Tokens((row,), 0), 0.0))
    assert told(core) == live and [row.prompt is None for row in live] == [False] * 2 + [True] * 3


def test_what_was_lost_fails_again_for_the_next_gateway() -> None:
    core = DetokenizerCore(DECODERS)
    core.handle(opened(), 0.0)
    live = rows_of(core.handle(Tokens((TokenRow("r", 0, pack(WORDS[:2])),), 0), 0.0))
    sends = core.handle(Tokens((TokenRow("r", 5, pack(WORDS[5:6])),), 0), 0.0)
    live += rows_of(sends)
    assert live[-1].finish == "error" and any(isinstance(s.message, StopHit) for s in sends)
    assert told(core) == live


def test_a_detokenizer_that_is_new_answers_when_schedulers_have() -> None:
    core = DetokenizerCore(DECODERS, schedulers=["scheduler-0"], incarnation=3)
    assert core.handle(Recover("gateway-0", 5), 0.0) == []
    core.handle(Recovered("scheduler-0", 3, opening=True), 0.0)
    core.handle(opened(), 0.0)
    core.handle(Tokens((TokenRow("r", 0, pack(WORDS[:3])),), 0), 0.0)
    assert core.handle(Recover("gateway-0", 5), 0.0) == []
    core.handle(Recovered("scheduler-0", 3), 0.0)
    assert len(told(core)) == 3


@pytest.mark.parametrize("bound", ["owner", "all"])
def test_beyond_its_bounds_the_oldest_goes_and_its_gateway_is_told(bound: str) -> None:
    size = OUTPUT_BYTES + 40
    few = OutputBounds(10**9, 3 * size) if bound == "owner" else OutputBounds(3 * size, 10**9)
    core = DetokenizerCore(DECODERS, bounds=few)
    aborts: list[Send] = []
    for n in range(6):
        owner = "alice" if bound == "owner" or n % 2 else "bob"
        core.handle(opened(f"r{n}", owner=owner), float(n))
        row = TokenRow(f"r{n}", 0, pack(WORDS[:10]), "length")
        sends = core.handle(Tokens((row,), 0), float(n))
        aborts += [send for send in sends if isinstance(send.message, Abort)]
        assert core.stats()["kept_bytes"] == min(n + 1, 3) * size
    assert [(s.channel, s.to, s.message.request_id) for s in aborts] == [  # type: ignore[attr-defined]
        ("recovery", "gateway-0", f"r{n}") for n in range(3)
    ]
    again = core.handle(Recover("gateway-0", 5), 9.0)
    assert {row.request_id for row in rows_of(again)} == {"r3", "r4", "r5"}
    dropped = [s.message for s in again if isinstance(s.message, Abort)]
    assert [abort.request_id for abort in dropped] == ["r0", "r1", "r2"], "it may not have heard"
    assert core.stats()["dropped_total"] == 3
    kept = [s.message for s in core.handle(Recover("scheduler-0", 2), 9.0)]
    assert len([one for one in kept if isinstance(one, Delivered)]) == 6, "until they are done"
    core.handle(Done(tuple(f"r{n}" for n in range(6))), 9.0)
    assert core.stats()["kept_bytes"] == core.stats()["kept"] == 0
    mine = opened("mine", owner="carol")
    core.handle(mine, 10.0)
    sends = core.handle(Tokens((TokenRow("mine", 0, pack(WORDS[:10]), "length"),), 0), 10.0)
    assert not any(isinstance(send.message, Abort) for send in sends)


def test_a_long_prompt_counts_and_is_gone_with_its_output() -> None:
    """Also where it is too large to come with the request: other stages keep it."""
    size, large = OUTPUT_BYTES + 40, 10**6
    core = DetokenizerCore(DECODERS, bounds=OutputBounds(10**9, 2 * (size + large)))
    for n in range(5):
        kept = {"origin": bytes(large)} if n % 2 else {"kept_bytes": large}
        retention = Retention(stream=f"r{n}", owner="alice", seconds=30.0, **kept)  # type: ignore[arg-type]
        core.handle(msgspec.structs.replace(opened(f"r{n}"), retention=retention), float(n))
        core.handle(Tokens((TokenRow(f"r{n}", 0, pack(WORDS[:10]), "length"),), 0), float(n))
        assert core.stats()["kept_bytes"] == min(n + 1, 2) * (size + large)
        core.handle(Done((f"r{n - 2}",)), float(n))  # as its gateway says when it hears of it
    assert core.stats()["dropped_total"] == 3
    core.handle(Done(("r3", "r4")), 5.0)
    assert core.stats()["kept_bytes"] == 0 and len(snapshot(core)) < large / 2


def test_the_tokenizer_of_these_tests_writes_what_it_reads() -> None:
    assert isinstance(TOKENIZER, Tokenizer)
    assert "hello world é 你 🙂" in TOKENIZER.decode(WORDS)
