"""Runs steps on a device without waiting for them.

    launch:           pack -> upload -> prepare_inputs, attention metadata -> forward pass
                      -> sample -> download, all queued
    sample_masked:    masks -> sample -> download, of a step with masked rows

Work runs in the order of submission on one stream, which is the only writer of the state of slots.
A forward pass is the replay of a CUDA graph, or runs kernel by kernel. A graph also prepares its
inputs, and samples by temperature alone; if a row needs more, all rows are sampled again after it.
Uses arrays of a step; no plan of the scheduler, no request, no policy and no kind of device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from pipeinfer.attention.interface import Attention, AttentionMetadata, KVPool
from pipeinfer.engine import calibrate
from pipeinfer.engine.calibrate import empty_step
from pipeinfer.engine.device import Device, StepEvent, TwoPhaseEvent
from pipeinfer.engine.draft_model import DraftModel
from pipeinfer.engine.graphs import (
    Captured,
    Graphs,
    StepCapacity,
    decode_only,
    eager_and_deferred,
    shape_of,
    shared_prefix_variants,
    verifying_ladder,
)
from pipeinfer.engine.kv_store import StepAttention, store_for
from pipeinfer.engine.profiling import Phases, nvtx_if_loaded
from pipeinfer.engine.sampling import (
    HostLogprobs,
    Penalties,
    Sampler,
    StepLogprobs,
    truncated,
)
from pipeinfer.engine.step_buffers import (
    PARITIES,
    DeviceBuffers,
    Propose,
    SlotState,
    StepBuffers,
)
from pipeinfer.engine.step_builder import MAX_LOGIT_EDITS
from pipeinfer.kernels.interface import DeviceStep, Kernels, StepShape, tensor_of
from pipeinfer.layers.lora import AdapterBank
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.step import Sampled, Step
from pipeinfer.step_cost import StepCost
from pipeinfer.wire import EMPTY_INT64


@dataclass
class PackedStep:
    """A launch of `step`: what the host packed, and results of the device's work on the way.

    Attributes:
    - step: the step
    - buffers: of the step's parity; `num_words` of their pinned words are uploaded
    - views: views of the device's buffers, in the shape of the step or of its graph
    - graph: graph that is replayed; None: the step runs kernel by kernel
    - num_words: words to upload
    - unpadded_rows: int64 [step's L], which rows of `logits` are the step's, in their order; all
      others are a graph's padding. None: the first ones
    - overflow_changes: int32 [2n], changes of the state of slots that do not fit into the words
    - truncated: int64 [K], which of the step's rows of logits are sampled at random with top-k,
      top-p or min-p
    - biased: whether the logits of some row are raised or lowered
    - logprobs: collects log-probs and vectors; None: the step has none
    - logits: [views' L, shard] once computed, None if no row samples
    """

    step: Step
    buffers: StepBuffers
    views: DeviceStep
    graph: Captured | None
    num_words: int
    unpadded_rows: np.ndarray | None
    overflow_changes: np.ndarray | None
    truncated: np.ndarray
    biased: bool
    logprobs: StepLogprobs | None = None
    logits: torch.Tensor | None = None


class StepMetadata(NamedTuple):
    """The attention metadata that all layers of a step share.

    Attributes:
    - model: of the model
    - drafts: of the draft model; None: there is none, or it does not follow this step
    """

    model: AttentionMetadata
    drafts: AttentionMetadata | None


# An array or a tensor with an entry for each row of logits.
RowsOfLogits = TypeVar("RowsOfLogits", np.ndarray, torch.Tensor)
# Called with int32 [N, W], to write a bit mask over the vocabulary for each of a step's N masked
# rows. Returns {row that samples: reason} for rows that must not sample anything.
FillMasks = Callable[[np.ndarray], dict[int, str]]
# Called with each step before the host waits for its buffers and packs it: see Runner.launch.
BeforeLaunch = Callable[[Step], None]


@dataclass
class LaunchedStep:
    """A step that was launched, in `buffers` of its parity.

    Attributes:
    - step: the step
    - buffers: of the step's parity
    - event: the end of the step
    - two_phase: equal to `event` for a step with masked rows: not ready before `sample_masked`.
      None: the step has no masked rows
    - packed: set when the host has packed the step, taken by the device's work; for a step with
      masked rows the device's work sets it again, until `sample_masked`
    - refused: by masked row that must not sample, the reason

    Attributes that the device's work writes, to be read when the step has ended:
    - drawn: int64 [L, 2], number of tokens and sampled id of each row of logits: a view of the
      parity's pinned buffer, valid until that parity's next launch (`take` copies)
    - unpadded_rows: as in PackedStep
    - logprobs: log-probs and vectors; None: the step has none
    - logits: [L, vocab], if they are kept
    """

    step: Step
    buffers: StepBuffers
    event: StepEvent = field(init=False)
    two_phase: TwoPhaseEvent | None = None
    packed: PackedStep | None = None
    refused: dict[int, str] = field(default_factory=dict[int, str])
    drawn: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    unpadded_rows: np.ndarray | None = None
    logprobs: HostLogprobs | None = None
    logits: torch.Tensor | None = None
    _sampled: Sampled | None = None

    def take(self) -> Sampled:
        """Returns the step's result; waits for the end of the step, and raises what the step
        raised.
        """
        if self._sampled is None:
            self.event.wait()
            sampled = Sampled.of(self.real(self.drawn), self.refused)
            self._sampled = sampled if self.logprobs is None else self.logprobs.added_to(sampled)
        return self._sampled

    def real(self, by_logits: RowsOfLogits) -> RowsOfLogits:
        """Returns the entries of the step's own rows, without a graph's padding. by_logits: an
        entry for each row of logits.
        """
        rows = self.unpadded_rows
        return by_logits[: self.step.num_logits] if rows is None else by_logits[rows]


class Runner:
    """Launches the steps of one rank, and keeps what they need on its device.

    Attributes:
    - pool: KV pages
    - device: queue of steps
    - largest: capacity of the buffers
    - phases: the host's time of each part of a launch
    - keep_logits: whether results keep their logits, for tests
    - step_cost: what steps take, once `measure` was called; None: not measured
    - measured_cost: `step_cost` as measured, before the costs of padded sizes replaced some
    - adapters: memory for low-rank adapters; None: no row has one
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KVPool,
        backend: Attention,
        largest: StepCapacity,
        sampler: Sampler,
        device: Device,
        kernels: Kernels,
    ) -> None:
        """Allocates the buffers of steps and slots, and binds the pool.

        - sampler: of the whole model, or of a rank's shard of the vocabulary
        - kernels: those of the device
        """
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
        max_slots = largest.rows  # so that every request that has a slot may have a row
        self._penalties = Penalties(max_slots, ids, where)
        self._state = SlotState(
            max_slots,
            largest.pages,
            MAX_LOGIT_EDITS,
            where,
            max_tokens=largest.pages * pool.page_size,
            max_drafts=largest.drafts,
            acceptance=largest.acceptance,
        )
        self._device_buffers = DeviceBuffers(
            largest, pool.page_size, backend.traits, self._state, where, kernels
        )
        words = len(self._device_buffers.words)
        padding_slot = self._state.padding_slot
        self._buffers = [
            StepBuffers(parity, device, words, largest.logits, padding_slot)
            for parity in range(PARITIES)
        ]
        self.adapters: AdapterBank | None = None
        self._draft: DraftModel | None = None
        self._propose: Propose = kernels.propose_ngrams
        self._launched = 0
        self._latest: list[LaunchedStep | None] = [None] * PARITIES  # the last of each parity
        self._graphs = Graphs(device)
        self._adapter_graphs = Graphs(device)  # graphs of steps in which some row has an adapter
        # Sampling fields of the rows that were packed last, and their `truncated` and `biased` of
        # PackedStep, which hold for all steps of the same rows.
        self._sampling_flags: tuple[Mapping[str, np.ndarray], np.ndarray, bool] = (
            {},
            EMPTY_INT64,
            False,
        )
        self.bind(pool)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of decode rows that have a graph or a deferred one, ascending."""
        deferred = (shape.num_decodes for shape in self._graphs.deferred if not shape.num_prefills)
        return tuple(sorted({*self._graphs.decodes, *deferred}))

    @property
    def shares(self) -> bool:
        """Whether steps carry the shared prefixes of their decodes."""
        return self._backend.traits.shares

    @property
    def sampling_bytes(self) -> int:
        """Bytes that sampling takes beside the model's logits: the counts of penalties, and a copy
        of the logits of all rows in float32, which is as large.
        """
        return 2 * self._penalties.bytes

    def use_adapters(self, bank: AdapterBank) -> None:
        """Gives rows of later steps the adapters of `bank`; graphs must be captured after this."""
        bank.reserve(self.largest.tokens)
        self.adapters = bank

    def use_draft_model(self, model: LanguageModel, backend: Attention, sampler: Sampler) -> None:
        """Makes the draft tokens of later steps by `model`, whose layers are the last ones of the
        pool. Graphs must be captured after this. See DraftModel.
        """
        self._draft = DraftModel(
            model, backend, sampler, self.largest, self.pool, self._state, self._kernels
        )
        self._propose = self._draft.propose

    def bind(self, pool: KVPool) -> None:
        """Sets the pool of later steps; graphs must be captured after this."""
        if self._draft is not None:
            self._draft.bind(pool)
        self.pool = pool
        self._backend.bind(pool, self.largest.rows)
        self._store = store_for(pool, self._backend.traits)

    # ---------------------------------------------------------------------------------------- steps

    def run(self, step: Step) -> Sampled:
        """Launches the step and waits for it."""
        return self.launch(step).take()

    def launch(self, step: Step, before: BeforeLaunch | None = None) -> LaunchedStep:
        """Queues the step after all launched steps: calls `before(step)`, waits for the buffers of
        the step's parity, packs the step into them, and launches its kernels.

        On a GPU all of this happens within the call, and its errors are raised here. launch waits
        in three cases: (1) the step before last has not ended (never on rank 0, where the scheduler
        sends step N when it has the result of step N - 2; other ranks may lag); (2) pages must be
        zeroed; (3) the step has more changes of the state of slots than its words have room for. On
        a CPU all of it happens on the device's thread. If any row is masked, the launch ends with
        the logits of all rows, and `sample_masked` samples them.
        """
        parity = self._launched % PARITIES
        self._launched += 1
        launched = LaunchedStep(step, self._buffers[parity])
        pack = partial(self._wait_and_pack, launched, self._latest[parity], before)
        with self.phases.range(
            f"step {step.number}: {step.num_decodes} of {len(step.slots)} decode"
        ):
            launched.event = self.device.submit(partial(self._compute, launched), before=pack)
        if step.masked is not None:
            launched.event = launched.two_phase = TwoPhaseEvent(launched.event)
        self._latest[parity] = launched
        return launched

    def _wait_and_pack(
        self, launched: LaunchedStep, last: LaunchedStep | None, before: BeforeLaunch | None
    ) -> None:
        """Waits for the buffers and fills them: the host's part, before the device begins."""
        step, buffers = launched.step, launched.buffers
        if before is not None:
            before(step)
        with self.phases.range("wait for buffers"):
            if last is not None:  # its buffers are free then, and its result taken
                last.take()
        with self.phases.span("pack", step.number):
            launched.packed = self._pack(step, buffers, self._fitting(step))

    @torch.inference_mode()
    def _compute(self, launched: LaunchedStep) -> None:
        """Queues upload, prepare_inputs, attention metadata, forward pass, sampling and download:
        the device's work.
        """
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
        """Queues the sampling of a step with masked rows; the step must be the last one that was
        launched. `fill` writes the masks.
        """
        masked, event = launched.step.masked, launched.two_phase
        assert masked is not None and event is not None
        count, width = len(masked.rows), -(-self._sampler.vocab // 32)
        words = launched.buffers.masks.take(count * width).view(count, width)
        with self.phases.span("masks", launched.step.number):
            launched.refused = fill(words.numpy())
        event.complete(self.device.submit(partial(self._sample_masked, launched, words)))

    @torch.inference_mode()
    def _sample_masked(self, launched: LaunchedStep, words: torch.Tensor) -> None:
        """Applies the masks and samples: the device's work. words: int32 [N, W], the masks of the
        step's masked rows.
        """
        packed, launched.packed = launched.packed, None
        if packed is None:  # the first part has failed
            return
        masked, logits, logprobs = packed.step.masked, packed.logits, packed.logprobs
        assert masked is not None and logits is not None
        if logprobs is not None and packed.graph is not None:
            logprobs.add_outputs(logits)  # the model's own logits, before any change
        launched.logits = self._kept_logits(logits)
        rows = masked.rows if packed.unpadded_rows is None else packed.unpadded_rows[masked.rows]
        device_rows = tensor_of(rows).to(logits.device, non_blocking=True)
        device_words = self._sampler.masks(words.to(logits.device, non_blocking=True))
        self._kernels.apply_token_bitmask(logits, device_rows, device_words, self._sampler.first_id)
        with self.phases.span("sample", packed.step.number):
            self._sample(packed, launched)

    def _fitting(self, step: Step) -> Captured | None:
        """Returns a graph that the step fits into. None if there is none, if vectors or prompt
        log-probs are asked for, or if output log-probs need logits that a graph does not keep: a
        graph's logits already have ids that must not be sampled yet at -inf.
        """
        suppressed = step.logprobs is not None and step.logprobs.suppressed
        hidden = step.prompt_logprob_chunks or step.vectors is not None
        graphs = self._adapter_graphs if step.adapted else self._graphs
        return None if suppressed or hidden else graphs.fitting(step)

    def _pack(self, step: Step, buffers: StepBuffers, graph: Captured | None) -> PackedStep:
        """Packs the step into these buffers, for that graph or none."""
        if graph is None:
            views = self._device_buffers.views(shape_of(step), step.num_logits, padded=False)
        else:
            views = graph.views
        return self._make_packed(step, buffers, views, graph)

    def _make_packed(
        self, step: Step, buffers: StepBuffers, views: DeviceStep, graph: Captured | None
    ) -> PackedStep:
        changes, overflow = self._state.apply_on_host(step.delta), None
        if len(changes) > 2 * self._device_buffers.max_changes:
            changes, overflow = changes[:0], changes
        num_words, unpadded_rows = buffers.packer.pack(step, views.shape, views.num_logits, changes)
        if self._sampling_flags[0] is not step.fields:
            biased = bool(self._state.biased[step.slots[step.samples]].any())
            self._sampling_flags = step.fields, truncated(step.fields), biased
        packed = PackedStep(
            step,
            buffers,
            views,
            graph,
            num_words,
            unpadded_rows,
            overflow,
            *self._sampling_flags[1:],
        )
        if step.logprobs is not None or step.prompt_logprob_chunks or step.vectors is not None:
            packed.logprobs = StepLogprobs(step, unpadded_rows, self._sampler)
        return packed

    def _upload(self, packed: PackedStep) -> None:
        """Queues the upload of changes of slots and of the step, on the current stream."""
        pages_to_zero, overflow = packed.step.delta.pages_to_zero, packed.overflow_changes
        if len(pages_to_zero):  # rare: waits for a copy, and so does later work
            self.pool.zero_pages(pages_to_zero)
        if overflow is not None:
            pairs = tensor_of(overflow).to(self._state.words.device).view(-1, 2)
            self._state.words[pairs[:, 0].long()] = pairs[:, 1]
        packed.buffers.upload(packed.num_words, self._device_buffers.words)

    def _prepare_attention(self, packed: PackedStep) -> StepMetadata | None:
        """Without a graph, runs prepare_inputs and builds the attention metadata. A graph runs
        prepare_inputs itself; its metadata is built anew, at the addresses of the first, only if
        the backend reads lengths on the host, else None is returned.
        """
        buffers = packed.buffers
        if packed.graph is None:
            self._prepare(packed.views, packed.step.verifies)
        elif not self._backend.traits.host_lengths:
            return None
        buffers.attention_metadata = self._build_metadata(packed)
        return buffers.attention_metadata

    def _prepare(self, views: DeviceStep, verifies: bool) -> None:
        """Runs prepare_inputs; if the step verifies draft tokens, they are made first."""
        self._device_buffers.prepare(views, self._propose if verifies else None)

    def _build_metadata(self, packed: PackedStep) -> StepMetadata:
        views, buffers = packed.views, packed.buffers
        inputs = self._device_buffers.attention_inputs(
            views, buffers.parity, buffers.packer.words, packed.step
        )
        of_drafts = None if self._draft is None else self._draft.build_metadata(inputs)
        return StepMetadata(self._backend.build_metadata(inputs), of_drafts)

    def _forward(self, packed: PackedStep, metadata: StepMetadata | None) -> torch.Tensor | None:
        """Returns logits [L, shard], ready to be sampled; None if there is no graph and no row
        samples.
        """
        if packed.graph is None:
            assert metadata is not None
            return self._logits(packed.views, metadata, packed.logprobs, packed.step.adapted)
        packed.graph.replay()  # sampling by temperature included
        return packed.graph.logits

    def _sample(self, packed: PackedStep, launched: LaunchedStep) -> None:
        """Samples the rows, and queues the download of ids and log-probs."""
        buffers, logits, logprobs = packed.buffers, packed.logits, packed.logprobs
        if logits is not None:
            drawn = self._draw(packed, logits)
            if self._state.by_slot.drafts is not None:
                self._kernels.accept_drafts(packed.views, drawn, self._state.by_slot)
            launched.drawn = buffers.download(drawn)
            launched.unpadded_rows = packed.unpadded_rows
            if packed.step.masked is None:
                launched.logits = self._kept_logits(logits)
            if logprobs is not None:
                logprobs.add_sampled(logits, drawn)
        if logprobs is not None:
            launched.logprobs = logprobs.download(buffers.logprobs)

    def _logits(
        self,
        views: DeviceStep,
        metadata: StepMetadata,
        logprobs: StepLogprobs | None = None,
        adapted: bool = False,
    ) -> torch.Tensor | None:
        """Returns logits [L, shard] after prepare_inputs, ready to be sampled; None if no row
        samples.

        - logprobs: gets the hidden states and logits that log-probs and vectors need
        - adapted: whether some row has an adapter
        """
        attend = StepAttention(self._backend, metadata.model, self._store, views.slot_mapping)
        samples, rows = views.num_logits, None
        if samples and not views.logits_of_every_token:
            rows = views.logits_indices
        if logprobs is not None and logprobs.of_prompts:
            rows = logprobs.tokens(views.logits_indices)
        with self._adapters_of(views, adapted):
            hidden = self._model(views.input_ids, views.positions, attend, rows)
        if self._draft is not None:
            self._draft.follow(views, metadata.drafts)
        if logprobs is not None and logprobs.of_prompts:
            logprobs.add_prompts(hidden[samples:])
            hidden = hidden[:samples]
        if not samples:
            return None
        logits = self._sampler.logits(hidden)
        if logprobs is not None:
            logprobs.add_vectors(hidden, logits)
            logprobs.add_outputs(logits)
        self._apply_logit_edits(logits, views)
        return logits

    def _adapters_of(self, views: DeviceStep, adapted: bool) -> AbstractContextManager[None]:
        """Returns a context in which the model computes with the adapters of the step's rows."""
        if not adapted:
            return nullcontext()
        if self.adapters is None:
            raise RuntimeError("a row has an adapter, and this engine holds none")
        return self.adapters.step(views, self._state.adapter_slots)

    def _apply_logit_edits(
        self, logits: torch.Tensor, views: DeviceStep, add_bias: bool = False
    ) -> None:
        edits, first = self._state.logit_edits, self._sampler.first_id
        slots, positions = views.write_slots, views.sample_positions
        self._kernels.apply_logit_edits(logits, slots, positions, edits, first, add_bias)

    def _draw(self, packed: PackedStep, logits: torch.Tensor) -> torch.Tensor:
        """Returns int64 [L, 2], number of tokens and id of each row: the output of the graph,
        unless some row needs more than temperature.
        """
        step, views, graph = packed.step, packed.views, packed.graph
        unpadded_rows = packed.unpadded_rows
        temperature_only = (
            step.penalties is None and not len(packed.truncated) and not packed.biased
        )
        if graph is not None and temperature_only and step.masked is None:
            return graph.drawn
        if packed.biased or step.penalties is not None:
            logits = logits.to(torch.float32, copy=True)
        if packed.biased:
            self._apply_logit_edits(logits, views, add_bias=True)
        counted = None
        if step.penalties is not None:
            counted = self._penalties.apply(logits, step.penalties, unpadded_rows)
        last_token = self._state.by_slot.last_token
        rows = packed.truncated if unpadded_rows is None else unpadded_rows[packed.truncated]
        drawn = self._sampler.sample(logits, views.sampling, last_token, rows)
        if counted is not None:
            self._penalties.count(drawn, *counted)
        return drawn

    def _kept_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of all logits if `keep_logits`, else None; complete when the step has
        ended.
        """
        return self._sampler.gather_logits(logits).clone() if self.keep_logits else None

    # --------------------------------------------------------------------------------------- graphs

    def capture(
        self,
        sizes: tuple[int, ...],
        mixed: tuple[StepShape, ...] = (),
        progress: Callable[[int, int], None] | None = None,
        drop_slower: bool = False,
        later: bool = False,
    ) -> None:
        """Captures decode steps of these sizes, and steps with prompts if the backend's part for
        them can be captured.

        - sizes: numbers of decode rows
        - mixed: shapes of steps with prompts
        - progress: called as progress(done, total)
        - drop_slower: leave out small sizes that measure slower than the next larger one; not for
          several ranks that must agree
        - later: leave most shapes to `capture_next`; not for several ranks that must use the same
          graphs
        """
        traits = self._backend.traits
        if not (traits.captures_decode and sizes):
            return
        mixed = mixed if traits.captures_prefill else ()
        shapes: Sequence[StepShape] = [*map(decode_only, sizes), *mixed]
        shapes += shared_prefix_variants(shapes) if self.shares else []
        first, deferred = eager_and_deferred(shapes) if later else (shapes, [])
        verifying = verifying_ladder(self.largest)
        graphs = Graphs(self.device)
        count = _counter(len(shapes) + len(verifying) * traits.captures_prefill, progress)

        @torch.inference_mode()
        def work() -> None:
            for kind in (False, True):
                kind_shapes = [shape for shape in first if (shape.num_prefills > 0) == kind]
                graphs.capture(kind_shapes, self._padding, self._body, count)
            if traits.captures_prefill:
                graphs.capture(verifying, self._padding, self._body, count)
            if drop_slower:
                graphs.drop_slower_small_ones(self._padding)
            if self.adapters is not None:
                body = partial(self._body, adapted=True)
                adapter_graphs.capture(first, self._padding, body, lambda: None)

        adapter_graphs = Graphs(self.device)
        self.device.run(work)
        self._graphs, graphs.deferred = graphs, deferred
        self._adapter_graphs = adapter_graphs

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    @property
    def graphs_deferred(self) -> int:
        """Number of graphs that `capture_next` has still to capture."""
        return len(self._graphs.deferred)

    def capture_next(self) -> StepEvent:
        """Queues the capture of the next deferred graph. Only while no step is in flight: the
        capture uses a step's buffers.
        """
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
        """Measures `step_cost`, and finds the numbers of tokens whose steps are faster with the
        next larger graph. To be called when all graphs are captured or deferred; does nothing if
        the backend captures none.

        - agreed: called with the numbers of tokens for which this rank found a larger graph to be
          faster; returns those for which all ranks found so
        - known: what was measured before on this GPU, for this runner's graphs
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

    def _replayed(self, shape: StepShape, step: Step) -> float:
        """Seconds of the device for `step`, by the graph of `shape`."""
        found: list[float] = []

        @torch.inference_mode()
        def work() -> None:
            self._pack_for_graph(self._graphs[shape].views, step)
            found.append(self._graphs.seconds(shape, calibrate.REPLAYS))

        self.device.run(work)
        return found[0]

    def _padding(self, shape: StepShape) -> tuple[DeviceStep, StepMetadata]:
        """Writes a step of padding rows into the buffers that graphs read; returns the views and
        the metadata.
        """
        rows = min(shape.num_rows, self.largest.rows)
        samples = shape.num_tokens if shape.verifies else rows
        return self._pack_for_graph(
            self._device_buffers.views(shape, samples, padded=True), empty_step()
        )

    def _pack_for_graph(self, views: DeviceStep, step: Step) -> tuple[DeviceStep, StepMetadata]:
        """Writes the step into the buffers that graphs read; returns the views and the metadata."""
        packed = self._make_packed(step, self._buffers[0], views, None)
        self._upload(packed)
        return views, self._build_metadata(packed)

    def _body(
        self, views: DeviceStep, metadata: StepMetadata, adapted: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The work that a graph captures; see graphs.py."""
        self._prepare(views, views.shape.verifies)
        logits = self._logits(views, metadata, adapted=adapted)
        assert logits is not None
        last_token = self._state.by_slot.last_token
        return logits, self._sampler.sample(logits, views.sampling, last_token, EMPTY_INT64)


def _counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """Returns a function whose calls count up to `total`, and report each count to `progress`."""
    done = itertools.count(1)
    return lambda: None if progress is None else progress(next(done), total)
