"""What a process sent before another took over its stage is not heard any more."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from listening_core import ListeningCore

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus, Listener
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import Send
from pipeinfer.messages import PROTOCOL, Abort, Fenced, Heartbeat, Message, Recover
from pipeinfer.runtime.shell import ProcessOptions, Shell
from pipeinfer.runtime.stage import (
    NOTICE_INTERVAL,
    FencedOut,
    IncarnationFilter,
    IncarnationNumbers,
    Stage,
    incarnation_after,
)
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity
from waiting import until


async def test_frames_of_a_replaced_process_are_dropped_and_counted(short_path):
    topology = topologies.local(Settings(), f"ipc://{short_path}/")
    core = ListeningCore()
    beats: list[Heartbeat] = []
    with zmq.Context() as context:
        shell = Shell(
            Settings(), topology, Identity("scheduler"), context, lambda _: Stage(core, tick=0.01)
        )
        listener = Listener(topology, context)
        listener.listen("scheduler-0")
        listener.start(lambda _channel, _header, message: beats.append(message))
        old, new = (Bus(Identity("tokenizer"), lives, topology, context) for lives in (1, 2))
        other = Bus(Identity("detokenizer"), 1, topology, context)
        task = asyncio.create_task(shell.run())

        def said(bus: Bus, message: Message, channel: str = "work") -> None:
            bus.send(Send(channel, "scheduler-0", message))

        said(old, Abort("before", 1))
        await until(lambda: core.messages)
        said(new, Recover("tokenizer-0", 2), "recovery")
        await until(lambda: len(core.messages) == 2)
        said(old, Abort("late", 1))
        await until(lambda: beats and beats[-1].stats.get("fenced") == 1)
        said(other, Abort("of somebody else", 1))
        said(new, Abort("after", 1))
        await until(lambda: len(core.messages) == 4)
        names = {m.request_id for m in core.messages if isinstance(m, Abort)}
        assert names == {"before", "of somebody else", "after"}
        assert beats[-1].stats["bad_frames"] == 0
        shell.stop()
        await task
        for bus in (old, new, other):
            bus.close()
        listener.close()


def test_the_newest_process_passes_whatever_its_number_and_whoever_else_is_newer():
    fence = IncarnationFilter()

    def passes(sender: str, incarnation: int) -> bool:
        return fence.accepts(FrameHeader(PROTOCOL, sender, incarnation, 0, 0.0), 0.0)

    assert passes("tokenizer-0", 0) and passes("tokenizer-0", 0)
    assert passes("tokenizer-0", 5) and passes("tokenizer-0", 5)
    assert not passes("tokenizer-0", 4) and passes("tokenizer-1", 4)
    assert passes("tokenizer-0", 5) and fence.dropped == 1


def heard(fence: IncarnationFilter, number: int, now: float) -> Fenced | None:
    """A frame of process `number`; what its sender is told of it."""
    header = FrameHeader(PROTOCOL, "scheduler-0", number, 0, 0.0)
    return None if fence.accepts(header, now) else fence.notice(header, now)


def test_who_is_not_heard_is_told_the_number_that_is_as_long_as_it_speaks():
    fence = IncarnationFilter()
    assert heard(fence, 9, 10.0) is None
    first = heard(fence, 5, 12.0)
    assert first == Fenced(stage="scheduler-0", incarnation=5, newest=9, since=2.0)
    assert heard(fence, 5, 12.0 + NOTICE_INTERVAL / 2) is None
    again = heard(fence, 5, 12.0 + NOTICE_INTERVAL)
    assert again is not None and again.since == 2.0 + NOTICE_INTERVAL
    assert heard(fence, 4, 13.1) is not None, "another process"


@given(
    clocks=st.lists(st.integers(0, 10**19), min_size=1, max_size=6),
    lives=st.lists(st.floats(1.0, 1e6), min_size=6, max_size=6),
    sleeping=st.integers(0, 5),
)
def test_a_stage_is_heard_again_whatever_its_clock_says_and_its_predecessor_never(
    clocks, lives, sleeping
):
    """Processes of one stage, one after the other, each numbered by what its clock says, on hosts
    that know no last number. One of them, `sleeping`, stands still when its successor comes."""
    fence, now = IncarnationFilter(), 0.0
    before: tuple[int, float] | None = None  # the number and the birth of the one that sleeps
    for turn, clock in enumerate(clocks):
        born, number = now, max(clock, 1)
        now += 0.5
        while (told := heard(fence, number, now)) is not None:
            out = FencedOut(told, "gateway-0", age=now - born)
            assert not out.superseded, "nobody has come after it"
            assert str(number) in str(out) and str(out.newest) in str(out)
            born, number = now, incarnation_after(out.newest, clock)
            now += 0.5
        now += lives[turn]
        if before is not None and (told := heard(fence, before[0], now)) is not None:
            assert FencedOut(told, "gateway-0", age=now - before[1]).superseded
        if turn == sleeping:
            before = number, born
        now += 2 * NOTICE_INTERVAL


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(-(10**12), 10**12)), max_size=20)
)
def test_numbers_grow_whatever_the_clock_does(steps):
    now, last = 10**18, {"a": 0, "b": 0}
    numbers = IncarnationNumbers(lambda: now)
    for stage, more in steps:
        now += more
        greatest = numbers.now()
        given_ = numbers.next(last[stage])
        assert given_ > greatest >= max(last.values()) and given_ >= now
        last[stage] = given_


@pytest.mark.parametrize("number", [1, 3])
async def test_a_process_that_is_fenced_out_says_so_and_ends(short_path, caplog, number):
    """Number 1 is not heard, since 2 was; 3 is, and what others are told does not concern it."""
    topology = topologies.local(Settings(), f"ipc://{short_path}/")
    with zmq.Context() as context:

        def made(name: str, process: ProcessOptions, core: ListeningCore) -> Shell:
            stage = Stage(core, tick=0.01)
            return Shell(Settings(), topology, Identity(name), context, lambda _: stage, process)

        listens, speaks = ListeningCore(), ListeningCore()
        scheduler = made("scheduler", ProcessOptions(), listens)
        tokenizer = made("tokenizer", ProcessOptions(number), speaks)
        tasks = [asyncio.create_task(one.run()) for one in (scheduler, tokenizer)]
        before = Bus(Identity("tokenizer"), 2, topology, context)
        before.send(Send("work", "scheduler-0", Abort("before", 1)))
        await until(lambda: len(listens.messages) == 1)
        tokenizer.bus.send(Send("work", "scheduler-0", Abort("now", 1)))
        if number == 1:
            with pytest.raises(
                FencedOut, match=r"process 1 is fenced out: scheduler-0 .* process 2"
            ):
                await asyncio.wait_for(tasks[1], 30)
            assert "tokenizer-0: process 1 is not heard, process 2 was" in caplog.text
            assert len(listens.messages) == 1
        else:
            await until(lambda: len(listens.messages) == 2)
            before.send(Send("work", "scheduler-0", Abort("late", 1)))
            await until(lambda: scheduler._incarnations.dropped)
            scheduler.bus.send(Send("recovery", "tokenizer-0", Recover("scheduler-0", 1)))
            await until(lambda: speaks.messages)
            assert not tasks[1].done()
        for one in (scheduler, tokenizer):
            one.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        before.close()
