"""NumPy arrays as tensors: the one place where torch's stubs leave an argument without a type.

Knows no step and no device.
"""

from __future__ import annotations

import numpy as np
import torch


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """On the CPU, of the same shape and dtype, in the same memory."""
    return torch.from_numpy(array)
