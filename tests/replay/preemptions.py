"""Which plans of a recorded scheduler took a request back."""

from __future__ import annotations

from pipeinfer.messages import Abort, Done, Plan, Result, StopHit, Tokens
from pipeinfer.replay.traces import LoadedTrace


def preempting_plans(recording: LoadedTrace) -> dict[int, str]:
    """{seq of the plan: request} of each plan that released a request which was not over: later
    it was admitted again, a step in flight told its tokens, or a stop string or hang-up ended it.
    """
    slots: dict[int, str] = {}
    released: dict[str, int] = {}
    at_once: set[str] = set()  # released since the last result, whose tokens follow the plan
    over: set[str] = set()
    found: dict[int, str] = {}
    for e in recording.entries:
        going_on: list[str] = []
        match e.message:
            case Plan(releases=releases, admits=admits):
                for release in releases:
                    released[slots[release.slot]] = e.seq
                    at_once.add(slots.pop(release.slot))
                for admit in admits:
                    slots[admit.slot] = admit.request_id
                    going_on.append(admit.request_id)
            case Result():
                at_once.clear()
            case Tokens(rows=rows):
                going_on += [row.request_id for row in rows if row.request_id not in at_once | over]
                over.update(row.request_id for row in rows if row.finish is not None)
            case Done(request_ids=requests):  # may come before the StopHit that was its reason
                over.update(requests)
            case StopHit(request_id=request) | Abort(request_id=request):
                if e.direction == "in" and request not in over:
                    going_on.append(request)
                    over.add(request)
        for request in going_on:
            if request in released:
                found[released.pop(request)] = request
    return found
