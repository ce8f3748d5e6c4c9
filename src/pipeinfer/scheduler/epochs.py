"""The engine ranks of a group: which are there, whether they agree to begin an epoch or to sleep,
and which must be killed.

- Epochs: the ranks of the group, and the epoch that they are in.
- FencedRanks: which of them must be killed. RankStates: the last status of each.
- GroupAnnouncer: the group's status for tokenizers, and when it is published.
- SleepRequest: whether the group is to sleep, and the requests that wait until it does.

An epoch starts only after every rank sent Hello with equal values in AGREED, and answered that it
receives the plan channel and has put as many steps on its device as all others: otherwise they
would never meet again inside a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from pipeinfer.core import EVERYONE, Send, engine_id, heartbeat_period
from pipeinfer.messages import (
    PROTOCOL,
    Asleep,
    BeginEpoch,
    Ended,
    GroupReadiness,
    GroupStatus,
    Hello,
    RankStatus,
    Ready,
    SetSleep,
    Sleep,
    SleepMode,
    State,
)
from pipeinfer.scheduler.planner import SchedulerOptions
from pipeinfer.scheduler.request import Request

AGREED = (
    "model",
    "page_size",
    "pages",
    "max_slots",
    "max_model_len",
    "attention",
    "graph_sizes",
    "step_tokens",
    "kv_dtype",
    "max_drafts",
    "max_draft_rows",
    "draft_model",
)


class RanksDiverged(Exception):
    """The ranks cannot go on together; all of them must be started again."""


class Epochs:
    """The epochs of one group: none as long as ranks are missing, one that begins once all have
    said Hello, and one that runs once all are Ready (`running`).

    - first: greater than the number of any epoch of an earlier scheduler of this group; epochs are
      numbered from `first` + 1
    """

    def __init__(self, tp: int, first: int) -> None:
        self.tp = tp
        self.epoch = first
        self.running = False
        self.kept_pages = 0  # with which the epoch began, as a rank reported; equal on all ranks
        self.last_shape: Hello | None = None  # limits of the epoch that runs, or ran last
        self.reason = "no engine yet"
        self._hellos: dict[int, Hello] = {}
        self.fenced = FencedRanks()
        self._steps: dict[int, int] = {}  # by rank that is ready: steps of its device
        self.sleep_level = 0  # at which the ranks are to sleep; 0: an epoch is to run
        self.refuses = False
        self._asleep: dict[int, Asleep] = {}  # by rank: its last Asleep
        self._begun = False
        self._since = 0.0  # when the epoch or the sleep began, in seconds
        self._ended = ""  # why the previous epoch ended

    @property
    def shape(self) -> Hello:
        """Hello of rank 0 with the limits that the ranks agreed on; only while `running`."""
        return self._hellos[0]

    @property
    def incarnations(self) -> tuple[int, ...]:
        """Incarnations of the ranks' processes, rank 0 first; only once all have said Hello."""
        return tuple(self._hellos[rank].incarnation for rank in range(self.tp))

    def hello(self, hello: Hello) -> bool:
        """Takes a Hello; True if it ends a running epoch, because the rank is a new process."""
        if hello.incarnation in self.fenced:
            return False
        self.fenced.on_ended(hello.rank, hello.incarnation)
        if hello.protocol != PROTOCOL:
            self.reason = (
                f"rank {hello.rank} (pipeinfer {hello.version}) speaks protocol {hello.protocol}, "
                f"the scheduler {PROTOCOL}"
            )
            return False
        if not 0 <= hello.rank < self.tp:
            self.reason = f"rank {hello.rank} does not belong to a group of {self.tp}"
            return False
        known = self._hellos.get(hello.rank)
        if self.running and known is not None and known.incarnation == hello.incarnation:
            return False  # sent before it received BeginEpoch
        ended = self.running
        if ended:
            self.end(f"engine rank {hello.rank} was started again")
        if known is None or known.incarnation != hello.incarnation:
            self._hellos[hello.rank] = hello
            self._asleep.pop(hello.rank, None)
            self._begun = False
        return ended

    def has_joined(self, rank: int, incarnation: int) -> bool:
        """True if the rank's process `incarnation`, which has ended, or an earlier one had said
        Hello."""
        known = self._hellos.get(rank)
        return known is not None and known.incarnation <= incarnation

    @property
    def asleep(self) -> bool:
        """Whether all ranks sleep at least at the level asked for."""
        levels = [said.level for said in self._asleep.values()]
        return 0 < self.sleep_level <= min(levels, default=0) and len(levels) == self.tp

    def _sleeps_as_asked(self) -> bool:
        """Whether all ranks sleep, and keep for later schedulers whether the group refuses
        requests."""
        return self.asleep and all(one.refuses == self.refuses for one in self._asleep.values())

    def sleep(self, level: int, refuses: bool, now: float) -> None:
        """Ends the epoch; none runs until `wake_up`. Ranks are to sleep, also those that come
        later."""
        self.end("falls asleep")
        self.sleep_level, self.refuses, self._since = level, refuses, now

    def wake_up(self) -> None:
        """Ends the sleep; the next BeginEpoch wakes the ranks."""
        self.end("wakes up")
        self.sleep_level = 0
        self._asleep.clear()

    def on_asleep(self, asleep: Asleep) -> None:
        """Takes a rank's report that it sleeps."""
        known = self._hellos.get(asleep.rank)
        if self.sleep_level and known is not None and known.incarnation == asleep.incarnation:
            self._asleep[asleep.rank] = asleep

    def begin(self, now: float) -> BeginEpoch | Sleep | None:
        """The BeginEpoch or Sleep to publish now, or None: ranks disagree, the epoch runs, or all
        sleep.

        Published repeatedly until all ranks have answered, because a subscription may be late.
        """
        if self.running or self._sleeps_as_asked():
            return None
        if len(self._hellos) < self.tp:
            return BeginEpoch(self.epoch, ())  # asks engines of an earlier scheduler for Hello
        first = self._hellos[min(self._hellos)]
        for hello in self._hellos.values():
            for name in AGREED:
                if getattr(hello, name) != getattr(first, name):
                    self.reason = (
                        f"ranks {first.rank} and {hello.rank} disagree on {name}: "
                        f"{getattr(first, name)!r} and {getattr(hello, name)!r}"
                    )
                    return None
        if self.sleep_level:
            if not self._begun:
                self._begun, self._since = True, now
            self.reason = "falls asleep"
            return Sleep(self.sleep_level, self.incarnations, self.refuses)
        if not self._begun:
            self.epoch += 1
            self._begun = True
            self._since = now
            self._steps.clear()
        self.reason = f"epoch {self.epoch} begins" + (f" ({self._ended})" if self._ended else "")
        return BeginEpoch(self.epoch, self.incarnations)

    def ready(self, ready: Ready) -> bool:
        """Takes a rank's answer; True if the epoch runs from now on. Raises RanksDiverged."""
        known = self._hellos.get(ready.rank)
        if (
            self.running
            or self.sleep_level
            or not self._begun
            or ready.epoch != self.epoch
            or known is None
            or known.incarnation != ready.incarnation
        ):
            return False
        self._steps[ready.rank] = ready.steps
        self.kept_pages = ready.kept_pages
        if len(self._steps) < self.tp:
            return False
        if len(set(self._steps.values())) > 1:
            listed = ", ".join(
                f"rank {rank} {steps}" for rank, steps in sorted(self._steps.items())
            )
            raise RanksDiverged(f"ranks have computed different numbers of steps: {listed}")
        self.running = True
        self.reason = ""
        self._ended = ""
        self.last_shape = self.shape
        return True

    def check(self, now: float, seconds: float) -> None:
        """Raises RanksDiverged if a rank has not answered for `seconds` since the epoch or the
        sleep began."""
        waits = self._begun and not self.running and not self.asleep
        if waits and now - self._since > seconds:
            answered = self._asleep if self.sleep_level else self._steps
            silent = [str(rank) for rank in range(self.tp) if rank not in answered]
            what = "Sleep" if self.sleep_level else f"epoch {self.epoch}"
            raise RanksDiverged(f"rank {', '.join(silent)} gave no answer to {what}")

    def end(self, reason: str) -> None:
        """Ends the epoch; the same processes may begin another."""
        self.running = self._begun = False
        self.reason = self._ended = reason

    def restart_ranks(
        self, reason: str, now: float, alive: Iterable[tuple[int, int]] = (), until: float = inf
    ) -> None:
        """Ends the epoch; all ranks must be started again, and new processes are waited for.

        - alive: (rank, incarnation) of processes that may not have said Hello
        - until: processes with a greater incarnation are successors and are not killed, unless they
          took part in the running epoch

        With tp == 1 the rank is not fenced: if no supervisor kills it and it answers later, it is
        used again.
        """
        incarnations = {rank: hello.incarnation for rank, hello in self._hellos.items()}
        met = incarnations if self.running else {}
        to_kill = {r: i for r, i in {**dict(alive), **incarnations}.items() if i <= until} | met
        self.end(reason)
        self.fenced.add(to_kill, now, fenced=self.tp > 1)
        for rank in to_kill.keys() & incarnations.keys():
            del self._hellos[rank]
            self._asleep.pop(rank, None)


KILL_RETRY_SECONDS = 1.0  # seconds between two GroupFaults about the same processes


class FencedRanks:
    """Engine processes of one group that must end. Fenced ones take part in no epoch; their
    supervisors are asked to kill those in `to_kill`.

    Knows ranks, incarnations and times in seconds; sends nothing.
    """

    def __init__(self) -> None:
        self._fenced: set[int] = set()
        self._to_kill: dict[int, int] = {}  # by rank: incarnations that are not known to have ended
        self._requested_at = 0.0

    def __contains__(self, incarnation: int) -> bool:
        """Whether the process `incarnation` may not take part in an epoch."""
        return incarnation in self._fenced

    def add(self, processes: Mapping[int, int], now: float, fenced: bool) -> None:
        """Asks for the end of these `processes`, incarnations by rank, in place of earlier ones.

        - fenced: they cannot go on even if they answer again
        """
        self._to_kill = dict(processes)
        if fenced:
            self._fenced.update(processes.values())
        self._requested_at = now

    @property
    def to_kill(self) -> tuple[int, ...]:
        """Incarnations of processes that must end and are not known to have ended, by ascending
        rank."""
        return tuple(self._to_kill[rank] for rank in sorted(self._to_kill))

    def on_ended(self, rank: int, incarnation: int) -> None:
        """Notes that the rank's processes up to `incarnation` have ended, or answer again."""
        if self._to_kill.get(rank, inf) <= incarnation:
            del self._to_kill[rank]

    def take_due(self, now: float) -> bool:
        """True if it is time to ask again for the end of processes; the next time is
        KILL_RETRY_SECONDS later."""
        if not self._to_kill or now - self._requested_at < KILL_RETRY_SECONDS:
            return False
        self._requested_at = now
        return True


# states of a process that has just been started
BEGINNING: tuple[State, ...] = ("starting", "loading")
SILENT_SECONDS = 3.0  # seconds


@dataclass(frozen=True)
class _RankState:
    """The last status of a rank.

    Attributes:
    - heard_at: when it came, in seconds
    - over: the process has ended since
    """

    incarnation: int
    state: State
    heard_at: float
    over: bool = False


class RankStates:
    """The ranks of one group from which a status ever came.

    Attributes:
    - deserted: some rank's process has ended, is just starting, or sent no status for `host_loss`
      seconds; so no engine waits for this group's requests, and the group may hand them over
    - silent: some rank sent no status for SILENT_SECONDS
    - asleep: some rank sleeps, or wakes up, which may take as long as loading does
    """

    def __init__(self, host_loss: float = inf) -> None:
        self.deserted = self.silent = self.asleep = False
        self._host_loss = host_loss
        self._known: dict[int, _RankState] = {}

    def on_status(self, status: RankStatus, now: float) -> None:
        """Takes a rank's status, unless it is a late one of an earlier process of the rank."""
        known = self._known.get(status.rank)
        if known is None or (known.incarnation, known.over) <= (status.incarnation, False):
            self._update(status.rank, _RankState(status.incarnation, status.state, now), now)

    def on_ended(self, rank: int, ended: Ended, now: float) -> None:
        """Notes that the rank's process has ended, unless a status of the next one has come
        already."""
        known = self._known.get(rank)
        if known is None or known.incarnation <= ended.incarnation:
            self._update(rank, _RankState(ended.incarnation, "starting", now, over=True), now)

    def check(self, now: float) -> bool:
        """Updates the attributes; True if a rank has been silent for so long that it is lost.
        `now`: seconds of a clock that stands still while this process does not read."""
        ranks = self._known.values()
        lost = any(now - known.heard_at > self._host_loss and not known.over for known in ranks)
        self.silent = any(
            now - known.heard_at > SILENT_SECONDS and not known.over for known in ranks
        )
        self.asleep = any(known.state == "asleep" and not known.over for known in ranks)
        self.deserted = lost or any(
            known.over or (known.state in BEGINNING and now - known.heard_at <= SILENT_SECONDS)
            for known in ranks
        )
        return lost

    def alive(self) -> list[tuple[int, int]]:
        """(rank, incarnation) of the processes that are not known to have ended."""
        return [(rank, one.incarnation) for rank, one in self._known.items() if not one.over]

    def _update(self, rank: int, known: _RankState, now: float) -> None:
        self._known[rank] = known
        self.check(now)


class GroupAnnouncer:
    """The group's status for tokenizers, published after each change of its readiness, and
    regularly.

    Attributes:
    - group: number of the group
    - incarnation: of this scheduler
    - ranks: states of the group's ranks
    - engines: numbers of the ranks, by stage id
    """

    def __init__(self, group: int, incarnation: int, options: SchedulerOptions) -> None:
        self._every = heartbeat_period(options.groups)
        self.group = group
        self.incarnation = incarnation
        self.ranks = RankStates(options.host_loss)
        self.engines = {engine_id(group, rank): rank for rank in range(options.tp)}
        self._published: GroupReadiness | None = None
        self._published_at = float("-inf")

    def take_due(
        self, readiness: GroupReadiness, now: float, make_status: Callable[[], GroupStatus]
    ) -> list[Send]:
        """The messages to publish at `now` (monotonic seconds); `make_status()` makes the
        status."""
        if readiness == self._published and now - self._published_at < self._every:
            return []
        self._published = readiness
        self._published_at = now
        return [Send("group", EVERYONE, make_status())]


class SleepRequest:
    """The latest request to sleep or to wake up.

    Attributes:
    - level: see SetSleep; 0: to be awake
    - deferred: by id, requests that arrived after the sleep was asked for, while earlier ones are
      answered
    - settled: this scheduler knows the wanted state; Hello.sleep_level is no longer adopted
    """

    def __init__(self) -> None:
        self.level = 0
        self.deferred: dict[str, Request] = {}
        self.settled = False
        self._refuses = False
        self._mode: SleepMode = "wait"
        # level and `refuses` that ranks were asked for
        self._announced: tuple[int, bool] = (0, False)

    @property
    def refuses(self) -> bool:
        """Whether requests that arrive now are refused."""
        return self.level > 0 and self._refuses

    @property
    def falls(self) -> bool:
        """Whether the group is awake, and is to sleep."""
        return self.level > 0 and not self._announced[0]

    def ask(self, asked: SetSleep) -> None:
        """Takes a request to sleep. A repetition may change the mode, or ask for a deeper sleep,
        but not for a lighter one."""
        self.settled = True
        self.level = max(self.level, asked.level)
        self._mode, self._refuses = asked.mode, asked.refuses

    def due(self, live: int) -> bool:
        """Whether ranks are to be asked now.

        - live: number of live requests of the group, with `deferred`
        """
        if not self.level or self._announced == (self.level, self._refuses):
            return False
        return not self.falls or self._mode == "keep" or live == len(self.deferred)

    def begin(self) -> list[Request]:
        """Notes that ranks are asked to sleep; returns the deferred requests, which now wait as for
        any engine."""
        self._announced = self.level, self._refuses
        return self._take_deferred()

    def wake_up(self) -> list[Request]:
        """Takes a request to wake up; returns the deferred requests."""
        self.settled = True
        self.level, self._announced = 0, (0, False)
        return self._take_deferred()

    def _take_deferred(self) -> list[Request]:
        deferred, self.deferred = list(self.deferred.values()), {}
        return deferred
