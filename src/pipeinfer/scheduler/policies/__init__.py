"""Who runs in the next step: one file per policy, found by name.

A policy knows the board (what could run, what budget is left) and nothing else; see board.py.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from pipeinfer.close_names import none_of
from pipeinfer.scheduler.board import Board
from pipeinfer.settings import ConfigurationError

POLICIES = {
    "mixed": "pipeinfer.scheduler.policies.mixed:Mixed",
    "prefill-first": "pipeinfer.scheduler.policies.prefill_first:PrefillFirst",
    "decode-first": "pipeinfer.scheduler.policies.decode_first:DecodeFirst",
    "throughput": "pipeinfer.scheduler.policies.throughput:Throughput",
}


class Policy(Protocol):
    """Composes one step; may keep state of its own, but reads no clock."""

    def compose(self, board: Board) -> None:
        """Puts rows on the board, in the order in which memory and budget are given out."""
        ...


def create(name: str) -> Policy:
    """The policy called `name`, or module:Class of one's own; ConfigurationError if unknown."""
    target = POLICIES.get(name, name)
    module, separator, cls = target.partition(":")
    if not separator:
        raise ConfigurationError(f"--policy: {none_of(name, POLICIES)}")
    try:
        return getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"policy {name!r} cannot be imported: {error}") from None
