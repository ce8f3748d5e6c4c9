"""The radix tree and the memory manager beside plain models of them, driven by the same program.

A program is bytes that choose operations. The model of the manager notes what each page holds;
every step takes effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import numpy as np

from fuzz.engines import Wrong
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.pages import ProtocolError
from pipeinfer.memory.prefix_cache import RadixCache
from pipeinfer.messages import Admit, Extend, Plan, Release
from pipeinfer.params import SamplingParams
from pipeinfer.wire import pack

SLOTS = 4
SIZES = (1, 4, 16)
LENGTHS = (1, 2, 5, 9, 17, 33)

Held = tuple[str, tuple[int, ...]]  # the salt, and all tokens up to a page's end


@dataclass
class Sequence:
    """A request in a slot: its tokens, those that were sampled among them."""

    salt: str
    tokens: list[int]
    known: int  # tokens that the manager was told
    most: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)


def run_manager(program: Numbers) -> None:
    """Plans until the program is over, then one that makes no sense. Raises Wrong and others."""
    model = ManagerModel(SIZES[program.below(len(SIZES))], program.below(8))
    while not program.over:
        model.plan(program)
    model.nonsense(program)


class ManagerModel:
    """A manager, and what its pages should hold."""

    def __init__(self, page_size: int, spare: int) -> None:
        self._size = page_size
        self._limit = 5 * page_size + 3
        pages = 1 + -(-self._limit // page_size) + spare
        self._memory = MemoryManager(pages, page_size, SLOTS, self._limit, "radix")
        self._live: dict[int, Sequence] = {}
        self._held: dict[int, Held] = {}
        self._number = 0

    def plan(self, program: Numbers) -> None:
        """One plan, and what must be true after it."""
        releases, extends = self._releases(program), self._extends(program)
        shares = [slot for slot in sorted(self._live) if not program.below(3)]
        admits = self._admits(program)
        rows = [slot for slot in range(SLOTS) if program.below(4)]
        counts = [(0, 1, 1, 2, 2 * self._size + 1, 9999)[program.below(6)] for _ in rows]
        plan = Plan(
            epoch=1,
            number=self._number,
            releases=releases,
            admits=admits,
            slots=pack(rows),
            counts=pack(counts),
            extends=extends,
            cache_slots=pack(shares),
        )
        self._number += 1
        rows = self._memory.apply(plan)
        self._memory.check_integrity()
        for admit, cached in zip(admits, rows.cached.tolist(), strict=True):
            self._live[admit.slot].computed = cached
        for row, slot in enumerate(rows.slots.tolist()):
            start, count = int(rows.starts[row]), int(rows.counts[row])
            if slot in self._live and count:
                self._compute(slot, start, count, bool(rows.samples[row]))
        self._check()

    def nonsense(self, program: Numbers) -> None:
        """A plan that contradicts the state is refused, whatever is wrong with it."""
        ids = pack([program.below(9) - 2 for _ in range(3)])
        admit = Admit(
            slot=program.below(9) - 2,
            request_id="r",
            token_ids=ids,
            prompt_len=1,
            max_total=program.below(9),
            params=SamplingParams(),
            seed=0,
        )
        releases = (
            Release(
                slot=program.below(9) - 2, cache_prefix=True, output_ids=ids[: program.below(9)]
            ),
        )
        plan = Plan(
            epoch=1,
            number=self._number,
            releases=releases,
            admits=(admit,),
            slots=ids[:8],
            counts=ids[: 4 * program.below(3)],
            extends=(Extend(slot=program.below(9) - 2, ids=ids[: program.below(13)]),),
            cache_slots=ids[: program.below(9)],
        )
        try:
            self._memory.apply(plan)
        except ProtocolError:
            return
        self._memory.check_integrity()

    def _releases(self, program: Numbers) -> tuple[Release, ...]:
        found = []
        for slot in sorted(self._live):
            if program.below(4):
                continue
            one = self._live.pop(slot)
            outputs = one.tokens[one.known :]
            kept = outputs[: program.below(len(outputs) + 1)] if len(outputs) < 255 else []
            ways = (
                Release(slot=slot, cache_prefix=True, output_ids=pack(kept)),
                Release(slot=slot, cache_prefix=False),
                Release(
                    slot=slot,
                    cache_prefix=False,
                    output_ids=pack(outputs[: one.computed + 1 - one.known]),
                    drop_prefix=True,
                ),
            )
            found.append(ways[program.below(3)])
        return tuple(found)

    def _extends(self, program: Numbers) -> tuple[Extend, ...]:
        found = []
        for slot, one in sorted(self._live.items()):
            most = one.most - len(one.tokens) - 1
            if one.computed < one.known or most < 1 or program.below(4):
                continue
            begin, more = one.known, min(1 + program.below(2 * self._size), most)
            one.tokens += [n % 3 for n in range(more)]
            one.known = len(one.tokens)
            found.append(Extend(slot=slot, ids=pack(one.tokens[begin:])))
        return tuple(found)

    def _admits(self, program: Numbers) -> tuple[Admit, ...]:
        found = []
        for slot in range(SLOTS):
            if slot in self._live or program.below(3):
                continue
            fork = (0, self._size + 1, 2 * self._size)[program.below(3)]
            length = min(LENGTHS[program.below(len(LENGTHS))], self._limit - 2)
            other = program.below(2)
            tokens = [n % 3 if n < fork else (n + other) % 4 for n in range(length)]
            most = length + 1 + program.below(self._limit - length)
            salt = ("", "s")[program.below(4) == 3]
            self._live[slot] = Sequence(salt, tokens, length, most)
            found.append(
                Admit(
                    slot=slot,
                    request_id=f"r{slot}",
                    token_ids=pack(tokens),
                    prompt_len=length,
                    max_total=most,
                    params=SamplingParams(),
                    seed=0,
                    suppressed_ids=(),
                    cache_salt=salt,
                )
            )
        return tuple(found)

    def _compute(self, slot: int, start: int, count: int, samples: bool) -> None:
        """The device's part: what is read must be its own, what is written is noted."""
        one, pages = self._live[slot], self._memory.table.pages_of(slot)
        if start != one.computed:
            raise Wrong(f"slot {slot} goes on at {start}, not at {one.computed}")
        for at in range(start // self._size):
            self._reads(slot, at, int(pages[at]))
        one.computed = start + count
        for at in range(start // self._size, -(-one.computed // self._size)):
            end = min((at + 1) * self._size, one.computed)
            self._held[int(pages[at])] = (one.salt, tuple(one.tokens[:end]))
        if samples:
            one.tokens.append((sum(one.tokens) + len(one.tokens)) % 5)
            if len(one.tokens) > one.most:
                raise Wrong(f"slot {slot} has {len(one.tokens)} tokens of {one.most}")

    def _reads(self, slot: int, at: int, page: int) -> None:
        one = self._live[slot]
        own = (one.salt, tuple(one.tokens[: (at + 1) * self._size]))
        if self._held.get(page) != own:
            raise Wrong(f"slot {slot} reads page {page}, which holds {self._held.get(page)}")

    def _check(self) -> None:
        used = [
            int(page)
            for slot, one in self._live.items()
            for page in np.asarray(self._memory.table.pages_of(slot))[
                : -(-one.computed // self._size)
            ]
        ]
        if 0 in used:
            raise Wrong("the dummy page is in use")


Prefix = tuple[str, tuple[int, ...]]
BLOCKS = 3  # different pages of tokens
KEY_PAGES = 8  # of the longest key


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


def run_tree(program: Numbers) -> None:
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
        return salt, [program.below(BLOCKS) for _ in range(program.below(KEY_PAGES))]

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


LONGEST = 600  # bytes of a program


def make() -> Radix:
    """The target."""
    return Radix()


class Program:
    """Numbers out of bytes; zeros, and `over`, when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data[:LONGEST], 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def below(self, most: int) -> int:
        """0 to most - 1; most is at most 256."""
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1] % most


class Radix:
    """See Target."""

    instrumented = (
        "pipeinfer.memory.prefix_cache", "pipeinfer.memory.manager", "pipeinfer.memory.pages",
    )  # fmt: skip

    def seeds(self) -> list[bytes]:
        """Programs for both models."""
        source = Random(4)
        return [bytes([kind]) + source.randbytes(size) for kind in (0, 1) for size in (20, 90, 300)]

    def mutated(self, data: bytes, source: Random) -> bytes:
        """One operation more, once more, or another."""
        return changed(data, source)

    def one(self, data: bytes) -> None:
        """Runs the program."""
        program = Program(data[1:])
        model = (run_tree, run_manager)[(data or b"\0")[0] % 2]
        model(program)

    def close(self) -> None:
        """Nothing was started."""


def changed(data: bytes, source: Random) -> bytes:
    """A program with one operation more, once more, or another; its first byte is its kind."""
    changed = bytearray(data or b"\0")
    at, size = source.randrange(len(changed)), source.choice((1, 3, 8, 24))
    kind = source.randrange(4)
    if kind == 0:
        changed += source.randbytes(size)
    elif kind == 1:
        changed[at:at] = changed[at : at + size]
    elif kind == 2:
        changed[at : at + size] = source.randbytes(size)
    else:
        del changed[at : at + size]
    return bytes(changed[: LONGEST + 1]) or b"\0"
