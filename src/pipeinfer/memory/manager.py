"""Turns plans, which speak in tokens, into pages.

Its decisions are a function of the plans alone, so that all ranks of a group make the same ones:
the clock is the plan's number, and nothing here knows when a step ran. Knows no sampling and no
tensor.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.memory.allocator import PageAllocator
from pipeinfer.memory.decode_run import SteadyDecode
from pipeinfer.memory.digest import RunningDigest
from pipeinfer.memory.errors import ProtocolError
from pipeinfer.memory.integrity import check_balance, check_everything
from pipeinfer.memory.page_table import PageTable
from pipeinfer.memory.prefix_cache import make_cache
from pipeinfer.memory.rows import Rows
from pipeinfer.memory.slot_arrays import SlotArrays
from pipeinfer.messages import Admit, Extend, Plan, Release

_NO_SLOTS = np.empty(0, dtype=np.int32)


class MemoryManager:
    """`pages` pages of `page_size` tokens (page 0 is the dummy), `max_slots` requests at a time.

    `cache` names a prefix cache. Raises ConfigurationError if there is none of that name.

    Pages that a plan frees may be given to another request by the same plan: the device runs steps
    in order, so whatever still reads them has ended when the new owner writes them.
    """

    def __init__(
        self, pages: int, page_size: int, max_slots: int, max_model_len: int, cache: str = "radix"
    ) -> None:
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.allocator = PageAllocator(pages)
        self.cache = make_cache(cache, page_size)
        self.table = PageTable(max_slots, -(-max_model_len // page_size))
        self.slots = SlotArrays(max_slots)
        self._unverified: list[np.ndarray] = []  # pages, since the last plan
        self.reset()

    def reset(self) -> None:
        """Empty slots, empty cache, all pages free, digest 0."""
        self._unverified += [
            self.table.owned_pages(slot) for slot in np.flatnonzero(self.slots.active).tolist()
        ]
        self.allocator.reset()
        self.cache.reset()
        self.table.reset()
        self.slots = SlotArrays(self.slots.num_slots)
        self._finished_prompts = (
            _NO_SLOTS,
            _NO_SLOTS,
        )  # slots, by the plan before the last one, and by that
        self._steady_decode: SteadyDecode | None = (
            None  # of the plan before, if it was nothing but decodes
        )
        self.num_evicted = 0  # since the cache was empty
        self._digest = RunningDigest()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Pages that can hold tokens, page size, slots, tokens of the longest request."""
        return self.allocator.num_pages, self.page_size, self.slots.num_slots, self.max_model_len

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self.allocator.num_free

    @property
    def num_evictable(self) -> int:
        """Pages of the prefix cache that nobody has locked."""
        return self.cache.num_evictable

    def apply(self, plan: Plan) -> Rows:
        """Carries out `plan` in the fixed order: releases, inserts, shares, what a reset forgets,
        matches and locks, extends, evictions and allocations.

        Raises ProtocolError if the plan contradicts the state, which is then of no use any more.
        """
        rows = self._repeat_decodes(plan)
        if rows is None:
            slots, counts = self._parse_rows(plan)
            for release in plan.releases:
                self._release(release, plan.number)
            self._cache_finished_prompts(plan.number)
            for slot in _ids(plan.shares, f"shares of plan {plan.number}").tolist():
                self._cache_unfinished_prompt(slot, plan.number)
            if plan.reset:
                self._evict(self.num_evictable)
            cached = np.array([self._admit(admit, plan.number) for admit in plan.admits], np.int32)
            for extend in plan.extends:
                self._extend(extend)
            rows = self._advance_rows(slots, counts)
            rows.cached = cached
            rows.admitted = np.array([admit.slot for admit in plan.admits], np.int32)
            self._steady_decode = None
            if SteadyDecode.is_pure_decode(plan, rows) and not any(
                map(len, self._finished_prompts)
            ):
                self._steady_decode = SteadyDecode(
                    plan, rows, self.slots, self.table, self.page_size
                )
        check_balance(self.allocator, self.cache, self.table)
        self._add_to_digest(rows.cached, rows.starts, rows.counts, rows.deferred)
        rows.number = plan.number
        rows.free, rows.evictable, rows.evicted = (
            self.num_free,
            self.num_evictable,
            self.num_evicted,
        )
        rows.digest = self._digest.close()
        if self._unverified:
            rows.unverified, self._unverified = np.concatenate(self._unverified), []
        return rows

    def check_integrity(self) -> None:
        """Checks every invariant, at the cost of walking everything; raises IntegrityError."""
        check_everything(self.allocator, self.cache, self.table, self.slots, self.page_size)

    # ------------------------------------------------------------------------------ release, insert

    def _release(self, release: Release, clock: int) -> None:
        slot = self._check_active(release.slot, "release")
        known, computed = int(self.slots.num_known[slot]), int(self.slots.num_computed[slot])
        outputs = _ids(release.output_ids, f"release of slot {slot}")
        confirmed = known + len(outputs)
        if len(outputs) and confirmed > computed + 1:
            raise ProtocolError(
                f"release of slot {slot} confirms {len(outputs)} outputs after {known} admitted "
                f"tokens, but only {computed} tokens are computed"
            )
        tokens = np.concatenate((self.slots.known_tokens(slot), outputs))
        if release.keep and not release.forget:
            # A surplus token is computed but not confirmed, the last output is confirmed but
            # perhaps not computed: neither has KV that anybody may reuse.
            self._cache_full_pages(slot, tokens[: min(computed, confirmed)], clock)
        older, newer = self._finished_prompts
        self._finished_prompts = older[older != slot], newer[newer != slot]
        self.cache.unlock(self.slots.locked_node[slot])
        given = [self.table.owned_pages(slot)]
        if release.forget:
            given.append(self.cache.remove(tokens, self.slots.salt[slot]))
        if not release.keep:
            self._unverified += given
        for pages in given:
            self._free(pages)
        self.table.clear(slot)
        self.slots.clear(slot)

    def _cache_finished_prompts(self, clock: int) -> None:
        """Lets others share the prompts that were completed two plans before.

        Late on purpose: whoever matches them now computes in a step after the one that writes them,
        and a request that ends with its prompt is inserted only once. With at most two steps in
        flight a prompt's own result has been seen by now, and one that gave bad logits is released:
        attention may have carried its NaN back into keys and values that others would share.
        """
        for slot in self._finished_prompts[0].tolist():
            self._cache_full_pages(
                slot, self.slots.known_tokens(slot)[: self.slots.num_admitted[slot]], clock
            )

    def _cache_unfinished_prompt(self, slot: int, clock: int) -> None:
        """Lets what this plan admits share what earlier ones compute of an unfinished prompt. Its
        logits are not known yet; if they are bad, so would be those of whoever computed the same
        beginning."""
        self._check_active(slot, "share")
        computed = min(int(self.slots.num_computed[slot]), int(self.slots.num_admitted[slot]))
        self._cache_full_pages(slot, self.slots.known_tokens(slot)[:computed], clock)

    def _cache_full_pages(self, slot: int, tokens: np.ndarray, clock: int) -> None:
        """Hands the whole pages of `tokens`, the slot's first and all computed, to the cache."""
        count = len(tokens) // self.page_size
        if count == 0:
            return
        before = self.table.pages_of(slot)[:count]
        tokens = tokens[: count * self.page_size]
        node, pages = self.cache.insert(tokens, before, self.slots.salt[slot], clock)
        if node is None:
            return
        # First the row points at the cache's pages and holds them; only then are the duplicates
        # free to be taken. Steps in flight still write the duplicates: later takers come later.
        self.table.set_prefix(slot, pages)
        self.cache.lock(node)
        self.cache.unlock(self.slots.locked_node[slot])
        self.slots.locked_node[slot] = node
        self._free(before[before != pages])

    # ---------------------------------------------------------------------------------------- admit

    def _admit(self, admit: Admit, clock: int) -> int:
        """Fills a slot and locks the cached prefix; returns how many tokens it has."""
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
        self.slots.put(slot, tokens, admit.max_total, admit.cache_salt)
        # The last token is always computed: without it there would be no logits to sample from. So
        # is the one before the first whose log-prob is wanted.
        reusable = len(tokens) - 1 if admit.score_from < 0 else max(admit.score_from - 1, 0)
        node, pages = self.cache.match(tokens[:reusable], admit.cache_salt, clock)
        self.cache.lock(node)
        self.slots.locked_node[slot] = node
        self.table.set_prefix(slot, pages)
        cached = len(pages) * self.page_size
        self.slots.num_computed[slot] = cached
        return cached

    def _extend(self, extend: Extend) -> None:
        slot = self._check_active(extend.slot, "extend")
        tokens = _ids(extend.ids, f"extend of slot {slot}")
        known, most = int(self.slots.num_known[slot]), int(self.slots.max_total[slot])
        if not 0 < len(tokens) < most - known:
            raise ProtocolError(
                f"extend of slot {slot} by {len(tokens)} tokens, where {known} are known and at "
                f"most {most} may be"
            )
        if int(tokens.min()) < 0:
            raise ProtocolError(f"extend of slot {slot}: token id {int(tokens.min())}")
        self.slots.extend(slot, tokens)

    # ---------------------------------------------------- advance: the hot path, no loop over rows

    def _advance_rows(self, slots: np.ndarray, counts: np.ndarray) -> Rows:
        starts = self.slots.num_computed[slots]
        known = self.slots.num_known[slots]
        left = known - starts
        # A decode computes position `start` and samples the token at `start + 1`. In an empty slot
        # nothing is left and nothing has room.
        has_room = (starts + 2 <= self.slots.max_total[slots]) & (counts > 0)
        takes = np.where(left > 0, np.minimum(left, counts), has_room).astype(np.int32)
        needs = self._pages_for(starts + takes) - self.table.num_pages[slots]
        total = int(needs.sum())
        deferred = np.zeros(len(slots), dtype=bool)
        if total > self.num_free + self.num_evictable:
            deferred = self._choose_deferred(needs)
            takes[deferred] = needs[deferred] = 0
            total = int(needs.sum())
        if total:
            self.table.append(slots, needs, self._allocate(total))
        ends = starts + takes
        self.slots.num_computed[slots] = ends
        samples = (takes > 0) & (ends >= known)
        prompts = samples & (left > 0) & (known == self.slots.num_admitted[slots])
        self._finished_prompts = self._finished_prompts[1], slots[prompts]
        return Rows(slots, starts, takes, samples, left > 0, deferred)

    def _repeat_decodes(self, plan: Plan) -> Rows | None:
        """The rows of the plan before, one token further, if that is all that `plan` wants and
        there are pages for it; else None, and nothing is touched."""
        run = self._steady_decode
        if run is None or not run.repeats(plan):
            return None
        growing = run.rows_needing_page()
        if len(growing):
            if len(growing) > self.num_free + self.num_evictable:
                return None
            self.table.append_one(run.slots[growing], self._allocate(len(growing)))
        rows = run.advance(growing)
        self.slots.num_computed[run.slots] = run.starts
        return rows

    def _pages_for(self, tokens: np.ndarray) -> np.ndarray:
        return (tokens + (self.page_size - 1)) // self.page_size

    def _choose_deferred(self, needs: np.ndarray) -> np.ndarray:
        """In plan order, each row takes what it needs in full or is deferred; bool [R].

        Rows that need nothing go on. The one loop over rows, taken only when memory is short.
        """
        left = self.num_free + self.num_evictable
        deferred = np.zeros(len(needs), dtype=bool)
        for row in np.flatnonzero(needs).tolist():
            if needs[row] <= left:
                left -= int(needs[row])
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
        return pages

    def _evict(self, count: int) -> None:
        pages = self.cache.evict(count)
        self.num_evicted += len(pages)
        self._free(pages)

    def _free(self, pages: np.ndarray) -> None:
        self._add_to_digest(pages)
        self.allocator.free(pages)

    def _add_to_digest(self, *decisions: np.ndarray) -> None:
        for decision in decisions:
            self._digest.add(decision)

    def _check_active(self, slot: int, verb: str) -> int:
        if not 0 <= slot < self.slots.num_slots:
            raise ProtocolError(f"{verb} of slot {slot} of {self.slots.num_slots}")
        if not self.slots.active[slot]:
            raise ProtocolError(f"{verb} of slot {slot}, which is empty")
        return slot

    def _parse_rows(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """The plan's slots and counts, int32 [R]; raises ProtocolError if they make no sense."""
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


def _ids(raw: bytes, what: str) -> np.ndarray:
    if len(raw) % 4:
        raise ProtocolError(f"{what}: {len(raw)} bytes are no int32 sequence")
    return np.frombuffer(raw, dtype="<i4")
