"""AsyncLLM on the caller's own event loop: streams, and what leaving them does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.llm import Delta, PipelineStopped, RequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)  # some seconds
TRIES = 8  # of what ENDLESS must not end before: a machine may stall


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_llm(small: dict[str, Any]) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(**small) as llm:
        yield llm


async def gather(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def until_idle(llm: AsyncLLM) -> None:
    """Until no stage holds a request."""
    async with asyncio.timeout(120):
        while any(held(llm)):
            await asyncio.sleep(0.05)


def held(llm: AsyncLLM) -> tuple[float, ...]:
    stats = llm.stats()
    return (
        stats["scheduler-0"]["running"],
        stats["scheduler-0"]["waiting"],
        stats["engine-0-0"]["slots_used"],
        stats["detokenizer-0"]["running"],
    )


async def test_deltas_join_to_the_output_and_count_their_tokens(async_llm: AsyncLLM) -> None:
    deltas = await gather(async_llm.generate("abc", GREEDY))
    assert len(deltas) > 10
    counted = 0
    for delta in deltas:
        assert delta.offset == counted
        counted += len(delta.token_ids)
    assert counted == 30
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    ids = [token for delta in deltas for token in delta.token_ids]
    again = await gather(async_llm.generate(list(b"abc"), GREEDY))
    assert [token for delta in again for token in delta.token_ids] == ids
    assert "".join(d.text for d in again) == "".join(d.text for d in deltas)


async def test_streams_run_side_by_side(async_llm: AsyncLLM) -> None:
    alone = [await gather(async_llm.generate([97, 97 + i], GREEDY)) for i in range(6)]
    together = await asyncio.gather(
        *(gather(async_llm.generate([97, 97 + i], GREEDY)) for i in range(6))
    )
    for one, other in zip(alone, together, strict=True):
        assert [t for d in one for t in d.token_ids] == [t for d in other for t in d.token_ids]


async def test_two_requests_may_have_the_same_id(async_llm: AsyncLLM) -> None:
    a, b = await asyncio.gather(
        gather(async_llm.generate("abc", GREEDY, "mine")),
        gather(async_llm.generate("xyz", GREEDY, "mine")),
    )
    assert a[-1].finish_reason == b[-1].finish_reason == "length"
    assert [t for d in a for t in d.token_ids] != [t for d in b for t in d.token_ids]


async def test_leaving_the_iterator_aborts_the_request(async_llm: AsyncLLM) -> None:
    for _ in range(TRIES):
        before = async_llm.stats()["engine-0-0"]["sampled_tokens_total"]
        async for _ in async_llm.generate("abc", ENDLESS):
            sampled = async_llm.stats()["engine-0-0"]["sampled_tokens_total"]
            if sampled > before + 100 and any(held(async_llm)):
                break
        await until_idle(async_llm)
        if async_llm.stats()["engine-0-0"]["sampled_tokens_total"] < before + 2000:
            return
    raise AssertionError("each was computed to its end")


async def test_cancelling_the_task_aborts_the_request(async_llm: AsyncLLM) -> None:
    for _ in range(TRIES):
        task = asyncio.create_task(gather(async_llm.generate("abc", ENDLESS)))
        async with asyncio.timeout(120):
            while async_llm.stats()["engine-0-0"]["slots_used"] == 0 and not task.done():
                await asyncio.sleep(0.02)
        if task.cancel():
            break
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(async_llm)


async def test_a_request_past_its_timeout_ends_with_abort(async_llm: AsyncLLM) -> None:
    for _ in range(TRIES):
        deltas = await gather(async_llm.generate("abc", ENDLESS, timeout=0.3))
        if deltas[-1].finish_reason == "abort":
            break
    assert deltas[-1].finish_reason == "abort"
    await until_idle(async_llm)


async def test_a_refused_request_raises(async_llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        await gather(async_llm.generate("", GREEDY))
    with pytest.raises(RequestError, match="temperature"):
        async_llm.generate("a", SamplingParams(temperature=-1))


async def test_a_chat_streams(async_llm: AsyncLLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    deltas = await gather(async_llm.chat(chat, GREEDY))
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = await gather(async_llm.generate(prompt, GREEDY))
    assert "".join(d.text for d in deltas) == "".join(d.text for d in expected)


async def test_it_is_started_once(async_llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="once"):
        await async_llm.start()
    with pytest.raises(RuntimeError, match="not started"):
        await gather(AsyncLLM().generate("a"))


async def test_closing_ends_streams_processes_and_who_waits_for_sleep(
    small: dict[str, Any],
) -> None:
    before = set(psutil.Process().children())
    llm = AsyncLLM(**small)
    await llm.start()
    children = set(psutil.Process().children()) - before
    assert len(children) == 5  # four stages, and the engine's memory holder
    stream = llm.generate("abc", ENDLESS)
    first = await anext(stream)
    assert first.finish_reason is None
    asleep = asyncio.ensure_future(llm.sleep())  # when that request has ended
    await asyncio.sleep(0)
    await llm.close()
    rest = await gather(stream)
    assert rest[-1].finish_reason == "abort"
    with pytest.raises(PipelineStopped):
        await asleep
    assert not any(child.is_running() for child in children)
    await llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        await gather(llm.generate("abc"))


async def test_cancelling_the_start_leaves_no_process(small: dict[str, Any]) -> None:
    before = set(psutil.Process().children())
    starting = asyncio.create_task(AsyncLLM(**small).start())
    async with asyncio.timeout(120):
        while len(children := set(psutil.Process().children()) - before) < 4:
            await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(child.is_running() for child in children)


async def test_choices_come_side_by_side_each_with_its_index(async_llm: AsyncLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, n=3)
    deltas = await gather(async_llm.generate("abcdefgh", params))
    order = [delta.index for delta in deltas]
    assert set(order) == {0, 1, 2} and order != sorted(order)
    texts = ["".join(d.text for d in deltas if d.index == n) for n in range(3)]
    for n, text in enumerate(texts):
        mine = [delta for delta in deltas if delta.index == n]
        assert sum(len(delta.token_ids) for delta in mine) == 20
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + ["length"]
        one = SamplingParams(seed=3 + n, max_tokens=20, ignore_eos=True)
        alone = await gather(async_llm.generate("abcdefgh", one))
        assert "".join(delta.text for delta in alone) == text


async def test_leaving_a_stream_ends_all_of_its_choices(async_llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=2000, ignore_eos=True, n=4)
    async with contextlib.aclosing(async_llm.generate("abc", params)) as stream:
        async for delta in stream:
            if delta.index == 3:
                break
    await until_idle(async_llm)


async def test_a_refused_request_is_refused_once_however_many_choices(async_llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="context length"):
        await gather(async_llm.generate("abc", SamplingParams(max_tokens=10**6, n=3)))
    await until_idle(async_llm)


async def test_requests_that_come_while_it_sleeps_wait_for_its_waking(async_llm: AsyncLLM) -> None:
    expected = await gather(async_llm.generate("abc", GREEDY))
    await async_llm.sleep(mode="keep")
    waiting = asyncio.ensure_future(gather(async_llm.generate("abc", GREEDY)))
    async with asyncio.timeout(120):
        while not async_llm.stats()["scheduler-0"]["waiting"]:
            await asyncio.sleep(0.05)
    await async_llm.wake_up()
    got = [token for delta in await waiting for token in delta.token_ids]
    assert got == [token for delta in expected for token in delta.token_ids]


async def test_where_memory_cannot_be_given_back_it_does_not_sleep(
    in_process: dict[str, Any],
) -> None:
    async with AsyncLLM(**in_process, no_keep_memory=True) as llm:
        with pytest.raises(RuntimeError, match="engine-0-0 cannot give its memory back"):
            await llm.sleep()
        assert await gather(llm.generate("abc", GREEDY))
