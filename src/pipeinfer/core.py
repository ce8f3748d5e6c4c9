"""The shape of every stage's core: events in, messages out, nothing else.

A core never reads a clock, opens a socket, draws entropy or spawns a task; its shell does. Knows
no stage and no transport.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pipeinfer.messages import Message, State

LOCAL = "local"  # to the stage's own driver: the device of an engine, the HTTP side of a gateway
EVERYONE = ""  # published to whoever listens: plans, telemetry


class Send(NamedTuple):
    """One output of a core: `message` goes to stage `to` ("detokenizer-0") on `channel`."""

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
