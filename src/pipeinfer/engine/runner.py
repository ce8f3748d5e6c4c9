"""Runs one step on the device: token ids in, model forward over the pages, sampled ids out.

Knows arrays of one step; no plan, no request, no policy. `last_token` lives here, so a step can be
built before the ids of the step before it are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from pipeinfer.attention import step_index
from pipeinfer.attention.interface import Attention
from pipeinfer.attention.rows import host_rows
from pipeinfer.engine.attend import StepAttention, TorchStore
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.executor import unwatched
from pipeinfer.engine.marks import usual_marks
from pipeinfer.engine.penalties import Penalties
from pipeinfer.engine.phases import Phases
from pipeinfer.engine.slot_state import SlotState
from pipeinfer.layers.attention import Attend
from pipeinfer.memory.pool import KVPool
from pipeinfer.steps.step import LAST_TOKEN, Sampled, SamplingRows, Step


class Model(Protocol):
    """What the runner needs of a model; see models/causal_lm.py."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """tokens, positions int64 [T]: hidden states [T, hidden], or of `rows` int64 [S] alone."""
        ...


class Sampler(Protocol):
    """From hidden states to tokens; see engine/sampler.py, and sharded_sampler.py where a rank has
    a part of the model. first_id: the id of the first column of its logits."""

    first_id: int

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[S, hidden] to [S, ids]."""
        ...

    def sample(self, logits: torch.Tensor, rows: SamplingRows, /) -> torch.Tensor:
        """int64 [S, 2] on the host, of each row how many tokens it gave and which."""
        ...


class Flight:
    """A step that the device is to `run`, and has run at its mark; see engine/executor.py."""

    def __init__(self, device: HostDevice, run: Callable[[], Sampled]) -> None:
        self._run = run
        self._sampled: Sampled | None = None
        self.mark = device.submit(self._work)

    def take(self) -> Sampled:
        """What it gave, waited for if need be."""
        self.mark.wait()
        assert self._sampled is not None
        return self._sampled

    def _work(self) -> None:
        self._sampled = self._run()


class ModelRunner:
    """One rank's model, KV pool and attention backend. Steps must come in order, one at a time.

    `phases` has the time of "attention_plan" (index arrays and masks), "forward" (with the logits)
    and "sample".
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        backend: Attention,
        max_slots: int,
        sampler: Sampler,
    ) -> None:
        backend.bind(pool, max_slots)
        self.pool = pool
        self.device = HostDevice()
        self.phases = Phases(usual_marks())
        self.step_cost = None  # not needed: a CPU takes as much longer as there are tokens
        self._model = model
        self._backend = backend
        self._store = TorchStore(pool)
        self._sampler = sampler
        self._penalties = Penalties(max_slots, pool.device, sampler.first_id)
        self._device = pool.device
        self._slots = SlotState(max_slots)
        self._last_token = torch.zeros(max_slots, dtype=torch.int64, device=pool.device)

    def run(self, step: Step) -> Sampled:
        """What the rows that sample gave; their ids are also kept in last_token."""
        return self._sampled(step, self.logits(step))

    def launch(self, step: Step, before: Callable[[Step], None] = unwatched) -> Flight:
        """Has `before` and `run` called with the step, on the device's thread."""

        def run() -> Sampled:
            before(step)
            return self.run(step)

        return Flight(self.device, run)

    @torch.inference_mode()
    def logits(self, step: Step) -> torch.Tensor:
        """Computes the step's tokens; logits [S, vocab] of the rows that sample, no sampling."""
        self._slots.apply(step.delta)
        if len(step.counts) == 0:
            return torch.empty((0, 0), device=self._device)
        if len(step.delta.cleared):
            self.pool.clear(step.delta.cleared)
        with self.phases.span("attention_plan", step.number):
            pages = self._slots.pages(step, self.pool.page_size)
            slots = np.repeat(step.slots.astype(np.int64), step.counts)
            tokens = self._known(step.tokens, slots)
            positions = step_index.positions(step)
            places = step_index.store_places(step, pages, positions, self.pool.page_size)
            plan = self._backend.plan(host_rows(step, pages))
            attend = StepAttention(self._backend, plan, self._store, self._tensor(places))
            at = self._tensor(positions)
        with self.phases.span("forward", step.number):
            last = np.cumsum(step.counts, dtype=np.int64)[step.samples] - 1
            if not len(last):  # nothing to multiply the vocabulary with
                return self._model(tokens, at, attend)[:0]
            hidden = self._model(tokens, at, attend, self._tensor(last))
            return self._sampler.logits(hidden)

    @torch.inference_mode()
    def _sampled(self, step: Step, logits: torch.Tensor) -> Sampled:
        if not step.samples.any():
            return Sampled.of(np.empty((0, 2), dtype=np.int64))
        with self.phases.span("sample", step.number):
            rows = step.sampling
            logits = self._edited(logits, step)
            drawn = self._penalties.sampled(
                logits, step.penalties, lambda changed: self._sampler.sample(changed, rows)
            )
            slots = self._tensor(step.slots[step.samples].astype(np.int64))
            # A bad row may be part of one more step: it goes on from an id that exists.
            self._last_token[slots] = drawn[:, 1].to(self._device)
            return Sampled.of(drawn.numpy())

    def _edited(self, logits: torch.Tensor, step: Step) -> torch.Tensor:
        """With what single requests change of single logits."""
        if not self._slots.edits:
            return logits
        values = logits.float().cpu().numpy()
        return torch.from_numpy(self._slots.edited(values, step, self._sampler.first_id))

    def _known(self, ids: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """int64 [T] ids, LAST_TOKEN replaced by what the slot's previous step sampled."""
        tokens = self._tensor(ids.astype(np.int64))
        pending = np.flatnonzero(ids == LAST_TOKEN)
        if len(pending):
            tokens[self._tensor(pending)] = self._last_token[self._tensor(slots[pending])]
        return tokens

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
