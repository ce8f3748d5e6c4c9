"""Requests that wait for a slot, in the order of admission.

Knows no engine. Priority first (lower is earlier, as in vLLM), then arrival; a preempted request
keeps its arrival and so returns to the head of its priority. Those that wait for the prompt of
another, or for its beginning, stand beside the queue.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from pipeinfer.scheduler.families import Families
from pipeinfer.scheduler.prefixes import Prefixes
from pipeinfer.scheduler.preparation import Preparation
from pipeinfer.scheduler.request import Request
from pipeinfer.step_cost import Prompt

AHEAD = 64  # prompts that are looked at one by one
LOOKED_AT = 4  # entries for each that is asked for: most may be gone
FEW_GONE = 64


class WaitingQueue:
    """A sorted list. Nearly all come at its end and leave at its front, which moves the pointers
    behind; a request that is over stays until it comes up, or until most are.

    tokens: of all in it, as many as there were to compute of each when it came. preparation: of
    grammars, for which some wait before they come into the queue.
    """

    def __init__(self, tp: int = 1) -> None:
        self.tokens = 0
        self.preparation = Preparation(tp)
        self._order: list[tuple[int, int, Request]] = []
        self._gone = 0
        self._families = Families()
        self._prefixes = Prefixes()

    @property
    def held(self) -> int:
        """How many wait for the prompt of another, and are not in the queue."""
        return len(self._families) + len(self._prefixes)

    def push(self, request: Request) -> None:
        """It wants to run."""
        if not self.preparation.hold(request) and not self._families.hold(request):
            self._alone(request)

    def begin(self, processes: Sequence[int], grain: int = 0) -> None:
        """An epoch begins, on engines of these incarnations: what they do not know is asked for.
        grain: see Prefixes.begin."""
        self.preparation.begin(processes)
        waiting = [one for _, _, one in self._order if one.phase == "waiting"]
        with_grammar = [one for one in waiting if one.work.params.structured_outputs is not None]
        held = [one for one in with_grammar if self.preparation.hold(one)]
        if self._prefixes.begin(grain):
            left = [one for one in waiting if one.phase == "waiting"]
            held += [one for one in left if self._prefixes.hold(one)]
        if held:
            self.tokens -= sum(one.queued for one in held)
            self._order = [one for one in self._order if one[2].phase in ("waiting", "over")]

    def free(self, running: Iterable[Request]) -> None:
        """Lets those in that waited for the prompt of one of these."""
        for request in self._families.ready(running):
            self._let_in(request)
        for request in self._prefixes.ready():
            self._let_in(request)

    def over(self, request: Request, ran: bool) -> None:
        """`request` has ended; `ran`: in a slot. Lets those in that need not wait any more."""
        for one in self._families.gone(request, ran):
            self._let_in(one)
        for one in self._prefixes.gone(request):
            self._alone(one)

    def _alone(self, request: Request) -> None:
        """It waits for no prompt that is its own; perhaps for the beginning of one."""
        if not self._prefixes.hold(request):
            self._let_in(request)

    def _let_in(self, request: Request) -> None:
        """It was held; the engines may be others meanwhile, without its grammar."""
        if not self.preparation.hold(request):
            self._put(request)

    def _put(self, request: Request) -> None:
        request.move("waiting")
        request.queued = request.length - request.shared
        self.tokens += request.queued
        insort(self._order, (request.work.priority, request.arrival, request))

    def head(self) -> Request | None:
        """The next request, still in the queue; None if there is none."""
        gone = 0
        while gone < len(self._order) and self._order[gone][2].phase == "over":
            gone += 1
        if gone:
            del self._order[:gone]
            self._gone -= gone
        return self._order[0][2] if self._order else None

    def first(self, count: int) -> list[Request]:
        """At most `count` that come next; fewer also where most of the next are gone."""
        near = self._order[: count * LOOKED_AT]
        return [request for _, _, request in near if request.phase != "over"][:count]

    def prompts(self, now: float) -> list[Prompt]:
        """All prompts in it, in their order; of those that are far behind only the mean length is
        known, and no age. now: seconds, by the clock of Request.since."""
        near = self.first(AHEAD)
        found = [Prompt(r.queued, r.length - r.queued, now - r.since) for r in near]
        behind, tokens = len(self) - len(near), self.tokens - sum(r.queued for r in near)
        if behind > 0:
            mean, many = max(tokens // behind, 1), min(behind, AHEAD)
            found += [Prompt(mean)] * many
            found.append(Prompt(max(tokens - mean * many, 0)))
        return found

    def pop(self) -> Request:
        """Removes and returns the head; IndexError if there is none."""
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        del self._order[0]
        self.tokens -= request.queued
        return request

    def forget(self, request: Request) -> None:
        """`request` waited here and is over; it leaves when it comes up, or with many."""
        self.tokens -= request.queued
        self._gone += 1
        if self._gone > FEW_GONE and self._gone > len(self._order) // 2:
            self._order = [one for one in self._order if one[2].phase != "over"]
            self._gone = 0

    def __len__(self) -> int:
        return len(self._order) - self._gone
