"""The logits that a step's rows sample from, which a runner keeps if it is asked to.

Import it as `from kept_logits import logits_of`.
"""

from __future__ import annotations

import torch

from pipeinfer.engine.runner import LaunchedStep, Runner
from pipeinfer.step import Step


def kept(launched: LaunchedStep) -> torch.Tensor:
    """[L, vocab] of a step whose runner keeps logits."""
    launched.take()
    assert launched.logits is not None
    return launched.real(launched.logits)


def logits_of(runner: Runner, step: Step) -> torch.Tensor:
    """[L, vocab]; the step is run, too."""
    runner.keep_logits = True
    return kept(runner.launch(step))
