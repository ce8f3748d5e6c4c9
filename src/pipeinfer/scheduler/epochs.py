"""The handshake that begins an epoch: which engine ranks are there, and whether they agree.

Knows no request. A group starts only after every rank said hello with the same model, page size,
pool, graph sizes and attention backend, and answered that it hears the plan channel.
"""

from __future__ import annotations

from pipeinfer.messages import PROTOCOL, Begin, Hello, Ready

AGREED = (
    "model",
    "page_size",
    "pages",
    "max_slots",
    "max_model_len",
    "attention",
    "graph_sizes",
    "step_tokens",
)


class Epochs:
    """Where one group stands: nobody there, `beginning`, or `running`.

    first: number of the first epoch; larger than that of any earlier scheduler of this group.
    """

    def __init__(self, tp: int, first: int) -> None:
        self.tp, self.epoch = tp, first
        self.running = False
        self.reason = "no engine yet"
        self._hellos: dict[int, Hello] = {}
        self._ready: set[int] = set()
        self._begun = False

    @property
    def shape(self) -> Hello:
        """What the ranks agreed on; only while `running`."""
        return self._hellos[0]

    def hello(self, hello: Hello) -> bool:
        """Takes a hello; True if it ends a running epoch: the rank is another process now."""
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

    def begin(self) -> Begin | None:
        """The Begin to publish now, or None: ranks are missing or disagree, or the epoch runs.

        Published again and again until all ranks are ready: a subscription may be late.
        """
        if self.running:
            return None
        if not self._hellos:
            return Begin(self.epoch, ())  # engines of an earlier scheduler: say hello
        if len(self._hellos) < self.tp:
            return None
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
            self._ready.clear()
        self.reason = f"epoch {self.epoch} begins"
        incarnations = tuple(self._hellos[rank].incarnation for rank in range(self.tp))
        return Begin(self.epoch, incarnations)

    def ready(self, ready: Ready) -> bool:
        """Takes a rank's answer; True if the epoch runs from now on."""
        known = self._hellos.get(ready.rank)
        if (
            self.running
            or not self._begun
            or ready.epoch != self.epoch
            or known is None
            or known.incarnation != ready.incarnation
        ):
            return False
        self._ready.add(ready.rank)
        self.running = len(self._ready) == self.tp
        if self.running:
            self.reason = ""
        return self.running

    def end(self, reason: str, forget: bool = False) -> None:
        """The epoch is over. `forget`: all ranks will be started again, wait for new hellos."""
        self.running = self._begun = False
        self.reason = reason
        if forget:
            self._hellos.clear()
