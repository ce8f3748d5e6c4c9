"""CUDA graphs of one device use the same memory for what they leave behind."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.engine.machine import CudaDevice, non_owning_view

pytestmark = pytest.mark.gpu

GRAPHS, ROWS, SIZE = 6, 4096, 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_view_that_does_not_own_is_the_same_numbers_in_the_same_place(dtype):
    whole = torch.arange(24, device="cuda").reshape(4, 6).to(dtype)
    for tensor in (whole, whole[1:, ::2], whole[:0]):
        view = non_owning_view(tensor)
        assert view.data_ptr() == tensor.data_ptr() and view.stride() == tensor.stride()
        assert view.dtype == dtype and view.device == tensor.device and torch.equal(view, tensor)
    assert non_owning_view(whole) is not whole


def test_graphs_leave_their_results_in_one_place_and_each_its_own():
    device = CudaDevice(torch.device("cuda", 0))
    source = torch.randn(ROWS, SIZE, device="cuda")
    before, made = torch.cuda.memory_allocated(), []

    def capture():
        for number in range(GRAPHS):
            made.append(device.capture(lambda number=number: (source * number,)))

    device.run(capture)
    assert torch.cuda.memory_allocated() - before < 2 * source.nbytes
    for number in (*range(GRAPHS), 0):
        device.run(made[number].run)
        assert torch.equal(made[number].tensors[0], source * number)
