"""Plans that decode the same rows again take a short way through memory and step; all of it must be
what the long way gives.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from page_mirror import PageMirror
from pipeinfer.engine.step_builder import RequestTable, StepBuilder
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.pages import ProtocolError
from pipeinfer.messages import Admit, Plan, Release
from pipeinfer.params import RequestParams
from pipeinfer.wire import pack

SLOTS, LIMIT = 40, 64
WITHIN = "fields", "logit_edits"  # of a delta: looked into


class Side:
    """Memory and steps of one way; `short` lets it take the short one."""

    def __init__(self, pages: int, page_size: int, short: bool) -> None:
        self.memory = MemoryManager(pages, page_size, SLOTS, LIMIT)
        self.requests = RequestTable(SLOTS)
        self.builder = StepBuilder(self.memory, self.requests)
        self.slots = PageMirror(SLOTS)
        self.short = short
        self.shortcuts = 0

    def run(self, plan: Plan) -> dict[str, object]:
        """Everything that comes out of a plan, as plain values."""
        if not self.short:
            self.memory._steady_decode = None
        rows = self.memory.apply(plan)
        self.memory.check_integrity()
        for admit in plan.admits:
            self.requests.put(admit)
        step, sampled = self.builder.build(1, rows)
        assert self.short or not rows.same_as_previous
        self.shortcuts += rows.same_as_previous
        found: dict[str, object] = {
            f"rows.{k}": v for k, v in vars(rows).items() if k != "same_as_previous"
        }
        found |= {f"step.{k}": v for k, v in vars(step).items() if k not in ("fields", "delta")}
        found |= {f"fields.{k}": v for k, v in step.fields.items()}
        found |= {f"delta.{k}": v for k, v in vars(step.delta).items() if k not in WITHIN}
        found |= {f"delta.fields.{k}": v for k, v in step.delta.fields.items()}
        found |= {"sampled": sampled, "edits": [self.edits(one) for one in step.delta.logit_edits]}
        self.follow(step)
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}

    def edits(self, edits) -> list[object]:
        return [edits.slot, edits.ids.tolist(), edits.values.tolist(), edits.until.tolist()]

    def follow(self, step) -> None:
        """A device that hears of changes has the pages that memory means."""
        self.slots.apply(step.delta)
        pages = self.slots.pages(step, self.memory.page_size)
        for slot, count, row in zip(step.slots, step.starts + step.counts, pages, strict=True):
            held = -(-int(count) // self.memory.page_size)
            assert row[:held].tolist() == self.memory.table.pages_of(int(slot))[:held].tolist()


def admit(slot: int, prompt: int, limit: int, seed: int, min_tokens: int = 0, top_k: int = 0):
    params = RequestParams(temperature=0.5, top_k=top_k, min_tokens=min_tokens)
    ids = pack([seed % 7] * prompt)
    suppress = (3, 5) if min_tokens else ()
    return Admit(slot, f"r{slot}", ids, prompt, limit, params, seed, suppress)


def admissions(draw, slots: list[int]):
    for slot in slots:
        prompt = draw(st.integers(1, 20))
        limit = draw(st.integers(prompt + 1, LIMIT))
        minimum, top_k = draw(st.sampled_from([(0, 0), (0, 0), (4, 0), (0, 3)]))
        yield admit(slot, prompt, limit, draw(st.integers(0, 99)), minimum, top_k)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([1, 4, 16]))
def test_a_run_of_decodes_is_what_single_plans_are(data, page_size):
    pages = 1 + 8 * -(-LIMIT // page_size) - data.draw(st.integers(0, 12), "missing pages")
    sides = [Side(pages, page_size, short) for short in (True, False)]
    live, number = [], 0
    for _ in range(data.draw(st.integers(1, 4), "rounds")):
        leaving = [slot for slot in live if data.draw(st.booleans(), f"release {slot}")]
        live = [slot for slot in live if slot not in leaving]
        fresh = [s for s in range(6) if s not in live and data.draw(st.booleans(), f"admit {s}")]
        arrivals = tuple(admissions(data.draw, fresh))
        live += fresh
        rows = data.draw(st.permutations(live), "order")
        releases = tuple(Release(slot, False, b"") for slot in leaving)
        for nth in range(data.draw(st.integers(1, 12), "plans")):
            first = nth == 0
            count = 9999 if first and data.draw(st.booleans(), "prefill") else 1
            plan = Plan(1, number, releases if first else (), arrivals if first else (),
                        pack(rows), pack([count] * len(rows)))  # fmt: skip
            number += 1
            short, long = (side.run(plan) for side in sides)
            assert short == long


def test_the_short_way_is_taken():
    side = Side(200, 4, True)
    side.run(Plan(1, 0, (), (admit(0, 5, 60, 1), admit(1, 9, 60, 2)), pack([1, 0]), pack([99, 99])))
    for number in range(1, 31):
        side.run(Plan(1, number, (), (), pack([1, 0]), pack([1, 1])))
    assert side.shortcuts == 28, "all but those after which the prompts are shared"


def test_many_rows_begin_a_page_at_once():
    sides = [Side(400, 4, short) for short in (True, False)]
    rows = list(range(20))
    admits = tuple(admit(slot, 6, 40, slot) for slot in rows)
    for number in range(20):
        counts = [99 if number == 0 else 1] * len(rows)
        plan = Plan(1, number, (), admits if number == 0 else (), pack(rows), pack(counts))
        short, long = (side.run(plan) for side in sides)
        assert short == long


@pytest.mark.parametrize("counts", [b"\1\0\0\0\1", b"\1\0\0\0" * 3])
def test_a_plan_that_makes_no_sense_is_refused_after_a_run_too(counts):
    side = Side(200, 4, True)
    side.run(Plan(1, 0, (), (admit(0, 5, 60, 1), admit(1, 9, 60, 2)), pack([1, 0]), pack([99, 99])))
    for number in (1, 2):
        side.run(Plan(1, number, (), (), pack([1, 0]), pack([1, 1])))
    with pytest.raises(ProtocolError):
        side.run(Plan(1, 3, (), (), pack([1, 0]), counts))
