"""A radix tree from token prefixes to KV pages, with locks and least-recently-used eviction.

The idea of a radix tree over KV is from SGLang (arXiv 2312.07104). Keys are whole pages of token
max_ids; each salt has a root of its own. Knows no slot and no tensor, and never reads a clock: the
order of eviction is a function of the calls alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pipeinfer.memory.errors import IntegrityError
from pipeinfer.memory.prefix_cache import CachedPath, PrefixMatch

_NO_PAGES = np.empty(0, dtype=np.int32)
_NEVER = -1
MAX_VISITED_NODES = (
    2_000  # nodes that `largest` looks at: a millisecond or two of the engine's time
)


class RadixNode:
    """A run of pages between two forks. A match that ends within a node splits it, so all pages of
    a node were last used at the same time.

    key, pages: int32 [pages * page_size] token ids; int32 [pages].
    parent: None of a root, and of a node that was evicted.
    children: by the bytes of the token ids of their first page.
    last_used: number of the plan that matched or inserted it last.
    created: number of the node, which breaks ties among equal `last_used`.
    locks: on it and on all nodes below it.
    queued_use: `last_used` of its youngest entry in the heap of evictable leaves.
    salt: of a root.
    """

    __slots__ = (
        "children",
        "created",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "queued_use",
        "salt",
    )

    def __init__(
        self,
        key: np.ndarray,
        pages: np.ndarray,
        parent: RadixNode | None,
        last_used: int,
        created: int,
    ) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.last_used = last_used
        self.created = created
        self.locks = 0
        self.queued_use = _NEVER
        self.salt = ""


class RadixCache:
    """See PrefixCache. Matching costs the length of the key, choosing a victim log(nodes)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Forgets everything, locks included."""
        self._roots: dict[str, RadixNode] = {}
        # A heap of unlocked leaves by (last_used, created). Entries of nodes that were used,
        # locked, extended or evicted since are stale; they are skipped when they come up.
        self._evictable_leaves: list[tuple[int, int, RadixNode]] = []
        self._num_created = 0
        self._num_nodes = 0
        self.num_evictable = 0
        self.num_locked = 0

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """The longest cached prefix of `tokens`; its whole path counts as used at `clock`."""
        root = self._roots.get(salt)
        if root is None:
            return PrefixMatch(None, _NO_PAGES)
        node, found = self._match_pages(root, tokens, clock)
        self._queue_if_evictable(node)
        return _match(node, found)

    def insert(self, tokens: np.ndarray, pages: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Adds what is missing of `tokens`; returns the tree's own pages for all of them."""
        if len(tokens) != len(pages) * self.page_size:
            raise IntegrityError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        if len(pages) == 0:
            return PrefixMatch(None, _NO_PAGES)
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = RadixNode(_NO_PAGES, _NO_PAGES, None, clock, 0)
            root.salt = salt
        node, found = self._match_pages(root, tokens, clock)
        have = sum(map(len, found))
        if have < len(pages):
            key = tokens[have * self.page_size :].copy()
            node = self._attach(
                node, RadixNode(key, pages[have:].copy(), node, clock, self._next_created())
            )
            found.append(node.pages)
        self._queue_if_evictable(node)
        return _match(node, found)

    def lock(self, node: RadixNode | None) -> None:
        """Keeps the path to `node` from eviction; raises IntegrityError if it was evicted."""
        if node is None:
            return
        for above in _up_from(node):
            if above.locks == 0:
                self.num_evictable -= len(above.pages)
                self.num_locked += len(above.pages)
            above.locks += 1

    def unlock(self, node: RadixNode | None) -> None:
        """Undoes one lock of `node`."""
        if node is None:
            return
        for above in _up_from(node):
            if above.locks == 0:
                raise IntegrityError(f"node {above.created} is not locked")
            above.locks -= 1
            if above.locks == 0:
                self.num_evictable += len(above.pages)
                self.num_locked -= len(above.pages)
        self._queue_if_evictable(node)

    def evict(self, count: int) -> np.ndarray:
        """Gives up to `count` pages, from the ends of the least recently used unlocked leaves."""
        given: list[np.ndarray] = []
        while count > 0 and self.num_evictable > 0:
            leaf = self._least_recent_leaf()
            size = min(count, len(leaf.pages))
            given.append(leaf.pages[::-1][:size])
            self.num_evictable -= size
            count -= size
            if size < len(leaf.pages):
                self._trim_leaf(leaf, size)
            else:
                self._remove_leaf(leaf)
        return np.concatenate(given) if given else _NO_PAGES

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Takes the end of the path of `tokens` out of the tree, as far as it is theirs alone."""
        given: list[np.ndarray] = [_NO_PAGES]
        node = self._last_full_node(tokens, salt)
        while node is not None and node.parent is not None and not (node.children or node.locks):
            above = node.parent
            self.num_evictable -= len(node.pages)
            given.append(node.pages[::-1])
            self._remove_leaf(node)
            node = above
        return np.concatenate(given)

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """See PrefixCache. A fork of n sequences saves its tokens n - 1 times."""
        seen, ends = self._visit_from_roots(MAX_VISITED_NODES)
        forks = [node for node, _ in seen if len(node.children) > 1]
        lengths = {id(node): length for node, length in seen}
        forks.sort(key=lambda node: lengths[id(node)] * (ends[id(node)] - 1), reverse=True)
        single = [node for node, _ in seen if not node.children]
        single.sort(key=lambda node: lengths[id(node)], reverse=True)
        return [
            CachedPath(lengths[id(node)], ends[id(node)], node.locks, _first_ids(node, max_ids))
            for node in (forks + single)[:count]
        ]

    def _visit_from_roots(self, count: int) -> tuple[list[tuple[RadixNode, int]], Counter[int]]:
        """(node, tokens up to its end) of at count so many nodes, those near the root first; and
        how many of the seen nodes at or below each have no seen child."""
        rows = [(child, 0) for root in self._roots.values() for child in root.children.values()]
        seen: list[tuple[RadixNode, int]] = []
        for node, above in rows:  # it grows as the children are appended
            if len(seen) == count:
                break
            length = above + len(node.key)
            seen.append((node, length))
            if len(rows) < count:
                rows += [(child, length) for child in node.children.values()]
        ends: Counter[int] = Counter()
        for node, _ in reversed(seen):
            ends[id(node)] = max(ends[id(node)], 1)
            ends[id(node.parent)] += ends[id(node)]
        return seen, ends

    def check_integrity(self, holders: Sequence[RadixNode]) -> np.ndarray:
        """Walks the whole tree; raises IntegrityError, returns all its pages."""
        own = Counter(map(id, holders))
        waiting = {(id(node), last_used) for last_used, _, node in self._evictable_leaves}
        sizes = [0, 0]
        seen: list[np.ndarray] = [_NO_PAGES]
        count = 0
        for node in self._all_nodes():
            count += 1
            self._check_node(node, own[id(node)])
            if not node.children and not node.locks and (id(node), node.last_used) not in waiting:
                raise IntegrityError(f"unlocked leaf {node.created} cannot be found for eviction")
            own.pop(id(node), None)
            sizes[node.locks > 0] += len(node.pages)
            seen.append(node.pages)
        if sizes != [self.num_evictable, self.num_locked] or count != self._num_nodes:
            raise IntegrityError(
                f"{count} nodes with {sizes[0]} unlocked and {sizes[1]} locked pages, counted as "
                f"{self._num_nodes}, {self.num_evictable} and {self.num_locked}"
            )
        if own:
            raise IntegrityError(f"{sum(own.values())} locks on nodes outside the tree")
        return np.concatenate(seen)

    # --------------------------------------------------------------------------- walking, splitting

    def _match_pages(
        self, node: RadixNode, tokens: np.ndarray, clock: int
    ) -> tuple[RadixNode, list[np.ndarray]]:
        """Follows `tokens` from `node` as far as whole pages agree; splits where they fork."""
        size = self.page_size
        found: list[np.ndarray] = []
        at = 0
        while at + size <= len(tokens):
            child = node.children.get(tokens[at : at + size].tobytes())
            if child is None:
                break
            same = _common_length(child.key, tokens[at:]) // size
            node = child if same == len(child.pages) else self._split(child, same)
            node.last_used = clock
            found.append(node.pages)
            at += same * size
        return node, found

    def _last_full_node(self, tokens: np.ndarray, salt: str) -> RadixNode | None:
        """The last node all of whose pages `tokens` have; None if there is no such salt. A page
        that tokens fill in part, or that others follow in the same node, is not of their path."""
        node, at = self._roots.get(salt), 0
        while node is not None:
            child = node.children.get(tokens[at : at + self.page_size].tobytes())
            if child is None or not np.array_equal(child.key, tokens[at : at + len(child.key)]):
                break
            node, at = child, at + len(child.key)
        return node

    def _split(self, node: RadixNode, pages: int) -> RadixNode:
        """Puts the first `pages` of `node` into a new parent. `node` keeps its end, so whoever
        holds a lock on it still holds the whole path."""
        assert node.parent is not None
        at = pages * self.page_size
        head = RadixNode(
            node.key[:at].copy(),
            node.pages[:pages].copy(),
            node.parent,
            node.last_used,
            self._next_created(),
        )
        head.locks = node.locks
        node.parent.children[self._child_key(head)] = head
        node.key, node.pages = node.key[at:].copy(), node.pages[pages:].copy()
        node.parent = head
        head.children[self._child_key(node)] = node
        self._num_nodes += 1
        return head

    def _attach(self, parent: RadixNode, node: RadixNode) -> RadixNode:
        parent.children[self._child_key(node)] = node
        self._num_nodes += 1
        self.num_evictable += len(node.pages)
        return node

    def _next_created(self) -> int:
        self._num_created += 1
        return self._num_created

    def _child_key(self, node: RadixNode) -> bytes:
        return node.key[: self.page_size].tobytes()

    # ------------------------------------------------------------------------------------- eviction

    def _queue_if_evictable(self, node: RadixNode) -> None:
        """Puts `node` among the candidates if it is an unlocked leaf and does not wait there."""
        if node.children or node.locks or node.parent is None or node.queued_use == node.last_used:
            return
        if len(self._evictable_leaves) > 2 * self._num_nodes + 64:
            self._drop_stale()
        node.queued_use = node.last_used
        heapq.heappush(self._evictable_leaves, (node.last_used, node.created, node))

    def _drop_stale(self) -> None:
        fresh: list[tuple[int, int, RadixNode]] = []
        for entry in self._evictable_leaves:
            if _is_candidate(entry):
                fresh.append(entry)
            elif entry[0] == entry[2].queued_use:
                entry[2].queued_use = _NEVER
        heapq.heapify(fresh)
        self._evictable_leaves = fresh

    def _least_recent_leaf(self) -> RadixNode:
        """The next victim; stays in the heap. There is one, because unlocked pages exist and
        whatever hangs below an unlocked node is unlocked too."""
        while self._evictable_leaves:
            entry = self._evictable_leaves[0]
            if _is_candidate(entry):
                return entry[2]
            heapq.heappop(self._evictable_leaves)
            if entry[0] == entry[2].queued_use:
                entry[2].queued_use = _NEVER
        raise IntegrityError(f"{self.num_evictable} pages are evictable, but no leaf is")

    def _trim_leaf(self, leaf: RadixNode, pages: int) -> None:
        leaf.pages = _shrunk(leaf.pages, len(leaf.pages) - pages)
        leaf.key = _shrunk(leaf.key, len(leaf.pages) * self.page_size)

    def _remove_leaf(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._child_key(leaf)]
        leaf.parent = None
        self._num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._queue_if_evictable(parent)

    # ------------------------------------------------------------------------------------ integrity

    def _all_nodes(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: RadixNode, own_locks: int) -> None:
        pages = len(node.pages)
        if pages == 0 or len(node.key) != pages * self.page_size:
            raise IntegrityError(f"node {node.created}: {len(node.key)} tokens on {pages} pages")
        expected = own_locks + sum(child.locks for child in node.children.values())
        if node.locks != expected:
            raise IntegrityError(f"node {node.created}: {node.locks} locks, {expected} held")
        if node.parent is None or node.parent.children.get(self._child_key(node)) is not node:
            raise IntegrityError(f"node {node.created} does not hang from its parent")


def _up_from(node: RadixNode) -> Iterator[RadixNode]:
    """`node` and what lies above it, without the root."""
    if node.parent is None:
        raise IntegrityError(f"node {node.created} is not in the tree")
    at: RadixNode = node
    while at.parent is not None:
        yield at
        at = at.parent


def _first_ids(node: RadixNode, count: int) -> np.ndarray:
    """The first max_ids of the path that ends with `node`, at count so many; none under a salt."""
    path = list(_up_from(node))
    root = path[-1].parent
    assert root is not None
    return np.concatenate([one.key for one in path[::-1]])[: 0 if root.salt else count]


def _is_candidate(entry: tuple[int, int, RadixNode]) -> bool:
    last_used, _, node = entry
    return (
        node.last_used == last_used
        and not node.children
        and not node.locks
        and node.parent is not None
    )


def _match(node: RadixNode, found: list[np.ndarray]) -> PrefixMatch:
    if not found:
        return PrefixMatch(None, _NO_PAGES)
    return PrefixMatch(node, np.concatenate(found))


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int32 arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _shrunk(array: np.ndarray, length: int) -> np.ndarray:
    """The first `length` entries. A view, so that trimming page by page is cheap, but never one
    that keeps more than twice its size alive."""
    view = array[:length]
    base = array if array.base is None else array.base
    return view.copy() if 2 * length < len(base) else view
