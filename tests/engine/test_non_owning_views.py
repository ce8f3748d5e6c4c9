"""What is said of memory that a view does not own, read by NumPy as torch reads it on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeinfer.engine.cuda import array_interface, non_owning_view

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Told:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = array_interface(tensor) | {"version": 3}  # NumPy's name for it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("part", [np.s_[:], np.s_[1:, ::2], np.s_[2], np.s_[:, 3:]])
def test_a_place_is_that_of_the_numbers(dtype, part):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)[part]
    seen, bits = np.asarray(Told(tensor)), tensor.view(INTEGERS[tensor.itemsize])
    assert np.array_equal(seen, bits.numpy())
    tensor[..., -1] = 7
    assert np.array_equal(seen, bits.numpy()), "it is the same memory"


def test_where_torch_makes_no_view_the_tensor_is_kept_and_that_is_said(caplog):
    tensor = torch.ones(3)
    assert non_owning_view(tensor) is tensor
    assert "keep more memory" in caplog.text
    caplog.clear()
    for small in (torch.ones(3, dtype=torch.int64), torch.ones(0)):
        assert non_owning_view(small) is small
    assert not caplog.text
