"""The handshake that begins an epoch: which engine ranks are there, and whether they agree.

Knows no request. A group starts only after every rank said hello with the same model, page size,
pool, KV dtype, graph sizes and attention backend, and answered that it hears the plan channel and
has put as many steps on its device as all others: else they would never meet again inside a
collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pipeinfer.messages import PROTOCOL, Begin, Hello, Ready
from pipeinfer.scheduler.condemned import Condemned

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
)


class Torn(Exception):
    """The ranks cannot go on together; all of them must be started again."""


class Epochs:
    """Where one group stands: nobody there, `beginning`, or `running`.

    first: number of the first epoch; larger than that of any earlier scheduler of this group.
    """

    def __init__(self, tp: int, first: int) -> None:
        self.tp = tp
        self.epoch = first
        self.running = False
        self.last_shape: Hello | None = None  # of the epoch that runs, or ran last
        self.reason = "no engine yet"
        self._hellos: dict[int, Hello] = {}
        self.condemned = Condemned()
        self._steps: dict[int, int] = {}  # of each rank that is ready
        self._begun = False
        self._since = 0.0  # when that was
        self._ended = ""  # why the epoch before did

    @property
    def shape(self) -> Hello:
        """What the ranks agreed on; only while `running`."""
        return self._hellos[0]

    @property
    def incarnations(self) -> tuple[int, ...]:
        """Of the ranks' processes, rank 0 first; only once all have said hello."""
        return tuple(self._hellos[rank].incarnation for rank in range(self.tp))

    def hello(self, hello: Hello) -> bool:
        """Takes a hello; True if it ends a running epoch: the rank is another process now."""
        if hello.incarnation in self.condemned:
            return False
        self.condemned.gone(hello.rank, hello.incarnation)
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
            return False  # sent before it heard Begin
        ended = self.running
        if ended:
            self.end(f"engine rank {hello.rank} was started again")
        if known is None or known.incarnation != hello.incarnation:
            self._hellos[hello.rank] = hello
            self._begun = False
        return ended

    def lost(self, rank: int, incarnation: int) -> bool:
        """A rank's process `incarnation` ended; True if it, or one before it, had said hello."""
        known = self._hellos.get(rank)
        return known is not None and known.incarnation <= incarnation

    def begin(self, now: float) -> Begin | None:
        """The Begin to publish now, or None: ranks disagree, or the epoch runs.

        Published again and again until all ranks are ready: a subscription may be late.
        """
        if self.running:
            return None
        if len(self._hellos) < self.tp:
            return Begin(self.epoch, ())  # engines of an earlier scheduler: say hello
        first = self._hellos[min(self._hellos)]
        for hello in self._hellos.values():
            for name in AGREED:
                if getattr(hello, name) != getattr(first, name):
                    self.reason = (
                        f"ranks {first.rank} and {hello.rank} disagree on {name}: "
                        f"{getattr(first, name)!r} and {getattr(hello, name)!r}"
                    )
                    return None
        if not self._begun:
            self.epoch += 1
            self._begun = True
            self._since = now
            self._steps.clear()
        self.reason = f"epoch {self.epoch} begins" + (f" ({self._ended})" if self._ended else "")
        return Begin(self.epoch, self.incarnations)

    def ready(self, ready: Ready) -> bool:
        """Takes a rank's answer; True if the epoch runs from now on. Raises Torn."""
        known = self._hellos.get(ready.rank)
        if (
            self.running
            or not self._begun
            or ready.epoch != self.epoch
            or known is None
            or known.incarnation != ready.incarnation
        ):
            return False
        self._steps[ready.rank] = ready.steps
        if len(self._steps) < self.tp:
            return False
        if len(set(self._steps.values())) > 1:
            told = ", ".join(f"rank {rank} {steps}" for rank, steps in sorted(self._steps.items()))
            raise Torn(f"ranks have computed different numbers of steps: {told}")
        self.running = True
        self.reason = ""
        self._ended = ""
        self.last_shape = self.shape
        return True

    def check(self, now: float, seconds: float) -> None:
        """Raises Torn if a rank has not answered to the epoch that began `seconds` ago."""
        if self._begun and not self.running and now - self._since > seconds:
            silent = [str(rank) for rank in range(self.tp) if rank not in self._steps]
            raise Torn(f"rank {', '.join(silent)} gave no answer to epoch {self.epoch}")

    def end(self, reason: str) -> None:
        """The epoch is over; the same processes may begin another."""
        self.running = self._begun = False
        self.reason = self._ended = reason

    def condemn(
        self, reason: str, now: float, alive: Iterable[tuple[int, int]] = (), until: float = inf
    ) -> None:
        """The epoch is over, and all ranks must be started again: others are waited for.

        `alive`: (rank, incarnation) of processes that may not have said hello. `until`: those with
        a greater number are others already, unless they were in the epoch that ran. A single rank
        that was only slow may go on where nobody starts it again.
        """
        told = {rank: hello.incarnation for rank, hello in self._hellos.items()}
        met = told if self.running else {}
        doomed = {r: i for r, i in {**dict(alive), **told}.items() if i <= until} | met
        self.end(reason)
        self.condemned.add(doomed, now, shun=self.tp > 1)
        for rank in doomed.keys() & told.keys():
            del self._hellos[rank]
