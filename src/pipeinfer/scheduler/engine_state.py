"""The scheduler's picture of the engine: which requests hold slots, which steps are in flight, how
many pages are left, and up to which plan the ranks agree.

Takes the engines' reports of plans; SchedulerCore decides what they mean for a request. Knows no
policy, no bus and no clock: times come as arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import numpy as np

from pipeinfer.messages import (
    Admit,
    Admitted,
    AppendTokens,
    Digests,
    Plan,
    PromptLogprobs,
    Release,
    Result,
)
from pipeinfer.scheduler.drafting import DraftCounts
from pipeinfer.scheduler.request import Request
from pipeinfer.wire import pack, unpack

NO_DRAFTING: Mapping[str, int] = MappingProxyType({})
PlannedRow = tuple[Request, int]  # a row of a plan: the request, and how many tokens it computes
# a row of a published step: the request, and its `admission` then
RowInFlight = tuple[Request, int]


class EngineState:
    """The scheduler's picture of the engine of one group of `tp` ranks.

    Attributes:
    - slots: requests with slots, and page counts
    - in_flight: steps that have no result yet
    - published: plans that some rank may not have received
    """

    def __init__(self, tp: int) -> None:
        self.slots = Slots()
        self.in_flight = StepsInFlight()
        self.published = PublishedPlans()
        self._agreement = DigestAgreement(tp)

    @property
    def agreed_plans(self) -> int:
        """Number of plans of which all ranks made the same decisions."""
        return self._agreement.compared

    def begin(self) -> None:
        """A new epoch begins; no plan was compared yet."""
        self._agreement.begin()

    def on_admitted(self, admitted: Admitted) -> None:
        """Takes the report that a plan was applied: page counts, and cache hits. Raises
        InvalidReport."""
        self._check_pages(admitted)
        credits = self.slots.credits
        # A cache hit means fewer prompt tokens were left than planned, so rows already in flight
        # reach further: reserve the additional pages.
        pages = sum(credits.between(*further) for further in self.in_flight.on_admitted(admitted))
        if pages:
            credits.reserve(self.in_flight.newest, pages)
        self.slots.on_page_counts(admitted)

    def process_result(self, result: Result) -> Iterator[RowResult]:
        """Takes a plan's result; see StepsInFlight.process_result. Raises InvalidReport, and at its
        end RanksDisagree."""
        self._check_pages(result)
        yield from self.in_flight.process_result(result)
        self.slots.on_page_counts(result)
        self._agreement.on_result(result.digest)
        self.published.forget(self._agreement.applied)

    def _check_pages(self, counts: Admitted | Result) -> None:
        pages = self.slots.credits.pages
        free, evictable, evicted = counts.free, counts.evictable, counts.evicted
        max_evicted = (
            2 * pages * (counts.number + 1)
        )  # a plan may empty the cache, and then the pool
        there = free >= 0 and evictable >= 0 and free + evictable <= pages
        if not there or not 0 <= evicted <= max_evicted:
            raise InvalidReport(
                f"of {pages} pages plan {counts.number} left {free} free and {evictable} "
                f"evictable, and {evicted} are evicted"
            )

    def on_digests(self, digests: Digests) -> None:
        """Takes the digests of a rank above 0. Raises RanksDisagree."""
        self._agreement.on_digests(digests)
        self.published.forget(self._agreement.applied)

    def on_epoch_lost(self) -> tuple[list[Request], list[Request]]:
        """The epoch is over. Returns (requests that held slots, requests that were in flight)."""
        self.published.clear()
        return self.slots.on_epoch_lost(), self.in_flight.on_epoch_lost()


class PublishedPlans:
    """Plans of one epoch, until all ranks have reported that they have applied them: rank 0 by its
    results, the others by their digests. Plans that a rank misses are published again."""

    def __init__(self) -> None:
        self._plans: deque[Plan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: Plan) -> None:
        """Adds `plan`, which is published after all others."""
        self._plans.append(plan)

    def forget(self, number: int) -> None:
        """Drops the plans before `number`, which all ranks have applied."""
        while self._plans and self._plans[0].number < number:
            self._plans.popleft()

    def clear(self) -> None:
        """Drops all plans at the end of the epoch."""
        self._plans.clear()

    def since(self, number: int) -> tuple[Plan, ...]:
        """Plan `number` and all later ones; empty if that plan is not kept."""
        if not self._plans or number < self._plans[0].number:
            return ()
        return tuple(islice(self._plans, number - self._plans[0].number, None))


class PageCredits:
    """Budget of pages that the scheduler may still promise; counts only, no page numbers.

    The engine reports how many pages are free or evictable after a plan; pages planned since are
    taken off without counting on cache hits. An error is harmless: the engine defers rows for which
    it has no pages.

    Attributes:
    - page_size: tokens of a page
    - pages: pages of the whole pool
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._reported = pages
        self._number = -1  # of the plan after which these were reported
        self._reserved: deque[tuple[int, int]] = deque()  # (plan number, pages it may take)

    def between(self, start: int, end: int) -> int:
        """Number of pages that a request takes as it grows from `start` to `end` computed
        tokens."""
        size = self.page_size
        return (end + size - 1) // size - (start + size - 1) // size

    def on_page_counts(self, number: int, free: int, evictable: int) -> bool:
        """Takes the engine's counts after it applied plan `number`. Returns False, and changes
        nothing, for counts older than the latest: `Admitted` of a later plan comes before the
        results of plans in flight, whose counts are older."""
        if number < self._number:
            return False
        self._number = number
        while self._reserved and self._reserved[0][0] <= number:
            self._reserved.popleft()
        self._reported = free + evictable
        return True

    def reserve(self, number: int, pages: int) -> None:
        """Takes `pages` off the budget, which plan `number` may allocate; negative if the plan
        gives back more than it takes."""
        self._reserved.append((number, pages))

    @property
    def available(self) -> int:
        """Number of pages that a new plan may take."""
        return self._reported - sum(pages for _, pages in self._reserved)


class PageAllowance:
    """Pages that one plan may take of the `credits`, and of the `released` ones that it gives back.

    Attributes:
    - taken: pages that the plan takes so far, net of those it gives back
    - left: pages that it may still take
    """

    def __init__(self, credits: PageCredits, released: int = 0) -> None:
        self.page_size = credits.page_size
        self.between = credits.between
        self.taken = -released
        self.left = credits.available + released

    def tokens_that_fit(self, start: int) -> int:
        """Number of tokens for which there are pages after `start` computed ones: the rest of the
        page that these have begun, and the pages that are left."""
        return -start % self.page_size + max(self.left, 0) * self.page_size

    def take(self, pages: int) -> None:
        """Takes `pages` more; negative: gives them back."""
        self.taken += pages
        self.left -= pages


AVERAGED_OVER = 16  # ended requests over which the mean output length is taken


class Slots:
    """Slots of one epoch.

    Attributes:
    - running: requests that hold a slot, by id
    - forced_ahead: by id, requests that may have more known ids than the steps in flight compute
    - credits: pages that plans may still take
    - released_pages: pages given back by releases that are not published yet
    - evicted: pages that the prefix cache has lost in this epoch
    """

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.forced_ahead: dict[str, Request] = {}
        self.credits = PageCredits(1, 0)
        self.released_pages = 0
        self.evicted = 0
        self._free: list[int] = []
        self._releases: list[Release] = []
        self._resets = False
        # the last plan with a reset that no engine is known to have applied
        self._reset_plan: int | None = None
        # Mean share of their possible outputs that requests had when they ended lately.
        self._mean_output_fraction = 1.0

    def begin(self, count: int, credits: PageCredits) -> None:
        """An epoch begins with `count` empty slots."""
        self._free = list(range(count))
        self.credits, self.evicted = credits, 0

    def on_epoch_lost(self) -> list[Request]:
        """The epoch is over; returns the requests that held slots, in order of admission."""
        lost = list(self.running.values())
        for request in lost:
            request.on_epoch_lost()
        self.running.clear()
        self.forced_ahead.clear()
        self._releases.clear()
        self.released_pages = self.evicted = 0
        # the next engine may recover pages that the reset was to drop
        if self._reset_plan is not None:
            self._resets, self._reset_plan = True, None
        return lost

    def on_page_counts(self, counts: Admitted | Result) -> None:
        """Takes the engine's page counts after one of the plans; the latest plan's counts hold."""
        if self.credits.on_page_counts(counts.number, counts.free, counts.evictable):
            self.evicted = counts.evicted
        if self._reset_plan is not None and counts.number > self._reset_plan:
            self._reset_plan = None  # an engine writes its page directory after it has reported

    @property
    def free(self) -> int:
        """Number of slots that the next plan may give out."""
        return len(self._free) + len(self._releases)

    @property
    def releasing(self) -> bool:
        """Whether the next plan has slots to release, or a cache to reset."""
        return bool(self._releases) or self._resets

    def reset_cache(self) -> None:
        """Makes the next plan drop cached prefixes that no request uses; a plan of the next epoch,
        if none runs, or if the engine is lost before it has applied the plan."""
        self._resets = True

    def take_reset(self, number: int) -> bool:
        """Whether plan `number`, which is written now, drops cached prefixes, as `reset_cache`
        asked; then False until the next `reset_cache`."""
        resets, self._resets = self._resets, False
        if resets:
            self._reset_plan = number
        return resets

    def remaining_steps(self, rows: Iterable[PlannedRow]) -> int:
        """Estimates how many steps the longest of these decodes still takes.

        A request with ignore_eos is expected to use all of its max_tokens, any other the mean share
        of max_tokens that requests have used lately, however they ended.
        """
        longest = certain = 0
        for request, _ in rows:
            steps = request.max_total - request.projected
            longest = max(longest, steps)
            if request.work.params.ignore_eos:
                certain = max(certain, steps)
        return max(certain, round(longest * self._mean_output_fraction))

    def release(self, request: Request, count_pages: bool = True) -> None:
        """Takes the slot back with the next plan. Tokens that results have confirmed may stay in
        the prefix cache. If the request is over (its phase is "finished" by now) and has no token
        since its admission, nothing new is cached, because it is unknown whether its logits were
        finite.

        - count_pages: False if a StepComposer has counted the pages
        """
        del self.running[request.id]
        self.forced_ahead.pop(request.id, None)
        ids = pack(request.sampled_ids)
        keep = not request.bad_logits and (request.sampled or request.phase != "finished")
        self._releases.append(
            Release(
                slot=request.slot, cache_prefix=keep, output_ids=ids, drop_prefix=request.bad_logits
            )
        )
        if count_pages:
            self.released_pages += max(self.credits.between(request.cache_hit, request.computed), 0)
        if request.phase == "finished" and not request.work.params.ignore_eos:
            output_fraction = len(request.outputs) / max(request.max_total - request.prompt_len, 1)
            self._mean_output_fraction += (
                output_fraction - self._mean_output_fraction
            ) / AVERAGED_OVER
        request.free_slot()

    def can_jump(self) -> dict[str, Request]:
        """Drops requests from `forced_ahead` that cannot go on by more than one token; returns the
        others, by id."""
        self.forced_ahead = {
            key: one for key, one in self.forced_ahead.items() if one.num_forced_ahead > 1
        }
        return self.forced_ahead

    def extend(self, rows: Iterable[PlannedRow]) -> tuple[AppendTokens, ...]:
        """Returns the forced ids of these rows that the engine has not got, for requests that go on
        by forced ids alone. From now on they count as sent (Request.jump)."""
        return tuple(AppendTokens(slot=r.slot, ids=pack(r.jump(count))) for r, count in rows)

    def take_releases(self) -> tuple[Release, ...]:
        """Returns the releases of the plan that is written now; their slots are free for its
        admits."""
        releases, self._releases = tuple(self._releases), []
        self._free.extend(release.slot for release in releases)
        self.released_pages = 0
        return releases

    def prefix_source_slots(self, requests: Sequence[Request]) -> bytes:
        """Plan.cache_slots, int32 bytes: slots of the half-computed prompts whose pages `requests`
        will share, once the plan that admits them has put those pages into the prefix cache."""
        sources = {
            r.prefix_source
            for r in requests
            if r.prefix_unpublished and r.prefix_source is not None
        }
        return pack(sorted(source.slot for source in sources if source.id in self.running))

    def admit(self, requests: Sequence[Request]) -> tuple[Admit, ...]:
        """Gives each of `requests` a slot; returns their Admits."""
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
            suppressed_ids=suppress,
            cache_salt=work.cache_salt,
            prompt_logprobs_from=request.prompt_logprobs_from,
            bad_word_ids=work.bad_word_ids,
            trace=work.trace,
            reasoning=work.reasoning,
            adapter_slot=request.adapter_slot,
        )


# Seconds without a result until a plan or its result may be lost; doubled after each probe.
LATE_SECONDS = 2.0
BAD_LOGITS = "the model's logits for this request are not finite"
RowResult = tuple[Request, list[int], bytes, str]


class InvalidReport(Exception):
    """An engine's report of a plan contradicts the plan or itself: the epoch cannot go on."""


class OutOfOrder(InvalidReport):
    """A result came that is not the next one."""


class StepOverdue(Exception):
    """A result did not come in time: a rank hangs."""


@dataclass(slots=True)
class StepInFlight:
    """A published plan without a result.

    Attributes:
    - number: of the plan
    - rows: RowInFlight, not PlannedRow
    - slots: slots of the rows, when the plan was written
    - published: when, in seconds
    - drafts: by slot, draft tokens of drafted requests' rows
    """

    number: int
    rows: list[RowInFlight]
    slots: list[int]
    published: float
    drafts: dict[int, int]


class StepsInFlight:
    """The steps in flight of one epoch, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._late_after = LATE_SECONDS
        self._newest = -1  # number of the last plan of this epoch
        self.deferred = 0  # rows, over all epochs
        self.recomputed = 0  # tokens, over all epochs, that a lost engine had computed
        self.draft_counts = DraftCounts()
        self._drafting = False  # some plan of this epoch had draft tokens

    def __len__(self) -> int:
        return len(self._steps)

    def newest_drafts(self) -> Mapping[int, int]:
        """StepInFlight.drafts of the last plan."""
        return self._steps[-1].drafts

    @property
    def newest(self) -> int:
        """Number of the last plan of this epoch; -1 if there is none."""
        return self._newest

    def add(
        self,
        number: int,
        rows: list[PlannedRow],
        now: float,
        drafts: Mapping[str, int] = NO_DRAFTING,
    ) -> int:
        """Adds plan `number`, made at `now` (seconds), which will be published. Projects each of
        the requests by its row (Request.project), and returns the number of tokens that the plan
        will compute.

        - rows: of the plan
        - drafts: by request id, draft tokens in the row
        """
        slots = [request.slot for request, _ in rows]
        self._newest = number
        step = StepInFlight(number, [(r, r.admission) for r, _ in rows], slots, now, {})
        self._steps.append(step)
        self._drafting = self._drafting or bool(drafts)
        if not self._drafting:  # the hot path, without a look at each request
            return sum([request.project(count) for request, count in rows])
        tokens = sum([request.project(count, drafts.get(request.id, 0)) for request, count in rows])
        step.drafts = {
            r.slot: -1 - r.counts_in_flight[-1] for r, _ in rows if r.counts_in_flight[-1] < 0
        }
        return tokens

    def take_probe_due(self, now: float) -> bool:
        """True if it is time to find out whether the oldest plan, or its result, was lost on its
        way. The next time comes after twice as many seconds, until a result comes."""
        if not self._steps or now - self._steps[0].published < self._late_after:
            return False
        self._late_after *= 2
        return True

    def check(self, now: float, seconds: float) -> None:
        """Raises StepOverdue if the oldest plan has had no result for `seconds`."""
        if self._steps and now - self._steps[0].published > seconds:
            raise StepOverdue(
                f"no result of plan {self._steps[0].number} within {seconds:g} s (--watchdog)"
            )

    def on_admitted(self, admitted: Admitted) -> list[tuple[int, int]]:
        """Takes the cache hits of the requests that a plan admitted, and projects these anew.
        Returns (projected before, projected now), in tokens, of each request that is further than
        was projected. Raises InvalidReport."""
        number = admitted.number
        if not 0 <= number <= self._newest:
            raise InvalidReport(
                f"admissions of plan {number} were reported, but the newest plan is {self._newest}"
            )
        _check_int32(admitted.slots, admitted.cached, what=f"admissions of plan {number}")
        flight = next((one for one in self._steps if one.number == number), None)
        if flight is None:
            return []  # its result has come
        by_slot = dict(zip(flight.slots, flight.rows, strict=True))
        slots, hits = unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist()
        further: list[tuple[int, int]] = []
        for slot, cached in zip(slots, hits, strict=True):
            request, admission = by_slot.get(slot, (None, 0))
            if request is None or not 0 <= cached < request.max_total:
                raise InvalidReport(f"plan {number} found {cached} tokens for slot {slot}")
            if (
                request.first_cache_hit < 0
            ):  # also if it was preempted since: its next hit would be on its own pages
                request.first_cache_hit = cached
            self.recomputed += request.take_recomputed(cached)
            if request.slot == slot and request.admission == admission:
                projected_before, request.cache_hit = request.projected, cached
                request.replay_in_flight(cached)
                if request.projected > projected_before:
                    further.append((projected_before, request.projected))
        return further

    def request_of_prompt_logprobs(self, message: PromptLogprobs) -> Request | None:
        """The request whose prompt's log-probs these are; None if it has ended, or was admitted
        anew. Raises OutOfOrder."""
        flight = self._oldest(message.number)
        at = flight.slots.index(message.slot) if message.slot in flight.slots else -1
        if at < 0:
            raise OutOfOrder(f"plan {message.number} has no row of slot {message.slot}")
        request, admission = flight.rows[at]
        stale = request.phase == "finished" or request.admission != admission
        return None if stale else request

    def _oldest(self, number: int) -> StepInFlight:
        if not self._steps or self._steps[0].number != number:
            expected = self._steps[0].number if self._steps else "none"
            raise OutOfOrder(f"result {number} came, {expected} was expected")
        return self._steps[0]

    def process_result(self, result: Result) -> Iterator[RowResult]:
        """Yields (request, new output ids, their log-probs, error) for each row that counts. The
        error is empty, or BAD_LOGITS or the reason why the row's grammar allows nothing, without
        ids. Raises InvalidReport.

        The hot path of the scheduler: one pass over the rows. Rows of requests that have ended, or
        that were admitted anew since, are overrun tokens: they are dropped.
        """
        flight = self._oldest(result.number)
        row_ends = _checked(flight, result)
        produced, ids = unpack(result.produced).tolist(), unpack(result.token_ids).tolist()
        deferred = set(unpack(result.deferred).tolist())
        self.deferred += len(deferred)
        bad = set(unpack(result.bad).tolist()) if result.bad else ()
        at, logprobs, end_of_logprobs, row_logprobs = 0, result.logprobs, 0, b""
        rows = zip(flight.rows, flight.slots, row_ends, produced, strict=True)
        for (request, admission), slot, end, num_ids in rows:
            tokens, at = ids[at : at + num_ids], at + num_ids
            if request.logprob_size:
                begin = end_of_logprobs
                end_of_logprobs += num_ids * request.logprob_size
                row_logprobs = logprobs[begin:end_of_logprobs]
            request.steps_in_flight -= 1
            if request.phase == "finished" or request.admission != admission:
                continue
            first = end  # position of the first id
            if slot in flight.drafts:
                first = end - max(num_ids - 1, 0)
                if num_ids:
                    self.draft_counts.add(flight.drafts[slot], num_ids - 1)
                    request.count_drafts(flight.drafts[slot], num_ids - 1)
            repeated = request.prompt_len + len(request.outputs) - first  # of ids that were forced
            if repeated < 0 and request.phase != "running":
                # an earlier row of this request failed and the request waits for re-admission;
                # ignore this row
                continue
            troubled = slot in bad or slot in result.refused
            if repeated < 0 or not (repeated or tokens or troubled):
                raise InvalidReport(
                    f"result {result.number} has {len(tokens)} ids of {request.id} behind {first} "
                    f"tokens, where {first + repeated} are known"
                )
            if request.phase == "running":
                request.confirm(end)
                request.deferrals = request.deferrals + 1 if slot in deferred else 0
                if result.mask_units:
                    request.mask_units = result.mask_units.get(slot, request.mask_units)
                if troubled:  # a request that waits for re-admission computes the row again
                    why = BAD_LOGITS if slot in bad else result.refused[slot]
                    yield request, [], b"", why
            if len(tokens) > repeated:
                new_logprobs = row_logprobs[repeated * request.logprob_size :]
                yield request, tokens[repeated:], new_logprobs, ""
        self._steps.popleft()
        self._late_after = LATE_SECONDS

    def on_epoch_lost(self) -> list[Request]:
        """The epoch is over, and no result will come. Returns the requests that were in flight,
        oldest first."""
        lost = {id(r): r for flight in self._steps for r, _ in flight.rows}
        for request in lost.values():
            request.steps_in_flight = 0
        self._steps.clear()
        self._late_after, self._newest, self._drafting = LATE_SECONDS, -1, False
        return list(lost.values())


def _check_int32(*arrays: bytes, what: str) -> None:
    """Raises InvalidReport unless these are int32 bytes, all with equally many items."""
    lengths = [len(raw) for raw in arrays]
    if lengths[0] % 4 or lengths.count(lengths[0]) != len(lengths):
        raise InvalidReport(f"{what} have {', '.join(map(str, lengths))} bytes")


def _checked(flight: StepInFlight, result: Result) -> list[int]:
    """Checks that the rows of a result can be those of `flight`; returns the end position of each
    row. Raises InvalidReport."""
    what, rows = f"rows of result {result.number}", len(flight.rows)
    _check_int32(result.slots, result.starts, result.counts, result.produced, what=what)
    for part in (result.token_ids, result.deferred, result.bad):
        _check_int32(part, what=what)
    if (slots := unpack(result.slots).tolist()) != flight.slots:
        raise InvalidReport(f"{what} are of slots {slots}, of {flight.slots} in the plan")
    if not rows:
        return []
    starts, counts, produced = map(unpack, (result.starts, result.counts, result.produced))
    ends, ids = starts.astype(np.int64) + counts, unpack(result.token_ids)
    least = min(starts.min(), counts.min(), produced.min(), ids.min(initial=0))
    if least < 0 or produced.sum(dtype=np.int64) != len(ids):
        raise InvalidReport(
            f"{what}: the rows produced {produced.sum()} ids and {len(ids)} were sent; the least "
            f"of all starts, counts and ids is {least}"
        )
    if result.deferred or result.bad or result.refused:
        named = {*unpack(result.deferred).tolist(), *unpack(result.bad).tolist(), *result.refused}
        if not named <= set(slots):
            raise InvalidReport(
                f"{what}: slots {sorted(named)} are reported as deferred, bad or refused, but the "
                f"plan has rows of slots {slots}"
            )
    if result.logprobs or any(request.logprob_size for request, _ in flight.rows):
        expected = int(produced @ [request.logprob_size for request, _ in flight.rows])
        if expected != len(result.logprobs):
            raise InvalidReport(
                f"{what} have {len(result.logprobs)} bytes of log-probs, not {expected}"
            )
    return ends.tolist()


MAX_UNCOMPARED = 4096  # results of rank 0 for which another rank's digests may be missing


class RanksDisagree(Exception):
    """The ranks' memories differ: everything that they compute together from now on is
    worthless."""


class _Rank:
    """Digests not compared yet, for one rank above 0.

    Attributes:
    - number: the plan of the first digest in both queues
    - first: digests of rank 0
    - digests: digests of the rank itself
    """

    def __init__(self) -> None:
        self.number = 0
        self.first: deque[int] = deque()
        self.digests: deque[int] = deque()


class DigestAgreement:
    """Comparison of the ranks' digests in one epoch of a group of `tp` ranks.

    Attributes:
    - compared: number of plans with the same decisions on all ranks; 0 for a single rank
    - applied: number of plans that all ranks have applied; for a single rank, of its results
    """

    def __init__(self, tp: int) -> None:
        self._ranks = {rank: _Rank() for rank in range(1, tp)}
        self._results = 0

    @property
    def compared(self) -> int:
        return min((rank.number for rank in self._ranks.values()), default=0)

    @property
    def applied(self) -> int:
        return self.compared if self._ranks else self._results

    def begin(self) -> None:
        """A new epoch begins; all memories are empty."""
        self._ranks = {rank: _Rank() for rank in self._ranks}
        self._results = 0

    def on_result(self, digest: int) -> None:
        """Takes rank 0's digest of its next plan. Raises RanksDisagree."""
        self._results += 1
        for number, rank in self._ranks.items():
            rank.first.append(digest)
            self._compare(number, rank)
            if len(rank.first) > MAX_UNCOMPARED:
                raise RanksDisagree(
                    f"rank {number} has sent no digests of {len(rank.first)} plans that rank 0 has "
                    "reported"
                )

    def on_digests(self, digests: Digests) -> None:
        """Takes digests of a rank above 0. Raises RanksDisagree."""
        rank = self._ranks.get(digests.rank)
        if rank is None:
            raise RanksDisagree(
                f"digests came from rank {digests.rank}, but the ranks above 0 are "
                f"{sorted(self._ranks)}"
            )
        expected = rank.number + len(rank.digests)
        if digests.first != expected:
            raise RanksDisagree(
                f"rank {digests.rank} sent digests from plan {digests.first} on, but plan "
                f"{expected} comes next"
            )
        if len(digests.values) % 8:
            raise RanksDisagree(
                f"rank {digests.rank} sent digests of {len(digests.values)} bytes, which is no "
                "multiple of 8"
            )
        rank.digests.extend(np.frombuffer(digests.values, dtype="<u8").tolist())
        self._compare(digests.rank, rank)

    @staticmethod
    def _compare(number: int, rank: _Rank) -> None:
        while rank.first and rank.digests:
            if rank.first.popleft() != rank.digests.popleft():
                raise RanksDisagree(
                    f"ranks 0 and {number} differ in their memory from plan {rank.number} on"
                )
            rank.number += 1
