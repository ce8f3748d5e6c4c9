"""One group: the server's own scheduler core, engine core and memory, in virtual time.

Every plan and result is a real message; only the device is a step-time model, and messages take no
time.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from pipeinfer.core import LOCAL, StepDone, Tick
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import (
    Admitted,
    Done,
    GroupStatus,
    Message,
    Plan,
    Refused,
    Result,
    Tokens,
    Work,
)
from pipeinfer.params import SamplingParams
from pipeinfer.scheduler.core import SchedulerCore
from pipeinfer.step import Sampled, Step
from pipeinfer.wire import pack
from simulate.arrivals import Arrival
from simulate.deployment import Deployment
from simulate.device import GROUPS, Device
from simulate.step_model import StepModel, attended
from simulate.tally import Tally


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
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        self._to_scheduler(
            Work(
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
        evicted = self._memory.evicted_pages * self._memory.page_size
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
        many, tally = step.decodes, self._tally.groups[self._index]
        tokens = int(step.counts[many:].sum())
        contexts = int(step.starts[:many].sum()) + many
        pairs = attended(step.starts[many:].tolist(), step.counts[many:].tolist())
        ends = self._device.run(now, many, contexts, tokens, pairs)
        self._seen[step.number] = self._device.seen_at
        ids = [self._sampled[slot] for slot in step.slots[step.samples].tolist()]
        done = step_done(step, Sampled.one_each(ids))
        self._steps.append((ends, done))
        tally.steps += 1
        tally.evicted = self._memory.evicted_pages
        tally.prefill += tokens
        tally.decode += many
        tally.busy = self._device.busy

    def _to_clients(self, message: Tokens, now: float) -> list[Message]:
        """Returns what the scheduler hears of it."""
        over: list[str] = []
        for row in message.rows:
            stream = self._streams[row.request_id]
            for _ in range(len(row.ids) // 4):
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
