"""Runs steps on a GPU without waiting for them: upload, forward, sample, results, all queued.

Two streams: `prepare` carries the uploads of steps without a graph, `forward` everything else;
`last_token` is written on the forward stream only. Knows arrays of a step; no plan of the
scheduler, no request, no policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pipeinfer.attention.interface import Attention, Plan
from pipeinfer.attention.rows import PagedRows
from pipeinfer.engine.attend import StepAttention, Store, TorchStore
from pipeinfer.engine.cuda import packing, step_times
from pipeinfer.engine.cuda.artificial import empty_step
from pipeinfer.engine.cuda.buffers import PARITIES, StepBuffers
from pipeinfer.engine.cuda.device import CudaDevice
from pipeinfer.engine.cuda.expansion import Expansion
from pipeinfer.engine.cuda.fused_store import FusedStore
from pipeinfer.engine.cuda.graphs import Captured, DecodeGraphs, Frame, row_arrays
from pipeinfer.engine.cuda.layout import Layout, Limits, Sizes
from pipeinfer.engine.cuda.mixed_graphs import MixedGraphs, MixedSize
from pipeinfer.engine.cuda.sampling import NONE, Sampler, WholeSampler, truncated_rows
from pipeinfer.engine.device import Mark
from pipeinfer.engine.executor import unwatched
from pipeinfer.engine.marks import usual_marks
from pipeinfer.engine.penalties import Penalties
from pipeinfer.engine.phases import Phases
from pipeinfer.memory.pool import KVPool
from pipeinfer.step_cost import StepCost
from pipeinfer.steps.step import Sampled, Step

Views = dict[str, torch.Tensor]


@dataclass
class Flight:
    """A launched step: `count` rows draw into `buffers`, and those at `rows` are its own."""

    buffers: StepBuffers
    count: int
    rows: np.ndarray | None
    mark: Mark = field(init=False)
    logits: torch.Tensor | None = None
    _sampled: Sampled | None = None

    def take(self) -> Sampled:
        """What it gave, waited for if need be."""
        if self._sampled is None:
            self.mark.wait()
            drawn = self.buffers.drawn.numpy()[: self.count]
            self._sampled = Sampled.of(drawn if self.rows is None else drawn[self.rows])
        return self._sampled


class CudaRunner:
    """One rank. `phases` has the host's time of each part of a launch."""

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        backend: Attention,
        limits: Limits,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler`: where `model` is a rank's part; by default that of one rank alone."""
        self.pool = pool
        self.phases = Phases(usual_marks())
        self.keep_logits = False
        self.step_cost: StepCost | None = None  # as measured
        self.derive = True  # on the device, what mixed steps index with; False: on the host
        self._model = model
        self._backend = backend
        self._limits = limits
        self._sampler = sampler or WholeSampler(model)
        device = pool.device
        self._penalties = Penalties(limits.rows, device, self._sampler.first_id)
        self.device = CudaDevice(device)
        self._forward = self.device.stream
        self._prepare = torch.cuda.Stream(device)
        # One slot more than requests: padding rows and rows that do not sample write there.
        self._dummy_slot = limits.rows
        self._last_token = torch.zeros(limits.rows + 1, dtype=torch.int64, device=device)
        largest = limits.sizes
        words = Layout(largest).words
        self._buffers = [StepBuffers(words, limits.rows, device) for _ in range(PARITIES)]
        self._expansion = Expansion(limits.rows, limits.tokens, largest.indices, device)
        self._launched = 0
        self._flights: list[Flight | None] = [None] * PARITIES  # the last of each parity
        self._graphs: tuple[DecodeGraphs, MixedGraphs] | None = None
        self._rows: dict[tuple[Any, int | MixedSize, int], PagedRows] = {}
        self.bind(pool)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of decode rows that have a CUDA graph."""
        return () if self._graphs is None else self._graphs[0].sizes

    def bind(self, pool: KVPool) -> None:
        """The pool of later steps; graphs must be captured after this."""
        self.pool = pool
        self._backend.bind(pool, self._limits.rows)
        store = TorchStore if self._backend.traits.needs_kv else FusedStore
        self._store: Store = store(pool)

    # ---------------------------------------------------------------------------------------- steps

    def run(self, step: Step) -> Sampled:
        """Launches the step and waits for it."""
        return self.launch(step).take()

    @torch.inference_mode()
    def launch(self, step: Step, before: Callable[[Step], None] = unwatched) -> Flight:
        """Queues the whole step; does not wait for the device, except for buffers still in use,
        which the depth of the overlap loop rules out on rank 0."""
        before(step)
        parity = self._launched % PARITIES
        self._launched += 1
        last = self._flights[parity]
        with self.phases.range("wait for buffers"):
            if last is not None:  # what it reads is free then, and what it gave taken
                last.take()
        flight = self._flights[parity] = self._launch(step, parity)
        return flight

    def _launch(self, step: Step, parity: int) -> Flight:
        rows = len(step.slots)
        if len(step.cleared):  # rare: it waits for a copy
            with torch.cuda.stream(self._forward):
                self.pool.clear(step.cleared)
        with self.phases.range(f"step {step.number}: {step.decodes} of {rows} rows decode"):
            for graphs in self._graphs or ():
                size: Any = graphs.fitting(step)
                if size is not None:
                    return self._replay(step, parity, graphs, size)
            return self._eager(step, parity)

    # ---------------------------------------------------------------------------------------- eager

    def _eager(self, step: Step, parity: int) -> Flight:
        number, samples = step.number, int(step.samples.sum())
        buffers, span = self._buffers[parity], self.phases.span
        flight = Flight(buffers, samples, None)
        with span("pack", number):
            rows, views, words = self._packed(step, parity, samples)
        torch.cuda.set_stream(self._prepare)
        with span("attention_plan", number):
            buffers.plan = self._backend.plan(rows)
        with span("upload", number):
            buffers.upload(words, self._prepare)

        def work() -> None:
            with span("forward", number):
                logits = self._compute(step, views, buffers.plan)
            with span("sample", number):
                if logits is not None:
                    drawn = self._sampled(step, logits, views, np.arange(samples))
                    buffers.drawn[:samples].copy_(drawn, non_blocking=True)
                flight.logits = self._kept(logits)

        flight.mark = self.device.submit(work, buffers.uploaded)
        return flight

    def _packed(self, step: Step, parity: int, samples: int) -> tuple[PagedRows, Views, int]:
        """The step in this parity's pinned buffer: its rows, its views on the device, its words."""
        buffers, rows = self._buffers[parity], len(step.slots)
        indices = 0 if self.derive else step.pages.size
        layout = Layout(
            Sizes(rows, len(step.tokens), samples, step.pages.shape[1], indices, self.derive)
        )
        buffers.check(layout.words)
        used = packing.pack_rows(step, layout.host(buffers.host), self.pool.page_size)
        views = layout.tensors(buffers.mirror)
        arrays = row_arrays(views, rows)
        if self.derive:
            arrays = replace(arrays, indices=self._expansion.indices(used))
        paged = PagedRows(
            decodes=step.decodes,
            longest_query=int(step.counts.max()),
            parity=parity,
            host=row_arrays(layout.tensors(buffers.pinned), rows),
            device=arrays,
        )
        return paged, views, layout.words if self.derive else layout.indices_at + used

    def _compute(self, step: Step, views: Views, plan: Plan) -> torch.Tensor | None:
        """Logits [S, vocab], ready to be sampled; None if no row samples."""
        if self.derive:
            derived = self._expansion(views, self._last_token, self.pool.page_size)
            tokens, places, positions = derived.ids, derived.places, derived.positions
        else:
            tokens, places, positions = self._known(views), views["store"], views["positions"]
            places = places.long()  # as a store by torch operations takes them
        attend = StepAttention(self._backend, plan, self._store, places)
        last = views["last"]
        hidden = self._model(tokens, positions, attend, last if len(last) else None)
        if not len(last):
            return None
        logits = self._sampler.logits(hidden)
        self._sampler.suppress(logits, step.sampling.suppress)
        return logits

    def _known(self, views: Views) -> torch.Tensor:
        """int64 [T]: known ids, or what the slot's previous step left in last_token."""
        tokens = views["tokens"]
        pending = self._last_token.index_select(0, views["token_slots"])
        return torch.where(tokens < 0, pending, tokens)

    def _kept(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """A copy for who looks at logits; there when the step has ended."""
        if not self.keep_logits or logits is None:
            return None
        return self._sampler.whole(logits).clone()

    # --------------------------------------------------------------------------------------- graphs

    def _replay(self, step: Step, parity: int, graphs: Any, size: int | MixedSize) -> Flight:
        number, span = step.number, self.phases.span
        buffers, captured = self._buffers[parity], graphs[size]
        with span("pack", number):
            packed = graphs.pack(step, size, buffers.host)
        flight = Flight(buffers, len(captured.drawn), packed.places)

        def work() -> None:
            with span("upload", number):
                # Straight to where the graph reads, on its stream: one copy less, no stream waits.
                buffers.copy_to(graphs.words, packed.words)
            with span("attention_plan", number):
                if self._backend.traits.host_lengths:  # copies its work lists on this stream
                    self._backend.plan(self._graph_rows(graphs, size, parity))
            with span("forward", number):  # sampling by temperature included
                captured.graph.replay()
            with span("sample", number):
                drawn = captured.drawn
                if packed.restricted:
                    drawn = self._sample_again(step, captured, packed.places)
                buffers.drawn[: len(drawn)].copy_(drawn, non_blocking=True)
                flight.logits = self._kept(captured.logits)

        flight.mark = self.device.submit(work)
        return flight

    def _sample_again(self, step: Step, captured: Captured, places: np.ndarray) -> torch.Tensor:
        """Over the graph's own choice, where some rows want more than temperature."""
        pairs = step.sampling.suppress
        if len(pairs):
            pairs = np.stack((places[pairs[:, 0]], pairs[:, 1]), axis=1)
            self._sampler.suppress(captured.logits, pairs)
        return self._sampled(step, captured.logits, captured.views, places)

    def _sampled(self, step: Step, logits: torch.Tensor, views: Views, places: np.ndarray) -> Any:
        """What all rows of the logits draw, of which those at `places` are the step's."""
        truncated = places[truncated_rows(step)]

        def sample(logits: torch.Tensor) -> torch.Tensor:
            return self._sampler.sample(logits, views, self._last_token, truncated)

        return self._penalties.sampled(logits, step.sampling.penalties, sample, places)

    @torch.inference_mode()
    def capture(
        self,
        sizes: tuple[int, ...],
        mixed: tuple[MixedSize, ...] = (),
        progress: Callable[[int, int], None] | None = None,
        choose: bool = False,
    ) -> None:
        """Captures decode steps of these sizes, and steps with prompts where the backend's part for
        them can be captured; progress(done, total).

        `choose`: small sizes that measure slower than the next are left out; not where ranks must
        agree.
        """
        if not (self._backend.traits.captures_decode and sizes):
            return
        frame = self._frame()
        mixed = mixed if self._backend.traits.captures_prefill else ()
        decodes = DecodeGraphs(sizes, frame)
        beside = MixedGraphs(mixed, self._limits.rows, frame)
        bodies = {decodes: self._decode_body, beside: self._mixed_body}
        for words, buffers in itertools.product((len(g.words) for g in bodies), self._buffers):
            buffers.check(words)
        memory = torch.cuda.graph_pool_handle()
        count = _counter(len(sizes) + len(mixed), progress)
        self._rows.clear()
        with torch.cuda.stream(self._forward):
            for graphs, body in bodies.items():
                padding = partial(self._padding, graphs)
                graphs.capture(padding, body, self._forward, memory, count)
            if choose:
                decodes.drop_slower_small_ones(partial(self._padding, decodes))
            torch.cuda.synchronize()
        self._graphs = decodes, beside

    @torch.inference_mode()
    def measure(self) -> None:
        """Finds out `step_cost`, once all graphs there are to be are captured."""
        if not self._backend.traits.captures_decode:
            return
        limits, frame = self._limits, self._frame()
        with torch.cuda.stream(self._forward):
            self.step_cost = step_times.measured(
                self._graphs, (limits.rows, limits.tokens), frame, self.pool.pages, self._planned,
                self._seconds,
            )  # fmt: skip
        torch.cuda.synchronize()

    def _seconds(self, step: Step) -> float:
        """What the device takes for it."""
        return self.launch(step).mark.busy

    def _frame(self) -> Frame:
        return Frame(
            self._limits.pages, self.pool.page_size, self._backend.traits.reads_table_to_decode,
            self._dummy_slot, self.pool.device,
        )  # fmt: skip

    def _padding(self, graphs: Any, size: int | MixedSize) -> Plan:
        """A step of padding rows in the fixed buffer, planned."""
        return self._planned(graphs, size, empty_step())

    def _planned(self, graphs: Any, size: int | MixedSize, step: Step) -> Plan:
        """The step in the fixed buffer, planned."""
        buffers = self._buffers[0]
        words = graphs.pack(step, size, buffers.host).words
        buffers.copy_to(graphs.words, words)
        plan = self._backend.plan(self._graph_rows(graphs, size, 0))
        torch.cuda.current_stream().synchronize()
        return plan

    def _graph_rows(self, graphs: Any, size: int | MixedSize, parity: int) -> PagedRows:
        """A graph's rows for the backend: what was packed on the host, what it reads there."""
        rows = self._rows.get((graphs, size, parity))
        if rows is None:
            layout, buffers = graphs.layout(size), self._buffers[parity]
            host, device = layout.tensors(buffers.pinned), layout.tensors(graphs.words)
            rows = self._rows[graphs, size, parity] = graphs.rows(size, parity, host, device)
        return rows

    def _decode_body(
        self, plan: Plan, views: Views, last: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph holds; see graphs.py. `last`: tokens with logits, all if None."""
        attend = StepAttention(self._backend, plan, self._store, views["store"])
        hidden = self._model(self._known(views), views["positions"], attend, last)
        logits = self._sampler.logits(hidden)
        return logits, self._sampler.sample(logits, views, self._last_token, NONE)

    def _mixed_body(self, plan: Plan, views: Views) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decode_body(plan, views, views["last"])


def _counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """Each call is one more of `total`."""
    done = itertools.count(1)
    return lambda: None if progress is None else progress(next(done), total)
