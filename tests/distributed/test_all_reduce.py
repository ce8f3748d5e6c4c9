"""Which all-reduce a message gets, by its bytes and the ranks alone, so that all ranks
agree; and the kernel that also adds the residual and norms."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeinfer.collectives import (
    ARRIVALS_OFFSET,
    FUSED_ONE_SHOT_MAX_BYTES,
    MAX_MESSAGE_BYTES,
    ONE_SHOT_MAX_BYTES,
    TWO_SHOT_MIN_BYTES,
    AllReduceNorm,
    choose_algorithm,
    choose_shots,
    region_bytes,
)

ROW = 10_240  # bytes of a row of 5,120 bfloat16
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (1, 2, "one-shot"),
        (1, 4, "one-shot"),
        (256, 4, "two-shot"),
        (8192, 4, "nccl"),
        (0, 4, "nccl"),
        (1, 3, "nccl"),
    ],
)
def test_few_bytes_go_in_one_shot_more_in_two_and_many_through_nccl(rows, ranks, expected):
    assert choose_algorithm(rows * ROW, ranks) == expected


@pytest.mark.parametrize("ranks", sorted(ONE_SHOT_MAX_BYTES))
def test_messages_that_the_kernels_cannot_load_whole_are_nccls(ranks):
    assert choose_algorithm(24, ranks) == "nccl"
    assert choose_algorithm(MAX_MESSAGE_BYTES + 16 * ranks, ranks) == "nccl"
    largest, least = ONE_SHOT_MAX_BYTES[ranks], TWO_SHOT_MIN_BYTES[ranks]
    assert choose_algorithm(largest, ranks) == "one-shot"
    for nbytes in range(largest + 16, largest + 1024, 16):
        split = nbytes >= least and nbytes % (16 * ranks) == 0
        assert choose_algorithm(nbytes, ranks) == ("two-shot" if split else "nccl")
    for nbytes in range(max(least, largest + 16), least + 1024, 16):
        split = nbytes % (16 * ranks) == 0
        assert choose_algorithm(nbytes, ranks) == ("two-shot" if split else "nccl")


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
def test_few_rows_go_in_one_shot_more_in_two_and_many_to_nccl(rows, ranks, expected):
    assert choose_shots(rows, ROW, ranks) == expected


@pytest.mark.parametrize("ranks", sorted(FUSED_ONE_SHOT_MAX_BYTES))
def test_rows_that_do_not_begin_where_the_kernel_loads_are_nccls(ranks):
    assert choose_shots(1, 24, ranks) == 0
    assert choose_shots(MAX_MESSAGE_BYTES // ROW, ROW, ranks) > 0
    assert choose_shots(MAX_MESSAGE_BYTES // ROW + 1, ROW, ranks) == 0


def test_two_calls_in_a_row_never_share_a_buffer():
    region = torch.zeros(region_bytes(), dtype=torch.uint8)
    fusion = AllReduceNorm(region, (region.data_ptr(), region.data_ptr()), 0, torch.bfloat16)
    first = fusion.buffer(4, 64)
    assert first is not None
    with pytest.raises(RuntimeError, match="buffer whose turn"):
        fusion.add_norm(torch.empty(4, 64), torch.empty(4, 64), torch.empty(64), 1e-6)
    second = fusion.buffer(4, 64)
    assert second is not None
    assert second.data_ptr() - first.data_ptr() == MAX_MESSAGE_BYTES
    assert second.data_ptr() + MAX_MESSAGE_BYTES <= region.data_ptr() + ARRIVALS_OFFSET
    assert fusion.buffer(1, 20) is None, "rows of 40 bytes"


def test_ranks_of_any_pace_wait_for_each_other_and_never_read_what_is_of_another_call(tmp_path):
    """Real processes over real shared memory, in the interpreter; some dawdle, others run ahead."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "norm_rank_process.py"), str(tmp_path)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wrong = process.communicate(timeout=400)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, wrong
