"""The radix tree beside a dictionary of pages, keyed by salt and the whole prefix that ends there.

Knows the tree's interface; a program chooses the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fuzz.target import Wrong
from pipeinfer.memory.prefix_cache import RadixCache

Prefix = tuple[str, tuple[int, ...]]
SIZES = (1, 4, 16)
BLOCKS, LONGEST = 3, 8  # different pages of tokens, pages of a key


class Numbers(Protocol):
    """What chooses."""

    @property
    def over(self) -> bool: ...

    def below(self, most: int) -> int: ...


@dataclass
class Page:
    """A page of the model: its number, when it was used last, how many hold it."""

    number: int
    used: int
    locks: int = 0


def run(program: Numbers) -> None:
    """Operations until the program is over. Raises Wrong, or what the tree raises."""
    model = TreeModel(SIZES[program.below(len(SIZES))])
    steps = (
        model.match, model.insert, model.insert, model.unlock, model.evict, model.forget,
    )  # fmt: skip
    while not program.over:
        steps[program.below(len(steps))](program)
        model.check()


class TreeModel:
    """A tree and what it should hold."""

    def __init__(self, page_size: int) -> None:
        self._size, self._tree = page_size, RadixCache(page_size)
        self._pages: dict[Prefix, Page] = {}
        self._clock, self._next = 0, 1
        self._locks: list[tuple[Any, list[Prefix]]] = []

    def match(self, program: Numbers) -> None:
        salt, blocks = self._key(program)
        chain = self._found(salt, blocks)
        match = self._tree.match(self._ids(blocks), salt, self._clock)
        self._agree(match, chain)
        self._hold(match.node, chain, program)

    def insert(self, program: Numbers) -> None:
        salt, blocks = self._key(program)
        have = self._found(salt, blocks)
        offered = np.arange(self._next, self._next + len(blocks), dtype=np.int32)
        self._next += len(blocks)
        match = self._tree.insert(self._ids(blocks), offered, salt, self._clock)
        chain = [(salt, tuple(blocks[:n])) for n in range(1, len(blocks) + 1)]
        for key, page in list(zip(chain, offered.tolist(), strict=True))[len(have) :]:
            self._pages[key] = Page(page, self._clock)
        self._agree(match, chain)
        self._hold(match.node, chain, program)

    def unlock(self, program: Numbers) -> None:
        if not self._locks:
            return
        node, chain = self._locks.pop(program.below(min(len(self._locks), 256)))
        self._tree.unlock(node)
        for key in chain:
            self._pages[key].locks -= 1

    def evict(self, program: Numbers) -> None:
        """Page by page, an unlocked leaf goes that no other was used before."""
        count = program.below(12)
        unlocked = sum(page.locks == 0 for page in self._pages.values())
        given = self._tree.evict(count).tolist()
        if len(given) != min(count, unlocked):
            raise Wrong(f"{len(given)} pages were evicted, of {unlocked} unlocked ones {count}")
        for number in given:
            inner = {(salt, blocks[:-1]) for salt, blocks in self._pages}
            leaves = {
                key: page
                for key, page in self._pages.items()
                if key not in inner and not page.locks
            }
            key = next((key for key, page in leaves.items() if page.number == number), None)
            if key is None or leaves[key].used > min(page.used for page in leaves.values()):
                raise Wrong(f"page {number} was evicted")
            del self._pages[key]

    def forget(self, program: Numbers) -> None:
        """The end of a path goes, as far as nobody holds it and it is nobody else's."""
        salt, blocks = self._key(program)
        chain = [(salt, tuple(blocks[:n])) for n in range(1, len(blocks) + 1)]
        given = self._tree.remove(self._ids(blocks), salt).tolist()
        while chain and chain[-1] not in self._pages:
            chain.pop()
        expected = []
        while chain and not self._pages[chain[-1]].locks and not self._continues(chain[-1]):
            expected.append(self._pages.pop(chain.pop()).number)
        if given != expected:
            raise Wrong(f"{given} were forgotten instead of {expected}")

    def _continues(self, key: Prefix) -> bool:
        return any((salt, blocks[:-1]) == key for salt, blocks in self._pages)

    def check(self) -> None:
        """The tree holds what the dictionary holds, and its invariants are true."""
        pages = self._tree.check_integrity([node for node, _ in self._locks])
        if sorted(pages.tolist()) != sorted(page.number for page in self._pages.values()):
            raise Wrong("the tree's pages are others")
        locked = sum(page.locks > 0 for page in self._pages.values())
        if (self._tree.num_evictable, self._tree.num_locked) != (len(self._pages) - locked, locked):
            raise Wrong("the tree's counts are others")

    def _key(self, program: Numbers) -> tuple[str, list[int]]:
        self._clock += 1
        salt = ("", "a")[program.below(4) == 3]
        return salt, [program.below(BLOCKS) for _ in range(program.below(LONGEST))]

    def _ids(self, blocks: list[int]) -> np.ndarray:
        ids = np.zeros((len(blocks), self._size), np.int32)
        ids[:, -1] = blocks
        return ids.reshape(-1)

    def _found(self, salt: str, blocks: list[int]) -> list[Prefix]:
        chain: list[Prefix] = []
        for n in range(1, len(blocks) + 1):
            key = (salt, tuple(blocks[:n]))
            if key not in self._pages:
                break
            self._pages[key].used = self._clock
            chain.append(key)
        return chain

    def _agree(self, match: Any, chain: list[Prefix]) -> None:
        if match.pages.tolist() != [self._pages[key].number for key in chain]:
            raise Wrong(f"{match.pages.tolist()} were found for {chain}")

    def _hold(self, node: Any, chain: list[Prefix], program: Numbers) -> None:
        if node is None or program.below(2):
            return
        self._tree.lock(node)
        for key in chain:
            self._pages[key].locks += 1
        self._locks.append((node, chain))
