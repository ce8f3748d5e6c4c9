"""Whether a kernel may start while the one before it still ends ("programmatic dependent launch").

Saves the time between two short kernels of a graph. Knows devices only. Source: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import lru_cache

import torch

FIRST_CAPABILITY = (9, 0)  # Hopper


@lru_cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Further arguments of a launch on `device`: EARLY, for a kernel that then waits by itself, and
    on GPUs that can, Triton's own option.
    """
    cuda = device.type == "cuda"
    if cuda and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
