"""The parts that the cores of all stages share: events in, messages out, and common helpers.

A core never reads a clock, opens a socket, draws entropy or spawns a task; its shell does. Here are

- the protocol `Core`, and `Send`, one output of a core;
- local events, which a core gets from its own shell or driver and which never travel on the bus
  (gateway/ledger.py and engine/core.py have those of one stage alone). They are messages, so that
  they can be recorded and replayed;
- `stage_id`, `engine_id` and `stage_number`: ids of stages, made and read;
- recovery: how a new process gets from its neighbours the state of the process before it;
- `PlanFilter`: which plans count if some are published again;
- `remaining_decodes`: the rule by which one more token fits into a request's length;
- `RecentTable`: entries of the last seconds by name; `Deadlines`: of requests, by name;
- `block_hashes`: hashes of the beginnings of prompts, by which routers and caches compare them;
- liveness: how often stages send heartbeats, after how long a silence one counts as lost, and
  `SuspendAwareClock`, by which silence is measured;
- `FairQueue`: waiting items, taken so that clients share by weight and no item starves;
- `Histogram`: durations, as plain numbers that heartbeats can carry.

Knows no stage and no transport.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from pipeinfer.messages import TOKEN_BYTES, Message, Recover, Recovered, State

if TYPE_CHECKING:
    import numpy as np

LOCAL = "local"  # to the stage's own driver: the device of an engine, the HTTP side of a gateway
EVERYONE = ""  # published to all subscribers: plans, telemetry


class Send(NamedTuple):
    """An output of a core: `message` goes to stage `to` ("detokenizer-0") on `channel`."""

    channel: str
    to: str
    message: Message


class Core(Protocol):
    """A stage without its I/O."""

    def handle(self, event: Message, now: float) -> list[Send]:
        """Takes one event at monotonic time `now` (seconds); returns what to send, in order."""
        ...

    def state(self) -> tuple[State, str]:
        """(state, reason) for the heartbeat."""
        ...

    def stats(self) -> dict[str, float]:
        """Statistics for the heartbeat."""
        ...

    def idle(self) -> bool:
        """True when nothing runs: a draining stage may stop."""
        ...


class Tick(Message, frozen=True):
    """A timer of the shell fired."""


class Drain(Message, frozen=True):
    """The stage is to refuse new requests, finish the live ones, and stop."""


class Leave(Message, frozen=True):
    """Another process takes this stage over at once: begin nothing new, hand on what has begun.

    Requests are not finished; the successor gets them from its neighbours. A core that left is idle
    as soon as no step or other work of its own is under way.
    """


class SendFailed(Message, frozen=True):
    """A message about this request could not be sent and never can be; nothing was sent in its
    place.

    Attributes:
    - reason: why it cannot be sent
    """

    request_id: str
    attempt: int
    reason: str


class NewEpoch(Message, frozen=True):
    """To an engine: end the epoch in good order, so that the next one begins with empty memory."""


class Compiled(Message, frozen=True):
    """To an engine: the grammar of Compile(request_id) is compiled, or cannot be because of
    `error`."""

    request_id: str
    error: str = ""


class GraphDue(Message, frozen=True):
    """To an engine: the device had no step for a while, and one more CUDA graph can be captured."""


class StepDone(Message, frozen=True):
    """The device finished step `number`. L: the step's rows of logits (see Step), in their order.

    Attributes:
    - num_sampled: int32 bytes [L], tokens that each row gave
    - token_ids: int32 bytes, row after row
    - seconds: duration of the step; differs between a run and its replay
    - bad: int32 bytes, those of the L rows whose logits were not finite
    - logprobs: log-probs (wire.py) of the ids of rows that ask for them
    - prompt_logprobs: log-probs of the tokens of each of the step's `prompt_logprob_chunks`
    - refused: by row, why the row's grammar allows nothing
    - mask_units: by row, cost of one mask in units (grammars/compiling.py), if it is high or was
    """

    epoch: int
    number: int
    num_sampled: bytes
    token_ids: bytes
    seconds: float = 0.0  # differs between a run and its replay
    bad: bytes = b""
    logprobs: bytes = b""
    prompt_logprobs: tuple[bytes, ...] = ()
    refused: dict[int, str] = {}
    mask_units: dict[int, int] = {}


# ------------------------------------------------------------------------------------ recovery

DIGITS = re.compile("[0-9]{1,9}")
RECOVER_RETRY_SECONDS = 1.0  # seconds after which a peer that has not answered is asked again


class StepNote(Message, frozen=True):
    """The engine's core gave step `number` to the device, at the record's time. When the step ran
    follows from its StepDone: it ended just before that record's time and had begun `seconds`
    earlier.

    Attributes:
    - rows: requests in the step
    - decodes: rows with one token
    - tokens: of all rows
    - sampled: rows that sample
    """

    epoch: int
    number: int
    rows: int
    decodes: int
    tokens: int
    sampled: int


class PagesNote(Message, frozen=True):
    """The engine's core wrote entries of `pages` pages into the page directory: pages that a plan
    has given to requests, or that a step has filled."""

    pages: int


class _StepArrays(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def num_decodes(self) -> int: ...

    @property
    def slots(self) -> Sized: ...

    @property
    def tokens(self) -> Sized: ...

    @property
    def samples(self) -> np.ndarray: ...


def step_note(step: _StepArrays) -> StepNote:
    """The StepNote of an engine's step (step.py, which light stages do not import)."""
    return StepNote(
        step.epoch,
        step.number,
        len(step.slots),
        step.num_decodes,
        len(step.tokens),
        int(step.samples.sum()),
    )


PlanOrder = Literal["next", "repeated", "gap"]
ANY_PLAN = -1


class PlanFilter:
    """Filters the plans of an epoch: each counts once, in the order of their numbers. A plan that
    some rank has missed is published again, with all plans after it, and all ranks receive them.

    Attributes:
    - expected: number of the next plan; ANY_PLAN for a reader that begins amid an epoch
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected

    def take(self, number: int) -> PlanOrder:
        """Classifies plan `number`. "next": the plan counts, and the one after it is expected now.
        "repeated": it has counted before. "gap": a plan before it is missing, so this one will come
        again."""
        if self.expected in (number, ANY_PLAN):
            self.expected = number + 1
            return "next"
        return "repeated" if number < self.expected else "gap"


class RollCall:
    """Asks each of `peers` for its state until it has answered `stage`, a process with
    `incarnation`.

    An answer stands between two Recovered messages, its brackets. Messages queued for the dead
    process may be lost, but only a prefix of the queue. If the opening Recovered arrived,
    everything after it arrives; otherwise the question is repeated.
    """

    def __init__(self, stage: str, incarnation: int, peers: Iterable[str]) -> None:
        self._question = Recover(stage, incarnation)
        self._missing = dict.fromkeys(peers, False)  # True: its answer has begun
        self._ask_at = float("-inf")

    def ask(self, now: float) -> list[Send]:
        """The questions that are due at `now` (seconds); the first time, one to each peer."""
        if not self._missing or now < self._ask_at:
            return []
        self._ask_at = now + RECOVER_RETRY_SECONDS
        return [Send("recovery", peer, self._question) for peer in self._missing]

    def on_recovered(self, bracket: Recovered) -> bool:
        """Takes a bracket of an answer; True if it completes the last answer."""
        if bracket.stage not in self._missing or bracket.incarnation != self._question.incarnation:
            return False
        if bracket.opening:
            self._missing[bracket.stage] = True
            return False
        if not self._missing[bracket.stage]:
            return False
        del self._missing[bracket.stage]
        return not self._missing

    def has_begun(self, peer: str) -> bool:
        """Whether the answer of `peer` has come, or begun to; also True for a stage that is not
        asked.

        Messages of a peer before its answer are ignored: they may be addressed to the previous
        process or come from a dead one. The answer repeats whatever is still valid.
        """
        return self._missing.get(peer, True)

    @property
    def stage(self) -> str:
        """Id of the stage that asks."""
        return self._question.stage

    @property
    def missing(self) -> list[str]:
        """Peers whose answers are not complete."""
        return list(self._missing)

    @property
    def complete(self) -> bool:
        """Whether the answers of all peers are complete."""
        return not self._missing


def bracketed_answer(stage: str, question: Recover, known: Iterable[Send]) -> list[Send]:
    """Returns the answer of `stage` to `question`: the messages `known`, between two brackets."""
    opening = Recovered(stage, question.incarnation, opening=True)
    end = Recovered(stage, question.incarnation)
    return [
        Send("recovery", question.stage, opening),
        *known,
        Send("recovery", question.stage, end),
    ]


def stage_id(name: str, number: int) -> str:
    """The id of the stage called `name` with this group or index, "scheduler-2"; the inverse of
    `stage_number`. Engines have `engine_id`."""
    return f"{name}-{number}"


def engine_id(group: int, rank: int) -> str:
    """The id of the engine with this rank in its group, "engine-0-1"."""
    return f"engine-{group}-{rank}"


def stage_number(stage: str, name: str) -> int | None:
    """The group or index in the id of a stage called `name`: 2 of "scheduler-2". None for any other
    text: a peer may send anything."""
    kind, _, digits = stage.partition("-")
    return int(digits) if kind == name and DIGITS.fullmatch(digits) else None


def highest_random_weight(stages: Sequence[str], key: bytes) -> str:
    """Chooses one of `stages` for `key` by rendezvous hashing (Thaler and Ravishankar, 1996):
    evenly, the same in every process, and without one of the stages only that stage's keys go to
    others."""
    if len(stages) == 1:
        return stages[0]
    digest = blake2b(key, digest_size=16).digest()
    return max(stages, key=lambda stage: blake2b(digest + stage.encode(), digest_size=8).digest())


# ----------------------------------------------------------------------------- limits of lengths

Lengths = TypeVar("Lengths", int, "np.ndarray")


def remaining_decodes(computed: Lengths, max_total: Lengths) -> Lengths:
    """Number of tokens that a request may still decode; 0 or less: none. A decode computes the
    token at position `computed` and samples the next one, so it fits while
    computed + 1 < max_total. The scheduler and the memory manager must decide alike. Hot paths have
    the rule written out, and name this function.

    - computed: tokens of the request that are computed before
    - max_total: most tokens of its prompt and output
    """
    return max_total - computed - 1


# -------------------------------------------------------------------------------- recent entries

Value = TypeVar("Value")
SLICES = 8  # slices of a table's time and size; the oldest is dropped as a whole


class _Span(Generic[Value]):
    """Entries of one slice of time.

    Attributes:
    - begun, last: seconds, when the first and the last entry came
    - values: by name
    """

    __slots__ = ("begun", "last", "values")

    def __init__(self, begun: float) -> None:
        self.begun = self.last = begun
        self.values: dict[str, Value] = {}


class RecentTable(Generic[Value]):
    """Entries by name of the last `seconds`, oldest first, and never more than `max_size`. A full
    table drops its oldest slice and keeps at least the latest seven eighths of `max_size`.

    Entries lie in slices of time, which are dropped whole. A single dict that drops the oldest
    entry for each new one gets holes at its beginning: it grows, and finding the oldest becomes
    slow.
    """

    __slots__ = ("_max_size", "_seconds", "_spans")

    def __init__(self, seconds: float, max_size: int) -> None:
        self._seconds = seconds
        self._max_size = max_size
        self._spans: list[_Span[Value]] = []

    def put(self, name: str, value: Value, now: float) -> None:
        """Sets the entry `name`, in place of an earlier one; `now` in seconds."""
        for span in self._spans:
            span.values.pop(name, None)
        span = self._span(now)
        span.values[name] = value
        span.last = now

    def get(self, name: str) -> Value | None:
        """The latest entry of `name`; None if there is none."""
        for span in self._spans:
            if name in span.values:
                return span.values[name]
        return None

    def items(self) -> Iterator[tuple[str, Value]]:
        """(name, entry) pairs, oldest first."""
        for span in self._spans:
            yield from span.values.items()

    def __contains__(self, name: str) -> bool:
        return any(name in span.values for span in self._spans)

    def __len__(self) -> int:
        return sum(len(span.values) for span in self._spans)

    def _span(self, now: float) -> _Span[Value]:
        """The slice of `now`; drops slices that are too old."""
        spans = self._spans
        while spans and now - spans[0].last >= self._seconds:
            del spans[0]
        full = spans and len(spans[-1].values) >= self._max_size // SLICES
        if not spans or full or now - spans[-1].begun >= self._seconds / SLICES:
            spans.append(_Span(now))
        while len(self) >= self._max_size:
            del spans[0]
        return spans[-1]


HASH_BYTES = 16  # bytes of the hash of a block


def block_hash(parent: bytes, block: bytes) -> bytes:
    """The hash [16] of a block of token ids (int32) after the block with hash `parent`, so it
    stands for all ids up to the block's end. It does not depend on the process."""
    return blake2b(parent + block, digest_size=HASH_BYTES).digest()


def salt_hash(cache_salt: str) -> bytes:
    """The hash [16] of a cache salt: the parent of the first block of a prompt with that salt."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()


def block_hashes(ids: bytes, block_size: int, cache_salt: str) -> list[bytes]:
    """The hash of each whole block of `block_size` ids (int32) of a prompt that begins with
    `ids`."""
    size, parent, hashes = TOKEN_BYTES * block_size, salt_hash(cache_salt), list[bytes]()
    for end in range(size, len(ids) + 1, size):
        parent = block_hash(parent, ids[end - size : end])
        hashes.append(parent)
    return hashes


MAX_STALE = 64  # stale entries of Deadlines, beside as many as there are deadlines


class Deadlines:
    """Deadlines by name, soonest first.

    Kept as a dict beside a heap of (deadline, name). A heap's entry whose name was removed, or has
    another deadline by now, is stale: it is dropped when it comes up, or with all other stale
    entries when there are many.
    """

    __slots__ = ("_deadlines", "_heap")

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, name: str, deadline: float) -> None:
        """Sets the deadline of `name`, in seconds, in place of an earlier one; infinite: none."""
        self.remove(name)
        if deadline < inf:
            self._deadlines[name] = deadline
            heapq.heappush(self._heap, (deadline, name))

    def remove(self, name: str) -> None:
        """Removes the deadline of `name`; no-op if it has none."""
        self._deadlines.pop(name, None)
        if len(self._heap) > 2 * len(self._deadlines) + MAX_STALE:
            self._heap = [(deadline, name) for name, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> Iterator[str]:
        """Removes and yields the names whose deadline has come, soonest first."""
        while self._heap and self._heap[0][0] <= now:
            deadline, name = heapq.heappop(self._heap)
            if self._deadlines.get(name) == deadline:
                del self._deadlines[name]
                yield name


# Seconds between two heartbeats of a stage, up to 50 stages.
HEARTBEAT_SECONDS = 0.5
# Seconds after the beginning of a stage's drain in which it still takes requests: those before it
# sent them without knowing.
LATE_WORK_SECONDS = 2.0
# Multiple of --host-loss: how long requests that only the lost host can continue wait for its
# return. It may have to boot, and to load a model.
GIVE_UP_FACTOR = 10
# Multiple of --host-loss after which state that is kept for a lost host is dropped.
FORGET_FACTOR = 2 * GIVE_UP_FACTOR
# Heartbeats a second of all stages together. All of them reach every gateway, and each GroupStatus
# of a scheduler reaches every tokenizer; reading one takes 0.2 ms on an idle stage.
MAX_HEARTBEAT_RATE = 100
# Seconds. A stage gets a tick twice a second or more often. A stage without a tick for this long
# was stopped, or so busy that answers of other stages wait unread as well.
MAX_TICK_GAP = 1.0


def heartbeat_period(stages: int) -> float:
    """Seconds between two heartbeats of a stage in a deployment of `stages` stages."""
    return max(HEARTBEAT_SECONDS, stages / MAX_HEARTBEAT_RATE)


def silence_limit(stages: int, least: float = 5.0) -> float:
    """Seconds without a heartbeat after which a stage counts as lost, at least `least`."""
    return max(least, 3 * heartbeat_period(stages))


class SuspendAwareClock:
    """A clock that stands still while this process is stopped by a signal or its machine sleeps. So
    no peer counts as late because this process could not read the peer's answer.

    Its time is that of the events, less all but MAX_TICK_GAP seconds of each longer gap between
    ticks.
    """

    def __init__(self) -> None:
        self._slept = 0.0
        self._ticked = float("inf")  # no gap ends before the first tick

    def tick(self, now: float) -> None:
        """Takes a tick of the shell at `now`."""
        self._slept += self._gap(now)
        self._ticked = now

    def at(self, now: float) -> float:
        """The time of this clock at `now`; never less than before."""
        return now - self._slept - self._gap(now)

    def _gap(self, now: float) -> float:
        """Seconds beyond MAX_TICK_GAP since the last tick, in which the process was stopped."""
        return max(now - self._ticked - MAX_TICK_GAP, 0.0)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several clients, in fair order: self-clocked fair queueing (Golestani, 1994) in two
    levels, among hosts and among the clients of a host.

    - A client is a text. The part before the first "/" is its host; without "/", the whole text is.
    - While two hosts have items waiting, the weights taken from both are about the same. The same
      holds for two clients of one host.
    - Items that overtake an item of weight w have together a weight of at most w for each other
      client.
    - A new client has no advantage over a known one.
    """

    def __init__(self) -> None:
        # Not `_Flows[str]()`: that sets `__orig_class__`, which is no plain data for a snapshot.
        self._hosts: _Flows[str] = _Flows()
        self._clients: dict[str, _Flows[T]] = {}  # by host, of hosts with waiting items

    def __len__(self) -> int:
        return len(self._hosts)

    def put(self, client: str, weight: int, item: T) -> None:
        """Adds `item`.

        - client: name of the item's client
        - weight: the item's estimated cost, at least 1
        """
        host = client.partition("/")[0]
        self._hosts.put(host, weight, host)  # a turn of the host; `take` picks the client
        self._clients.setdefault(host, _Flows()).put(client, weight, item)

    def take(self) -> T:
        """Removes and returns the next item. Raises IndexError if there is none."""
        host = self._hosts.take()
        clients = self._clients[host]
        item = clients.take()
        if not len(clients):
            del self._clients[host]
        return item


class _Flows(Generic[T]):
    """Items of several flows, ordered by tag.

    An item's tag is its weight plus the tag of its flow's last item. The clock is the tag that was
    taken last. A flow without waiting items starts at the clock, without credit or debt.
    """

    def __init__(self) -> None:
        self._clock = self._count = 0
        self._items: list[tuple[int, int, str, T]] = []  # a heap: tag, number, flow, item
        self._last: dict[str, tuple[int, int]] = {}  # by flow with items: last tag, num items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, flow: str, weight: int, item: T) -> None:
        last, waiting = self._last.get(flow, (self._clock, 0))
        tag = last + weight
        self._last[flow] = tag, waiting + 1
        self._count += 1
        heapq.heappush(self._items, (tag, self._count, flow, item))

    def take(self) -> T:
        self._clock, _, flow, item = heapq.heappop(self._items)
        last, waiting = self._last.pop(flow)
        if waiting > 1:
            self._last[flow] = last, waiting - 1
        return item


# Upper bounds of buckets in seconds, for latencies of requests. Bounds from 0.3 on are those of
# vLLM's dashboards; the shorter ones resolve the latencies of an idle server.
REQUEST_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# Prefix of statistics by position of draft tokens in their rows: how many were accepted.
ACCEPTED_AT = "accepted_draft_tokens_total_at_"
# Upper bounds of buckets in tokens of a step: vLLM's.
STEP_TOKENS = (1.0, *(8.0 * 2**power for power in range(12)))  # 1, 8, 16, 32, ... 16384


class Histogram:
    """Counts of observations since the start.

    Attributes:
    - bounds: upper bounds of the buckets, ascending, in the observations' unit; the last bucket has
      none
    - counts: observations of each bucket alone, len(bounds) + 1 numbers
    - total: the sum of all observations
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = REQUEST_SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def at_most(self) -> Iterator[tuple[float, int]]:
        """(bound, number of observations at or below it) for each bound; last (infinity, all
        observations).
        """
        upto = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            upto += count
            yield bound, upto

    def statistics(self, name: str) -> dict[str, float]:
        """The histogram as statistics of a heartbeat, under the names of `histogram_names`."""
        values = (*map(float, accumulate(self.counts)), self.total)
        return dict(zip(histogram_names(name, self.bounds), values, strict=True))


@cache
def histogram_names(name: str, bounds: tuple[float, ...] = REQUEST_SECONDS) -> tuple[str, ...]:
    """The names of a histogram's statistics: `NAME_le_BOUND` for each bound, `NAME_count` and
    `NAME_sum`. NAME ends with the unit, such as queue_seconds.
    """
    return *(f"{name}_le_{bound:g}" for bound in bounds), f"{name}_count", f"{name}_sum"


def read_histogram(
    statistics: Mapping[str, float], name: str, bounds: tuple[float, ...] = REQUEST_SECONDS
) -> tuple[list[tuple[float, float]], float] | None:
    """Reads a histogram back from the statistics of a heartbeat.

    Returns (`at_most` pairs, `total`) of the histogram; None if `statistics` have no histogram
    `name`.
    """
    *buckets, count, total = histogram_names(name, bounds)
    if count not in statistics:
        return None
    counts = (statistics.get(one, 0.0) for one in (*buckets, count))
    return list(zip((*bounds, float("inf")), counts, strict=True)), statistics.get(total, 0.0)


# Phases of a takeover, one after the other, since the scheduler noticed that an engine was lost.
# - restart: until the next engine sends Hello
# - begin: until its epoch runs, with the pages that it recovered
# - first_token: until a request has a token
# - last_token: until every request that lost its slot has had a token, or has ended
TakeoverPhase = Literal["restart", "begin", "first_token", "last_token"]
TAKEOVER_PHASES: tuple[TakeoverPhase, ...] = get_args(TakeoverPhase)


def takeover_statistic(phase: TakeoverPhase) -> str:
    """The name of a scheduler's statistic: seconds of that phase of the last takeover."""
    return f"takeover_{phase}_seconds"


def takeover_seconds(statistics: Mapping[str, float]) -> dict[TakeoverPhase, float]:
    """The last takeover in a scheduler's statistics, by phase; empty where there was none."""
    if not statistics.get("takeovers_total"):
        return {}
    return {phase: statistics[takeover_statistic(phase)] for phase in TAKEOVER_PHASES}
