"""Whether a kernel may start while the one before it still ends ("programmatic dependent launch").

Saves the time between two short kernels of a graph. Knows devices only. Source: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import lru_cache

import torch

FIRST_CAPABILITY = (9, 0)  # Hopper


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on `device` may be launched so."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
