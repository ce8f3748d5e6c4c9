"""Which requests a message is about; for plans and results, which request sits in which slot.

Follows one trace in its order. Knows messages and slots; nothing of files, cores or time.
"""

from __future__ import annotations

from collections import OrderedDict

from pipeinfer.events import StepDone
from pipeinfer.messages import Admit, Admitted, Begin, Plan, Result
from pipeinfer.packing import unpack

REMEMBERED = 64  # plans whose rows are kept: far more than are ever in flight


class Subjects:
    """`of(message)` names the requests of each message, in the order of the trace."""

    def __init__(self) -> None:
        self._slots: dict[int, str] = {}
        self._plans: OrderedDict[tuple[int, int], dict[int, str]] = OrderedDict()

    def of(self, message: object) -> tuple[str, ...]:
        """Ids of the requests, without repeats; empty where a message is about none."""
        match message:
            case Begin():
                self._slots.clear()
                return ()
            case Plan():
                return self._plan(message)
            case Admitted():
                return self._named(message.epoch, message.number, message.slots)
            case Result():
                return self._named(message.epoch, message.number, message.slots)
            case StepDone():
                return tuple(dict.fromkeys(self.rows(message.epoch, message.number).values()))
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            return (request_id,)
        ids = getattr(message, "request_ids", None)
        if ids is not None:
            return tuple(ids)
        rows = getattr(message, "rows", None)
        if isinstance(rows, tuple):
            return tuple(dict.fromkeys(row.request_id for row in rows))
        return ()

    def rows(self, epoch: int, number: int) -> dict[int, str]:
        """{slot: request id} of the rows of a plan that `of` has seen; empty for others."""
        return self._plans.get((epoch, number), {})

    def _plan(self, plan: Plan) -> tuple[str, ...]:
        touched = [self._slots.pop(release.slot, None) for release in plan.releases]
        admitted: list[Admit] = list(plan.admits)
        for admit in admitted:
            self._slots[admit.slot] = admit.request_id
        slots = [*(admit.slot for admit in admitted), *unpack(plan.slots).tolist()]
        rows = {slot: self._slots[slot] for slot in slots if slot in self._slots}
        self._plans[plan.epoch, plan.number] = rows
        if len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)
        ids = [*rows.values(), *(name for name in touched if name is not None)]
        return tuple(dict.fromkeys(ids))

    def _named(self, epoch: int, number: int, slots: bytes) -> tuple[str, ...]:
        rows = self.rows(epoch, number)
        return tuple(dict.fromkeys(rows[s] for s in unpack(slots).tolist() if s in rows))
