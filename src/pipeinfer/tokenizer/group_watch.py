"""From the heartbeats of schedulers and engines to what a router wants to know of each group.

Knows names of statistics and how long silence may last; sends nothing.
"""

from __future__ import annotations

from pipeinfer.messages import Heartbeat
from pipeinfer.tokenizer.routing import Report

SILENCE = 3.0  # seconds without a heartbeat of its scheduler, after which a group counts as down


class GroupWatch:
    """The latest of each group. Before its first heartbeat a group counts as up: it starts."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._reports: dict[int, Report] = {}
        self._pools: dict[int, tuple[int, int]] = {}  # capacity and evicted, in tokens

    def heartbeat(self, beat: Heartbeat, now: float) -> Report | None:
        """The group's report if `beat` is its scheduler's. `now`: monotonic seconds."""
        stats = {name: int(value) for name, value in beat.stats.items()}
        if beat.name == "engine" and beat.rank == 0 and "page_tokens" in stats:
            tokens = stats["page_tokens"]
            self._pools[beat.group] = (
                stats["pages_total"] * tokens,
                stats["pages_evicted"] * tokens,
            )
        if beat.name != "scheduler":
            return None
        self._heard[beat.group] = now
        capacity, evicted = self._pools.get(beat.group, (0, 0))
        report = self._reports[beat.group] = Report(
            up=beat.state == "ready",
            tokens=stats.get("tokens_left", 0),
            capacity=capacity,
            evicted=evicted,
            epoch=stats.get("epochs_total", 0),
        )
        return report

    def silent(self, now: float) -> list[tuple[int, Report]]:
        """Groups that are down from now on because nothing was heard of them."""
        gone = [group for group, heard in self._heard.items() if now - heard > SILENCE]
        for group in gone:
            del self._heard[group]
        return [(group, Report(False, epoch=self._reports[group].epoch)) for group in gone]
