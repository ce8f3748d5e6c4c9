"""A scheduler and its two ranks over real sockets: what one rank alone does not hear of plans costs
a moment, and neither an epoch nor a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq

from chaos.links import Link
from distributed.test_ranks_agree import LIMIT, SLOTS, Rank
from hash_device import continuation
from pipeinfer.bus.bus import Bus
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import Send, Tick
from pipeinfer.messages import GroupFault, Message, TokenizedRequest, Tokens
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.topology import PORT_OFFSETS, Identity, StageEntry, Topology
from pipeinfer.wire import pack, unpack
from port_rows import port_row

HERE, LINKED = "127.0.0.3", "127.0.0.2"  # where the scheduler listens, and where the link begins
TICK, PACE = 0.01, 10.0  # seconds; and how much faster the cores' time goes than ours
PROMPT, TOKENS = [1, 2, 3], 60


class Pipeline:
    """The scheduler and its ranks. A step of a rank ends when the other one has it, too, as if they
    met in a collective. ids: outputs of the only request."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        options = SchedulerOptions(max_running=SLOTS, max_step_tokens=32, tp=2, watchdog=1e9)
        self.scheduler = SchedulerCore(options)
        self.ranks = [Rank(rank, 2) for rank in range(2)]
        self.faults: list[GroupFault] = []
        self.ids: list[int] = []
        engines = [StageEntry("engine", f"tcp://{HERE}:{port + 4 + 4 * r}", rank=r) for r in (0, 1)]
        places = [
            Topology((StageEntry("scheduler", f"tcp://{host}:{port}"), *engines))
            for host in (HERE, HERE, LINKED)
        ]
        names = [Identity("scheduler"), *(Identity("engine", rank=rank) for rank in (0, 1))]
        self.buses = [Bus(n, 1, place, context) for n, place in zip(names, places, strict=True)]
        for bus in self.buses:
            bus.bind()
        self.buses[0].start(lambda _channel, _header, message: self.feed(message))
        for rank in (0, 1):
            self.buses[1 + rank].listen("scheduler-0", "plan")
            self.buses[1 + rank].start(self._heard_by(rank))

    def _heard_by(self, rank: int) -> Callable[[str, FrameHeader, Message], None]:
        return lambda _channel, _header, message: self.tell(rank, message)

    def feed(self, message: Message) -> None:
        """The scheduler hears it."""
        now = PACE * asyncio.get_running_loop().time()
        for send in self.scheduler.handle(message, now):
            if send.channel == "plan":
                self.buses[0].send(send)
            elif isinstance(send.message, GroupFault):
                self.faults.append(send.message)
            elif isinstance(send.message, Tokens):
                for row in send.message.rows:
                    self.ids += unpack(row.ids).tolist()

    def tell(self, rank: int, message: Message) -> None:
        """The rank hears it."""
        self._answer(rank, self.ranks[rank].take(message))

    def _answer(self, rank: int, said: list[Message]) -> None:
        for message in said:
            self.buses[1 + rank].send(Send("result", "scheduler-0", message))

    async def until(self, condition: Callable[[], object]) -> None:
        """Lets time pass until it holds."""
        async with asyncio.timeout(30):
            while not condition():
                self.feed(Tick())
                for rank in (0, 1):
                    self.tell(rank, Tick())
                while all(rank.steps for rank in self.ranks):
                    for rank in (1, 0):
                        self._answer(rank, self.ranks[rank].compute())
                await asyncio.sleep(TICK)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Pipeline, Link]]:
    """A pipeline with a request that has begun, and the link on which rank 1 hears of plans."""
    port = port_row(12)
    links = {name: Link(LINKED, HERE, port + at) for name, at in PORT_OFFSETS.items()}
    with zmq.Context() as context:
        for link in links.values():
            await link.mend()
        pipeline = Pipeline(context, port)
        await pipeline.until(lambda: pipeline.scheduler.state()[0] == "ready")
        params = RequestParams(max_tokens=TOKENS, ignore_eos=True)
        assert len(PROMPT) + TOKENS < LIMIT
        pipeline.feed(TokenizedRequest("r", 1, 0, 0, pack(PROMPT), params, 0))
        await pipeline.until(lambda: pipeline.ids)
        yield pipeline, links["plan"]
        for link in links.values():
            await link.cut()
        for bus in pipeline.buses:
            bus.close()


async def test_plans_that_one_rank_missed_are_published_again_and_its_sibling_goes_on():
    async with serving() as (pipeline, link):
        first, second = pipeline.ranks
        for _ in range(2):
            await link.cut()
            # It computes no step, and the other one stands in the first that it has not heard of.
            await pipeline.until(lambda: len(first.steps) == 2 and not second.steps)
            assert len(pipeline.ids) < TOKENS
            done = len(pipeline.ids)
            await link.mend()
            await pipeline.until(lambda done=done: len(pipeline.ids) > done or pipeline.faults)
        await pipeline.until(lambda: len(pipeline.ids) == TOKENS or pipeline.faults)
        assert pipeline.faults == []
        assert pipeline.ids == continuation(PROMPT, 0, TOKENS)
        stats = pipeline.scheduler.stats()
        assert stats["epochs_total"] == 1 and stats["repeated_plans_total"] >= 4
