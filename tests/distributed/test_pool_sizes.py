"""Ranks that measure different amounts of free memory use as many pages as the one with fewest."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import zmq

from checkpoints import make_checkpoint
from pipeinfer.bus.bus import ControlClient
from pipeinfer.engine import loading, machine
from pipeinfer.engine.loading import load_engine
from pipeinfer.messages import Heartbeat
from pipeinfer.settings import Settings
from pipeinfer.topology import Topology, local
from servers import environment

PAGE_BYTES = 2 * 2 * 1 * 16 * 16 * 4  # K and V, layers, a rank's heads, head_dim, tokens, float32
PATIENCE = 90.0  # seconds until both have loaded
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


def pools(topology: Topology) -> dict[str, float]:
    """Pages of each rank, as its heartbeats tell them; waits until all do."""
    pages: dict[str, float] = {}
    deadline = time.monotonic() + PATIENCE
    with zmq.Context() as context, ControlClient(topology, context) as caller:
        for stage in topology.ids("engine"):
            caller.listen(stage)
        while len(pages) < 2 and time.monotonic() < deadline:
            for _, beat in caller.receive(0.2):
                if isinstance(beat, Heartbeat) and "pages_total" in beat.stats:
                    pages[beat.stage] = beat.stats["pages_total"]
    return pages


def test_real_ranks_with_unequal_memory_have_pools_of_one_size(short_path):
    """Two processes: one takes a thousandth of the memory that is free, the other twice that."""
    topology = local(Settings(tp=2), f"ipc://{short_path}/")
    file = short_path / "pipeinfer.toml"
    file.write_text(Topology(topology.entries, {"tp": 2, "threads": 1}).to_toml())
    command = [sys.executable, "-m", "pipeinfer.runtime", "engine", "--topology", str(file)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env={**environment(), "PIPEINFER_MEMORY_FRACTION": fraction},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, fraction in enumerate(("0.002", "0.001"))
    ]
    try:
        pages = pools(topology)
    finally:
        for rank in ranks:
            rank.terminate()
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    words = r"rank (\d) has room for ([\d,]+) pages, but another rank for ([\d,]+),"
    [(number, own, other)] = re.findall(words, said[0])
    least = int(other.replace(",", ""))
    assert number == "0" and 1.5 * least < int(own.replace(",", "")) < 2.5 * least
    assert "another rank" not in said[1]
    assert pages == {"engine-0-0": least, "engine-0-1": least}
