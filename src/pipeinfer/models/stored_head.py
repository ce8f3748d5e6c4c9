"""A head that config.json ties to the embedding, and what the file has of the two.

As in transformers, what is stored counts: a head that differs from the embedding is a head of its
own, and where one of them is stored alone it is both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import WeightSource
from pipeinfer.models.weights import Stored, dtypes, open_weights
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 4096  # that are compared at a time: some megabytes
# What a head in 8 or 4 bits has in place of its weight, or beside it.
QUANTIZED = re.compile(r"lm_head\.(?:weight_\w+|qweight|qzeros|scales)")


def with_both(config: ModelConfig, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """`stored`; with the head as the embedding too, if they are tied and only the head is there."""
    if config.tie_word_embeddings and EMBEDDING not in stored and HEAD in stored:
        return {**stored, EMBEDDING: stored[HEAD]}
    return stored


def as_stored(config: ModelConfig, stored: Mapping[str, Stored]) -> ModelConfig:
    """`config`, no longer tied if `stored` has a head that differs from the embedding.

    Where both are stored and equal, all their values are read. Raises ConfigurationError for a tied
    head that is stored quantized, or in another shape.
    """
    if not config.tie_word_embeddings:
        return config
    for name in stored:
        if QUANTIZED.fullmatch(name):
            raise ConfigurationError(
                f"{name} in {stored[name].file}: a quantized head is not supported"
            )
    if HEAD not in stored or EMBEDDING not in stored:
        return config
    if stored[HEAD] is stored[EMBEDDING] or _equal(config, stored):
        return config
    log.warning(
        "%s: config.json ties the head to the embedding, but %s is stored and differs, so it is "
        "used, as transformers does",
        stored[HEAD].file,
        HEAD,
    )
    return replace(config, tie_word_embeddings=False)


def _equal(config: ModelConfig, stored: Mapping[str, Stored]) -> bool:
    """In the checkpoint's dtype, as transformers compares them. False for what cannot be read as
    matrices, of which the check of all tensors says why."""
    both, shape = (stored[HEAD], stored[EMBEDDING]), stored[EMBEDDING].shape
    if stored[HEAD].shape != shape or len(shape) != 2:
        return False
    if any(entry.dtype not in dtypes(entry.file) for entry in both):
        return False
    dtype = getattr(torch, config.dtype)
    bounds = [*range(0, shape[0], ROWS), shape[0]]
    with (
        open_weights(stored[HEAD].file, stored) as head,
        open_weights(stored[EMBEDDING].file, stored) as embedding,
    ):
        for begin, end in pairwise(bounds):
            parts = []
            for opened, name in ((head, HEAD), (embedding, EMBEDDING)):
                target = torch.empty((end - begin, shape[1]), dtype=dtype)
                slices = (slice(begin, end), slice(0, shape[1]))
                opened.fill(WeightSource(name, shape, slices, target))
                parts.append(target)
            if not torch.equal(*parts):
                return False
    return True
