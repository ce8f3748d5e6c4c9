"""A gateway that is started again writes the streams of the one before it, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway.resumable_answers import MAX_FORMAT_BYTES, decode_format
from pipeinfer.gateway.retention import MAX_PARTITIONS
from pipeinfer.messages import (
    Accepted,
    AdapterChanges,
    AdapterState,
    Adopt,
    Message,
    Text,
    TextRow,
)
from pipeinfer.params import Adapter
from pipeinfer.wire import pack
from waiting import until

TEMPLATE = Path(__file__).parents[1] / "clients" / "hermes.jinja"
WORDS = " ".join(f"word{n}" for n in range(30))
CHAT = {"messages": [{"role": "user", "content": WORDS}], "stream": True, "max_tokens": 100}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}}}},
]  # fmt: skip
CALLS = ["<think>", "so ", "be ", "it", "</think>", "\n\n", "I ", "call ", "<tool_", 'call>\n{"na',
         'me": "add", "argu', 'ments": {"a": 1', "}}\n", "</tool_call>", "\n"]  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "tools and thoughts": ("/v1/chat/completions", CHAT | {"tools": TOOLS}),
    "one call": ("/v1/chat/completions", CHAT | {"tools": TOOLS, "parallel_tool_calls": False}),
    "no thoughts": ("/v1/chat/completions", CHAT | {"include_reasoning": False}),
    "functions": (
        "/v1/chat/completions", CHAT | {"functions": [tool["function"] for tool in TOOLS]}),
    "usage in each chunk": ("/v1/chat/completions", CHAT | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    "completion": ("/v1/completions", {"prompt": WORDS, "stream": True, "max_tokens": 100}),
    "echo": ("/v1/completions", {"prompt": WORDS, "stream": True, "echo": True}),
    "responses": ("/v1/responses", {"input": WORDS, "stream": True, "instructions": "be short"}),
    "responses with tools": ("/v1/responses", {
        "input": WORDS, "stream": True, "tools": [{"type": "function", "name": "add",
                                                   "parameters": {"type": "object"}}]}),
    "background": ("/v1/responses", {"input": WORDS, "stream": True, "background": True}),
    "messages": ("/v1/messages", CHAT),
    "messages with tools": ("/v1/messages", CHAT | {"tools": [
        {"name": "add", "input_schema": {"type": "object"}}]}),
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "reattach": 30.0, "chat_template": str(TEMPLATE), "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
}  # fmt: skip


def left(*gateways: Gateway, rows: int | None = None) -> dict[str, list[Message]]:
    """What the stages behind dead gateways tell of kept answers; rows: of each choice, so many."""
    adopts: list[Message] = []
    texts: dict[str, list[TextRow]] = {}
    for gateway in gateways:
        fed = gateway.pipeline.fed
        accepted = {one.request_id: one for one in fed if isinstance(one, Accepted)}
        for text in fed:
            for row in text.rows if isinstance(text, Text) else ():
                texts.setdefault(row.request_id, []).append(row)
        for submit in gateway.pipeline.submits:
            assert submit.retention is not None
            answered = accepted.get(submit.request_id)
            if answered is not None:
                answered = msgspec.structs.replace(answered, choices=submit.choices)
            adopts.append(Adopt("tokenizer-0", submit, answered))
    told: list[Message] = [Text(tuple(some[:rows])) for some in texts.values()]
    return {"tokenizer-0": adopts, "detokenizer-0": told}


def last_id(stream: bytes) -> str:
    return re.findall(rb"^id: (.+)$", stream, re.MULTILINE)[-1].decode()


def same(stream: bytes) -> bytes:
    """The stream without the time at which a gateway heard of its end."""
    return re.sub(rb'"completed_at":\d+', b"", stream)


async def whole(gateway: Gateway, path: str, body: dict[str, Any], **headers: str) -> bytes:
    answer = await gateway.http().post(gateway.url + path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.content


async def resumed(gateway: Gateway, event: str, **headers: str) -> httpx.Response:
    named = {"Last-Event-ID": event, **headers}
    url = f"{gateway.url}/v1/streams/{event.rpartition('/')[0]}"
    return await gateway.http().get(url, headers=named)


@pytest.mark.parametrize("form", FORMS)
async def test_the_rest_of_a_stream_is_as_if_its_gateway_lived(
    start_gateway: StartGateway, form: str
) -> None:
    path, body = FORMS[form]
    one = await start_gateway(**SETTINGS)
    one.pipeline.cut = lambda _: CALLS
    stream = await whole(one, path, body)
    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    other = await start_gateway(**SETTINGS, left=left(one))
    for had in {1, 2, len(events) // 2, len(events) - 1}:
        answer = await resumed(other, last_id(b"".join(events[:had])))
        assert same(answer.content) == same(b"".join(events[had:])), had
    name = last_id(stream).rpartition("/")[0]
    again = await other.http().get(f"{other.url}/v1/streams/{name}")
    assert same(again.content) == same(stream)
    third = await start_gateway(**SETTINGS, left=left(one))  # the other one died as well
    answer = await resumed(third, last_id(events[0]))
    assert same(answer.content) == same(b"".join(events[1:]))


@pytest.mark.parametrize("form", ["chat", "echo", "background"])
async def test_what_tokenizers_have_forgotten_detokenizers_tell(
    start_gateway: StartGateway, form: str
) -> None:
    """The tokenizer died as well, and gets the request from the new gateway."""
    path, body = FORMS[form]
    one = await start_gateway(**SETTINGS)
    stream = await whole(one, path, body)
    first = stream[: stream.index(b"\n\n") + 2]
    told = left(one)
    told = {"tokenizer-0": [], "detokenizer-0": [*told["tokenizer-0"], *told["detokenizer-0"]]}
    other = await start_gateway(**SETTINGS, left=told)
    answer = await resumed(other, last_id(first))
    assert same(first + answer.content) == same(stream)
    [before], [again] = one.pipeline.submits, other.pipeline.submits
    assert again == before


@pytest.mark.parametrize("body", [
    {"prompt": WORDS, "n": 3},
    {"prompt": [WORDS, "two words", "and three words"], "n": 2},
    {"prompt": ["a b c d e f g", "h"], "logprobs": 2},
])  # fmt: skip
async def test_choices_come_once_each_whatever_their_order(
    start_gateway: StartGateway, body: dict[str, Any]
) -> None:
    body = {**body, "stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
    one = await start_gateway(reattach=30.0)
    stream = await whole(one, "/v1/completions", body)
    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    told = left(one)
    random.Random(5).shuffle(told["detokenizer-0"])
    other = await start_gateway(reattach=30.0, left=told)

    def data(some: list[bytes]) -> Counter[bytes]:
        return Counter(event.partition(b"\ndata: ")[2] for event in some)

    for had in range(1, len(events), 3):
        answer = await resumed(other, last_id(events[had - 1]))
        rest = [event + b"\n\n" for event in answer.content.split(b"\n\n")[:-1]]
        assert data(events[:had] + rest) == data(events), had
        assert rest[-1].endswith(b"data: [DONE]\n\n")
        assert last_id(rest[-1]) == last_id(events[-1]), "all of it was had"
    assert (await resumed(other, last_id(events[-1]))).content == b""


async def test_a_stream_goes_on_with_what_comes_later(start_gateway: StartGateway) -> None:
    one = await start_gateway(**SETTINGS)
    stream = await whole(one, "/v1/chat/completions", CHAT)
    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    other = await start_gateway(**SETTINGS, left=left(one, rows=3))
    asked = asyncio.create_task(resumed(other, last_id(events[7])))  # more than has come
    streams = other.driver._context.answers.streams
    await until(lambda: any(stream.readers for stream in streams._streams.values()))
    assert other.core.stats()["adopted"] == 1 and other.core.stats()["running"] == 1
    rows = [row for text in one.pipeline.fed if isinstance(text, Text) for row in text.rows]
    for row in rows[3:]:
        other.pipeline.rows(row)
    assert (await asked).content == b"".join(events[8:])
    assert other.pipeline.done == [rows[0].request_id], "its client has it: nobody keeps it"
    assert (await resumed(other, last_id(events[3]))).content == b"".join(events[4:])


async def test_a_client_that_stays_away_ends_the_adopted_request(
    start_gateway: StartGateway,
) -> None:
    one = await start_gateway(reattach=1.0)
    body = {"prompt": "pause x", "stream": True}
    asked = asyncio.create_task(whole(one, "/v1/completions", body))
    await until(lambda: len(one.pipeline.fed) == 2)
    other = await start_gateway(reattach=1.0, left=left(one))
    abort = await asyncio.wait_for(other.pipeline.aborts.get(), 60)
    assert abort.request_id == one.pipeline.submits[0].request_id and other.core.idle()
    asked.cancel()


KEYS = ("alice", "bob")


def key_file(tmp_path: Path, *names: str) -> str:
    path = tmp_path / "keys.txt"
    lines = [f"{name} sha256:{hashlib.sha256(f'k-{name}'.encode()).hexdigest()}" for name in names]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


async def test_the_same_key_alone_finds_it_and_without_that_key_it_is_aborted(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, *KEYS)
    one = await start_gateway(reattach=30.0, api_key_file=keys)
    body = {"prompt": WORDS, "stream": True, "max_tokens": 100}
    alice, bob = ({"Authorization": f"Bearer k-{name}"} for name in KEYS)
    stream = await whole(one, "/v1/completions", body, **alice)
    told, event = left(one), last_id(stream.partition(b"\n\n")[0])
    travels = msgspec.msgpack.encode(told["tokenizer-0"])
    assert b"k-alice" not in travels and b"alice" not in travels, "only a digest of the name"
    other = await start_gateway(reattach=30.0, api_key_file=keys, left=told)
    theirs = await resumed(other, event, **bob)
    unknown = await resumed(other, "cmpl-x/0", **bob)
    assert (theirs.status_code, unknown.status_code) == (404, 404)
    assert theirs.text.replace(event.rpartition("/")[0], "cmpl-x") == unknown.text
    mine = await resumed(other, event, **alice)
    assert mine.content == stream.partition(b"\n\n")[2]
    gone = await start_gateway(
        reattach=30.0, api_key_file=key_file(tmp_path, "bob"), left=left(one)
    )
    assert (await resumed(gone, event, **bob)).status_code == 404
    names = {submit.request_id for submit in one.pipeline.submits}
    assert {(await gone.pipeline.aborts.get()).request_id for _ in names} == names


async def test_background_responses_are_read_streamed_cancelled_and_stored(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    one = await start_gateway()
    url = "/v1/responses"
    bodies = [{"input": said, "background": True} for said in (WORDS, "hang on")]
    done, hung = [(await one.http().post(one.url + url, json=body)).json()["id"] for body in bodies]
    await until(lambda: not one.driver._context.answers.streams._streams[done].readers)
    await until(lambda: one.driver._context.answers.streams._streams[done].ended)
    before = (await one.http().get(f"{one.url}{url}/{done}")).json()
    store = str(tmp_path / "store.db")
    other = await start_gateway(left=left(one), store=store)
    http = other.http()
    found = (await http.get(f"{other.url}{url}/{done}")).json()
    changes = {"completed_at": before["completed_at"]}
    assert {**found, **changes} == before and found["status"] == "completed"
    items = (await http.get(f"{other.url}{url}/{done}/input_items")).json()
    assert items["data"][0]["content"][0]["text"] == WORDS
    streamed = await http.get(f"{other.url}{url}/{done}?stream=true&starting_after=3")
    assert streamed.text.startswith(f"id: {done}/4\n")
    assert (await http.get(f"{other.url}{url}/{hung}")).json()["status"] == "queued"
    cancelled = await http.post(f"{other.url}{url}/{hung}/cancel", json={})
    assert cancelled.json()["status"] == "cancelled"
    assert (await other.pipeline.aborts.get()).request_id == hung
    assert (await http.delete(f"{other.url}{url}/{done}")).json()["deleted"]
    assert done in other.pipeline.done


async def test_a_response_that_ends_after_its_gateways_death_is_stored(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    store = str(tmp_path / "store.db")
    one = await start_gateway(store=store)
    url = "/v1/responses"
    made = await one.http().post(
        one.url + url, json={"input": "pause here", "background": True, "metadata": {"a": "b"}}
    )
    name = made.json()["id"]
    await until(lambda: len(one.pipeline.fed) == 2)
    other = await start_gateway(left=left(one), store=store)
    answers = other.driver._context.answers
    await until(lambda: name in answers._answers and answers._adopted.is_set())
    last = TextRow(name, 1, "end", 6, 1, pack([1]), "stop", None, 2)
    other.pipeline.rows(last)
    body = {"input": "and?", "previous_response_id": name}

    async def stored() -> bool:
        return (await other.http().post(other.url + url, json=body)).status_code == 200

    async with asyncio.timeout(60):
        while not await stored():
            await asyncio.sleep(0.02)
    assert [turn["content"] for turn in other.pipeline.submits[-1].chat or []] == [
        "pause here", "pause end", "and?",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["version", "broken", "choice"])
async def test_what_cannot_be_written_is_aborted(start_gateway: StartGateway, how: str) -> None:
    one = await start_gateway(reattach=30.0)
    body = {"prompt": [WORDS, "more"], "stream": True}
    stream = await whole(one, "/v1/completions", body)
    told = left(one)
    if how == "choice":
        del told["tokenizer-0"][0]
    for n, adopt in enumerate(told["tokenizer-0"] if how != "choice" else ()):
        assert isinstance(adopt, Adopt) and adopt.submit.retention is not None
        data = msgspec.msgpack.encode((99, 1)) if how == "version" else b"\xc1"
        retention = msgspec.structs.replace(adopt.submit.retention, format=data)
        submit = msgspec.structs.replace(adopt.submit, retention=retention)
        told["tokenizer-0"][n] = msgspec.structs.replace(adopt, submit=submit)
    other = await start_gateway(reattach=30.0, left=told)
    assert (await resumed(other, last_id(stream))).status_code in (404, 410)
    await until(other.core.idle)
    ended = {abort.request_id for abort in other.pipeline.aborts._queue}  # type: ignore[attr-defined]
    left_over = {submit.request_id for submit in one.pipeline.submits[how == "choice" :]}
    assert ended | set(other.pipeline.done) >= left_over


async def test_what_is_dropped_as_it_is_adopted_leaves_its_place_to_others(
    start_gateway: StartGateway,
) -> None:
    """A choice of it is lost, which is known before it has begun to run."""
    one = await start_gateway(reattach=30.0)
    await whole(one, "/v1/completions", {"prompt": [WORDS, "more"], "stream": True})
    told = left(one)
    told = {
        "tokenizer-0": [],
        "detokenizer-0": [*told["tokenizer-0"][1:], *told["detokenizer-0"]],
    }
    other = await start_gateway(reattach=30.0, left=told, key_concurrent=2)
    await until(lambda: other.driver._context.answers._adopted.is_set())
    for _ in range(2):
        await whole(other, "/v1/completions", {"prompt": "one", "n": 2})
    assert not other.driver._context.sessions._routes


async def test_what_is_too_large_or_has_too_many_choices_lives_with_its_gateway(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(reattach=30.0, kept_mib=64, key_kept_mib=64)
    large = {"input": "x" * MAX_FORMAT_BYTES, "stream": True}
    many = {"prompt": "a b", "n": MAX_PARTITIONS, "stream": True}
    for path, body in (("/v1/responses", large), ("/v1/completions", many)):
        stream = await whole(gateway, path, body)
        assert gateway.pipeline.submits[-1].retention is None
        assert (await resumed(gateway, last_id(stream))).content == b""


async def test_adapters_are_told_to_the_next_gateway(start_gateway: StartGateway) -> None:
    mine = AdapterState("mine", 3, 0, Adapter("mine", "/x", "aa"))
    changes = AdapterChanges((mine, AdapterState("other", 1, 0)))
    gateway = await start_gateway(left={"tokenizer-0": [changes]}, enable_lora=True)
    registry = gateway.driver._context.defaults.adapters
    await until(lambda: registry.names == ("mine",))
    registry.change("mine", None, 0)
    assert registry.changes == AdapterChanges(
        (AdapterState("other", 1, 0), AdapterState("mine", 4, 0))
    )


async def test_until_it_is_known_what_is_kept_only_what_is_stored_is_found(
    start_gateway: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(store=str(tmp_path / "store.db"))
    http, url = gateway.http(), gateway.url
    stored = (await http.post(f"{url}/v1/responses", json={"input": WORDS})).json()
    monkeypatch.setattr("pipeinfer.gateway.resumable_answers.ADOPTION_SECONDS", 0.05)
    gateway.driver._context.answers._adopted.clear()  # as before the stages have answered
    for path in ("/v1/streams/x", "/v1/responses/x"):
        answer = await http.get(url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert answer.headers["retry-after"] == "1"
    assert (await http.get(f"{url}/v1/responses/{stored['id']}")).json() == stored
    asked = asyncio.create_task(http.get(f"{url}/v1/streams/x"))
    gateway.driver._context.answers.on_adopted()
    assert (await asked).status_code in (404, 503)
    assert (await http.get(f"{url}/v1/streams/x")).status_code == 404


def test_a_format_of_another_version_is_none() -> None:
    assert decode_format(b"") is None and decode_format(msgspec.msgpack.encode((2, {}))) is None
    assert decode_format(msgspec.msgpack.encode((1, {"metadata": 1}))) is None
