"""What a scheduler's messages say of its requests, from Work to their last row.

Knows messages; nothing of policies. Its steps are read in steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from pipeinfer.core import Send
from pipeinfer.messages import (
    Abort,
    Admitted,
    Begin,
    Delivered,
    Done,
    Message,
    Open,
    Plan,
    Refused,
    StopHit,
    Tokens,
    Work,
)
from pipeinfer.packing import unpack
from pipeinfer.passages.book import Book
from pipeinfer.passages.exchange import Exchange


class _Seat(NamedTuple):
    """Who is in a slot, since which plan."""

    request_id: str
    number: int


def _taken(work: Work, outputs: Sequence[Send]) -> bool:
    """Whether it is a request for this scheduler, and no repeated one."""
    told = (send.message for send in outputs if type(send.message) in (Open, Refused))
    return work.request_id in [getattr(message, "request_id", "") for message in told]


class SchedulerObserver:
    """See Observer."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._slots: dict[int, _Seat] = {}

    def saw(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._takes.get(type(event))
        if taken is not None and (type(event) is not Work or _taken(event, outputs)):
            taken(self, event, began)
        # What a result brought comes first, although its rows are sent behind the next plan: that
        # plan releases the slots of those that the result has ended.
        plans: list[Message] = []
        for send in outputs:
            message = send.message
            if type(message) is Plan:
                plans.append(message)
                continue
            sent = self._sends.get(type(message))
            if sent is not None:
                sent(self, message, ended)
        for plan in plans:
            self._plan(plan, ended)

    # --------------------------------------------------------------------------------------- inputs

    def _work(self, work: Work, at: float) -> None:
        name = work.request_id
        way = self.book.get(name)
        if way is not None and work.attempt <= way.attempt:
            return
        if way is not None:  # sent again by its gateway: it starts over
            way.attempt, way.flowing = work.attempt, False
            others = (item for item in self._slots.items() if item[1].request_id != name)
            self._slots = dict(others)
        self.book.begin(name, at, work.trace, work.attempt)
        self.book.mark(name, at, "queued", prompt_tokens=len(work.prompt_ids) // 4)

    def _abort(self, abort: Abort, at: float) -> None:
        way = self.book.get(abort.request_id)
        if way is not None and way.attempt <= abort.attempt:
            self.book.mark(abort.request_id, at, "aborted")
            self.book.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self.book.end(request_id, at, "abort")

    def _stop_hit(self, hit: StopHit, at: float) -> None:
        way = self.book.get(hit.request_id)
        if way is not None and way.attempt == hit.attempt:
            self.book.mark(hit.request_id, at, "stopped", output_tokens=hit.length)
            self.book.end(hit.request_id, at, "stop")

    def _resumed(self, told: Delivered, at: float) -> None:
        self.book.mark(told.request_id, at, "resumed", output_tokens=len(told.ids) // 4)

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist(), strict=True)
        for slot, cached in pairs:
            seat = self._slots.get(slot)
            if seat is not None and seat.number == admitted.number:
                self.book.amend(seat.request_id, "admitted", cached_tokens=cached)

    # -------------------------------------------------------------------------------------- outputs

    def _tokens(self, tokens: Tokens, at: float) -> None:
        for row in tokens.rows:  # hot path: once for every token of every request
            if self.book.worth_a_look(row.request_id, row.finish) is None:
                continue
            if row.ids:
                self.book.first(row.request_id, at, "first_token")
            if row.finish is not None:
                outputs = row.offset + len(row.ids) // 4
                self.book.finish(
                    row.request_id,
                    at,
                    row.finish,
                    output_tokens=outputs,
                    cached_tokens=row.cached_tokens,
                )

    def _refused(self, refused: Refused, at: float) -> None:
        self.book.mark(refused.request_id, at, "refused", status=refused.status)
        self.book.end(refused.request_id, at, "refused")

    def _handed_over(self, told: Delivered, at: float) -> None:
        self.book.end(told.request_id, at, "handed_over")

    def _begin(self, _begin: Begin, at: float) -> None:
        for seat in self._slots.values():
            self.book.mark(seat.request_id, at, "engine_lost")
        self._slots.clear()

    def _plan(self, plan: Any, at: float) -> None:
        for release in plan.releases:
            seat = self._slots.pop(release.slot, None)
            if seat is not None:  # and has a passage still: one that has ended has none
                outputs = len(release.output_ids) // 4
                self.book.mark(seat.request_id, at, "preempted", since_admitted=outputs)
        for admit in plan.admits:
            self._slots[admit.slot] = _Seat(admit.request_id, plan.number)
            tokens = len(admit.token_ids) // 4
            self.book.mark(admit.request_id, at, "admitted", slot=admit.slot, tokens=tokens)

    _takes: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Work: _work,
        Abort: _abort,
        Done: _done,
        StopHit: _stop_hit,
        Delivered: _resumed,
        Admitted: _admitted,
    }
    _sends: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Tokens: _tokens,
        Refused: _refused,
        Delivered: _handed_over,
        Begin: _begin,
    }
