"""How much a step may spend on masks: rows whose masks cost much have turns.

What a mask costs engines count and report. Rows that cost more than their steps may pay have a part
in later steps, and all others go on meanwhile. Plans say who has a part, so that all ranks and
every replay agree. Knows requests; no grammar, no queue and no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable

from pipeinfer.grammars.bounds import COSTLY
from pipeinfer.params import StructuredOutputs
from pipeinfer.scheduler.request import Request

# What costly masks may cost in each step on average, where others run, and where nobody else does;
# in units of work (grammars/work.py). Of ambiguous rules SHARE takes 0.3 to 2 ms of a step, of a
# lexer that is being built, which ends soon, about 60 ms.
SHARE = 6_000
ALONE = 60_000
REMEMBERED = 128  # grammars with costly masks
MOST_DEBT = 64  # steps that masks are paid for, at most
PAID = -1  # in place of a turn: the next mask is paid for


class MaskBudget:
    """Of one group."""

    def __init__(self) -> None:
        self._left = SHARE  # what the next step may spend; below 0: what later ones pay for
        self._prices: OrderedDict[StructuredOutputs, int] = OrderedDict()  # of the costly
        self._waiting: deque[Request] = deque()
        self._turn = 0

    def __len__(self) -> int:
        """Requests that wait for room to begin."""
        return len(self._waiting)

    def hold(self, request: Request) -> bool:
        """Whether `request`, which wants to begin, has to wait; then it is held."""
        if request.mask_turn == PAID or not self._price(request):
            return False
        self._waiting.append(request)
        return True

    def forget(self, request: Request) -> None:
        """`request` is over; unknown ones are fine."""
        if request in self._waiting:
            self._waiting.remove(request)

    def next(self, others: int) -> Request | None:
        """One that may begin now, where so many `others` run or are about to; its first mask is
        paid for."""
        if not self._waiting or (others and self._left <= 0):
            return None
        request = self._waiting.popleft()
        self._left -= self._price(request)
        request.mask_turn = PAID
        return request

    def left_out(self, running: Collection[Request]) -> list[Request]:
        """Those that have no part in the next step, because it cannot pay for their masks."""
        for request in [r for r in running if r.mask_units >= COSTLY]:
            self._remember(request)
        if not self._prices:
            return []
        costly = [r for r in running if not r.prefilling and self._price(r)]
        costly.sort(key=lambda r: r.mask_turn)
        left, out = self._left, list[Request]()
        for at, request in enumerate(costly):
            if left <= 0 and (at or len(costly) < len(running)):
                out.append(request)
            else:
                left -= self._price(request)
        return out

    def spend(self, rows: Iterable[tuple[Request, int]], running: Collection[Request]) -> None:
        """A plan was written with these (request, count) rows."""
        if not self._prices:
            return
        self._turn += 1
        costly = 0
        for request, _ in rows:
            price = 0 if request.prefilling else self._price(request)
            if price:
                costly += 1
                self._left -= price if request.mask_turn != PAID else 0
                request.mask_turn = self._turn
        share = ALONE if costly and all(map(self._price, running)) else SHARE
        self._left = max(min(self._left + share, share), -MOST_DEBT * SHARE)

    def _price(self, request: Request) -> int:
        """What a mask of it costs, as far as that is known; 0 if that is not much."""
        if request.mask_units >= 0:
            return request.mask_units if request.mask_units >= COSTLY else 0
        spec = request.work.params.structured_outputs
        return 0 if spec is None or not self._prices else self._prices.get(spec, 0)

    def _remember(self, request: Request) -> None:
        spec = request.work.params.structured_outputs
        if spec is not None:
            self._prices[spec] = request.mask_units
            self._prices.move_to_end(spec)
            if len(self._prices) > REMEMBERED:
                self._prices.popitem(last=False)
