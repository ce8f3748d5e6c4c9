"""Who runs in the next step: one class per policy, found by name.

A policy knows a StepComposer (what could run, what tokens and pages are left) and nothing else; see
composer.py.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from pipeinfer.command_line import none_of
from pipeinfer.scheduler.composer import StepComposer
from pipeinfer.settings import ConfigurationError

POLICIES = {
    "mixed": "pipeinfer.scheduler.policies:Mixed",
    "prefill-first": "pipeinfer.scheduler.policies:PrefillFirst",
    "decode-first": "pipeinfer.scheduler.policies:DecodeFirst",
    "throughput": "pipeinfer.scheduler.policies:Throughput",
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
        raise ConfigurationError(f"--policy: {none_of(name, POLICIES)}")
    try:
        return getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"policy {name!r} cannot be imported: {error}") from None


class Mixed:
    """The default: every running request decodes in every step, then half-computed prompts and new
    ones get the rest.

    No running request waits for somebody else's prompt: what that adds to the gap between its
    tokens is bounded (see step_cost.py). With nobody decoding, prompts get the whole step.
    """

    def compose(self, step: StepComposer) -> None:
        step.decode_all()
        step.limit_prefill()
        step.continue_prompts()
        step.admit_while_possible()


class Throughput:
    """The most tokens a second, whoever waits: the default of batches.

    As Mixed, but how many tokens of prompts go beside the decodes is a question of their price
    alone (see step_cost.py): a step may take as long as it likes.
    """

    def compose(self, step: StepComposer) -> None:
        step.decode_all()
        step.limit_prefill(cheapest_rate=True)
        step.continue_prompts()
        step.admit_while_possible()


class PrefillFirst:
    """A step of prompts alone while there is one to compute, else a step of decodes: the shortest
    time to first token, at the price of the streams that run.

    A steady flow of prompts stops every running request; meant for offline batches and comparisons.
    """

    def compose(self, step: StepComposer) -> None:
        step.continue_prompts()
        step.admit_while_possible()
        if not step.rows:
            step.decode_all()


MAX_DECODE_STEPS = 8  # steps of decodes in a row while a prompt waits


class DecodeFirst:
    """Decodes before prompts: steps of decodes alone, a step of prompts only now and then. The
    steadiest gap between tokens; prompts wait up to MAX_DECODE_STEPS steps, so they never starve.
    """

    def __init__(self) -> None:
        self._decode_steps = 0

    def compose(self, step: StepComposer) -> None:
        if step.prompts_wait and self._decode_steps >= MAX_DECODE_STEPS:
            self._prompts(step)
        if not step.rows:
            step.decode_all()
            self._decode_steps += 1
        if not step.rows:
            self._prompts(step)

    def _prompts(self, step: StepComposer) -> None:
        step.continue_prompts()
        step.admit_while_possible()
        self._decode_steps = 0
