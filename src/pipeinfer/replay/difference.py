"""The first difference between what a core said and what it says now, for one input.

Knows exchanges of entries and what a core returns; nothing of how either came to be.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.core import Send
from pipeinfer.replay.comparison import MISSING, Mismatch, Skips, first_mismatch, plain
from pipeinfer.replay.recording import Entry, Exchange
from pipeinfer.trace.notes import Unencoded


@dataclass(frozen=True)
class Difference:
    """seq: of the recorded output that differs, or of the input that gave one too many or too few.

    `cause` is the input; `field` is "" where a whole message is missing or too much.
    """

    seq: int
    channel: str
    field: str
    recorded: object
    replayed: object
    cause: Entry

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        names = ("seq", "channel", "field", "recorded", "replayed")
        return {name: getattr(self, name) for name in names}


def first_difference(
    exchange: Exchange, sends: list[Send], skips: Skips, tail: bool = False
) -> Difference | None:
    """Compares in order. `tail`: the recording may have ended within this exchange, so that missing
    recorded outputs mean nothing."""
    for entry, send in zip(exchange.outputs, sends, strict=False):
        mismatch = _of_one(entry, send, skips)
        if mismatch is not None:
            return Difference(entry.seq, entry.channel, *mismatch, exchange.input)
    if len(sends) > len(exchange.outputs) and not tail:
        extra = sends[len(exchange.outputs)]
        return Difference(
            exchange.input.seq, extra.channel, "", MISSING, plain(extra.message), exchange.input
        )
    if len(exchange.outputs) > len(sends):
        lost = exchange.outputs[len(sends)]
        return Difference(lost.seq, lost.channel, "", plain(lost.message), MISSING, exchange.input)
    return None


def _of_one(entry: Entry, send: Send, skips: Skips) -> Mismatch | None:
    if entry.channel == send.channel and entry.peer == send.to and entry.message == send.message:
        return None  # by far the most, and one comparison in C
    kind, replayed = entry.kind, type(send.message).__name__
    unencoded = isinstance(entry.message, Unencoded)
    if unencoded:
        kind = entry.message.kind
    if kind != replayed:
        return Mismatch("type", kind, replayed)
    for name, one, other in (
        ("channel", entry.channel, send.channel),
        ("to", entry.peer, send.to),
    ):
        if one != other:
            return Mismatch(name, one, other)
    if unencoded:
        return None  # it could not be sent, and nobody knows what it said
    return first_mismatch(entry.message, send.message, skips)
