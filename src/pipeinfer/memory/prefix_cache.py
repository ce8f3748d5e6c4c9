"""Prefix caches: from token prefixes, whole pages at a time, to the pages that hold their KV.

- PrefixCache: the interface for the memory manager.
- RadixCache: a radix tree with locks, and segmented least-recently-used eviction. The idea of a
  radix tree over KV is from SGLang (arXiv 2312.07104).
- NaiveCache: caches nothing.

Nothing here reads a clock, so evictions depend only on the calls. Knows no slot, no plan and no
tensor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from pipeinfer.command_line import none_of
from pipeinfer.memory.pages import IntegrityError
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import EMPTY_INT32


class PrefixMatch(NamedTuple):
    """A cached prefix.

    Attributes:
    - node: node that the prefix ends in, to be locked; None: nothing is cached
    - pages: int32 [n], pages of the prefix
    """

    node: object
    pages: np.ndarray


_NO_MATCH = PrefixMatch(None, EMPTY_INT32)


class CachedPath(NamedTuple):
    """A path from the root to some node: a cached prefix, for operators to look at.

    Attributes:
    - num_tokens: length of the path
    - num_sequences: cached sequences that begin with it
    - num_locks: locks of requests on it
    - first_ids: int32, its first token ids; none under a salt, whose texts are private
    """

    num_tokens: int
    num_sequences: int
    num_locks: int
    first_ids: np.ndarray


class PrefixCache(Protocol):
    """A prefix cache. Owns the pages that were inserted, until it evicts them.

    Attributes:
    - num_evictable: pages that `evict` could return
    - num_locked: pages on a path that some request has locked

    Arguments of all methods:
    - tokens: token ids int32
    - salt: requests with different cache salts share nothing
    - clock: number of the plan, which stands for time
    """

    num_evictable: int
    num_locked: int

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Finds the longest cached prefix of `tokens` [n], in whole pages."""
        ...

    def lock(self, node: object) -> None:
        """Keeps the path from the root to `node` from eviction; None is no path. Locks are
        counted."""
        ...

    def unlock(self, node: object) -> None:
        """Undoes one lock; raises IntegrityError if there is none."""
        ...

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        salt: str,
        clock: int,
        prompt_only: bool = False,
    ) -> PrefixMatch:
        """Offers `pages` int32 [n], which hold the KV of `tokens` [n * page_size].

        - prompt_only: of a request that no other request continues. Pages that only such requests
          have written are evicted before all others, until a request matches them

        Returns the pages that the cache has for these tokens now. If the cache had a page before,
        it keeps that one, and the offered page stays the caller's. The other offered pages belong
        to the cache from now on. An empty match: the cache took nothing.
        """
        ...

    def evict(self, count: int) -> np.ndarray:
        """Evicts at most `count` pages; returns them, int32, now the caller's: first those of
        prompt-only requests, then the others, least recently used first."""
        ...

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Evicts the pages of `tokens` [n], from the last cached one backwards, up to a page that
        is locked or that other tokens follow. Returns them, int32, now the caller's."""
        ...

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """Returns at most `count` paths: first those that several sequences begin with, by the
        tokens that this saves; then those of single sequences, by their length.

        - max_ids: most ids of each path that are returned

        The cost is bounded: for a very large tree the result covers a part.
        """
        ...

    def reset(self) -> None:
        """Empties the cache; locks are gone, too."""
        ...

    def check_integrity(self, holders: Sequence[object]) -> np.ndarray:
        """Returns all pages that the cache owns, int32; raises IntegrityError if anything is
        inconsistent.

        - holders: one node for each lock
        """
        ...


MAX_VISITED_NODES = 2_000  # nodes that `largest` looks at: 1 to 2 ms of the engine's time


class RadixNode:
    """A run of pages between two forks. A match that ends within a node splits it, so all pages of
    a node were last used at the same time, and are of one segment.

    Attributes:
    - key, pages: int32 [pages * page_size] token ids; int32 [pages]
    - parent: None for a root, and for a node that was evicted
    - children: by the bytes of the token ids of their first page
    - last_used: number of the plan that matched or inserted it last
    - protected: of the segment that is evicted last; so are all nodes above it
    - created: number of the node, which breaks ties among equal `last_used`
    - locks: number of locks on it and on all nodes below it
    - queued: `rank` of its youngest entry in the heap of evictable leaves; None: it has none
    - salt: of a root
    """

    __slots__ = (
        "children",
        "created",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "protected",
        "queued",
        "salt",
    )

    def __init__(
        self,
        key: np.ndarray,
        pages: np.ndarray,
        parent: RadixNode | None,
        last_used: int,
        created: int,
        protected: bool = True,
    ) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.last_used = last_used
        self.created = created
        self.protected = protected
        self.locks = 0
        self.queued: tuple[bool, int] | None = None
        self.salt = ""

    @property
    def rank(self) -> tuple[bool, int]:
        """Order of eviction: leaves of a lower rank are evicted first."""
        return self.protected, self.last_used


class RadixCache:
    """A PrefixCache as a radix tree. A match costs the length of its tokens, an eviction
    log(nodes). Edges are whole pages of token ids; each salt has a root of its own."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Empties the cache; locks are gone, too."""
        self._roots: dict[str, RadixNode] = {}
        # A heap of unlocked leaves by (rank, created). Entries of nodes that were used, locked,
        # extended or evicted since are stale; they are skipped when they come up.
        self._evictable_leaves: list[tuple[tuple[bool, int], int, RadixNode]] = []
        self._num_created = 0
        self._num_nodes = 0
        self.num_evictable = 0
        self.num_locked = 0

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Finds the longest cached prefix of `tokens`; its whole path counts as used at `clock`,
        and is protected from now on."""
        root = self._roots.get(salt)
        if root is None:
            return _NO_MATCH
        node, found = self._match_pages(root, tokens, clock, protect=True)
        self._queue_if_evictable(node)
        return _match(node, found)

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        salt: str,
        clock: int,
        prompt_only: bool = False,
    ) -> PrefixMatch:
        """Adds the pages of `tokens` that the tree lacks; returns the tree's pages of all."""
        if len(tokens) != len(pages) * self.page_size:
            raise IntegrityError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        if len(pages) == 0:
            return _NO_MATCH
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = RadixNode(EMPTY_INT32, EMPTY_INT32, None, clock, 0)
            root.salt = salt
        node, found = self._match_pages(root, tokens, clock, protect=not prompt_only)
        have = sum(map(len, found))
        if have < len(pages):
            key = tokens[have * self.page_size :].copy()
            new, created = pages[have:].copy(), self._next_created()
            node = self._attach(node, RadixNode(key, new, node, clock, created, not prompt_only))
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
        """Evicts pages from the ends of unlocked leaves; see PrefixCache."""
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
        return np.concatenate(given) if given else EMPTY_INT32

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Takes whole nodes off the end of the path; see PrefixCache."""
        given: list[np.ndarray] = [EMPTY_INT32]
        node = self._last_full_node(tokens, salt)
        while node is not None and node.parent is not None and not (node.children or node.locks):
            above = node.parent
            self.num_evictable -= len(node.pages)
            given.append(node.pages[::-1])
            self._remove_leaf(node)
            node = above
        return np.concatenate(given)

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """Returns the largest paths; see PrefixCache. A fork of n sequences saves its tokens n - 1
        times."""
        visited, leaves = self._visit_from_roots(MAX_VISITED_NODES)
        forks = [node for node, _ in visited if len(node.children) > 1]
        lengths = {id(node): length for node, length in visited}
        forks.sort(key=lambda node: lengths[id(node)] * (leaves[id(node)] - 1), reverse=True)
        single = [node for node, _ in visited if not node.children]
        single.sort(key=lambda node: lengths[id(node)], reverse=True)
        return [
            CachedPath(lengths[id(node)], leaves[id(node)], node.locks, _first_ids(node, max_ids))
            for node in (forks + single)[:count]
        ]

    def _visit_from_roots(self, count: int) -> tuple[list[tuple[RadixNode, int]], Counter[int]]:
        """Visits at most `count` nodes, those near the root first: (node, tokens up to its end) of
        each; and by a node's id, how many of the visited leaves are at or below that node."""
        rows = [(child, 0) for root in self._roots.values() for child in root.children.values()]
        visited: list[tuple[RadixNode, int]] = []
        for node, above in rows:  # it grows as the children are appended
            if len(visited) == count:
                break
            length = above + len(node.key)
            visited.append((node, length))
            if len(rows) < count:
                rows += [(child, length) for child in node.children.values()]
        leaves: Counter[int] = Counter()
        for node, _ in reversed(visited):
            leaves[id(node)] = max(leaves[id(node)], 1)
            leaves[id(node.parent)] += leaves[id(node)]
        return visited, leaves

    def check_integrity(self, holders: Sequence[RadixNode]) -> np.ndarray:
        """Walks the whole tree; see PrefixCache."""
        own = Counter(map(id, holders))
        waiting = {(id(node), rank) for rank, _, node in self._evictable_leaves}
        sizes = [0, 0]
        seen: list[np.ndarray] = [EMPTY_INT32]
        count = 0
        for node in self._all_nodes():
            count += 1
            self._check_node(node, own[id(node)])
            if not node.children and not node.locks and (id(node), node.rank) not in waiting:
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
        self, node: RadixNode, tokens: np.ndarray, clock: int, protect: bool
    ) -> tuple[RadixNode, list[np.ndarray]]:
        """Follows `tokens` from `node` as far as whole pages agree, and splits a node of which a
        part agrees. Returns the last node and the pages of each node on the way, int32.

        - protect: the nodes on the way are protected from now on
        """
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
            node.protected |= protect
            found.append(node.pages)
            at += same * size
        return node, found

    def _last_full_node(self, tokens: np.ndarray, salt: str) -> RadixNode | None:
        """The last node on the path of `tokens` that the tokens cover completely; None if the salt
        has no root."""
        node, at = self._roots.get(salt), 0
        while node is not None:
            child = node.children.get(tokens[at : at + self.page_size].tobytes())
            if child is None or not np.array_equal(child.key, tokens[at : at + len(child.key)]):
                break
            node, at = child, at + len(child.key)
        return node

    def _split(self, node: RadixNode, pages: int) -> RadixNode:
        """Moves the first `pages` pages of `node` into a new parent and returns that. `node` keeps
        the others, so a lock on `node` still holds the whole path."""
        assert node.parent is not None
        at = pages * self.page_size
        head = RadixNode(
            node.key[:at].copy(),
            node.pages[:pages].copy(),
            node.parent,
            node.last_used,
            self._next_created(),
            node.protected,
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
        """Pushes `node` onto the heap if it is an unlocked leaf without a current entry there."""
        if node.children or node.locks or node.parent is None or node.queued == node.rank:
            return
        if len(self._evictable_leaves) > 2 * self._num_nodes + 64:
            self._drop_stale()
        node.queued = node.rank
        heapq.heappush(self._evictable_leaves, (node.rank, node.created, node))

    def _drop_stale(self) -> None:
        fresh: list[tuple[tuple[bool, int], int, RadixNode]] = []
        for entry in self._evictable_leaves:
            if _is_candidate(entry):
                fresh.append(entry)
            elif entry[0] == entry[2].queued:
                entry[2].queued = None
        heapq.heapify(fresh)
        self._evictable_leaves = fresh

    def _least_recent_leaf(self) -> RadixNode:
        """The next leaf to evict from; its entry stays in the heap. There is one, because unlocked
        pages exist, and all nodes below an unlocked node are unlocked."""
        while self._evictable_leaves:
            entry = self._evictable_leaves[0]
            if _is_candidate(entry):
                return entry[2]
            heapq.heappop(self._evictable_leaves)
            if entry[0] == entry[2].queued:
                entry[2].queued = None
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
        if node.protected and not node.parent.protected:
            raise IntegrityError(f"node {node.created} is protected, what is above it is not")


def _up_from(node: RadixNode) -> Iterator[RadixNode]:
    """`node` and the nodes above, without the root; raises IntegrityError outside the tree."""
    if node.parent is None:
        raise IntegrityError(f"node {node.created} is not in the tree")
    at: RadixNode = node
    while at.parent is not None:
        yield at
        at = at.parent


def _first_ids(node: RadixNode, count: int) -> np.ndarray:
    """The first ids of the path to `node`, int32, at most `count`; none under a salt."""
    path = list(_up_from(node))
    root = path[-1].parent
    assert root is not None
    return np.concatenate([one.key for one in path[::-1]])[: 0 if root.salt else count]


def _is_candidate(entry: tuple[tuple[bool, int], int, RadixNode]) -> bool:
    rank, _, node = entry
    return node.rank == rank and not node.children and not node.locks and node.parent is not None


def _match(node: RadixNode, found: list[np.ndarray]) -> PrefixMatch:
    if not found:
        return _NO_MATCH
    return PrefixMatch(node, np.concatenate(found))


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int32 arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _shrunk(array: np.ndarray, length: int) -> np.ndarray:
    """The first `length` entries: a view, so that eviction page by page is cheap, or a copy where a
    view would keep an array of more than twice its size alive."""
    view = array[:length]
    base = array if array.base is None else array.base
    return view.copy() if 2 * length < len(base) else view


class NaiveCache:
    """A PrefixCache that caches nothing, so every request computes its whole prompt: for comparison
    and for debugging."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self.num_locked = 0

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Returns no match."""
        return _NO_MATCH

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """Returns no path."""
        return []

    def lock(self, node: object) -> None:
        """Does nothing."""

    def unlock(self, node: object) -> None:
        """Does nothing."""

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        salt: str,
        clock: int,
        prompt_only: bool = False,
    ) -> PrefixMatch:
        """Takes nothing."""
        return _NO_MATCH

    def evict(self, count: int) -> np.ndarray:
        """Returns no page."""
        return EMPTY_INT32

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Returns no page."""
        return EMPTY_INT32

    def reset(self) -> None:
        """Does nothing."""

    def check_integrity(self, holders: Sequence[object]) -> np.ndarray:
        """Returns no page; raises IntegrityError if there is a holder."""
        if len(holders):
            raise IntegrityError(f"{len(holders)} locks on a cache without nodes")
        return EMPTY_INT32


CACHES = {"radix": RadixCache, "naive": NaiveCache}


def make_cache(name: str, page_size: int) -> PrefixCache:
    """Makes the cache called `name`; raises ConfigurationError, which lists the names, for an
    unknown one."""
    if name not in CACHES:
        raise ConfigurationError(f"--cache: {none_of(name, CACHES)}")
    return cast(PrefixCache, CACHES[name](page_size))  # which gets its own nodes only
