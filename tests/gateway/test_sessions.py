"""Calls of one request go into the pipeline a few at a time, and none is forgotten there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pipeinfer.gateway.health import Health
from pipeinfer.gateway.ledger import Call, ClientDisconnected, Failed, OutputDelta, Started
from pipeinfer.gateway.metrics import Metrics, VllmMetrics
from pipeinfer.gateway.sessions import CALLS_AT_ONCE, RequestSessions
from pipeinfer.messages import Message
from pipeinfer.params import RequestParams, choice_ids
from pipeinfer.wire import pack

PROMPTS = 10 * CALLS_AT_ONCE


class Fed:
    """A port's core: remembers what it was fed, and refuses what it is told to."""

    def __init__(self) -> None:
        self.port = RequestSessions(Metrics(Health([])))
        self.port.bind(self.take)
        self.calls: list[str] = []
        self.hung_up: list[str] = []
        self.built = 0
        self.refuse = ""

    def take(self, message: Message) -> None:
        if isinstance(message, ClientDisconnected):
            self.hung_up.append(message.request_id)
            return
        assert isinstance(message, Call)
        self.calls.append(message.request_id)
        if message.request_id == self.refuse:
            self.port.deliver(Failed(message.request_id, 429, "full", code="queue_full"))

    def requests(self) -> Iterator[Call]:
        for i in range(PROMPTS):
            self.built += 1
            yield Call(str(i), RequestParams(), text="x")


class Errors:
    """A sink that remembers failures."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, int]] = []

    def started(self, index: int, started: Started) -> None: ...

    def delta(self, index: int, delta: OutputDelta) -> None: ...

    def failed(self, index: int, failed: Failed) -> None:
        self.failures.append((index, failed.status))


async def begun(fed: Fed, sink: Errors, iterations: int) -> asyncio.Task[None]:
    """A handler that opens all calls and waits for ever, after so many iterations of the loop."""

    async def handler() -> None:
        async with fed.port.open(fed.requests(), sink):
            await asyncio.Event().wait()

    task = asyncio.create_task(handler())
    for _ in range(iterations):
        await asyncio.sleep(0)
    return task


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_turn_of_the_loop_takes_a_slice_of_the_calls() -> None:
    fed = Fed()
    task = await begun(fed, Errors(), 0)
    for _ in range(20):
        before = len(fed.calls)
        await asyncio.sleep(0)
        assert len(fed.calls) - before <= CALLS_AT_ONCE
    assert fed.calls == [str(i) for i in range(PROMPTS)]
    await cancelled(task)
    assert fed.hung_up == fed.calls


async def test_a_client_that_leaves_amid_its_calls_leaves_none_behind() -> None:
    fed = Fed()
    task = await begun(fed, Errors(), 3)
    assert 0 < len(fed.calls) < PROMPTS
    fed.port.deliver(OutputDelta("1", "x", b"", 0, 0, "stop"))
    await cancelled(task)
    assert fed.hung_up == [name for name in fed.calls if name != "1"]
    assert fed.built == len(fed.calls) < PROMPTS


def refused_at_once(fed: Fed) -> None:
    fed.refuse = str(5 * CALLS_AT_ONCE + 3)


def refused_later(fed: Fed) -> None:
    fed.port.deliver(Failed("1", 400, "too long"))


def server_ends(fed: Fed) -> None:
    fed.port.fail_all(503, "the server is shutting down")


@pytest.mark.parametrize("happen", [refused_at_once, refused_later, server_ends])
async def test_after_a_failure_no_more_calls_are_built(happen: Callable[[Fed], None]) -> None:
    fed, sink = Fed(), Errors()
    task = await begun(fed, sink, 3)
    assert 0 < len(fed.calls) < PROMPTS
    happen(fed)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fed.calls) < PROMPTS
    assert fed.built == len(fed.calls)
    assert sink.failures
    await cancelled(task)
    failed = {str(index) for index, _ in sink.failures}
    assert fed.hung_up == [name for name in fed.calls if name not in failed]


async def test_calls_that_are_done_early_do_not_stop_the_others() -> None:
    fed, sink = Fed(), Errors()
    task = await begun(fed, sink, 2)
    for name in list(fed.calls):
        fed.port.deliver(OutputDelta(name, "x", b"", 0, 0, "stop"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fed.calls) == PROMPTS and not sink.failures
    await cancelled(task)


# Of a group's request, as the next test serves it.
OF_VLLM = (
    "vllm:prompt_tokens_total{@} 7.0",
    "vllm:generation_tokens_total{@} 6.0",
    'vllm:request_success_total{engine="3",finished_reason="stop",model_name="m"} 1.0',
    'vllm:request_success_total{engine="3",finished_reason="abort",model_name="m"} 0.0',
    'vllm:time_to_first_token_seconds_bucket{engine="3",le="0.25",model_name="m"} 0.0',
    'vllm:time_to_first_token_seconds_bucket{engine="3",le="0.5",model_name="m"} 1.0',
    "vllm:time_to_first_token_seconds_sum{@} 0.5",
    "vllm:inter_token_latency_seconds_count{@} 2.0",
    "vllm:inter_token_latency_seconds_sum{@} 1.25",
    "vllm:request_time_per_output_token_seconds_sum{@} 0.25",
    "vllm:e2e_request_latency_seconds_sum{@} 2.0",
    "vllm:request_decode_time_seconds_sum{@} 1.25",
    "vllm:request_prompt_tokens_sum{@} 7.0",
    'vllm:request_generation_tokens_bucket{engine="3",le="5.0",model_name="m"} 0.0',
    'vllm:request_generation_tokens_bucket{engine="3",le="10.0",model_name="m"} 1.0',
    "vllm:request_max_num_generation_tokens_sum{@} 6.0",
)


async def test_requests_that_no_group_had_are_none_of_vllms() -> None:
    fed = Fed()
    vllm = VllmMetrics(Health([]), "m", 100, True)
    metrics = Metrics(Health([]), vllm=vllm)
    fed.port = RequestSessions(metrics)
    fed.port.bind(fed.take)
    calls = [Call(name, RequestParams(), text="x") for name in ("refused", "encoded")]
    async with fed.port.open(calls, Errors()):
        fed.port.deliver(Failed("refused", 429, "no", code="queue_full"))
        fed.port.deliver(Started("encoded", -1, 7))
        fed.port.deliver(OutputDelta("encoded", "", b"", 0, 0, "stop"))
    told = metrics.exposition("")[0].decode()
    assert "pipeinfer_request_seconds_count 0.0" in told.splitlines()
    assert 'engine="' not in told


async def test_times_and_tokens_and_ends_are_counted() -> None:
    # When it begins, when each row with tokens comes, and when it ends.
    fed, now = Fed(), iter([1.0, 1.5, 1.75, 2.75, 3.0])
    metrics = Metrics(Health([]), vllm=VllmMetrics(Health([]), "m", 100, True))
    fed.port = RequestSessions(metrics, lambda: next(now))
    fed.port.bind(fed.take)
    async with fed.port.open([Call("r", RequestParams(), text="x")], Errors()):
        fed.port.deliver(Started("r", 3, 7))
        fed.port.deliver(OutputDelta("r", "", b"", 0, 0))
        for ids in (1, 2, 3):
            fed.port.deliver(OutputDelta("r", "x", pack(range(ids)), 0, 0))
        fed.port.deliver(OutputDelta("r", "", b"", 0, 0, "stop"))
        fed.port.deliver(OutputDelta("r", "late", pack([1]), 0, 0))
    told = metrics.exposition("")[0].decode()
    for line in (
        "pipeinfer_prompt_tokens_total 7.0",
        "pipeinfer_generated_tokens_total 6.0",
        "pipeinfer_time_to_first_token_seconds_count 1.0",
        "pipeinfer_time_to_first_token_seconds_sum 0.5",
        "pipeinfer_inter_token_seconds_count 2.0",
        "pipeinfer_inter_token_seconds_sum 1.25",
        'pipeinfer_requests_total{outcome="stop"} 1.0',
        "pipeinfer_request_seconds_count 1.0",
        "pipeinfer_request_seconds_sum 2.0",
        "pipeinfer_time_per_output_token_seconds_count 1.0",
        "pipeinfer_time_per_output_token_seconds_sum 0.25",
        *(line.replace("@", 'engine="3",model_name="m"') for line in OF_VLLM),
    ):
        assert line in told.splitlines(), line
    assert fed.hung_up == []


async def test_a_prompts_longest_choice_is_counted_once_when_the_last_is_over() -> None:
    fed = Fed()
    metrics = Metrics(Health([]), vllm=VllmMetrics(Health([]), "m", 100, True))
    fed.port = RequestSessions(metrics)
    fed.port.bind(fed.take)
    three = list(choice_ids("r", range(3)))

    def longest() -> list[str]:
        lines = metrics.exposition("")[0].decode().splitlines()
        name = "vllm:request_max_num_generation_tokens_"
        return [line.split()[1] for line in lines if line.startswith((name + "c", name + "s"))]

    async with fed.port.open([Call("r", RequestParams(n=3), text="x")], Errors()):
        for name in three:
            fed.port.deliver(Started(name, 0, 7 if name == three[0] else 0))
        for name, tokens in zip(three, (5, 9, 2), strict=True):
            fed.port.deliver(OutputDelta(name, "x", pack(range(tokens)), 0, 0))
        for name in three[:2]:
            fed.port.deliver(OutputDelta(name, "", b"", 0, 0, "length"))
        assert longest()[:2] == ["0.0", "0.0"]
    assert longest()[:2] == ["1.0", "9.0"]  # the third's client left: it is over, and not counted


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (408, "timeout", "abort"),
        (429, "queue_full", "refused"),
        (503, "starting", "refused"),
        (503, "draining", "refused"),
        (499, "", "refused"),
        (500, "request_failed", "error"),
        (503, "shutting_down", "error"),
    ],
)
async def test_failures_count_by_whose_they_are(status: int, code: str, outcome: str) -> None:
    fed, sink = Fed(), Errors()
    metrics = Metrics(Health([]))
    fed.port = RequestSessions(metrics)
    fed.port.bind(fed.take)
    async with fed.port.open([Call("r", RequestParams(), text="x")], sink):
        fed.port.deliver(Failed("r", status, "no", code=code))
    assert sink.failures == [(0, status)] and fed.hung_up == []
    line = f'pipeinfer_requests_total{{outcome="{outcome}"}} 1.0'
    assert line in metrics.exposition("")[0].decode().splitlines()


async def test_a_server_that_stops_tells_every_request() -> None:
    fed, sink = Fed(), Errors()
    async with fed.port.open([Call(n, RequestParams(), text="x") for n in "ab"], sink):
        fed.port.fail_all(503, "the server is shutting down")
    assert sink.failures == [(0, 503), (1, 503)]
