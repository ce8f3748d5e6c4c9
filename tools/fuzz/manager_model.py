"""The memory manager beside a note of what each page holds: plans that a scheduler might send.

Every step takes effect at once. Knows the manager's interface; a program chooses the plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fuzz.target import Wrong
from fuzz.tree_model import Numbers
from pipeinfer.memory.errors import ProtocolError
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import Admit, Extend, Plan, Release
from pipeinfer.params import SamplingParams
from pipeinfer.wire import pack

SLOTS, SIZES = 4, (1, 4, 16)
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


def run(program: Numbers) -> None:
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
            shares=pack(shares),
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
            Release(slot=program.below(9) - 2, keep=True, output_ids=ids[: program.below(9)]),
        )
        plan = Plan(
            epoch=1,
            number=self._number,
            releases=releases,
            admits=(admit,),
            slots=ids[:8],
            counts=ids[: 4 * program.below(3)],
            extends=(Extend(slot=program.below(9) - 2, ids=ids[: program.below(13)]),),
            shares=ids[: program.below(9)],
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
                Release(slot=slot, keep=True, output_ids=pack(kept)),
                Release(slot=slot, keep=False),
                Release(
                    slot=slot,
                    keep=False,
                    output_ids=pack(outputs[: one.computed + 1 - one.known]),
                    forget=True,
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
                    suppress=(),
                    cache_salt=salt,
                )
            )
        return tuple(found)

    def _compute(self, slot: int, start: int, count: int, samples: bool) -> None:
        """The device's part: what is read must be its own, what is written is noted."""
        one, pages = self._live[slot], self._memory.table.row(slot)
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
            for page in np.asarray(self._memory.table.row(slot))[: -(-one.computed // self._size)]
        ]
        if 0 in used:
            raise Wrong("the dummy page is in use")
