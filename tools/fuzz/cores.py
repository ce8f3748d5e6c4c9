"""Messages that make no sense: to new cores, and between a running scheduler and its engine ranks.

An input is a program: each byte chooses what happens next. Ranks are real cores with their real
memory; their device gives zeros. Some of what one tells the other is lost or changed on its way: no
core raises, whatever it is told, and requests end. As long as nobody lies no page is left over that
a half-computed prompt could have had; where prompts are not alike, nothing is deferred.
"""

from __future__ import annotations

import logging
from collections import deque
from random import Random
from typing import Any

import msgspec
import numpy as np

from fuzz import inputs
from fuzz.engines import Wrong
from pipeinfer import topology as topologies
from pipeinfer.bus import frames
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import LOCAL, Compiled, Core, Send, StepDone, Tick
from pipeinfer.engine.core import Compile, Compute, EngineCore
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import (
    PROTOCOL,
    Abort,
    Done,
    GroupFault,
    Hello,
    Message,
    MissedPlan,
    Plan,
    Recovered,
    Refused,
    StopHit,
    TokenizedRequest,
    Tokens,
)
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.runtime.stage import CORE_CHANNELS, NOT_FOR_CORE, StageContext, builder
from pipeinfer.scheduler.core import SchedulerCore
from pipeinfer.scheduler.planner import SchedulerOptions
from pipeinfer.settings import POLICIES, Settings
from pipeinfer.step import Step
from pipeinfer.topology import Identity
from pipeinfer.wire import logprob_bytes, pack

NAMES = tuple(POLICIES)
PAGE_SIZE, SLOTS, LONGEST = 4, 6, 64
TOKENIZER, DETOKENIZER, SCHEDULER = "tokenizer-0", "detokenizer-0", "scheduler-0"
FIRST = 9, 5, 14  # tokens of the requests before the program begins, less one each
PAST = 6  # messages that may come once more
TURNS = 3000  # of an honest end

Way = tuple[str, int]  # a channel, and of which rank


LONGEST_PROGRAM = 600  # bytes of a program


class Program:
    """Numbers out of bytes; zeros, and `over`, when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data[:LONGEST_PROGRAM], 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def below(self, most: int) -> int:
        """0 to most - 1; most is at most 256."""
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1] % most


def run(program: Program) -> None:
    """Carries the program out. Raises Wrong and whatever a core raises."""
    Group(program).run(program)


class Group:
    """Scheduler 0 and its `ranks`. `lied`: somebody was told what nobody said."""

    def __init__(self, program: Program) -> None:
        self._honest = program.below(2) == 0
        self._tp = 1 + (program.below(4) == 0)
        self._pages = (14, 20, 40)[program.below(3)]
        self._budget = (5, 16, 64)[program.below(3)]
        options = SchedulerOptions(
            NAMES[program.below(4)], 1 + program.below(3), SLOTS, self._budget, tp=self._tp
        )
        self.scheduler = SchedulerCore(options, 0, 1, (TOKENIZER,), (DETOKENIZER,))
        self.ranks: list[EngineCore] = []
        self._incarnation = 1
        self._start()
        self._ways: dict[Way, deque[Message]] = {}
        self._past: deque[tuple[Way, Message]] = deque(maxlen=PAST)
        self._steps: dict[int, deque[Step]] = {rank: deque() for rank in range(self._tp)}
        self._open: dict[str, int] = {}  # requests that have not ended, and their attempts
        self._asked = 0
        self._now = 0.0
        self.lied = self._strange = False

    def _start(self) -> None:
        """All ranks anew."""
        self.ranks = []
        for rank in range(self._tp):
            self._incarnation += 1
            hello = Hello(
                protocol=PROTOCOL, version="fuzz", rank=rank, tp=self._tp,
                incarnation=self._incarnation, model="fuzz", page_size=PAGE_SIZE,
                pages=self._pages, max_slots=SLOTS, max_model_len=LONGEST, attention="none",
            )  # fmt: skip
            memory = MemoryManager(self._pages + 1, PAGE_SIZE, SLOTS, LONGEST)
            self.ranks.append(EngineCore(hello, SCHEDULER, memory))

    def run(self, program: Program) -> None:
        """From the beginning to the end."""
        self.begin()
        while not program.over:
            self.happens(program)
        self.end()

    def begin(self) -> None:
        """Until an epoch runs, some requests are admitted, and steps are in flight."""
        for stage in (TOKENIZER, DETOKENIZER):
            for opening in (True, False):
                self._tell(Recovered(stage, 1, opening))
        while self.scheduler.state()[0] != "ready":
            self._tick()
            while self._deliver():
                pass
        for length in FIRST:
            self._ask(length, 8, RequestParams(max_tokens=8, ignore_eos=True))
        for _ in range(4):
            self._deliver()
        if not self._flying():
            raise Wrong("no step is in flight where the program begins")

    def happens(self, program: Program) -> None:
        """The next thing."""
        kind = program.below(24 if self._honest else 32)
        if kind < 10:
            self._deliver(program.below(4))
        elif kind < 17:
            self._finish(program.below(self._tp), program)
        elif kind < 21:
            self._ask_anything(program)
        elif kind < 22:
            self._tick(0.05 * program.below(8))
        elif kind < 23:
            self._lose(program)
        elif kind < 24:
            self._leaves(program)
        elif kind < 28:
            self._lie(program)
        elif kind < 29:
            self._again(program)
        elif kind < 30:
            self._nonsense(program)
        elif program.below(4) == 0:
            self._start()
            self._forget_ways()
            self.lied = True  # its memory is empty; what was promised is not there
        else:
            self._deliver()

    def end(self) -> None:
        """Nobody lies any more: unless there was a message that nobody sends, all requests end."""
        if self._strange:
            self._tick(1.0)
            return
        for _ in range(TURNS):
            if not self._open:
                break
            if not (self._deliver() or self._finish(0) or (self._tp > 1 and self._finish(1))):
                self._tick(0.5)
        else:
            raise Wrong(f"{len(self._open)} requests never ended: {self.scheduler.state()}")

    # ----------------------------------------------------------------------------- what happens

    def _ask_anything(self, program: Program) -> None:
        kind = program.below(8)
        params = RequestParams(
            max_tokens=1 + program.below(16),
            ignore_eos=True,
            logprobs=kind if kind < 2 else None,
            prompt_logprobs=0 if kind == 2 else None,
            structured_outputs=StructuredOutputs(regex="a") if kind == 3 else None,
        )
        self._ask(1 + program.below(30), program.below(3), params)

    def _ask(self, length: int, priority: int, params: RequestParams) -> None:
        """Where nobody lies no two prompts begin alike."""
        self._asked += 1
        name = f"r{self._asked}"
        self._open[name] = 1
        own = 1000 + self._asked if self._honest else self._asked % 3
        ids = pack([own, *range(length)])
        self._tell(
            TokenizedRequest(
                request_id=name, attempt=1, gateway=0, detokenizer=0, prompt_ids=ids,
                params=params, seed=1, priority=priority,
            )
        )  # fmt: skip

    def _leaves(self, program: Program) -> None:
        if not self._open:
            return
        name = list(self._open)[program.below(len(self._open) % 256 or 1)]
        attempt = self._open.pop(name)
        how = program.below(3)
        if how == 0:
            self._tell(Abort(name, attempt))
        elif how == 1:
            self._tell(Done((name,)))
        else:
            self._tell(StopHit(name, attempt, program.below(3)))
            self._tell(Done((name,)))

    def _lose(self, program: Program) -> None:
        """The newest of what was published is lost on its way to one rank."""
        published = self._ways.get(("plan", program.below(self._tp)), deque())
        for _ in range(min(1 + program.below(3), len(published))):
            published.pop()

    def _lie(self, program: Program) -> None:
        """Something is changed in the oldest message of a way, on its way."""
        ways = [way for way, messages in self._ways.items() if messages]
        if not ways:
            return
        way = ways[program.below(len(ways))]
        message = self._ways[way].popleft()
        self.lied = True
        self._strange |= isinstance(message, Hello)  # nobody asks for another one
        self._hear(way, changed(message, way[0], program))

    def _again(self, program: Program) -> None:
        """Something comes once more."""
        if self._past:
            self.lied = True
            self._hear(*self._past[program.below(len(self._past))])

    def _nonsense(self, program: Program) -> None:
        """A message of any kind that a peer may send."""
        source = Random(program.below(256) << 8 | program.below(256))
        channel = source.choice((*CORE_CHANNELS["scheduler"], "plan"))
        message = travelled(channel, inputs.example(channel, source))
        if message is not None:
            self.lied = self._strange = True
            self._hear((channel, 0), message)

    def _tick(self, seconds: float = 0.3) -> None:
        self._now += seconds
        self._tell(Tick())
        for rank in range(self._tp):
            self._tell_rank(rank, Tick())

    def _deliver(self, chosen: int = 0) -> bool:
        """The oldest message of one of the ways; False if there is none."""
        ways = [way for way, messages in self._ways.items() if messages]
        if not ways:
            return False
        way = ways[chosen % len(ways)]
        message = self._ways[way].popleft()
        self._past.append((way, message))
        self._hear(way, message)
        return True

    def _finish(self, rank: int, program: Program | None = None) -> bool:
        """The oldest step of a rank's device ends; False if there is none."""
        steps = self._steps[rank]
        if not steps:
            return False
        bad = program is not None and program.below(32) == 0 and self._tp == 1
        self._tell_rank(rank, ended(steps.popleft(), bad))
        return True

    # ------------------------------------------------------------------------------------- ways

    def _hear(self, way: Way, message: Message) -> None:
        channel, rank = way
        if channel == "plan":
            self._tell_rank(rank % self._tp, message)
        else:
            self._tell(message)

    def _tell(self, message: Message) -> None:
        """The scheduler hears it, and what it sends goes on its way."""
        core = self.scheduler
        for send in handled(core, message, self._now):
            if send.channel == "plan":
                for rank in range(self._tp):
                    self._ways.setdefault(("plan", rank), deque()).append(send.message)
                if isinstance(send.message, Plan) and not isinstance(message, MissedPlan):
                    self._check_plan(send.message)  # it was made now
            elif isinstance(send.message, Tokens):
                for row in send.message.rows:
                    if row.finish is not None and self._open.pop(row.request_id, None):
                        self._ways.setdefault(("work", 0), deque()).append(Done((row.request_id,)))
            elif isinstance(send.message, Refused):
                self._open.pop(send.message.request_id, None)
            elif isinstance(send.message, GroupFault):
                self._start()
                self._forget_ways()
        core.state()
        core.stats()
        # Who finds pages of another keeps them when that one is released, which nobody can know.
        if self._honest and not self.lied and core.stats()["deferred_total"]:
            raise Wrong("a row was deferred that was promised its pages")

    def _tell_rank(self, rank: int, message: Message) -> None:
        for send in handled(self.ranks[rank], message, self._now):
            if send.channel != LOCAL:
                self._ways.setdefault((send.channel, rank), deque()).append(send.message)
            elif isinstance(send.message, Compute):
                self._steps[rank].append(send.message.step)
            elif isinstance(send.message, Compile):
                self._tell_rank(rank, Compiled(send.message.request_id))
        self.ranks[rank].stats()

    def _forget_ways(self) -> None:
        for way, messages in self._ways.items():
            if way[0] in ("plan", "result"):
                messages.clear()
        for steps in self._steps.values():
            steps.clear()

    def _flying(self) -> int:
        return int(self.scheduler.stats()["in_flight"])

    def _check_plan(self, plan: Plan) -> None:
        """What it might have had for a half-computed prompt of it."""
        counts = np.frombuffer(plan.counts, "<i4")
        slots = self.scheduler._engine.slots
        room = self._budget - int(counts.sum())
        part = [r for r in slots.running.values() if r.projected < r.known_len]
        named = set(np.frombuffer(plan.slots, "<i4").tolist())
        if not self.lied and room > 0 and any(request.slot in named for request in part):
            left = slots.credits.available
            if left > 0:
                raise Wrong(f"plan {plan.number} leaves {left} pages and {room} tokens to nobody")


def handled(core: Core, message: Message, now: float) -> list[Send]:
    """What it sends, as the others get it."""
    sends: list[Send] = []
    for send in core.handle(message, now):
        if send.channel != LOCAL:
            body = inputs.encode(send.message)
            decoded = travelled(send.channel, msgspec.Raw(body))
            if decoded is None:
                raise Wrong(f"a {type(send.message).__name__} that nobody can read")
            send = send._replace(message=decoded)
        sends.append(send)
    return sends


def travelled(channel: str, value: Any) -> Message | None:
    """What the bus makes of these plain values; None: they have no frame, or it is dropped."""
    header = inputs.encode(FrameHeader(PROTOCOL, "engine-0-0", 1, 0, 0.0))
    try:
        body = inputs.encode(value)
        return frames.decode([channel.encode(), header, body])[2]
    except (frames.BadFrame, TypeError, ValueError, OverflowError, RecursionError):
        return None


def changed(message: Message, channel: str, program: Program) -> Message:
    """Something else in it: of a number, of bytes, or of anything; as it is, if the bus would not
    bring that."""
    source = Random(program.below(256) << 8 | program.below(256))
    plain = msgspec.msgpack.decode(inputs.encode(message))
    kind = program.below(4)
    places = [at for at, value in enumerate(plain) if isinstance(value, (int, bytes))]
    if kind == 0 or not places:
        plain = inputs.mutated_value(plain, source, inputs.raw)
    else:
        at = source.choice(places)
        plain[at] = other(plain[at], source)
    return travelled(channel, plain) or message


def other(value: int | bytes, source: Random) -> int | bytes:
    """A number nearby or far off; an array with an item more, less or changed, or ragged."""
    if not isinstance(value, bytes):
        near = (value - 1, value + 1, 0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**62, value ^ 1)
        return source.choice(near)
    kind, at = source.randrange(6), source.randrange(len(value) // 4 + 1) * 4
    number = source.choice((0, 1, -1, 3, 1000, 2**31 - 1, -(2**31)))
    item = number.to_bytes(4, "little", signed=True)
    if kind == 0:
        return value[:at]
    if kind == 1:
        return value[:at] + item + value[at:]
    if kind == 2:
        return value + value[:at]
    if kind == 3:
        return value[: max(len(value) - source.randrange(1, 4), 0)]
    return value[:at] + item + value[at + 4 :]


def ended(step: Step, bad: bool) -> StepDone:
    """What a device says of it that samples 7 everywhere; `bad`: the first row has bad logits."""
    rows = int(step.samples.sum())
    counts = np.ones(rows, np.int32)
    wrong = b""
    if bad and rows:
        counts[0], wrong = 0, pack([0])
    asked, logprobs = step.logprobs, b""
    if asked is not None:
        each = zip(asked.rows.tolist(), asked.num_alternatives.tolist(), strict=True)
        logprobs = b"".join([bytes(logprob_bytes(most)) * int(counts[row]) for row, most in each])
    prompts = tuple(
        bytes(len(chunk.ids) * logprob_bytes(chunk.num_alternatives))
        for chunk in step.prompt_logprob_chunks
    )
    return StepDone(
        epoch=step.epoch,
        number=step.number,
        num_sampled=pack(counts),
        token_ids=pack([7] * int(counts.sum())),
        bad=wrong,
        logprobs=logprobs,
        prompt_logprobs=prompts,
    )


STAGES = ("gateway", "tokenizer", "scheduler", "detokenizer")
RUNNING = len(STAGES)  # in place of a stage's number: a program
MOST = 12  # messages of an input
SHARE = 0.7  # of the inputs that are programs


def make() -> Cores:
    """The target."""
    return Cores()


def fresh(name: str) -> Core:
    """The core of a stage of the demo model, as its builder makes it."""
    settings = Settings(port=0, served_model_name="fuzz")
    topology = topologies.local(settings, "inproc://fuzz-")
    context = StageContext(settings, topology, Identity(name), 1, lambda *_: None)
    return builder(name)(context).core


class Cores:
    """See Target."""

    instrumented = (
        "pipeinfer.gateway.core", "pipeinfer.tokenizer.core", "pipeinfer.scheduler.core",
        "pipeinfer.detokenizer.core", "pipeinfer.scheduler.epochs", "pipeinfer.scheduler.policies",
        "pipeinfer.tokenizer.prompts", "pipeinfer.scheduler.engine_state",
        "pipeinfer.scheduler.request", "pipeinfer.scheduler.planner", "pipeinfer.engine.core",
        "pipeinfer.memory.manager",
    )  # fmt: skip

    def __init__(self) -> None:
        logging.getLogger("pipeinfer").setLevel(logging.CRITICAL)
        for name in STAGES:
            fresh(name)  # what is loaded at the first time is no part of an input

    def seeds(self) -> list[bytes]:
        """For each stage one message of each kind, and programs."""
        source = Random(2)
        found = [_program(source.randbytes(length)) for length in (20, 60, 120, 250, 500)]
        for number, name in enumerate(STAGES):
            pieces = [bytes([number])]
            for channel in CORE_CHANNELS[name]:
                for info in inputs.kinds(channel):
                    value = inputs.drawn(info, source)
                    pieces += [channel.encode(), inputs.encode(value)]
            found.append(inputs.joined(pieces))
        return found

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another message in it, or one more."""
        pieces = inputs.parts(data) or [b""]
        number = (pieces[0] or b"\0")[0] % (RUNNING + 1)
        if number == RUNNING:
            program, longest = b"".join(pieces[1:2]), LONGEST_PROGRAM + 1
            return _program(inputs.changed_program(program, source, (1, 3, 8, 24), longest))
        if source.random() < SHARE:
            return _program(source.randbytes(source.randrange(LONGEST_PROGRAM)))
        if len(pieces) > 2 and source.random() < 0.5:
            at = source.randrange((len(pieces) - 1) // 2) * 2 + 2
            pieces[at] = inputs.mutated_message(pieces[at], source)
        else:
            channel = source.choice(CORE_CHANNELS[STAGES[number]])
            body = inputs.encode(inputs.example(channel, source))
            pieces += [channel.encode(), body]
        return inputs.joined(pieces[: 1 + 2 * MOST])

    def one(self, data: bytes) -> None:
        """A fresh core takes the messages, each followed by a tick; or the program runs."""
        pieces = inputs.parts(data)
        if not pieces or not pieces[0]:
            return
        number = pieces[0][0] % (RUNNING + 1)
        if number == RUNNING:
            run(Program(b"".join(pieces[1:2])))
            return
        name = STAGES[number]
        header = inputs.encode(FrameHeader(PROTOCOL, "gateway-0", 1, 0, 0.0))
        core, now = None, 0.0
        for channel, body in zip(pieces[1::2], pieces[2::2], strict=False):
            try:
                heard, _, message = frames.decode([channel, header, body])
            except frames.BadFrame:
                continue
            if heard in CORE_CHANNELS[name] and not isinstance(message, NOT_FOR_CORE.get(name, ())):
                core = core or fresh(name)
                now += 0.2
                core.handle(message, now)
                core.handle(Tick(), now)
                core.state()
                core.stats()

    def close(self) -> None:
        """Nothing was started."""


def _program(data: bytes) -> bytes:
    """An input that is one."""
    return inputs.joined([bytes([RUNNING]), data])
