"""The Kernels of GPUs, see interface.py: hands each its tensors. Needs triton.

Knows no request and no model.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels import sampling as sampling_kernels
from pipeinfer.kernels.interface import SamplingTensors
from pipeinfer.kernels.logits import (
    apply_logit_bias,
    apply_token_bitmask,
    local_topk,
    logit_keys,
    logprobs,
    merge_topk,
)
from pipeinfer.kernels.prepare_inputs import prepare_inputs, scatter_words

__all__ = [
    "apply_logit_bias",
    "apply_token_bitmask",
    "global_argmax",
    "local_argmax",
    "local_topk",
    "logit_keys",
    "logprobs",
    "merge_topk",
    "prepare_inputs",
    "sample",
    "scatter_words",
]


def sample(
    logits: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, truncate: bool
) -> torch.Tensor:
    """See interface.py, here and below."""
    return sampling_kernels.sample(
        logits,
        sampling["temperature"],
        sampling["top_k"],
        sampling["top_p"],
        sampling["min_p"],
        sampling["seed"],
        sampling["sample_positions"],
        truncate=truncate,
        last_token=last_token,
        slots=sampling["write_slots"],
    )


def local_argmax(logits: torch.Tensor, sampling: SamplingTensors, first_id: int) -> torch.Tensor:
    return sampling_kernels.local_argmax(
        logits, sampling["temperature"], sampling["seed"], sampling["sample_positions"], first_id
    )


def global_argmax(
    candidates: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    return sampling_kernels.global_argmax(
        candidates, sampling["temperature"], last_token, sampling["write_slots"]
    )
