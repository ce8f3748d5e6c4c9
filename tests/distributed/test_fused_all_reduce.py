"""Sums over ranks that are made, added to the residual and normed in one: who does it, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeinfer.distributed.fused_all_reduce import (
    ARRIVALS,
    MOST_BYTES,
    ONE_SHOT,
    REGION_BYTES,
    AllReduceNorm,
    shots,
)

ROW = 10_240  # bytes of a row of 5,120 bfloat16
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (1, 2, 1),
        (256, 2, 1),
        (24, 4, 1),
        (32, 4, 2),
        (256, 4, 2),
        (8192, 4, 0),
        (0, 4, 0),
        (1, 3, 0),
    ],
)
def test_few_rows_go_in_one_shot_more_in_two_and_many_to_the_library(rows, ranks, expected):
    assert shots(rows, ROW, ranks) == expected


@pytest.mark.parametrize("ranks", sorted(ONE_SHOT))
def test_rows_that_do_not_begin_where_the_kernel_loads_are_the_librarys(ranks):
    assert shots(1, 24, ranks) == 0
    assert shots(MOST_BYTES // ROW, ROW, ranks) > 0
    assert shots(MOST_BYTES // ROW + 1, ROW, ranks) == 0


def test_two_calls_in_a_row_never_share_a_buffer():
    region = torch.zeros(REGION_BYTES, dtype=torch.uint8)
    fusion = AllReduceNorm(region, (region.data_ptr(), region.data_ptr()), 0, torch.bfloat16)
    first = fusion.buffer(4, 64)
    assert first is not None
    with pytest.raises(RuntimeError, match="buffer whose turn"):
        fusion.add_norm(torch.empty(4, 64), torch.empty(4, 64), torch.empty(64), 1e-6)
    second = fusion.buffer(4, 64)
    assert second is not None
    assert second.data_ptr() - first.data_ptr() == MOST_BYTES
    assert second.data_ptr() + MOST_BYTES <= region.data_ptr() + ARRIVALS
    assert fusion.buffer(1, 20) is None, "rows of 40 bytes"


@pytest.mark.parametrize(("ranks", "calls"), [(2, 20), (4, 8)])
def test_ranks_of_any_pace_wait_for_each_other_and_never_read_what_is_of_another_call(
    ranks, calls, tmp_path
):
    """Real processes over real shared memory, in the interpreter; some dawdle, others run ahead."""
    command = [sys.executable, str(HERE / "norm_rank_process.py"), str(tmp_path)]
    process = subprocess.Popen(
        [*command, str(ranks), str(calls)], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wrong = process.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, wrong
