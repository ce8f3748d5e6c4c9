"""Memory of the host that copies of a GPU's memory are made in."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.engine.device_memory import TOUCHED_BYTES, touched_memory


@pytest.mark.parametrize("size", [1, 4096, TOUCHED_BYTES + 5, 3 * TOUCHED_BYTES])
def test_all_of_it_is_there_and_zero(size):
    data = touched_memory(size)
    assert (data.dtype, data.shape) == (torch.uint8, (size,))
    assert not data.any()
    data.fill_(7)
    assert bool((data == 7).all())
