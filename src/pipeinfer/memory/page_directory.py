"""The page directory: the contents of each page of the KV pool, in memory that outlives the engine.

An engine that is killed leaves pages full of keys and values. Its successor verifies the entries of
the directory, puts the pages with valid entries into its prefix cache, and computes the others
again.

- PageDirectory: the arrays, and the order in which they are written.
- ChainTracker: which pages a plan gives to requests, which pages a step has filled, and with which
  tokens.
- PageChains: pages with their contents, as they travel between the two.

A page's chain is the pages before it in its request and itself; the digest of a page is a hash of
the digest before it, the cache salt and its token ids. So equal digests mean equal keys and values,
as long as the entry of a page is invalidated before the page is given away or zeroed. Only full
pages are recorded. Knows no device and no tensor; ChainTracker and PageChains do no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from pipeinfer.core import HASH_BYTES, block_hash, salt_hash
from pipeinfer.memory.pages import PageTable, SlotArrays
from pipeinfer.messages import TOKEN_BYTES
from pipeinfer.wire import EMPTY_INT32, NO_DRAFTS, ONE_INT32

DIGEST_BYTES = HASH_BYTES
NO_PARENT = bytes(DIGEST_BYTES)  # the digest before a chain's first page
NO_SALT = bytes(DIGEST_BYTES)
MAGIC = b"pipeinfer pages\x01"
MAX_MODEL_KEY = 64  # bytes of the model's key
UNUSABLE, USABLE = 0, 1
NOTHING_DRAFTED: Mapping[int, tuple[int, np.ndarray]] = MappingProxyType({})


def salt_digest(salt: str) -> bytes:
    """The directory's digest [16] of a cache salt; zeros for an empty salt."""
    return salt_hash(salt) if salt else NO_SALT


def page_digest(parent: bytes, salt: bytes, ids: np.ndarray) -> bytes:
    """The digest [16] of a page with the token ids `ids` int32 [page_size] after the page with
    digest `parent`."""
    return block_hash(parent + salt, ids.astype("<i4", copy=False).tobytes())


# (page, depth, digest, digest of the page before it, digest of the salt, ids int32 [page_size])
FilledPage = tuple[int, int, bytes, bytes, bytes, np.ndarray]


@dataclass(frozen=True)
class PageChains:
    """n pages and their contents.

    Attributes:
    - pages: int32 [n]
    - depths: int32 [n], number of pages before each one in its chain
    - digests, parents, salts: uint8 [n, 16], digests of each page, of the page before it, of the
      cache salt
    - ids: int32 [n, page_size], token ids
    """

    pages: np.ndarray
    depths: np.ndarray
    digests: np.ndarray
    parents: np.ndarray
    salts: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.pages)

    @staticmethod
    def none(page_size: int) -> PageChains:
        """An empty PageChains."""
        digests = np.zeros((0, DIGEST_BYTES), np.uint8)
        ids = np.zeros((0, page_size), np.int32)
        return PageChains(EMPTY_INT32, EMPTY_INT32, digests, digests, digests, ids)

    @staticmethod
    def of(rows: Sequence[FilledPage]) -> PageChains:
        """A PageChains of `rows`, at least one."""
        pages, depths, digests, parents, salts, ids = zip(*rows, strict=True)
        return PageChains(
            np.array(pages, np.int32),
            np.array(depths, np.int32),
            _digest_rows(digests),
            _digest_rows(parents),
            _digest_rows(salts),
            np.stack(ids).astype(np.int32, copy=False),
        )

    def only(self, chosen: np.ndarray) -> PageChains:
        """The rows `chosen`, indices or bool [n]."""
        return PageChains(
            self.pages[chosen],
            self.depths[chosen],
            self.digests[chosen],
            self.parents[chosen],
            self.salts[chosen],
            self.ids[chosen],
        )

    def verified(self) -> PageChains:
        """The pages whose digests are right, whose whole chain is there, and that repeat no other
        page's digest; by depth, then page. If several pages have the same digest, the lowest page
        number wins."""
        order = np.lexsort((self.pages, self.depths))
        depth_of: dict[bytes, int] = {}
        kept: list[int] = []
        for at in order.tolist():
            parent, depth = self.parents[at].tobytes(), int(self.depths[at])
            digest, salt = self.digests[at].tobytes(), self.salts[at].tobytes()
            if parent != NO_PARENT if depth == 0 else depth_of.get(parent) != depth - 1:
                continue
            if digest in depth_of or digest != page_digest(parent, salt, self.ids[at]):
                continue
            depth_of[digest] = depth
            kept.append(at)
        return self.only(np.array(kept, dtype=np.int64))

    def agreed(self, pages: int, gather: Callable[[np.ndarray], np.ndarray]) -> PageChains:
        """The pages that all ranks of a group hold, as far as their whole chains are there.

        - pages: of the pool, with the dummy page
        - gather: from an int64 array to those of all ranks, [ranks, ...]; every rank calls it
        """
        held = np.zeros((pages, 2), dtype=np.int64)
        held[self.pages] = self.digests.view(np.int64)
        same = (gather(held) == held).all(axis=(0, 2)) & held.any(axis=1)
        return self.only(same[self.pages]).verified()

    def sequences(self) -> Iterable[tuple[bytes, np.ndarray, np.ndarray]]:
        """Yields, for the last page of each chain: its salt [16], its token ids int32 [k *
        page_size], and its pages int32 [k], from the first on. Only for `verified` chains."""
        row_of = {digest.tobytes(): row for row, digest in enumerate(self.digests)}
        inner = {parent.tobytes() for parent in self.parents}
        for row, digest in enumerate(self.digests):
            if digest.tobytes() in inner:
                continue
            path = [row]
            while self.depths[path[-1]]:
                path.append(row_of[self.parents[path[-1]].tobytes()])
            path.reverse()
            yield self.salts[row].tobytes(), self.ids[path].ravel(), self.pages[path]


def _digest_rows(digests: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def directory_bytes(pages: int, page_size: int) -> int:
    """Size in bytes of a directory of `pages` pages, with the dummy page 0."""
    return _Layout(pages, page_size).total


class _Layout:
    """Offsets in bytes of the arrays; each begins at a multiple of 64.

    | header | valid u8 | depths i32 | digests u8 x 16 | parents | salts | ids i32 x page_size |

    The header is MAGIC, pages i64, page_size i64, the model's key, and one byte: UNUSABLE or
    USABLE.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        sizes = [
            len(MAGIC) + 16 + MAX_MODEL_KEY + 1,
            pages,
            4 * pages,
            *[DIGEST_BYTES * pages] * 3,
            TOKEN_BYTES * page_size * pages,
        ]
        self.offsets: list[int] = []
        self.total = 0
        for size in sizes:
            self.offsets.append(self.total)
            self.total += -(-size // 64) * 64


class PageDirectory:
    """Contents of each of `pages` pages, in `buffer`, which may be shared and outlives processes.

    A page is valid from the last byte that `validate` writes until the first one that `invalidate`
    writes, so whenever its writer is killed, the entry of a valid page is true. That asks of the
    caller: a page is invalidated before any work is launched that may write it, and validated when
    the step that filled it has ended.

    Attributes:
    - pages: of the pool, with the dummy page 0
    - page_size: tokens of a page
    """

    def __init__(self, buffer: memoryview, pages: int, page_size: int) -> None:
        """Raises ValueError for a buffer of another size than `directory_bytes`."""
        layout = _Layout(pages, page_size)
        if len(buffer) != layout.total:
            raise ValueError(f"a directory of {pages} pages takes {layout.total} bytes")
        self.pages = pages
        self.page_size = page_size
        whole = np.frombuffer(buffer, dtype=np.uint8)
        self._header = whole[: layout.offsets[1]]

        def array(index: int, count: int) -> np.ndarray:
            return whole[layout.offsets[index] : layout.offsets[index] + count]

        self._valid = array(1, pages)
        self._depths = array(2, 4 * pages).view("<i4")
        self._digests, self._parents, self._salts = (
            array(index, DIGEST_BYTES * pages).reshape(pages, DIGEST_BYTES) for index in (3, 4, 5)
        )
        self._ids = array(6, TOKEN_BYTES * page_size * pages).view("<i4").reshape(pages, page_size)

    def begin(self, model_key: bytes) -> None:
        """Makes all pages invalid; from now on they belong to `model_key`, at most 64 bytes: a
        digest of all that keys and values depend on beside their token ids."""
        self._header[-1] = self._header[: len(MAGIC)] = 0
        self._valid[:] = 0
        self._header[:] = 0
        head = self._head(model_key)
        self._header[: len(head)] = np.frombuffer(head, np.uint8)
        self._header[-1] = USABLE

    def belongs_to(self, model_key: bytes) -> bool:
        """Whether pages are of `model_key`, and the directory was not made unusable."""
        head = self._head(model_key)
        return self._header[-1] == USABLE and self._header[: len(head)].tobytes() == head

    def _head(self, model_key: bytes) -> bytes:
        sizes = np.array([self.pages, self.page_size], "<i8").tobytes()
        return MAGIC + sizes + model_key.ljust(MAX_MODEL_KEY, b"\0")

    def make_unusable(self) -> None:
        """Makes the whole directory unusable until `begin`, because the engine has detected a fault
        of its own."""
        self._header[-1] = UNUSABLE

    def invalidate(self, pages: np.ndarray) -> None:
        """Makes `pages` int32 [n] invalid; to be called before any work is launched that may write
        them."""
        self._valid[pages] = 0

    def invalidate_all(self) -> None:
        """Makes all pages invalid, because the prefix cache is to be forgotten."""
        self._valid[:] = 0

    def validate(self, filled: PageChains) -> None:
        """Writes the entries of pages that a step has filled; to be called when the step has
        ended."""
        pages = filled.pages
        self._depths[pages] = filled.depths
        self._digests[pages] = filled.digests
        self._parents[pages] = filled.parents
        self._salts[pages] = filled.salts
        self._ids[pages] = filled.ids
        self._valid[pages] = 1

    def read(self) -> PageChains:
        """All valid pages; a successor may use those of them that are `verified`."""
        pages = np.flatnonzero(self._valid).astype(np.int32)
        pages = pages[pages > 0]
        return PageChains(
            pages,
            self._depths[pages],
            self._digests[pages],
            self._parents[pages],
            self._salts[pages],
            self._ids[pages],
        )


@dataclass
class StepFills:
    """The effect of one plan's step on pages, until the step has ended.

    Attributes:
    - number: of the plan
    - rows: int64 [R], rows of the plan that compute anything
    - slots: int32 [R], their slots
    - starts, ends: int32 [R]; row r computes positions starts[r] .. ends[r] - 1
    - requests: int64 [R], numbers of the requests in those slots; 0: none
    - known_ids: by row, int32 [count], token ids of a row that does not decode
    - filled_pages: by row that fills any page: int32 [n], the slot's pages from page starts //
      page_size on
    - repeats: every row decodes one token, as in the step before, of the same rows
    - drafted: by row of the plan, rows whose start only the device knows (they are not among the
      others): slot, number of the request, int32 [n] pages of the slot
    """

    number: int
    rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    requests: np.ndarray
    known_ids: dict[int, np.ndarray]
    filled_pages: dict[int, np.ndarray]
    repeats: bool = False
    drafted: dict[int, DraftedFill] = field(default_factory=lambda: dict[int, DraftedFill]())


class DraftedFill(NamedTuple):
    """The pages of a row whose start only the device knows.

    Attributes:
    - slot: of the row
    - request: number of the request in the slot
    - pages: all pages of the slot, int32 [n]
    """

    slot: int
    request: int
    pages: np.ndarray


class TrackedRows(Protocol):
    """The attributes of the memory manager's Rows that a ChainTracker reads."""

    number: int
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ids_known: np.ndarray
    same_as_previous: bool
    drafts: np.ndarray | None


class ChainTracker:
    """Finds the pages that steps have filled, from plans and sampled ids.

    Steps end in the order of their plans. A step's page counts only if no later plan has given it
    away: a page that its request lost while the step was in flight is left out.

    Hot path: nearly every step repeats the decodes of the one before. Until one of their rows fills
    a page, the ids that such steps sample are put aside; one stream fills a page in one step of
    page_size.
    """

    def __init__(self, pages: int, page_size: int, max_slots: int) -> None:
        """Begins without pages.

        - pages: of the pool, with the dummy page 0
        - page_size: tokens of a page
        - max_slots: most requests at a time
        """
        self.page_size = page_size
        self._max_slots = max_slots
        self._last_request = 0
        # by page: the last plan that gave it to a request
        self._invalidated_by = np.empty(pages, dtype=np.int64)
        # of each slot's page that is being filled
        self._ids = np.zeros((max_slots, page_size), dtype=np.int32)
        self.reset(None)

    def reset(self, chains: PageChains | None) -> None:
        """Begins an epoch with the verified pages `chains`; None: with no page."""
        self._invalidated_by[:] = -1
        others = np.ones(len(self._invalidated_by), dtype=bool)
        if chains is not None:
            others[chains.pages] = False
        self._invalidated: list[np.ndarray] = [np.flatnonzero(others).astype(np.int32)]
        self._digests: dict[int, bytes] = {}  # by valid page
        if chains is not None:
            digests = [digest.tobytes() for digest in chains.digests]
            self._digests = dict(zip(chains.pages.tolist(), digests, strict=True))
        # by slot: digest before the page that is being filled
        self._parents = [NO_PARENT] * self._max_slots
        self._salts = [NO_SALT] * self._max_slots
        # by slot: number of its request; 0: none
        self._requests = np.zeros(self._max_slots, dtype=np.int64)
        self._last: StepFills | None = None  # of the last plan
        # number of repeated steps until one fills a page, from the last plan on
        self._steps_to_full = 0
        # Steps that repeat each other, not written to `_ids` yet, with the sampled ids of their
        # rows.
        self._put_aside: list[tuple[StepFills, np.ndarray]] = []

    def invalidate(self, pages: np.ndarray, number: int) -> None:
        """Notes that plan `number` gave `pages` int32 [n] to requests, or that their contents are
        not reliable."""
        self._invalidated_by[pages] = number
        self._invalidated.append(pages)
        for page in pages.tolist():
            self._digests.pop(page, None)

    def take_invalidated(self) -> np.ndarray:
        """Pages, int32 [n], that were invalidated since the last call: the directory must mark them
        invalid before the next step is launched."""
        invalidated, self._invalidated = self._invalidated, []
        return np.concatenate(invalidated) if invalidated else EMPTY_INT32

    def admit(self, slot: int, salt: bytes, ids: np.ndarray, cached: np.ndarray) -> None:
        """Notes that a request enters `slot`.

        - salt: digest of the request's cache salt
        - ids: int32 [k * page_size], contents of the pages `cached`
        - cached: int32 [k], pages of the request that the prefix cache had
        """
        self._last_request += 1
        self._requests[slot] = self._last_request
        self._salts[slot] = salt
        self._parents[slot] = self._chain_end(salt, ids, cached)

    def _chain_end(self, salt: bytes, ids: np.ndarray, cached: np.ndarray) -> bytes:
        """The digest of the last of the pages `cached`. A page that is being filled has no digest
        yet: then it is computed from the last page that has one."""
        behind = len(cached)
        while behind and int(cached[behind - 1]) not in self._digests:
            behind -= 1
        digest = self._digests[int(cached[behind - 1])] if behind else NO_PARENT
        for begin in range(behind * self.page_size, len(ids), self.page_size):
            digest = page_digest(digest, salt, ids[begin : begin + self.page_size])
        return digest

    def release(self, slot: int) -> None:
        """Notes that the request in `slot` is gone."""
        self._requests[slot] = 0

    def mark_unusable(self, step: StepFills, rows: np.ndarray) -> None:
        """Stops tracking the requests of these `rows` int64 [n] of the plan, so they fill no more
        pages: bad logits may have left NaN anywhere, and if no id was sampled, the input of later
        steps in flight is unknown. Slots that have other requests by now are not affected."""
        found = np.isin(step.rows, rows)
        slots = step.slots[found]
        self._requests[slots[self._requests[slots] == step.requests[found]]] = 0
        for row in rows.tolist():
            one = step.drafted.get(row)
            if one is not None and self._requests[one.slot] == one.request:
                self._requests[one.slot] = 0

    def plan(self, rows: TrackedRows, table: PageTable, slots: SlotArrays) -> StepFills:
        """The pages that the step of `rows` will have filled, to be given to `filled` when the step
        has ended."""
        if rows.same_as_previous and self._last is not None:
            step = self._repeated(self._last, rows, table)
        else:
            step = self._planned(rows, table, slots)
            self._steps_to_full = 0  # not known
        self._last = step
        return step

    def _repeated(self, last: StepFills, rows: TrackedRows, table: PageTable) -> StepFills:
        """StepFills of a step that decodes the rows of the step `last` one token further."""
        ends, filled_pages = last.ends + ONE_INT32, dict[int, np.ndarray]()
        self._steps_to_full -= 1
        if self._steps_to_full <= 0:
            offsets = ends % self.page_size
            full = np.flatnonzero(offsets == 0)
            if len(full):
                columns = ends[full] // self.page_size - 1
                pages = table.pages_at(last.slots[full], columns)
                filled_pages = dict(zip(full.tolist(), pages[:, None], strict=True))
            self._steps_to_full = self.page_size - int(offsets.max())
        return StepFills(
            number=rows.number,
            rows=last.rows,
            slots=last.slots,
            starts=last.ends,
            ends=ends,
            requests=last.requests,
            known_ids={},
            filled_pages=filled_pages,
            repeats=True,
        )

    def _planned(self, rows: TrackedRows, table: PageTable, slots: SlotArrays) -> StepFills:
        """StepFills of a step with any rows."""
        size, computes = self.page_size, rows.counts > 0
        drafted = dict[int, DraftedFill]()
        if rows.drafts is not None:
            verifies = computes & (rows.drafts != NO_DRAFTS)
            drafted = self._drafted(np.flatnonzero(verifies), rows.slots, table)
            computes &= ~verifies
        computes = np.flatnonzero(computes)
        starts, counts = rows.starts[computes], rows.counts[computes]
        ends, chosen = starts + counts, rows.slots[computes]
        known_ids, filled_pages = dict[int, np.ndarray](), dict[int, np.ndarray]()
        for row in np.flatnonzero(rows.ids_known[computes]).tolist():
            known = slots.known_tokens(int(chosen[row]))
            known_ids[row] = known[starts[row] : ends[row]]
        begins, behind = starts // size, ends // size
        for row in np.flatnonzero(behind > begins).tolist():
            columns = int(begins[row]), int(behind[row])
            filled_pages[row] = table.columns(chosen[row : row + 1], *columns)[0].copy()
        requests = self._requests[chosen]
        return StepFills(
            number=rows.number,
            rows=computes,
            slots=chosen,
            starts=starts,
            ends=ends,
            requests=requests,
            known_ids=known_ids,
            filled_pages=filled_pages,
            drafted=drafted,
        )

    def _drafted(
        self, rows: np.ndarray, slots: np.ndarray, table: PageTable
    ) -> dict[int, DraftedFill]:
        """StepFills.drafted of these `rows` int64 [n] of a plan with `slots` int32 [R]."""
        numbers: list[int] = slots[rows].tolist()
        return {
            row: DraftedFill(slot, int(self._requests[slot]), table.pages_of(slot).copy())
            for row, slot in zip(rows.tolist(), numbers, strict=True)
        }

    def filled(
        self,
        step: StepFills,
        sampled: np.ndarray,
        drafted: Mapping[int, tuple[int, np.ndarray]] = NOTHING_DRAFTED,
    ) -> PageChains | None:
        """The pages that a step has filled, now that it has ended; None: no page.

        - sampled: int32, by row of the plan, the id that the row sampled, negative: none
        - drafted: by row of StepFills.drafted, the row's start, and the ids that it gave, int32
          [n]: the drafts that were accepted and the id after them
        """
        if step.repeats and not step.filled_pages:
            self._put_aside.append((step, sampled))
            return None
        self._write_put_aside()
        sampled = sampled[step.rows]
        alive = self._alive(step)
        found: list[FilledPage] = []
        for row, ids in step.known_ids.items():
            if alive[row]:
                self._store(step, row, ids, found)
        for row in step.filled_pages:
            if alive[row] and row not in step.known_ids:
                depth = int(step.starts[row]) // self.page_size
                self._fill_of(step, row, depth, found)
        rows = np.flatnonzero(alive & (sampled >= 0))
        self._ids[step.slots[rows], step.ends[rows] % self.page_size] = sampled[rows]
        for row, (start, ids) in drafted.items():
            self._verified(step, step.drafted[row], start, ids.tolist(), found)
        return PageChains.of(found) if found else None

    def _verified(
        self, step: StepFills, row: DraftedFill, start: int, ids: list[int], found: list[FilledPage]
    ) -> None:
        """Takes a row with drafts, which has computed as many tokens from `start` on as it gave
        `ids`, each of which follows one of them. Appends the pages that it filled to `found`."""
        if self._requests[row.slot] != row.request or not row.request:
            return
        for end, token in enumerate(ids, start + 1):
            if end % self.page_size == 0:
                depth = end // self.page_size - 1
                self._fill(step, row.slot, depth, int(row.pages[depth]), found)
            self._ids[row.slot, end % self.page_size] = token

    def _alive(self, step: StepFills) -> np.ndarray:
        """Rows whose requests are still in their slots, bool [R]."""
        return (self._requests[step.slots] == step.requests) & (step.requests > 0)

    def _write_put_aside(self) -> None:
        """Writes the ids that the steps put aside have sampled, of requests that are still in their
        slots."""
        if not self._put_aside:
            return
        first = self._put_aside[0][0]
        ids = np.stack([sampled for _, sampled in self._put_aside])  # [steps, R]
        self._put_aside.clear()
        offsets = (first.ends + np.arange(len(ids), dtype=np.int32)[:, None]) % self.page_size
        written = (ids >= 0) & self._alive(first)
        slots = np.broadcast_to(first.slots, ids.shape)
        self._ids[slots[written], offsets[written]] = ids[written]

    def _store(self, step: StepFills, row: int, ids: np.ndarray, found: list[FilledPage]) -> None:
        """Takes a row that has computed the known `ids` int32 [count], which may fill several
        pages."""
        at, slot, left = int(step.starts[row]), int(step.slots[row]), ids
        while len(left):
            offset = at % self.page_size
            part = left[: self.page_size - offset]
            self._ids[slot, offset : offset + len(part)] = part
            left, at = left[len(part) :], at + len(part)
            if at % self.page_size == 0:
                self._fill_of(step, row, at // self.page_size - 1, found)

    def _fill_of(self, step: StepFills, row: int, depth: int, found: list[FilledPage]) -> None:
        """Takes a full page as `_fill` does, for a row whose start the host knows."""
        page = int(step.filled_pages[row][depth - int(step.starts[row]) // self.page_size])
        self._fill(step, int(step.slots[row]), depth, page, found)

    def _fill(
        self, step: StepFills, slot: int, depth: int, page: int, found: list[FilledPage]
    ) -> None:
        """Takes a full page: `page` is page number `depth` of `slot`."""
        parent, salt, ids = self._parents[slot], self._salts[slot], self._ids[slot].copy()
        digest = self._parents[slot] = page_digest(parent, salt, ids)
        # A page that was invalidated since belongs to another request: this request reads another
        # page by now, with the same contents.
        if self._invalidated_by[page] <= step.number:
            self._digests[page] = digest
            found.append((page, depth, digest, parent, salt, ids))
