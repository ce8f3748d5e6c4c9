"""Which all-reduce a message gets: by its bytes and the ranks alone, so that all ranks agree."""

from __future__ import annotations

import pytest

from pipeinfer.distributed.custom_all_reduce import MOST_BYTES, ONE_SHOT, algorithm

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
    largest = ONE_SHOT[ranks]
    assert algorithm(largest, ranks) == "one-shot"
    for nbytes in range(largest + 16, min(largest + 1024, MOST_BYTES), 16):
        split = nbytes % (16 * ranks) == 0
        assert algorithm(nbytes, ranks) == ("two-shot" if split else "library")
