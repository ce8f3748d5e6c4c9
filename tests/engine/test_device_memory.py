"""Memory of the host: for pages, at addresses that stay, and for copies of a GPU's memory."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from pipeinfer.engine.device_memory import (
    TOUCHED_BYTES,
    HostMemory,
    SealedMemory,
    touched_memory,
)


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


def test_what_is_sealed_nobody_writes_and_everybody_reads():
    memory = SealedMemory(1 << 20)
    there = memory.data
    for number in (7, 8):  # the second time where memory was given back
        assert memory.size == 0
        memory.take_back()
        there[:5000] = number
        memory.seal(5000, b"more")
        assert memory.size == 5004 and bool((there[:5000] == number).all())
        descriptor = os.dup(memory.descriptor)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"1", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 5004)
        other = SealedMemory(5004)
        other.data.fill_(1)
        other.map(descriptor)
        assert (
            other.array[:5000].tolist() == [number] * 5000 and bytes(other.array[5000:]) == b"more"
        )
        memory.give_back()


def test_memory_that_somebody_may_write_is_not_taken_for_weights():
    with pytest.raises(RuntimeError, match="not sealed"):
        SealedMemory(5000).map(HostMemory(5000).descriptor)


@pytest.mark.parametrize("size", [1, 4096, TOUCHED_BYTES + 5, 3 * TOUCHED_BYTES])
def test_all_of_it_is_there_and_zero(size):
    data = touched_memory(size)
    assert (data.dtype, data.shape) == (torch.uint8, (size,))
    assert not data.any()
    data.fill_(7)
    assert bool((data == 7).all())
