"""A model of the engine for the scheduler's tests: exact bookkeeping, no tensors, no mercy.

It obeys the plan protocol of messages.py and panics where the scheduler breaks it. Its "language
model" is a rolling hash of the whole sequence, so a lost, doubled or misplaced token changes all
that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pipeinfer.core import PlanFilter
from pipeinfer.messages import (
    PROTOCOL,
    Admit,
    Admitted,
    AppendTokens,
    Asleep,
    BeginEpoch,
    CompileGrammar,
    GrammarCompiled,
    Hello,
    Message,
    MissedPlan,
    Plan,
    Ready,
    Release,
    Result,
    Sleep,
)
from pipeinfer.params import StructuredOutputs
from pipeinfer.step_cost import StepCost
from pipeinfer.wire import NO_DRAFTS, pack, unpack

VOCABULARY = 50
COSTLY = StructuredOutputs(regex="b")  # the grammar whose masks cost UNITS, each
CHANGING = StructuredOutputs(regex="a")  # that whose masks cost as much now and then
UNITS = 30_000


class Panic(AssertionError):
    """The scheduler did something that an engine must never be asked to do."""


def next_token(tokens: list[int]) -> int:
    state = 17
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**31 - 1)
    return state % VOCABULARY


def expected_outputs(
    prompt: list[int],
    max_tokens: int,
    stops: frozenset[int],
    min_tokens: int = 0,
    noise: list[int] | None = None,
) -> list[int]:
    """What an undisturbed request produces. noise: what comes behind all tokens."""
    tokens = list(prompt)
    for produced in range(max_tokens):
        token = next_token([*tokens, *(noise or ())])
        if produced < min_tokens and token in stops:
            token = suppressed(token, stops)
        tokens.append(token)
        if token in stops:
            break
    return tokens[len(prompt) :]


def suppressed(token: int, stops: frozenset[int]) -> int:
    while token in stops:
        token = (token + 1) % VOCABULARY
    return token


def forced(tokens: list[int], most: int) -> list[int]:
    """Up to `most` of the tokens that come behind some of them are known at once."""
    return [] if sum(tokens) % 3 else expected_outputs(tokens, most, frozenset())


@dataclass
class Slot:
    admit: Admit
    tokens: list[int]
    known: int
    computed: int
    ahead: int = 0  # tokens that were said, sampled or not
    shared: list[tuple[int, ...]] = field(default_factory=list)  # locked pages of the cache
    private: int = 0
    drafted: bool = (
        False  # drafts were verified: pages are held for as many tokens as were possible
    )
    reached: int = 0


class ModelEngine:
    """Applies plans at once; `outbox` holds what it would send, in order.

    What a plan admitted is known once the plan was applied, and results come when steps have ended:
    at random Admitted(N) comes before results of plans before N, as many as are still to be sent.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: int,
        budget: int,
        caching: bool,
        step_cost: StepCost | None = None,
        forces: int = 0,
        overtakes: Callable[[int], int] | None = None,
        drafts: int = 0,
        accepts: Callable[[int], int] | None = None,
    ) -> None:
        """`forces`: of requests with a grammar up to so many tokens may be forced at a time.
        `drafts`: of a row at most; `accepts`: of so many drafts, how many are right.
        `overtakes`: of so many results that are to be sent, how many an Admitted comes before."""
        by_chance = partial(Random(0).randint, 0)
        self._overtakes = by_chance if overtakes is None else overtakes
        self._accepts = by_chance if accepts is None else accepts
        self.drafts = drafts
        self.verified = 0  # drafts
        self.step_cost, self.forces = step_cost, forces
        self.pages, self.page_size, self.max_slots = pages, page_size, slots
        self.budget, self.caching = budget, caching
        self.incarnation = 1
        self.outbox: deque[Message] = deque()
        self.prepared: list[StructuredOutputs] = []  # grammars that were asked for
        self._grammars: set[StructuredOutputs] = set()  # of this process
        self.deferred = 0
        self.prefilled = 0  # tokens
        self._kept: set[tuple[int, ...]] = set()  # prefixes that the process before has left
        self.jumped = 0  # times that a request was told what it need not sample
        self._forget(0)

    def _forget(self, epoch: int) -> None:
        self.epoch, self.plans = epoch, PlanFilter()
        self.slots: dict[int, Slot] = {}
        self.done: tuple[list[int], list[int]] = [], []  # prompts, by the two plans before
        self.cache: dict[tuple[int, ...], int] = {}  # prefix up to a page's end -> locks
        self.outbox.clear()

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL, "test", 0, 1, self.incarnation, "model", self.page_size, self.pages,
            self.max_slots, 10_000, "none", step_cost=self.step_cost, max_drafts=self.drafts,
            max_draft_rows=3, draft_model=self.drafts == 4,
        )  # fmt: skip

    def crash(self, keeps: Callable[[tuple[int, ...]], bool] = lambda prefix: False) -> None:
        """A new process that knows nothing, but finds those pages in its first epoch of which
        `keeps(prefix)` is true, and that of all pages before them."""
        filled = [*self.cache]
        for slot in self.slots.values():
            filled += self._prefixes(slot.tokens, min(slot.computed, len(slot.tokens)))
        self._kept.clear()
        for prefix in sorted(set(filled) if self.caching else (), key=len):
            before = prefix[: -self.page_size]
            if (not before or before in self._kept) and keeps(prefix):
                self._kept.add(prefix)
        self.incarnation += 1
        self._grammars.clear()
        self._forget(0)
        self.outbox.append(self.hello())

    def receive(self, message: Message) -> None:
        if isinstance(message, BeginEpoch):
            if self.incarnation in message.incarnations:
                self._forget(message.epoch)
                self.cache = dict.fromkeys(self._kept, 0)
                kept = len(self.cache)
                self.outbox.append(Ready(message.epoch, 0, self.incarnation, kept_pages=kept))
            else:
                self._forget(0)
                self.outbox.append(self.hello())
        elif isinstance(message, Sleep):
            if self.incarnation in message.incarnations:
                self._kept.clear()
                self._forget(0)
                asleep = Asleep(message.level, 0, self.incarnation, message.refuses)
                self.outbox.append(asleep)
        elif isinstance(message, CompileGrammar):
            self.prepared.append(message.spec)
            self._grammars.add(message.spec)
            self.outbox.append(GrammarCompiled(0, self.incarnation, message.request_id))
        elif isinstance(message, Plan) and message.epoch == self.epoch:
            order = self.plans.take(message.number)
            if order == "next":
                self._apply(message)
            elif order == "gap":
                self.outbox.append(MissedPlan(self.epoch, 0, self.plans.expected))

    @property
    def free(self) -> int:
        return self.pages - len(self.cache) - sum(slot.private for slot in self.slots.values())

    @property
    def evictable(self) -> int:
        """Unlocked cached pages; a page is locked with everything before it."""
        return sum(locks == 0 for locks in self.cache.values())

    def _apply(self, plan: Plan) -> None:
        self._kept.clear()
        if plan.reset:
            for prefix in [one for one, locks in self.cache.items() if locks == 0]:
                del self.cache[prefix]
        for release in plan.releases:
            self._release(release)
        for number in self.done[0] if self.caching else ():
            self._share(self.slots[number], self.slots[number].known)
        self.done = self.done[1], []
        for number in unpack(plan.cache_slots).tolist():
            slot = self.slots.get(number)
            if slot is None:
                raise Panic(f"slot {number} is empty and cannot share")
            if self.caching:
                self._share(slot, min(slot.computed, len(slot.admit.token_ids) // 4))
        for admit in plan.admits:
            self._admit(admit)
        for extend in plan.appends:
            self._extend(extend)
        rows = list(zip(unpack(plan.slots).tolist(), unpack(plan.counts).tolist(), strict=True))
        if len({slot for slot, _ in rows}) != len(rows):
            raise Panic(f"a slot stands twice in plan {plan.number}")
        if sum(count for _, count in rows) > self.budget:
            raise Panic(f"plan {plan.number} has {sum(c for _, c in rows)} tokens")
        if not len(plan.drafts) == len(plan.ends) in (0, len(plan.slots)):
            raise Panic(f"plan {plan.number} has {len(plan.drafts)} bytes of drafts")
        drafts = unpack(plan.drafts).tolist() or [NO_DRAFTS] * len(rows)
        ends = unpack(plan.ends).tolist() or [0] * len(rows)
        if sum(number > 0 for number in drafts) > 3:
            raise Panic(f"plan {plan.number} has drafts in too many rows")
        done = [
            self._advance(slot, count) if number == NO_DRAFTS else self._verify(slot, number, end)
            for (slot, count), number, end in zip(rows, drafts, ends, strict=True)
        ]
        if any(count != 1 + n for (_, count), n in zip(rows, drafts, strict=True) if n >= 0):
            raise Panic(f"plan {plan.number} has drafts that are not in its counts")
        if plan.admits:
            slots = [admit.slot for admit in plan.admits]
            cached = pack([len(self.slots[slot].shared) * self.page_size for slot in slots])
            admitted = Admitted(
                plan.epoch, plan.number, pack(slots), cached, self.free, self.evictable
            )
            self._admitted(admitted)
        starts, counts, produced, deferred = zip(*done, strict=True) if done else ((),) * 4
        sampled = [slot for (slot, _), (*_, ids, _) in zip(rows, done, strict=True) if ids]
        self.outbox.append(
            Result(
                plan.epoch,
                plan.number,
                plan.slots,
                pack(starts),
                pack(counts),
                pack([len(p) for p in produced]),
                pack([t for p in produced for t in p]),
                pack([slot for (slot, _), late in zip(rows, deferred, strict=True) if late]),
                self.free,
                self.evictable,
                0,
                mask_units={slot: n for slot in sampled if (n := self._mask_units(slot)) >= 0},
            )
        )

    def _admitted(self, told: Admitted) -> None:
        """Puts it before some of the results that are still to be sent, or behind all."""
        results = 0
        while results < len(self.outbox) and isinstance(self.outbox[-1 - results], Result):
            results += 1
        self.outbox.insert(len(self.outbox) - self._overtakes(results), told)

    def _mask_units(self, number: int) -> int:
        """-1: that is no news."""
        slot = self.slots[number]
        spec = slot.admit.params.structured_outputs
        if spec == COSTLY or (spec == CHANGING and len(slot.tokens) % 7 == 0):
            return UNITS
        return 500 if spec == CHANGING else -1

    def _prefixes(self, tokens: list[int], count: int) -> list[tuple[int, ...]]:
        size = self.page_size
        return [tuple(tokens[: (i + 1) * size]) for i in range(count // size)]

    def _release(self, release: Release) -> None:
        slot = self.slots.pop(release.slot, None)
        if slot is None:
            raise Panic(f"release of empty slot {release.slot}")
        told = slot.tokens[: slot.known] + unpack(release.output_ids).tolist()
        if told != slot.tokens[: len(told)]:
            raise Panic(f"confirmed ids {told} differ from what was sampled {slot.tokens}")
        for done in self.done:
            done[:] = [number for number in done if number != release.slot]
        for prefix in slot.shared:
            self.cache[prefix] -= 1
        if release.drop_prefix:
            if release.cache_prefix:
                raise Panic("a release that forgets what it keeps")
            self._forget_prefix(told)
        if release.cache_prefix and self.caching:
            sure = len(told) - slot.drafted
            for prefix in self._prefixes(told, min(sure, slot.computed)):
                self.cache.setdefault(prefix, 0)

    def _share(self, slot: Slot, count: int) -> None:
        """Two plans after its prompt was completed others find it; before, if a plan says so."""
        for prefix in self._prefixes(slot.tokens, count)[len(slot.shared) :]:
            self.cache[prefix] = self.cache.get(prefix, 0) + 1
            slot.shared.append(prefix)
            slot.private -= 1

    def _forget_prefix(self, tokens: list[int]) -> None:
        for prefix in reversed(self._prefixes(tokens, len(tokens))):
            longer = any(p[: len(prefix)] == prefix and p != prefix for p in self.cache)
            if longer or self.cache.get(prefix):
                break
            self.cache.pop(prefix, None)

    def _admit(self, admit: Admit) -> None:
        if admit.slot in self.slots or not 0 <= admit.slot < self.max_slots:
            raise Panic(f"admission into slot {admit.slot}")
        spec = admit.params.structured_outputs
        if spec is not None and spec not in self._grammars:
            raise Panic(f"{admit.request_id} is admitted without its grammar")
        tokens = unpack(admit.token_ids).tolist()
        slot = Slot(admit, tokens, len(tokens), 0)
        for prefix in self._prefixes(tokens, len(tokens) - 1):
            if prefix not in self.cache:
                break
            self.cache[prefix] += 1
            slot.shared.append(prefix)
        slot.computed = len(slot.shared) * self.page_size
        self.slots[admit.slot] = slot

    def _extend(self, extend: AppendTokens) -> None:
        slot, ids = self.slots[extend.slot], unpack(extend.ids).tolist()
        prompt, known = slot.tokens[: slot.admit.prompt_len], slot.known + len(ids)
        if slot.computed < slot.known and slot.known == len(slot.admit.token_ids) // 4:
            raise Panic(f"slot {extend.slot} is extended amid its prompt")
        if not slot.known <= slot.computed + 1 < known < slot.admit.max_total:
            raise Panic(f"{slot.computed} computed, {slot.known} known: {len(ids)} more are no use")
        true = prompt + expected_outputs(prompt, known - len(prompt), frozenset())
        if slot.tokens[: slot.known] + ids != true:
            raise Panic(f"slot {extend.slot} is told {ids}")
        slot.tokens, slot.known = true, known
        self.jumped += 1

    def _advance(self, number: int, count: int) -> tuple[int, int, list[int], bool]:
        slot = self.slots.get(number)
        if slot is None:
            raise Panic(f"row for empty slot {number}")
        if slot.drafted:
            raise Panic(f"slot {number} is where only its drafts say")
        start = slot.computed
        if start < slot.known:
            take = min(count, slot.known - start)
        else:
            take = int(len(slot.tokens) < slot.admit.max_total)
        if take == 0:
            return start, 0, [], False
        need = -(-(start + take) // self.page_size) - len(slot.shared) - slot.private
        if need > self.free + self.evictable:
            self.deferred += 1
            return start, 0, [], True
        while need > self.free:
            self._evict()
        slot.private += need
        slot.computed = start + take
        self.prefilled += take if start < slot.known else 0
        if slot.computed < slot.known:
            return start, take, [], False
        if start < slot.known and slot.known == len(slot.admit.token_ids) // 4:
            self.done[1].append(number)
        token = next_token(slot.tokens)
        outputs = len(slot.tokens) - slot.admit.prompt_len
        if outputs < slot.admit.params.min_tokens:
            token = suppressed(token, frozenset(slot.admit.suppressed_ids))
        slot.tokens.append(token)
        spec, room = slot.admit.params.structured_outputs, slot.admit.max_total - len(slot.tokens)
        if spec is None or slot.admit.params.min_tokens or slot.ahead > len(slot.tokens):
            return start, take, [token], False
        more = forced(slot.tokens, min(self.forces, room))
        slot.ahead = len(slot.tokens) + len(more)
        return start, take, [token, *more], False

    def _verify(self, number: int, drafts: int, end: int) -> tuple[int, int, list[int], bool]:
        slot = self.slots[number]
        start, penalized = slot.computed, slot.admit.params.structured_outputs is not None
        if start < slot.known and not slot.drafted:  # an earlier row was deferred
            return self._advance(number, 1 + drafts)
        if penalized or not 0 <= drafts <= self.drafts or start < slot.known:
            raise Panic(f"slot {number} cannot verify {drafts} drafts")
        if not start + 1 + drafts <= end < slot.admit.max_total:
            raise Panic(f"slot {number} is at {start} and cannot be at {end} after {drafts} drafts")
        slot.drafted, reached = True, max(end, slot.reached)
        need = -(-reached // self.page_size) - len(slot.shared) - slot.private
        if need > self.free + self.evictable:
            self.deferred += 1
            return start, 0, [], True
        while need > self.free:
            self._evict()
        slot.private += max(need, 0)
        slot.reached, tokens = reached, list[int]()
        for _ in range(1 + self._accepts(drafts)):
            token = next_token(slot.tokens)
            if len(slot.tokens) - slot.admit.prompt_len < slot.admit.params.min_tokens:
                token = suppressed(token, frozenset(slot.admit.suppressed_ids))
            slot.tokens.append(token)
            tokens.append(token)
        self.verified += drafts
        slot.computed += len(tokens)
        return start, len(tokens), tokens, False

    def _evict(self) -> None:
        """The longest unlocked prefix: a leaf."""
        del self.cache[max((p for p, locks in self.cache.items() if locks == 0), key=len)]
