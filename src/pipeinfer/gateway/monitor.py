"""The pipeline monitor: rates, steps, requests and cached prefixes, for the web page.

Costs nothing while no page is open. Rates come from heartbeats (docs/reference/statistics.md), the
rest from messages of control.py. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeinfer.control import Observed, Prefix, Prefixes, RequestSpan, ShowPrefixes, StepMade, Watch
from pipeinfer.core import RecentTable
from pipeinfer.gateway.health import Health, StageStatus, describe_takeover
from pipeinfer.gateway.metrics import QUANTILES
from pipeinfer.messages import Message
from pipeinfer.observe.spans import MINUTE, StageDurations
from pipeinfer.params import request_of


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened to a request. `at`: Unix seconds."""

    at: float
    name: str
    values: dict[str, float]


class StageSpan(msgspec.Struct, frozen=True):
    """A request's time in one stage; `ended`: null while it is there."""

    stage: str
    began: float
    ended: float | None
    outcome: str
    moments: list[SpanEvent]


class RequestSpans(msgspec.Struct, frozen=True):
    """A request's spans in all stages, by when it came to each."""

    id: str
    spans: list[StageSpan]


class CachedPrefix(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cached prefix.

    Attributes:
    - tokens: its length
    - sequences: cached sequences that begin with it
    - locks: requests that use it now
    - ids: its first ids, and text: theirs; for an operator, if it is not salted
    """

    tokens: int
    sequences: int
    locks: int
    ids: list[int] | None = None
    text: str | None = None


class GroupPrefixes(msgspec.Struct, frozen=True):
    """The largest prefixes of one group's cache."""

    group: int
    prefixes: list[CachedPrefix]


class CachedPrefixes(msgspec.Struct, frozen=True):
    """The largest cached prefixes of all groups."""

    groups: list[GroupPrefixes]


RATE_WINDOW = 5.0  # seconds over which rates are taken, at all places


class StageSnapshot(msgspec.Struct, frozen=True):
    """A process as the page shows it.

    Attributes:
    - stage, name, group, rank, state, reason, pid: as in the health table
    - up, heard: seconds since it began, and since its last heartbeat
    - restarts: how many
    - last_restart: Unix seconds
    - waiting, running: requests in its queue, and those it works on
    - rate: what it did in a second, in `unit`
    - latency_ms: see docs/page.md
    - takeover: of a scheduler, how its last lost engine was replaced; "" where none was
    """

    stage: str
    name: str
    group: int
    rank: int
    state: str
    reason: str
    pid: int
    up: float | None
    restarts: int
    last_restart: float | None
    heard: float | None
    waiting: int | None
    running: int | None
    rate: float
    unit: str
    latency_ms: float | None = None
    takeover: str = ""


class EdgeSnapshot(msgspec.Struct, frozen=True):
    """The traffic from one kind of stage to another, in a second."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    rate: float
    unit: str


class KvPagesSnapshot(msgspec.Struct, frozen=True):
    """KV pages of a group.

    Attributes:
    - cached: may be evicted
    - used: may not
    - page_tokens: tokens of one page
    """

    group: int
    total: int
    free: int
    cached: int
    used: int
    page_tokens: int


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """Milliseconds over the last minute; None where nothing was measured. count: of
    measurements."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    count: int = 0


class PipelineSnapshot(msgspec.Struct, frozen=True):
    """The pipeline as the page shows it at one moment, without steps and requests.

    Attributes:
    - status, reason: as /health
    - stages, edges: of all kinds
    - pages: of each group
    - latency: {"ttft_ms" or "itl_ms": quantiles}
    - tokens_per_s: sampled, of all groups
    - requests_running, requests_waiting: in slots, and without one, of all schedulers
    """

    status: str
    reason: str
    stages: tuple[StageSnapshot, ...]
    edges: tuple[EdgeSnapshot, ...]
    pages: tuple[KvPagesSnapshot, ...]
    latency: dict[str, LatencyQuantiles]
    tokens_per_s: float
    requests_running: int
    requests_waiting: int


class StageStatistics(NamedTuple):
    """Which statistics of a kind of stage are shown.

    Attributes:
    - counter: grows with what the stage does, counted in `unit`
    - waiting, running: its queue, and what it works on; "" for none
    """

    counter: str
    unit: str
    waiting: str = ""
    running: str = ""


STAGE_STATISTICS = {
    "gateway": StageStatistics("requests_total", "requests/s", "waiting", "running"),
    "tokenizer": StageStatistics("accepted_total", "requests/s", "encoding"),
    "scheduler": StageStatistics("plans_total", "steps/s", "waiting", "running"),
    "engine": StageStatistics("sampled_tokens_total", "tokens/s", "", "slots_used"),
    "detokenizer": StageStatistics("tokens_total", "tokens/s", "", "running"),
}
EDGES = (
    ("gateway", "tokenizer", "gateway", "requests_total", "requests/s"),
    ("tokenizer", "scheduler", "tokenizer", "accepted_total", "requests/s"),
    ("scheduler", "engine", "scheduler", "plans_total", "steps/s"),
    ("scheduler", "detokenizer", "detokenizer", "tokens_total", "tokens/s"),
    ("detokenizer", "gateway", "gateway", "output_tokens_total", "tokens/s"),
)


class _RateWindow:
    """Heartbeats of a stage between which rates are taken.

    beats: (seconds, statistics); the first is the last one that is at least RATE_WINDOW old, if
        any.
    step_time: (seconds of an engine's step, when that was seen).
    """

    __slots__ = ("beats", "incarnation", "step_time")

    def __init__(self) -> None:
        self.beats: deque[tuple[float, Mapping[str, float]]] = deque()
        self.incarnation = 0
        self.step_time: tuple[float, float] | None = None  # an engine's, and when that was seen

    def add(self, row: StageStatus) -> None:
        if row.last_seen is None or (self.beats and row.last_seen == self.beats[-1][0]):
            return
        if row.incarnation != self.incarnation:
            self.beats.clear()
        self.incarnation = row.incarnation
        self.beats.append((row.last_seen, row.stats))
        while len(self.beats) > 1 and self.beats[1][0] <= row.last_seen - RATE_WINDOW:
            self.beats.popleft()
        before = self.beats[-2][1] if len(self.beats) > 1 else row.stats
        if row.stats.get("steps_total", 0.0) > before.get("steps_total", 0.0):
            self.step_time = (
                self.increase("busy_seconds") / self.increase("steps_total"),
                row.last_seen,
            )

    def increase(self, name: str) -> float:
        if not self.beats:
            return 0.0
        return self.beats[-1][1].get(name, 0.0) - self.beats[0][1].get(name, 0.0)

    def rate(self, name: str) -> float:
        seconds = self.beats[-1][0] - self.beats[0][0] if self.beats else 0.0
        return self.increase(name) / seconds if seconds > 0 else 0.0


class PipelineRates:
    """Snapshots of one pipeline from its health table.

    Call `update` as often as rates are wanted: they are those of the last RATE_WINDOW seconds in
    which heartbeats were seen.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._windows = {stage: _RateWindow() for stage in health.stages}

    def update(self) -> None:
        """Takes the heartbeats that have come."""
        for stage, row in self._health.stages.items():
            self._windows[stage].add(row)

    def snapshot(
        self, status: str, now: float, unix: float, latency: Callable[[str], float | None]
    ) -> PipelineSnapshot:
        """The snapshot at monotonic second `now`, Unix second `unix`.

        latency(stage id): seconds, or None where it is not known.
        """
        rows = self._health.stages.values()
        total = self._health.total
        return PipelineSnapshot(
            status=status,
            reason=self._health.reason(),
            stages=tuple(self._stage(row, now, unix, latency(row.stage)) for row in rows),
            edges=tuple(
                EdgeSnapshot(source=source, target=target, rate=self._rate(kind, stat), unit=unit)
                for source, target, kind, stat, unit in EDGES
            ),
            pages=tuple(
                _pages(row)
                for row in rows
                if row.name == "engine" and row.rank == 0 and "pages_total" in row.stats
            ),
            latency={name: self._latency(name) for name in ("ttft_ms", "itl_ms")},
            tokens_per_s=self._rate("engine", "sampled_tokens_total"),
            requests_running=int(total("scheduler", "running")),
            requests_waiting=int(total("scheduler", "waiting")),
        )

    def increase(self, stage: str, name: str) -> float:
        """By how much a statistic of a stage grew in the last RATE_WINDOW seconds."""
        return self._windows[stage].increase(name)

    def rate(self, stage: str, name: str) -> float:
        """The increase of a statistic of a stage in a second, over the last RATE_WINDOW seconds."""
        return self._windows[stage].rate(name)

    def _stage(
        self, row: StageStatus, now: float, unix: float, seconds: float | None
    ) -> StageSnapshot:
        statistics, window = STAGE_STATISTICS[row.name], self._windows[row.stage]
        if (
            row.name == "engine"
            and window.step_time is not None
            and now - window.step_time[1] <= MINUTE
        ):
            seconds = window.step_time[0]
        elif row.name == "gateway" and row.stats.get("ttft_count"):
            seconds = row.stats["ttft_ms_p50"] / 1e3
        since = None if row.restarted_at is None else now - row.restarted_at
        return StageSnapshot(
            stage=row.stage,
            name=row.name,
            group=row.group,
            rank=row.rank,
            state=row.state,
            reason=row.reason,
            pid=row.pid,
            up=row.stats.get("uptime_seconds"),
            restarts=row.restarts,
            last_restart=None if since is None else unix - since,
            heard=None if row.last_seen is None else now - row.last_seen,
            waiting=int(row.stats.get(statistics.waiting, 0)) if statistics.waiting else None,
            running=int(row.stats.get(statistics.running, 0)) if statistics.running else None,
            rate=window.rate(statistics.counter),
            unit=statistics.unit,
            latency_ms=None if seconds is None else seconds * 1e3,
            takeover=describe_takeover(row.stats),
        )

    def _rate(self, kind: str, stat: str) -> float:
        """The rate of a statistic, summed over all groups. Ranks of a group all count the same, so
        only rank 0 is added."""
        rows = self._health.stages.values()
        return sum(
            self._windows[row.stage].rate(stat)
            for row in rows
            if row.name == kind and row.rank == 0
        )

    def _latency(self, name: str) -> LatencyQuantiles:
        """Latency quantiles of the gateway that has measured most: quantiles of several gateways
        cannot be added."""
        gateways = [row.stats for row in self._health.stages.values() if row.name == "gateway"]
        kind = name.removesuffix("_ms")
        best = max(gateways, key=lambda stats: stats.get(f"{kind}_count", 0.0))
        count = int(best.get(f"{kind}_count", 0))
        if not count:
            return LatencyQuantiles()
        p50, p90, p99 = (best[f"{kind}_ms_p{q}"] for q in QUANTILES)
        return LatencyQuantiles(p50, p90, p99, count)


def _pages(row: StageStatus) -> KvPagesSnapshot:
    total, free, cached = (
        int(row.stats.get(name, 0)) for name in ("pages_total", "pages_free", "pages_evictable")
    )
    return KvPagesSnapshot(
        group=row.group,
        total=total,
        free=free,
        cached=cached,
        used=total - free - cached,
        page_tokens=int(row.stats.get("page_tokens", 0)),
    )


POLL_INTERVAL = 1.0  # seconds between two questions to a stage
POLL_LEASE_SECONDS = 2.5  # seconds for which stages send spans after a question
MAX_STEPS = 30_000  # steps that are kept: a minute of five hundred a second
MAX_REQUESTS = 200  # requests that are kept
OWNER_LIFETIME = 3600.0  # seconds for which the client of a request is known
MAX_OWNERS = 4096  # requests whose clients are known
ANSWER_TIMEOUT = 2.0  # seconds for answers


class MonitoredStep(msgspec.Struct, frozen=True):
    """A step of a group, or the sum of `count` steps; fields as in StepMade."""

    group: int
    at: float
    seconds: float
    decodes: int
    prompt_tokens: int
    target: float
    count: int = 1


class MonitoredRequest(msgspec.Struct):
    """A request, by its spans in gateways; times are Unix seconds."""

    id: str
    began: float
    ended: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str | None = None


class _RequestEntry:
    """A request that the monitor keeps.

    Attributes:
    - request: None before a gateway's span came
    - spans: by stage and begin
    - changed: number of the latest change of it
    """

    __slots__ = ("changed", "request", "spans")

    def __init__(self) -> None:
        self.request: MonitoredRequest | None = None
        self.spans: dict[tuple[str, float], RequestSpan] = {}
        self.changed = 0


class PipelineMonitor:
    """Steps and requests of all stages in the last minute or so, as one gateway knows them.

    Stages are asked, and their answers kept, only while there are watchers.

    Attributes:
    - stages: ids of all stages of the pipeline, its own among them
    - changes: number of the latest change
    - leaving: the gateway ends, and feeds are to be opened at another one
    """

    def __init__(self, stages: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._stages = tuple(stages)
        self._clock = clock
        self._send: Callable[[str, Message], None] | None = None
        self._watchers = 0
        self._polling: asyncio.Task[None] | None = None
        self._steps: deque[tuple[int, MonitoredStep]] = deque(maxlen=MAX_STEPS)
        self._requests: dict[str, _RequestEntry] = {}
        self._durations = StageDurations(clock)
        self._answers: dict[str, asyncio.Queue[Prefixes]] = {}
        self._owners: RecentTable[str] = RecentTable(OWNER_LIFETIME, MAX_OWNERS)
        self.changes = 0
        self.leaving = False

    # ----------------------------------------------------------------------- part of a ControlHook

    def open(self, ask: Callable[[str, Message], None]) -> None:
        """See runtime.stage.ControlHook."""
        self._send = ask

    def on_message(self, message: Observed | Prefixes) -> None:
        """Takes an answer; without watchers it is dropped, since another gateway has asked."""
        if isinstance(message, Prefixes):
            waiting = self._answers.get(message.question)
            if waiting is not None:
                waiting.put_nowait(message)
        elif self._watchers:
            for span in message.spans:
                self._add_span(span)
            if message.past:
                self._add_past_steps(message.stage, message.past)
            if message.steps:
                self._add_steps(message.stage, message.steps)

    def close(self) -> None:
        """Stops asking stages for spans."""
        if self._polling is not None:
            self._polling.cancel()

    # ------------------------------------------------------------------------------------ watchers

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """While the context lasts, all stages are asked for their spans and steps."""
        self._watchers += 1
        if self._watchers == 1:
            self._polling = asyncio.get_running_loop().create_task(self._poll_stages())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self.close()
                self._clear()

    async def prefixes(self, engines: Sequence[str], count: int) -> dict[str, tuple[Prefix, ...]]:
        """{engine: its largest prefixes} of the engines that answer within ANSWER_TIMEOUT."""
        found: dict[str, tuple[Prefix, ...]] = {}
        async with self._answers_to(f"prefixes-{time.monotonic_ns()}") as (question, answers):
            for engine in engines:
                self._post(engine, ShowPrefixes(question, count))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    while len(found) < len(engines):
                        answer = await answers.get()
                        found[answer.stage] = answer.prefixes
        return found

    @contextlib.asynccontextmanager
    async def _answers_to(
        self, question: str
    ) -> AsyncGenerator[tuple[str, asyncio.Queue[Prefixes]]]:
        answers = self._answers[question] = asyncio.Queue[Prefixes]()
        try:
            yield question, answers
        finally:
            del self._answers[question]

    async def _poll_stages(self) -> None:
        for question in itertools.count():
            for stage in self._stages:
                # Twice, because the first question may get lost.
                self._post(stage, Watch(POLL_LEASE_SECONDS, past=question < 2))
            await asyncio.sleep(POLL_INTERVAL)

    def _post(self, stage: str, question: Message) -> None:
        if self._send is not None:
            self._send(stage, question)

    def _clear(self) -> None:
        self._steps.clear()
        self._requests.clear()
        self._durations.clear()

    # ------------------------------------------------------------------------- steps and requests

    def steps_since(self, change: int) -> list[MonitoredStep]:
        """Steps of the last minute after change number `change`, oldest first."""
        oldest = self._clock() - MINUTE
        newer: list[MonitoredStep] = []
        for number, step in reversed(self._steps):
            if number <= change or step.at < oldest:
                break
            newer.append(step)
        return newer[::-1]

    def requests_since(self, change: int, owner: str | None = None) -> list[MonitoredRequest]:
        """Requests that changed after `change`, oldest first; of one client, or of all."""
        return [
            one.request
            for name, one in self._requests.items()
            if one.request is not None and one.changed > change and self.is_owner(name, owner)
        ]

    def set_owner(self, request_id: str, client: str) -> None:
        """Notes which client a request belongs to, by its hash. Of requests of other gateways
        their spans say it."""
        self._owners.put(request_id, client, self._clock())

    def is_owner(self, request_id: str, owner: str | None) -> bool:
        """Whether the request, or that of which it is a choice, is `owner`'s; None owns all."""
        return owner is None or self._owners.get(request_of(request_id)) == owner

    def spans(self, request_id: str) -> list[RequestSpan]:
        """The known spans of a request, by when it came to each stage."""
        entry = self._requests.get(request_id)
        return [] if entry is None else sorted(entry.spans.values(), key=lambda span: span.began)

    def latency(self, stage: str) -> float | None:
        """The median seconds of the last minute's requests in a stage; see docs/page.md."""
        return self._durations.median(stage)

    def _add_steps(self, stage: str, steps: Sequence[StepMade]) -> None:
        group = int(stage.rpartition("-")[2])
        for step in steps:
            self.changes += 1
            monitored = MonitoredStep(
                group=group,
                at=step.at,
                seconds=step.seconds,
                decodes=step.decodes,
                prompt_tokens=step.prompt_tokens,
                target=step.target,
                count=step.count,
            )
            self._steps.append((self.changes, monitored))

    def _add_past_steps(self, stage: str, past: Sequence[StepMade]) -> None:
        """Adds steps before those that are known: another gateway may have asked for them."""
        group = int(stage.rpartition("-")[2])
        oldest = min((one.at for _, one in self._steps if one.group == group), default=math.inf)
        self._add_steps(stage, [one for one in past if one.at < oldest])

    def _add_span(self, span: RequestSpan) -> None:
        self.changes += 1
        entry = self._requests.get(span.request_id)
        if entry is None:
            entry = self._requests[span.request_id] = _RequestEntry()
            while len(self._requests) > MAX_REQUESTS:
                del self._requests[next(iter(self._requests))]
        entry.spans[span.stage, span.began] = span
        self._durations.on_span(span)
        if span.stage.startswith("gateway-"):
            if span.client:
                self.set_owner(request_of(span.request_id), span.client)
            entry.changed = self.changes
            entry.request = _monitored_request(span)


def _monitored_request(span: RequestSpan) -> MonitoredRequest:
    request = MonitoredRequest(span.request_id, span.began, span.ended or None)
    request.finish = span.outcome or None
    for event in span.moments:
        if event.name == "first_text":
            request.first_token = event.at
        request.prompt_tokens = int(event.values.get("prompt_tokens", request.prompt_tokens))
        request.output_tokens = int(event.values.get("output_tokens", request.output_tokens))
    return request
