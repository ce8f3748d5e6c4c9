"""From the heartbeats of schedulers and engines to what a router wants to know of each group.

Knows names of statistics and how long silence may last; sends nothing.
"""

from __future__ import annotations

import math
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

    @property
    def waits(self) -> bool:
        """A scheduler that is there without engines."""
        return self.name == "scheduler" and self.state == "waiting" and not self.silent

    @property
    def gone(self) -> bool:
        """An engine whose process has ended."""
        return self.name == "engine" and self.state in GONE and not self.silent


@dataclass
class _Group:
    """Its stages that were ever heard, and the latest statistics that matter; tokens all.

    unready, waits, gone: how many of the stages are so; a heartbeat may not cost more the more
    stages there are.
    """

    stages: dict[str, _Stage]
    requests: int = 0
    left: int = 0
    epoch: int = 0
    capacity: int = 0
    evicted: int = 0
    unready: int = 0
    waits: int = 0
    gone: int = 0

    @property
    def deserted(self) -> bool:
        """Its scheduler is there and has no engines, for a rank has ended."""
        return self.waits > 0 and self.gone > 0

    def count(self, stage: _Stage, sign: int) -> None:
        """Puts a stage into the counts, or takes it out of them (-1) before it changes."""
        self.unready += sign * (not stage.ready)
        self.waits += sign * stage.waits
        self.gone += sign * stage.gone

    def report(self) -> Report:
        up = self.unready == 0
        return Report(up, self.left, self.capacity, self.evicted, self.epoch, self.requests)


class GroupWatch:
    """The latest of each group, which is up while its scheduler and all its ranks are ready.

    A group of which nothing was heard counts as up: it starts.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._deserted: set[int] = set()

    def heartbeat(self, beat: Heartbeat, now: float) -> Report | None:
        """The group's report if `beat` is one of its stages'. `now`: monotonic seconds."""
        if beat.name not in ("scheduler", "engine"):
            return None
        group = self._groups.get(beat.group)
        if group is None:
            group = self._groups[beat.group] = _Group({})
        known = group.stages.get(beat.stage)
        if known is not None:
            if beat.incarnation < known.incarnation:
                return None  # the last words of a process that has ended
            group.count(known, -1)
        stage = group.stages[beat.stage] = _Stage(beat.name, now, beat.state, beat.incarnation)
        group.count(stage, 1)
        self._note(beat.group, group)
        if beat.name == "scheduler":
            group.requests = _number(beat, "running") + _number(beat, "waiting")
            group.left = _number(beat, "tokens_left")
            group.epoch = _number(beat, "epochs_total")
        elif beat.rank == 0 and "page_tokens" in beat.stats:
            tokens = _number(beat, "page_tokens")
            group.capacity = _number(beat, "pages_total") * tokens
            group.evicted = _number(beat, "pages_evicted") * tokens
        return group.report()

    def silent(self, now: float) -> list[tuple[int, Report]]:
        """Groups that are down from now on because one of their stages has not been heard."""
        gone: list[tuple[int, Report]] = []
        for number, group in self._groups.items():
            late = [s for s in group.stages.values() if now - s.heard > SILENCE and not s.silent]
            lost = [stage for stage in late if stage.ready]
            for stage in late:
                group.count(stage, -1)
                stage.silent = True
                group.count(stage, 1)
            self._note(number, group)
            if lost:
                gone.append((number, group.report()))
        return gone

    def is_deserted(self, group: int) -> bool:
        """Whether the scheduler of `group` has no engines, and can hand its requests over."""
        return group in self._deserted

    def deserted(self) -> list[int]:
        """All such groups."""
        return sorted(self._deserted)

    def _note(self, number: int, group: _Group) -> None:
        (self._deserted.add if group.deserted else self._deserted.discard)(number)


def _number(beat: Heartbeat, name: str) -> int:
    """A statistic; 0 for one that is missing, or that is no number."""
    value = beat.stats.get(name, 0.0)
    return int(value) if math.isfinite(value) else 0
