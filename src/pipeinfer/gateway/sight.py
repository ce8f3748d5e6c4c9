"""What this gateway was told by stages that it watches: steps and ways of requests, for a while.

Somebody has to look, else nothing is asked and nothing is kept. Knows control.py, and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

import msgspec

from pipeinfer.choices import request_of
from pipeinfer.control import Observed, Passage, Prefix, Prefixes, ShowPrefixes, StepMade, Watch
from pipeinfer.messages import Message
from pipeinfer.passages.durations import MINUTE, Durations
from pipeinfer.recent import Recent

WATCH_INTERVAL = 1.0  # seconds
WATCH_SECONDS = 2.5  # seconds for which stages go on when nobody asks again
MOST_STEPS = 30_000  # of a minute; five hundred a second
MOST_REQUESTS = 200
OWNER_LIFETIME, MOST_OWNERS = 3600.0, 4096  # seconds, and requests whose clients are known
ANSWER_TIMEOUT = 2.0  # seconds for answers


class MonitoredStep(msgspec.Struct, frozen=True):
    """A step of a group, or a sum of some, as StepMade."""

    group: int
    at: float
    seconds: float
    decodes: int
    prompt_tokens: int
    target: float
    count: int = 1


class MonitoredRequest(msgspec.Struct):
    """A request, by what gateways saw of it; times are Unix seconds."""

    id: str
    began: float
    ended: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str | None = None


class _RequestEntry:
    """What is kept of a request. `changed`: the number of its last change."""

    __slots__ = ("changed", "request", "spans")

    def __init__(self) -> None:
        self.request: MonitoredRequest | None = None
        self.spans: dict[tuple[str, float], Passage] = {}
        self.changed = 0


class PipelineMonitor:
    """The eyes of one gateway. `stages`: all of the pipeline, its own among them."""

    def __init__(self, stages: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._stages = tuple(stages)
        self._clock = clock
        self._send: Callable[[str, Message], None] | None = None
        self._watchers = 0
        self._watching: asyncio.Task[None] | None = None
        self._steps: deque[tuple[int, MonitoredStep]] = deque(maxlen=MOST_STEPS)
        self._requests: dict[str, _RequestEntry] = {}
        self._durations = Durations(clock)
        self._answers: dict[str, asyncio.Queue[Prefixes]] = {}
        self._owners: Recent[str] = Recent(OWNER_LIFETIME, MOST_OWNERS)
        self.changes = 0  # so many things were seen
        self.leaving = False  # the gateway ends: who looks is to look elsewhere

    # ------------------------------------------------------------------------------ a stage's eyes

    def open(self, ask: Callable[[str, Message], None]) -> None:
        """See Eyes."""
        self._send = ask

    def see(self, message: Observed | Prefixes) -> None:
        """Takes an answer. Nothing is kept unless somebody looks here: another may have asked."""
        if isinstance(message, Prefixes):
            waiting = self._answers.get(message.question)
            if waiting is not None:
                waiting.put_nowait(message)
        elif self._watchers:
            for passage in message.passages:
                self._add_span(passage)
            if message.past:
                self._add_past_steps(message.stage, message.past)
            if message.steps:
                self._add_steps(message.stage, message.steps)

    def close(self) -> None:
        """Asks nobody any more."""
        if self._watching is not None:
            self._watching.cancel()

    # ------------------------------------------------------------------------------------- looking

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """While it lasts, all stages are asked to say what they see."""
        self._watchers += 1
        if self._watchers == 1:
            self._watching = asyncio.get_running_loop().create_task(self._keep_watching())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self.close()
                self._clear()

    async def prefixes(self, engines: Sequence[str], most: int) -> dict[str, tuple[Prefix, ...]]:
        """{engine: its largest prefixes}, of those that answer in time."""
        found: dict[str, tuple[Prefix, ...]] = {}
        async with self._answers_to(f"prefixes-{time.monotonic_ns()}") as (question, answers):
            for engine in engines:
                self._post(engine, ShowPrefixes(question, most))
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

    async def _keep_watching(self) -> None:
        for question in itertools.count():
            for stage in self._stages:
                self._post(
                    stage, Watch(WATCH_SECONDS, past=question < 2)
                )  # the first one may be missed
            await asyncio.sleep(WATCH_INTERVAL)

    def _post(self, stage: str, question: Message) -> None:
        if self._send is not None:
            self._send(stage, question)

    def _clear(self) -> None:
        self._steps.clear()
        self._requests.clear()
        self._durations.clear()

    # --------------------------------------------------------------------------------- what is kept

    def steps_since(self, change: int) -> list[MonitoredStep]:
        """Those of the last minute that came after so many changes, oldest first."""
        oldest = self._clock() - MINUTE
        newer: list[MonitoredStep] = []
        for number, step in reversed(self._steps):
            if number <= change or step.at < oldest:
                break
            newer.append(step)
        return newer[::-1]

    def requests_since(self, change: int, owner: str | None = None) -> list[MonitoredRequest]:
        """Those that are new or have changed since, oldest first; of one client alone, or all."""
        return [
            one.request
            for name, one in self._requests.items()
            if one.request is not None and one.changed > change and self.is_owner(name, owner)
        ]

    def set_owner(self, request_id: str, client: str) -> None:
        """A request that came to this gateway is the client's."""
        self._owners.put(request_id, client, self._clock())

    def is_owner(self, request_id: str, owner: str | None) -> bool:
        """Whether the request, or that of which it is a choice, is its; None owns everything."""
        return owner is None or self._owners.get(request_of(request_id)) == owner

    def spans(self, request_id: str) -> list[Passage]:
        """What is known of a request's way, by when it came to each stage."""
        known = self._requests.get(request_id)
        return [] if known is None else sorted(known.spans.values(), key=lambda one: one.began)

    def latency(self, stage: str) -> float | None:
        """The median seconds of the last minute's requests in a stage; see docs/page.md."""
        return self._durations.median(stage)

    def _add_steps(self, stage: str, steps: Sequence[StepMade]) -> None:
        group = int(stage.rpartition("-")[2])
        for made in steps:
            self.changes += 1
            shown = MonitoredStep(
                group=group,
                at=made.at,
                seconds=made.seconds,
                decodes=made.decodes,
                prompt_tokens=made.prompt_tokens,
                target=made.target,
                count=made.count,
            )
            self._steps.append((self.changes, shown))

    def _add_past_steps(self, stage: str, past: Sequence[StepMade]) -> None:
        """What was before the steps that are known: another gateway may have asked for it."""
        group = int(stage.rpartition("-")[2])
        oldest = min((one.at for _, one in self._steps if one.group == group), default=math.inf)
        self._add_steps(stage, [one for one in past if one.at < oldest])

    def _add_span(self, passage: Passage) -> None:
        self.changes += 1
        known = self._requests.get(passage.request_id)
        if known is None:
            known = self._requests[passage.request_id] = _RequestEntry()
            while len(self._requests) > MOST_REQUESTS:
                del self._requests[next(iter(self._requests))]
        known.spans[passage.stage, passage.began] = passage
        self._durations.note(passage)
        if passage.stage.startswith("gateway-"):
            known.changed = self.changes
            known.request = _monitored_request(passage)


def _monitored_request(passage: Passage) -> MonitoredRequest:
    shown = MonitoredRequest(passage.request_id, passage.began, passage.ended or None)
    shown.finish = passage.outcome or None
    for moment in passage.moments:
        if moment.name == "first_text":
            shown.first_token = moment.at
        shown.prompt_tokens = int(moment.values.get("prompt_tokens", shown.prompt_tokens))
        shown.output_tokens = int(moment.values.get("output_tokens", shown.output_tokens))
    return shown
