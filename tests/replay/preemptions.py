"""Which plans of a recorded scheduler took a request back."""

from __future__ import annotations

from pipeinfer.messages import Plan
from replay.recording import Recording


def preempting_plans(recording: Recording) -> dict[int, str]:
    """{seq of the plan: request} of each plan that released a request which was admitted again."""
    slots: dict[int, str] = {}
    last_release: dict[str, int] = {}
    found: dict[int, str] = {}
    for e in recording.entries:
        if isinstance(e.message, Plan):
            for release in e.message.releases:
                last_release[slots.pop(release.slot)] = e.seq
            for admit in e.message.admits:
                slots[admit.slot] = admit.request_id
                if admit.request_id in last_release:
                    found[last_release[admit.request_id]] = admit.request_id
    return found
