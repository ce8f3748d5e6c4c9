"""Tensors on the CPU: of NumPy arrays, and of memory that nobody has written.

Knows no step and no device.
"""

from __future__ import annotations

import mmap
from math import prod

import numpy as np
import torch


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """On the CPU, of the same shape and dtype, in the same memory. The one place where torch's
    stubs leave an argument without a type."""
    return torch.from_numpy(array)


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of any size; on the CPU they take memory only where they are written.

    torch.zeros writes every byte (1.5 s for 1 GiB), and NumPy's zeros are written too where the C
    library has some megabytes to reuse; pages that the kernel maps are zero without being written.
    """
    count = prod(size) * dtype.itemsize
    if device.type != "cpu" or not count:
        return torch.zeros(size, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return tensor_of(np.frombuffer(mapped, np.uint8)).view(dtype).view(size)
