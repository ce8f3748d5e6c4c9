"""Random plans through the memory manager, with a device whose KV can be checked.

Steps run late, as under overlap. Before a step runs, every position that it reads must hold the KV
of exactly the tokens of its own request, wherever the pages came from.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hash_device import HashDevice, chain
from page_mirror import PageMirror
from pipeinfer.engine.step_builder import RequestTable, StepBuilder
from pipeinfer.memory.manager import MemoryManager, Rows
from pipeinfer.memory.page_directory import (
    ChainTracker,
    PageDirectory,
    directory_bytes,
    salt_digest,
)
from pipeinfer.messages import Admit, AppendTokens, Plan, Release
from pipeinfer.params import RequestParams
from pipeinfer.step import LAST_TOKEN, Step
from pipeinfer.wire import PREFIX_UPPER, pack, unpack

SLOTS = 5
MAX_IN_FLIGHT = 3


class Sequence:
    """One admission of one request: what its tokens truly are, as the steps that ran made them."""

    def __init__(self, prompt: list[int], outputs: list[int], room: int, salt: str, seed: int):
        self.prompt, self.salt, self.seed = prompt, salt, seed
        self.tokens = prompt + outputs
        self.known = len(self.tokens)
        self.max_total = self.known + room
        self.planned = 0
        self.kv = chain(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.kv += chain([token], self.kv[-1])

    def force(self, tokens: list[int]) -> None:
        """These come next, and the engine is told of all there are."""
        for token in tokens:
            self.append(token)
        self.known = len(self.tokens)


def cache_key(salt: str) -> str:
    return salt_digest(salt).hex() if salt else ""


class MemoryMachine(RuleBasedStateMachine):
    page_size = 4
    cache = "radix"

    @initialize(spare=st.integers(0, 12))
    def start(self, spare: int):
        size = self.page_size
        self.limit = 7 * size + 5
        self.pages = 1 + -(-self.limit // size) + spare  # the longest request alone always fits
        chains = ChainTracker(self.pages, size, SLOTS)
        self.memory = MemoryManager(self.pages, size, SLOTS, self.limit, self.cache, chains)
        self.requests = RequestTable(SLOTS)
        self.steps = StepBuilder(self.memory, self.requests, shares=True)
        self.device = HashDevice(self.pages, size, SLOTS)
        self.heard = PageMirror(SLOTS)  # of steps that the device has not run yet
        buffer = memoryview(bytearray(directory_bytes(self.pages, size)))
        self.directory = PageDirectory(buffer, self.pages, size)
        self.directory.begin(b"model")
        self.number = 0
        self.live: dict[int, Sequence] = {}
        self.preempted: list[Sequence] = []
        self.finished: list[list[int]] = []
        self.forgotten: list[tuple[Sequence, list[int]]] = []  # by the plan that is drawn
        self.flights: list[tuple[Step, list[Sequence], Rows, np.ndarray]] = []
        self.written: list[list[int]] = []  # pages that each of these steps writes

    # ------------------------------------------------------------------------------- what to plan

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        """Prompts share beginnings with each other and with what finished requests left."""
        size = self.page_size
        tokens: list[int] = []
        if self.finished and data.draw(st.booleans(), "follow up"):
            tokens = list(data.draw(st.sampled_from(self.finished), "after"))
        family = data.draw(st.integers(0, 2), "family")
        fork = (0, size + size // 2, 2 * size)[family]
        length = data.draw(st.integers(1, 3 * size + 1), "length")
        tokens += [at % 3 if at < fork else (at + family) % 4 for at in range(length)]
        return tokens[: self.limit - 2]

    def draw_releases(self, data: st.DataObject) -> list[Release]:
        releases = []
        for slot in sorted(self.live):
            if not data.draw(st.integers(0, 3).map(lambda n: n == 0), f"release {slot}"):
                continue
            sequence = self.live.pop(slot)
            flying = self.is_flying(sequence)
            preempt = not flying and data.draw(st.booleans(), "preempt")
            keep = preempt or data.draw(st.booleans(), "keep")
            forget = not keep and data.draw(st.booleans(), "forget")
            outputs = sequence.tokens[sequence.known :]
            if preempt:
                self.preempted.append(sequence)
            else:
                outputs = outputs[: data.draw(st.integers(0, len(outputs)), "confirmed")]
                self.finished.append(sequence.tokens[: sequence.known] + outputs)
            told = pack(outputs) if keep or forget else b""
            releases.append(Release(slot, keep, told, forget))
            if forget:
                self.forgotten.append((sequence, sequence.tokens[: sequence.known] + outputs))
        return releases

    def draw_admits(self, data: st.DataObject) -> list[Admit]:
        admits = []
        for slot in [slot for slot in range(SLOTS) if slot not in self.live]:
            kind = data.draw(st.sampled_from(["none", "new", "again"]), f"admit {slot}")
            if kind == "again" and self.preempted:
                old = self.preempted.pop(0)
                room = old.max_total - len(old.tokens)
                if room < 1:
                    continue
                outputs = old.tokens[len(old.prompt) :]
                sequence = Sequence(old.prompt, outputs, room, old.salt, old.seed)
            elif kind == "new":
                prompt = self.draw_prompt(data)
                room = data.draw(st.integers(1, self.limit - len(prompt)), "room")
                salt = data.draw(st.sampled_from(["", "", "s"]), "salt")
                sequence = Sequence(prompt, [], room, salt, data.draw(st.integers(0, 2), "seed"))
            else:
                continue
            self.live[slot] = sequence
            admits.append(self.admit(slot, sequence))
        return admits

    def draw_appends(self, data: st.DataObject) -> list[AppendTokens]:
        """What was sampled, and more: of requests that have come through their prompt."""
        appends = []
        for slot, sequence in sorted(self.live.items()):
            flying = self.is_flying(sequence)
            most = sequence.max_total - len(sequence.tokens) - 1
            if flying or sequence.planned < sequence.known or most < 1:
                continue
            count = data.draw(st.sampled_from([0, 0, 1, 2, 2 * self.page_size + 1]), "extend")
            forced = [(sequence.planned + n) % 4 for n in range(min(count, most))]
            if forced:
                begin = sequence.known
                sequence.force(forced)
                appends.append(AppendTokens(slot, pack(sequence.tokens[begin:])))
        return appends

    def draw_shares(self, data: st.DataObject, old: set[int]) -> list[int]:
        """Prompts that are perhaps half-computed, and were there before this plan."""
        slots = sorted(set(self.live) & old)
        return [slot for slot in slots if data.draw(st.booleans(), f"share {slot}")]

    def admit(self, slot: int, sequence: Sequence) -> Admit:
        return Admit(
            slot,
            f"r{slot}",
            pack(sequence.tokens),
            len(sequence.prompt),
            sequence.max_total,
            RequestParams(max_tokens=1 if sequence.seed % 3 == 0 else 16),
            sequence.seed,
            cache_salt=sequence.salt,
        )

    # -------------------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.flights) < MAX_IN_FLIGHT)
    @rule(data=st.data())
    def plan(self, data: st.DataObject):
        releases, appends = self.draw_releases(data), tuple(self.draw_appends(data))
        shares = pack(self.draw_shares(data, set(self.live)))
        admits = self.draw_admits(data)
        slots = data.draw(st.permutations(range(SLOTS)), "order")
        slots = slots[: data.draw(st.integers(0, SLOTS), "rows")]
        most = 2 * self.page_size + 1
        counts = [data.draw(st.sampled_from([0, 1, 1, 2, most, 99999]), "n") for _ in slots]
        rows = pack(slots), pack(counts)
        changes = tuple(releases), tuple(admits)
        reset = data.draw(st.integers(0, 9).map(lambda n: n == 9), "reset")
        self.apply(
            Plan(1, self.number, *changes, *rows, reset, appends=appends, cache_slots=shares)
        )

    @precondition(lambda self: len(self.live) + 3 <= SLOTS and not self.flights)
    @rule(data=st.data())
    def twins(self, data: st.DataObject):
        """Two compute one prompt, and the pages of one go to a third while that step is under way:
        what the step fills there is not what the page will hold."""
        first, second, third = [slot for slot in range(SLOTS) if slot not in self.live][:3]
        prompt = self.draw_prompt(data)[: 3 * self.page_size]
        for slot in (first, second):
            self.live[slot] = Sequence(prompt, [], 2, "", 0)
        admits = tuple(self.admit(slot, self.live[slot]) for slot in (first, second))
        rows = pack([first, second]), pack([99999, 99999])
        self.apply(Plan(1, self.number, (), admits, *rows))
        other = [3] + [2] * data.draw(st.integers(0, self.limit - 4), "length")
        self.live[third] = Sequence(other, [], 2, "", 0)
        shares = pack(data.draw(st.permutations([first, second]), "whose pages stay"))
        admits = (self.admit(third, self.live[third]),)
        rows = pack([third]), pack([99999])
        self.apply(Plan(1, self.number, (), admits, *rows, cache_slots=shares))
        self.run_step()

    @precondition(lambda self: self.flights == [] and len(self.live) > 0)
    @rule()
    def decode_all(self):
        """The usual plan: everybody goes on by one, and it takes effect at once."""
        slots = sorted(self.live)
        self.apply(Plan(1, self.number, (), (), pack(slots), pack([1] * len(slots))))
        self.run_step()

    @precondition(lambda self: len(self.flights) > 0)
    @rule()
    def run_step(self):
        step, sequences, rows, plan_rows = self.flights.pop(0)
        self.written.pop(0)
        self.device.slots.apply(step.delta)
        table = self.device.slots.pages(step, self.page_size)
        for row, sequence in enumerate(sequences):
            start = int(step.starts[row])
            read = self.device.read(table[row], start).tolist()
            assert read == sequence.kv[:start], f"row {row} reads KV that is not its own"
        ids = self.device.run(step)
        self.fill_pages(rows, plan_rows, ids)
        sampled = iter(ids.tolist())
        ends = np.cumsum(step.counts)
        for row, sequence in enumerate(sequences):
            start, count = int(step.starts[row]), int(step.counts[row])
            tokens = step.tokens[ends[row] - count : ends[row]].tolist()
            expected = sequence.tokens[start : start + count]
            assert tokens == (expected if start < sequence.known else [LAST_TOKEN])
            assert bool(step.samples[row]) == (start + count == len(sequence.tokens))
            if step.samples[row]:
                sequence.append(next(sampled))
                assert len(sequence.tokens) <= sequence.max_total
        assert next(sampled, None) is None

    # --------------------------------------------------------------------------------- what it did

    def apply(self, plan: Plan) -> None:
        before = {slot: sequence.planned for slot, sequence in self.live.items()}
        evicted = self.memory.num_evicted
        rows = self.memory.apply(plan)
        self.number += 1
        self.memory.check_integrity()
        assert set(rows.pages_to_zero.tolist()) <= set(rows.invalidated.tolist()), (
            "zeroed, yet believed"
        )
        self.check_forgotten(plan, evicted)
        for admit, cached in zip(plan.admits, rows.cached.tolist(), strict=True):
            self.requests.put(admit)
            assert cached % self.page_size == 0 and cached < len(admit.token_ids) // 4
            self.live[admit.slot].planned = before[admit.slot] = cached
        self.check_rows(plan, rows, before)
        step, plan_rows = self.steps.build(1, rows)
        assert (step.counts[: step.num_decodes] == 1).all() and (
            step.counts[step.num_decodes :] > 1
        ).all()
        self.heard.apply(step.delta)
        for row, pages in enumerate(self.heard.pages(step, self.page_size)):
            used = -(-int(step.starts[row] + step.counts[row]) // self.page_size)
            held = self.memory.table.pages_of(int(step.slots[row]))
            assert pages[:used].tolist() == held[:used].tolist() and pages[:used].all()
        self.check_shared_prefixes(step)
        self.directory.invalidate(rows.invalidated)
        if plan.reset:
            assert not len(self.directory.read().verified()), "a reset has left pages to believe"
        sequences = [self.live[slot] for slot in step.slots.tolist()]
        self.flights.append((step, sequences, rows, plan_rows))
        size, written = self.page_size, list[int]()
        for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
            pages = self.memory.table.pages_of(int(slot))
            written += pages[start // size : -(-(start + count) // size)].tolist()
        self.written.append(written)

    def is_flying(self, sequence: Sequence) -> bool:
        return any(sequence in sequences for _, sequences, _, _ in self.flights)

    def fill_pages(self, rows: Rows, plan_rows: np.ndarray, ids: np.ndarray) -> None:
        """The step of `rows` has ended, and the directory hears of it."""
        sampled = np.full(len(rows.slots), -1, dtype=np.int32)
        sampled[plan_rows] = ids
        filled = self.memory.chains.filled(rows.fills, sampled)
        if filled is not None:
            self.directory.validate(filled)
        valid = set(self.directory.read().pages.tolist())
        for written in self.written:
            assert valid.isdisjoint(written), "a step under way may write a valid page"

    @rule(data=st.data())
    def kill(self, data: st.DataObject):
        """The engine dies: steps under way may still run, but nobody hears of their end. Another
        one begins with the pages that the directory tells of."""
        for step, _, _, _ in self.flights[: data.draw(st.integers(0, len(self.flights)), "run")]:
            if len(step.slots):
                self.device.run(step)
        found = self.directory.read().verified()
        for _, tokens, pages in found.sequences():
            kv = self.device.read(pages, len(tokens)).tolist()
            assert kv == chain(tokens.tolist()), "a page is believed that does not hold its chain"
            event("pages outlive an engine")
        self.flights.clear()
        self.written.clear()
        size = self.page_size
        chains = ChainTracker(self.pages, size, SLOTS)
        self.memory = MemoryManager(self.pages, size, SLOTS, self.limit, self.cache, chains)
        self.memory.reset(found)
        self.memory.check_integrity()
        if self.cache == "radix":
            assert self.memory.num_evictable == len(found)
        self.requests = RequestTable(SLOTS)
        self.steps = StepBuilder(self.memory, self.requests, shares=True)
        self.device.slots, self.heard = PageMirror(SLOTS), PageMirror(SLOTS)
        others = np.ones(self.pages, dtype=bool)
        others[found.pages] = False
        self.device.kv[others] = 0  # an engine zeroes what it does not believe
        self.number = 0
        self.preempted += [self.live[slot] for slot in sorted(self.live)]
        self.live.clear()

    def check_shared_prefixes(self, step: Step) -> None:
        """Rows that are said to have pages in common have, and tokens of their own behind them."""
        if step.shared_prefixes is None:
            return
        pages = self.heard.pages(step, self.page_size)
        shared = step.shared_prefixes
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (packed, rank) in enumerate(
            zip(shared.leaders.tolist(), shared.ranks.tolist(), strict=True)
        ):
            leader, length = divmod(packed, PREFIX_UPPER)
            if not length:
                continue
            groups.setdefault((packed, rank % PREFIX_UPPER), []).append(rank // PREFIX_UPPER)
            assert pages[row, :length].all()
            assert (pages[row, :length] == pages[leader, :length]).all()
            assert length * self.page_size <= step.starts[row]
            assert shared.leaders[leader] == packed
        for (_, size), ranks in groups.items():
            assert sorted(ranks) == list(range(size)) and size > 1
        event("decodes have a beginning in common")

    def check_forgotten(self, plan: Plan, evicted: int) -> None:
        """What is still cached of a forgotten request is others', too: somebody holds it, a longer
        path goes on from there."""
        forgotten, self.forgotten = self.forgotten, []
        if self.cache == "naive" or self.memory.num_evicted != evicted:
            return
        if not all(release.drop_prefix for release in plan.releases):
            return  # others, released later in the same plan, may leave what they held
        for sequence, tokens in forgotten:
            end = self.memory.cache._last_full_node(
                np.array(tokens, np.int32), cache_key(sequence.salt)
            )
            if end is not None and end.parent is not None and not end.children:
                assert end.locks, "an unlocked end of a forgotten path was left in the tree"

    def check_rows(self, plan: Plan, rows: Rows, before: dict[int, int]) -> None:
        """Each row that was not deferred advanced exactly as the plan said."""
        assert rows.slots.tolist() == unpack(plan.slots).tolist()
        for row, (slot, wanted) in enumerate(
            zip(rows.slots.tolist(), unpack(plan.counts).tolist(), strict=True)
        ):
            start, count = int(rows.starts[row]), int(rows.counts[row])
            if slot not in self.live:
                assert count == 0 and not rows.deferred[row]
                continue
            sequence = self.live[slot]
            assert start == before[slot]
            left = sequence.known - start
            expected = min(left, wanted) if left > 0 else int(wanted > 0)
            if left <= 0 and start + 2 > sequence.max_total:
                expected = 0
            assert count == (0 if rows.deferred[row] else expected)
            assert not rows.deferred[row] or expected > 0
            sequence.planned += count

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.flights:
            self.run_step()
        releases = tuple(Release(slot, False) for slot in sorted(self.live))
        self.apply(Plan(1, self.number, releases, (), b"", b""))
        memory = self.memory
        assert memory.num_free + memory.num_evictable == self.pages - 1
        assert self.cache == "radix" or memory.num_evictable == 0


@pytest.mark.parametrize(("page_size", "cache"), [(1, "radix"), (4, "radix"), (16, "naive")])
def test_every_row_reads_the_kv_of_its_own_tokens(page_size: int, cache: str, monkeypatch):
    monkeypatch.setattr("pipeinfer.memory.pages.MIN_SHARED_TOKENS", 1)
    machine = type("Machine", (MemoryMachine,), {"page_size": page_size, "cache": cache})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None)
    )
