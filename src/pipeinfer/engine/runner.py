"""Runs steps on a device without waiting for them.

    launch:           pack -> upload -> prepare_inputs, attention metadata -> forward pass
                      -> sample -> download, all queued
    sample_masked:    masks -> sample -> download, of a step with masked rows

The device works off what it is handed in order, and is the one writer of what lies there by slot.
A forward pass is the replay of a CUDA graph, which also expands and samples by temperature, or goes
kernel by kernel. Knows arrays of a step; no plan of the scheduler, no request, no policy and no
kind of device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pipeinfer.attention.interface import Attention, AttentionMetadata, KVPool
from pipeinfer.engine import calibrate
from pipeinfer.engine.calibrate import empty_step
from pipeinfer.engine.device import Device, StepEvent, TwoPhaseEvent
from pipeinfer.engine.graphs import (
    Captured,
    Graphs,
    LargestStep,
    decode_only,
    eager_and_deferred,
    shape_of,
    shared_prefix_variants,
)
from pipeinfer.engine.kv_store import StepAttention, store_for
from pipeinfer.engine.profiling import Phases, nvtx_if_loaded
from pipeinfer.engine.sampling import NONE, Penalties, Sampler, Scores, StepScores, truncated
from pipeinfer.engine.step_buffers import PARITIES, DeviceBuffers, SlotState, StepBuffers
from pipeinfer.engine.step_builder import MAX_LOGIT_EDITS
from pipeinfer.kernels.interface import DeviceStep, GraphShape, Kernels, tensor_of
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.step import Sampled, Step
from pipeinfer.step_cost import StepCost


@dataclass
class PackedStep:
    """One launch of `step`: what the host packed, and what is computed of it on the way.

    buffers: of its parity; `num_words` of their pinned words are uploaded. views: of the device's
    buffers. graph: that is replayed; None: kernel by kernel.
    sample_rows: int64 [S], which rows of `logits` are those of rows that sample, in their order;
    None: the first S.
    overflow_changes: int32 [2n], changes of the slots' state that do not fit into the words.
    truncated: int64 [K], indices among the S rows that sample: those at random with top-k, top-p or
    min-p; biased: whether the logits of some of the S rows are raised or lowered.
    scores: where log-probs are asked for. logits: [L, shard] once computed, None if no row samples.
    """

    step: Step
    buffers: StepBuffers
    views: DeviceStep
    graph: Captured | None
    num_words: int
    sample_rows: np.ndarray | None
    overflow_changes: np.ndarray | None
    truncated: np.ndarray
    biased: bool
    scores: Scores | None = None
    logits: torch.Tensor | None = None

    @property
    def rows(self) -> np.ndarray | slice:
        """`sample_rows`, as an index."""
        count = int(np.count_nonzero(self.step.samples))
        return slice(count) if self.sample_rows is None else self.sample_rows


# Called with int32 [N, W], a bit mask over the vocabulary for each of a step's N masked rows, which
# it writes. Returns {row that samples: reason} of those that must not sample anything.
FillMasks = Callable[[np.ndarray], dict[int, str]]
# Called with each step before the host waits for its buffers and packs it: see Runner.launch.
BeforeLaunch = Callable[[Step], None]


@dataclass
class LaunchedStep:
    """`step` on its way through the device, in `buffers` of its parity.

    event: its end. two_phase: the same, of a step with masked rows: not ready before
    `sample_masked`. packed: set when the host has packed it, taken by the device's work; of a step
    with masked rows it stands there again until `sample_masked`. refused: those of its rows that
    must not sample, with the reason.

    Written by the device's work, read when the step has ended:
    drawn: int64 [L, 2], how many tokens each row of logits gave, and which: a view of the parity's
    pinned buffer, valid until that parity's next launch (`take` copies). rows: those of `drawn`
    that belong to rows that sample, in their order. scores: where log-probs are asked for.
    logits: [L, vocab], if they are kept.
    """

    step: Step
    buffers: StepBuffers
    event: StepEvent = field(init=False)
    two_phase: TwoPhaseEvent | None = None
    packed: PackedStep | None = None
    refused: dict[int, str] = field(default_factory=dict[int, str])
    drawn: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    rows: np.ndarray | slice = field(default_factory=lambda: slice(0))
    scores: StepScores | None = None
    logits: torch.Tensor | None = None
    _sampled: Sampled | None = None

    def take(self) -> Sampled:
        """The step's result; waits for its end, and raises what the step raised."""
        if self._sampled is None:
            self.event.wait()
            sampled = Sampled.of(self.drawn[self.rows], self.refused)
            self._sampled = sampled if self.scores is None else self.scores.added_to(sampled)
        return self._sampled


class Runner:
    """Launches the steps of one rank, and keeps what they need on its device.

    pool: KV pages. device: where steps are queued. largest: the step that buffers have room for.
    phases: the host's time of each part of a launch. keep_logits: whether results keep their
    logits, for tests. step_cost: what steps take, once `measure` was called; None: not measured.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KVPool,
        backend: Attention,
        largest: LargestStep,
        sampler: Sampler,
        device: Device,
        kernels: Kernels,
    ) -> None:
        """`sampler`: of the whole model, or of a rank's part; `kernels`: the device's."""
        self.pool = pool
        self.device = device
        self.phases = Phases(nvtx_if_loaded())
        self.keep_logits = False
        self.step_cost: StepCost | None = None
        self.measured_cost: StepCost | None = None  # before `padded` made step_cost of it
        self._model = model
        self._backend = backend
        self.largest = largest
        self._sampler = sampler
        self._kernels = kernels
        where = pool.device
        ids = range(model.vocab_shard.start, model.vocab_shard.stop)
        self._penalties = Penalties(largest.rows, ids, where)
        self._state = SlotState(largest.rows, largest.pages, MAX_LOGIT_EDITS, where)
        self._device_buffers = DeviceBuffers(
            largest, pool.page_size, backend.traits, self._state, where, kernels
        )
        words = len(self._device_buffers.words)
        padding_slot = self._state.padding_slot
        self._buffers = [
            StepBuffers(parity, device, words, largest.rows, padding_slot)
            for parity in range(PARITIES)
        ]
        self._launched = 0
        self._latest: list[LaunchedStep | None] = [None] * PARITIES  # the last of each parity
        self._graphs = Graphs(device)
        # Of the rows that were packed last: their sampling fields, and what follows from these for
        # all steps of the same rows: `truncated` and `biased` of PackedStep.
        self._sampling_flags: tuple[Mapping[str, np.ndarray], np.ndarray, bool] = {}, NONE, False
        self.bind(pool)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of decode rows that have a graph, or get one later."""
        deferred = (shape.num_decodes for shape in self._graphs.deferred if not shape.num_prefills)
        return tuple(sorted({*self._graphs.decodes, *deferred}))

    @property
    def shares(self) -> bool:
        """Whether steps carry the shared prefixes of their decodes."""
        return self._backend.traits.shares

    @property
    def sampling_bytes(self) -> int:
        """What sampling takes beside the model's logits: the counts of penalties, and a copy of the
        logits of all rows in float32, which is as large."""
        return 2 * self._penalties.bytes

    def bind(self, pool: KVPool) -> None:
        """The pool of later steps; graphs must be captured after this."""
        self.pool = pool
        self._backend.bind(pool, self.largest.rows)
        self._store = store_for(pool, self._backend.traits)

    # ---------------------------------------------------------------------------------------- steps

    def run(self, step: Step) -> Sampled:
        """Launches the step and waits for it."""
        return self.launch(step).take()

    def launch(self, step: Step, before: BeforeLaunch | None = None) -> LaunchedStep:
        """Queues the step behind those that were launched before: calls `before(step)`, waits for
        the buffers of the step's parity, packs the step into them, and launches its kernels.

        On a GPU all of this happens within the call, and its errors are raised here. It waits only
        if the step before last has not ended: never on rank 0, where the scheduler sends step N
        when it has the result of step N - 2; other ranks may lag. On a CPU all of it happens on the
        device's thread. If any row is masked, the launch ends with the logits of all rows, and
        `sample_masked` samples them.
        """
        parity = self._launched % PARITIES
        self._launched += 1
        launched = LaunchedStep(step, self._buffers[parity])
        pack = partial(self._wait_and_pack, launched, self._latest[parity], before)
        with self.phases.range(
            f"step {step.number}: {step.num_decodes} of {len(step.slots)} decode"
        ):
            launched.event = self.device.submit(partial(self._compute, launched), pack)
        if step.masked is not None:
            launched.event = launched.two_phase = TwoPhaseEvent(launched.event)
        self._latest[parity] = launched
        return launched

    def _wait_and_pack(
        self, launched: LaunchedStep, last: LaunchedStep | None, before: BeforeLaunch | None
    ) -> None:
        """The host's part, before the device begins: waits for the buffers and fills them."""
        step, buffers = launched.step, launched.buffers
        if before is not None:
            before(step)
        with self.phases.range("wait for buffers"):
            if last is not None:  # what it reads is free then, and what it gave taken
                last.take()
        with self.phases.span("pack", step.number):
            launched.packed = self._pack(step, buffers, self._fitting(step))

    @torch.inference_mode()
    def _compute(self, launched: LaunchedStep) -> None:
        """The device's work: queues upload, prepare_inputs, attention metadata, forward, sampling
        and download."""
        packed, launched.packed = launched.packed, None
        assert packed is not None
        number, span = packed.step.number, self.phases.span
        with span("upload", number):
            self._upload(packed)
        with span("attention_plan", number):
            metadata = self._prepare_attention(packed)
        with span("forward", number):
            packed.logits = self._forward(packed, metadata)
        if packed.step.masked is not None:
            launched.packed = packed  # its rows are sampled when their masks are known
            return
        with span("sample", number):
            self._sample(packed, launched)

    def sample_masked(self, launched: LaunchedStep, fill: FillMasks) -> None:
        """Queues the rest of a step with masked rows, which was launched last. `fill` writes their
        masks."""
        masked, event = launched.step.masked, launched.two_phase
        assert masked is not None and event is not None
        count, width = len(masked.rows), -(-self._sampler.vocab // 32)
        words = launched.buffers.masks.take(count * width).view(count, width)
        with self.phases.span("masks", launched.step.number):
            launched.refused = fill(words.numpy())
        event.complete(self.device.submit(partial(self._sample_masked, launched, words)))

    @torch.inference_mode()
    def _sample_masked(self, launched: LaunchedStep, words: torch.Tensor) -> None:
        """As the device's work: `words` int32 [N, W] are the masks of the step's masked rows."""
        packed, launched.packed = launched.packed, None
        if packed is None:  # the first part has failed
            return
        masked, logits, scores = packed.step.masked, packed.logits, packed.scores
        assert masked is not None and logits is not None
        if scores is not None and packed.graph is not None:
            scores.add_outputs(logits)  # of what the model said, before all else
        launched.logits = self._kept_logits(logits)
        rows = masked.rows if packed.sample_rows is None else packed.sample_rows[masked.rows]
        device_rows = tensor_of(rows).to(logits.device, non_blocking=True)
        device_words = self._sampler.masks(words.to(logits.device, non_blocking=True))
        self._kernels.apply_token_bitmask(logits, device_rows, device_words, self._sampler.first_id)
        with self.phases.span("sample", packed.step.number):
            self._sample(packed, launched)

    def _fitting(self, step: Step) -> Captured | None:
        """A graph that the step fits into. None where vectors are asked for, or log-probs that a
        graph's logits do not have: it computes those of rows that sample alone, with ids that these
        must not sample yet at -inf."""
        suppressed = step.logprobs is not None and step.logprobs.suppressed
        hidden = step.scored_chunks or step.vectors is not None
        return None if suppressed or hidden else self._graphs.fitting(step)

    def _pack(self, step: Step, buffers: StepBuffers, graph: Captured | None) -> PackedStep:
        """The step in these buffers, for that graph or none."""
        if graph is None:
            samples = int(step.samples.sum())
            views = self._device_buffers.views(shape_of(step), samples, padded=False)
        else:
            views = graph.views
        return self._make_packed(step, buffers, views, graph)

    def _make_packed(
        self, step: Step, buffers: StepBuffers, views: DeviceStep, graph: Captured | None
    ) -> PackedStep:
        changes, overflow = self._state.apply_on_host(step.delta), None
        if len(changes) > 2 * self._device_buffers.max_changes:
            changes, overflow = changes[:0], changes
        num_words, sample_rows = buffers.packer.pack(step, views.shape, views.num_logits, changes)
        if self._sampling_flags[0] is not step.fields:
            biased = bool(self._state.biased[step.slots[step.samples]].any())
            self._sampling_flags = step.fields, truncated(step.fields), biased
        packed = PackedStep(
            step, buffers, views, graph, num_words, sample_rows, overflow, *self._sampling_flags[1:]
        )
        if step.logprobs is not None or step.scored_chunks or step.vectors is not None:
            packed.scores = Scores(step, sample_rows, self._sampler)
        return packed

    def _upload(self, packed: PackedStep) -> None:
        """Queues the upload of slot changes and of the step, on the current stream."""
        to_zero, overflow = packed.step.delta.to_zero, packed.overflow_changes
        if len(to_zero):  # rare: it waits for a copy, and so does what follows
            self.pool.zero_pages(to_zero)
        if overflow is not None:
            pairs = tensor_of(overflow).to(self._state.words.device).view(-1, 2)
            self._state.words[pairs[:, 0].long()] = pairs[:, 1]
        packed.buffers.upload(packed.num_words, self._device_buffers.words)

    def _prepare_attention(self, packed: PackedStep) -> AttentionMetadata:
        """Without a graph, runs prepare_inputs and builds the attention metadata. A graph runs
        prepare_inputs itself; its metadata is built anew, at the addresses of the first, only where
        the backend wants lengths on the host, else None is returned."""
        buffers = packed.buffers
        if packed.graph is None:
            self._device_buffers.prepare(packed.views)
        elif not self._backend.traits.host_lengths:
            return None
        buffers.attention_metadata = self._build_metadata(packed)
        return buffers.attention_metadata

    def _build_metadata(self, packed: PackedStep) -> AttentionMetadata:
        views, buffers = packed.views, packed.buffers
        return self._backend.build_metadata(
            self._device_buffers.attention_inputs(
                views, buffers.parity, buffers.packer.words, packed.step
            )
        )

    def _forward(self, packed: PackedStep, metadata: AttentionMetadata) -> torch.Tensor | None:
        """Logits [L, shard], ready to be sampled; None if there is no graph and no row samples."""
        if packed.graph is None:
            return self._logits(packed.views, metadata, packed.scores)
        packed.graph.replay()  # sampling by temperature included
        return packed.graph.logits

    def _sample(self, packed: PackedStep, launched: LaunchedStep) -> None:
        """Samples the rows, and queues the download of ids and log-probs."""
        buffers, logits, scores = packed.buffers, packed.logits, packed.scores
        if logits is not None:
            drawn = self._draw(packed, logits)
            launched.drawn = buffers.download(drawn)
            launched.rows = packed.rows
            if packed.step.masked is None:
                launched.logits = self._kept_logits(logits)
            if scores is not None:
                scores.add_sampled(logits, drawn)
        if scores is not None:
            launched.scores = scores.download(buffers.logprobs)

    def _logits(
        self, views: DeviceStep, metadata: AttentionMetadata, scores: Scores | None = None
    ) -> torch.Tensor | None:
        """Logits [L, shard] after prepare_inputs, ready to be sampled; None if no row samples.

        scores: gets the hidden states and logits that log-probs need.
        """
        attend = StepAttention(self._backend, metadata, self._store, views.slot_mapping)
        samples, rows = views.num_logits, None
        if samples and not views.logits_of_every_token:
            rows = views.logits_indices
        if scores is not None and scores.of_prompts:
            rows = scores.tokens(views.logits_indices)
        hidden = self._model(views.input_ids, views.positions, attend, rows)
        if scores is not None and scores.of_prompts:
            scores.add_prompts(hidden[samples:])
            hidden = hidden[:samples]
        if not samples:
            return None
        logits = self._sampler.logits(hidden)
        if scores is not None:
            scores.add_vectors(hidden, logits)
            scores.add_outputs(logits)
        self._apply_logit_edits(logits, views)
        return logits

    def _apply_logit_edits(
        self, logits: torch.Tensor, views: DeviceStep, values: bool = False
    ) -> None:
        edits, first = self._state.logit_edits, self._sampler.first_id
        slots, positions = views.write_slots, views.sample_positions
        self._kernels.apply_logit_bias(logits, slots, positions, edits, first, values)

    def _draw(self, packed: PackedStep, logits: torch.Tensor) -> torch.Tensor:
        """int64 [L, 2]: what the graph has sampled, unless some row needs more than temperature."""
        step, views, graph = packed.step, packed.views, packed.graph
        sample_rows = packed.sample_rows
        temperature_only = (
            step.penalties is None and not len(packed.truncated) and not packed.biased
        )
        if graph is not None and temperature_only and step.masked is None:
            return graph.drawn
        if packed.biased or step.penalties is not None:
            logits = logits.to(torch.float32, copy=True)
        if packed.biased:
            self._apply_logit_edits(logits, views, values=True)
        counted = None
        if step.penalties is not None:
            counted = self._penalties.apply(logits, step.penalties, sample_rows)
        last_token = self._state.by_slot.last_token
        rows = packed.truncated if sample_rows is None else sample_rows[packed.truncated]
        drawn = self._sampler.sample(logits, views.sampling, last_token, rows)
        if counted is not None:
            self._penalties.count(drawn, *counted)
        return drawn

    def _kept_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """A copy where `keep_logits`; complete when the step has ended."""
        return self._sampler.gather_logits(logits).clone() if self.keep_logits else None

    # --------------------------------------------------------------------------------------- graphs

    def capture(
        self,
        sizes: tuple[int, ...],
        mixed: tuple[GraphShape, ...] = (),
        progress: Callable[[int, int], None] | None = None,
        drop_slower: bool = False,
        later: bool = False,
    ) -> None:
        """Captures decode steps of these sizes, and steps with prompts where the backend's part for
        them can be captured; progress(done, total).

        `drop_slower`: small sizes that measure slower than the next are left out; not where ranks
        must agree. `later`: most are left to `capture_next`; not where ranks must take the same.
        """
        traits = self._backend.traits
        if not (traits.captures_decode and sizes):
            return
        mixed = mixed if traits.captures_prefill else ()
        shapes: Sequence[GraphShape] = [*map(decode_only, sizes), *mixed]
        shapes += shared_prefix_variants(shapes) if self.shares else []
        first, deferred = eager_and_deferred(shapes) if later else (shapes, [])
        graphs, count = Graphs(self.device), _counter(len(shapes), progress)

        @torch.inference_mode()
        def work() -> None:
            for kind in (False, True):
                kind_shapes = [shape for shape in first if (shape.num_prefills > 0) == kind]
                graphs.capture(kind_shapes, self._padding, self._body, count)
            if drop_slower:
                graphs.drop_slower_small_ones(self._padding)

        self.device.run(work)
        self._graphs, graphs.deferred = graphs, deferred

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @property
    def graphs_deferred(self) -> int:
        """How many graphs `capture_next` has still to capture."""
        return len(self._graphs.deferred)

    def capture_next(self) -> StepEvent:
        """Queues the capture of the next deferred graph. Only while no step is in flight: the
        capture uses a step's buffers."""
        graphs = self._graphs

        @torch.inference_mode()
        def work() -> None:
            graphs.capture([graphs.deferred.pop(0)], self._padding, self._body, lambda: None)

        return self.device.submit(work)

    def stop_capturing(self) -> None:
        """Drops the deferred graphs."""
        self._graphs.deferred.clear()

    def measure(
        self,
        agreed: Callable[[Container[int]], frozenset[int]],
        known: StepCost | None = None,
    ) -> None:
        """Measures `step_cost`, and finds the numbers of tokens whose steps take the next larger
        graph because that is faster. To be called when all graphs that there will be are captured
        or deferred; does nothing where the backend captures none.

        agreed: called with the numbers of tokens for which this rank found a larger graph to be
        faster; returns those for which all ranks found so.
        known: what was measured before on this GPU, for this runner's graphs.
        """
        if not self._backend.traits.captures_decode:
            return
        largest = self.largest
        geometry = calibrate.PageGeometry(largest.pages, self.pool.page_size)
        cost = known or calibrate.measured(
            self._graphs,
            (largest.rows, largest.tokens),
            geometry,
            self.pool.num_pages,
            self._replayed,
            self._seconds,
        )
        self.step_cost, self.measured_cost, graphs = cost, cost, self._graphs
        if cost is not None and graphs.mixed:
            graphs.slow = agreed(calibrate.slow(cost))
            self.step_cost = calibrate.padded(cost, graphs.slow)

    def _seconds(self, step: Step) -> float:
        """Seconds of the device for `step`, without a graph."""
        launched = self.launch(step)
        launched.take()
        return launched.event.busy

    def _replayed(self, shape: GraphShape, step: Step) -> float:
        """Seconds of the device for `step`, by the graph of `shape`."""
        found: list[float] = []

        @torch.inference_mode()
        def work() -> None:
            self._pack_for_graph(self._graphs[shape].views, step)
            found.append(self._graphs.seconds(shape, calibrate.REPLAYS))

        self.device.run(work)
        return found[0]

    def _padding(self, shape: GraphShape) -> tuple[DeviceStep, AttentionMetadata]:
        """A step of padding rows in the buffers that graphs read, and its metadata."""
        samples = min(shape.num_rows, self.largest.rows)
        return self._pack_for_graph(
            self._device_buffers.views(shape, samples, padded=True), empty_step()
        )

    def _pack_for_graph(
        self, views: DeviceStep, step: Step
    ) -> tuple[DeviceStep, AttentionMetadata]:
        """The step in the buffers that graphs read, and its metadata."""
        packed = self._make_packed(step, self._buffers[0], views, None)
        self._upload(packed)
        return views, self._build_metadata(packed)

    def _body(
        self, views: DeviceStep, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph holds; see graphs.py."""
        self._device_buffers.prepare(views)
        logits = self._logits(views, metadata)
        assert logits is not None
        last_token = self._state.by_slot.last_token
        return logits, self._sampler.sample(logits, views.sampling, last_token, NONE)


def _counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """Each call is one more of `total`."""
    done = itertools.count(1)
    return lambda: None if progress is None else progress(next(done), total)
