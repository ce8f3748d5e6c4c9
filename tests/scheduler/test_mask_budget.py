"""Rows whose masks cost much have turns; nobody else waits for them, and all come to an end."""

from __future__ import annotations

import pytest
from model_engine import COSTLY, UNITS
from test_scheduler_core import Pipeline, pipeline

from pipeinfer.messages import Plan
from pipeinfer.scheduler.queue import UNITS_PER_COSTLY_STEP, UNITS_PER_STEP
from pipeinfer.wire import unpack

GRAMMAR = COSTLY.regex


def composed(p: Pipeline) -> list[tuple[int, int, int]]:
    """(costly rows that sample, other rows, others that run) of each plan from now on."""
    found: list[tuple[int, int, int]] = []
    apply = p.engine.receive

    def receive(message) -> None:
        before = {n: len(slot.tokens) for n, slot in p.engine.slots.items()}
        apply(message)
        if isinstance(message, Plan):
            slots = p.engine.slots
            costly = {n for n, s in slots.items() if s.admit.params.structured_outputs == COSTLY}
            rows = unpack(message.slots).tolist()
            sampled = [n for n in rows if n in costly and len(slots[n].tokens) > before.get(n, 1)]
            free = [n for n in slots if n not in costly]
            found.append((len(sampled), sum(n in free for n in rows), len(free)))

    p.engine.receive = receive
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nobody_waits_for_rows_whose_masks_cost_much(depth):
    p = pipeline(depth=depth, pages=400, budget=64, slots=8)
    for n in range(4):
        p.submit([n, 2, 3], 150, 150)
    while not p.engine.slots or any(s.computed < s.known for s in p.engine.slots.values()):
        p.deliver()
    plans = composed(p)
    for n in range(4):
        p.submit([n, 7, 3], 20, 20, grammar=GRAMMAR)
    p.settle()
    beside = [plan for plan in plans if plan[2] == 4]
    assert len(beside) > 50 and all(rows == 4 for _, rows, _ in beside)
    spent = sum(costly for costly, _, _ in beside) * UNITS
    first = 4 * UNITS * depth  # of whom nothing was known
    assert spent <= first + (len(beside) + 1) * UNITS_PER_STEP


def test_costly_rows_among_themselves_take_as_much_as_a_step_may_last():
    p = pipeline(pages=400, budget=64, slots=8)
    plans = composed(p)
    for n in range(8):
        p.submit([n, 2, 3], 30, 30, grammar=GRAMMAR)
    p.settle()
    counts = [costly for costly, _, _ in plans]
    assert max(counts[8:]) <= UNITS_PER_COSTLY_STEP // UNITS + 1
    assert sum(counts) == 8 * 30


def test_turns_are_fair():
    p = pipeline(pages=400, budget=64, slots=8)
    p.submit([1, 2, 3], 400, 400)
    for n in range(6):
        p.submit([n, 5, 3], 60, 60, grammar=GRAMMAR)
    while len(p.clients["r0"].outputs) < 200:
        p.deliver()
    lengths = [len(p.clients[f"r{n}"].outputs) for n in range(1, 7)]
    assert min(lengths) > 4 and max(lengths) <= min(lengths) * 2 + 4
    p.settle()


def test_new_requests_of_a_grammar_that_is_known_to_cost_begin_one_after_the_other():
    """Else who asks for one token each time would pay nothing."""
    p = pipeline(pages=400, budget=64, slots=8)
    p.submit([1, 2, 3], 300, 300)
    p.submit([2, 2, 3], 3, 3, grammar=GRAMMAR)
    while p.clients["r1"].finish is None:
        p.deliver()
    plans = composed(p)
    for n in range(80):
        p.submit([n, 9, 3], 1, 1, grammar=GRAMMAR)
    while len(p.clients["r0"].outputs) < 250:
        p.deliver()
    began = sum(costly for costly, _, _ in plans)
    assert 10 < began <= 1 + len(plans) * UNITS_PER_STEP / UNITS + 1
    assert p.core.stats()["preparing"] > 0
    p.settle()
