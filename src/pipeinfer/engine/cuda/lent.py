"""Tensors over memory of a GPU that they do not keep.

What a CUDA graph leaves behind is read before another graph runs. If each kept it, hundreds of
graphs would hold logits of some hundred MB each. Knows addresses; no graph.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

WORDS = {1: "|i1", 2: "<i2", 4: "<i4"}  # by bytes: bfloat16 has no name there


def place(tensor: torch.Tensor) -> dict[str, object]:
    """Where its numbers are, as integers of their size. Source:
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    size = tensor.itemsize
    return {
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": WORDS[size],
        "data": (tensor.data_ptr(), False),
        "version": 2,
    }


class _Lent:
    """What torch makes a tensor of; it keeps nothing but this."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = place(tensor)


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the same place on a GPU, until that is given to others; `tensor` itself
    where torch makes no such view."""
    if not tensor.numel() or tensor.itemsize not in WORDS:
        return tensor
    try:
        found = torch.as_tensor(_Lent(tensor), device=tensor.device).view(tensor.dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        log.warning("CUDA graphs keep more memory than they need: %s", error)
        return tensor
    return found if found.data_ptr() == tensor.data_ptr() else tensor
