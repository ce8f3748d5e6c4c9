"""What cannot be sent, or recorded, fails its request; and no peer's wrong name ends a stage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus import frames
from pipeinfer.bus.bus import Bus
from pipeinfer.core import Send, SendFailed
from pipeinfer.demo import demo_path
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.health import expected_stages
from pipeinfer.gateway.ledger import Call, Failed
from pipeinfer.messages import (
    Abort,
    Delivered,
    Heartbeat,
    Recover,
    Recovered,
    Submit,
    TokenizedRequest,
)
from pipeinfer.params import RequestParams
from pipeinfer.replay.traces import first_difference, ignored_fields, load
from pipeinfer.runtime.shell import Shell
from pipeinfer.runtime.stage import Stage, builder
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, Topology
from pipeinfer.trace.format import End, Trace, Unencoded
from pipeinfer.wire import pack
from waiting import until

PARAMS = RequestParams()
MOST = 4_000  # bytes of a frame here


class Client:
    """A driver that keeps what the core says."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def start(self, feed) -> None:
        return

    def deliver(self, message) -> None:
        self.told.append(message)

    async def stop(self) -> None:
        return

    def stats(self) -> dict[str, float]:
        return {}


class Gateway:
    """A gateway's shell and core whose pipeline counts as ready, and a tokenizer's inbox."""

    def __init__(self, context: zmq.Context, settings: Settings, name: str) -> None:
        self.topology = topologies.local(settings, f"inproc://{name}-")
        self.client = Client()
        self.core = GatewayCore(expected_stages(self.topology))
        self.shell = Shell(
            settings, self.topology, Identity("gateway"), context,
            lambda _: Stage(self.core, self.client, tick=60.0),
        )  # fmt: skip
        self.got: list[tuple[int, Any]] = []
        self.tokenizer = Bus(Identity("tokenizer"), 1, self.topology, context)
        self.tokenizer.bind()
        self.tokenizer.start(lambda _channel, header, m: self.got.append((header.seq, m)))

    async def __aenter__(self) -> Gateway:
        self.task = asyncio.create_task(self.shell.run())
        await until(lambda: self.core.status == "starting" and self.shell.built)
        for e in self.topology.entries:
            who = e.identity
            self.shell.handle(
                Heartbeat(who.id, who.name, who.group, who.rank, who.index, 1, 1, "ready")
            )
        assert self.core.status == "ready"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shell.stop()
        await self.task
        self.tokenizer.close()

    def failures(self) -> list[tuple[str, int, str | None]]:
        told = [m for m in self.client.told if isinstance(m, Failed)]
        return [(m.request_id, m.status, m.code) for m in told]

    def submitted(self) -> list[str]:
        return [m.request_id for _, m in self.got if isinstance(m, Submit)]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


async def test_a_request_that_cannot_be_sent_fails_alone_and_replays(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", MOST)
    settings = Settings(record=str(tmp_path))
    with zmq.Context() as context:
        async with Gateway(context, settings, "unsent") as gateway:
            for name, text in (("before", "x"), ("large", "x" * MOST), ("after", "x")):
                gateway.shell.handle(Call(name, PARAMS, text=text))
            assert gateway.failures() == [("large", 500, "request_failed")]
            await until(lambda: gateway.submitted() == ["before", "after"])
            assert Abort("large", 1, "unsent") in [m for _, m in gateway.got]
            requests = [seq for seq, m in gateway.got if isinstance(m, (Submit, Abort))]
            assert requests == [0, 1, 2], "a number was left out, or given twice"
            assert gateway.shell._dropped()["unsent_total"] == 1
    recording = load(next(tmp_path.glob("gateway-*.pitrace")))
    assert any(isinstance(entry.message, SendFailed) for entry in recording.entries)
    assert Unencoded("Submit") in [entry.message for entry in recording.entries]
    again = GatewayCore(expected_stages(gateway.topology))
    for exchange in recording.exchanges():
        sends = again.handle(exchange.input.message, exchange.input.time)
        assert first_difference(exchange, sends, ignored_fields) is None, exchange.input


async def test_a_request_that_cannot_even_be_recorded_fails_alone(tmp_path):
    settings = Settings(record=str(tmp_path))
    with zmq.Context() as context:
        async with Gateway(context, settings, "deep") as gateway:
            gateway.shell.handle(Call("before", PARAMS, text="x"))
            gateway.shell.handle(Call("deep", PARAMS, chat=[], template_arguments=nested(5_000)))
            gateway.shell.handle(Call("odd", PARAMS, text="\ud800"))
            gateway.shell.handle(Call("after", PARAMS, text="x"))
            assert [(n, s) for n, s, _ in gateway.failures()] == [("deep", 500), ("odd", 500)]
            await until(lambda: gateway.submitted() == ["before", "after"])
            assert not gateway.task.done()
    trace = Trace(next(tmp_path.glob("gateway-*.pitrace")))
    messages = [trace.message(record) for record in trace]
    assert isinstance(messages[-1], End) and "a Call cannot be recorded" in messages[-1].reason
    inputs = [m.request_id for m in messages if isinstance(m, Call)]
    assert inputs == ["before"], "what comes after the gap cannot be replayed"


async def test_the_flight_recorder_begins_again_after_what_it_cannot_hold(monkeypatch):
    monkeypatch.setattr("pipeinfer.trace.hook.FLUSH_SECONDS", 0.01)
    monkeypatch.setattr("pipeinfer.trace.hook.CHECK_SECONDS", 0.01)
    with zmq.Context() as context:
        async with Gateway(context, Settings(), "flight") as gateway:
            recorder = gateway.shell._hook._recorder
            before = _begin(recorder)
            gateway.shell.handle(Call("odd", PARAMS, text="\ud800"))
            await until(lambda: _begin(recorder) not in (None, before))
            await until(lambda: any(one.snapshot is not None for one in _segments(recorder)[:1]))


def _segments(recorder) -> list[Any]:
    """None, while it begins again, which its thread does at any time."""
    return list(recorder.ring._segments)


def _begin(recorder) -> float | None:
    return next((segment.header.monotonic for segment in _segments(recorder)), None)


NONSENSE = ("engine-x", "nonsense", "scheduler-999", "scheduler", "gateway-", "", "é-1", "9" * 400)
STAGES = ("gateway", "tokenizer", "scheduler", "detokenizer")


@pytest.mark.parametrize("name", STAGES)
async def test_a_recover_of_nobody_is_counted_and_dropped(name, caplog):
    settings = Settings(model=str(demo_path()))
    topology: Topology = topologies.local(settings, f"inproc://nobody-{name}-")
    client = Client()

    def build(context) -> Stage:
        return Stage(builder(name)(context).core, client, tick=0.01)

    with zmq.Context() as context:
        shell = Shell(settings, topology, Identity(name), context, build)
        task = asyncio.create_task(shell.run())
        await until(lambda: shell.built or task.done())
        peer = Bus(Identity("engine"), 1, topology, context)
        for stage in NONSENSE:
            peer.send(Send("recovery", f"{name}-0", Recover(stage, 1)))
        for stage in topology.ids():  # known, but of a kind that asks nobody here
            peer.send(Send("recovery", f"{name}-0", Recover(stage, 1)))
        peer.send(Send("recovery", f"{name}-0", Recovered("engine-x", 1)))
        peer.send(Send("recovery", f"{name}-0", Delivered("r", 1, b"")))
        peer.send(Send("nowhere", f"{name}-0", Recovered("the last", 1)))
        await until(lambda: shell.bus.reader.bad_frames > len(NONSENSE) or task.done())
        await until(lambda: "nowhere" in caplog.text)
        assert not task.done()
        shell.stop()
        await task
        peer.close()


@pytest.mark.parametrize(
    ("name", "channel", "message"),
    [
        ("tokenizer", "requests", Submit("r", 1, 77, PARAMS, 0, text="hello")),
        ("tokenizer", "requests", Submit("r", 1, -1, PARAMS, 0, text="hello")),
        ("scheduler", "work", TokenizedRequest("r", 1, 0, 77, pack([1, 2]), PARAMS, 0)),
    ],
)
async def test_a_request_for_a_stage_that_there_is_not_ends_nobody(name, channel, message):
    settings = Settings(model=str(demo_path()))
    topology = topologies.local(settings, f"inproc://wrong-{name}-")

    def build(context) -> Stage:
        core = builder(name)(context).core
        return Stage(core, tick=0.01)

    with zmq.Context() as context:
        shell = Shell(settings, topology, Identity(name), context, build)
        task = asyncio.create_task(shell.run())
        peer = Bus(Identity("gateway"), 1, topology, context)
        await until(lambda: shell.built or task.done())
        peer.send(Send(channel, f"{name}-0", message))
        await until(lambda: shell._dropped()["unsent_total"] or task.done())
        assert not task.done()
        shell.stop()
        await task
        peer.close()
