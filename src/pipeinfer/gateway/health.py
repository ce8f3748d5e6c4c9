"""Which stages there are, what they last said of themselves, and what follows for the pipeline.

Fed with heartbeats and the time; knows no sockets and no clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeinfer.messages import Heartbeat

SILENCE = 5.0  # seconds without a heartbeat after which a stage counts as lost
PER_GROUP = ("scheduler", "engine")


@dataclass(frozen=True)
class Expected:
    """A stage of the topology. `stage` is its id ("engine-0-1"), `name` its kind ("engine")."""

    stage: str
    name: str
    group: int = 0
    rank: int = 0


@dataclass
class Row:
    """What is known of one stage; `state` is a heartbeat's, or "lost". `seen`: when that was."""

    stage: str
    name: str
    group: int
    rank: int
    state: str = "starting"
    reason: str = "no heartbeat yet"
    pid: int = 0
    incarnation: int = 0
    seen: float | None = None
    stats: dict[str, float] = field(default_factory=dict)


class Health:
    """The health table. Gateways are shown in it, but nothing waits for them."""

    def __init__(self, expected: Iterable[Expected]) -> None:
        self.rows = {e.stage: Row(e.stage, e.name, e.group, e.rank) for e in expected}

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Takes a heartbeat; stages outside the topology and earlier incarnations are ignored."""
        row = self.rows.get(beat.stage)
        if row is None or beat.incarnation < row.incarnation:
            return
        row.state, row.reason, row.pid = beat.state, beat.reason, beat.pid
        row.incarnation, row.seen, row.stats = beat.incarnation, now, beat.stats

    def check(self, now: float) -> None:
        """Marks the stages that have been silent for too long."""
        for row in self.rows.values():
            if row.seen is not None and now - row.seen > SILENCE and row.state != "lost":
                row.state, row.reason = "lost", f"silent for more than {SILENCE:g} s"

    def missing(self) -> list[Row]:
        """The stages that are not ready, in the topology's order."""
        return [r for r in self.rows.values() if r.name != "gateway" and r.state != "ready"]

    def answering(self) -> bool:
        """Whether a request would be answered: the common stages and one whole group are ready."""
        missing = self.missing()
        if any(row.name not in PER_GROUP for row in missing):
            return False
        groups = {row.group for row in self.rows.values() if row.name in PER_GROUP}
        return bool(groups - {row.group for row in missing})

    def reason(self) -> str:
        """One line about what is missing; empty if nothing is."""
        return "; ".join(
            f"{row.stage} is {row.state}" + (f" ({row.reason})" if row.reason else "")
            for row in self.missing()
        )

    def total(self, name: str, stat: str) -> float:
        """Sum of a statistic over the groups; of ranks, which all say the same, rank 0 counts."""
        rows = (row for row in self.rows.values() if row.name == name and row.rank == 0)
        return sum(row.stats.get(stat, 0.0) for row in rows)
