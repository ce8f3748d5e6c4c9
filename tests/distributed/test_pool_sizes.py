"""Ranks that measure different amounts of free memory use as many pages as the one with fewest."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from checkpoints import make_checkpoint
from pipeinfer.engine import loading, machine
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings

PAGE_BYTES = 2 * 2 * 1 * 16 * 16 * 4  # K and V, layers, a rank's heads, head_dim, tokens, float32
MEASURED = (900, 300)  # pages, of rank 0 and rank 1


class Told:
    """A rank's group of two, of which the other has room for `other` pages and the dummy."""

    size, fusion = 2, None

    def __init__(self, rank: int, other: int) -> None:
        self.rank, self._other = rank, other

    def all_reduce_min(self, value: int) -> int:
        """Neither rank has found a pool."""
        return min(value, self._other + 1)

    def all_gather_host(self, values: np.ndarray) -> np.ndarray:
        return np.stack([values, values])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pool_is_the_smallest_and_a_rank_with_more_says_so(rank, tmp_path, monkeypatch, caplog):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    mine, other = MEASURED[rank], MEASURED[1 - rank]
    # Both ranks share the host. Sampling needs counts and float32 logits of 256 slots each.
    free = 2 * ((mine + 1) * PAGE_BYTES + 2 * 256 * 132 * 4)
    monkeypatch.setattr(machine, "available_bytes", lambda: free)
    settings = Settings(tp=2, memory_fraction=1.0)
    with caplog.at_level(logging.INFO, loading.__name__):
        engine = load_engine(settings, tmp_path, rank=rank, collectives=Told(rank, other))  # type: ignore
    assert engine.pages == engine.runner.pool.num_pages == 1 + min(MEASURED)
    said = "rank 0 has room for 900 pages, but another rank for 300, which all ranks use"
    assert caplog.messages == ([said] if mine > other else [])
