"""What is asked for: prompts as token ids, and how many tokens of output each.

Everything follows from a seed, so that two programs can be given the same work. Knows no engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pipeinfer.bench.dataset import TokenRange


@dataclass(frozen=True)
class Work:
    """Request i has prompts[i] and gets outputs[i] tokens, whatever ids they are."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)


def uniform(
    requests: int, prompts: TokenRange, outputs: TokenRange, highest_id: int, seed: int
) -> Work:
    """Lengths and ids (0..highest_id) drawn evenly: first all prompts, then all output lengths.

    With 256 requests, 100:1024 twice, 10000 and seed 0 this is the benchmark of nano-vllm and
    mini-sglang, draw by draw.
    """
    source = random.Random(seed)
    ids = [
        [source.randint(0, highest_id) for _ in range(prompts.sample(source))]
        for _ in range(requests)
    ]
    return Work(ids, [outputs.sample(source) for _ in range(requests)])
