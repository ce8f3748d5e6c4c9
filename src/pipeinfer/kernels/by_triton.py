"""The Kernels of GPUs, see interface.py. Needs triton.

Knows which number a kernel wants under which name; no request and no model.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels import gumbel, offers
from pipeinfer.kernels.edits import apply_logit_bias
from pipeinfer.kernels.expand import prepare_inputs, scatter_words
from pipeinfer.kernels.interface import SamplingTensors
from pipeinfer.kernels.masks import apply_token_bitmask
from pipeinfer.kernels.scores import local_topk, logit_keys, logprobs, merge_topk

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
    return gumbel.sample(
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
    return offers.local_argmax(
        logits, sampling["temperature"], sampling["seed"], sampling["sample_positions"], first_id
    )


def global_argmax(
    made: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    return offers.global_argmax(made, sampling["temperature"], last_token, sampling["write_slots"])
