"""Times a layer of experts with every backend for mixtures, at the shape of Qwen3-30B-A3B; a tool.

`python tests/gpu/time_moe_backends.py [TOKENS ...]` prints, for each number of tokens, the
microseconds of each backend in a CUDA graph that holds several routings, so that little is in the
L2 cache: the median of turns, and the least and the most. FlashInfer's is timed where its kernels
are compiled already.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median

import torch
from flashinfer_kernels import missing_kernels
from graph_timing import each_us

from pipeinfer.layers.experts import BACKENDS, StackedExperts

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
TURNS = 3


def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def routed(tokens):
    weights, chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
    return randn(tokens, HIDDEN), weights, chosen.int()


def main():
    print(torch.cuda.get_device_name())
    missing = missing_kernels()
    if missing:
        print(f"without flashinfer: {missing}")
    gate_up, down = randn(EXPERTS, 2 * INTER, HIDDEN) / 45, randn(EXPERTS, HIDDEN, INTER) / 28
    stack = StackedExperts((gate_up, None), (down, None), 0, EXPERTS)
    backends = {
        name: backend(stack)
        for name, backend in BACKENDS.items()
        if name != "flashinfer" or not missing
    }
    for tokens in [int(text) for text in sys.argv[1:]] or TOKENS:
        operands = [routed(tokens) for _ in range(8 if tokens <= 256 else 2)]
        turns = [
            {
                name: each_us(
                    partial(lambda summed, given: summed(*given), one.summed), operands, 1
                )
                for name, one in backends.items()
            }
            for _ in range(TURNS)
        ]
        times = {name: median(turn[name] for turn in turns) for name in backends}
        text = ", ".join(
            f"{name} {us:.1f} ({min(turn[name] for turn in turns):.1f} to "
            f"{max(turn[name] for turn in turns):.1f})"
            for name, us in times.items()
        )
        ratios = [f"{name}/triton {us / times['triton']:.2f}" for name, us in times.items()]
        print(f"{tokens} tokens: {text}; {', '.join(ratios[1:])}", flush=True)


if __name__ == "__main__":
    main()
