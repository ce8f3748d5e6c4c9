"""What an engine's messages say of the requests in its slots, each from Admit to Release.

Knows messages; nothing of pages or devices. One that was preempted passes once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from pipeinfer.events import StepDone
from pipeinfer.messages import Admitted, Begin, Fault, Plan, Release, Result
from pipeinfer.packing import unpack
from pipeinfer.passages.book import Book
from pipeinfer.passages.exchange import Exchange

MOST_PLANNED = 64  # plans; far more than are ever in flight


class _Waiting(NamedTuple):
    """A request of which no row was computed. `admitted`: the plan's number."""

    request_id: str
    admitted: int


class EngineObserver:
    """See Observer. Of ranks above 0, which send no results, the first row is taken as computed
    when its step is."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._slots: dict[int, str] = {}
        self._waiting: dict[int, _Waiting] = {}  # by slot
        self._rows: dict[int, frozenset[int]] = {}  # slots, by number of the plan
        self._epoch: int | None = None  # None: it takes part in whichever it hears of

    def saw(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        kinds = {type(send.message) for send in outputs}
        if type(event) is Plan:
            self._plan(event, began, ended)
        elif type(event) is Begin:
            self._lose(began)
            self._epoch = event.epoch
        elif type(event) is StepDone and Result not in kinds:
            self._computed(event.number, self._rows.get(event.number, ()), (), ended)
        for send in outputs if kinds & self._sends.keys() else ():
            sent = self._sends.get(type(send.message))
            if sent is not None:
                sent(self, send.message, ended)

    def _plan(self, plan: Plan, began: float, ended: float) -> None:
        if self._epoch not in (None, plan.epoch):
            return
        for release in plan.releases:
            self._release(release, began)
        for admit in plan.admits:
            name = self._slots[admit.slot] = admit.request_id
            self._waiting[admit.slot] = _Waiting(name, plan.number)
            tokens = len(admit.token_ids) // 4
            self.book.begin(name, began, admit.trace)
            self.book.mark(
                name,
                ended,
                "admitted",
                slot=admit.slot,
                tokens=tokens,
                prompt_tokens=admit.prompt_len,
            )
        if self._waiting:
            self._rows[plan.number] = frozenset(unpack(plan.slots).tolist())
            while len(self._rows) > MOST_PLANNED:
                del self._rows[next(iter(self._rows))]

    def _release(self, release: Release, at: float) -> None:
        self._waiting.pop(release.slot, None)
        name = self._slots.pop(release.slot, "")
        self.book.mark(name, at, "released", output_tokens=len(release.output_ids) // 4)
        self.book.end(name, at, "forgotten" if release.forget else "")

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist(), strict=True)
        for slot, cached in pairs:
            if slot in self._slots:
                self.book.amend(self._slots[slot], "admitted", cached_tokens=cached)

    def _result(self, result: Result, at: float) -> None:
        if self._waiting:
            slots, counts = unpack(result.slots).tolist(), unpack(result.counts).tolist()
            self._computed(result.number, slots, counts, at)
        self._rows.pop(result.number, None)

    def _computed(
        self, number: int, slots: Iterable[int], counts: list[int] | tuple[()], at: float
    ) -> None:
        """Step `number` is over. `counts`: tokens of each row, where they are known."""
        for index, slot in enumerate(slots):
            waiting = self._waiting.get(slot)
            if waiting is None or number < waiting.admitted:
                continue  # computed before; or it was somebody else's slot then
            if not counts:
                self.book.mark(waiting.request_id, at, "computed")
            elif counts[index]:
                self.book.mark(waiting.request_id, at, "computed", tokens=counts[index])
            else:
                continue  # deferred
            del self._waiting[slot]

    def _fault(self, _fault: Fault, at: float) -> None:
        self._lose(at)
        self._epoch = -1  # of none, until the next one begins

    def _lose(self, at: float) -> None:
        """It forgets all slots."""
        self._slots.clear()
        self._waiting.clear()
        self._rows.clear()
        self.book.end_all(at, "lost")

    _sends: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Admitted: _admitted,
        Result: _result,
        Fault: _fault,
    }
