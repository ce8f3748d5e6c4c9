"""What a core is told by its own shell and driver; none of it travels on the bus.

Like everything that a core takes it is a message, so that it can be recorded and fed again. Knows
no stage; a stage's own local events lie beside it (gateway/events.py, engine/core.py).
"""

from __future__ import annotations

from pipeinfer.messages import Message


class Tick(Message, frozen=True):
    """A timer of the shell fired."""


class Drain(Message, frozen=True):
    """Refuse what is new, finish what runs."""


class Leave(Message, frozen=True):
    """Another process takes this stage over at once: begin nothing new, hand on what is in hand.

    Requests are not finished; the successor learns them from its neighbours. A core that left is
    idle as soon as nothing of it is under way.
    """


class NewEpoch(Message, frozen=True):
    """To an engine: end the epoch in good order, so that what follows begins with empty memory."""


class StepDone(Message, frozen=True):
    """The device finished step `number`: `token_ids` int32 bytes, one for each row that sampled.
    `bad`: int32 bytes, those of these rows whose logits were not finite; their ids mean nothing."""

    epoch: int
    number: int
    token_ids: bytes
    seconds: float = 0.0  # differs between a run and its replay
    bad: bytes = b""
