"""KV pages as numbers: which are free, which page each token of a slot lies in, and which pages
several rows share.

- PageAllocator: the free pages.
- PageTable: the pages of each slot in the order of its tokens (vLLM: block table).
- SlotArrays: state of the request in each slot.
- find_shared_prefixes: which decodes of a step begin with the same pages, so that attention reads
  these pages once for several rows (cascade attention). Two rows have the same page in a column
  only if all pages before it are the same, too: such pages are the prefix cache's, where a page has
  one prefix.

IntegrityError and ProtocolError end the epoch, not the process. Knows no prefix tree, no plan and
no tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeinfer.step import SharedPrefixes
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER


class ProtocolError(Exception):
    """The plan contradicts the state: it admits into a used slot, or releases an empty one."""


class IntegrityError(Exception):
    """An invariant of the memory does not hold. The message has the numbers."""


class PageAllocator:
    """The free pages of a pool, a stack: the page that was freed last is allocated first.

    Attributes:
    - num_pages: pages that requests can have, 1 .. num_pages. Page 0 is a dummy that no request
      owns
    - num_free: number of free pages

    `_stack`, int32 [num_pages], holds the free pages; the next one to be allocated is the last:

        | free, oldest ... free, newest | stale     |
        0                               num_free    num_pages
    """

    def __init__(self, pages: int) -> None:
        """Begins with all pages free.

        - pages: of the pool, with the dummy page. Raises ValueError below 2
        """
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, not {pages}")
        self.num_pages = pages - 1
        self.reset()

    def reset(self) -> None:
        """Frees every page."""
        self._stack = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._is_free = np.ones(self.num_pages + 1, dtype=bool)
        self._is_free[0] = False
        self.num_free = self.num_pages

    def allocate(self, count: int) -> np.ndarray:
        """Allocates `count` free pages, int32 [count]; raises IntegrityError if there are fewer."""
        if count > self.num_free:
            raise IntegrityError(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._is_free[pages] = False
        return pages

    def take(self, pages: np.ndarray) -> None:
        """Allocates the distinct `pages` int32 [n]; raises IntegrityError if one is not free."""
        low, high = int(pages.min()), int(pages.max())
        if low < 1 or high > self.num_pages or not self._is_free[pages].all():
            raise IntegrityError(f"pages {low}..{high} of 1..{self.num_pages} are not all free")
        self._is_free[pages] = False
        left = self._stack[: self.num_free]
        left = left[self._is_free[left]]
        self.num_free = len(left)
        self._stack[: self.num_free] = left

    def free(self, pages: np.ndarray) -> None:
        """Frees `pages`, int32 [n]; raises IntegrityError if one is free already or unknown."""
        count = len(pages)
        if count == 0:
            return
        self._check_freed(pages)
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count

    def _check_freed(self, pages: np.ndarray) -> None:
        low, high = int(pages.min()), int(pages.max())
        if low < 1 or high > self.num_pages:
            raise IntegrityError(f"pages {low}..{high} given back, there are 1..{self.num_pages}")
        wrong = pages[self._is_free[pages]]
        if len(wrong):
            raise IntegrityError(f"pages {wrong.tolist()} given back are free already")
        if len(pages) + self.num_free > self.num_pages:
            raise IntegrityError(
                f"{len(pages)} pages given back, only {self.num_pages - self.num_free} are taken"
            )

    def free_pages(self) -> np.ndarray:
        """A copy of the free pages, int32 [free]; raises IntegrityError if one is there twice."""
        pages = self._stack[: self.num_free].copy()
        marked = int(np.count_nonzero(self._is_free))
        if marked != self.num_free or not self._is_free[pages].all():
            raise IntegrityError(f"{self.num_free} pages on the stack, {marked} marked free")
        return pages


class PageTable:
    """The page table on the host, int32 [max_slots, max_pages_per_sequence]. A row's regions:

        | the prefix cache's, locked | the request's own    | 0, the dummy page ... |
        0                            num_shared[slot]       num_pages[slot]

    Attributes:
    - num_pages: int32 [max_slots], pages of each slot
    - num_shared: int32 [max_slots], how many of them, from the first on, the prefix cache owns
    - num_owned: pages that requests own, the sum of num_pages - num_shared

    Devices have copies of the table, which follow by `take_changes`.
    """

    def __init__(self, max_slots: int, max_pages_per_sequence: int) -> None:
        self._rows = np.zeros((max_slots, max_pages_per_sequence), dtype=np.int32)
        self.num_pages = np.zeros(max_slots, dtype=np.int32)
        self.num_shared = np.zeros(max_slots, dtype=np.int32)
        self.num_owned = 0
        self._changed: list[tuple[np.ndarray, np.ndarray]] = []  # slots and columns

    def reset(self) -> None:
        """Empties every row. `take_changes` does not return these changes."""
        self._changed.clear()
        for slot in np.flatnonzero(self.num_pages):
            self._rows[slot, : self.num_pages[slot]] = 0
        self.num_pages[:] = 0
        self.num_shared[:] = 0
        self.num_owned = 0

    def set_prefix(self, slot: int, pages: np.ndarray) -> None:
        """Makes `pages` int32 [n], which the prefix cache owns, the first n pages of the slot."""
        count = len(pages)
        columns = np.flatnonzero(self._rows[slot, :count] != pages)
        self._changed.append((np.full(len(columns), slot), columns))
        self._rows[slot, :count] = pages
        num_pages, num_shared = int(self.num_pages[slot]), int(self.num_shared[slot])
        self.num_shared[slot] = count
        self.num_pages[slot] = max(count, num_pages)
        self.num_owned += max(count, num_pages) - count - (num_pages - num_shared)

    def append(self, slots: np.ndarray, needs: np.ndarray, pages: np.ndarray) -> None:
        """Appends to each of the distinct `slots` int32 [n] the next `needs` int32 [n] of `pages`
        int32 [sum of needs]."""
        if len(pages) == np.count_nonzero(needs):  # decodes: one page each
            self.append_one(slots[needs > 0], pages)
            return
        row = np.repeat(slots, needs)
        offset = np.arange(len(pages)) - np.repeat(np.cumsum(needs) - needs, needs)
        columns = self.num_pages[row] + offset
        self._changed.append((row, columns))
        self._rows[row, columns] = pages
        self.num_pages[slots] += needs
        self.num_owned += len(pages)

    def append_one(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Appends to each of the distinct `slots` int32 [n] one page of `pages` int32 [n]."""
        columns = self.num_pages[slots]
        self._changed.append((slots, columns))
        self._rows[slots, columns] = pages
        self.num_pages[slots] = columns + np.int32(1)
        self.num_owned += len(pages)

    def pages_of(self, slot: int) -> np.ndarray:
        """A copy of the slot's pages, int32 [num_pages of the slot]."""
        return self._rows[slot, : self.num_pages[slot]].copy()

    def columns(self, slots: np.ndarray, begin: int, end: int) -> np.ndarray:
        """A copy of columns begin .. end - 1 of `slots` int32 [n]: int32 [n, end - begin]."""
        return self._rows[slots, begin:end]

    def pages_at(self, slots: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The page in column `columns` int32 [n] of each of `slots` int32 [n]: int32 [n]."""
        return self._rows[slots, columns]

    def owned_pages(self, slot: int) -> np.ndarray:
        """A copy of the pages that the slot's request owns, int32 [num_pages - num_shared]."""
        return self._rows[slot, self.num_shared[slot] : self.num_pages[slot]].copy()

    def clear(self, slot: int) -> None:
        """Empties the slot's row. `take_changes` does not return this change."""
        self._rows[slot, : self.num_pages[slot]] = 0
        self.num_owned -= int(self.num_pages[slot]) - int(self.num_shared[slot])
        self.num_pages[slot] = 0
        self.num_shared[slot] = 0

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The entries written since the last call: slots, columns and pages, int32 [n] each; None
        if there are none. Pages are those that the table has now, so an entry that was written
        twice appears twice with the same page. Emptied rows are left out."""
        if not self._changed:
            return None
        slots, columns = self._changed[0]
        if len(self._changed) > 1:
            both = zip(*self._changed, strict=True)
            slots, columns = (np.concatenate(parts) for parts in both)
        self._changed.clear()
        pages = self._rows[slots, columns]
        return slots.astype(np.int32, copy=False), columns.astype(np.int32, copy=False), pages


class SlotArrays:
    """State of the request in each slot, on the host. The hot path uses the arrays; the lists are
    used only when a request comes, goes, or computes tokens of its prompt.

    Attributes:
    - active: bool [max_slots]
    - num_admitted: int32 [max_slots], token ids that the request was admitted with
    - num_known: int32 [max_slots], those, and the ids that `extend` added
    - num_projected: int32 [max_slots], positions whose KV is in the pages once all planned steps
      have run, as Request.projected of the scheduler, not those that results have confirmed
      (Request.computed). Positions beyond num_known have sampled ids that only the device knows
    - max_total: int32 [max_slots], tokens that the request never grows past
    - tokens: by slot, the known ids, int32 [num_known]; None in an empty slot
    - locked_node: by slot, the node of the prefix cache that the slot has locked
    - salt: by slot, the request's cache salt
    - prompt_only: bool [max_slots], at most one token is sampled, so no request continues this one
    - drafted: bool [max_slots], draft tokens of the request were verified: num_projected counts
      them as if all had been accepted; only the device knows how many were

    In empty slots numbers are 0.
    """

    def __init__(self, max_slots: int) -> None:
        self.num_slots = max_slots
        self.active = np.zeros(max_slots, dtype=bool)
        self.num_known = np.zeros(max_slots, dtype=np.int32)
        self.num_projected = np.zeros(max_slots, dtype=np.int32)
        self.max_total = np.zeros(max_slots, dtype=np.int32)
        self.num_admitted = np.zeros(max_slots, dtype=np.int32)
        self.tokens: list[np.ndarray | None] = [None] * max_slots
        self.locked_node: list[object] = [None] * max_slots
        self.salt: list[str] = [""] * max_slots
        self.prompt_only = np.zeros(max_slots, dtype=bool)
        self.drafted = np.zeros(max_slots, dtype=bool)

    def put(
        self, slot: int, tokens: np.ndarray, max_total: int, salt: str, prompt_only: bool = False
    ) -> None:
        """Fills an empty slot with a request of `tokens` int32 [n], none of them computed."""
        self.active[slot] = True
        self.num_known[slot] = len(tokens)
        self.num_projected[slot] = 0
        self.max_total[slot] = max_total
        self.num_admitted[slot] = len(tokens)
        self.tokens[slot] = tokens
        self.salt[slot] = salt
        self.prompt_only[slot] = prompt_only

    def extend(self, slot: int, tokens: np.ndarray) -> None:
        """Adds `tokens` int32 [n] to the known ids of an active slot. Some of them may be computed
        already."""
        self.tokens[slot] = np.concatenate((self.known_tokens(slot), tokens))
        self.num_known[slot] += len(tokens)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.active[slot] = False
        self.num_admitted[slot] = self.num_known[slot] = self.num_projected[slot] = self.max_total[
            slot
        ] = 0
        self.tokens[slot] = None
        self.locked_node[slot] = None
        self.salt[slot] = ""
        self.drafted[slot] = False

    def known_tokens(self, slot: int) -> np.ndarray:
        """The known ids of an active slot, int32 [num_known]."""
        tokens = self.tokens[slot]
        assert tokens is not None, f"slot {slot} is empty"
        return tokens


MIN_SHARED_TOKENS = 256  # tokens: a shorter prefix is read as fast by each row for itself
MAX_NESTING = 8  # levels of prefixes within prefixes that are told apart


class PrefixGroup(NamedTuple):
    """Rows of a step with a common prefix.

    Attributes:
    - rows: int64 [n], rows of the step
    - num_pages: number of first pages that all of them have in common
    """

    rows: np.ndarray
    num_pages: int

    @property
    def num_saved(self) -> int:
        """Number of page reads saved."""
        return (len(self.rows) - 1) * self.num_pages


def find_shared_prefixes(
    table: PageTable, slots: np.ndarray, page_size: int
) -> SharedPrefixes | None:
    """Step.shared_prefixes of decodes (rows of one token) in `slots` int32 [R]; None if no prefix
    is worth sharing.

    Only pages that the prefix cache owns can be shared, so each row has tokens after the shared
    ones.
    """
    min_pages = max(-(-MIN_SHARED_TOKENS // page_size), 1)
    long = np.flatnonzero(table.num_shared[slots] >= min_pages)
    if len(long) < 2:
        return None
    # Fast exit: nearly always no two rows have the same page where the shortest prefix would end.
    last_pages = table.columns(slots[long], min_pages - 1, min_pages)[:, 0]
    repeated = np.sort(last_pages)
    repeated = repeated[1:][repeated[1:] == repeated[:-1]]
    if not len(repeated):
        return None
    long = long[np.isin(last_pages, repeated)]
    width = min(int(table.num_shared[slots[long]].max()), PREFIX_UPPER - 1)
    groups = find_groups(table.columns(slots[long], 0, width), min_pages)
    groups.sort(key=lambda one: -one.num_saved)
    leaders, ranks = np.zeros((2, len(slots)), dtype=np.int32)
    for group in groups[:MAX_SHARED_PREFIXES]:
        rows = long[group.rows]
        leaders[rows] = int(rows[0]) * PREFIX_UPPER + group.num_pages
        ranks[rows] = np.arange(len(rows)) * PREFIX_UPPER + len(rows)
    return SharedPrefixes(leaders, ranks)


def find_groups(pages: np.ndarray, min_pages: int) -> list[PrefixGroup]:
    """Disjoint groups of the rows of `pages` int32 [R, W], with at least `min_pages` pages in
    common.

    If some rows of a group have a longer prefix in common, the groups that save most are chosen.
    """
    if len(pages) < 2 or pages.shape[1] < min_pages:
        return []
    # All groups at once: rows with the same page where the shortest prefix would end.
    order = np.argsort(pages[:, min_pages - 1], kind="stable")
    block = pages[order]
    starts = np.flatnonzero(np.diff(block[:, min_pages - 1], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    within = _common_with_next(block)
    within[starts[1:] - 1] = pages.shape[1]  # between the last row of a group and the next group
    common = np.minimum.reduceat(within, starts)
    following = np.minimum(np.repeat(common, sizes), pages.shape[1] - 1)
    pairs = (
        np.repeat(np.arange(len(starts)), sizes) * (1 << 32)
        + block[np.arange(len(order)), following]
    )
    pairs.sort()
    nested = pairs[1:][pairs[1:] == pairs[:-1]] >> 32  # groups of which some rows share more
    groups = list[PrefixGroup]()
    for number, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        rows = order[start : start + size]
        if size == 1:
            continue
        if number in nested:
            groups += _nested_groups(pages, rows)
        else:
            groups.append(PrefixGroup(rows, int(common[number])))
    return groups


class _PrefixNode(NamedTuple):
    """A prefix in the tree of prefixes of a group.

    Attributes:
    - num_pages: length of the prefix
    - rows: rows that have it, and share no longer prefix
    - children: longer prefixes of other rows that have it
    """

    num_pages: int
    rows: list[int]
    children: list[_PrefixNode]


def _nested_groups(pages: np.ndarray, rows: np.ndarray) -> list[PrefixGroup]:
    """Groups of `rows`, which have a prefix in common, of which some have more in common."""
    width, block = pages.shape[1], np.ascontiguousarray(pages[rows])
    # Sorted by their bytes: in any order of bytes, rows with a common prefix are neighbours.
    order = block.view(f"S{width * block.itemsize}")[:, 0].argsort(kind="stable")
    common = _common_with_next(block[order])[:-1]
    groups = list[PrefixGroup]()
    _pick_groups(_build_tree(rows[order].tolist(), common.tolist()), 0, {}, groups)
    return groups


def _common_with_next(block: np.ndarray) -> np.ndarray:
    """Number of first pages that each row of `block` has in common with the next row, int64 [R];
    for the last row, all."""
    differs = block[1:] != block[:-1]
    common = np.full(len(block), block.shape[1])
    common[:-1] = np.where(differs.any(axis=1), differs.argmax(axis=1), block.shape[1])
    return common


def _build_tree(rows: list[int], common: list[int]) -> _PrefixNode:
    """The tree of prefixes of `rows`, in which rows with a common prefix are neighbours.

    - common: number of pages that each row has in common with the next
    """
    open_nodes = list[_PrefixNode]()  # each within the one before
    before = -1
    for row, after in zip(rows, [*common, -1], strict=True):
        if after > before:
            open_nodes.append(_PrefixNode(after, [row], []))
        else:
            open_nodes[-1].rows.append(row)
        while len(open_nodes) > 1 and open_nodes[-2].num_pages >= after:
            open_nodes[-2].children.append(open_nodes.pop())
        if 0 <= after < open_nodes[-1].num_pages:
            open_nodes.append(_PrefixNode(after, [], [open_nodes.pop()]))
        before = after
    [root] = open_nodes
    return _limit_depth(root, MAX_NESTING)


def _limit_depth(node: _PrefixNode, levels: int) -> _PrefixNode:
    """The tree with at most `levels` levels below `node`; rows further down are moved up."""
    if levels:
        return node._replace(children=[_limit_depth(one, levels - 1) for one in node.children])
    rows, below = [*node.rows], [*node.children]
    while below:
        one = below.pop()
        rows += one.rows
        below += one.children
    return _PrefixNode(node.num_pages, rows, [])


_Memo = dict[tuple[int, int], tuple[int, int]]


def _most_saved(node: _PrefixNode, outer_pages: int, memo: _Memo) -> int:
    """The number of pages that the best choice of groups saves among the rows of `node`.

    - outer_pages: pages saved by a row that is in none of these groups, in a group of a shorter
      prefix
    - memo: by id of a node and outer_pages, pages saved without a group at this node, and with one

    A group at this node saves num_pages for each of its rows but one. Rows of longer prefixes may
    join it, so for them num_pages is the number of pages that a row saves outside of their own
    groups; rows in the group are in no group of a shorter prefix.
    """
    found = memo.get((id(node), outer_pages))
    if found is None:
        without = outer_pages * len(node.rows)
        without += sum(_most_saved(one, outer_pages, memo) for one in node.children)
        grouped = node.num_pages * (len(node.rows) - 1)
        grouped += sum(_most_saved(one, node.num_pages, memo) for one in node.children)
        found = memo[id(node), outer_pages] = without, grouped
    return max(found)


def _pick_groups(
    node: _PrefixNode, outer_pages: int, memo: _Memo, groups: list[PrefixGroup]
) -> list[int]:
    """Appends the best choice to `groups`; returns the rows that are in none. Arguments are those
    of `_most_saved`."""
    _most_saved(node, outer_pages, memo)
    without, grouped = memo[id(node), outer_pages]
    is_group = grouped > without
    rows = [*node.rows]
    for one in node.children:
        rows += _pick_groups(one, node.num_pages if is_group else outer_pages, memo, groups)
    if not is_group:
        return rows
    groups.append(PrefixGroup(np.array(sorted(rows)), node.num_pages))
    return []
