"""What lies on the device of a step: the words that the host writes, and what they expand to.

Room for the largest step, at fixed addresses: all of it is written and read on one stream, so one
is enough, with graphs and without. Knows no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeinfer.attention.interface import Traits
from pipeinfer.attention.rows import PagedRows, RowArrays, offsets
from pipeinfer.engine.rooms import LargestStep, Room, layout
from pipeinfer.engine.slot_state import FIELD_WORDS, SlotState, fields_by_name
from pipeinfer.kernels.interface import Kernels
from pipeinfer.kernels.tables import Expanded, Rows
from pipeinfer.steps.step import Step
from pipeinfer.tensors import tensor_of

GATHERED = {"no": 0, "prompts": 1, "all": 2}  # kinds of rows
MOST_CUTS = 1024  # that are kept: cutting tensors takes as long as packing a step
PAIRS = 1 << 14  # changes of the slots' state that are uploaded with a step


@dataclass(frozen=True)
class Cut:
    """The arrays of steps of one size. graph: others may be smaller, and every row is padded.

    pairs, count: what changes in the slots' state. sampling: what samplers are handed of the S
    entries, by name. last: int64 [S], tokens with logits; None if all have, in order. lines, seats:
    as in RowArrays, in rooms that share.
    """

    room: Room
    samples: int
    graph: bool
    count: torch.Tensor
    pairs: torch.Tensor
    rows: Rows
    expanded: Expanded
    sampling: dict[str, torch.Tensor]
    last: torch.Tensor | None
    lines: torch.Tensor | None
    seats: torch.Tensor | None

    @property
    def padding(self) -> int:
        """Tokens and keys of a row that is nobody's."""
        return int(not self.room.prefills)

    @property
    def base(self) -> int:
        """The token from which prompts' queries are counted."""
        return 0 if self.graph else self.room.decodes


class StepArrays:
    """For steps up to `largest`, of which attention wants what its `traits` say."""

    def __init__(
        self,
        largest: LargestStep,
        page_size: int,
        traits: Traits,
        state: SlotState,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        rows, entries = 2 * largest.rows, largest.rows  # a graph has as many of either kind
        self._page_size = page_size
        self._traits = traits
        self._state = state
        self._largest = largest
        self._kernels = kernels
        self.most_pairs = PAIRS
        self._cuts: dict[tuple[Room, int, bool], Cut] = {}
        words = layout(Room(largest.tokens, largest.rows, largest.rows)).pairs + 2 * PAIRS
        self.words = torch.zeros(words, dtype=torch.int32, device=device)

        def room(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._room = Expanded(
            *(room(largest.tokens, torch.int64) for _ in range(3)),
            *(room(rows + 1) for _ in range(5)),
            listed=room(entries * largest.pages + entries if traits.listed else 0),
            gathered=room(largest.pages * GATHERED[traits.gathered] * largest.rows),
            last=room(entries, torch.int64),
            write_slots=room(entries, torch.int64),
            sample_positions=room(entries, torch.int64),
            fields=room(entries * FIELD_WORDS),
        )

    def cut(self, room: Room, samples: int, graph: bool) -> Cut:
        """For steps of that size with so many entries for sampling.

        Raises ValueError for more than there is room for.
        """
        known = room, samples, graph
        if known not in self._cuts:
            if len(self._cuts) >= MOST_CUTS:
                self._cuts.clear()
            self._cuts[known] = self._cut(room, samples, graph)
        return self._cuts[known]

    def _cut(self, room: Room, samples: int, graph: bool) -> Cut:
        if not self._largest.hold(room) or samples > self._largest.rows:
            raise ValueError(f"{room} with {samples} samples, where the largest is {self._largest}")
        at, words, whole = layout(room), self.words, self._room
        parts = [words[begin : begin + room.rows] for begin in at[:4]]
        tokens, pages = room.tokens, self._state.by_slot.table.shape[1]
        gathered = {"no": 0, "prompts": room.prefills, "all": room.rows}[self._traits.gathered]
        expanded = Expanded(
            positions=whole.positions[:tokens],
            places=whole.places[:tokens],
            ids=whole.ids[:tokens],
            offsets=whole.offsets[: room.rows + 1],
            prompt_offsets=whole.prompt_offsets[: room.prefills + 1],
            lengths=whole.lengths[: room.rows],
            last_page=whole.last_page[: room.rows],
            begins=whole.begins[: room.rows + 1],
            listed=whole.listed,
            gathered=whole.gathered[: gathered * pages].view(gathered, pages),
            last=whole.last[:samples],
            write_slots=whole.write_slots[:samples],
            sample_positions=whole.sample_positions[:samples],
            fields=whole.fields[: samples * FIELD_WORDS],
        )
        sampling = fields_by_name(expanded.fields, samples)
        sampling["sample_positions"] = expanded.sample_positions
        sampling["write_slots"] = expanded.write_slots
        every = graph and not room.prefills
        return Cut(
            room,
            samples,
            graph,
            words[:1],
            words[at.pairs :],
            Rows(*parts, tokens=words[at.tokens :][:tokens]),
            expanded,
            sampling,
            None if every else expanded.last,
            words[at.lines : at.lines + room.rows] if room.shares else None,
            words[at.seats : at.seats + room.rows] if room.shares else None,
        )

    def expand(self, cut: Cut) -> None:
        """On the current stream: what the words there say becomes what kernels index with."""
        self._kernels.write_words(cut.pairs, cut.count, self._state.words)
        held, page_size = self._state.by_slot, self._page_size
        self._kernels.expand(cut.rows, held, page_size, cut.padding, cut.base, cut.expanded)

    def paged(
        self, cut: Cut, parity: int, words: np.ndarray, step: Step | None, table: np.ndarray | None
    ) -> PagedRows:
        """The rows for attention. words: the step's on the host, read only if the traits want
        lengths there; step: of a cut that is no graph's; table: int32 [R, P] pages of its rows, if
        they want lengths there.
        """
        out, room = cut.expanded, cut.room
        pages, queries = out.gathered, room.tokens if room.prefills else 1
        if step is not None:
            longest = int((step.starts + step.counts).max())
            pages, queries = pages[:, : -(-longest // self._page_size)], int(step.counts.max())
        device = RowArrays(
            out.lengths,
            out.last_page,
            out.offsets,
            out.prompt_offsets,
            out.begins,
            out.listed if self._traits.listed else self._state.by_slot.table.view(-1),
            pages,
            cut.lines,
            cut.seats,
        )
        host = self._on_host(cut, words, table) if self._traits.host_lengths else None
        return PagedRows(room.decodes, queries, parity, host, device, cut.graph)

    def _on_host(self, cut: Cut, words: np.ndarray, table: np.ndarray | None) -> RowArrays:
        """What the device makes of the words, as far as planning on the host needs it."""
        at, room = layout(cut.room), cut.room
        starts, counts = (words[begin : begin + room.rows] for begin in (at.starts, at.counts))
        counts = np.maximum(counts, cut.padding)
        lengths = starts + counts
        held = -(-lengths // self._page_size)
        queries, pages = (offsets(sizes) for sizes in (counts, held))
        parts = (
            lengths, lengths - (np.maximum(held, 1) - 1) * self._page_size, queries,
            queries[room.decodes :] - cut.base, pages if self._traits.listed else pages[:0],
        )  # fmt: skip
        none = np.zeros(0, dtype=np.int32)
        arrays = [part.astype(np.int32, copy=False) for part in parts]
        return RowArrays(
            *(tensor_of(part) for part in arrays),
            indices=tensor_of(none),
            table=tensor_of(none if table is None else table),
        )
