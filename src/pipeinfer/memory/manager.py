"""The KV cache manager: from plans, which count tokens, to pages.

MemoryManager decides which tokens of a prompt are cached, which page each token is stored in, what
is evicted, and which rows of a step are deferred because there are no pages for them. A plan
advances rows by numbers of tokens; `MemoryManager.apply` answers with Rows. Rows are the second of
a step's four descriptions: Plan (messages.py), Rows, Step (step.py), and DeviceStep
(kernels/interface.py), on the device.

All decisions depend only on the plans and on the pages recovered at the start of the epoch, so all
ranks of a group decide alike. The plan number serves as clock; nothing here knows when a step ran.
RunningDigest is compared between ranks. Knows no sampling and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from pipeinfer.core import remaining_decodes
from pipeinfer.memory.page_directory import (
    NO_SALT,
    ChainTracker,
    PageChains,
    StepFills,
    salt_digest,
)
from pipeinfer.memory.pages import (
    IntegrityError,
    PageAllocator,
    PageTable,
    ProtocolError,
    SlotArrays,
)
from pipeinfer.memory.prefix_cache import PrefixCache, make_cache
from pipeinfer.messages import Admit, AppendTokens, Plan, Release
from pipeinfer.wire import COUNT_OF_ONE, EMPTY_INT32, NO_DRAFTS, ONE_INT32


@dataclass
class Rows:
    """The R rows of one plan, in the order of the plan, and what the plan did to the pages. Written
    by MemoryManager.apply; read by StepBuilder, which makes a Step of it, and by EngineCore, for
    its messages. The arrays must not be written to: the Rows of steady decodes share them.

    Attributes:
    - slots: int32 [R]
    - starts, counts: int32 [R]; row r computes positions starts[r] .. starts[r] + counts[r] - 1
    - samples: bool [R], the row ends with a token that is sampled
    - ids_known: bool [R], the row computes known ids: of a prompt, or forced by a grammar. False: a
      decode, of the id that the step before sampled and that only the device knows
    - deferred: bool [R], there were no pages for the row, so it computes nothing
    - same_as_previous: the rows are those of the plan before, and both decode one token of each
    - number: of the plan
    - admitted: int32 [admits], slots that the plan filled
    - cached: int32 [admits], tokens of each that the prefix cache had
    - free, evictable: pages after the plan
    - evicted: pages that the cache has evicted since the epoch began
    - digest: 64 bits, hash of all decisions since the epoch began
    - pages_to_zero: int32 [n], freed pages that may hold NaN: no finite logits were computed from
      them. A step zeroes them before it computes; see KVPool.zero_pages
    - drafts: int32 [R], as in Plan, with starts and counts as if all drafts so far were accepted;
      None if no request has any
    - first_drafts: by slot, computed tokens of requests that have their first drafts in this plan
    - invalidated: int32 [n], pages that the page directory must mark invalid before a step is
      launched
    - fills: which pages the step fills; None if pages do not outlive the engine
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    ids_known: np.ndarray
    deferred: np.ndarray
    same_as_previous: bool = False
    number: int = -1
    admitted: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    cached: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    free: int = 0
    evictable: int = 0
    evicted: int = 0
    digest: int = 0
    pages_to_zero: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    drafts: np.ndarray | None = None
    first_drafts: dict[int, int] = field(default_factory=dict[int, int])
    invalidated: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    fills: StepFills | None = None


class MemoryManager:
    """The pages of one rank, from plan to plan.

    Attributes:
    - page_size: tokens of a page
    - max_model_len: tokens of the longest request
    - allocator: the free pages
    - cache: the prefix cache, which owns pages of finished tokens
    - table: the page table, the pages of each slot
    - slots: state of the request in each slot
    - num_evicted: pages that the cache has evicted since the epoch began (`reset`)
    - chains: tracks the contents of pages, for an engine whose pages outlive it; None: they do not

    Every page is free, or owned by the cache, or by one request. A page that a plan frees may go to
    another request in the same plan: the device runs steps in order, so steps that still read the
    page have ended when its new owner writes it.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_slots: int,
        max_model_len: int,
        cache: str = "radix",
        chains: ChainTracker | None = None,
    ) -> None:
        """Begins with empty slots.

        - pages: of the pool, with the dummy page 0
        - max_slots: most requests at a time
        - cache: name of a prefix cache; raises ConfigurationError for an unknown one
        """
        self.chains = chains
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.allocator = PageAllocator(pages)
        self.cache = make_cache(cache, page_size)
        self.table = PageTable(max_slots, -(-max_model_len // page_size))
        self.slots = SlotArrays(max_slots)
        self._pages_to_zero: list[
            np.ndarray
        ] = []  # freed since the last plan, see Rows.pages_to_zero
        # bool [pages], the dummy page 0 included: pages, also cached ones, from which no finite
        # logits were computed so far. They are zeroed when they are freed.
        self._maybe_nan = np.zeros(self.allocator.num_pages + 1, dtype=bool)
        self._number = -1  # number of the plan that is applied
        self.reset()

    def reset(self, found: PageChains | None = None) -> None:
        """Begins an epoch: slots are empty, the digest is 0, and the cache has the pages `found`,
        recovered from earlier epochs (`PageChains.verified`); all other pages are free."""
        kept = EMPTY_INT32 if found is None else found.pages
        for slot in np.flatnonzero(self.slots.active).tolist():
            self._maybe_nan[self.table.owned_pages(slot)] = True
        self._zero_if_maybe_nan(np.setdiff1d(np.flatnonzero(self._maybe_nan), kept))
        self.allocator.reset()
        self.cache.reset()
        self.table.reset()
        self.slots = SlotArrays(self.slots.num_slots)
        # Slots whose prompts were completed by the plan before the last one, and by the last one.
        self._finished_prompts = EMPTY_INT32, EMPTY_INT32
        # None unless the last plan was decodes alone
        self._steady_decode: SteadyDecode | None = None
        self.num_evicted = 0
        self._digest = RunningDigest()
        if self.chains is not None:
            self.chains.reset(found)
        if found is not None:
            self._cache_found_pages(found)

    def _cache_found_pages(self, found: PageChains) -> None:
        taken = [
            self.cache.insert(tokens, pages, _cache_key(salt), 0).pages
            for salt, tokens, pages in found.sequences()
        ]
        pages = np.unique(np.concatenate([EMPTY_INT32, *taken]))
        if len(pages):
            self.allocator.take(pages)
            check_balance(self.allocator, self.cache, self.table)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Pages that can hold tokens, page size, slots, tokens of the longest request."""
        return self.allocator.num_pages, self.page_size, self.slots.num_slots, self.max_model_len

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self.allocator.num_free

    @property
    def num_evictable(self) -> int:
        """Number of pages a reset of the prefix cache that no request has locked."""
        return self.cache.num_evictable

    def apply(self, plan: Plan) -> Rows:
        """Carries out `plan`; returns the rows of its step, and what became of the pages.

        Raises ProtocolError if the plan contradicts the state, IntegrityError if pages do not add
        up. The state is changed in part then, and the epoch must end.
        """
        self._number = plan.number
        rows = self._repeat_decodes(plan)  # nearly every plan: the same decodes, a token further
        if rows is None:
            rows = self._apply_in_order(plan)
        check_balance(self.allocator, self.cache, self.table)
        self._add_to_digest(rows.cached, rows.starts, rows.counts, rows.deferred)
        if rows.drafts is not None:
            self._add_to_digest(rows.drafts)
        rows.number = plan.number
        rows.free, rows.evictable = self.num_free, self.num_evictable
        rows.evicted = self.num_evicted
        rows.digest = self._digest.close()
        if self._pages_to_zero:
            rows.pages_to_zero, self._pages_to_zero = np.concatenate(self._pages_to_zero), []
        if self.chains is not None:
            rows.invalidated = self.chains.take_invalidated()
            rows.fills = self.chains.plan(rows, self.table, self.slots)
        return rows

    def _apply_in_order(self, plan: Plan) -> Rows:
        """Carries out any plan, in a fixed order, because the order decides which request gets
        which pages:

        1. releases free pages,
        2. prompts completed two plans ago enter the cache,
        3. the computed parts of unfinished prompts that the plan names enter the cache,
        4. a reset evicts,
        5. admits match the cache,
        6. forced ids are appended,
        7. the rows of the step get their pages.
        """
        slots, counts = self._parse_rows(plan)
        for release in plan.releases:
            self._release(release, plan.number)
        self._cache_finished_prompts(plan.number)
        # Half-computed prompts whose prefix a request of this plan will match.
        for slot in _ids(plan.cache_slots, f"cache_slots of plan {plan.number}").tolist():
            self._cache_unfinished_prompt(slot, plan.number)
        if plan.reset:  # of the prefix cache
            self._evict(self.num_evictable)
            self._invalidate(np.arange(1, self.allocator.num_pages + 1, dtype=np.int32))
        cached = [self._admit(admit, plan.number) for admit in plan.admits]
        for extend in plan.appends:
            self._extend(extend)
        rows = self._advance_rows(slots, counts, *self._parse_drafts(plan, slots, counts))
        rows.admitted = np.array([admit.slot for admit in plan.admits], np.int32)
        rows.cached = np.array(cached, np.int32)
        self._steady_decode = None
        if SteadyDecode.is_pure_decode(plan, rows) and not any(map(len, self._finished_prompts)):
            self._steady_decode = SteadyDecode(plan, rows, self.slots, self.table, self.page_size)
        return rows

    def check_integrity(self) -> None:
        """Checks every invariant, at the cost of walking everything; raises IntegrityError."""
        check_everything(self.allocator, self.cache, self.table, self.slots, self.page_size)

    # ------------------------------------------------------------------- release, into the cache

    def _release(self, release: Release, clock: int) -> None:
        """Empties a slot. With `cache_prefix` the full pages of the computed part of the slot's
        known tokens and the release's outputs go into the cache; the other pages that the slot owns
        are freed."""
        slot = self._check_active(release.slot, "release")
        known, computed = int(self.slots.num_known[slot]), int(self.slots.num_projected[slot])
        outputs = _ids(release.output_ids, f"release of slot {slot}")
        num_confirmed = known + len(outputs)
        if self.slots.drafted[slot] and len(outputs):
            computed = min(computed, num_confirmed - 1)  # later tokens may be rejected drafts
        if len(outputs) and num_confirmed > computed + 1:
            raise ProtocolError(
                f"release of slot {slot} confirms {len(outputs)} outputs after {known} admitted "
                f"tokens, but only {computed} tokens are computed"
            )
        tokens = np.concatenate((self.slots.known_tokens(slot), outputs))
        if release.cache_prefix and len(outputs):
            self._maybe_nan[self.table.pages_of(slot)] = False
        if release.cache_prefix and not release.drop_prefix:
            # An overrun token is computed but not confirmed, the last output is confirmed but
            # perhaps not computed: neither has KV that another request may reuse.
            self._cache_full_pages(slot, tokens[: min(computed, num_confirmed)], clock)
        older, newer = self._finished_prompts
        self._finished_prompts = older[older != slot], newer[newer != slot]
        self.cache.unlock(self.slots.locked_node[slot])
        freed = [self.table.owned_pages(slot)]
        if release.drop_prefix:
            freed.append(self.cache.remove(tokens, self.slots.salt[slot]))
        if not release.cache_prefix:
            for pages in freed:
                self._maybe_nan[pages] = True
        if self.chains is not None:
            self.chains.release(slot)
        for pages in freed:
            self._free(pages)
        self.table.clear(slot)
        self.slots.clear(slot)

    def _cache_finished_prompts(self, clock: int) -> None:
        """Caches the prompts that were completed two plans before.

        Plan N + 2 is published when the scheduler has the result of plan N, because at most two
        steps are in flight (`overlap_depth`). So a prompt that plan N completed has been released
        if its logits were bad: attention may have carried NaN back into its keys and values. (Only
        a probe is published without that result. It may cache one plan too early, but it admits no
        request that could use the pages.) It also follows that a request that ends with its prompt
        is inserted only once.
        """
        for slot in self._finished_prompts[0].tolist():
            self._maybe_nan[self.table.pages_of(slot)] = False
            self._cache_full_pages(
                slot, self.slots.known_tokens(slot)[: self.slots.num_admitted[slot]], clock
            )

    def _cache_unfinished_prompt(self, slot: int, clock: int) -> None:
        """Caches the part of a prompt that earlier plans compute, for requests that this plan
        admits. The prompt's logits are not known yet; if they are bad, so are those of any other
        request that computes the same prefix."""
        self._check_active(slot, "share")
        computed = min(int(self.slots.num_projected[slot]), int(self.slots.num_admitted[slot]))
        self._cache_full_pages(slot, self.slots.known_tokens(slot)[:computed], clock)

    def _cache_full_pages(self, slot: int, tokens: np.ndarray, clock: int) -> None:
        """Gives the cache the full pages of `tokens` int32 [n], the slot's first n, all of them
        computed. The slot locks them and reads the cache's pages from now on; its own duplicates of
        pages that the cache had before are freed."""
        count = len(tokens) // self.page_size
        if count == 0:
            return
        before = self.table.pages_of(slot)[:count]
        tokens = tokens[: count * self.page_size]
        salt, prompt_only = self.slots.salt[slot], bool(self.slots.prompt_only[slot])
        node, pages = self.cache.insert(tokens, before, salt, clock, prompt_only)
        if node is None:
            return
        # First the slot's row points at the cache's pages and locks them, then the duplicates are
        # freed. Steps in flight may still write the duplicates, but before their next owner does.
        self.table.set_prefix(slot, pages)
        self.cache.lock(node)
        self.cache.unlock(self.slots.locked_node[slot])
        self.slots.locked_node[slot] = node
        self._free(before[before != pages])

    # ---------------------------------------------------------------------------------------- admit

    def _admit(self, admit: Admit, clock: int) -> int:
        """Fills a slot and locks the longest cached prefix; returns the tokens of that prefix."""
        slot = admit.slot
        if not 0 <= slot < self.slots.num_slots:
            raise ProtocolError(f"admit into slot {slot} of {self.slots.num_slots}")
        if self.slots.active[slot]:
            raise ProtocolError(f"admit of {admit.request_id!r} into slot {slot}, which is used")
        tokens = _ids(admit.token_ids, f"admit into slot {slot}")
        if not 0 < len(tokens) < admit.max_total <= self.max_model_len:
            raise ProtocolError(
                f"admit into slot {slot}: {len(tokens)} tokens, at most {admit.max_total} in "
                f"total, of at most {self.max_model_len}"
            )
        if int(tokens.min()) < 0:
            raise ProtocolError(f"admit into slot {slot}: token id {int(tokens.min())}")
        salt = salt_digest(admit.cache_salt)
        prompt_only = admit.params.max_tokens is not None and admit.params.max_tokens <= 1
        self.slots.put(slot, tokens, admit.max_total, _cache_key(salt), prompt_only)
        # The last token is always computed, for the logits to sample from. So is the token before
        # the first one whose log-prob is wanted.
        first = admit.prompt_logprobs_from
        reusable = len(tokens) - 1 if first < 0 else max(first - 1, 0)
        node, pages = self.cache.match(tokens[:reusable], self.slots.salt[slot], clock)
        self.cache.lock(node)
        self.slots.locked_node[slot] = node
        self.table.set_prefix(slot, pages)
        cached = len(pages) * self.page_size
        self.slots.num_projected[slot] = cached
        if self.chains is not None:
            self.chains.admit(slot, salt, tokens[:cached], pages)
        return cached

    def _extend(self, extend: AppendTokens) -> None:
        """Appends known token ids to a request; some of them may be computed already."""
        slot = self._check_active(extend.slot, "extend")
        tokens = _ids(extend.ids, f"extend of slot {slot}")
        known, max_total = int(self.slots.num_known[slot]), int(self.slots.max_total[slot])
        if not 0 < len(tokens) < max_total - known:
            raise ProtocolError(
                f"extend of slot {slot} by {len(tokens)} tokens, where {known} are known and at "
                f"most {max_total} may be"
            )
        if int(tokens.min()) < 0:
            raise ProtocolError(f"extend of slot {slot}: token id {int(tokens.min())}")
        self.slots.extend(slot, tokens)

    # ---------------------------------------------------- advance: the hot path, no loop over rows

    def _advance_rows(
        self, slots: np.ndarray, counts: np.ndarray, drafts: np.ndarray | None, ends: np.ndarray
    ) -> Rows:
        """Advances `slots` int32 [R] by up to `counts` int32 [R] tokens: a prefill by its remaining
        known tokens, a decode by one. A decode computes position `start` and samples the token at
        `start + 1`. Allocates the pages that rows need for that.

        - drafts: int32 [R], see Rows; None: no row has any
        - ends: int32 [R], see Plan; end of each row with drafts if all of them are accepted. Such
          rows keep pages that they have for more tokens: what is allocated follows from plans alone
        """
        starts = self.slots.num_projected[slots]
        known = self.slots.num_known[slots]
        remaining = known - starts  # known tokens that are not computed: above 0 where `ids_known`
        # `remaining_decodes` of core.py, written out on the hot path. An empty slot has no tokens
        # remaining, and max_total 0.
        can_decode = (starts + 2 <= self.slots.max_total[slots]) & (counts > 0)
        takes = np.where(remaining > 0, np.minimum(remaining, counts), can_decode).astype(np.int32)
        reached, first_drafts = starts + takes, dict[int, int]()
        if drafts is not None:
            # Known tokens that are left, because an earlier row was deferred, come first.
            drafts = np.where(remaining > 0, np.int32(NO_DRAFTS), drafts)
            verifies = drafts != NO_DRAFTS
            takes = np.where(verifies, counts, takes)
            reached = np.where(verifies, np.maximum(ends, starts), reached)
            first_drafts = self._begin_drafts(slots[verifies])
        deferred = self._grow(slots, reached)
        takes[deferred], reached[deferred] = 0, starts[deferred]
        self.slots.num_projected[slots] = reached
        samples = (takes > 0) & (reached >= known)
        prompts = samples & (remaining > 0) & (known == self.slots.num_admitted[slots])
        self._finished_prompts = self._finished_prompts[1], slots[prompts]
        rows = Rows(slots, starts, takes, samples, remaining > 0, deferred)
        if drafts is not None:
            rows.starts = np.where(drafts != NO_DRAFTS, ends - counts, starts)
            rows.drafts, rows.first_drafts = drafts, first_drafts
        return rows

    def _begin_drafts(self, slots: np.ndarray) -> dict[int, int]:
        """Marks `slots` as speculative. Returns {slot: computed tokens} for those that were not;
        afterwards only the device knows the exact number."""
        first = slots[~self.slots.drafted[slots]]
        self.slots.drafted[first] = True
        lengths: list[int] = self.slots.num_projected[first].tolist()
        return dict(zip(first.tolist(), lengths, strict=True))

    def _grow(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Allocates the pages that `slots` int32 [R] need for their first `ends` int32 [R] tokens.
        Returns bool [R]: rows that are deferred, because there are no pages for them."""
        needs = self._pages_for(ends) - self.table.num_pages[slots]
        total = int(needs.sum())
        deferred = np.zeros(len(slots), dtype=bool)
        if total > self.num_free + self.num_evictable:
            deferred = self._rows_to_defer(needs)
            needs[deferred] = 0
            total = int(needs.sum())
        if total:
            self.table.append(slots, needs, self._allocate(total))
        return deferred

    def _repeat_decodes(self, plan: Plan) -> Rows | None:
        """The rows of the last plan, one token further, if `plan` repeats these decodes and does
        nothing else, and there are pages for it. Otherwise None, and nothing has changed."""
        steady = self._steady_decode
        if steady is None or not steady.repeats(plan):
            return None
        rows_needing_page = steady.rows_needing_page()
        if len(rows_needing_page):
            if len(rows_needing_page) > self.num_free + self.num_evictable:
                return None
            pages = self._allocate(len(rows_needing_page))
            self.table.append_one(steady.slots[rows_needing_page], pages)
        rows = steady.advance(rows_needing_page)
        self.slots.num_projected[steady.slots] = steady.starts
        return rows

    def _pages_for(self, tokens: np.ndarray) -> np.ndarray:
        return (tokens + (self.page_size - 1)) // self.page_size

    def _rows_to_defer(self, needs: np.ndarray) -> np.ndarray:
        """Rows that get no pages, bool [R]: in the order of the plan, each row gets all pages that
        it `needs` int32 [R], or none. The one loop over rows, taken only when memory is short."""
        available = self.num_free + self.num_evictable
        deferred = np.zeros(len(needs), dtype=bool)
        for row in np.flatnonzero(needs).tolist():
            if needs[row] <= available:
                available -= int(needs[row])
            else:
                deferred[row] = True
        return deferred

    # -------------------------------------------------------------------------------------- helpers

    def _allocate(self, count: int) -> np.ndarray:
        missing = count - self.num_free
        if missing > 0:
            self._evict(missing)
        pages = self.allocator.allocate(count)
        self._add_to_digest(pages)
        self._invalidate(pages)
        self._maybe_nan[pages] = True
        return pages

    def _invalidate(self, pages: np.ndarray) -> None:
        """Makes the entries of these pages in the page directory invalid."""
        if self.chains is not None:
            self.chains.invalidate(pages, self._number)

    def _evict(self, count: int) -> None:
        pages = self.cache.evict(count)
        self.num_evicted += len(pages)
        self._free(pages)

    def _free(self, pages: np.ndarray) -> None:
        self._add_to_digest(pages)
        self.allocator.free(pages)
        self._zero_if_maybe_nan(pages)

    def _zero_if_maybe_nan(self, pages: np.ndarray) -> None:
        """Has those of the freed `pages` zeroed that may hold NaN, so their entries in the page
        directory become invalid."""
        pages = pages[self._maybe_nan[pages]]
        if len(pages):
            self._invalidate(pages)
            self._pages_to_zero.append(pages)
            self._maybe_nan[pages] = False

    def _add_to_digest(self, *decisions: np.ndarray) -> None:
        for decision in decisions:
            self._digest.add(decision)

    def _check_active(self, slot: int, verb: str) -> int:
        if not 0 <= slot < self.slots.num_slots:
            raise ProtocolError(f"{verb} of slot {slot} of {self.slots.num_slots}")
        if not self.slots.active[slot]:
            raise ProtocolError(f"{verb} of slot {slot}, which is empty")
        return slot

    def _parse_drafts(
        self, plan: Plan, slots: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Plan.drafts and Plan.ends, int32 [R]; (None, empty) for a plan without drafts. Raises
        ProtocolError if they are not valid."""
        what = f"drafts of plan {plan.number}"
        drafts, ends = _ids(plan.drafts, what), _ids(plan.ends, what)
        drafted = self.slots.drafted[slots]
        if not len(drafts) and not len(ends):
            if drafted.any():
                raise ProtocolError(f"{what} are missing, of slots {slots[drafted].tolist()}")
            return None, EMPTY_INT32
        if not len(drafts) == len(ends) == len(slots):
            raise ProtocolError(
                f"{what}: {len(drafts)} and {len(ends)}, where there are {len(slots)} rows"
            )
        verifies = drafts != NO_DRAFTS
        wrong = verifies & (
            (drafts < 0)
            | (counts != drafts + 1)
            | (ends < self.slots.num_known[slots] + counts)
            | (ends >= self.slots.max_total[slots])
        )
        wrong |= ~verifies & drafted
        if wrong.any():
            row = int(wrong.argmax())
            slot = int(slots[row])
            raise ProtocolError(
                f"{what}: {drafts[row]} of {counts[row]} tokens up to {ends[row]} of slot {slot}, "
                f"with {self.slots.num_projected[slot]} projected, {self.slots.num_known[slot]} "
                f"known and at most {self.slots.max_total[slot]}"
            )
        return drafts, ends

    def _parse_rows(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Plan.slots and Plan.counts, int32 [R]; raises ProtocolError if they are not valid."""
        slots = _ids(plan.slots, f"slots of plan {plan.number}")
        counts = _ids(plan.counts, f"counts of plan {plan.number}")
        if len(slots) != len(counts):
            raise ProtocolError(f"plan {plan.number}: {len(slots)} slots, {len(counts)} counts")
        if len(slots) == 0:
            return slots, counts
        if int(slots.min()) < 0 or int(slots.max()) >= self.slots.num_slots:
            raise ProtocolError(
                f"plan {plan.number}: slots {int(slots.min())}..{int(slots.max())} "
                f"of {self.slots.num_slots}"
            )
        if int(counts.min()) < 0:
            raise ProtocolError(f"plan {plan.number}: count {int(counts.min())}")
        if int(np.bincount(slots).max()) > 1:
            raise ProtocolError(
                f"plan {plan.number}: slot {int(np.bincount(slots).argmax())} twice"
            )
        return slots, counts


def _cache_key(salt: bytes) -> str:
    """The prefix cache's name for the cache salt of digest `salt`; "" is no salt."""
    return salt.hex() if salt != NO_SALT else ""


def _ids(raw: bytes, what: str) -> np.ndarray:
    if len(raw) % 4:
        raise ProtocolError(f"{what}: {len(raw)} bytes are no int32 sequence")
    return np.frombuffer(raw, dtype="<i4")


class SteadyDecode:
    """Decodes of the same R rows, plan after plan: the difference of each plan to the one before.

    Between two arrivals or ends every plan is of this kind, and NumPy's calls cost more than what
    they compute. This class takes a third of the calls of MemoryManager._apply_in_order, to the
    same effect.

    Attributes:
    - slots, starts: int32 [R], the position that each row decodes next
    - capacity: int32 [R], tokens that each row's pages hold
    - remaining: plans until some row has reached its limit
    """

    def __init__(
        self, plan: Plan, rows: Rows, slots: SlotArrays, table: PageTable, page_size: int
    ) -> None:
        self._slot_bytes = plan.slots
        self._count_bytes = plan.counts
        self._page_size = page_size
        self.slots = rows.slots
        self.starts = rows.starts + rows.counts
        self.capacity = table.num_pages[rows.slots] * np.int32(page_size)
        self.remaining = int(remaining_decodes(self.starts, slots.max_total[rows.slots]).min())
        self._counts = rows.counts
        self._samples = rows.samples
        self._all_false = rows.deferred

    @staticmethod
    def is_pure_decode(plan: Plan, rows: Rows) -> bool:
        """Whether `rows`, made from `plan`, are decodes and nothing else."""
        count = len(rows.slots)
        return (
            count > 0
            and plan.counts == COUNT_OF_ONE * count
            and not plan.drafts
            and not rows.ids_known.any()
            and bool(rows.samples.all())
        )

    def repeats(self, plan: Plan) -> bool:
        """Whether `plan` decodes the same rows again and does nothing else."""
        return (
            self.remaining > 0
            and plan.slots == self._slot_bytes
            and plan.counts == self._count_bytes
            and not plan.releases
            and not plan.admits
            and not plan.appends
            and not plan.cache_slots
            and not plan.reset
            and not plan.drafts
        )

    def rows_needing_page(self) -> np.ndarray:
        """Rows that need a page for the next position, int64 [G]."""
        return np.flatnonzero(self.starts == self.capacity)

    def advance(self, growing: np.ndarray) -> Rows:
        """Rows in which every row decodes its next position; rows in `growing` int64 [G] have got a
        page."""
        starts = self.starts
        self.starts = starts + ONE_INT32
        self.remaining -= 1
        if len(growing):
            self.capacity[growing] += self._page_size
        counts, samples, all_false = self._counts, self._samples, self._all_false
        return Rows(
            self.slots, starts, counts, samples, all_false, all_false, same_as_previous=True
        )


def check_balance(allocator: PageAllocator, cache: PrefixCache, table: PageTable) -> None:
    """Raises IntegrityError unless the free, the cached and the requests' pages add up to all
    pages. Uses counters, so it is cheap enough for every plan."""
    owned = table.num_owned
    found = allocator.num_free + cache.num_evictable + cache.num_locked + owned
    if found != allocator.num_pages:
        raise IntegrityError(
            f"{allocator.num_free} free, {cache.num_evictable} evictable, {cache.num_locked} "
            f"locked and {owned} held pages are {found}, not {allocator.num_pages}"
        )


def check_everything(
    allocator: PageAllocator,
    cache: PrefixCache,
    table: PageTable,
    slots: SlotArrays,
    page_size: int,
) -> None:
    """Raises IntegrityError unless every page has one owner, every lock one holder, and all counts
    agree. Walks all pages."""
    check_balance(allocator, cache, table)
    _check_slots(table, slots, page_size)
    in_cache = cache.check_integrity([node for node in slots.locked_node if node is not None])
    owned = [table.owned_pages(slot) for slot in range(slots.num_slots)]
    pages = np.concatenate([allocator.free_pages(), in_cache, *owned])
    owners = np.bincount(pages, minlength=allocator.num_pages + 1)
    if owners[0] or (owners[1:] != 1).any():
        wrong = [(page, int(n)) for page, n in enumerate(owners.tolist()) if n != (page > 0)]
        raise IntegrityError(f"(page, owners) that are wrong: {wrong[:20]}")
    is_cached = np.zeros(allocator.num_pages + 1, dtype=bool)
    is_cached[in_cache] = True
    for slot in np.flatnonzero(table.num_shared).tolist():
        shared = table.pages_of(slot)[: table.num_shared[slot]]
        if not is_cached[shared].all():
            lost = shared[~is_cached[shared]].tolist()
            raise IntegrityError(f"slot {slot} reads pages {lost} as cached, the cache lacks them")


def _check_slots(table: PageTable, slots: SlotArrays, page_size: int) -> None:
    expected = -(-slots.num_projected // page_size)
    wrong = np.flatnonzero((table.num_pages != expected) | (table.num_shared > table.num_pages))
    if len(wrong):
        slot = int(wrong[0])
        raise IntegrityError(
            f"slot {slot}: {slots.num_projected[slot]} tokens projected, {table.num_pages[slot]} "
            f"pages held, {table.num_shared[slot]} of them shared, page size {page_size}"
        )
    owned = int((table.num_pages - table.num_shared).sum(dtype=np.int64))
    if owned != table.num_owned:
        raise IntegrityError(f"requests own {owned} pages, {table.num_owned} were counted")
    idle = ~slots.active & (
        (slots.num_known > 0) | (slots.num_projected > 0) | (table.num_pages > 0)
    )
    if idle.any():
        raise IntegrityError(f"empty slots {np.flatnonzero(idle).tolist()} have tokens or pages")


class RunningDigest:
    """A running hash of decisions, by which the ranks of a group notice that they disagree: chained
    BLAKE2b over integer arrays.

    Attributes:
    - value: the last link of the chain, 64 bits
    """

    __transient__ = ("_hash",)  # None between plans

    def __init__(self) -> None:
        self.value = 0
        self._link = b""
        self._hash: blake2b | None = None

    def add(self, array: np.ndarray) -> None:
        """Hashes `array` (C-contiguous): its length, then its bytes."""
        if self._hash is None:
            self._hash = blake2b(self._link, digest_size=8)
        self._hash.update(array.nbytes.to_bytes(8, "little"))
        self._hash.update(array.data)

    def close(self) -> int:
        """Ends a link of the chain; returns the link's hash, which is `value` from now on."""
        whole = self._hash or blake2b(self._link, digest_size=8)
        self._link = whole.digest()
        self._hash = None
        self.value = int.from_bytes(self._link, "little")
        return self.value
