"""The numbers that fix a rotary position embedding, whichever config.json they came from.

Knows no file and no torch; `layers/rope.py` computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True)
class RopeConfig:
    """`original_max` is the context of the pretraining, before any scaling, in tokens.

    rotary: how much of a head is rotated, from its first value on. interleaved: in files, a value
    is rotated with its neighbour; otherwise with the one half of what is rotated behind it.
    factor: all types but default. low_freq, high_freq: llama3. beta_fast, beta_slow, truncate,
    attention_factor (multiplies cos and sin): yarn.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    rotary: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """How many values of a head are."""
        return int(head_dim * self.rotary)
