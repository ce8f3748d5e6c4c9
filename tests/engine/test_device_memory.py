"""Memory of the host: for pages, at addresses that stay, and for copies of a GPU's memory."""

from __future__ import annotations

import os

import pytest
import torch

from pipeinfer.engine.device_memory import TOUCHED_BYTES, HostMemory, touched_memory


def test_scratch_takes_any_writes_and_gives_way_to_what_was_kept():
    kept = HostMemory(5000)
    kept.array[:] = 7
    memory = HostMemory(5000, scratch=True)
    there = memory.data
    there.fill_(9)
    memory.map(os.dup(kept.descriptor))
    assert bool((there == 7).all()), "the same tensor, at the same addresses"
    there[0] = 1
    assert kept.array[0] == 1
    memory.take_back()
    assert kept.array[1] == 7, "there is memory already"


def test_scratch_is_zero_and_has_a_descriptor_once_it_is_taken_back():
    memory = HostMemory(5000, scratch=True)
    memory.data.fill_(9)
    assert memory.descriptor == -1
    memory.take_back()
    assert not memory.data.any() and os.fstat(memory.descriptor).st_size == 5000


@pytest.mark.parametrize("size", [1, 4096, TOUCHED_BYTES + 5, 3 * TOUCHED_BYTES])
def test_all_of_it_is_there_and_zero(size):
    data = touched_memory(size)
    assert (data.dtype, data.shape) == (torch.uint8, (size,))
    assert not data.any()
    data.fill_(7)
    assert bool((data == 7).all())
