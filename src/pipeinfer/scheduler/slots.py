"""The engine's slots as the scheduler counts them: who holds one, what the next plan gives back.

Knows requests and numbers of slots and pages; no policy, no queue and no bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeinfer.messages import Admit, Admitted, Extend, Release, Result
from pipeinfer.packing import pack
from pipeinfer.scheduler.credits import Credits
from pipeinfer.scheduler.request import Request

LATELY = 16  # requests that ended, of which it is remembered how long they got


class Slots:
    """Slots of one epoch.

    running: requests that hold one, by id. released_pages: what the releases that were not
    published yet give back. ahead: those that may know more than steps in flight will compute, by
    id. credits: pages that plans may still take. evicted: pages that the
    prefix cache has lost in this epoch.
    """

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.ahead: dict[str, Request] = {}
        self.credits = Credits(1, 0)
        self.released_pages = 0
        self.evicted = 0
        self._free: list[int] = []
        self._releases: list[Release] = []
        self._resets = False
        self._lasted = 1.0  # share of the outputs they might have had that requests had lately

    def begin(self, count: int, credits: Credits) -> None:
        """An epoch begins with `count` empty slots."""
        self._free = list(range(count))
        self.credits, self.evicted = credits, 0
        self._resets = False  # its cache is empty

    def lose(self) -> list[Request]:
        """The epoch is over; returns the requests that held slots, in order of admission."""
        lost = list(self.running.values())
        for request in lost:
            request.leave()
            request.move("lost")
        self.running.clear()
        self.ahead.clear()
        self._releases.clear()
        self.released_pages = self.evicted = 0
        return lost

    def report(self, told: Admitted | Result) -> None:
        """The engine's pages, as it told them after one of the plans; the latest plan's count."""
        if self.credits.report(told.number, told.free, told.evictable):
            self.evicted = told.evicted

    @property
    def free(self) -> int:
        """Slots that the next plan may give out."""
        return len(self._free) + len(self._releases)

    @property
    def releasing(self) -> bool:
        """Whether the next plan has something to give back."""
        return bool(self._releases) or self._resets

    def reset_cache(self) -> None:
        """The next plan forgets cached prefixes that no request uses."""
        self._resets = True

    def take_reset(self) -> bool:
        """Whether the plan that is written now does."""
        resets, self._resets = self._resets, False
        return resets

    def left(self, rows: Iterable[tuple[Request, int]]) -> int:
        """Steps that the longest of these decodes may still take. Of what `max_tokens` leaves it,
        as much as requests took lately, unless the model cannot end it."""
        most = sure = 0
        for request, _ in rows:
            steps = request.max_total - request.projected
            most = max(most, steps)
            if request.work.params.ignore_eos:
                sure = max(sure, steps)
        return max(sure, round(most * self._lasted))

    def release(self, request: Request, count_pages: bool = True) -> None:
        """Takes the slot back with the next plan; what was computed may stay in the prefix cache,
        as far as it was confirmed. A prompt that nothing was sampled from before its client left
        does not: its logits may be bad. count_pages: False if a StepComposer has counted them."""
        del self.running[request.id]
        self.ahead.pop(request.id, None)
        ids = pack(request.confirmed)
        keep = not request.spoiled and (request.sampled or request.phase != "over")
        self._releases.append(
            Release(slot=request.slot, keep=keep, output_ids=ids, forget=request.spoiled)
        )
        if count_pages:
            self.released_pages += max(self.credits.between(request.hit, request.computed), 0)
        if request.phase == "over" and not request.work.params.ignore_eos:
            lasted = len(request.outputs) / max(request.max_total - request.prompt_len, 1)
            self._lasted += (lasted - self._lasted) / LATELY
        request.leave()

    def jumping(self) -> dict[str, Request]:
        """Those of `ahead` that still know enough to go on by more than one token, by id."""
        self.ahead = {key: one for key, one in self.ahead.items() if one.ahead > 1}
        return self.ahead

    def extend(self, rows: Iterable[tuple[Request, int]]) -> tuple[Extend, ...]:
        """For rows of so many tokens of requests that know them."""
        return tuple(Extend(slot=r.slot, ids=pack(r.jump(count))) for r, count in rows)

    def publish(self) -> tuple[Release, ...]:
        """The releases of the plan that is written now; their slots are free for its admits."""
        releases, self._releases = tuple(self._releases), []
        self._free.extend(release.slot for release in releases)
        self.released_pages = 0
        return releases

    def shared_by(self, requests: Sequence[Request]) -> bytes:
        """Slots, int32, of the half-computed prompts whose pages these will find, if the plan that
        admits them puts those into the prefix cache first."""
        lending = {r.behind for r in requests if r.borrows and r.behind is not None}
        return pack(sorted(lead.slot for lead in lending if lead.id in self.running))

    def admit(self, requests: Sequence[Request]) -> tuple[Admit, ...]:
        """Gives each of them a slot."""
        return tuple(map(self._admit, requests))

    def _admit(self, request: Request) -> Admit:
        request.move("running")
        request.slot = self._free.pop()
        self.running[request.id] = request
        work, params = request.work, request.work.params
        suppress = tuple(sorted(request.stops)) if params.min_tokens > 0 else ()
        return Admit(
            slot=request.slot,
            request_id=request.id,
            token_ids=work.prompt_ids + pack(request.outputs),
            prompt_len=request.prompt_len,
            max_total=request.max_total,
            params=params,
            seed=work.seed,
            suppress=suppress,
            cache_salt=work.cache_salt,
            score_from=request.score_from,
            banned=work.banned,
            trace=work.trace,
            thoughts=work.thoughts,
        )
