"""A stage tells what it sees while somebody has asked for it, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import zmq
from test_shell import EchoCore

from pipeinfer import control
from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Listener
from pipeinfer.control import Observed, Watch
from pipeinfer.core import Send
from pipeinfer.messages import Done, Submit, TokenizedRequest
from pipeinfer.observe import observer as observing
from pipeinfer.params import RequestParams
from pipeinfer.runtime.shell import Shell
from pipeinfer.runtime.stage import Stage
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity
from waiting import until

PARAMS = RequestParams(max_tokens=4)


class RoutingCore(EchoCore):
    """Passes every request on to a group as soon as one called `go` comes."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def handle(self, event, now):
        super().handle(event, now)
        if not isinstance(event, Submit):
            return []
        self.waiting.append(event.request_id)
        if event.request_id != "go":
            return [Send("work", "scheduler-0", Done(()))]  # nothing would mean that it is known
        out = [Send("work", "scheduler-0", work(name)) for name in self.waiting]
        self.waiting.clear()
        return out


def work(name: str) -> TokenizedRequest:
    return TokenizedRequest(
        request_id=name, attempt=1, gateway=0, detokenizer=0, prompt_ids=b"", params=PARAMS, seed=1
    )  # fmt: skip


class Watched:
    """A tokenizer's shell, what it has said on `control`, and who talks to it."""

    def __init__(self, context: zmq.Context) -> None:
        topology = topologies.local(Settings(), "inproc://observer-")
        self.core = RoutingCore()
        self.shell = Shell(
            Settings(), topology, Identity("tokenizer"), context,
            lambda _context: Stage(self.core, tick=0.01),
        )  # fmt: skip
        self.asker = Shell(Settings(), topology, Identity("gateway"), context, lambda _: None)
        self.heard: list[Observed] = []
        self.beats: list[object] = []
        self.listener = Listener(topology, context)
        self.listener.listen("tokenizer-0", control.CHANNEL, "telemetry")
        self.listener.start(self._hear)

    def _hear(self, channel, _header, message) -> None:
        (self.heard if channel == control.CHANNEL else self.beats).append(message)

    def watch(self, seconds: float) -> None:
        self.asker.bus.send(Send(control.CHANNEL, "tokenizer-0", Watch(seconds)))

    def submit(self, name: str) -> None:
        submit = Submit(request_id=name, attempt=1, gateway=0, params=PARAMS, seed=1, trace="t")
        self.asker.bus.send(Send("requests", "tokenizer-0", submit))

    async def submitted(self, name: str) -> None:
        self.submit(name)
        await until(lambda: any(getattr(e, "request_id", "") == name for e in self.core.seen))

    @property
    def active(self) -> bool:
        return self.shell._observer.active

    @property
    def spans(self) -> list:
        return [passage for one in self.heard for passage in one.spans]


@asynccontextmanager
async def watched():
    with zmq.Context() as context:
        made = Watched(context)
        running = asyncio.create_task(made.shell.run())
        try:
            await until(lambda: made.beats and made.core.seen)
            yield made
        finally:
            made.shell.stop()
            await running
            made.asker.bus.close()
            made.listener.close()


async def test_what_passes_is_told_while_somebody_looks(monkeypatch):
    monkeypatch.setattr(observing, "PUBLISH_PERIOD", 0.02)
    async with watched() as one:
        await one.submitted("before")
        assert not one.active
        one.watch(30.0)
        await until(lambda: one.active)
        await one.submitted("a")
        await until(lambda: one.spans)
        (going,) = one.spans
        assert (going.request_id, going.ended, going.trace) == ("a", 0.0, "t")
        one.submit("go")
        await until(lambda: len(one.spans) > 1)
        await until(lambda: {"a", "go"} <= {p.request_id for p in one.spans if p.ended})
        over = next(p for p in one.spans if p.request_id == "a" and p.ended)
        assert [moment.name for moment in over.moments] == ["routed"]
        assert going.began == over.began < over.ended
        assert one.heard[0].incarnation == one.shell.incarnation
        assert one.heard[0].stage == "tokenizer-0"
        assert "before" not in {p.request_id for p in one.spans}


async def test_it_ends_by_itself_and_says_nothing_where_there_is_nothing(monkeypatch):
    monkeypatch.setattr(observing, "PUBLISH_PERIOD", 0.01)
    async with watched() as one:
        one.watch(0.05)
        await until(lambda: one.shell._observer._until)  # it may be over before anybody looks
        await until(lambda: not one.active)
        await one.submitted("later")
        one.watch(30.0)
        await until(lambda: one.active)
        one.submit("go")
        await until(lambda: one.spans)
        assert [p.request_id for p in one.spans] == ["go"]
        assert len(one.heard) == 1, "while nothing happened nothing was said"


async def test_senseless_times_are_bounded_or_ignored():
    async with watched() as one:
        for seconds in (-1.0, 0.0, float("nan")):
            one.watch(seconds)
        one.submit("x")
        await until(lambda: one.core.waiting)
        assert not one.active
        one.watch(float("inf"))
        await until(lambda: one.active)
        left = one.shell._observer._until - asyncio.get_running_loop().time()
        assert 0 < left <= observing.MAX_WATCH


async def test_an_error_of_who_only_looks_ends_no_stage(monkeypatch, caplog):
    async with watched() as one:
        one.watch(30.0)
        await until(lambda: one.active)

        def broken(_exchange):
            raise KeyError("of the observer")

        monkeypatch.setattr(one.shell._observer._observer, "on_exchange", broken)
        await one.submitted("a")
        await until(lambda: not one.active)
        assert "nothing is observed" in caplog.text
        await one.submitted("b")
        one.watch(30.0)
        await until(lambda: one.active)


async def test_an_answer_is_bounded_and_the_rest_follows(monkeypatch):
    many = 4 * observing.MAX_SPANS
    monkeypatch.setattr(observing, "PUBLISH_PERIOD", 0.02)
    async with watched() as one:
        one.watch(30.0)
        await until(lambda: one.active)
        for number in range(many):
            one.submit(f"r{number}")
        one.submit("go")
        await until(lambda: sum(p.ended > 0 for p in one.spans) == many + 1)
        assert all(len(told.spans) <= observing.MAX_SPANS for told in one.heard)
        assert {p.request_id for p in one.spans} >= {f"r{n}" for n in range(many)}
