"""Which all-reduce a message gets: by its bytes and the ranks alone, so that all ranks agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.distributed.custom_all_reduce import (
    MOST_BYTES,
    ONE_SHOT,
    TWO_SHOTS,
    algorithm,
)

ROW = 10_240  # bytes of a row of 5,120 bfloat16


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (1, 2, "one-shot"),
        (1, 4, "one-shot"),
        (256, 4, "two-shot"),
        (8192, 4, "library"),
        (0, 4, "library"),
        (1, 3, "library"),
    ],
)
def test_few_bytes_go_in_one_shot_more_in_two_and_many_through_the_library(rows, ranks, expected):
    assert algorithm(rows * ROW, ranks) == expected


@pytest.mark.parametrize("ranks", sorted(ONE_SHOT))
def test_messages_that_the_kernels_cannot_load_whole_are_the_librarys(ranks):
    assert algorithm(24, ranks) == "library"
    assert algorithm(MOST_BYTES + 16 * ranks, ranks) == "library"
    largest, least = ONE_SHOT[ranks], TWO_SHOTS[ranks]
    assert algorithm(largest, ranks) == "one-shot"
    for nbytes in range(largest + 16, largest + 1024, 16):
        split = nbytes >= least and nbytes % (16 * ranks) == 0
        assert algorithm(nbytes, ranks) == ("two-shot" if split else "library")
    for nbytes in range(max(least, largest + 16), least + 1024, 16):
        split = nbytes % (16 * ranks) == 0
        assert algorithm(nbytes, ranks) == ("two-shot" if split else "library")


def test_all_ranks_do_without_what_one_of_them_cannot_do_or_finds_wrong(short_path):
    command = [sys.executable, str(Path(__file__).with_name("ways_rank_process.py"))]
    processes = [
        subprocess.Popen(
            [*command, f"ipc://{short_path}/rank-0", str(rank)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        logs = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], logs
    assert "apart: another rank cannot do otherwise\n" in logs[0]
    assert "apart: no access to the other's memory\n" in logs[1], "the reason is one line"
    assert all("differs from NCCL's" in text for text in logs)
