"""Scheduling policies: which requests run in the next step.

StepComposer composes one step: which requests compute how many tokens, within the step's tokens,
pages and slots; it preempts when running requests cannot all grow. A policy calls StepComposer's
methods in an order of its own and knows nothing else. Each policy is a class, found by name.
"""

from __future__ import annotations

import pkgutil
from typing import Protocol

from pipeinfer.command_line import none_of
from pipeinfer.scheduler.drafting import Drafter
from pipeinfer.scheduler.engine_state import PageAllowance, PlannedRow, Slots
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request
from pipeinfer.settings import POLICIES, ConfigurationError
from pipeinfer.step_cost import PrefillBudget, Prompt

# Jump-forward rows compute several forced tokens. MAX_JUMPS: most of them in a step; graphs have
# room for this many. JUMPS_PART: if prompts wait, jumps take one of this many parts of the prefill
# tokens.
MAX_JUMPS = 32
JUMPS_PART = 2


class StepComposer:
    """Composes one step: a policy calls it to give requests tokens, slots and pages.

    Attributes:
    - rows: (request, tokens) in the order in which they were given out
    - drafts: by request id, how many of its row's tokens are draft tokens
    - admitted: requests that get a slot by the step's plan
    - preempted: requests that lose their slot by it
    - pages: the PageAllowance; `pages.taken` is net of the pages that preemption gives back
    """

    def __init__(
        self,
        slots: Slots,
        queue: WaitingQueue,
        max_tokens: int,
        prefill_budget: PrefillBudget,
        now: float = 0.0,
        nothing_in_flight: bool = False,
        keeps_pages: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        """Begins a step.

        - max_tokens: most tokens of the step
        - now: seconds, by the SuspendAwareClock of SchedulerCore
        - nothing_in_flight: no other step is in flight
        - keeps_pages: the epoch began with pages that were computed before it
        """
        self.rows: list[PlannedRow] = []
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.pages = PageAllowance(slots.credits, slots.released_pages)
        self._slots = slots
        self._queue = queue
        self._running = list(slots.running.values())
        self._holders = len(self._running)  # requests with pages, also those that are left out
        self._free_slots = slots.free
        self._tokens_left = max_tokens
        self._prefill_budget = prefill_budget
        self._now = now
        self._nothing_in_flight = nothing_in_flight
        self._keeps_pages = keeps_pages
        self._drafter = drafter or Drafter()
        self.drafts: dict[str, int] = {}
        self._prompts = [r for r in self._running if r.projected < r.known_len]  # half-computed
        between = self.pages.between
        self._reserved = sum([between(r.projected, r.known_len) for r in self._prompts])  # pages

    @property
    def prompts_wait(self) -> bool:
        """True if a prompt is half-computed or could be admitted."""
        return bool(self._prompts) or self._queue.head() is not None

    def decode_all(self) -> None:
        """Gives one token to every running request that has computed its prompt; several if they
        are known already (jump-forward, drafts)."""
        # The hot path: it runs for every request in every step, so calls such as that of
        # `remaining_decodes` (core.py) are written out.
        decodes = [
            r for r in self._running if r.known_len <= r.projected and r.projected + 1 < r.max_total
        ]
        if self.preempted:
            decodes = [r for r in decodes if r not in self.preempted]
        need = self._needed(decodes)
        if need > self.pages.left:
            decodes = self._preempt_until(decodes, need)
            need = self._needed(decodes)
        del decodes[max(self._tokens_left, 0) :]
        self.pages.take(need)
        self._tokens_left -= len(decodes)
        self.rows += [(request, 1) for request in decodes]
        if self._slots.forced_ahead:
            self._jump()
        if self._drafter.max_drafts:
            self._draft(decodes)

    def _draft(self, decodes: list[Request]) -> None:
        """Gives drafts to rows of requests whose next tokens can be guessed, if there are pages for
        all of the drafts."""
        first_row = len(self.rows) - len(decodes)
        for index, drafts in self._drafter.choose(decodes):
            request = decodes[index]
            first = request.projected + 1
            pages = self.pages.between(max(first, request.reached), first + drafts)
            if drafts <= self._tokens_left and pages <= self.pages.left - self._reserved:
                self.pages.take(max(pages, 0))
                self.rows[first_row + index] = request, 1 + drafts
                self.drafts[request.id] = drafts
                self._tokens_left -= drafts

    def _jump(self) -> None:
        """Lengthens rows of requests whose next ids are known by those ids, as far as the other
        decodes can bear it. A request that gets no more than one token decodes on meanwhile."""
        prefill_tokens = min(self._tokens_left, self._prefill_tokens(best_rate=False))
        jump_tokens = (
            prefill_tokens // JUMPS_PART if self._prompts or self._admissible() else prefill_tokens
        )
        row_numbers = {request.id: at for at, (request, _) in enumerate(self.rows)}
        jumps = 0
        for request in self._slots.can_jump().values():  # in the order in which they were found
            at = row_numbers.get(request.id)
            if at is None or jumps == MAX_JUMPS:
                continue
            jumped_tokens = min(request.num_forced_ahead - 1, jump_tokens)
            first = request.projected + 1
            pages = self.pages.between(first, first + jumped_tokens)
            if jumped_tokens <= 0 or pages > self.pages.left - self._reserved:
                continue
            self.pages.take(pages)
            self.rows[at] = request, 1 + jumped_tokens
            self._tokens_left -= jumped_tokens
            jump_tokens -= jumped_tokens
            jumps += 1

    def jumps(self, request: Request, count: int) -> bool:
        """Whether a row of `count` tokens has forced ids that the engine has not got."""
        decodes = request.projected >= request.known_len
        return count > 1 and decodes and request.id not in self.drafts

    def limit_prefill(self, best_rate: bool = False) -> None:
        """Limits the tokens of prompts, after decode_all, to what the decodes can bear, at least 1,
        however many requests run.

        - best_rate: the limit makes a prompt token cheapest, however long the decodes then take.
          See step_cost.py
        """
        if self.rows and (self._prompts or self._admissible()):
            jumped = sum([count for _, count in self.rows]) - len(self.rows)
            prefill_tokens = self._prefill_tokens(best_rate)
            self._tokens_left = min(self._tokens_left, max(prefill_tokens - jumped, 1))

    def _prefill_tokens(self, best_rate: bool) -> int:
        """Number of prompt tokens that may go beside the decodes in `rows`."""
        budget, decodes = self._prefill_budget, len(self.rows)
        context = sum([request.projected for request, _ in self.rows])
        waiting = [
            Prompt(r.known_len - r.projected, r.projected, self._now - r.arrived_at)
            for r in self._prompts
        ]
        if best_rate or budget.looks_ahead:
            waiting += self._queue.prompts(self._now)
        if not best_rate:
            return budget.prompt_tokens(decodes, context, waiting)
        all_fit = len(self._queue) + self._queue.waiting_for_prefix <= self._slots.free
        left = self._slots.remaining_steps(self.rows) if all_fit else 0
        return budget.best_rate_prompt_tokens(decodes, context, waiting, left)

    def continue_prompts(self) -> None:
        """Gives the next chunk to every half-computed prompt, oldest first."""
        for request in self._prompts:
            if self._tokens_left <= 0:
                return
            if request not in self.preempted:
                self._chunk(request)

    def admit_while_possible(self) -> None:
        """Admits new prompts in the queue's order, never out of it."""
        while self._tokens_left > 0 and self._admissible():
            self._admit(self._queue.pop())

    def leave_out(self, *requests: Request) -> None:
        """Excludes `requests`, which hold slots, from this step."""
        out = set(requests)
        self._running = [one for one in self._running if one not in out]
        self._prompts = [one for one in self._prompts if one not in out]

    def run_alone(self, request: Request) -> None:
        """Composes a step of `request` alone; preempts others until it fits."""
        if request.phase != "running":
            if request.steps_in_flight:
                return
            need = self.pages.between(0, request.length)
            while need > self.pages.left or self._free_slots <= 0:
                victim = self._victim(stay=1 if self._free_slots > 0 else 0)
                if victim is None:
                    break
                self._preempt(victim)
            if self._free_slots > 0:
                self._admit(request)
        elif request.prefilling:
            self._chunk(request)
        elif not request.exhausted:
            self._append(request, 1)

    def preempt_for(self, request: Request) -> None:
        """Preempts another request because the engine defers `request`."""
        others = [r for r in self._running if r is not request]
        if others:
            self._preempt(max(others, key=_preemption_order))

    def preempt_one(self) -> None:
        """Preempts one request because the engine keeps deferring rows."""
        victim = self._victim()
        if victim is not None:
            self._preempt(victim)

    def _admissible(self) -> bool:
        """Whether the queue's head gets a slot and pages."""
        request = self._queue.head() if self._free_slots > 0 else None
        return request is not None and self._may_admit(request)

    def _may_admit(self, request: Request) -> bool:
        """Whether there are pages for the whole prompt, and one more for each request with pages to
        grow into."""
        if request.steps_in_flight:
            return False  # preempted, and its last step has not reported
        if not self._holders and not self.admitted:
            return True  # it fits into the pool by itself, as was checked on arrival
        free_pages = self.pages.left - self._reserved - self._holders - len(self.admitted)
        return self.pages.between(self._known_cache_hit(request), request.length) <= free_pages

    def _known_cache_hit(self, request: Request) -> int:
        """Number of cached tokens on which an admission of `request` may count: those that it
        shares with its `prefix_source`. Other hits do not count: a hit locks pages that were
        evictable, a miss takes new ones."""
        if request.prefix_source is None or request.prefix_source in self.preempted:
            return 0
        size = self.pages.page_size
        return request.prefix_tokens // size * size

    def _expected_cache_hit(self, request: Request) -> int:
        """Number of tokens of `request` that are probably in kept pages, so that many requests that
        lost their engine are admitted in one step. An error costs a short row, and no more than
        that."""
        if not self._keeps_pages or request.prompt_logprobs_from >= 0:
            return 0
        size = self.pages.page_size
        return min(request.lost_tokens, request.length - 1) // size * size

    def _admit(self, request: Request) -> None:
        request.admit(self._known_cache_hit(request), self._expected_cache_hit(request))
        self.admitted.append(request)
        self._free_slots -= 1
        pages = self.pages.between(request.cache_hit, request.known_len)
        self.pages.take(pages)
        self._row(request, min(self._tokens_left, request.known_len - request.projected))

    def _chunk(self, request: Request) -> None:
        count = min(self._tokens_left, request.known_len - request.projected)
        need = self.pages.between(request.projected, request.projected + count)
        if need > self.pages.left:
            count = min(count, self.pages.tokens_that_fit(request.projected))
        if count <= 0 and self._nothing_in_flight and not self.rows:
            victim = self._victim()
            if victim is not None and victim is not request:
                self._preempt(victim)
                self._chunk(request)
                return
            count = 1  # nothing is in flight and nothing else runs: the engine decides
        if count > 0:
            self._append(request, count)

    def _needed(self, decodes: list[Request]) -> int:
        """Number of pages for one more token of each decode: one for each row whose last page is
        full."""
        size = self.pages.page_size
        return sum([1 for r in decodes if r.projected % size == 0])

    def _preempt_until(self, decodes: list[Request], need: int) -> list[Request]:
        """Preempts until the decodes that remain fit, and returns them; some may have to wait for
        the steps in flight."""
        between = self.pages.between
        while need > self.pages.left:
            victim = self._victim()
            if victim is None:
                break
            self._preempt(victim)
            if victim in decodes:
                decodes.remove(victim)
                need -= between(victim.projected, victim.projected + 1)
        fitting: list[Request] = []
        remaining = self.pages.left
        for request in decodes:
            pages = between(request.projected, request.projected + 1)
            if pages <= remaining or (self._nothing_in_flight and not fitting):
                fitting.append(request)
                remaining -= pages
        return fitting

    def _victim(self, stay: int = 1) -> Request | None:
        """The request to preempt: the least important, latest-arrived running request; of several
        never the oldest half-computed prompt. None if no more than `stay` are left: one alone
        always fits."""
        left = [r for r in self._running if r not in self.preempted]
        if len(left) <= stay:
            return None
        exempt = next((r for r in left if r.prefilling), None)
        return max([r for r in left if r is not exempt] or left, key=_preemption_order)

    def _preempt(self, request: Request) -> None:
        """Preempts `request`. Its own pages are given back; pages that it shares may be locked by
        others."""
        self.preempted.append(request)
        self._free_slots += 1
        pages = max(self.pages.between(request.cache_hit, request.projected), 0)
        self.pages.take(-pages)

    def _append(self, request: Request, count: int) -> None:
        pages = self.pages.between(request.projected, request.projected + count)
        self.pages.take(pages)
        if request.prefilling:
            self._reserved -= pages
        self._row(request, count)

    def _row(self, request: Request, count: int) -> None:
        self.rows.append((request, count))
        self._tokens_left -= count


def _preemption_order(request: Request) -> tuple[int, int]:
    return request.work.priority, request.arrival


class Policy(Protocol):
    """Composes one step; may keep state of its own, but reads no clock."""

    def compose(self, composer: StepComposer) -> None:
        """Gives the step its rows, in the order in which memory and tokens are given out."""
        ...


def create(name: str) -> Policy:
    """Makes the policy called `name`, or a `module:Class` of the operator; ConfigurationError if
    unknown."""
    target = POLICIES.get(name, name)
    if ":" not in target:
        raise ConfigurationError(f"--policy: {none_of(name, POLICIES)}")
    try:
        return pkgutil.resolve_name(target)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"policy {name!r} cannot be imported: {error}") from None


class Mixed:
    """The default: every running request decodes in every step, then half-computed prompts and new
    ones get the rest.

    No running request waits for another request's prompt: the time that prompts add to the gap
    between tokens is bounded (see step_cost.py). While no request decodes, prompts get the whole
    step.
    """

    def compose(self, composer: StepComposer) -> None:
        composer.decode_all()
        composer.limit_prefill()
        composer.continue_prompts()
        composer.admit_while_possible()


class Throughput:
    """The most tokens a second, at the price of waiting: the default of batches.

    As Mixed, but the number of prompt tokens beside the decodes is chosen by cost alone (see
    step_cost.py): a step may take as long as that needs.
    """

    def compose(self, composer: StepComposer) -> None:
        composer.decode_all()
        composer.limit_prefill(best_rate=True)
        composer.continue_prompts()
        composer.admit_while_possible()


class PrefillFirst:
    """A step of prompts alone while there is one to compute, else a step of decodes: the shortest
    time to first token, at the price of the streams that run.

    A steady flow of prompts stops every running request; meant for offline batches and comparisons.
    """

    def compose(self, composer: StepComposer) -> None:
        composer.continue_prompts()
        composer.admit_while_possible()
        if not composer.rows:
            composer.decode_all()


MAX_DECODE_STEPS = 8  # steps of decodes in a row, then one of prompts if any wait


class DecodeFirst:
    """Decodes before prompts: steps of decodes alone, a step of prompts only now and then. The
    steadiest gap between tokens; prompts wait up to MAX_DECODE_STEPS steps, so they never starve.
    """

    def __init__(self) -> None:
        self._decode_steps = 0

    def compose(self, composer: StepComposer) -> None:
        if composer.prompts_wait and self._decode_steps >= MAX_DECODE_STEPS:
            self._prompts(composer)
        if not composer.rows:
            composer.decode_all()
            self._decode_steps += 1
        if not composer.rows:
            self._prompts(composer)

    def _prompts(self, composer: StepComposer) -> None:
        composer.continue_prompts()
        composer.admit_while_possible()
        self._decode_steps = 0
