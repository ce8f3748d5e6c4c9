"""Messages whose packed arrays do not hold together reach no core, and nobody else waits for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from pipeinfer import messages
from pipeinfer.bus import frames
from pipeinfer.bus.bus import Reader
from pipeinfer.bus.frames import BadFrame, FrameHeader
from pipeinfer.messages import (
    CHANNELS,
    PROTOCOL,
    Abort,
    Accepted,
    Admit,
    Admitted,
    Adopt,
    AppendTokens,
    Delivered,
    Digests,
    LogprobTexts,
    Message,
    OpenStream,
    Plan,
    PromptTokens,
    Release,
    Result,
    Submit,
    Text,
    TextRow,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams
from waiting import until

HEADER = FrameHeader(PROTOCOL, "engine-0-1", 1, 0, 0.0)
PARAMS, ONE, ODD = RequestParams(), bytes(4), bytes(5)
# Their size is the request's, and a format is the gateway's own business.
UNPACKED = {"logprobs", "prompt_logprobs", "vector", "format", "origin"}


def plan(**fields: Any) -> Plan:
    empty: dict[str, Any] = {"releases": (), "admits": (), "slots": b"", "counts": b""}
    return Plan(epoch=1, number=1, **(empty | fields))


def result(**fields: Any) -> Result:
    rows = dict.fromkeys(("slots", "starts", "counts", "produced", "token_ids"), ONE)
    told: dict[str, Any] = {"deferred": b"", "free": 1, "evictable": 0, "digest": 0}
    return Result(epoch=1, number=1, **(rows | told | fields))


def admitted(**fields: Any) -> Admitted:
    rows: dict[str, Any] = {"slots": ONE, "cached": ONE}
    return Admitted(epoch=1, number=1, free=1, evictable=0, **(rows | fields))


def token_rows(ids: bytes) -> Tokens:
    return Tokens((TokenRow("a", 0, ONE), TokenRow("b", 0, ids)))


def text_rows(ids: bytes = ONE, **fields: Any) -> Text:
    return Text(
        tuple(TextRow(name, 1, "", 0, 0, i, **fields) for name, i in (("a", ONE), ("b", ids)))
    )


def admit(ids: bytes) -> Admit:
    return Admit(0, "r", ids, 1, 9, PARAMS, 0)


def log_probs(offsets: bytes = ONE, ids: bytes = b"") -> LogprobTexts:
    return LogprobTexts(b"", (), offsets, ids)


def submit(ids: bytes) -> Submit:
    return Submit("r", 1, 0, PARAMS, 0, prompt_ids=ids)


# By channel: those that hold together, and beside each some that do not, with what is said of them.
CASES: list[tuple[str, Message, dict[str, Message]]] = [
    ("requests", submit(ONE), {"5 bytes of prompt_ids": submit(ODD)}),
    ("work", TokenizedRequest("r", 1, 0, 0, ONE, PARAMS, 0),
     {"5 bytes of prompt_ids": TokenizedRequest("r", 1, 0, 0, ODD, PARAMS, 0)}),
    ("plan", plan(slots=ONE, counts=ONE, cache_slots=ONE), {
        "slots, counts have 4, 8 bytes": plan(slots=ONE, counts=ONE * 2),
        "5 bytes of slots": plan(slots=ODD, counts=ODD),
        "5 bytes of cache_slots": plan(cache_slots=ODD),
    }),
    ("plan", plan(releases=(Release(0, True, ONE),), admits=(admit(ONE),)), {
        "releases: 5 bytes of output_ids": plan(releases=(Release(0, True), Release(1, True, ODD))),
        "admits: 5 bytes of token_ids": plan(admits=(admit(ODD),)),
        "appends: 5 bytes of ids": plan(appends=(AppendTokens(0, ODD),)),
    }),
    ("result", admitted(), {
        "slots, cached have 8, 4 bytes": admitted(slots=ONE * 2),
        "5 bytes of slots": admitted(slots=ODD, cached=ODD),
    }),
    ("result", result(), {
        "slots, starts, counts, produced have 8, 4, 4, 4 bytes": result(slots=ONE * 2),
        "slots, starts, counts, produced have 4, 4, 4, 0 bytes": result(produced=b""),
        "5 bytes of token_ids": result(token_ids=ODD),
        "5 bytes of deferred": result(deferred=ODD),
        "5 bytes of bad": result(bad=ODD),
    }),
    ("result", Digests(1, 1, 0, bytes(8)), {"12 bytes of values": Digests(1, 1, 0, bytes(12))}),
    ("tokens", OpenStream("r", 1, 0, PARAMS, ONE), {"5 bytes": OpenStream("r", 1, 0, PARAMS, ODD)}),
    ("tokens", token_rows(ONE), {"rows: 5 bytes of ids": token_rows(ODD)}),
    ("tokens", PromptTokens("r", 1, 0, ONE, b""), {"5 bytes": PromptTokens("r", 1, 0, ODD, b"")}),
    ("text", Accepted("r", 1, 0, 1, ONE), {"5 bytes": Accepted("r", 1, 0, 1, ODD)}),
    ("text", text_rows(), {"rows: 5 bytes of ids": text_rows(ODD)}),
    ("text", text_rows(logprobs=log_probs(), prompt=log_probs()), {
        "rows: logprobs: 5 bytes of offsets": text_rows(logprobs=log_probs(ODD)),
        "rows: prompt: 5 bytes of ids": text_rows(prompt=log_probs(ids=ODD)),
    }),
    ("recovery", Delivered("r", 1, ONE), {"5 bytes of ids": Delivered("r", 1, ODD)}),
    ("recovery", Adopt("tokenizer-0", submit(ONE), Accepted("r", 1, 0, 1, ONE)), {
        "submit: 5 bytes of prompt_ids": Adopt("tokenizer-0", submit(ODD)),
        "accepted: 5 bytes of prompt_ids":
            Adopt("tokenizer-0", submit(ONE), Accepted("r", 1, 0, 1, ODD)),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("channel", "good", "bad"), CASES, ids=lambda one: type(one).__name__)
def test_what_does_not_hold_together_is_refused_with_its_channel_its_sender_and_its_numbers(
    channel, good, bad
):
    assert frames.decode(frames.encode(channel, HEADER, good))[2] == good
    for said, message in bad.items():
        with pytest.raises(BadFrame) as caught:
            frames.decode(frames.encode(channel, HEADER, message))
        kind = type(message).__name__
        assert f"channel {channel}: bad {kind} from engine-0-1" in str(caught.value)
        assert said in str(caught.value)


def test_every_array_of_the_protocol_is_declared_as_one_and_has_its_case():
    """What else is bytes are log-probs and vectors, of which only their request knows the size."""
    for name in messages.__dict__.values():
        if isinstance(name, type) and issubclass(name, msgspec.Struct):
            plain = {
                f.name for f in msgspec.structs.fields(name) if f.type in (bytes, bytes | None)
            }
            assert plain <= UNPACKED, name
    assert set(CHANNELS) >= {channel for channel, *_ in CASES}
    assert {type(good) for _, good, _ in CASES} == set(frames._checks) - {frames.control.Prefixes}


async def test_a_frame_that_does_not_hold_together_is_counted_and_the_next_one_read(caplog):
    with zmq.Context() as context:
        reader, heard = Reader(), []
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.bind("inproc://packed")
        outbox.connect("inproc://packed")
        reader.add(inbox)
        reader.start(lambda _channel, _header, message: heard.append(message))
        for message in (result(bad=ODD), result()):
            outbox.send_multipart(frames.encode("result", HEADER, message))
        outbox.send_multipart(frames.encode("work", HEADER, Abort("r", 1)))
        await until(lambda: len(heard) == 2)
        assert heard == [result(), Abort("r", 1)] and reader.bad_frames == 1
        assert "5 bytes of bad" in caplog.text and "engine-0-1" in caplog.text
        reader.close()
        outbox.close(linger=0)
