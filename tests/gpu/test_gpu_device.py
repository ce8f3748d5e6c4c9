"""CUDA graphs of one device use the same memory for what they leave behind."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.engine.cuda.device import CudaDevice
from pipeinfer.engine.cuda.lent import lent

pytestmark = pytest.mark.gpu

GRAPHS, ROWS, SIZE = 6, 4096, 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_lent_tensor_is_the_same_numbers_in_the_same_place(dtype):
    whole = torch.arange(24, device="cuda").reshape(4, 6).to(dtype)
    for tensor in (whole, whole[1:, ::2], whole[:0]):
        view = lent(tensor)
        assert view.data_ptr() == tensor.data_ptr() and view.stride() == tensor.stride()
        assert view.dtype == dtype and view.device == tensor.device and torch.equal(view, tensor)
    assert lent(whole) is not whole


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
        device.run(made[number].again)
        assert torch.equal(made[number].tensors[0], source * number)


def test_what_a_body_makes_once_is_not_made_by_replays():
    device = CudaDevice(torch.device("cuda", 0))
    source = torch.ones(ROWS, device="cuda")
    counts: dict[int, torch.Tensor] = {}
    made = []

    def body(size):
        if size not in counts:
            counts[size] = torch.zeros(size, device="cuda")
        counts[size].add_(source[:size])
        return (source[:size] * 2,)

    def capture():
        for size in (ROWS, ROWS // 2, ROWS // 4):  # the first is tried before
            made.append(device.capture(lambda size=size: body(size)))

    device.run(capture)
    for size, replay in zip(counts, made, strict=True):
        before = counts[size].clone()
        for _ in range(3):
            device.run(replay.again)
        assert torch.equal(counts[size], before + 3), size
        assert torch.equal(replay.tensors[0], torch.full_like(source[:size], 2))


def test_a_capture_that_fails_at_a_first_call_is_made_after_it():
    device = CudaDevice(torch.device("cuda", 0))
    source = torch.ones(ROWS, device="cuda")
    met: set[int] = set()
    made = []

    def body(size):
        if size not in met:
            met.add(size)
            if len(met) > 1:
                torch.cuda.synchronize()  # which nobody may while a stream is captured
        return (source[:size] * 2,)

    def capture():
        for size in (ROWS, ROWS // 2, ROWS // 4):
            made.append(device.capture(lambda size=size: body(size)))

    device.run(capture)
    for replay in made:
        device.run(replay.again)
        assert torch.equal(replay.tensors[0], torch.full_like(replay.tensors[0], 2))
