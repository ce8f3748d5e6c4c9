"""Which plans of a recorded scheduler took a request back."""

from __future__ import annotations

from pipeinfer.messages import Plan, StopHit, Tokens
from replay.recording import Recording


def preempting_plans(recording: Recording) -> dict[int, str]:
    """{seq of the plan: request} of each plan that released a request which was not over: it was
    admitted again, or a stop string, found in what it had told, ended it while it waited.
    """
    finished = {
        row.request_id
        for e in recording.entries
        if isinstance(e.message, Tokens)
        for row in e.message.rows
        if row.finish is not None
    }
    slots: dict[int, str] = {}
    last_release: dict[str, int] = {}
    found: dict[int, str] = {}
    for e in recording.entries:
        going_on: list[str] = []
        if isinstance(e.message, Plan):
            for release in e.message.releases:
                last_release[slots.pop(release.slot)] = e.seq
            for admit in e.message.admits:
                slots[admit.slot] = admit.request_id
                going_on.append(admit.request_id)
        elif isinstance(e.message, StopHit) and e.message.request_id not in finished:
            going_on.append(e.message.request_id)
        for request in going_on:
            if request in last_release:
                found[last_release[request]] = request
    return found
