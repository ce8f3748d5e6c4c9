"""Chooses the data-parallel group of a request, behind one small interface.

Knows prompts as token ids and groups as numbers, nothing about what the groups are doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from pipeinfer.settings import ConfigurationError


class Router(Protocol):
    """A policy of routing. Its choice depends on the requests that it saw, never on a clock."""

    def choose(self, prompt_ids: np.ndarray, cache_salt: str) -> int:
        """The group for a request. `prompt_ids`: int32 [n]; salted prefixes are never shared."""
        ...


class RoundRobin:
    """Each group in turn."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._next = 0

    def choose(self, prompt_ids: np.ndarray, cache_salt: str) -> int:
        group = self._next
        self._next = (group + 1) % self._groups
        return group


ROUTERS: dict[str, Callable[[int], Router]] = {"round-robin": RoundRobin}


def make_router(policy: str, groups: int) -> Router:
    """The router for `groups` groups. With one group all policies come to the same.

    Raises ConfigurationError for a policy that there is not.
    """
    if groups == 1:
        return RoundRobin(1)
    if policy not in ROUTERS:
        raise ConfigurationError(f"--routing: {policy!r} is unknown; there is {', '.join(ROUTERS)}")
    return ROUTERS[policy](groups)
