"""Grammars that engines compile before a request that needs one is admitted.

Such a request waits apart, and holds nobody up; so does one whose masks cost much, until there is
room for it. Engines compile what they lack at its admission, too, but would keep everybody waiting
then. Of grammars that take long they are asked for one at a time, and clients take turns. Knows
requests; no grammar and no queue of those that may run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeinfer.fair_queue import FairQueue
from pipeinfer.messages import Prepare, Prepared
from pipeinfer.params import StructuredOutputs
from pipeinfer.scheduler.mask_budget import MaskBudget
from pipeinfer.scheduler.request import Request

AGAIN = 1.0  # seconds after which engines are asked anew: a subscription may have been late
KNOWN = 128  # grammars that engines are taken to have; they keep twice as many


@dataclass(slots=True, eq=False)
class Asked:
    """One that engines were asked for. answered: ranks that have it. sent: when, last."""

    prepare: Prepare
    waiting: list[Request] = field(default_factory=list[Request])
    answered: set[int] = field(default_factory=set[int])
    sent: float = float("-inf")


class Preparation:
    """Of one group of `tp` ranks. mask_budget: what their steps may spend on masks."""

    def __init__(self, tp: int) -> None:
        self.mask_budget = MaskBudget()
        self._tp = tp
        self._processes: tuple[int, ...] = ()
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._asked: dict[str, Asked] = {}  # by the request that first wanted it
        # Those that take long, which engines were not asked for.
        self._slow: FairQueue[str] = FairQueue()
        self._turn = ""  # the one for which they were

    def __len__(self) -> int:
        """Requests that wait."""
        asked = sum(len(one.waiting) for one in self._asked.values())
        return asked + len(self.mask_budget)

    def begin(self, processes: Sequence[int]) -> None:
        """An epoch begins, on engines of these incarnations; new ones know nothing."""
        if tuple(processes) == self._processes:
            return
        self._processes = tuple(processes)
        self._known.clear()
        for one in self._asked.values():
            one.answered.clear()
            one.sent = float("-inf")

    def hold(self, request: Request) -> bool:
        """Whether `request`, which wants to run, has to wait; then it is held."""
        if not self.lacks(request) and not self.mask_budget.hold(request):
            return False
        if request.phase != "preparing":  # for its turn, when the engines were others
            request.move("preparing")
        return True

    def lacks(self, request: Request) -> bool:
        """Whether `request` has to wait, where it waits apart anyway; engines are asked then."""
        spec = request.work.params.structured_outputs
        if spec is None:
            return False
        if spec in self._known:
            self._known.move_to_end(spec)
            return False
        for one in self._asked.values():
            if one.prepare.spec == spec:
                if request not in one.waiting:
                    one.waiting.append(request)
                return True
        slow = request.work.slow_grammar
        prepare = Prepare(request_id=request.id, spec=spec, slow=slow)
        if slow:
            self._slow.put(request.work.client, 1, request.id)
        self._asked[request.id] = Asked(prepare, [request])
        return True

    def forget(self, request: Request) -> None:
        """`request` is over; unknown ones are fine."""
        self.mask_budget.forget(request)
        for key, one in self._asked.items():
            if request in one.waiting:
                one.waiting.remove(request)
                if not one.waiting:
                    del self._asked[key]
                return

    def due(self, now: float) -> Iterator[Prepare]:
        """What engines are to be asked now."""
        while self._turn not in self._asked and len(self._slow):
            self._turn = self._slow.take()
        for key, one in self._asked.items():
            if now - one.sent >= AGAIN and (key == self._turn or not one.prepare.slow):
                one.sent = now
                yield one.prepare

    def answered(self, told: Prepared) -> list[Request]:
        """A rank has it, or cannot have it: those that need not wait any more."""
        if (told.rank, told.incarnation) not in enumerate(self._processes):
            return []
        one = self._asked.get(told.request_id)
        if one is None:
            return []
        one.answered.add(told.rank)
        if len(one.answered) < self._tp and not told.error:
            return []
        del self._asked[told.request_id]
        if not told.error:
            self._known[one.prepare.spec] = None
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return one.waiting
