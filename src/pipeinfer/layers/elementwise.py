"""The element-wise operations between products, as a device may have them: each as one kernel.

Which device has which is chosen in fused.py. Knows no layer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NormOps:
    """alone(x, weight, eps): a new tensor. add(x, residual, weight, eps): (norm of the sum, the
    sum), where x and residual were if that is faster.
    """

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]


@dataclass(frozen=True)
class FusedOps:
    """norm: RMSNorm; offset_norm: times one plus the weight, rounded once. silu_and_multiply,
    gelu_and_multiply (by tanh): of [T, 2 n], gate first, [T, n].
    """

    norm: NormOps
    gemma_norm: NormOps
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]
