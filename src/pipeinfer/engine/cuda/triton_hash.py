"""Triton finds compiled kernels by a hash over all of itself, made once in a process.

It takes half a second in which others can run, so it is made beside what a start does first.
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def hashing() -> threading.Thread:
    """It makes the hash, or has; to be waited for before the first kernel is asked for."""
    thread = threading.Thread(target=_hash, name="hash", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    try:
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:  # no part of what triton promises
        log.debug("triton's hash is left to the first kernel: %s", error)
    else:
        triton_key()
