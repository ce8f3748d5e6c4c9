"""Scheduler core, engine core and CUDA runner in one thread, with steps really in flight.

As tests/parity/cores.py, but every planned step is launched before the oldest one's result is
waited for. Import it as `import overlapped` with tests/gpu and tests/parity on the path.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from cores import Cores

from pipeinfer.engine.executor import step_done
from pipeinfer.settings import Settings


class GpuCores(Cores):
    """`keep`: remember all logits. busy, idle: the device's seconds. sharing: steps
    whose decodes begin with something in common."""

    def __init__(self, *arguments, keep=True, **named) -> None:
        self._launched: dict[int, object] = {}
        self.busy = self.idle = 0.0
        self.steps = self.sharing = 0
        self.kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        super().__init__(*arguments, **named)
        self.settings: Settings = arguments[1]
        self.loaded.runner.keep_logits = keep

    def run(self, until=None) -> None:
        """As Cores.run, but without `keep` results are delivered as soon as they are there."""
        if self.loaded.runner.keep_logits:
            return super().run(until)
        while not (until and until()):
            if not self._run_one_result():
                if not self._steps:
                    return None
                self._run_step(self._steps.popleft())

    def _run_step(self, item) -> None:
        runner = self.loaded.runner
        if runner.graphs_deferred and not self._launched:
            runner.capture_next().wait()
        # No other is launched meanwhile, so that the next capture comes before the next step.
        for step, _ in (item, *(() if runner.graphs_deferred else self._steps)):
            if step.number not in self._launched:
                self._launched[step.number] = runner.launch(step)
            if step.masked is not None:
                if step is not item[0]:
                    break  # nothing is launched behind it before it is finished
                runner.sample_masked(self._launched[step.number], partial(self.masks.fill, step))
        step, names = item
        launched = self._launched.pop(step.number)
        sampled, busy = launched.take(), launched.event.busy
        if self.masks is not None:
            sampled = self.masks.take(step, sampled)
        self.busy += busy
        self.idle += launched.event.idle
        self.steps += 1
        self.sharing += step.shared_prefixes is not None
        kind = (
            "mixed"
            if step.num_decodes < len(step.slots)
            else f"decode{-(-len(step.slots) // 64) * 64}"
        )
        self.kinds[kind][0] += 1
        self.kinds[kind][1] += busy
        if runner.keep_logits:
            self._remember(step, names, launched)
        self._to_engine(step_done(step, sampled))
