"""DeviceSteps by hand, for tests; import it as `from device_steps import device_step`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import torch

from pipeinfer.kernels.interface import DeviceStep, StepShape

OPTIONAL = ("prefix_leaders", "prefix_ranks")


def device_step(shape: StepShape, padded: bool = False, **views: Any) -> DeviceStep:
    """With these views; all others are empty."""
    empty = torch.empty(0, dtype=torch.int32)
    every = {
        field.name: None if field.name in OPTIONAL else empty
        for field in fields(DeviceStep)
        if field.default is MISSING
    }
    return DeviceStep(**every | {"sampling": {}} | views | {"shape": shape, "padded": padded})
