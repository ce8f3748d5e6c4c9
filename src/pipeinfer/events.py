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


class Unsent(Message, frozen=True):
    """A message of this request could not be sent, and never can be: `reason` says why.

    Nobody else was told anything in its place.
    """

    request_id: str
    attempt: int
    reason: str


class NewEpoch(Message, frozen=True):
    """To an engine: end the epoch in good order, so that what follows begins with empty memory."""


class Compiled(Message, frozen=True):
    """To an engine: the grammar that Compile(request_id) asked for is there, or cannot be because
    of `error`."""

    request_id: str
    error: str = ""


class GraphDue(Message, frozen=True):
    """To an engine: there was no step for a while, and one more CUDA graph can be captured."""


class StepDone(Message, frozen=True):
    """The device finished step `number`. int32 bytes: `counts`, how many tokens each row gave that
    sampled; `token_ids`, row after row; `bad`, those of these rows whose logits were not finite.
    `logprobs`, `prompts`: scores (pipeinfer/logprobs.py) of those ids whose rows ask for them, and
    of each of the chunks whose tokens are scored. `refused`: rows whose grammar allows nothing,
    with the reason. `mask_units`: what masks of rows cost, where that is news."""

    epoch: int
    number: int
    counts: bytes
    token_ids: bytes
    seconds: float = 0.0  # differs between a run and its replay
    bad: bytes = b""
    logprobs: bytes = b""
    prompts: tuple[bytes, ...] = ()
    refused: dict[int, str] = {}
    mask_units: dict[int, int] = {}
