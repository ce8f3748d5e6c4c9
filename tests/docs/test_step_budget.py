"""The worked example of docs/step-budget.md is what the scheduler's rule decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeinfer.settings import Settings
from pipeinfer.step_cost import PER_SECOND, Prompt, Targets, prefill_budget
from simulate import step_model

PAGE = (Path(__file__).parents[2] / "docs/step-budget.md").read_text()
EXAMPLE = PAGE.split("## A worked example")[1].split("\n## ")[0]
ROWS, CONTEXT, LENGTH = 64, 64_000, 4_000
MS = PER_SECOND / 1e3
COST = step_model.step_cost(step_model.load("qwen3-0.6b-h200"), 8192)


def numbers(line: str) -> list[list[float]]:
    """Of each cell of a table's row."""
    cells = line.removeprefix("|").removesuffix("|").split("|")
    found = [re.findall(r"-?[\d,]*\d(?:\.\d+)?", cell) for cell in cells]
    return [[float(number.replace(",", "")) for number in cell] for cell in found]


def rows(heading: str) -> list[list[list[float]]]:
    table = EXAMPLE[EXAMPLE.index(heading) :].split("\n\n")[0]
    return [numbers(line) for line in table.splitlines()[2:]]


def test_the_table_says_what_steps_take_and_bring():
    table = rows("| n | step(n)")
    assert len(table) > 5
    measured = {tokens: time for tokens, time, _ in COST.mixed}
    expected = dict(COST.mixed_steps(ROWS, CONTEXT, [Prompt(LENGTH)] * 48))
    worth = 0.75 * min(time / tokens for tokens, time in measured.items() if tokens <= 1024)
    for [[n], [alone], [takes], [rate], gain] in table:
        assert alone == pytest.approx(measured[n] / MS, abs=0.001)
        assert takes == pytest.approx(expected[n] / MS, abs=0.01)
        assert rate == pytest.approx(PER_SECOND * (n - ROWS) / expected[n], abs=500)
        if gain:
            said = (worth * (n - ROWS) - (measured[n] - COST.decode_time(ROWS))) / MS
            assert gain == [pytest.approx(said, abs=0.001)]


def test_steps_get_the_prompt_tokens_that_the_example_says():
    targets = Targets(Settings().itl_target, Settings().ttft_target)
    budget = prefill_budget(0, 8192, COST, targets)
    table = rows("| prompts that came just now")
    assert [int(row[0][0]) for row in table] == [1, 30, 48]
    for [[prompts], _pace, _enough, given, [takes]] in table:
        waiting = [Prompt(LENGTH)] * int(prompts)
        assert budget.prompt_tokens(ROWS, CONTEXT, waiting) == given[-1]
        time = dict(COST.mixed_steps(ROWS, CONTEXT, waiting))[given[-1] + ROWS]
        assert takes == pytest.approx(time / MS, abs=0.05)
