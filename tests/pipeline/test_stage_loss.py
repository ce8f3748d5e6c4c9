"""Stages killed under running streams: every stream completes with its own text, in one piece."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from typing import Any

import openai
import pytest
from leftovers import leftovers
from streams import Choice, Streams, chats

from servers import Server

STREAMS = 8
LETTERS = "[a-z ]{70}"
# Who is killed together, one after the other.
VICTIMS = (
    (("tokenizer",),),
    (("scheduler",),),
    (("detokenizer",),),
    (("engine",), ("engine",)),
    (("tokenizer", "detokenizer"),),
    (("scheduler", "detokenizer"),),
)


@pytest.fixture(scope="module")
def server():
    with Server("--kv-pages", "400") as running:
        yield running


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """Of one choice each, of three each, and one whose grammar bounds it."""
    single = chats(STREAMS)
    asked = {"temperature": 0.9, "logprobs": True, "top_logprobs": 2}
    several = [asked | {"question": one["question"], "n": 3, "seed": 100 * number}
               for number, one in enumerate(single[:2], 1)]  # fmt: skip
    bounded = {"question": "Go on.", "seed": 7, "extra_body": {"guided_regex": LETTERS}}
    return [*single, *several, asked | bounded]


@pytest.fixture(scope="module")
def undisturbed(server: Server, requests: list[dict[str, Any]]) -> list[Choice]:
    made = asyncio.run(Streams(server, requests).run())
    assert len({one.text for one in made}) == len(made), "each has a seed of its own"
    assert re.fullmatch(LETTERS, made[-1].text)
    with_logprobs = made[STREAMS:]
    assert [one.finish for one in with_logprobs] == ["length"] * (len(with_logprobs) - 1) + ["stop"]
    assert all(len(one.logprobs) == 3 * len(one.tokens) >= 3 * 40 for one in with_logprobs)
    return made


def pids(server: Server) -> dict[str, int]:
    return {stage["name"]: stage["pid"] for stage in server.health()["stages"]}


def kill(server: Server, names: tuple[str, ...]) -> None:
    """-9 for all of them at once; returns when others are in their places and ready."""
    before = pids(server)
    for name in names:
        os.kill(before[name], signal.SIGKILL)

    def back() -> bool:
        now = pids(server)
        changed = all(now[name] != before[name] for name in names)
        return changed and server.health()["status"] == "ready"

    server.wait(back, f"{names} came back")
    others = before.keys() - set(names)
    assert {name: pids(server)[name] for name in others} == {name: before[name] for name in others}


def same(found: list[Choice], whole: list[Choice]) -> None:
    for one, other in zip(found, whole, strict=True):
        assert (one.text, one.finish, one.tokens) == (other.text, other.finish, other.tokens)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("victims", VICTIMS, ids=str)
def test_streams_survive_the_loss_of(server, requests, undisturbed, victims):
    def disturb() -> None:
        for names in victims:
            kill(server, names)

    same(asyncio.run(Streams(server, requests).run(disturb)), undisturbed)
    server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "nothing runs")


def test_requests_that_come_while_a_stage_is_away_are_answered(server, requests, undisturbed):
    """They wait in the pipeline: nothing is refused, and the first text is the only sign."""

    async def ask_at_once(*names: str) -> list[Choice]:
        before = pids(server)
        for name in names:
            os.kill(before[name], signal.SIGKILL)
        return await Streams(server, requests).run()

    same(asyncio.run(ask_at_once("tokenizer", "scheduler", "detokenizer")), undisturbed)


def test_requests_wait_while_the_gateway_is_away(server):
    """The supervisor holds the socket: nobody is refused, nor told that the server starts."""
    old = server.pid("gateway")
    os.kill(old, signal.SIGKILL)
    status, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200, answer
    server.wait(
        lambda: server.pid("gateway") != old and server.health()["status"] == "ready",
        "the gateway came back on its port",
    )


async def _end_early(api: openai.AsyncOpenAI, question: str, index: int) -> str:
    """How a request ended that does not run to its length: each fourth in another way."""
    how = index % 4
    stream = await api.chat.completions.create(
        model="pipeinfer-demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens={1: 1500, 3: 3}.get(how, 400),
        stop=["a", "e", "o", "1", "2", "3"] if how == 2 else None,
        stream=True,
        extra_body={"ignore_eos": True, "timeout": 0.8 if how == 1 else None},
    )
    chunks = 0
    async for chunk in stream:
        chunks += 1
        if how == 0 and (chunks == 1 + index // 2 or chunk.choices[0].finish_reason):
            await stream.close()  # at the end, if its tokens came together
            return "gone"
        if chunk.choices[0].finish_reason is not None:
            return chunk.choices[0].finish_reason
    raise AssertionError("it ended without a reason")


def test_nothing_is_left_of_requests_that_end_while_stages_die(server):
    """Clients that leave, timeouts, stop strings and limits, beside streams that are disturbed."""

    async def everybody() -> list[str | BaseException]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            asked = [_end_early(api, one["question"], n) for n, one in enumerate(chats(STREAMS))]
            early = asyncio.gather(*asked, return_exceptions=True)
            for names in (("scheduler",), ("tokenizer", "engine"), ("detokenizer", "scheduler")):
                await asyncio.sleep(0.3)
                found = await asyncio.to_thread(pids, server)
                for name in names:
                    with contextlib.suppress(ProcessLookupError):  # it is being started
                        os.kill(found[name], signal.SIGKILL)
            return await early

    ends = asyncio.run(everybody())
    for index, end in enumerate(ends):
        if isinstance(end, openai.APIStatusError):
            assert index % 4 == 1 and end.status_code == 408, end
        else:
            assert end in ({"gone"}, {"abort"}, {"stop", "length"}, {"length"})[index % 4], end
    assert leftovers(server) == {}
