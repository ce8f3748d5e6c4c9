"""Which rows of a step begin with the same pages, and how many of these are worth reading once.

Two rows have the same page in a column only if all pages before it are the same, too: such pages
are the prefix cache's, and a page there has one prefix. Knows pages; no token and no tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeinfer.memory.page_table import PageTable
from pipeinfer.step import SharedPrefixes
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER

LEAST = 256  # tokens: a shorter beginning is as fast read by each row for itself
LEVELS = 8  # of beginnings within beginnings


class Group(NamedTuple):
    """Rows of a step, int64, that have their first `pages` pages in common."""

    rows: np.ndarray
    pages: int

    @property
    def saved(self) -> int:
        """Pages that need not be read again."""
        return (len(self.rows) - 1) * self.pages


def groups_of(pages: np.ndarray, least: int) -> list[Group]:
    """Disjoint groups of the rows of `pages` int32 [R, W], none shorter than `least` pages. Of a
    beginning that many rows have and longer ones that fewer of them have it takes what saves more.
    """
    if len(pages) < 2 or pages.shape[1] < least:
        return []
    # All that begin alike at once: by the page at which the shortest run would end.
    order = np.argsort(pages[:, least - 1], kind="stable")
    block = pages[order]
    begins = np.flatnonzero(np.diff(block[:, least - 1], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    apart = _in_common(block)
    apart[begins[1:] - 1] = pages.shape[1]  # between two beginnings
    common = np.minimum.reduceat(apart, begins)
    following = np.minimum(np.repeat(common, sizes), pages.shape[1] - 1)
    pairs = (
        np.repeat(np.arange(len(begins)), sizes) * (1 << 32)
        + block[np.arange(len(order)), following]
    )
    pairs.sort()
    again = pairs[1:][pairs[1:] == pairs[:-1]] >> 32  # groups of which some have more in common
    groups = list[Group]()
    for number, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
        rows = order[begin : begin + size]
        if size == 1:
            continue
        if number in again:
            groups += _nested(pages, rows)
        else:
            groups.append(Group(rows, int(common[number])))
    return groups


def shared_prefixes(table: PageTable, slots: np.ndarray, page_size: int) -> SharedPrefixes | None:
    """Step.shared_prefixes of decodes in `slots` int32 [R]; None if nothing is worth it. A row's
    shared prefix is what
    the prefix cache owns at most, so that tokens are left behind it.
    """
    least = max(-(-LEAST // page_size), 1)
    long = np.flatnonzero(table.shared[slots] >= least)
    if len(long) < 2:
        return None
    held = slots[long]
    # Nearly always: no two rows have the page at which the shortest run would end.
    ends = table.columns(held, least - 1, least)[:, 0]
    several = np.sort(ends)
    several = several[1:][several[1:] == several[:-1]]
    if not len(several):
        return None
    long = long[np.isin(ends, several)]
    width = min(int(table.shared[slots[long]].max()), PREFIX_UPPER - 1)
    groups = groups_of(table.columns(slots[long], 0, width), least)
    groups.sort(key=lambda one: -one.saved)
    leaders, ranks = np.zeros((2, len(slots)), dtype=np.int32)
    for group in groups[:MAX_SHARED_PREFIXES]:
        rows = long[group.rows]
        leaders[rows] = int(rows[0]) * PREFIX_UPPER + group.pages
        ranks[rows] = np.arange(len(rows)) * PREFIX_UPPER + len(rows)
    return SharedPrefixes(leaders, ranks)


class _Beginning(NamedTuple):
    """Rows that have their first `pages` pages in common: those of `longer` beginnings, and those
    `alone` with what follows."""

    pages: int
    alone: list[int]
    longer: list[_Beginning]


def _nested(pages: np.ndarray, rows: np.ndarray) -> list[Group]:
    """Groups of `rows`, which begin alike, where some have more in common."""
    width, block = pages.shape[1], np.ascontiguousarray(pages[rows])
    # In the order of their bytes, any in which those that begin alike lie side by side.
    order = block.view(f"S{width * block.itemsize}")[:, 0].argsort(kind="stable")
    groups = list[Group]()
    _choose(_tree(rows[order].tolist(), _in_common(block[order])[:-1].tolist()), 0, {}, groups)
    return groups


def _in_common(block: np.ndarray) -> np.ndarray:
    """int64 [R]: how many first pages each row of `block` has in common with the next one; of the
    last all."""
    differs = block[1:] != block[:-1]
    common = np.full(len(block), block.shape[1])
    common[:-1] = np.where(differs.any(axis=1), differs.argmax(axis=1), block.shape[1])
    return common


def _tree(rows: list[int], common: list[int]) -> _Beginning:
    """The beginning that all `rows` have; rows that begin alike lie side by side, and have so many
    pages in `common` with the next one."""
    open_ = list[_Beginning]()  # each within the one before
    before = -1
    for row, after in zip(rows, [*common, -1], strict=True):
        if after > before:
            open_.append(_Beginning(after, [row], []))
        else:
            open_[-1].alone.append(row)
        while len(open_) > 1 and open_[-2].pages >= after:
            open_[-2].longer.append(open_.pop())
        if 0 <= after < open_[-1].pages:
            open_.append(_Beginning(after, [], [open_.pop()]))
        before = after
    [root] = open_
    return _cut(root, LEVELS)


def _cut(of: _Beginning, levels: int) -> _Beginning:
    """The same without what is deeper than so many `levels` of beginnings within beginnings."""
    if levels:
        return of._replace(longer=[_cut(one, levels - 1) for one in of.longer])
    rows, rest = [*of.alone], [*of.longer]
    while rest:
        one = rest.pop()
        rows += one.alone
        rest += one.longer
    return _Beginning(of.pages, rows, [])


def _worth(of: _Beginning, price: int, known: dict[tuple[int, int], tuple[int, int]]) -> int:
    """Of the best choice of groups: the pages that they save, and `price` for each row in none,
    which is what it saves in a group of a shorter beginning. known: by a beginning's id and the
    price, what it is worth without a group of this beginning and with one.

    Such a group saves all of the beginning for each row but one, so to it rows of longer ones may
    be worth that much; and whoever joins it joins no shorter one.
    """
    found = known.get((id(of), price))
    if found is None:
        apart = price * len(of.alone) + sum(_worth(one, price, known) for one in of.longer)
        joined = of.pages * (len(of.alone) - 1)
        joined += sum(_worth(one, of.pages, known) for one in of.longer)
        found = known[id(of), price] = apart, joined
    return max(found)


def _choose(
    of: _Beginning, price: int, known: dict[tuple[int, int], tuple[int, int]], groups: list[Group]
) -> list[int]:
    """Adds the best choice to `groups`; the rows in none."""
    _worth(of, price, known)
    apart, joined = known[id(of), price]
    together = joined > apart
    rows = [*of.alone]
    for one in of.longer:
        rows += _choose(one, of.pages if together else price, known, groups)
    if not together:
        return rows
    groups.append(Group(np.array(sorted(rows)), of.pages))
    return []
