"""Messages that are well typed and make no sense, to the core of a stage.

An input names a stage, to whose new core it gives a sequence of (channel, message); or it is a
program for a scheduler and engines in a running epoch (running.py). Whatever ids, stages and
numbers messages hold, a core takes them or drops them. Peers have keys and are of the same version,
so what this finds is less urgent than what strangers reach.
"""

from __future__ import annotations

import logging
from random import Random

from fuzz import mutation, radix, running, wire_values
from pipeinfer.bus import frames
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import Core
from pipeinfer.events import Tick
from pipeinfer.messages import PROTOCOL
from pipeinfer.runtime.stage import CORE_CHANNELS, NOT_FOR_CORE, StageContext, builder
from pipeinfer.settings import Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Identity

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
        "pipeinfer.detokenizer.core", "pipeinfer.scheduler.epochs", "pipeinfer.scheduler.composer",
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
                for info in wire_values.kinds(channel):
                    value = wire_values.examples.drawn(info, source)
                    pieces += [channel.encode(), wire_values.encode(value)]
            found.append(mutation.joined(pieces))
        return found

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another message in it, or one more."""
        pieces = mutation.parts(data) or [b""]
        number = (pieces[0] or b"\0")[0] % (RUNNING + 1)
        if number == RUNNING:
            return _program(radix.changed(b"".join(pieces[1:2]), source))
        if source.random() < SHARE:
            return _program(source.randbytes(source.randrange(radix.LONGEST)))
        if len(pieces) > 2 and source.random() < 0.5:
            at = source.randrange((len(pieces) - 1) // 2) * 2 + 2
            pieces[at] = wire_values.mutated(pieces[at], source)
        else:
            channel = source.choice(CORE_CHANNELS[STAGES[number]])
            body = wire_values.encode(wire_values.example(channel, source))
            pieces += [channel.encode(), body]
        return mutation.joined(pieces[: 1 + 2 * MOST])

    def one(self, data: bytes) -> None:
        """A fresh core takes the messages, each followed by a tick; or the program runs."""
        pieces = mutation.parts(data)
        if not pieces or not pieces[0]:
            return
        number = pieces[0][0] % (RUNNING + 1)
        if number == RUNNING:
            running.run(radix.Program(b"".join(pieces[1:2])))
            return
        name = STAGES[number]
        header = wire_values.encode(FrameHeader(PROTOCOL, "gateway-0", 1, 0, 0.0))
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
    return mutation.joined([bytes([RUNNING]), data])
