"""Steps say what their decodes begin with in common, where attention wants to know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeinfer.engine.graphs import StepShape
from pipeinfer.engine.step_buffers import StepPacker, layout
from pipeinfer.engine.step_builder import RequestTable, StepBuilder
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import Admit, Plan, Release
from pipeinfer.params import RequestParams
from pipeinfer.wire import pack

PAGE, LIMIT, PREFIX = 16, 600, 320
COMMON = list(range(PREFIX))


class Side:
    """Memory and steps; each call of `run` is the next plan."""

    def __init__(self, shares: bool = True) -> None:
        self.memory = MemoryManager(400, PAGE, 8, LIMIT)
        self.requests = RequestTable(8)
        self.builder = StepBuilder(self.memory, self.requests, shares)
        self.number = 0

    def run(self, rows, count=1, admits=(), releases=()):
        counts = pack([count] * len(rows))
        plan = Plan(1, self.number, releases, admits, pack(rows), counts)
        self.number += 1
        rows = self.memory.apply(plan)
        for admit in admits:
            self.requests.put(admit)
        return self.builder.build(1, rows)[0]


def admit(slot: int, ids: list[int]) -> Admit:
    return Admit(slot, f"r{slot}", pack(ids), len(ids), LIMIT, RequestParams(), 0)


def two_with_a_common_prompt(side: Side):
    """Slots 5 and 2 decode: the second found the first one's pages."""
    side.run([5], 9999, (admit(5, COMMON),))
    side.run([5])
    side.run([5])
    side.run([5, 2, 3], 9999, (admit(2, [*COMMON, 7, 7]), admit(3, [9] * 300)))
    for _ in range(3):
        step = side.run([5, 2, 3])
    return step


def test_decodes_that_read_the_same_pages_are_named():
    side = Side()
    step = two_with_a_common_prompt(side)
    pages = PREFIX // PAGE
    assert step.shared_prefixes.leaders.tolist() == [pages, pages, 0]
    assert step.shared_prefixes.ranks.tolist() == [0 << 16 | 2, 1 << 16 | 2, 0]
    rows = [side.memory.table.pages_of(slot)[:pages].tolist() for slot in (5, 2)]
    assert rows[0] == rows[1]


def test_they_are_named_anew_when_rows_come_or_go_and_only_then():
    side = Side()
    step = two_with_a_common_prompt(side)
    again = side.run([5, 2, 3])
    assert again.shared_prefixes is step.shared_prefixes
    turned = side.run([3, 2, 5])
    assert turned.shared_prefixes.leaders.tolist() == [0, 1 << 16 | 20, 1 << 16 | 20]
    alone = side.run([5, 3], releases=(Release(2, True, b""),))
    assert alone.shared_prefixes is None


def test_prompts_have_no_runs_and_attention_that_reads_row_by_row_is_told_none():
    side = Side()
    two_with_a_common_prompt(side)
    step = side.run([5, 4, 2], 9999, (admit(4, [*COMMON, 1, 2, 3]),))
    assert step.num_decodes == 2 and step.shared_prefixes.leaders.tolist() == [20, 20]
    assert two_with_a_common_prompt(Side(shares=False)).shared_prefixes is None


@pytest.mark.parametrize("room", [StepShape(3, 3, 0), StepShape(8, 8, 0), StepShape(64, 8, 8)])
def test_words_of_a_step_have_its_runs_and_no_others(room):
    side = Side()
    step = two_with_a_common_prompt(side)
    if room.num_prefills:
        step = side.run([5, 4, 2], 9999, (admit(4, [*COMMON, 1, 2, 3]),))
    packer = StepPacker(np.full(400, 77, dtype=np.int32), 8)
    at = layout(room)
    for runs in (step.shared_prefixes, None):
        alone = replace(step, shared_prefixes=None) if runs is None else step
        packer.pack(alone, room, 3, np.zeros(0, dtype=np.int32))
        for begin, values in (
            (at.leaders, [] if runs is None else runs.leaders.tolist()),
            (at.ranks, [] if runs is None else runs.ranks.tolist()),
        ):
            words = packer.words[begin : begin + room.num_rows].tolist()
            assert words == values + [0] * (room.num_rows - len(values))
