"""Logits that are no numbers, on a GPU: the row that has them is told, and no other row changes.

In decode graphs, mixed graphs and steps without a graph, on every backend. Rows are compared with
the same step, of the same shape, without the NaN: their ids must be equal to the last one.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cuda_parity import BACKENDS, again, cores

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from single_steps import Row, build_step

from pipeinfer.engine.graphs import Graphs
from pipeinfer.params import RequestParams
from step_pages import pages_of

pytestmark = pytest.mark.gpu

POISON = 1000
PAGE, WIDTH, ROWS = 64, 4, 8
NUMBERS = itertools.count(1000)
NAN = float("nan")
# Of each row that computes a prompt: its start, and how many tokens of it.
PROMPTS = {"decodes": {}, "mixed": {5: (64, 40), 6: (0, 90), 7: (130, 20)}}


def step_of(kind: str):
    """Eight rows, all of which sample: greedy, by temperature, and restricted."""
    rows = []
    for slot in range(ROWS):
        start, count = PROMPTS[kind].get(slot, (70 + 9 * slot, 1))
        pages = np.arange(1 + WIDTH * slot, 1 + WIDTH * (slot + 1))
        tokens = [(31 * slot + 7 * at) % 900 for at in range(count)]
        rows.append(Row(slot, start, tokens, pages, True, 0.8 * (slot % 2), slot))
    step = build_step(rows, next(NUMBERS), WIDTH)
    top_k = np.array([0, 0, 0, 9, 0, 0, 0, 5], np.int32)
    top_p = np.array([1, 1, 1, 1, 1, 0.9, 1, 1], np.float32)
    fields = {**step.fields, "top_k": top_k, "top_p": top_p}
    delta = replace(step.delta, admitted=step.slots, fields=fields)  # of every slot, once for all
    return replace(step, fields=fields, delta=delta)


def fill(pool, step, rest: float = 0.0, dummy: float = 0.0) -> None:
    """What the rows have computed before the step; `rest`: all that no row has written."""
    owned = np.zeros((pool.num_pages, PAGE), dtype=bool)
    for pages, start in zip(pages_of(step, PAGE), step.starts, strict=True):
        at = np.arange(start)
        owned[pages[at // PAGE], at % PAGE] = True
    mine = torch.from_numpy(owned).to(pool.device)
    for number, part in enumerate((*pool.k, *pool.v)):
        generator = torch.Generator(pool.device).manual_seed(number)
        part.normal_(0.0, 0.5, generator=generator)
        part[~mine] = rest
        part[0] = dummy
    if pool.device.type == "cuda":
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request, gpu_checkpoints):
    folder = gpu_checkpoints("Qwen3ForCausalLM", poison=POISON)
    return folder, cores(folder, attention=request.param)


@pytest.fixture(params=["graphs", "no graphs"])
def runner(request, engine):
    runner = engine[1].loaded.runner
    graphs = runner._graphs
    if request.param == "no graphs":
        runner._graphs = Graphs(runner.device)
    yield runner
    runner._graphs = graphs


def uses_graph(runner, step) -> bool:
    return runner._graphs.fitting(step) is not None


@pytest.mark.parametrize(
    ("kind", "slot"), [("decodes", 3), ("decodes", 0), ("mixed", 3), ("mixed", 5)]
)
@pytest.mark.parametrize("part", ["k", "v"])
def test_one_row_of_a_step_is_bad_and_the_others_sample_what_they_would(runner, kind, slot, part):
    step = step_of(kind)
    if kind == "decodes":
        assert uses_graph(runner, step) == bool(runner.graph_sizes)
    fill(runner.pool, step)
    clean = runner.run(step)
    assert clean.bad.tolist() == []
    step = replace(step, number=next(NUMBERS))
    fill(runner.pool, step)
    getattr(runner.pool, part)[0][1 + WIDTH * slot, 11] = NAN
    torch.cuda.synchronize()
    found = runner.run(step)
    row = step.slots.tolist().index(slot)
    assert found.bad.tolist() == [row]
    assert found.num_sampled.tolist() == [int(other != row) for other in range(ROWS)]
    assert found.ids.tolist() == np.delete(clean.ids, row).tolist()
    left = np.insert(found.ids, row, 0)  # for the next step, of which a bad row may still be part
    assert runner._state.by_slot.last_token[:ROWS].tolist() == left[np.argsort(step.slots)].tolist()


@pytest.mark.parametrize("where", ["behind the rows' ends", "in the dummy page"])
@pytest.mark.parametrize("kind", ["decodes", "mixed"])
def test_what_nobody_owns_may_be_nan(engine, runner, kind, where):
    """A page is reused, and its last tokens are not written yet; padding rows store somewhere.

    FlashAttention-3 multiplies that by 0 all the same: there pages are zeroed before their reuse.
    """
    attention = engine[1].settings.attention
    if attention == "fa3" or (attention == "hybrid" and kind == "mixed"):
        pytest.skip("FlashAttention-3 reads behind a row's end")
    step = step_of(kind)
    fill(runner.pool, step)
    clean = runner.run(step)
    step = replace(step, number=next(NUMBERS))
    rest, dummy = (NAN, 0.0) if where == "behind the rows' ends" else (0.0, NAN)
    fill(runner.pool, step, rest, dummy)
    found = runner.run(step)
    assert found.bad.tolist() == []
    assert found.ids.tolist() == clean.ids.tolist()
    fill(runner.pool, step)


@pytest.mark.parametrize("change", [{}, {"no_cuda_graph": True}, {"overlap_depth": 1}])
def test_requests_beside_bad_ones_get_the_tokens_that_they_get_beside_harmless_ones(engine, change):
    """Bad ones end with their first token as the others do, so that all steps are alike."""
    folder, made = engine
    graphs = made.loaded.runner._graphs
    if "no_cuda_graph" in change:
        made.loaded.runner._graphs = Graphs(made.loaded.runner.device)
    fill(made.loaded.runner.pool, step_of("decodes"))

    def outputs(middle: int):
        running = again(made, folder, **change)
        random = np.random.default_rng(5)
        for index in range(24):
            prompt = random.integers(0, 900, int(random.integers(20, 150))).tolist()
            wanted = 30
            if index % 3 == 1:
                prompt[len(prompt) // 2], wanted = middle, 1
            knobs = {"temperature": 0.8 * (index % 2), "top_k": 20 * (index % 4 == 3)}
            params = RequestParams(max_tokens=wanted, ignore_eos=True, **knobs)
            running.submit(f"r{index}", prompt, params, seed=index)
        running.run()
        return running.outputs, running.finished

    try:
        (expected, ends), (found, others) = outputs(900), outputs(POISON)
    finally:
        made.loaded.runner._graphs = graphs
    assert set(ends.values()) == {"length"}
    for index in range(24):
        name, bad = f"r{index}", index % 3 == 1
        assert others[name] == ("error" if bad else "length")
        assert found[name] == ([] if bad else expected[name]), name
