"""A small language model that proposes draft tokens (speculative decoding).

    propose   before a step's inputs are prepared: the draft tokens of the rows that verify some,
              one forward pass for each draft position of all rows
    follow    within the step, behind the target model: computes the tokens that the target model
              computes, so that the draft model's keys and values of them are there when it
              proposes next

The draft model's keys and values lie in the same pages as the target model's, as further layers of
one pool: whatever shares, keeps, moves or zeroes pages does so for both. Its samples have the noise
of the token that they guess, (seed, position, id): if both models have the same logits they draw
the same token at any temperature. A wrong guess costs time and changes no token. The draft model
does not follow steps of many decodes; missing keys and values of such steps only make guesses
worse.
"""

from __future__ import annotations

import torch

from pipeinfer.attention.interface import Attention, AttentionInputs, AttentionMetadata, KVPool
from pipeinfer.engine.graphs import StepCapacity, decode_only
from pipeinfer.engine.kv_store import StepAttention, Store, store_for
from pipeinfer.engine.sampling import Sampler
from pipeinfer.engine.step_buffers import DeviceBuffers, SlotState
from pipeinfer.kernels.interface import DeviceStep, Kernels, SlotTables
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.wire import EMPTY_INT64


class DraftModel:
    """The draft model of one rank. All of its work is queued on the current stream.

    Arguments:
    - model: has as many ids as the target model
    - backend: attention of the draft model's layers
    - sampler: of the whole draft model, or of a rank's shard
    - largest: the largest step
    - pool: the last layers are those of the draft model
    - state: of the requests' slots
    - kernels: those of the device
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: Attention,
        sampler: Sampler,
        largest: StepCapacity,
        pool: KVPool,
        state: SlotState,
        kernels: Kernels,
    ) -> None:
        where = state.words.device
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._layers = len(model.attention_shapes())
        self._largest = largest
        self._page_size = pool.page_size
        self._state = state
        self._kernels = kernels
        rows = StepCapacity(largest.rows, largest.rows, largest.pages)
        self._buffers = DeviceBuffers(rows, pool.page_size, backend.traits, state, where, kernels)
        # Samplers write ids here: the slots' own last tokens are the target model's.
        self._unused_last_token = torch.zeros_like(state.by_slot.last_token)
        # The only row whose hidden state `follow` asks for; the result is not read.
        self._first_row = torch.zeros(1, dtype=torch.int64, device=where)
        self.bind(pool)

    def bind(self, pool: KVPool) -> None:
        """Sets the pool of later steps; its last layers are those of the draft model."""
        own = pool.of_layers(len(pool.shapes) - self._layers, len(pool.shapes))
        self._backend.bind(own, self._largest.rows)
        self._store: Store = store_for(own, self._backend.traits)
        self._metadata: dict[int, AttentionMetadata] = {}  # metadata of passes in graphs, by rows

    def follows(self, step: DeviceStep) -> bool:
        """Whether the draft model computes the tokens of `step`: not if so many requests decode
        that none would verify drafts.
        """
        return step.shape.num_decodes <= self._largest.draft_rows

    def build_metadata(self, inputs: AttentionInputs) -> AttentionMetadata | None:
        """Builds the metadata for `follow`, and for the passes of `propose` if a graph is to hold
        them; None: the draft model does not follow this step.
        """
        step = inputs.step
        if self._backend.traits.captures_decode and step.shape.verifies:
            self._metadata_of_pass(self._views(step.shape.num_prefills))
        return self._backend.build_metadata(inputs) if self.follows(step) else None

    def follow(self, step: DeviceStep, metadata: AttentionMetadata | None) -> None:
        """Computes the tokens of `step`, whose inputs are prepared. metadata: see
        `build_metadata`.
        """
        if metadata is not None:
            self._forward(step, metadata, self._first_row)

    def propose(self, step: DeviceStep, slot_tables: SlotTables) -> None:
        """Writes SlotDrafts.drafts of each row of `step` that verifies draft tokens, as
        Kernels.propose_ngrams does. Such a row has several tokens and a start below 0 (its start is
        SlotDrafts.lengths, known on the device alone). Each pass computes one token of each such
        row, the last token or the draft token before, and samples the next draft token from its
        logits.
        """
        drafts = slot_tables.drafts
        assert drafts is not None
        begin = step.shape.num_decodes  # rows of one token have no drafts
        all_slots, starts, counts = step.slots[begin:], step.starts[begin:], step.counts[begin:]
        for number in range(drafts.drafts.shape[1]):
            rows = (starts < 0) & (counts > number + 1)
            slots = torch.where(rows, all_slots, self._state.padding_slot)
            if not self._backend.traits.captures_decode:  # then there are no padding rows
                slots = slots[rows]
                if not len(slots):
                    return
                rows = rows[rows]
            views, at = self._views(len(slots)), slots.long()
            tokens = drafts.drafts[at, number - 1] if number else slot_tables.last_token[at]
            views.slots.copy_(slots)
            views.counts.copy_(rows)
            views.starts.copy_(torch.where(rows, drafts.lengths[at] + number, 0))
            views.tokens.copy_(tokens)
            index = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
            views.logits_rows.copy_(torch.where(rows, index, -1 - index))
            self._kernels.prepare_inputs(views, slot_tables, self._page_size)
            hidden = self._forward(views, self._metadata_of_pass(views), None)
            logits = self._sampler.logits(hidden)
            drawn = self._sampler.sample(
                logits, views.sampling, self._unused_last_token, EMPTY_INT64
            )
            drafts.drafts[at, number] = drawn[:, 1].int()

    def _views(self, rows: int) -> DeviceStep:
        """Returns the views of a pass of `rows` rows. If graphs are captured, rows without a draft
        are padding.
        """
        padded = self._backend.traits.captures_decode
        return self._buffers.views(decode_only(rows), rows, padded=padded)

    def _metadata_of_pass(self, views: DeviceStep) -> AttentionMetadata:
        """Returns the metadata of a pass whose inputs are prepared. The metadata of graphs is built
        once, since all of it lies at fixed addresses.
        """
        inputs = AttentionInputs(views, 1, self._largest.pages)
        if not views.padded:
            return self._backend.build_metadata(inputs)
        rows = views.shape.num_rows
        if rows not in self._metadata:
            self._metadata[rows] = self._backend.build_metadata(inputs)
        return self._metadata[rows]

    def _forward(
        self, step: DeviceStep, metadata: AttentionMetadata, rows: torch.Tensor | None
    ) -> torch.Tensor:
        attend = StepAttention(self._backend, metadata, self._store, step.slot_mapping)
        return self._model(step.input_ids, step.positions, attend, rows)
