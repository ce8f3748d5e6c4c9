"""What one simulated group is: its scheduler's settings and its engine's memory.

Knows names and numbers only; they mean what the settings of the same names mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.messages import PROTOCOL, Hello
from pipeinfer.scheduler.planner import SchedulerOptions
from pipeinfer.step_cost import StepCost, Targets


@dataclass(frozen=True)
class Deployment:
    """One group. `kv_pages` can hold tokens (the dummy page comes on top); the watchdog is off, for
    nothing hangs in virtual time. `step_cost`: what its engine would say of its steps."""

    kv_pages: int = 20_000
    page_size: int = 16
    max_model_len: int = 32_768
    max_running: int = 256
    max_step_tokens: int = 2048
    mixed_step_tokens: int = 0
    itl_target: float = 0.025
    ttft_target: float = 0.5
    policy: str = "mixed"
    overlap_depth: int = 2
    cache: str = "radix"
    step_cost: StepCost | None = None

    @property
    def options(self) -> SchedulerOptions:
        return SchedulerOptions(
            self.policy, self.overlap_depth, self.max_running, self.max_step_tokens, float("inf"),
            mixed_step_tokens=self.mixed_step_tokens,
            targets=Targets(self.itl_target, self.ttft_target),
        )  # fmt: skip

    @property
    def hello(self) -> Hello:
        """What an engine of this shape would say."""
        return Hello(
            protocol=PROTOCOL,
            version="simulated",
            rank=0,
            tp=1,
            incarnation=1,
            model="simulated",
            page_size=self.page_size,
            pages=self.kv_pages,
            max_slots=self.max_running,
            max_model_len=self.max_model_len,
            attention="none",
            step_cost=self.step_cost,
        )
