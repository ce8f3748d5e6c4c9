"""Times a layer of experts with every backend for mixtures, at the shape of Qwen3-30B-A3B; a tool.

`python tests/gpu/time_moe_backends.py` prints, for each number of tokens, the microseconds of each
backend in a CUDA graph that holds several routings, so that little is in the L2 cache.
"""

from __future__ import annotations

from functools import partial

import torch
from graph_timing import each_us

from pipeinfer.layers.experts import BACKENDS, StackedExperts

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def routed(tokens):
    weights, chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
    return randn(tokens, HIDDEN), weights, chosen.int()


def main():
    print(torch.cuda.get_device_name())
    gate_up, down = randn(EXPERTS, 2 * INTER, HIDDEN) / 45, randn(EXPERTS, HIDDEN, INTER) / 28
    stack = StackedExperts((gate_up, None), (down, None), 0, EXPERTS)
    for tokens in TOKENS:
        operands = [routed(tokens) for _ in range(8 if tokens <= 256 else 2)]
        times = {
            name: each_us(
                partial(lambda summed, one: summed(*one), backend(stack).summed), operands, 1
            )
            for name, backend in BACKENDS.items()
        }
        text = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"{tokens} tokens: {text}; torch/triton {times['torch'] / times['triton']:.2f}")


if __name__ == "__main__":
    main()
