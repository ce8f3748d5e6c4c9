"""What a stream gets in one iteration of the loop leaves in one chunk, whole and in order."""

from __future__ import annotations

import json

import pytest
from gateway_pipeline import Gateway
from raw_http import RawClient, post

from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until


async def chunk(client: RawClient) -> bytes:
    """The next chunk of the body."""
    size = int(await client.reader.readline(), 16)
    data = await client.reader.readexactly(size)
    assert await client.reader.readexactly(2) == b"\r\n"
    return data


def texts(events: bytes) -> list[str]:
    """What its events say, in order."""
    found = []
    for event in events.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        found.append("DONE" if data == b"[DONE]" else json.loads(data)["choices"][0]["text"])
    return found


@pytest.mark.parametrize("last", ["with the others", "alone"])
async def test_tokens_that_came_together_leave_together(gateway: Gateway, last: str) -> None:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang", "stream": True}))
    await until(lambda: gateway.pipeline.submits and gateway.core.stats()["waiting"])
    [submit] = gateway.pipeline.submits

    def say(letter: str, at: int, finish: str | None = None) -> None:
        row = TextRow(submit.request_id, 1, letter, at, at, pack([1]), finish, output_tokens=at + 1)  # type: ignore[arg-type]
        gateway.pipeline.rows(row)

    say("a", 0)
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head and texts(await chunk(client)) == ["a"]
    say("b", 1)  # these in one turn
    say("c", 2)
    say("d", 3)
    if last == "alone":
        assert texts(await chunk(client)) == ["b", "c", "d"]
        say("e", 4, "length")
        assert texts(await chunk(client)) == ["e", "DONE"]
    else:
        say("e", 4, "length")
        assert texts(await chunk(client)) == ["b", "c", "d", "e", "DONE"]
    assert await chunk_of_end(client)
    await client.close()


async def chunk_of_end(client: RawClient) -> bool:
    """Whether the body ends here."""
    return await client.reader.readexactly(5) == b"0\r\n\r\n"
