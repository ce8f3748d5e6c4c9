"""The ways in which a scheduler is through with a request; each is a statistic.

What it accepted is what is live and what ended in one of them, at any time.
"""

from __future__ import annotations

from typing import Literal, get_args

Ending = Literal[
    "finished",  # by a stop token or its length
    "stopped",  # by a stop string, or for output that nobody can decode: its detokenizer said so
    "timed_out",
    "failed",
    "aborted",  # nobody wants it any more
    "refused",
    "handed_over",  # to another group
]
ENDS: tuple[Ending, ...] = get_args(Ending)
