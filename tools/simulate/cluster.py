"""Simulated groups in virtual time: real scheduler and memory, an engine that takes time.

A cluster is the real router with several groups. Settings mean what those of the same names mean.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from pipeinfer.core import HEARTBEAT_SECONDS, LOCAL, StepDone, Tick
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import (
    PROTOCOL,
    Admitted,
    Done,
    GroupStatus,
    Hello,
    Message,
    Plan,
    Refused,
    Result,
    TokenizedRequest,
    Tokens,
    num_ids,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore
from pipeinfer.scheduler.planner import SchedulerOptions
from pipeinfer.step import Sampled, Step
from pipeinfer.step_cost import StepCost, Targets
from pipeinfer.tokenizer.routing import GroupMonitor, GroupRouter
from pipeinfer.wire import pack
from simulate.metrics import Tally
from simulate.step_model import Draws, StepModel, attended
from simulate.workloads import Arrival


@dataclass(frozen=True)
class Deployment:
    """One group. `kv_pages` can hold tokens (the dummy page comes on top); the watchdog is off, for
    nothing hangs in virtual time. `step_cost`: what its engine would say of its steps."""

    kv_pages: int = 20_000
    page_size: int = 16
    max_model_len: int = 32_768
    max_running: int = 256
    max_step_tokens: int = 2048
    mixed_step_tokens: int = 0
    itl_target: float = 0.025
    ttft_target: float = 0.5
    policy: str = "mixed"
    overlap_depth: int = 2
    cache: str = "radix"
    step_cost: StepCost | None = None

    @property
    def options(self) -> SchedulerOptions:
        return SchedulerOptions(
            self.policy, self.overlap_depth, self.max_running, self.max_step_tokens, float("inf"),
            mixed_step_tokens=self.mixed_step_tokens,
            targets=Targets(self.itl_target, self.ttft_target),
        )  # fmt: skip

    @property
    def hello(self) -> Hello:
        """What an engine of this shape would say."""
        return Hello(
            protocol=PROTOCOL,
            version="simulated",
            rank=0,
            tp=1,
            incarnation=1,
            model="simulated",
            page_size=self.page_size,
            pages=self.kv_pages,
            max_slots=self.max_running,
            max_model_len=self.max_model_len,
            attention="none",
            step_cost=self.step_cost,
        )


GROUPS = 1 << 20  # seeds of one run: more than it can have groups


class Device:
    """`free_at`: when the last step that was given to it ends, in virtual seconds; `seen_at`: when
    clients have its tokens. The same `seed` scatters the same steps alike."""

    def __init__(self, model: StepModel, seed: int = 0) -> None:
        self._seconds = model.seconds
        self._turnaround, self._bubble = model.turnaround or (0.0,), model.bubble or (0.0,)
        self._outbound, self._outbound_row = model.outbound or (0.0,), model.outbound_row
        source = random.Random(seed)
        self._random, self._factor = source.random, Draws(model.noise, source).factor
        self.free_at = self.seen_at = 0.0
        self.busy = 0.0  # seconds in steps

    def run(self, now: float, decodes: int, contexts: int, tokens: int, pairs: int) -> float:
        """When a step that is planned `now` ends. Of one without rows: when those before end."""
        if not decodes and not tokens:
            return max(self.free_at, now)
        seconds = self._seconds(decodes, contexts, tokens, pairs)
        seconds *= self._factor(seconds, tokens > 0)
        self.busy += seconds
        chance, outbound = self._random, self._outbound
        waits = self._turnaround if self.free_at <= now else self._bubble
        begin = max(self.free_at, now) + waits[int(chance() * len(waits))]
        self.free_at = begin + seconds
        delay = outbound[int(chance() * len(outbound))] + self._outbound_row * decodes
        # What was sent before arrives before.
        self.seen_at = max(self.seen_at, self.free_at + delay)
        return self.free_at


class _Stream:
    """What a client saw of its request."""

    __slots__ = ("arrival", "last", "tokens")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival, self.last, self.tokens = arrival, 0.0, 0


class Group:
    """A scheduler and its engine. The same `seed` scatters the steps of group `index` alike.

    ended: ids of requests that ended since somebody cleared it.
    """

    def __init__(
        self, index: int, deployment: Deployment, model: StepModel, tally: Tally, seed: int = 0
    ) -> None:
        shape = deployment
        self._memory = MemoryManager(
            1 + shape.kv_pages, shape.page_size, shape.max_running, shape.max_model_len, shape.cache
        )
        self.scheduler = SchedulerCore(deployment.options, index)
        self.engine = EngineCore(deployment.hello, f"scheduler-{index}", self._memory)
        self.ended: list[str] = []
        self._index, self._tally = index, tally
        self._device = Device(model, seed * GROUPS + index)
        self._streams: dict[str, _Stream] = {}
        self._sampled: dict[int, int] = {}  # slot -> the id that its request samples
        self._seen: dict[int, float] = {}  # step -> when clients see it
        self._steps: deque[tuple[float, StepDone]] = deque()
        self._results: deque[tuple[float, Message]] = deque()
        self._to_scheduler(self.engine.handle(Tick(), 0.0)[0].message, 0.0)
        self.run_until(0.0)

    @property
    def next_at(self) -> float:
        """When the next result comes; infinite when nothing is under way."""
        if self._results:
            return self._results[0][0]
        return self._steps[0][0] if self._steps else float("inf")

    def submit(self, arrival: Arrival, now: float) -> None:
        """A request comes; the group has run until `now`, in virtual seconds."""
        self._streams[arrival.id] = _Stream(arrival)
        params = RequestParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        self._to_scheduler(
            TokenizedRequest(
                request_id=arrival.id,
                attempt=1,
                gateway=0,
                detokenizer=0,
                prompt_ids=pack(arrival.prompt),
                params=params,
                seed=0,
            ),
            now,
        )

    def run_until(self, until: float) -> None:
        """Everything that happens by itself up to `until`, included."""
        while (self._results or self._steps) and self.next_at <= until:
            if self._results:
                now, result = self._results.popleft()
                self._to_scheduler(result, now)
            else:
                now, done = self._steps.popleft()
                self._to_engine(done, now)

    def told(self) -> GroupStatus:
        """What its scheduler says of it, with what was evicted until now."""
        evicted = self._memory.num_evicted * self._memory.page_size
        return structs.replace(self.scheduler.status(), evicted=evicted)

    def _to_scheduler(self, message: Message, now: float) -> None:
        waiting: deque[Message] = deque([message])
        seen = now
        if isinstance(message, Result):
            seen = self._seen.pop(message.number, now)
        while waiting:
            for send in self.scheduler.handle(waiting.popleft(), now):
                if send.channel == "plan":
                    waiting += self._to_engine(send.message, now)
                elif isinstance(send.message, Tokens):
                    waiting += self._to_clients(send.message, seen)
                elif isinstance(send.message, Refused):
                    self._tally.groups[self._index].refused += 1
                    self._end(send.message.request_id)
        self._tally.groups[self._index].preemptions = self.scheduler.counts["preemptions"]

    def _to_engine(self, message: Message, now: float) -> list[Message]:
        """Returns what the scheduler hears at once; results wait for their time."""
        if isinstance(message, Plan):
            for admit in message.admits:
                self._sampled[admit.slot] = self._streams[admit.request_id].arrival.sampled_id
        at_once: list[Message] = []
        for send in self.engine.handle(message, now):
            if send.channel == LOCAL:
                assert isinstance(send.message, Compute)
                self._launch(send.message.step, now)
            elif isinstance(send.message, Admitted):
                at_once.append(send.message)
            else:
                self._results.append((now, send.message))
        return at_once

    def _launch(self, step: Step, now: float) -> None:
        many, tally = step.num_decodes, self._tally.groups[self._index]
        tokens = int(step.counts[many:].sum())
        contexts = int(step.starts[:many].sum()) + many
        pairs = attended(step.starts[many:].tolist(), step.counts[many:].tolist())
        ends = self._device.run(now, many, contexts, tokens, pairs)
        self._seen[step.number] = self._device.seen_at
        ids = [self._sampled[slot] for slot in step.slots[step.samples].tolist()]
        done = step_done(step, Sampled.one_each(ids))
        self._steps.append((ends, done))
        tally.steps += 1
        tally.evicted = self._memory.num_evicted
        tally.prefill += tokens
        tally.decode += many
        tally.busy = self._device.busy

    def _to_clients(self, message: Tokens, now: float) -> list[Message]:
        """Returns what the scheduler hears of it."""
        over: list[str] = []
        for row in message.rows:
            stream = self._streams[row.request_id]
            for _ in range(num_ids(row.ids)):
                if stream.tokens:
                    self._tally.gap(now - stream.last)
                else:
                    self._tally.started(self._index, stream.arrival, now, row.cached_tokens)
                stream.tokens += 1
                stream.last = now
            if row.finish is not None:
                arrival = stream.arrival
                self._tally.ended(self._index, arrival, stream.tokens, now)
                over.append(row.request_id)
                self._end(row.request_id)
        return [Done(tuple(over))] if over else []

    def _end(self, request_id: str) -> None:
        del self._streams[request_id]
        self.ended.append(request_id)


FOREVER = float("inf")


class Cluster:
    """`groups` behind `router`, which hears of them as often as in a server."""

    def __init__(self, groups: Sequence[Group], router: GroupRouter) -> None:
        self._groups, self._router = groups, router
        self._watch = GroupMonitor()
        self._due: list[tuple[float, int]] = []  # a group stands here while something is under way
        self._active: set[int] = set(range(len(groups)))  # ran since they were last told of
        self._beat_at = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """All `arrivals`, which come in the order of their times, to their ends."""
        for arrival in arrivals:
            while self._beat_at <= arrival.at:
                self._advance(self._beat_at)
                self._beat()
            self._advance(arrival.at)
            chosen = self._router.choose(arrival.id, arrival.prompt, arrival.output, "")
            idle = self._groups[chosen].next_at == FOREVER
            self._groups[chosen].submit(arrival, arrival.at)
            self._collect(chosen)
            if idle:
                self._wait_for(chosen)
        self._advance(FOREVER)

    def _advance(self, until: float) -> None:
        due = self._due
        while due and due[0][0] <= until:
            index = heapq.heappop(due)[1]
            self._groups[index].run_until(until)
            self._collect(index)
            self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        at = self._groups[index].next_at
        if at < FOREVER:
            heapq.heappush(self._due, (at, index))

    def _collect(self, index: int) -> None:
        self._active.add(index)
        ended = self._groups[index].ended
        for request_id in ended:
            self._router.on_ended(request_id)
        ended.clear()

    def _beat(self) -> None:
        """Says what is new of all groups that did something since the last time."""
        for index in sorted(self._active):
            report = self._watch.on_status(self._groups[index].told(), self._beat_at)
            if report is not None:
                self._router.on_report(index, report)
        self._active.clear()
        self._beat_at += HEARTBEAT_SECONDS
