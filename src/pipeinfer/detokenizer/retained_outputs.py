"""The outputs of retained requests: what their text can be made of again, within bounds of bytes.

- single_tokens: cuts a row so that its pieces are the same however tokens came.
- RetainedOutput, RetainedOutputs: outputs of requests that have ended, until they are released.
- Origins: what else their gateways need, if their tokenizers have died as well.

Knows no decoder, and nothing of who asks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pipeinfer.core import RecentTable
from pipeinfer.messages import (
    TOKEN_BYTES,
    Adopt,
    Delivered,
    OpenStream,
    PromptTokens,
    TokenRow,
    num_ids,
)
from pipeinfer.params import choice_ids

log = logging.getLogger(__name__)

DROPPED_SECONDS = 3600.0  # seconds for which it is remembered that a request was dropped
MAX_DROPPED = 10_000  # dropped requests that are remembered


class OutputBounds(NamedTuple):
    """Bytes of the outputs of retained requests that have ended: of all, and of those of one
    owner."""

    total: int
    per_owner: int


NO_BOUNDS = OutputBounds(2**63, 2**63)


def single_tokens(row: TokenRow, begin: int, logprob_size: int) -> Iterator[TokenRow]:
    """`row` from output token `begin` on, cut into one row for each token that is shown, and one
    for the end. logprob_size: bytes of a token's log-probs."""
    if row.offset > begin:
        yield row  # rows before it were lost
        return
    shown = num_ids(row.ids) - (row.finish == "stop" and row.stop_token is not None)
    for at in range(begin - row.offset, shown):
        yield msgspec.structs.replace(
            row,
            offset=row.offset + at,
            ids=row.ids[TOKEN_BYTES * at : TOKEN_BYTES * (at + 1)],
            finish=None,
            stop_token=None,
            error="",
            logprobs=row.logprobs[logprob_size * at : logprob_size * (at + 1)],
        )
    if row.finish is not None:
        yield msgspec.structs.replace(
            row,
            offset=row.offset + shown,
            ids=row.ids[TOKEN_BYTES * shown :],
            logprobs=row.logprobs[logprob_size * shown :],
        )


class RetainedOutput(NamedTuple):
    """The output of a retained request, of which its text can be made again.

    last: the row with which it ended; None if it goes on. prompts: log-probs of its prompt.
    """

    opened: OpenStream
    prompts: Sequence[PromptTokens]
    delivered: Delivered
    last: TokenRow | None = None

    @property
    def bytes(self) -> int:
        """Bytes that the output occupies in all stages, about."""
        prompts = sum(len(one.ids) + len(one.logprobs) for one in self.prompts)
        delivered, retention = self.delivered, self.opened.retention
        others = 0 if retention is None else len(retention.origin) + retention.kept_bytes
        return OUTPUT_BYTES + others + prompts + len(delivered.ids) + len(delivered.logprobs)

    def row(self) -> TokenRow:
        """All of its tokens."""
        last = self.last or TokenRow(request_id=self.opened.request_id, offset=0, ids=b"")
        delivered = self.delivered
        return msgspec.structs.replace(
            last, offset=0, ids=delivered.ids, logprobs=delivered.logprobs
        )


class Origins:
    """The requests that restarted gateways must learn of: see Retention.origin."""

    def __init__(self, opened: Iterable[OpenStream]) -> None:
        self._of_choices: dict[str, tuple[Adopt, int]] = {}
        for retention in (one.retention for one in opened):
            if retention is None or not retention.origin:
                continue
            try:
                adopt = msgspec.msgpack.decode(retention.origin, type=Adopt)
            except msgspec.MsgspecError as error:  # a peer may say anything
                log.error("what came with %s is no Adopt: %s", retention.stream, error)
                continue
            choices = adopt.submit.choices
            for name, number in zip(
                choice_ids(adopt.submit.request_id, choices), choices, strict=True
            ):
                self._of_choices[name] = adopt, number

    def adopt(self, opened: OpenStream) -> Adopt | None:
        """The Adopt message of one choice; None if it was too large to be kept here."""
        adopt, number = self._of_choices.get(opened.request_id, (None, 0))
        if adopt is None:
            return None
        now = {"attempt": opened.attempt, "choices": (number,), "group": opened.group}
        accepted = adopt.accepted and msgspec.structs.replace(adopt.accepted, **now)
        submit = msgspec.structs.replace(adopt.submit, **now)
        return msgspec.structs.replace(adopt, submit=submit, accepted=accepted)


OUTPUT_BYTES = 1024  # bytes, about, of a retained request beside its ids and log-probs


class DroppedOutput(NamedTuple):
    """A retained request whose output is kept no more, and the index of its gateway."""

    request_id: str
    attempt: int
    gateway: int


class RetainedOutputs:
    """Outputs of retained requests that have ended, oldest first, within bounds.

    bytes: of all. dropped: those that went for their bytes.
    """

    def __init__(self, bounds: OutputBounds) -> None:
        self._bounds = bounds
        self._outputs: dict[str, RetainedOutput] = {}
        self._owners: dict[str, dict[str, int]] = {}  # by owner, bytes by request
        self._owned_bytes: dict[str, int] = {}  # of them, by owner
        self._dropped = RecentTable[DroppedOutput](DROPPED_SECONDS, MAX_DROPPED)
        self.bytes = 0

    def __iter__(self) -> Iterator[RetainedOutput]:
        return iter(self._outputs.values())

    @property
    def dropped(self) -> Iterator[DroppedOutput]:
        return (dropped for _, dropped in self._dropped.items())

    def add(self, output: RetainedOutput, now: float) -> list[DroppedOutput]:
        """Adds an output; returns the outputs that are dropped for it, perhaps this one."""
        name, owner = output.opened.request_id, _owner(output)
        self._outputs[name] = output
        owned = self._owners.setdefault(owner, {})
        owned[name] = output.bytes
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + output.bytes
        self.bytes += output.bytes
        gone: list[DroppedOutput] = []
        while self._owned_bytes.get(owner, 0) > self._bounds.per_owner:
            gone.append(self._drop(next(iter(owned)), now))
        while self.bytes > self._bounds.total:
            gone.append(self._drop(next(iter(self._outputs)), now))
        return gone

    def remove(self, name: str) -> None:
        """Forgets a request; an unknown one is no error."""
        output = self._outputs.pop(name, None)
        if output is None:
            return
        owner = _owner(output)
        owned = self._owners[owner]
        size = owned.pop(name)
        self.bytes -= size
        self._owned_bytes[owner] -= size
        if not owned:
            del self._owners[owner], self._owned_bytes[owner]

    def _drop(self, name: str, now: float) -> DroppedOutput:
        opened = self._outputs[name].opened
        dropped = DroppedOutput(name, opened.attempt, opened.gateway)
        self._dropped.put(name, dropped, now)
        self.remove(name)
        return dropped


def _owner(output: RetainedOutput) -> str:
    assert output.opened.retention is not None
    return output.opened.retention.owner
