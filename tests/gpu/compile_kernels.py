"""Builds FlashInfer's attention kernels for the shapes of the tests, in parallel; a tool."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from pipeinfer.kernels.formats import E4M3


def build(job):
    from flashinfer.prefill import get_batch_prefill_module

    kernels, head_dim, windowed, stored = job
    half = torch.bfloat16
    get_batch_prefill_module(kernels, half, stored, half, torch.int32, head_dim, head_dim, 0,
                             windowed, False, False)  # fmt: skip


if __name__ == "__main__":
    jobs = [("fa2", 128, False), ("fa2", 64, False), ("fa2", 128, True), ("fa3", 128, False)]
    jobs += [("fa3", 64, False), ("fa3", 128, True), ("fa2", 64, True), ("fa3", 64, True)]
    jobs += [("fa2", 256, windowed) for windowed in (False, True)]
    jobs = [(*job, torch.bfloat16) for job in jobs]
    jobs += [("fa2", dim, windowed, E4M3) for dim in (64, 128) for windowed in (False, True)]
    with ProcessPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 4) as pool:
        list(pool.map(build, jobs))
