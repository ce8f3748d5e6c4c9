"""Builds FlashInfer's attention kernels for the shapes of the tests, in parallel; a tool."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from pipeinfer.attention.flashinfer_backend import FLASHINFER
from pipeinfer.attention.interface import KVPool
from pipeinfer.kernels.formats import KVScales
from pipeinfer.step import AttentionShape


def build(job):
    made, head_dim, windowed, scales = job
    device = torch.device("cuda")
    shape = AttentionShape(8, 2, head_dim, head_dim**-0.5, 64 if windowed else None)
    made([shape], device).bind(KVPool([shape], 2, 16, torch.bfloat16, device, scales=scales), 1)


if __name__ == "__main__":
    kinds = [(64, False), (64, True), (128, False), (128, True), (256, False), (256, True)]
    jobs = [
        (made, *kind, None) for made in (FLASHINFER.decode, FLASHINFER.prefill) for kind in kinds
    ]
    jobs += [(FLASHINFER.decode, *kind, [KVScales(1.0, 1.0)]) for kind in kinds[:4]]
    with ProcessPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 4) as pool:
        list(pool.map(build, jobs))
