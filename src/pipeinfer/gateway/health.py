"""The health table: the stages of the topology, their last heartbeats, and whether they can serve.

Fed with heartbeats and the time. Imports little: `pipeinfer top` has a table, too. Knows no sockets
and no clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from pipeinfer.command_line import counted
from pipeinfer.core import takeover_seconds
from pipeinfer.messages import Heartbeat, SetSleep
from pipeinfer.topology import SUPERVISOR, Topology

PER_GROUP = ("scheduler", "engine")
# A statistic that a stage's heartbeat has once the stage has started.
STARTED_STATISTIC = {"scheduler": "running", "engine": "pages_total"}
MAX_NAMED = 8  # stages that a reason names; the others it counts


@dataclass(frozen=True)
class ExpectedStage:
    """A stage of the topology.

    Attributes:
    - stage: its id ("engine-0-1")
    - name: its kind ("engine")
    - group, rank: numbers
    """

    stage: str
    name: str
    group: int = 0
    rank: int = 0


def expected_stages(topology: Topology) -> list[ExpectedStage]:
    """The stages of a topology, as Health takes them."""
    return [ExpectedStage(e.identity.id, e.name, e.group, e.rank) for e in topology.entries]


@dataclass
class StageStatus:
    """Last known status of one stage.

    Attributes:
    - stage, name, group, rank: as ExpectedStage
    - state, reason: of its heartbeat, or "lost"
    - pid, incarnation: of its process
    - last_seen: monotonic seconds of its last heartbeat
    - restarts: processes whose heartbeats came after the first process's
    - restarted_at: monotonic seconds of the first heartbeat of the newest of these
    - stats: statistics of its last heartbeat
    """

    stage: str
    name: str
    group: int
    rank: int
    state: str = "starting"
    reason: str = "no heartbeat yet"
    pid: int = 0
    incarnation: int = 0
    last_seen: float | None = None
    restarts: int = 0
    restarted_at: float | None = None
    stats: dict[str, float] = field(default_factory=dict[str, float])


class Health:
    """The health table. Gateways are listed in it, but nothing waits for them.

    Attributes:
    - silence: seconds without a heartbeat after which a stage counts as lost
    - host_loss: seconds after that in which its return is awaited
    - stages: {stage id: status}
    - standbys_ready: groups whose engines have standbys that are ready, as the supervisor said last
    - _not_ready: numbers of the stages that are not ready, in the topology's order
    - _group_not_ready: how many of these are in each group
    - _shared_ready: how many stages are ready of each kind that no group has, such as tokenizers
    - _ready_groups: groups of which all stages are ready
    - _asleep: schedulers whose groups sleep

    The counts below are updated with every heartbeat, whose cost must not grow with the number of
    stages.
    """

    def __init__(
        self, expected: Iterable[ExpectedStage], silence: float = 5.0, host_loss: float = inf
    ) -> None:
        self._silence, self._host_loss = silence, host_loss
        self.standbys_ready = 0
        self._lost_since: dict[str, float] = {}  # monotonic seconds
        self.stages = {e.stage: StageStatus(e.stage, e.name, e.group, e.rank) for e in expected}
        self._order = list(self.stages.values())
        self._index = {row.stage: number for number, row in enumerate(self._order)}
        self._not_ready = [
            number for number, row in enumerate(self._order) if row.name != "gateway"
        ]
        per_group = [row for row in self._order if row.name in PER_GROUP]
        self._group_not_ready = Counter(row.group for row in per_group)
        self._ready_groups = 0
        self._groups = sum(row.name == "scheduler" for row in self._order)
        self._asleep = 0
        shared = {row.name for row in self._order if row.name not in (*PER_GROUP, "gateway")}
        self._shared_ready = dict.fromkeys(shared, 0)

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Takes a heartbeat; those of unknown stages and of earlier incarnations are ignored."""
        if beat.stage == SUPERVISOR:
            self.standbys_ready = int(beat.stats.get("standbys_ready", 0))
        row = self.stages.get(beat.stage)
        if row is None or beat.incarnation < row.incarnation:
            return
        # The supervisor's notice of a process that ended has the incarnation of that process plus
        # one (Child.death_notice); incarnations of processes are times in ns, further apart.
        if row.incarnation and beat.incarnation > row.incarnation + 1:
            row.restarts, row.restarted_at = row.restarts + 1, now
        row.reason, row.pid = beat.reason, beat.pid
        row.incarnation, row.last_seen, row.stats = beat.incarnation, now, beat.stats
        self._set_state(row, beat.state)

    def mark_lost(self, now: float) -> None:
        """Marks stages as lost whose last heartbeat is too old."""
        for row in self._order:
            if (
                row.last_seen is not None
                and now - row.last_seen > self._silence
                and row.state != "lost"
            ):
                row.reason = f"silent for more than {self._silence:g} s"
                self._set_state(row, "lost")
                self._lost_since[row.stage] = now

    def lost_for_good(self, now: float) -> list[StageStatus]:
        """Stages that are lost for longer than `host_loss`, for a gateway ten times --host-loss."""
        lost = [stage for stage, since in self._lost_since.items() if now - since > self._host_loss]
        return [self.stages[stage] for stage in lost]

    def _set_state(self, row: StageStatus, state: str) -> None:
        was, row.state = row.state, state
        self._lost_since.pop(row.stage, None)
        if row.name == "scheduler":
            self._asleep += (state == "asleep") - (was == "asleep")
        if row.name == "gateway" or (was == "ready") == (state == "ready"):
            return
        number, change = self._index[row.stage], 1 if was == "ready" else -1
        at = bisect_left(self._not_ready, number)
        if change > 0:
            self._not_ready.insert(at, number)
        else:
            del self._not_ready[at]
        if row.name not in PER_GROUP:
            self._shared_ready[row.name] -= change
            return
        before = self._group_not_ready[row.group]
        self._group_not_ready[row.group] = before + change
        self._ready_groups += (before + change == 0) - (before == 0)

    def not_ready(self) -> list[StageStatus]:
        """The stages that are not ready, in the topology's order."""
        return [self._order[number] for number in self._not_ready]

    def all_ready(self) -> bool:
        """Whether every stage is ready."""
        return not self._not_ready

    def can_serve(self) -> bool:
        """Whether a request could be served: one whole group is ready, and a stage of each kind
        that groups share."""
        return all(self._shared_ready.values()) and self._ready_groups > 0

    def asleep(self) -> bool:
        """Whether all groups sleep, and a stage of each kind that they share is ready."""
        return all(self._shared_ready.values()) and 0 < self._groups == self._asleep

    def cannot_sleep(self) -> StageStatus | None:
        """An engine that cannot give its memory back, or has not said yet whether it can: then its
        stats have no `can_sleep`."""
        engines = (row for row in self._order if row.name == "engine")
        return next((row for row in engines if not row.stats.get("can_sleep")), None)

    def sleeps_as(self, asked: SetSleep) -> bool:
        """Whether every group sleeps at the level asked for, or a higher one, and its engines know
        whether a scheduler that is started again refuses requests; for level 0, is ready."""
        if not asked.level:
            return self._ready_groups == self._groups
        stats = {name: [row.stats for row in self._order if row.name == name] for name in PER_GROUP}
        return (
            self.asleep()
            and all(one.get("sleep_level", 0) >= asked.level for one in stats["scheduler"])
            and all(
                one.get("sleep_refuses", asked.refuses) == asked.refuses for one in stats["engine"]
            )
        )

    def reason(self) -> str:
        """A line about missing stages, of which the first MAX_NAMED are named; "" if none is
        missing."""
        named = [self._order[number] for number in self._not_ready[:MAX_NAMED]]
        parts = [f"{r.stage} is {r.state}" + (f" ({r.reason})" if r.reason else "") for r in named]
        if len(self._not_ready) > MAX_NAMED:
            parts.append(f"and {len(self._not_ready) - MAX_NAMED} more")
        return "; ".join(parts)

    def one_per_group(self, name: str) -> list[StageStatus]:
        """The stages called `name` (schedulers or engines), one of each group, and rank 0 of the
        engines.

        Those that still start, whose statistics are not complete, are left out.
        """
        statistic = STARTED_STATISTIC[name]
        rows = self.stages.values()
        return [r for r in rows if r.name == name and r.rank == 0 and statistic in r.stats]

    def total(self, name: str, stat: str) -> float:
        """Sum of a statistic over all groups; of the ranks of a group, which agree, rank 0
        counts."""
        rows = (row for row in self.stages.values() if row.name == name and row.rank == 0)
        return sum(row.stats.get(stat, 0.0) for row in rows)


def kv_usage(engine: StageStatus) -> float:
    """Share of an engine's KV pages that requests use; cached pages count as free."""
    total, free, evictable = (
        engine.stats.get(f"pages_{name}", 0.0) for name in ("total", "free", "evictable")
    )
    return max(1.0 - (free + evictable) / total, 0.0) if total else 0.0


def describe_takeover(statistics: Mapping[str, float]) -> str:
    """A line about how lost engines were replaced, from a scheduler's statistics; "" if none was
    lost."""
    seconds = takeover_seconds(statistics)
    if not seconds:
        return ""
    phases = ", ".join(f"{phase.replace('_', ' ')} {took:.2f}" for phase, took in seconds.items())
    return (
        f"{counted(statistics['takeovers_total'], 'takeover')}, the last in "
        f"{sum(seconds.values()):.2f} s "
        f"({phases}), {statistics.get('recomputed_tokens_total', 0.0):,.0f} tokens recomputed"
    )
