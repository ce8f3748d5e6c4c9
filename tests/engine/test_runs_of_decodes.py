"""Plans that decode the same rows again take a short way through memory, step and packing; all of
it must be what the long way gives. Needs no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.engine.cuda.decode_packing import MOST_GROWING
from pipeinfer.engine.cuda.graphs import DecodeGraphs, Frame
from pipeinfer.engine.requests import RequestTable
from pipeinfer.engine.step_builder import StepBuilder
from pipeinfer.memory.errors import ProtocolError
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import Admit, Plan, Release, pack
from pipeinfer.params import SamplingParams

SLOTS, LIMIT = 40, 64


class Side:
    """Memory, steps and packed words of one way; `short` lets it take the short one."""

    def __init__(self, pages: int, page_size: int, short: bool, table: bool = False) -> None:
        self.memory = MemoryManager(pages, page_size, SLOTS, LIMIT)
        self.requests = RequestTable(SLOTS)
        self.builder = StepBuilder(self.memory, self.requests)
        frame = Frame(-(-LIMIT // page_size), page_size, table, SLOTS, torch.device("cpu"))
        self.graphs = DecodeGraphs((SLOTS,), frame)
        self.short = short
        self.shortcuts = 0

    def run(self, plan: Plan) -> dict[str, object]:
        """Everything that comes out of a plan, as plain values."""
        if not self.short:
            self.memory._run = None
        applied = self.memory.apply(plan)
        self.memory.check_integrity()
        for admit in plan.admits:
            self.requests.put(admit)
        step, sampled = self.builder.build(1, applied)
        assert self.short or step.growth is None
        self.shortcuts += step.growth is not None
        found: dict[str, object] = {f"applied.{k}": v for k, v in vars(applied).items()}
        del found["applied.rows"]
        found |= {f"rows.{k}": v for k, v in vars(applied.rows).items() if k != "growth"}
        found |= {f"step.{k}": v for k, v in vars(step).items() if k not in ("growth", "sampling")}
        of_sampling = vars(step.sampling)
        found |= {f"sampling.{k}": v for k, v in of_sampling.items() if k != "fields"}
        found |= {f"fields.{k}": v for k, v in step.sampling.fields.items()}
        found["sampled"] = sampled
        if len(step.slots) and step.decodes == len(step.slots):
            found |= self.packed(step)
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}

    def packed(self, step) -> dict[str, object]:
        layout = self.graphs.layout(SLOTS)
        buffer = np.full(layout.words, -7, dtype=np.int32)
        words, places, restricted = self.graphs.pack(step, SLOTS, buffer)
        assert (buffer[words:] == -7).all(), "what is not said to be of use is not written"
        views = layout.host(buffer)
        # What no kernel reads in a step that only decodes, or where pages are in a table.
        table = len(views["table"]) > 0
        unread = ("last", "prefill_indptr", *(("kv_indptr", "indices") if table else ()))
        found: dict[str, object] = {"places": places, "restricted": restricted}
        for name, view in views.items():
            if name == "indices":
                view = view[: views["kv_indptr"][-1]]
            if name == "table":  # beyond a row's pages anything may stand
                held = (views["lengths"] - 1) // self.memory.page_size + 1
                rows = view.reshape(SLOTS, -1)
                view = [row[:n].tolist() for row, n in zip(rows, held, strict=True)]
            if name not in unread:
                found[f"packed.{name}"] = view
        return found


def admit(slot: int, prompt: int, limit: int, seed: int, min_tokens: int = 0, top_k: int = 0):
    params = SamplingParams(temperature=0.5, top_k=top_k, min_tokens=min_tokens)
    ids = pack([seed % 7] * prompt)
    suppress = (3, 5) if min_tokens else ()
    return Admit(slot, f"r{slot}", ids, prompt, limit, params, seed, suppress)


def admissions(draw, slots: list[int]):
    for slot in slots:
        prompt = draw(st.integers(1, 20))
        limit = draw(st.integers(prompt + 1, LIMIT))
        minimum, top_k = draw(st.sampled_from([(0, 0), (0, 0), (4, 0), (0, 3)]))
        yield admit(slot, prompt, limit, draw(st.integers(0, 99)), minimum, top_k)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 4, 16]), st.booleans())
def test_a_run_of_decodes_is_what_single_plans_are(data, page_size, table):
    pages = 1 + 8 * -(-LIMIT // page_size) - data.draw(st.integers(0, 12), "missing pages")
    sides = [Side(pages, page_size, short, table) for short in (True, False)]
    live, number = [], 0
    for _ in range(data.draw(st.integers(1, 4), "rounds")):
        leaving = [slot for slot in live if data.draw(st.booleans(), f"release {slot}")]
        live = [slot for slot in live if slot not in leaving]
        fresh = [s for s in range(6) if s not in live and data.draw(st.booleans(), f"admit {s}")]
        arrivals = tuple(admissions(data.draw, fresh))
        live += fresh
        rows = data.draw(st.permutations(live), "order")
        releases = tuple(Release(slot, False, b"") for slot in leaving)
        for turn in range(data.draw(st.integers(1, 12), "plans")):
            first = turn == 0
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


def test_many_rows_that_begin_a_page_at_once_are_packed_right():
    sides = [Side(400, 4, short) for short in (True, False)]
    rows = list(range(MOST_GROWING + 4))
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
