"""The Kernels of GPUs, see interface.py. Needs triton.

Knows which number a kernel wants under which name; no request and no model.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels import gumbel, offers
from pipeinfer.kernels.edits import edit
from pipeinfer.kernels.expand import expand, write_words
from pipeinfer.kernels.interface import SamplingTensors
from pipeinfer.kernels.masks import mask
from pipeinfer.kernels.scores import own_keys, scores, survey, tell

__all__ = [
    "choose",
    "edit",
    "expand",
    "mask",
    "offer",
    "own_keys",
    "sample",
    "scores",
    "survey",
    "tell",
    "write_words",
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


def offer(logits: torch.Tensor, sampling: SamplingTensors, first_id: int) -> torch.Tensor:
    return offers.offer(
        logits, sampling["temperature"], sampling["seed"], sampling["sample_positions"], first_id
    )


def choose(made: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor) -> torch.Tensor:
    return offers.choose(made, sampling["temperature"], last_token, sampling["write_slots"])
