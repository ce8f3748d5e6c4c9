"""A radix tree from token prefixes to KV pages, with locks and least-recently-used eviction.

The idea of a radix tree over KV is from SGLang (arXiv 2312.07104). Keys are whole pages of token
ids; each salt has a root of its own. Knows no slot and no tensor, and never reads a clock: the
order of eviction is a function of the calls alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pipeinfer.memory.errors import IntegrityError
from pipeinfer.memory.prefix_cache import Match, Path

_NO_PAGES = np.empty(0, dtype=np.int32)
_NEVER = -1
MOST_SEEN = 2_000  # nodes that `largest` looks at: a millisecond or two of the engine's time


class Node:
    """A run of pages between two forks. `locks` counts the locks on it and on all below it.

    All pages of a node were last used at the same `stamp`, since a match that ends within a node
    splits it. `order` says when it was created: it breaks ties among equal stamps.
    """

    __slots__ = ("children", "key", "locks", "offered", "order", "pages", "parent", "salt", "stamp")

    def __init__(
        self, key: np.ndarray, pages: np.ndarray, parent: Node | None, stamp: int, order: int
    ) -> None:
        self.key = key  # int32 [pages * page_size]
        self.pages = pages  # int32 [pages]
        self.parent = parent  # None: a root, or evicted
        self.children: dict[bytes, Node] = {}  # by the bytes of the first page's tokens
        self.stamp = stamp
        self.order = order
        self.locks = 0
        self.offered = _NEVER  # the stamp of this node's youngest entry in the heap of leaves
        self.salt = ""  # of a root


class RadixCache:
    """See PrefixCache. Matching costs the length of the key, choosing a victim log(nodes)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Forgets everything, locks included."""
        self._roots: dict[str, Node] = {}
        # Unlocked leaves by (stamp, order). Entries of nodes that were used, locked, extended or
        # evicted since are stale; they are skipped when they come up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._created = 0
        self._nodes = 0
        self.evictable = 0
        self.locked = 0

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> Match:
        """The longest cached prefix of `tokens`; its whole path counts as used at `clock`."""
        root = self._roots.get(salt)
        if root is None:
            return Match(None, _NO_PAGES)
        node, found = self._walk(root, tokens, clock)
        self._offer(node)
        return _match(node, found)

    def insert(self, tokens: np.ndarray, pages: np.ndarray, salt: str, clock: int) -> Match:
        """Adds what is missing of `tokens`; returns the tree's own pages for all of them."""
        if len(tokens) != len(pages) * self.page_size:
            raise IntegrityError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        if len(pages) == 0:
            return Match(None, _NO_PAGES)
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(_NO_PAGES, _NO_PAGES, None, clock, 0)
            root.salt = salt
        node, found = self._walk(root, tokens, clock)
        have = sum(map(len, found))
        if have < len(pages):
            key = tokens[have * self.page_size :].copy()
            node = self._add(node, Node(key, pages[have:].copy(), node, clock, self._next()))
            found.append(node.pages)
        self._offer(node)
        return _match(node, found)

    def lock(self, node: Node | None) -> None:
        """Keeps the path to `node` from eviction; raises IntegrityError if it was evicted."""
        if node is None:
            return
        for above in _path(node):
            if above.locks == 0:
                self.evictable -= len(above.pages)
                self.locked += len(above.pages)
            above.locks += 1

    def unlock(self, node: Node | None) -> None:
        """Undoes one lock of `node`."""
        if node is None:
            return
        for above in _path(node):
            if above.locks == 0:
                raise IntegrityError(f"node {above.order} is not locked")
            above.locks -= 1
            if above.locks == 0:
                self.evictable += len(above.pages)
                self.locked -= len(above.pages)
        self._offer(node)

    def evict(self, count: int) -> np.ndarray:
        """Gives up to `count` pages, from the ends of the least recently used unlocked leaves."""
        given: list[np.ndarray] = []
        while count > 0 and self.evictable > 0:
            leaf = self._oldest_leaf()
            size = min(count, len(leaf.pages))
            given.append(leaf.pages[::-1][:size])
            self.evictable -= size
            count -= size
            if size < len(leaf.pages):
                self._shorten(leaf, size)
            else:
                self._remove(leaf)
        return np.concatenate(given) if given else _NO_PAGES

    def forget(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Takes the end of the path of `tokens` out of the tree, as far as it is theirs alone."""
        given: list[np.ndarray] = [_NO_PAGES]
        node = self._end_of(tokens, salt)
        while node is not None and node.parent is not None and not (node.children or node.locks):
            above = node.parent
            self.evictable -= len(node.pages)
            given.append(node.pages[::-1])
            self._remove(node)
            node = above
        return np.concatenate(given)

    def largest(self, most: int, ids: int) -> list[Path]:
        """See PrefixCache. A fork of n sequences saves its tokens n - 1 times."""
        seen, ends = self._seen_from_above(MOST_SEEN)
        forks = [node for node, _ in seen if len(node.children) > 1]
        lengths = {id(node): length for node, length in seen}
        forks.sort(key=lambda node: lengths[id(node)] * (ends[id(node)] - 1), reverse=True)
        single = [node for node, _ in seen if not node.children]
        single.sort(key=lambda node: lengths[id(node)], reverse=True)
        return [
            Path(lengths[id(node)], ends[id(node)], node.locks, _first(node, ids))
            for node in (forks + single)[:most]
        ]

    def _seen_from_above(self, most: int) -> tuple[list[tuple[Node, int]], Counter[int]]:
        """(node, tokens up to its end) of at most so many nodes, those near the root first; and
        how many of the seen nodes at or below each have no seen child."""
        rows = [(child, 0) for root in self._roots.values() for child in root.children.values()]
        seen: list[tuple[Node, int]] = []
        for node, above in rows:  # it grows as the children are appended
            if len(seen) == most:
                break
            length = above + len(node.key)
            seen.append((node, length))
            if len(rows) < most:
                rows += [(child, length) for child in node.children.values()]
        ends: Counter[int] = Counter()
        for node, _ in reversed(seen):
            ends[id(node)] = max(ends[id(node)], 1)
            ends[id(node.parent)] += ends[id(node)]
        return seen, ends

    def check_integrity(self, holders: Sequence[Node]) -> np.ndarray:
        """Walks the whole tree; raises IntegrityError, returns all its pages."""
        own = Counter(map(id, holders))
        waiting = {(id(node), stamp) for stamp, _, node in self._leaves}
        sizes = [0, 0]
        seen: list[np.ndarray] = [_NO_PAGES]
        count = 0
        for node in self._walk_all():
            count += 1
            self._check_node(node, own[id(node)])
            if not node.children and not node.locks and (id(node), node.stamp) not in waiting:
                raise IntegrityError(f"unlocked leaf {node.order} cannot be found for eviction")
            own.pop(id(node), None)
            sizes[node.locks > 0] += len(node.pages)
            seen.append(node.pages)
        if sizes != [self.evictable, self.locked] or count != self._nodes:
            raise IntegrityError(
                f"{count} nodes with {sizes[0]} unlocked and {sizes[1]} locked pages, counted as "
                f"{self._nodes}, {self.evictable} and {self.locked}"
            )
        if own:
            raise IntegrityError(f"{sum(own.values())} locks on nodes outside the tree")
        return np.concatenate(seen)

    # --------------------------------------------------------------------------- walking, splitting

    def _walk(self, node: Node, tokens: np.ndarray, clock: int) -> tuple[Node, list[np.ndarray]]:
        """Follows `tokens` from `node` as far as whole pages agree; splits where they fork."""
        size = self.page_size
        found: list[np.ndarray] = []
        at = 0
        while at + size <= len(tokens):
            child = node.children.get(tokens[at : at + size].tobytes())
            if child is None:
                break
            same = _common(child.key, tokens[at:]) // size
            node = child if same == len(child.pages) else self._split(child, same)
            node.stamp = clock
            found.append(node.pages)
            at += same * size
        return node, found

    def _end_of(self, tokens: np.ndarray, salt: str) -> Node | None:
        """The last node all of whose pages `tokens` have; None if there is no such salt. A page
        that tokens fill in part, or that others follow in the same node, is not of their path."""
        node, at = self._roots.get(salt), 0
        while node is not None:
            child = node.children.get(tokens[at : at + self.page_size].tobytes())
            if child is None or not np.array_equal(child.key, tokens[at : at + len(child.key)]):
                break
            node, at = child, at + len(child.key)
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Puts the first `pages` of `node` into a new parent. `node` keeps its end, so whoever
        holds a lock on it still holds the whole path."""
        assert node.parent is not None
        at = pages * self.page_size
        head = Node(
            node.key[:at].copy(), node.pages[:pages].copy(), node.parent, node.stamp, self._next()
        )
        head.locks = node.locks
        node.parent.children[self._edge(head)] = head
        node.key, node.pages = node.key[at:].copy(), node.pages[pages:].copy()
        node.parent = head
        head.children[self._edge(node)] = node
        self._nodes += 1
        return head

    def _add(self, parent: Node, node: Node) -> Node:
        parent.children[self._edge(node)] = node
        self._nodes += 1
        self.evictable += len(node.pages)
        return node

    def _next(self) -> int:
        self._created += 1
        return self._created

    def _edge(self, node: Node) -> bytes:
        return node.key[: self.page_size].tobytes()

    # ------------------------------------------------------------------------------------- eviction

    def _offer(self, node: Node) -> None:
        """Puts `node` among the candidates if it is an unlocked leaf and does not wait there."""
        if node.children or node.locks or node.parent is None or node.offered == node.stamp:
            return
        if len(self._leaves) > 2 * self._nodes + 64:
            self._drop_stale()
        node.offered = node.stamp
        heapq.heappush(self._leaves, (node.stamp, node.order, node))

    def _drop_stale(self) -> None:
        fresh: list[tuple[int, int, Node]] = []
        for entry in self._leaves:
            if _is_candidate(entry):
                fresh.append(entry)
            elif entry[0] == entry[2].offered:
                entry[2].offered = _NEVER
        heapq.heapify(fresh)
        self._leaves = fresh

    def _oldest_leaf(self) -> Node:
        """The next victim; stays in the heap. There is one, because unlocked pages exist and
        whatever hangs below an unlocked node is unlocked too."""
        while self._leaves:
            entry = self._leaves[0]
            if _is_candidate(entry):
                return entry[2]
            heapq.heappop(self._leaves)
            if entry[0] == entry[2].offered:
                entry[2].offered = _NEVER
        raise IntegrityError(f"{self.evictable} pages are evictable, but no leaf is")

    def _shorten(self, leaf: Node, pages: int) -> None:
        leaf.pages = _trimmed(leaf.pages, len(leaf.pages) - pages)
        leaf.key = _trimmed(leaf.key, len(leaf.pages) * self.page_size)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._edge(leaf)]
        leaf.parent = None
        self._nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._offer(parent)

    # ------------------------------------------------------------------------------------ integrity

    def _walk_all(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: Node, own_locks: int) -> None:
        pages = len(node.pages)
        if pages == 0 or len(node.key) != pages * self.page_size:
            raise IntegrityError(f"node {node.order}: {len(node.key)} tokens on {pages} pages")
        expected = own_locks + sum(child.locks for child in node.children.values())
        if node.locks != expected:
            raise IntegrityError(f"node {node.order}: {node.locks} locks, {expected} held")
        if node.parent is None or node.parent.children.get(self._edge(node)) is not node:
            raise IntegrityError(f"node {node.order} does not hang from its parent")


def _path(node: Node) -> Iterator[Node]:
    """`node` and what lies above it, without the root."""
    if node.parent is None:
        raise IntegrityError(f"node {node.order} is not in the tree")
    at: Node = node
    while at.parent is not None:
        yield at
        at = at.parent


def _first(node: Node, count: int) -> np.ndarray:
    """The first ids of the path that ends with `node`, at most so many; none under a salt."""
    path = list(_path(node))
    root = path[-1].parent
    assert root is not None
    return np.concatenate([one.key for one in path[::-1]])[: 0 if root.salt else count]


def _is_candidate(entry: tuple[int, int, Node]) -> bool:
    stamp, _, node = entry
    return node.stamp == stamp and not node.children and not node.locks and node.parent is not None


def _match(node: Node, found: list[np.ndarray]) -> Match:
    if not found:
        return Match(None, _NO_PAGES)
    return Match(node, np.concatenate(found))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int32 arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _trimmed(array: np.ndarray, length: int) -> np.ndarray:
    """The first `length` entries. A view, so that trimming page by page is cheap, but never one
    that keeps more than twice its size alive."""
    view = array[:length]
    base = array if array.base is None else array.base
    return view.copy() if 2 * length < len(base) else view
