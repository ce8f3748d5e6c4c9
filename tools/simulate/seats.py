"""The requests of a group that hold a slot, in the scheduler's and in the engine's eyes at once.

Stands in for scheduler/slots.py, with the same names where the planner uses them. Knows no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeinfer.messages import Admit, Extend, Release
from pipeinfer.scheduler.credits import Credits
from pipeinfer.scheduler.request import Request
from simulate.arrivals import Arrival


@dataclass(slots=True, eq=False)
class Life:
    """A request from its arrival to its end. last: when its latest token came."""

    arrival: Arrival
    request: Request
    last: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and all outputs that it wants."""
        return len(self.arrival.prompt) + self.arrival.output

    @property
    def lacks(self) -> int:
        """Output tokens that `request` has not got."""
        return self.arrival.output - len(self.request.outputs)


@dataclass(slots=True, eq=False)
class Seat:
    """One admission of a request. known to node: the engine's view, see memory/slot_arrays.py.

    place: grows with each admission of the group. since, next: the step of decodes in which its
    unbroken run of them began, and the one that would go on with it.
    """

    life: Life
    request: Request
    place: int
    admission: int
    known: int
    max_total: int
    computed: int = 0
    held: int = 0
    shared: int = 0
    node: Any = None
    gone: bool = False
    since: int = 0
    next: int = -1

    def ids(self, count: int) -> np.ndarray:
        """Its first `count` tokens, int32 [count]."""
        prompt = self.life.arrival.prompt
        if count <= len(prompt):
            return prompt[:count]
        outputs = np.full(count - len(prompt), self.life.arrival.sampled_id, np.int32)
        return np.concatenate((prompt, outputs))


@dataclass(slots=True, eq=False)
class Row:
    """One row of a plan; see messages.Plan for `count`. decode: the scheduler meant a decode.

    The memory fills in the rest: what is computed, and pages that are missing for it.
    """

    seat: Seat
    count: int
    decode: bool
    start: int = 0
    pages: int = 0
    prompt: bool = False
    samples: bool = False
    deferred: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(eq=False)
class Running:
    """All that run: one by one in the order of their admission, and the folded ones as stand-ins.

    See planner.Running. unseen: tokens that the folded ones have in truth, more than their
    stand-ins show.
    """

    seats: dict[str, Seat] = field(default_factory=dict[str, Seat])
    hot: list[Seat] = field(default_factory=list[Seat])
    folded: list[Request] = field(default_factory=list[Request])
    unseen: int = 0

    def values(self) -> list[Request]:
        return self.folded + [seat.request for seat in self.hot]

    def __len__(self) -> int:
        return len(self.seats)


class Seats:
    """See scheduler/slots.py, Slots. `lives`: of all requests that have not ended, by id. tokens:
    of all that run, outputs to come included. Plans carry no releases, shares and admits here:
    published, lending, admitted are those of the latest."""

    def __init__(self, lives: dict[str, Life]) -> None:
        self.running = Running()
        self.credits = Credits(1, 0)
        self.released_pages = 0
        self.releases: list[tuple[Seat, int]] = []
        self.published: Sequence[tuple[Seat, int]] = ()
        self.lending: Sequence[Seat] = ()
        self.admitted: Sequence[Seat] = ()
        self.tokens = 0
        self._lives = lives
        self._free = 0
        self._places = 0

    def begin(self, count: int, credits: Credits) -> None:
        self._free, self.credits = count, credits

    @property
    def free(self) -> int:
        return self._free + len(self.releases)

    @property
    def releasing(self) -> bool:
        return bool(self.releases)

    @property
    def ahead(self) -> dict[str, Request]:
        """Nothing is forced here."""
        return {}

    def jumping(self) -> dict[str, Request]:
        return {}

    def extend(self, rows: Iterable[tuple[Request, int]]) -> tuple[Extend, ...]:
        return ()

    def take_reset(self) -> bool:
        """Nobody asks for one here."""
        return False

    def context(self, rows: Iterable[tuple[Request, int]]) -> int:
        """Of all decodes: the folded ones are in every step that has any."""
        return sum([request.projected for request, _ in rows]) + self.running.unseen

    def left(self, rows: Iterable[tuple[Request, int]]) -> int:
        """Here every request ignores the model's end."""
        return max([request.max_total - request.projected for request, _ in rows], default=0)

    def release(self, request: Request, count_pages: bool = True) -> None:
        seat = self.running.seats.pop(request.id)
        self.running.hot.remove(seat)
        self.tokens -= seat.life.tokens
        self.releases.append((seat, len(request.confirmed)))
        if count_pages:
            self.released_pages += max(self.credits.between(request.hit, request.computed), 0)
        request.leave()

    def publish(self) -> tuple[Release, ...]:
        """The releases are those of the plan that is written now."""
        self.published, self.releases = self.releases, []
        self._free += len(self.published)
        self.released_pages = 0
        return ()

    def shared_by(self, requests: Sequence[Request]) -> bytes:
        leads = {r.behind.id for r in requests if r.borrows and r.behind is not None}
        self.lending = [seat for name, seat in self.running.seats.items() if name in leads]
        return b""

    def admit(self, requests: Sequence[Request]) -> tuple[Admit, ...]:
        self.admitted = [self._admit(request) for request in requests]
        return ()

    def _admit(self, request: Request) -> Seat:
        self._free -= 1
        self._places += 1
        request.move("running")
        request.slot = 0
        life = self._lives[request.id]
        self.tokens += life.tokens
        seat = Seat(
            life, request, self._places, request.admission, request.known,
            request.max_total,
        )  # fmt: skip
        self.running.seats[request.id] = seat
        self.running.hot.append(seat)
        return seat
