"""Who runs in the next step: one file per policy, found by name.

A policy knows a StepComposer (what could run, what tokens and pages are left) and nothing else; see
composer.py.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from pipeinfer.scheduler.composer import StepComposer
from pipeinfer.settings import ConfigurationError

POLICIES = {
    "mixed": "pipeinfer.scheduler.policies.mixed:Mixed",
    "prefill-first": "pipeinfer.scheduler.policies.prefill_first:PrefillFirst",
    "decode-first": "pipeinfer.scheduler.policies.decode_first:DecodeFirst",
    "throughput": "pipeinfer.scheduler.policies.throughput:Throughput",
}


class Policy(Protocol):
    """Composes one step; may keep state of its own, but reads no clock."""

    def compose(self, step: StepComposer) -> None:
        """Gives the step its rows, in the order in which memory and tokens are given out."""
        ...


def create(name: str) -> Policy:
    """The policy called `name`, or module:Class of one's own; ConfigurationError if unknown."""
    target = POLICIES.get(name, name)
    module, separator, cls = target.partition(":")
    if not separator:
        raise ConfigurationError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    try:
        return getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"policy {name!r} cannot be imported: {error}") from None
