"""Which rows of a step begin with the same pages, and how many of these are worth reading once.

Two rows have the same page in a column only if all pages before it are the same, too: such pages
are the prefix cache's, and a page there has one prefix. Knows pages; no token and no tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeinfer.memory.page_table import PageTable
from pipeinfer.packing import MOST_RUNS, PART
from pipeinfer.steps.step import CommonRuns

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
    differs = block[1:] != block[:-1]
    begins = np.flatnonzero(np.concatenate(([True], differs[:, least - 1])))
    sizes = np.diff(begins, append=len(order))
    apart = np.full(len(order), pages.shape[1])
    apart[:-1] = np.where(differs.any(axis=1), differs.argmax(axis=1), pages.shape[1])
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
            groups += _best(pages, rows, least, LEVELS)[0]
        else:
            groups.append(Group(rows, int(common[number])))
    return groups


def common_runs(table: PageTable, slots: np.ndarray, page_size: int) -> CommonRuns | None:
    """Step.runs of decodes in `slots` int32 [R]; None if nothing is worth it. A row's run is what
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
    width = min(int(table.shared[slots[long]].max()), PART - 1)
    groups = groups_of(table.columns(slots[long], 0, width), least)
    groups.sort(key=lambda one: -one.saved)
    lines, seats = np.zeros((2, len(slots)), dtype=np.int32)
    for group in groups[:MOST_RUNS]:
        rows = long[group.rows]
        lines[rows] = int(rows[0]) * PART + group.pages
        seats[rows] = np.arange(len(rows)) * PART + len(rows)
    return CommonRuns(lines, seats)


def _best(
    pages: np.ndarray, rows: np.ndarray, depth: int, levels: int
) -> tuple[list[Group], np.ndarray]:
    """Groups of `rows`, which have their first `depth` pages in common, and the rows in none; looks
    at so many `levels` of beginnings within beginnings."""
    block = pages[rows, depth:]
    same = (block == block[0]).all(axis=0)
    common = depth + (len(same) if same.all() else int(same.argmin()))
    if common == pages.shape[1] or levels == 0:
        return [Group(rows, common)], rows[:0]
    order = np.argsort(pages[rows, common], kind="stable")
    column = pages[rows[order], common]
    begins = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1])))
    sizes = np.diff(begins, append=len(column))
    alone = rows[order[begins[sizes == 1]]]
    if len(alone) == len(rows):
        return [Group(rows, common)], alone[:0]
    groups, left, joined = list[Group](), [alone], [alone]
    several = sizes > 1
    for begin, size in zip(begins[several].tolist(), sizes[several].tolist(), strict=True):
        mine = rows[order[begin : begin + size]]
        apart, others = _best(pages, mine, common, levels - 1)
        groups += apart
        left.append(others)
        # A part joins the others where that saves more than what it has in common by itself.
        if (len(mine) - len(others)) * common > sum(one.saved for one in apart):
            joined.append(mine)
        else:
            joined.append(others)
    together = np.sort(np.concatenate(joined))
    kept = [one for one in groups if not np.isin(one.rows[0], together)]
    saved = sum(one.saved for one in kept) + (len(together) - 1) * common
    if len(together) > 1 and saved > sum(one.saved for one in groups):
        return [*kept, Group(together, common)], rows[:0]
    return groups, np.concatenate(left)
