"""Ranks as processes that a script forks, so that what they all import is imported once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable


def run_forked(work: Callable[[int], None], ranks: int) -> None:
    """`work(rank)` in a process each; returns when all have ended well. When one fails, ends the
    others, which would wait for it, and this process with code 1."""
    children = set()
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _end_with(work, rank)
        children.add(child)
    while children:
        ended, status = os.wait()
        children.discard(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            sys.exit(1)


def _end_with(work: Callable[[int], None], rank: int) -> None:
    try:
        work(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)
