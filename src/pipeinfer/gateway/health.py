"""Which stages there are, what they last said of themselves, and what follows for the pipeline.

Fed with heartbeats and the time; knows no sockets and no clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from pipeinfer.messages import Heartbeat
from pipeinfer.topology.topology import Topology

PER_GROUP = ("scheduler", "engine")
MARKS = {"scheduler": "running", "engine": "pages_total"}  # statistics of one that has started
NAMED = 8  # stages that a reason names; the others it counts


@dataclass(frozen=True)
class Expected:
    """A stage of the topology. `stage` is its id ("engine-0-1"), `name` its kind ("engine")."""

    stage: str
    name: str
    group: int = 0
    rank: int = 0


def expected_stages(topology: Topology) -> list[Expected]:
    """The stages of a topology as the health table wants them."""
    return [Expected(e.identity.id, e.name, e.group, e.rank) for e in topology.entries]


@dataclass
class Row:
    """What is known of one stage; `state` is a heartbeat's, or "lost". `seen`: when that was.

    `restarts`: processes that were heard after the first; `restarted`: when the newest of these was
    heard first.
    """

    stage: str
    name: str
    group: int
    rank: int
    state: str = "starting"
    reason: str = "no heartbeat yet"
    pid: int = 0
    incarnation: int = 0
    seen: float | None = None
    restarts: int = 0
    restarted: float | None = None
    stats: dict[str, float] = field(default_factory=dict[str, float])


class Health:
    """The health table. Gateways are shown in it, but nothing waits for them.

    What follows from it is kept up to date with every change, since a heartbeat may not cost more
    the more stages there are: which rows are missing (not ready), by their number in the topology,
    and how many of each group. `silence`: seconds without a heartbeat after which a stage counts as
    lost; `patience`: seconds after that in which it is waited for.
    """

    def __init__(
        self, expected: Iterable[Expected], silence: float = 5.0, patience: float = inf
    ) -> None:
        self._silence, self._patience = silence, patience
        self._lost: dict[str, float] = {}  # since when
        self.rows = {e.stage: Row(e.stage, e.name, e.group, e.rank) for e in expected}
        self._order = list(self.rows.values())
        self._numbers = {row.stage: number for number, row in enumerate(self._order)}
        self._missing = [number for number, row in enumerate(self._order) if row.name != "gateway"]
        per_group = [row for row in self._order if row.name in PER_GROUP]
        self._of_group = Counter(row.group for row in per_group)
        self._whole = 0  # groups with nobody missing
        self._common = len(self._missing) - len(per_group)  # of the missing that are in no group

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Takes a heartbeat; stages outside the topology and earlier incarnations are ignored."""
        row = self.rows.get(beat.stage)
        if row is None or beat.incarnation < row.incarnation:
            return
        # What a supervisor says of a process that ended comes as the process's successor by one
        # (Child.last_word); real processes are further apart, their numbers are times in ns.
        if row.incarnation and beat.incarnation > row.incarnation + 1:
            row.restarts, row.restarted = row.restarts + 1, now
        row.reason, row.pid = beat.reason, beat.pid
        row.incarnation, row.seen, row.stats = beat.incarnation, now, beat.stats
        self._becomes(row, beat.state)

    def check(self, now: float) -> None:
        """Marks the stages that have been silent for too long."""
        for row in self._order:
            if row.seen is not None and now - row.seen > self._silence and row.state != "lost":
                row.reason = f"silent for more than {self._silence:g} s"
                self._becomes(row, "lost")
                self._lost[row.stage] = now

    def given_up(self, now: float) -> list[Row]:
        """The lost stages that are not waited for any more."""
        late = [stage for stage, since in self._lost.items() if now - since > self._patience]
        return [self.rows[stage] for stage in late]

    def _becomes(self, row: Row, state: str) -> None:
        was, row.state = row.state, state
        self._lost.pop(row.stage, None)
        if row.name == "gateway" or (was == "ready") == (state == "ready"):
            return
        number, more = self._numbers[row.stage], 1 if was == "ready" else -1
        at = bisect_left(self._missing, number)
        if more > 0:
            self._missing.insert(at, number)
        else:
            del self._missing[at]
        if row.name not in PER_GROUP:
            self._common += more
            return
        before = self._of_group[row.group]
        self._of_group[row.group] = before + more
        self._whole += (before + more == 0) - (before == 0)

    def missing(self) -> list[Row]:
        """The stages that are not ready, in the topology's order."""
        return [self._order[number] for number in self._missing]

    def complete(self) -> bool:
        """Whether every stage is ready."""
        return not self._missing

    def answering(self) -> bool:
        """Whether a request would be answered: the common stages and one whole group are ready."""
        return self._common == 0 and self._whole > 0

    def reason(self) -> str:
        """One line about what is missing; empty if nothing is. The first NAMED are named."""
        named = [self._order[number] for number in self._missing[:NAMED]]
        told = [f"{r.stage} is {r.state}" + (f" ({r.reason})" if r.reason else "") for r in named]
        if len(self._missing) > NAMED:
            told.append(f"and {len(self._missing) - NAMED} more")
        return "; ".join(told)

    def groups(self, name: str) -> list[Row]:
        """Of the stages called `name`, a scheduler or an engine, one of each group, with all its
        statistics: of ranks, which all say the same, rank 0. Those that still start are left out.
        """
        known = MARKS[name]
        rows = self.rows.values()
        return [r for r in rows if r.name == name and r.rank == 0 and known in r.stats]

    def total(self, name: str, stat: str) -> float:
        """Sum of a statistic over the groups; of ranks, which all say the same, rank 0 counts."""
        rows = (row for row in self.rows.values() if row.name == name and row.rank == 0)
        return sum(row.stats.get(stat, 0.0) for row in rows)


def kv_usage(engine: Row) -> float:
    """Share of an engine's pages that requests use; cached ones are there for others."""
    total, free, evictable = (
        engine.stats.get(f"pages_{name}", 0.0) for name in ("total", "free", "evictable")
    )
    return max(1.0 - (free + evictable) / total, 0.0) if total else 0.0
