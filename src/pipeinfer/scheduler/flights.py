"""Plans that were published and have no result yet, and what their results say of each request.

Knows requests and plan numbers; no policy, no memory, no bus. Results come in the plans' order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeinfer.messages import Admitted, PromptScores, Result
from pipeinfer.packing import unpack
from pipeinfer.scheduler.request import Request

LATE = 2.0  # seconds without a result until something may be lost; then twice as long, and so on


BAD_LOGITS = "the model's logits for this request are not finite"
Landed = tuple[Request, list[int], bytes, str]


class Impossible(Exception):
    """What an engine says of a plan cannot be: the epoch cannot go on."""


class OutOfOrder(Impossible):
    """A result came that was not the next one."""


class Overdue(Exception):
    """A result did not come in time: a rank hangs."""


@dataclass(slots=True)
class Flight:
    """One plan: its rows as (request, admission of that request), and the slots they had then."""

    number: int
    rows: list[tuple[Request, int]]
    slots: list[int]
    published: float


class Flights:
    """The steps in flight of one epoch, oldest first."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._patience = LATE
        self._newest = -1  # plan of this epoch
        self.deferred = 0  # rows, over all epochs

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def newest(self) -> int:
        """The last plan of this epoch; -1 if there is none."""
        return self._newest

    def launch(self, number: int, rows: list[tuple[Request, int]], now: float) -> int:
        """Plan `number` was published with these (request, count) rows; returns its tokens."""
        slots = [request.slot for request, _ in rows]
        self._newest = number
        self._flights.append(Flight(number, [(r, r.admission) for r, _ in rows], slots, now))
        return sum([request.take(count) for request, count in rows])

    def late(self, now: float) -> bool:
        """Whether it is time to find out if the oldest plan, or its result, was lost on its way."""
        if not self._flights or now - self._flights[0].published < self._patience:
            return False
        self._patience *= 2
        return True

    def check(self, now: float, seconds: float) -> None:
        """Raises Overdue if the oldest plan has had no result for so long."""
        if self._flights and now - self._flights[0].published > seconds:
            raise Overdue(f"no result of plan {self._flights[0].number} in {seconds:g} s")

    def matched(self, admitted: Admitted) -> list[tuple[int, int]]:
        """What the prefix cache held of the requests that a plan admitted. Of those that are
        further by now than was thought, the computed tokens that were thought of and that there
        will be, once the steps in flight are done. Raises Impossible."""
        number = admitted.number
        if not 0 <= number <= self._newest:
            raise Impossible(f"plan {number} admitted some, {self._newest} was the last")
        _whole(admitted.slots, admitted.cached, what=f"admissions of plan {number}")
        flight = next((one for one in self._flights if one.number == number), None)
        if flight is None:
            return []  # its result has come
        by_slot = dict(zip(flight.slots, flight.rows, strict=True))
        slots, hits = unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist()
        further: list[tuple[int, int]] = []
        for slot, cached in zip(slots, hits, strict=True):
            request, admission = by_slot.get(slot, (None, 0))
            if request is None or not 0 <= cached < request.max_total:
                raise Impossible(f"plan {number} found {cached} tokens for slot {slot}")
            if request.cached < 0:  # also if it was taken back since: then its next hit is its own
                request.cached = cached
            if request.slot == slot and request.admission == admission:
                thought, request.hit = request.projected, cached
                request.rebase(cached)
                if request.projected > thought:
                    further.append((thought, request.projected))
        return further

    def scored(self, scores: PromptScores) -> Request | None:
        """Whose prompt's log-probs these are; None if it has ended, or was admitted anew. Raises
        OutOfOrder."""
        flight = self._oldest(scores.number)
        at = flight.slots.index(scores.slot) if scores.slot in flight.slots else -1
        if at < 0:
            raise OutOfOrder(f"plan {scores.number} has no row of slot {scores.slot}")
        request, admission = flight.rows[at]
        stale = request.phase == "over" or request.admission != admission
        return None if stale else request

    def _oldest(self, number: int) -> Flight:
        if not self._flights or self._flights[0].number != number:
            expected = self._flights[0].number if self._flights else "none"
            raise OutOfOrder(f"result {number} came, {expected} was expected")
        return self._flights[0]

    def land(self, result: Result) -> Iterator[Landed]:
        """(request, new output ids, their scores, "") for each row that counts. Instead of ids
        there is BAD_LOGITS, or why the row's grammar allows nothing. Raises Impossible.

        The hot path of the scheduler: one pass over the rows. Rows of requests that have ended, or
        that were admitted anew since, are surplus: nobody ever sees them.
        """
        flight = self._oldest(result.number)
        ends = _checked(flight, result)
        produced, ids = unpack(result.produced).tolist(), unpack(result.token_ids).tolist()
        deferred = set(unpack(result.deferred).tolist())
        self.deferred += len(deferred)
        bad = set(unpack(result.bad).tolist()) if result.bad else ()
        at, logprobs, end_of_scores, some = 0, result.logprobs, 0, b""
        rows = zip(flight.rows, flight.slots, ends, produced, strict=True)
        for (request, admission), slot, end, many in rows:
            tokens, at = ids[at : at + many], at + many
            if request.score_size:
                begin, end_of_scores = end_of_scores, end_of_scores + many * request.score_size
                some = logprobs[begin:end_of_scores]
            request.steps_in_flight -= 1
            if request.phase == "over" or request.admission != admission:
                continue
            repeated = request.prompt_len + len(request.outputs) - end  # of ids that were forced
            if repeated < 0 and request.phase != "running":
                continue  # behind a row of trouble, which is computed again with the next admission
            troubled = slot in bad or slot in result.refused
            if repeated < 0 or not (repeated or tokens or troubled):
                raise Impossible(
                    f"result {result.number} has {len(tokens)} ids of {request.id} behind {end} "
                    f"tokens, where {end + repeated} are known"
                )
            if request.phase == "running":
                request.confirm(end)
                request.deferrals = request.deferrals + 1 if slot in deferred else 0
                if result.mask_units:
                    request.mask_units = result.mask_units.get(slot, request.mask_units)
                if troubled:  # one that waits to be admitted again is computed again
                    why = BAD_LOGITS if slot in bad else result.refused[slot]
                    yield request, [], b"", why
            if len(tokens) > repeated:
                yield request, tokens[repeated:], some[repeated * request.score_size :], ""
        self._flights.popleft()
        self._patience = LATE

    def crash(self) -> list[Request]:
        """No result will come any more; returns the requests that were in flight, oldest first."""
        lost = {id(r): r for flight in self._flights for r, _ in flight.rows}
        for request in lost.values():
            request.steps_in_flight = 0
        self._flights.clear()
        self._patience, self._newest = LATE, -1
        return list(lost.values())


def _whole(*arrays: bytes, what: str) -> None:
    """Raises Impossible if these are not int32 bytes of as many items each."""
    lengths = [len(raw) for raw in arrays]
    if lengths[0] % 4 or lengths.count(lengths[0]) != len(lengths):
        raise Impossible(f"{what} have {', '.join(map(str, lengths))} bytes")


def _checked(flight: Flight, result: Result) -> list[int]:
    """Where the rows of a result end, if they can be those of `flight`. Raises Impossible."""
    what, rows = f"rows of result {result.number}", len(flight.rows)
    _whole(result.slots, result.starts, result.counts, result.produced, what=what)
    for some in (result.token_ids, result.deferred, result.bad):
        _whole(some, what=what)
    if (slots := unpack(result.slots).tolist()) != flight.slots:
        raise Impossible(f"{what} are of slots {slots}, of {flight.slots} in the plan")
    if not rows:
        return []
    starts, counts, produced = map(unpack, (result.starts, result.counts, result.produced))
    ends, ids = starts.astype(np.int64) + counts, unpack(result.token_ids)
    least = min(starts.min(), counts.min(), produced.min(), ids.min(initial=0))
    if least < 0 or produced.sum(dtype=np.int64) != len(ids):
        raise Impossible(f"{what} have {produced.sum()} of {len(ids)} ids, or {least} of something")
    if result.deferred or result.bad or result.refused:
        named = {*unpack(result.deferred).tolist(), *unpack(result.bad).tolist(), *result.refused}
        if not named <= set(slots):
            raise Impossible(f"{what} have troubles of slots {sorted(named)}, and are of {slots}")
    if result.logprobs or any(request.score_size for request, _ in flight.rows):
        scored = int(produced @ [request.score_size for request, _ in flight.rows])
        if scored != len(result.logprobs):
            raise Impossible(f"{what} have {len(result.logprobs)} bytes of log-probs, not {scored}")
    return ends.tolist()
