"""A step's buffers on the device, at fixed addresses: the words that the host uploads, and what the
expand kernel makes of them.

They have room for the largest step. All of it is written and read on one stream, so one of each is
enough, with graphs and without. A DeviceStep (kernels/tables.py) is views of them. Knows no model
and no request.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.attention.interface import HostLengths, PlanInputs, Traits
from pipeinfer.engine.rooms import LargestStep, layout
from pipeinfer.engine.slot_state import FIELD_WORDS, SlotState, fields_by_name
from pipeinfer.kernels.interface import Kernels
from pipeinfer.kernels.tables import DeviceStep, GraphShape
from pipeinfer.steps.step import Step
from pipeinfer.tensors import tensor_of

MOST_VIEWS = 1024  # that are kept: making views takes as long as packing a step
PAIRS = 1 << 14  # changes of the slots' state that are uploaded with a step


class DeviceBuffers:
    """For steps up to `largest`, of which attention wants what its `traits` say.

    words: int32, what the host uploads of a step, see rooms.Layout. most_pairs: changes of the
    slots' state that fit into it.
    """

    def __init__(
        self,
        largest: LargestStep,
        page_size: int,
        traits: Traits,
        state: SlotState,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._page_size = page_size
        self._traits = traits
        self._state = state
        self._largest = largest
        self._kernels = kernels
        self.most_pairs = PAIRS
        self._views: dict[tuple[GraphShape, int, bool], DeviceStep] = {}
        words = layout(GraphShape(largest.tokens, largest.rows, largest.rows)).pairs + 2 * PAIRS
        self.words = torch.zeros(words, dtype=torch.int32, device=device)

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows, logits = 2 * largest.rows, largest.rows  # a graph has as many rows of either kind
        self._by_token = [zeros(largest.tokens, torch.int64) for _ in range(3)]
        self._by_row = [zeros(rows + 1) for _ in range(5)]
        table = self._state.by_slot.table.view(-1)
        self._kv_indices = zeros(logits * largest.pages + logits) if traits.lists_pages else table
        with_pages = {"none": 0, "prefills": 1, "all": 2}[traits.block_table]
        self._block_table = zeros(with_pages * largest.rows * largest.pages)
        self._by_logits = [zeros(logits, torch.int64) for _ in range(3)]
        self._sampling_words = zeros(logits * FIELD_WORDS)

    def views(self, shape: GraphShape, num_logits: int, padded: bool) -> DeviceStep:
        """For steps of that shape with so many rows of logits. padded: others may be smaller, and
        every row that is not theirs is padding.

        Raises ValueError for more than there is room for.
        """
        known = shape, num_logits, padded
        if known not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[known] = self._made(shape, num_logits, padded)
        return self._views[known]

    def _made(self, shape: GraphShape, num_logits: int, padded: bool) -> DeviceStep:
        if not self._largest.hold(shape) or num_logits > self._largest.rows:
            raise ValueError(
                f"{shape} with {num_logits} samples, where the largest is {self._largest}"
            )
        at, words, rows, tokens = layout(shape), self.words, shape.rows, shape.tokens
        pages = self._state.by_slot.table.shape[1]
        tables = {"none": 0, "prefills": shape.prefills, "all": rows}[self._traits.block_table]
        input_ids, positions, slot_mapping = (part[:tokens] for part in self._by_token)
        qo_indptr, prefill_qo_indptr, seq_lens, last_page_len, kv_indptr = self._by_row
        logits_indices, write_slots, sample_positions = (
            part[:num_logits] for part in self._by_logits
        )
        sampling_words = self._sampling_words[: num_logits * FIELD_WORDS]
        return DeviceStep(
            shape=shape,
            padded=padded,
            num_changes=words[:1],
            changes=words[at.pairs :],
            slots=words[at.slots : at.slots + rows],
            starts=words[at.starts : at.starts + rows],
            counts=words[at.counts : at.counts + rows],
            logits_rows=words[at.logits_rows : at.logits_rows + rows],
            tokens=words[at.tokens : at.tokens + tokens],
            prefix_leaders=words[at.leaders : at.leaders + rows] if shape.shares else None,
            prefix_ranks=words[at.ranks : at.ranks + rows] if shape.shares else None,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            qo_indptr=qo_indptr[: rows + 1],
            prefill_qo_indptr=prefill_qo_indptr[: shape.prefills + 1],
            seq_lens=seq_lens[:rows],
            last_page_len=last_page_len[:rows],
            kv_indptr=kv_indptr[: rows + 1],
            kv_indices=self._kv_indices,
            block_table=self._block_table[: tables * pages].view(tables, pages),
            logits_indices=logits_indices,
            write_slots=write_slots,
            sample_positions=sample_positions,
            sampling_words=sampling_words,
            sampling={
                **fields_by_name(sampling_words, num_logits),
                "write_slots": write_slots,
                "sample_positions": sample_positions,
            },
            lists_pages=self._traits.lists_pages,
        )

    def expand(self, step: DeviceStep) -> None:
        """On the current stream: the slots' state changes, then what was uploaded becomes what
        kernels index with."""
        self._kernels.write_words(step.changes, step.num_changes, self._state.words)
        self._kernels.expand(step, self._state.by_slot, self._page_size)

    def plan_inputs(
        self, views: DeviceStep, parity: int, words: np.ndarray, step: Step
    ) -> PlanInputs:
        """For attention. words: the step's on the host, read only if the traits want lengths
        there."""
        if views.padded:  # whatever steps a graph will run
            queries = views.shape.tokens if views.shape.prefills else 1
            pages = self._largest.pages
        else:
            queries = int(step.counts.max())
            pages = -(-int((step.starts + step.counts).max()) // self._page_size)
        host = self._on_host(views, words) if self._traits.host_lengths else None
        return PlanInputs(views, queries, pages, parity, host)

    def _on_host(self, views: DeviceStep, words: np.ndarray) -> HostLengths:
        """What the device makes of the words, as far as planning on the host needs it."""
        at, rows = layout(views.shape), views.shape.rows
        starts, counts = (words[begin : begin + rows] for begin in (at.starts, at.counts))
        counts = np.maximum(counts, views.padding)
        seq_lens = starts + counts
        queries = _indptr(counts)
        return HostLengths(
            tensor_of(seq_lens.astype(np.int32, copy=False)),
            tensor_of(queries),
            tensor_of(queries[views.shape.decodes :] - np.int32(views.query_base)),
            tensor_of(_indptr(-(-seq_lens // self._page_size))),
        )


def _indptr(sizes: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: where each of them begins, and the end."""
    found = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=found[1:])
    return found
