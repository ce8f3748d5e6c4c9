"""Defaults and argument types of `pipeinfer bench`: all that its help text needs."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

DEFAULT_CONCURRENCY = 8  # streams of the closed loop that is measured if no load is given
MIN_REQUESTS = 64  # of a load, if neither requests nor seconds are given
MIN_REQUESTS_PER_STREAM = 4  # of a closed loop, in the same case


@dataclass(frozen=True)
class TokenRange:
    """A range of lengths in tokens with both ends; written `16:256`, or `16` for one length."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> TokenRange:
        """The range that `text` says. Raises argparse.ArgumentTypeError."""
        low, _, high = text.partition(":")
        try:
            lengths = TokenRange(int(low), int(high or low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no range such as 16:256") from None
        if not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} is empty")
        return lengths

    def sample(self, rng: random.Random) -> int:
        """A length, drawn evenly."""
        return rng.randint(self.low, self.high)

    def sample_numpy(self, rng: np.random.Generator) -> int:
        """A length, drawn evenly from a generator of NumPy."""
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return f"{self.low}:{self.high}" if self.low < self.high else f"{self.low}"
