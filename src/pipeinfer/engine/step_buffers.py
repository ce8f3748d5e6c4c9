"""The memory that a step goes through, on the host and on the device.

    pinned words of its parity       words on the device        what they expand to
    (StepBuffers, written by the  -> (DeviceBuffers.words) ->   (DeviceBuffers, viewed by
    StepPacker)                           |                      a DeviceStep)
                                          v                           ^
                                     slot state (SlotState) ----------+

The pinned words have two parities, since the host packs step N + 1 while the copy of step N may be
in flight; so have the buffers of downloads. The device has one buffer of each kind, at fixed
addresses, with room for the largest step. Only the forward stream writes them. They are read on
that stream, and, in graphs with decode rows and prefill rows, by the attention of the prefill rows
on a stream that forks from the forward stream and joins it again in each layer
(PagedBackend.attend, attention/interface.py): so later work of the forward stream comes after all
reads. The host uses plain NumPy, without loops over rows: this is the hot path of the engine's
host. No model and no request is known here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from pipeinfer.attention.interface import (
    AttentionInputs,
    AttentionMetadata,
    BackendCapabilities,
    HostLengths,
)
from pipeinfer.engine.device import Device
from pipeinfer.engine.graphs import StepCapacity
from pipeinfer.engine.step_builder import FIELDS, filled
from pipeinfer.kernels.interface import (
    BAD_WORDS_HEADER,
    NO_LOGITS,
    DeviceStep,
    Kernels,
    SlotBadWords,
    SlotDrafts,
    SlotLogitEdits,
    SlotTables,
    StepShape,
    tensor_of,
)
from pipeinfer.params import MAX_BAD_IDS, MAX_BAD_WORD_IDS, MAX_BAD_WORDS
from pipeinfer.step import BadWords, DraftDelta, RequestLogitEdits, Step, StepDelta
from pipeinfer.wire import EMPTY_INT32, NO_DRAFTS

Propose = Callable[[DeviceStep, SlotTables], None]  # such as Kernels.propose_ngrams

ALIGN = 4  # words: kernels load 16 bytes at once where they may
MAX_VIEWS = 1024  # views that are kept: making views takes as long as packing a step
MAX_CHANGES = 1 << 14  # changes of the slots' state that are uploaded with a step


class Layout(NamedTuple):
    """The first word (int32) of each array in the words that are uploaded, by one copy a step.

        | num_changes | slots | starts | counts | logits_rows | leaders | ranks | tokens | changes |
          ALIGN         R       R        R        R             R         R       T        2n

    R rows and T tokens are those of the shape; kernels/interface.py describes the arrays. Changes
    are pairs (index, value) of SlotState.words. leaders, ranks: DeviceStep's prefix_leaders and
    prefix_ranks. Written by StepPacker, read by the kernels scatter_words and prepare_inputs.
    """

    slots: int
    starts: int
    counts: int
    logits_rows: int
    leaders: int
    ranks: int
    tokens: int
    changes: int


@lru_cache(maxsize=4096)
def layout(shape: StepShape) -> Layout:
    """Returns the layout of `shape`, in which every array begins at a multiple of 16 bytes."""
    at = [ALIGN]
    for size in (*[shape.num_rows] * 6, shape.num_tokens):
        at.append(at[-1] + -(-size // ALIGN) * ALIGN)
    return Layout(*at)


class StepPacker:
    """Writes steps into `words` int32, one after the other, in the arrangement of Layout. Padding
    rows have the slot `padding_slot`.
    """

    def __init__(self, words: np.ndarray, padding_slot: int) -> None:
        self.words = words
        self._padding_slot = padding_slot
        self._last: tuple[StepShape, int, Step] | None = None
        self._unpadded_rows: np.ndarray | None = None

    def pack(
        self, step: Step, shape: StepShape, num_logits: int, changes: np.ndarray
    ) -> tuple[int, np.ndarray | None]:
        """Writes the step, and `changes` int32 [2n] of the state of slots before it. Returns the
        number of words that are used, and int64, which rows of logits are the step's, all others
        being padding; None if they are the first.

        The step's decodes are the shape's first decode rows, its prompts the first prefill rows.
        There are `num_logits` rows of logits (L): in a shape of decode rows with one row of logits
        each, every row has its own, else those of the step are the first ones.
        """
        at, words, last = layout(shape), self.words, self._last
        starts = step.starts
        if step.drafts is not None:
            starts = np.where(step.drafts == NO_DRAFTS, starts, np.int32(-1))
        _spread(words[at.starts : at.starts + shape.num_rows], starts, shape, step.num_decodes, 0)
        if last is None or last[:2] != (shape, num_logits) or not _same_rows(last[2], step):
            self._rows(step, shape, at, num_logits)
        self._last = shape, num_logits, step
        words[0] = len(changes) // 2
        words[at.changes : at.changes + len(changes)] = changes
        return at.changes + len(changes), self._unpadded_rows

    def _rows(self, step: Step, shape: StepShape, at: Layout, num_logits: int) -> None:
        words, sampling = self.words, step.samples
        if step.slots.max(initial=0) >= self._padding_slot:
            raise ValueError(f"slot {step.slots.max()}, where there are {self._padding_slot}")
        for begin, values, filler in (
            (at.slots, step.slots, self._padding_slot), (at.counts, step.counts, 0)
        ):  # fmt: skip
            _spread(words[begin : begin + shape.num_rows], values, shape, step.num_decodes, filler)
        prefixes = step.shared_prefixes
        leaders, ranks = (
            (EMPTY_INT32, EMPTY_INT32) if prefixes is None else (prefixes.leaders, prefixes.ranks)
        )
        for begin, values in ((at.leaders, leaders), (at.ranks, ranks)):
            words[begin : begin + len(values)] = values
            words[begin + len(values) : begin + shape.num_rows] = 0
        words[at.tokens : at.tokens + len(step.tokens)] = step.tokens
        if len(step.slots) < shape.num_rows:
            sampling = np.zeros(shape.num_rows, dtype=bool)
            _spread(sampling, step.samples, shape, step.num_decodes, False)
        logits_rows = words[at.logits_rows : at.logits_rows + shape.num_rows]
        self._unpadded_rows = None
        if num_logits == shape.num_rows and not shape.num_prefills:
            identity = np.arange(shape.num_rows, dtype=np.int32)
            logits_rows[:] = np.where(sampling, identity, -1 - identity)
            if not step.samples.all():
                self._unpadded_rows = np.flatnonzero(step.samples)
        elif step.verifies or shape.verifies:
            firsts = np.full(len(step.slots), NO_LOGITS, dtype=np.int32)
            if step.drafts is not None:
                sizes = 1 + step.drafts[step.samples].clip(min=0)
                firsts[np.flatnonzero(step.samples)] = np.cumsum(sizes) - sizes
            _spread(logits_rows, firsts, shape, step.num_decodes, NO_LOGITS)
        else:
            _number(logits_rows, sampling, num_logits)


def _same_rows(one: Step, last: Step) -> bool:
    """Whether two steps are equal but for `starts`: such steps share their arrays."""
    return (
        one.slots is last.slots
        and one.counts is last.counts
        and one.samples is last.samples
        and one.tokens is last.tokens
        and one.shared_prefixes is last.shared_prefixes
        and one.drafts is last.drafts
    )


def _spread(
    view: np.ndarray, values: np.ndarray, shape: StepShape, decodes: int, filler: int
) -> None:
    """Writes decodes into the shape's decode rows, prompts into its prefill rows, and `filler` into
    padding rows.
    """
    if len(values) == len(view):
        view[:] = values
        return
    end = shape.num_decodes + len(values) - decodes
    view[:decodes] = values[:decodes]
    view[decodes : shape.num_decodes] = filler
    view[shape.num_decodes : end] = values[decodes:]
    view[end:] = filler


def _number(logits_rows: np.ndarray, sampling: np.ndarray, num_logits: int) -> None:
    """Numbers the rows of logits: the first ones belong to rows that sample; each of the remaining
    ones, which are padding, is named by a row that does not sample.
    """
    logits_rows[:] = NO_LOGITS
    sampling_rows = np.flatnonzero(sampling)
    logits_rows[sampling_rows] = np.arange(len(sampling_rows))
    padding = np.arange(len(sampling_rows), num_logits, dtype=np.int32)
    if len(padding):
        logits_rows[np.flatnonzero(~sampling)[: len(padding)]] = -1 - padding


class DeviceBuffers:
    """The device's buffers for steps up to `largest`, with the tensors that the attention backend's
    `traits` ask for.

    Attributes:
    - words: int32, the words that the host uploads, see Layout
    - max_changes: changes of the state of slots that fit into the words
    """

    def __init__(
        self,
        largest: StepCapacity,
        page_size: int,
        traits: BackendCapabilities,
        state: SlotState,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._page_size = page_size
        self._traits = traits
        self._state = state
        self._largest = largest
        self._kernels = kernels
        self.max_changes = MAX_CHANGES
        self._views: dict[tuple[StepShape, int, bool], DeviceStep] = {}
        words = (
            layout(StepShape(largest.tokens, largest.rows, largest.rows)).changes + 2 * MAX_CHANGES
        )
        self.words = torch.zeros(words, dtype=torch.int32, device=device)

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows, logits = 2 * largest.rows, largest.logits  # a graph has as many rows of either kind
        self._by_token = [zeros(largest.tokens, torch.int64) for _ in range(3)]
        self._by_row = [zeros(rows + 1) for _ in range(5)]
        table = self._state.by_slot.page_table.view(-1)
        listed = largest.rows * largest.pages + largest.rows
        self._kv_indices = zeros(listed) if traits.lists_pages else table
        with_pages = {"none": 0, "prefills": 1, "all": 2}[traits.page_table]
        self._row_page_table = zeros(with_pages * largest.rows * largest.pages)
        self._by_logits = [zeros(logits, torch.int64) for _ in range(3)]
        self._sampling_words = zeros(logits * FIELD_WORDS)

    def views(self, shape: StepShape, num_logits: int, padded: bool) -> DeviceStep:
        """Returns the views for steps of that shape with `num_logits` rows of logits. padded: steps
        may be smaller than the shape, with padding rows.

        Raises ValueError for a shape that the buffers have no room for.
        """
        known = shape, num_logits, padded
        if known not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[known] = self._made(shape, num_logits, padded)
        return self._views[known]

    def _made(self, shape: StepShape, num_logits: int, padded: bool) -> DeviceStep:
        if not self._largest.hold(shape) or num_logits > self._largest.logits:
            raise ValueError(
                f"{shape} with {num_logits} samples, where the largest is {self._largest}"
            )
        at, words, rows, tokens = layout(shape), self.words, shape.num_rows, shape.num_tokens
        pages = self._state.by_slot.page_table.shape[1]
        tables = {"none": 0, "prefills": shape.num_prefills, "all": rows}[self._traits.page_table]
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
            changes=words[at.changes :],
            slots=words[at.slots : at.slots + rows],
            starts=words[at.starts : at.starts + rows],
            counts=words[at.counts : at.counts + rows],
            logits_rows=words[at.logits_rows : at.logits_rows + rows],
            tokens=words[at.tokens : at.tokens + tokens],
            prefix_leaders=words[at.leaders : at.leaders + rows] if shape.shared_prefix else None,
            prefix_ranks=words[at.ranks : at.ranks + rows] if shape.shared_prefix else None,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            qo_indptr=qo_indptr[: rows + 1],
            prefill_qo_indptr=prefill_qo_indptr[: shape.num_prefills + 1],
            seq_lens=seq_lens[:rows],
            last_page_len=last_page_len[:rows],
            kv_indptr=kv_indptr[: rows + 1],
            kv_indices=self._kv_indices,
            row_page_table=self._row_page_table[: tables * pages].view(tables, pages),
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

    def prepare(self, step: DeviceStep, propose: Propose | None = None) -> None:
        """Applies the changes of the state of slots, then expands the uploaded arrays to the
        tensors that kernels index with; on the current stream. propose: makes the draft tokens in
        between; None: no row has any.
        """
        self._kernels.scatter_words(step.changes, step.num_changes, self._state.words)
        if propose is not None:
            propose(step, self._state.by_slot)
        self._kernels.prepare_inputs(step, self._state.by_slot, self._page_size)

    def attention_inputs(
        self, views: DeviceStep, parity: int, words: np.ndarray, step: Step
    ) -> AttentionInputs:
        """Returns the inputs of attention. words: the step's words on the host, read only if the
        backend wants lengths there.
        """
        if views.padded:  # bounds of all steps that a graph will run
            shape = views.shape
            queries = shape.num_tokens if shape.num_prefills else 1
            if shape.verifies:
                queries //= shape.num_prefills
            pages = self._largest.pages
        else:
            queries = int(step.counts.max())
            pages = -(-int((step.starts + step.counts).max()) // self._page_size)
        host = self._on_host(views, words) if self._traits.host_lengths else None
        return AttentionInputs(views, queries, pages, parity, host)

    def _on_host(self, views: DeviceStep, words: np.ndarray) -> HostLengths:
        """Computes lengths and indptrs on the host, as the device computes them from the words."""
        at, rows = layout(views.shape), views.shape.num_rows
        starts, counts = (words[begin : begin + rows] for begin in (at.starts, at.counts))
        counts = np.maximum(counts, views.padding_row_tokens)
        seq_lens = starts + counts
        queries, pages = _indptr(counts), -(-seq_lens // self._page_size)
        last_page_len = seq_lens - (pages - 1) * self._page_size
        return HostLengths(
            tensor_of(last_page_len.astype(np.int32, copy=False)),
            tensor_of(queries),
            tensor_of(queries[views.shape.num_decodes :] - np.int32(views.prefill_query_base)),
            tensor_of(_indptr(pages)),
        )


def _indptr(sizes: np.ndarray) -> np.ndarray:
    """Returns int32 [n + 1], where each of `sizes` begins, and the end."""
    found = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=found[1:])
    return found


PARITIES = 2  # double buffers of the host: 0 and 1, in turn
MAX_UPLOAD_VIEWS = 1024
BLOCK = 256  # words that uploads are a multiple of, so that few sizes of them occur


class PinnedWords:
    """Pinned int32 words on the host, as many as the largest `take` so far; none before the first
    `take`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned: torch.Tensor | None = None

    def take(self, count: int) -> torch.Tensor:
        """Returns int32 [count], valid until the next `take`."""
        if self._pinned is None or len(self._pinned) < count:
            self._pinned = self._device.pinned((1 << (count - 1).bit_length(),), torch.int32)
        return self._pinned[:count]


class Download:
    """Pinned int32 words on the host to which log-probs are copied from the device."""

    def __init__(self, device: Device) -> None:
        self._words = PinnedWords(device)

    def download(self, words: torch.Tensor) -> np.ndarray:
        """Copies int32 [n] from the device, on the current stream. The result is complete when the
        copy has ended, and valid until the next download.
        """
        here = self._words.take(len(words))
        here.copy_(words, non_blocking=True)
        return here.numpy()


class StepBuffers:
    """Pinned memory of the host of one parity: uploads and downloads of a step.

    Attributes:
    - parity: which of the PARITIES double buffers, 0 or 1; the n-th launch of a runner has parity n
      % PARITIES, whatever the number of its step
    - packer: writes steps into the words that are uploaded
    - logprobs: words for the download of log-probs
    - masks: words for the upload of masks
    - attention_metadata: of the last step that was launched in these buffers; its memory is in use
      until that step has ended
    """

    def __init__(
        self, parity: int, device: Device, words: int, max_logits: int, padding_slot: int
    ) -> None:
        self.parity = parity
        self._pinned = device.pinned((words,), torch.int32)
        self.packer = StepPacker(self._pinned.numpy(), padding_slot)
        self.attention_metadata: AttentionMetadata = None
        self._drawn = device.pinned((max_logits, 2), torch.int64)
        self._drawn_on_host: np.ndarray = self._drawn.numpy()
        # Cutting tensors costs as much as a copy.
        self._upload_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[int, torch.Tensor] = {}
        self.logprobs = Download(device)
        self.masks = PinnedWords(device)

    def download(self, drawn: torch.Tensor) -> np.ndarray:
        """Copies int64 [L, 2] from the device, on the current stream. The result is complete when
        the copy has ended.
        """
        count = len(drawn)
        if count not in self._rows:
            self._rows[count] = self._drawn[:count]
        self._rows[count].copy_(drawn, non_blocking=True)
        return self._drawn_on_host[:count]

    def upload(self, words: int, target: torch.Tensor) -> None:
        """Copies the first `words`, or a few more, to the beginning of `target` on the current
        stream. `target` must be the same tensor in every call.
        """
        words = min(-(-words // BLOCK) * BLOCK, len(self._pinned))
        if words not in self._upload_views:
            if len(self._upload_views) >= MAX_UPLOAD_VIEWS:
                self._upload_views.clear()
            self._upload_views[words] = target[:words], self._pinned[:words]
        there, here = self._upload_views[words]
        there.copy_(here, non_blocking=True)


# Two words a slot first, so that these begin at an even one.
ORDER = sorted(FIELDS, key=lambda field: -np.dtype(field.dtype).itemsize)
WIDE = sum(np.dtype(field.dtype).itemsize == 8 for field in FIELDS)
FIELD_WORDS = len(FIELDS) + WIDE
SEQUENCES = 2 * MAX_BAD_WORDS  # each has two spellings
BAD_WORDS_SIZE = (
    BAD_WORDS_HEADER + MAX_BAD_WORD_IDS + SEQUENCES + 1 + MAX_BAD_IDS
)  # words of a slot
TORCH = {8: torch.int64, 4: torch.int32}  # dtypes by bytes; unsigned ones are viewed as bits


class SlotState:
    """State of the requests in slots on the device, as regions of one buffer of words:

        region              shape
        page table          [rows, pages]
        sampling fields     rows * FIELD_WORDS      which steps expand by row of logits
        adapter slots       [rows]                  0: the request has no adapter
        numbers of edits    [rows]
        edits               [3, rows, max_edits]
        bad words           [rows, BAD_WORDS_SIZE]
        lengths             [rows]                  these three if drafts are made: SlotDrafts
        token ids           [rows, max_tokens]
        drafts              [rows, max_drafts]

    rows: a row for each of `slots` requests, and one for the padding slot. All regions are in one
    buffer, so that all changes (StepDelta) are a list of indices and values. Written on the forward
    stream by scatter_words (all changes of a step that fit into its words; else the runner copies
    them), apply_logit_edits (the latest ids of requests with bad words), propose_ngrams (drafts)
    and accept_drafts (lengths and token ids). A tensor of its own is last_token, int64 [rows], the
    id that each slot sampled last, which sampling kernels write, and accept_drafts for rows with
    drafts.

    Attributes:
    - padding_slot: slot of padding rows, the last one
    - by_slot, logit_edits, adapter_slots: tensors that kernels read
    - words: the whole buffer
    - biased: on the host, bool [slots], whether a slot's edits raise or lower logits
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        max_edits: int,
        device: torch.device,
        max_tokens: int = 0,
        max_drafts: int = 0,
        acceptance: float = -1.0,
    ) -> None:
        """Allocates the buffer.

        - slots: requests
        - pages: pages of a request
        - max_edits: logit edits of a request
        - max_tokens: tokens of a request; used only if drafts are made
        - max_drafts: draft tokens of a row that are verified at a time; 0: no drafts are made
        - acceptance: see SlotDrafts
        """
        self.padding_slot, num_rows = slots, slots + 1
        self._pages = pages
        self._max_edits = max_edits
        self.biased = np.zeros(slots, dtype=bool)
        self._fields_at = num_rows * pages + num_rows * pages % 2  # see ORDER
        self._adapter_slots_at = self._fields_at + num_rows * FIELD_WORDS
        self._counts_at = self._adapter_slots_at + num_rows
        self._edits_at = self._counts_at + num_rows
        self._bad_words_at = self._edits_at + 3 * num_rows * max_edits
        self._lengths_at = self._bad_words_at + num_rows * BAD_WORDS_SIZE
        self._token_ids_at = self._lengths_at + (num_rows if max_drafts else 0)
        self._max_tokens = max_tokens if max_drafts else 0
        drafts_at = self._token_ids_at + num_rows * self._max_tokens
        words = np.zeros(drafts_at + num_rows * max_drafts, dtype=np.int32)
        fields = filled(num_rows)
        words[self._fields_at : self._adapter_slots_at] = np.concatenate(
            [fields[field.name].view(np.int32) for field in ORDER]
        )
        self.words = tensor_of(words).to(device)
        self.by_slot = SlotTables(
            page_table=self.words[: num_rows * pages].view(num_rows, pages),
            sampling_words=self.words[self._fields_at : self._adapter_slots_at],
            last_token=torch.zeros(num_rows, dtype=torch.int64, device=device),
            num_wide=WIDE,
            num_narrow=len(FIELDS) - WIDE,
            drafts=SlotDrafts(
                lengths=self.words[self._lengths_at : self._token_ids_at],
                token_ids=self.words[self._token_ids_at : drafts_at].view(num_rows, max_tokens),
                drafts=self.words[drafts_at:].view(num_rows, max_drafts),
                acceptance=acceptance,
            )
            if max_drafts
            else None,
        )
        self.adapter_slots = self.words[self._adapter_slots_at : self._counts_at]
        self.logit_edits = SlotLogitEdits(
            self.words[self._counts_at : self._edits_at],
            self.words[self._edits_at : self._bad_words_at].view(3, num_rows, max_edits),
            SlotBadWords(
                self.words[self._bad_words_at : self._lengths_at].view(num_rows, BAD_WORDS_SIZE),
                MAX_BAD_WORD_IDS,
                SEQUENCES,
                self.by_slot.last_token,
            ),
        )

    def apply_on_host(self, delta: StepDelta) -> np.ndarray:
        """Updates `biased`, and returns the changes for the device: int32 [2n], the indices in
        `words` that `delta` changes, each with its new value.
        """
        indices, values = delta.slots * np.int32(self._pages) + delta.columns, delta.pages
        if len(delta.admitted):
            admitted = self._admitted_changes(delta)
            indices = np.concatenate([indices, *(index for index, _ in admitted)])
            values = np.concatenate([values, *(value for _, value in admitted)])
        if delta.drafts is not None:
            drafts = self._draft_changes(delta.drafts)
            indices = np.concatenate([indices, *(index for index, _ in drafts)])
            values = np.concatenate([values, *(value for _, value in drafts)])
        pairs = np.empty(2 * len(indices), dtype=np.int32)
        pairs[0::2], pairs[1::2] = indices, values
        return pairs

    def _admitted_changes(self, delta: StepDelta) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (indices, values) of slots that were filled: fields, adapter slots, and edits."""
        num_rows, slots = self.padding_slot + 1, delta.admitted
        found: list[tuple[np.ndarray, np.ndarray]] = []
        begin = self._fields_at
        for field in ORDER:
            wide = np.dtype(field.dtype).itemsize // 4
            values = delta.fields[field.name].view(np.int32).reshape(-1, wide)
            for word in range(wide):
                found.append((begin + wide * slots + word, values[:, word]))
            begin += wide * num_rows
        adapter_slots = delta.adapter_slots
        if not len(adapter_slots):
            adapter_slots = np.zeros(len(slots), dtype=np.int32)
        found.append((self._adapter_slots_at + slots, adapter_slots))
        counts = dict.fromkeys(slots.tolist(), 0)
        banned = counts.copy()
        self.biased[slots] = False
        for edits in delta.logit_edits:
            self.biased[edits.slot] = edits.values.any()
            counts[edits.slot] = -len(edits.ids) if edits.only else len(edits.ids)
            found += self._logit_edit_changes(edits)
            if edits.bad_words is not None:
                banned[edits.slot] = len(edits.bad_words.ends)
                found += self._bad_word_changes(edits.slot, edits.bad_words)
        found.append((self._counts_at + slots, np.fromiter(counts.values(), np.int32)))
        found.append(
            (self._bad_words_at + slots * BAD_WORDS_SIZE, np.fromiter(banned.values(), np.int32))
        )
        return found

    def _draft_changes(self, delta: DraftDelta) -> list[tuple[np.ndarray, np.ndarray]]:
        slots = np.fromiter(delta.lengths, np.int32)
        found = [(self._lengths_at + slots, np.fromiter(delta.lengths.values(), np.int32))]
        for slot, ids in delta.token_ids.items():
            begin = self._token_ids_at + slot * self._max_tokens
            found.append((begin + np.arange(len(ids), dtype=np.int32), ids))
        return found

    def _logit_edit_changes(self, edits: RequestLogitEdits) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (indices, values) of logit edits. Raises ValueError for more edits than there is
        room for.
        """
        num_rows, count = self.padding_slot + 1, len(edits.ids)
        if count > self._max_edits:
            raise ValueError(f"{count} edits of logits, where there is room for {self._max_edits}")
        indices = self._edits_at + edits.slot * self._max_edits + np.arange(count)
        parts = edits.ids, edits.values.view(np.int32), edits.until
        return [
            (indices + part * num_rows * self._max_edits, value) for part, value in enumerate(parts)
        ]

    def _bad_word_changes(
        self, slot: int, bad_words: BadWords
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (indices, values) of bad words, without the number of sequences. Raises
        ValueError for more sequences or ids than there is room for.
        """
        if len(bad_words.ends) > SEQUENCES or len(bad_words.ids) > MAX_BAD_IDS:
            raise ValueError(
                f"no room for {len(bad_words.ends)} sequences of {len(bad_words.ids)} ids"
            )
        begin = self._bad_words_at + slot * BAD_WORDS_SIZE
        ends_at = begin + BAD_WORDS_HEADER + MAX_BAD_WORD_IDS
        longest = np.diff(bad_words.ends, prepend=0).max()
        head = np.array((bad_words.begin, bad_words.num_known, longest), dtype=np.int32)
        recent = (
            np.arange(bad_words.num_known - len(bad_words.recent), bad_words.num_known)
            % MAX_BAD_WORD_IDS
        )
        ends, ids = np.concatenate(([0], bad_words.ends)), bad_words.ids
        return [
            (begin + 1 + np.arange(len(head)), head),
            (begin + BAD_WORDS_HEADER + recent, bad_words.recent),
            (ends_at + np.arange(len(ends)), ends),
            (ends_at + SEQUENCES + 1 + np.arange(len(ids)), ids),
        ]


def fields_by_name(words: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """Returns views [count] into the words of the fields of `count` slots or rows, by name."""
    views: dict[str, torch.Tensor] = {}
    begin = 0
    for field in ORDER:
        size = np.dtype(field.dtype).itemsize
        part = words[begin : begin + count * size // 4]
        views[field.name] = part.view(_torch_dtype(field.dtype))
        begin += len(part)
    return views


def _torch_dtype(dtype: type) -> torch.dtype:
    kind = np.dtype(dtype)
    return torch.float32 if kind == np.float32 else TORCH[kind.itemsize]
