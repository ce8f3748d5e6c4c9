"""From the heartbeats of schedulers and engines to what a router wants to know of each group.

Knows names of statistics and how long silence may last; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.messages import Heartbeat, State
from pipeinfer.tokenizer.routing import Report

GONE = ("starting", "loading")  # states of a process that begins after another one, or will
SILENCE = 3.0  # seconds without a heartbeat, after which a stage counts as lost


@dataclass
class _Stage:
    """A scheduler or an engine rank: when it was last heard, and what it said of itself then.

    `name`: "scheduler" or "engine". `silent`: not heard for too long.
    """

    name: str
    heard: float
    state: State
    incarnation: int
    silent: bool = False

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self.silent


@dataclass
class _Group:
    """Its stages that were ever heard, and the latest statistics that matter; tokens all."""

    stages: dict[str, _Stage]
    requests: int = 0
    left: int = 0
    epoch: int = 0
    capacity: int = 0
    evicted: int = 0

    @property
    def deserted(self) -> bool:
        """Its scheduler is there and has no engines, for a rank has ended."""
        here = [stage for stage in self.stages.values() if not stage.silent]
        waits = any(s.name == "scheduler" and s.state == "waiting" for s in here)
        return waits and any(s.name == "engine" and s.state in GONE for s in here)

    def report(self) -> Report:
        up = all(stage.ready for stage in self.stages.values())
        return Report(up, self.left, self.capacity, self.evicted, self.epoch, self.requests)


class GroupWatch:
    """The latest of each group, which is up while its scheduler and all its ranks are ready.

    A group of which nothing was heard counts as up: it starts.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def heartbeat(self, beat: Heartbeat, now: float) -> Report | None:
        """The group's report if `beat` is one of its stages'. `now`: monotonic seconds."""
        if beat.name not in ("scheduler", "engine"):
            return None
        group = self._groups.setdefault(beat.group, _Group({}))
        known = group.stages.get(beat.stage)
        if known is not None and beat.incarnation < known.incarnation:
            return None  # the last words of a process that has ended
        group.stages[beat.stage] = _Stage(beat.name, now, beat.state, beat.incarnation)
        stats = {name: int(value) for name, value in beat.stats.items()}
        if beat.name == "scheduler":
            group.requests = stats.get("running", 0) + stats.get("waiting", 0)
            group.left = stats.get("tokens_left", 0)
            group.epoch = stats.get("epochs_total", 0)
        elif beat.rank == 0 and "page_tokens" in stats:
            tokens = stats["page_tokens"]
            group.capacity = stats["pages_total"] * tokens
            group.evicted = stats["pages_evicted"] * tokens
        return group.report()

    def silent(self, now: float) -> list[tuple[int, Report]]:
        """Groups that are down from now on because one of their stages has not been heard."""
        gone: list[tuple[int, Report]] = []
        for number, group in self._groups.items():
            late = [s for s in group.stages.values() if now - s.heard > SILENCE and not s.silent]
            lost = [stage for stage in late if stage.ready]
            for stage in late:
                stage.silent = True
            if lost:
                gone.append((number, group.report()))
        return gone

    def deserted(self) -> list[int]:
        """Groups whose scheduler has no engines, and can hand its requests over."""
        return [number for number, group in self._groups.items() if group.deserted]
