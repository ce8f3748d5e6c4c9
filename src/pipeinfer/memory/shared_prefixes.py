"""Shared prefixes of a step: which decodes begin with the same pages, so that attention reads these
pages once for several rows.

Two rows have the same page in a column only if all pages before it are the same, too: such pages
are the prefix cache's, where a page has one prefix. Knows pages; no token and no tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeinfer.memory.pages import PageTable
from pipeinfer.step import SharedPrefixes
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER

MIN_SHARED_TOKENS = 256  # tokens: a shorter prefix is as fast read by each row for itself
MAX_NESTING = 8  # levels of prefixes within prefixes that are told apart


class PrefixGroup(NamedTuple):
    """rows: int64 [n] of a step. num_pages: the first pages that all of them have in common."""

    rows: np.ndarray
    num_pages: int

    @property
    def num_saved(self) -> int:
        """Pages that need not be read again."""
        return (len(self.rows) - 1) * self.num_pages


def find_shared_prefixes(
    table: PageTable, slots: np.ndarray, page_size: int
) -> SharedPrefixes | None:
    """Step.shared_prefixes of decodes (rows of one token) in `slots` int32 [R]; None if no prefix
    is worth it.

    Of a row only pages that the prefix cache owns can be shared, so each row has tokens behind.
    """
    min_pages = max(-(-MIN_SHARED_TOKENS // page_size), 1)
    long = np.flatnonzero(table.num_shared[slots] >= min_pages)
    if len(long) < 2:
        return None
    # Nearly always no two rows have the same page where the shortest prefix would end.
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
    """Disjoint groups of the rows of `pages` int32 [R, W], none of fewer than `min_pages` pages.

    Where some rows of a group have a longer prefix in common, the groups are those that save most.
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

    num_pages: its length.
    rows: those that have it, and share nothing longer.
    children: longer prefixes of other rows that have it.
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
    """int64 [R]: how many first pages each row of `block` has in common with the next row; of the
    last row, all."""
    differs = block[1:] != block[:-1]
    common = np.full(len(block), block.shape[1])
    common[:-1] = np.where(differs.any(axis=1), differs.argmax(axis=1), block.shape[1])
    return common


def _build_tree(rows: list[int], common: list[int]) -> _PrefixNode:
    """The tree of `rows`, of which those with a common prefix are neighbours; common: how many
    pages each has in common with the next."""
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
    """The pages that the best choice of groups saves among the rows of `node`.

    outer_pages: what a row that is in none of these groups saves, in a group of a shorter prefix.
    memo: by id of a node and outer_pages, what is saved without a group at this node, and with one.

    A group at this node saves num_pages for each of its rows but one. Rows of longer prefixes may
    join it, so for them num_pages is what a row saves outside of their own groups; rows that are in
    it are in no group of a shorter prefix.
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
