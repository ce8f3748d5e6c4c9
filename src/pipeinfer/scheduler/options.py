"""What the scheduler needs to know of the settings.

Knows names and defaults only; what they mean is said where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pipeinfer.step_budget import Targets

DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True)
class SchedulerOptions:
    """What the core needs of the settings. max_step_tokens: token budget of a step; 0 leaves it to
    the engine, and an engine that says nothing gets DEFAULT_STEP_TOKENS. mixed_step_tokens: the
    budget of a step that also decodes, where the policy mixes; 0: see step_budget.py, as for
    `targets`. groups: of the deployment, which tokenizers hear of. shares: whether requests find a
    prompt, or its beginning, in a prefix cache, so that they wait for it. least_common: tokens of a
    beginning that is worth it. host_loss: seconds of silence after which a rank counts as lost.
    """

    policy: str = "mixed"
    overlap_depth: int = 2
    max_running: int = 256
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    watchdog: float = 120.0
    tp: int = 1
    mixed_step_tokens: int = 0
    groups: int = 1
    targets: Targets = field(default_factory=Targets)
    shares: bool = True
    least_common: int = 64
    host_loss: float = inf

    def grain(self, page_size: int) -> int:
        """Tokens of the whole pages by which beginnings of prompts are compared; 0: by none."""
        return -(-self.least_common // page_size) * page_size if self.shares else 0
