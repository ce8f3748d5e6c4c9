"""A range of lengths, in tokens.

How a range is written on a command line, and how a length is drawn from it.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TokenRange:
    """A range of lengths, both ends included; written `16:256`, or `16` for one length."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> TokenRange:
        """For argparse, whose error it raises."""
        low, _, high = text.partition(":")
        try:
            span = TokenRange(int(low), int(high or low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no range such as 16:256") from None
        if not 1 <= span.low <= span.high:
            raise argparse.ArgumentTypeError(f"{text!r} is empty")
        return span

    def sample(self, source: random.Random) -> int:
        """A length, all equally likely."""
        return source.randint(self.low, self.high)

    def sample_numpy(self, source: np.random.Generator) -> int:
        """The same from NumPy's source."""
        return int(source.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return f"{self.low}:{self.high}" if self.low < self.high else f"{self.low}"
