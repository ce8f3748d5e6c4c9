"""Slots of the engines for LoRA adapters, and the requests that wait for theirs.

An adapter keeps its slot as long as a live request has it. Then the slot goes to the next adapter
that needs one; until then the adapter stays, for later requests. Requests whose adapter has no slot
wait in turn, and so do requests that come after them with any adapter: otherwise requests with
loaded adapters could keep others out for ever. Knows requests and incarnations; no page and no
clock: times come as arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeinfer.messages import AdapterLoaded, LoadAdapter
from pipeinfer.params import Adapter
from pipeinfer.scheduler.request import Request

# Seconds after which engines are asked again, because a subscription may have been late.
LOAD_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter with a slot.

    Attributes:
    - number: number of its LoadAdapter messages
    - slot: from 1 on
    - users: number of live requests that have it
    - waiting: those of them that wait until all ranks have loaded it
    - ranks_loaded: ranks that have loaded it
    - loaded: all ranks have loaded it
    - sent: when the ranks were asked last, in seconds
    """

    number: int
    slot: int
    adapter: Adapter
    users: int = 0
    waiting: list[Request] = field(default_factory=list[Request])
    ranks_loaded: set[int] = field(default_factory=set[int])
    loaded: bool = False
    sent: float = float("-inf")


class AdapterSlots:
    """The `slots` adapter slots of one group of `tp` ranks."""

    def __init__(self, tp: int, slots: int) -> None:
        self._tp = tp
        self._processes: tuple[int, ...] = ()
        self._num_slots = slots
        self._numbers = 0
        # By digest; least recently used first.
        self._adapters: dict[str, LoadedAdapter] = {}
        self._user_of: dict[str, str] = {}  # digests, by the ids of requests that use them
        self._without_slot: deque[Request] = deque()
        self._ready: list[Request] = []

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._without_slot) + sum(len(one.waiting) for one in self._adapters.values())

    def begin(self, processes: Sequence[int]) -> None:
        """An epoch begins, on engines of the incarnations `processes`; new processes have loaded
        nothing."""
        if tuple(processes) == self._processes:
            return
        self._processes = tuple(processes)
        for one in self._adapters.values():
            one.loaded = False
            one.ranks_loaded.clear()
            one.sent = float("-inf")

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if its adapter is not loaded; True if it was taken, and
        waits here."""
        if self.ensure_adapter(request):
            return False
        if request.phase != "waiting_for_adapter":
            request.move("waiting_for_adapter")
        return True

    def ensure_adapter(self, request: Request) -> bool:
        """True if engines have loaded the adapter of `request`, or it has none. Otherwise `request`
        is noted as waiting for it, and the result is False; its phase stays."""
        if request.work.adapter is None:
            return True
        if request.id not in self._user_of:
            if request in self._without_slot:
                return False
            if self._without_slot or not self._give_slot(request):
                self._without_slot.append(request)
                return False
        one = self._adapters[self._user_of[request.id]]
        if not one.loaded and request not in one.waiting:
            one.waiting.append(request)
        return one.loaded

    def _give_slot(self, request: Request) -> bool:
        """Makes `request` a user of its adapter's slot; False if there is none for it."""
        adapter = request.work.adapter
        assert adapter is not None
        one = self._adapters.pop(adapter.digest, None)
        if one is None:
            slot = self._free_slot()
            if not slot:
                return False
            self._numbers += 1
            one = LoadedAdapter(self._numbers, slot, adapter)
        self._adapters[adapter.digest] = one
        one.users += 1
        self._user_of[request.id] = adapter.digest
        request.adapter_slot = one.slot
        return True

    def _free_slot(self) -> int:
        """A slot that no live request uses, without an adapter from now on; 0: there is none."""
        if len(self._adapters) < self._num_slots:
            taken = {one.slot for one in self._adapters.values()}
            return next(slot for slot in range(1, self._num_slots + 1) if slot not in taken)
        unused = next((key for key, one in self._adapters.items() if not one.users), None)
        return 0 if unused is None else self._adapters.pop(unused).slot

    def release(self, request: Request) -> None:
        """Forgets `request`, which has ended; no-op if it has no adapter."""
        if request.work.adapter is None:
            return
        digest = self._user_of.pop(request.id, None)
        if request in self._ready:
            self._ready.remove(request)
        if digest is None:
            if request in self._without_slot:
                self._without_slot.remove(request)
        else:
            one = self._adapters[digest]
            one.users -= 1
            if request in one.waiting:
                one.waiting.remove(request)
        self._give_slots()

    def _give_slots(self) -> None:
        """Gives free slots to requests without one, in turn."""
        while self._without_slot and self._give_slot(self._without_slot[0]):
            request = self._without_slot.popleft()
            if self.ensure_adapter(request):
                self._ready.append(request)

    def take_ready(self) -> list[Request]:
        """Removes and returns requests that no longer wait, to be pushed into the queue."""
        ready, self._ready = self._ready, []
        return [one for one in ready if one.phase == "waiting_for_adapter"]

    def take_due(self, epoch: int, next_plan: int, now: float) -> Iterator[LoadAdapter]:
        """Messages that are to be sent to engines at `now` (seconds), in `epoch`, before its plan
        `next_plan`."""
        for one in self._adapters.values():
            if one.waiting and not one.loaded and now - one.sent >= LOAD_RETRY_SECONDS:
                one.sent = now
                yield LoadAdapter(
                    epoch=epoch,
                    number=one.number,
                    slot=one.slot,
                    adapter=one.adapter,
                    next_plan=next_plan,
                )

    def on_loaded(self, loaded: AdapterLoaded) -> list[Request]:
        """Takes a rank's answer in the running epoch. Once all ranks have the adapter, the requests
        that waited for it are ready. If the rank cannot have it, they are returned."""
        if (loaded.rank, loaded.incarnation) not in enumerate(self._processes):
            return []
        every = self._adapters.values()
        one = next((one for one in every if one.number == loaded.number), None)
        if one is None or one.loaded:
            return []
        if loaded.error:
            one.ranks_loaded.clear()
            refused, one.waiting = one.waiting, []
            return refused
        one.ranks_loaded.add(loaded.rank)
        if len(one.ranks_loaded) == self._tp:
            one.loaded = True
            self._ready += one.waiting
            one.waiting = []
        return []
