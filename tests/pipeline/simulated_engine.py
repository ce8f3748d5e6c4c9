"""The real engine core and its real memory, on a device whose KV are the tokens themselves.

A page that is read where another was meant changes the token that is sampled. Steps compute in
order, when they are handed over; that they have ended is told later, as a message of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
from simulated_grammars import WORDS, Matcher, choice, compiled

from page_mirror import PageMirror
from pipeinfer.core import Compiled, Send, StepDone
from pipeinfer.engine.core import Compile, Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.grammars.masks import RowSource
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, BeginEpoch, Hello, Message, Plan
from pipeinfer.params import StructuredOutputs
from pipeinfer.step import LAST_TOKEN, RequestLogitEdits, Sampled, Step
from sampling_rows import sampling_of
from scheduler.model_engine import next_token, suppressed

PAGES, PAGE_SIZE, SLOTS, LONGEST = 60, 4, 6, 10_000
POISON = 49  # no engine survives computing it as a first token
SEEDS = 1000  # those below it change what is sampled
GARBAGE = 48  # what a row leaves behind that samples nothing


def noise_of(seed: int) -> list[int]:
    """What the model sees of a seed; drawn ones are larger, since nobody knows them."""
    return [seed] if seed < SEEDS else []


class Grammars:
    """Those that an engine of this incarnation was asked to compile."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._known: dict[StructuredOutputs, str] = {}

    def prepare(self, spec: StructuredOutputs) -> str:
        """Why it cannot be had; "" where it is there from now on."""
        return self._known.setdefault(spec, compiled(spec, self._incarnation))

    def verdict(self, spec: StructuredOutputs) -> str:
        """The same of one that is needed in a step. Nobody is to wait for it then."""
        assert spec in self._known, f"{spec} was not asked for before"
        return self._known[spec]


class TokenDevice:
    """Samples `next_token` of all tokens that it finds in a row's pages, after those of `mood`."""

    def __init__(self, mood: list[int], pages: int, grammars: Grammars) -> None:
        self._mood = mood
        self._grammars = grammars
        self._sources: dict[int, RowSource] = {}  # by slot
        self._kv = np.full((pages + 1, PAGE_SIZE), -1)
        self._last = np.full(SLOTS, -1)
        self._slots = PageMirror(SLOTS)
        self._edits: dict[int, RequestLogitEdits] = {}

    def run(self, step: Step) -> list[int | str]:
        """Of the rows that sample, in order, the ids, or why a row has none."""
        ids: list[int | str] = []
        taken = 0
        self._slots.apply(step.delta)
        for slot in step.delta.admitted.tolist():
            self._edits.pop(slot, None)
            self._sources.pop(slot, None)
        masked = self._masked(step)
        self._edits.update((edits.slot, edits) for edits in step.delta.logit_edits)
        pages, positions = self._slots.pages(step, PAGE_SIZE), sampling_of(step).positions
        seeds = step.fields["seed"].tolist()
        for row, (slot, start, count) in enumerate(
            zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        ):
            tokens = step.tokens[taken : taken + count]
            taken += count
            at = np.arange(start + count)
            places = pages[row][at // PAGE_SIZE], at % PAGE_SIZE
            assert (places[0] > 0).all(), "the dummy page is nobody's"
            here = places[0][start:], places[1][start:]
            self._kv[here] = np.where(tokens == LAST_TOKEN, self._last[slot], tokens)
            if step.samples[row]:
                known = self._mood + self._kv[places].tolist()
                token = next_token(known + noise_of(seeds[len(ids)]))
                edits = self._edits.get(slot)
                never = [] if edits is None else edits.ids[positions[len(ids)] < edits.until]
                token = suppressed(token, frozenset(map(int, never)))
                chosen = self._allowed(slot, token) if len(ids) in masked else token
                ids.append(chosen)
                self._last[slot] = GARBAGE if isinstance(chosen, str) else chosen
        return ids

    def _masked(self, step: Step) -> set[int]:
        """The rows that sample, by number, that have a grammar; new ones have their matchers."""
        if step.masked is None:
            return set()
        for new in step.masked.new:
            assert new.spec is not None
            assert not self._grammars.verdict(new.spec), "it cannot be had"
            ids = new.output.tolist()
            matcher = Matcher(new.spec, ids)
            self._sources[new.slot] = RowSource(matcher, new.begin + len(ids), new.jumps)
        for told in step.masked.extended:
            self._sources[told.slot].feed_from(told.first, told.ids.tolist())
        return set(step.masked.rows.tolist())

    def _allowed(self, slot: int, token: int) -> int | str:
        """What a row with a grammar samples, or why it samples nothing."""
        words = np.zeros(WORDS, dtype=np.int32)
        source = self._sources[slot]
        why = source.check(words)
        if why:
            return why
        chosen = choice(token, words)
        assert not source.feed([chosen])
        return chosen

    def _forced(self, step: Step, refused: dict[int, str]) -> dict[int, list[int]]:
        """What comes behind the tokens of rows that have a grammar, where that is known."""
        rows = [] if step.masked is None else step.masked.rows.tolist()
        slots = step.slots[step.samples].tolist()
        forced = {row: self._sources[slots[row]].force() for row in rows if row not in refused}
        return {row: ids for row, ids in forced.items() if ids}

    def sampled(self, step: Step) -> Sampled:
        """What it gives, with log-probs where they are asked for."""
        rows, asked, made = self.run(step), step.logprobs, list[bytes]()
        refused = {row: why for row, why in enumerate(rows) if isinstance(why, str)}
        drawn = np.array([(1, GARBAGE if row in refused else n) for row, n in enumerate(rows)])
        sampled = Sampled.of(drawn.reshape(-1, 2), refused)
        sampled = sampled.followed_by(self._forced(step, refused))
        positions = sampling_of(step).positions
        if asked is not None:
            for row, most in zip(asked.rows.tolist(), asked.num_alternatives.tolist(), strict=True):
                if row not in refused:
                    made.append(entry_of(int(positions[row]), int(drawn[row, 1]), most))
        prompts = [
            b"".join(
                entry_of(part.first + n, int(token), part.num_alternatives)
                for n, token in enumerate(part.ids)
            )
            for part in step.prompt_logprob_chunks
        ]
        return replace(sampled, logprobs=b"".join(made), prompt_logprobs=tuple(prompts))


def entry_of(position: int, token: int, most: int) -> bytes:
    """The entry of a token; no other place and no other token has it."""
    own = np.array([-position - token / 64], "<f4").view("<i4")
    ids = (token + np.arange(most)) % 50
    values = (-np.arange(most) - position).astype("<f4").view("<i4")
    return np.concatenate((own, [position + 1], ids, values)).astype("<i4").tobytes()


class EngineNode:
    """One engine process. `done`: ends of steps that its core has not heard of yet.

    `crashed`: it computed a poisoned request, and must be killed before anybody hears of it. A
    `moody` one samples other tokens than any other process would.
    """

    def __init__(
        self, incarnation: int, group: int, moody: bool = False, pages: int = PAGES, rank: int = 0,
        tp: int = 1,
    ) -> None:  # fmt: skip
        self._memory = MemoryManager(pages + 1, PAGE_SIZE, SLOTS, LONGEST)
        self._pages = pages
        hello = Hello(
            PROTOCOL, "test", rank, tp, incarnation, "model", PAGE_SIZE, pages, SLOTS, LONGEST,
            "none",
        )  # fmt: skip
        self.core = EngineCore(hello, f"scheduler-{group}", self._memory)
        self.grammars = Grammars(incarnation)
        self._device = TokenDevice([incarnation] if moody else [], pages, self.grammars)
        self.done: deque[StepDone] = deque()
        self.crashed = False

    def compiled(self, asked: Compile) -> Compiled:
        """What its thread for grammars answers, sooner or later."""
        return Compiled(asked.request_id, self.grammars.prepare(asked.spec))

    def handle(self, event: Message, now: float) -> list[Send]:
        """As a core does, but steps are computed here."""
        sends: list[Send] = []
        for send in self.core.handle(event, now):
            if isinstance(send.message, Compute):
                self._compute(send.message.step)
            else:
                sends.append(send)
        if isinstance(event, Plan | BeginEpoch):  # all else leaves the memory alone
            self._memory.check_integrity()
        return sends

    def _compute(self, step: Step) -> None:
        firsts = np.cumsum(step.counts) - step.counts
        if ((step.starts == 0) & (step.tokens[firsts] == POISON)).any():
            self.crashed = True
            return
        self.done.append(step_done(step, self._device.sampled(step)))

    def idle(self) -> bool:
        return self.core.idle()

    def state(self) -> tuple[str, str]:
        return self.core.state()

    def stats(self) -> dict[str, float]:
        return self.core.stats()

    def check_empty(self) -> None:
        """Nobody holds a slot, and every page is free or may be evicted."""
        stats = self.core.stats()
        assert stats["slots_used"] == stats["steps_in_flight"] == 0, stats
        assert stats["pages_free"] + stats["pages_evictable"] == self._pages, stats
