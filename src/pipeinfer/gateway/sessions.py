"""Sessions of HTTP requests with the core: calls go in, deltas go to the sinks that wait for them.

Also resets of prefix caches, and sleep, for the HTTP side and the offline classes. Used on one
event loop only. Knows the local events and the metrics, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from pipeinfer.gateway.health import Health, StageStatus
from pipeinfer.gateway.ledger import (
    Call,
    ClientDisconnected,
    Failed,
    OutputDelta,
    SetAdapters,
    Started,
)
from pipeinfer.gateway.metrics import GroupMetrics, Metrics
from pipeinfer.messages import (
    TOKEN_BYTES,
    AdapterChanges,
    CacheReset,
    Message,
    Reattached,
    ResetCache,
    SetSleep,
)
from pipeinfer.params import choice_ids

# Seconds; a group that is started again takes longer, and then has nothing cached.
RESET_TIMEOUT = 10.0


SLEEP_TAGS = ("weights", "kv_cache")  # parts that vLLM wakes one after the other
CANNOT_SLEEP = (
    "{} cannot give its memory back: with --no-keep-memory, on a GPU whose driver exports no "
    "memory, or because its weights are laid out anew when they are loaded"
)
LOOK_SECONDS = 0.02  # between two looks at whether groups sleep, or are awake
REPEAT_SECONDS = 1.0  # after which groups that are not are asked again


async def reach_sleep_level(
    asked: SetSleep, health: Health, feed: Callable[[Message], None]
) -> None:
    """Returns when all groups sleep as asked, or are awake. The message is repeated, because a
    stage that is started again meanwhile may not have got it."""
    feed(asked)
    repeat_at = time.monotonic() + REPEAT_SECONDS
    while not health.sleeps_as(asked):
        await asyncio.sleep(LOOK_SECONDS)
        if time.monotonic() >= repeat_at:
            feed(asked)
            repeat_at += REPEAT_SECONDS


class _PendingReset:
    __slots__ = ("done", "pending")

    def __init__(self, missing: set[int]) -> None:
        self.pending = missing
        self.done = asyncio.Event()


class CacheResets:
    """Resets of prefix caches that wait for answers of groups, by name."""

    def __init__(self) -> None:
        self._waiting: dict[str, _PendingReset] = {}

    async def reset(
        self, feed: Callable[[Message], None], stages: Iterable[StageStatus]
    ) -> set[int]:
        """Asks all groups of `stages` to drop cached prefixes that no request uses.

        Returns the groups that did not answer within RESET_TIMEOUT.
        """
        name = f"reset-{uuid.uuid4().hex}"
        groups = {row.group for row in stages if row.name == "scheduler"}
        reset = self._waiting[name] = _PendingReset(groups)
        try:
            feed(ResetCache(name))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reset.done.wait(), RESET_TIMEOUT)
        finally:
            del self._waiting[name]
        return reset.pending

    def on_answer(self, answer: CacheReset) -> None:
        """Takes a group's answer; an unknown name is no error."""
        reset = self._waiting.get(answer.name)
        if reset is not None:
            reset.pending.discard(answer.group)
            if not reset.pending:
                reset.done.set()


class ResponseSink(Protocol):
    """Takes the events of one HTTP request; `index` numbers its choices. Must not raise."""

    def started(self, index: int, started: Started) -> None: ...

    def delta(self, index: int, delta: OutputDelta) -> None: ...

    def failed(self, index: int, failed: Failed) -> None: ...


# Choices, about, that are sent in one iteration of the loop: a body may have a thousand.
CALLS_AT_ONCE = 16


class _Session:
    """The calls of one HTTP request. live: ids of running choices, in order. failed: one has
    failed."""

    __slots__ = ("failed", "live", "sink")

    def __init__(self, sink: ResponseSink) -> None:
        self.sink = sink
        self.live: dict[str, None] = {}
        self.failed = False


class _PromptChoices:
    """The choices of one prompt. running: how many are not over. longest: output tokens of the
    longest that ended by stop or length, -1 before."""

    __slots__ = ("longest", "running")

    def __init__(self, n: int) -> None:
        self.running = n
        self.longest = -1


class _ChoiceRoute:
    """The way of one choice's events, with its times and counts.

    Attributes:
    - session, sink, index: see _Session and ResponseSink
    - choices: of its prompt
    - arrived, first_output, last_output: seconds
    - tokens: of its output
    - measured: output that comes is new; else it only repeats, for a gateway that has adopted the
      request
    - admitted: whether a group has it
    - prompt_tokens: 0 where another choice has counted them
    - group_metrics: metrics of its group under vLLM's names, None unless wanted
    """

    __slots__ = (
        "admitted",
        "arrived",
        "choices",
        "first_output",
        "group_metrics",
        "index",
        "last_output",
        "measured",
        "prompt_tokens",
        "session",
        "sink",
        "tokens",
    )  # fmt: skip

    def __init__(self, session: _Session, choices: _PromptChoices, index: int, now: float) -> None:
        self.session = session
        self.choices = choices
        self.sink = session.sink
        self.index = index
        self.arrived = self.first_output = self.last_output = now
        self.tokens = self.prompt_tokens = 0
        self.admitted = False
        self.measured = True
        self.group_metrics: GroupMetrics | None = None


class RequestSessions:
    """Routes of all live choices. `bind` the core's feed before the first call."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics = metrics
        self._clock = clock
        self._routes: dict[str, _ChoiceRoute] = {}
        self._feed: Callable[[Message], None] | None = None
        self._resets = CacheResets()

    def bind(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed

    def feed(self, message: Message) -> None:
        """Gives the core a local event."""
        assert self._feed is not None
        self._feed(message)

    @contextlib.asynccontextmanager
    async def open(self, calls: Iterable[Call], sink: ResponseSink) -> AsyncGenerator[None]:
        """Sends the calls, CALLS_AT_ONCE choices in each iteration of the loop; `sink` gets their
        events.

        Choices are numbered through: all of the first call, then those of the second. After a
        failure no more calls are sent, or even built. When the context ends, also by cancellation,
        choices that still run are aborted.
        """
        session, index, sliced = _Session(sink), 0, 0
        try:
            for call in calls:
                self._open(call, session, index)
                index += call.params.n
                if index - sliced >= CALLS_AT_ONCE:
                    sliced = index
                    await asyncio.sleep(0)
                if session.failed:
                    break
            yield
        finally:
            self._hang_up(session)

    def adopt(self, sink: ResponseSink) -> AdoptedSession:
        """A session of requests that another gateway has sent; `sink` gets their events."""
        return AdoptedSession(_Session(sink), self._routes, self._clock, self._hang_up)

    def release(self, request_ids: Iterable[str]) -> None:
        """Ends the requests: no client needs their answers any more."""
        assert self._feed is not None
        for request_id in request_ids:
            self._feed(ClientDisconnected(request_id))

    def claim(self, request_ids: Iterable[str]) -> None:
        """A client has come back for the answers to these requests."""
        assert self._feed is not None
        self._feed(Reattached(tuple(request_ids)))

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests, which go on: another gateway adopts them."""
        for request_id in request_ids:
            route = self._routes.pop(request_id, None)
            if route is not None:
                route.session.live.pop(request_id, None)

    def set_adapters(self, changes: AdapterChanges) -> None:
        """Has the pipeline remember adapters for the gateway that comes after this one."""
        assert self._feed is not None
        self._feed(SetAdapters(changes))

    async def set_sleep(self, asked: SetSleep, health: Health) -> None:
        """See reach_sleep_level."""
        assert self._feed is not None
        await reach_sleep_level(asked, health, self._feed)

    async def reset_caches(self, stages: Iterable[StageStatus]) -> set[int]:
        """Resets the prefix caches of all groups: see CacheResets.reset."""
        assert self._feed is not None
        return await self._resets.reset(self._feed, stages)

    def _open(self, call: Call, session: _Session, index: int) -> None:
        assert self._feed is not None
        now = self._clock()
        choices = _PromptChoices(call.params.n)
        for number, name in enumerate(choice_ids(call.request_id, range(call.params.n))):
            self._routes[name] = _ChoiceRoute(session, choices, index + number, now)
            session.live[name] = None
        self._feed(call)  # may deliver a refusal before it returns

    def _hang_up(self, session: _Session) -> None:
        assert self._feed is not None
        for request_id in list(session.live):
            self._close(request_id, "abort")
            self._feed(ClientDisconnected(request_id))

    def _close(self, request_id: str, outcome: str) -> None:
        route = self._routes.pop(request_id)
        del route.session.live[request_id]
        self._metrics.count_ended(outcome)
        if route.admitted:
            self._record_times(route, outcome)
        choices, group = route.choices, route.group_metrics
        choices.running -= 1
        if group is not None and not choices.running and choices.longest >= 0:
            group.longest.observe(choices.longest)

    def deliver(self, message: Started | OutputDelta | Failed | CacheReset) -> None:
        """Passes an event of the core to its sink; events without a sink are dropped."""
        if isinstance(message, OutputDelta):  # hot path: every token of every stream
            route = self._routes.get(message.request_id)
            if route is None:
                return
            if message.ids and route.measured:
                self._measure_output(route, message)
            if message.finish is not None:
                self._close(message.request_id, message.finish)
            route.sink.delta(route.index, message)
        elif isinstance(message, CacheReset):
            self._resets.on_answer(message)
        else:
            self._deliver_start_or_failure(message)

    def _deliver_start_or_failure(self, message: Started | Failed) -> None:
        route = self._routes.get(message.request_id)
        if route is None:
            return
        if isinstance(message, Started):
            if route.measured:
                self._metrics.prompt_tokens.inc(message.prompt_tokens)
                self._count_started(route, message)
            route.sink.started(route.index, message)
        else:
            route.session.failed = True
            self._close(message.request_id, message.outcome)
            route.sink.failed(route.index, message)

    def fail_all(self, status: int, message: str) -> None:
        """Ends every live request with an error, since the server stops."""
        for request_id in list(self._routes):
            self.deliver(Failed(request_id, status, message, code="shutting_down"))

    def _count_started(self, route: _ChoiceRoute, started: Started) -> None:
        route.admitted = started.group >= 0  # else it is only to be encoded
        route.prompt_tokens = started.prompt_tokens
        if route.admitted and self._metrics.vllm is not None:
            route.group_metrics = self._metrics.vllm.group(started.group)
            route.group_metrics.prompt_tokens += started.prompt_tokens

    def _measure_output(self, route: _ChoiceRoute, delta: OutputDelta) -> None:
        now, tokens, group = self._clock(), len(delta.ids) // TOKEN_BYTES, route.group_metrics
        seconds = now - route.last_output
        if route.tokens:
            self._metrics.inter_token.observe(seconds)
            if group is not None:
                group.inter_token.observe(seconds)
        else:
            route.first_output = now
            self._metrics.time_to_first_token.observe(seconds)
            if group is not None:
                group.time_to_first_token.observe(seconds)
        route.last_output = now
        route.tokens += tokens
        self._metrics.generated_tokens.inc(tokens)
        if group is not None:
            group.output_tokens += tokens

    def _record_times(self, route: _ChoiceRoute, outcome: str) -> None:
        if route.group_metrics is not None and outcome in route.group_metrics.finished:
            route.group_metrics.finished[outcome] += 1
        if outcome not in ("stop", "length"):
            return
        total, decode = self._clock() - route.arrived, route.last_output - route.first_output
        self._metrics.request_seconds.observe(total)
        if route.tokens > 1:
            self._metrics.time_per_output_token.observe(decode / (route.tokens - 1))
        if route.group_metrics is not None:
            route.group_metrics.count_finished(total, decode, route.prompt_tokens, route.tokens)
            route.choices.longest = max(route.choices.longest, route.tokens)


class AdoptedSession:
    """A session of requests that another gateway has sent; an asynchronous context, at whose end
    choices that still run are aborted."""

    def __init__(
        self,
        session: _Session,
        routes: dict[str, _ChoiceRoute],
        clock: Callable[[], float],
        hang_up: Callable[[_Session], None],
    ) -> None:
        self._session = session
        self._routes = routes
        self._clock = clock
        self._hang_up = hang_up

    def add(self, request_ids: Iterable[str], first: int) -> None:
        """More choices, numbered from `first` on."""
        now = self._clock()
        for number, name in enumerate(request_ids, first):
            route = _ChoiceRoute(self._session, _PromptChoices(1), number, now)
            route.measured = False
            self._routes[name] = route
            self._session.live[name] = None

    def measure(self, sink: ResponseSink) -> None:
        """Measures the output from now on, and gives it to `sink`."""
        now = self._clock()
        for name in self._session.live:
            route = self._routes[name]
            route.sink, route.measured, route.last_output = sink, True, now
            route.tokens = 1  # the first one has been measured

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        self._hang_up(self._session)
