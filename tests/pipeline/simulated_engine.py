"""The real engine core and its real memory, on a device whose KV are the tokens themselves.

A page that is read where another was meant changes the token that is sampled. Steps compute in
order, when they are handed over; that they have ended is told later, as a message of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from pipeinfer.core import LOCAL, Send
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.driver import step_done
from pipeinfer.engine.mirror import Mirror
from pipeinfer.events import StepDone
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, Hello, Message
from pipeinfer.steps.step import LAST_TOKEN, Edits, Sampled, Step
from sampling_rows import sampling_of
from scheduler.model_engine import next_token, suppressed

PAGES, PAGE_SIZE, SLOTS, LONGEST = 60, 4, 6, 10_000
POISON = 49  # no engine survives computing it as a first token
SEEDS = 1000  # those below it change what is sampled


def noise_of(seed: int) -> list[int]:
    """What the model sees of a seed; drawn ones are larger, since nobody knows them."""
    return [seed] if seed < SEEDS else []


class TokenDevice:
    """Samples `next_token` of all tokens that it finds in a row's pages, after those of `mood`."""

    def __init__(self, mood: list[int], pages: int) -> None:
        self._mood = mood
        self._kv = np.full((pages + 1, PAGE_SIZE), -1)
        self._last = np.full(SLOTS, -1)
        self._slots = Mirror(SLOTS)
        self._edits: dict[int, Edits] = {}

    def run(self, step: Step) -> list[int]:
        """The ids of the rows that sample, in order."""
        ids: list[int] = []
        taken = 0
        self._slots.apply(step.delta)
        for slot in step.delta.admitted.tolist():
            self._edits.pop(slot, None)
        self._edits.update((edits.slot, edits) for edits in step.delta.edits)
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
                ids.append(suppressed(token, frozenset(map(int, never))))
                self._last[slot] = ids[-1]
        return ids

    def sampled(self, step: Step) -> Sampled:
        """What it gives, with log-probs where they are asked for."""
        ids, asked, made = self.run(step), step.logprobs, list[bytes]()
        positions = sampling_of(step).positions
        if asked is not None:
            for row, most in zip(asked.rows.tolist(), asked.most.tolist(), strict=True):
                made.append(score_of(int(positions[row]), ids[row], most))
        prompts = [
            b"".join(
                score_of(part.first + n, int(token), part.most) for n, token in enumerate(part.ids)
            )
            for part in step.prompts
        ]
        return replace(Sampled.one_each(ids), logprobs=b"".join(made), prompts=tuple(prompts))


def score_of(position: int, token: int, most: int) -> bytes:
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
        self._device = TokenDevice([incarnation] if moody else [], pages)
        self.done: deque[StepDone] = deque()
        self.crashed = False

    def handle(self, event: Message, now: float) -> list[Send]:
        """As a core does, but the device's part is done here."""
        sends: list[Send] = []
        for send in self.core.handle(event, now):
            if send.channel == LOCAL:
                assert isinstance(send.message, Compute)
                self._compute(send.message.step)
            else:
                sends.append(send)
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
