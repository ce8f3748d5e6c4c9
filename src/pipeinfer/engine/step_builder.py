"""Builds the arrays of a step from what the memory manager decided: Rows become a Step and its
StepDelta.

    StepBuilder     rows of the plan -> rows of the step, decodes first; what changed by slot
    RequestTable    sampling parameters of the request in each slot, as arrays over slots
    FIELDS          sampling parameters of one number each: tables over slots, what steps carry,
                    uploads and padding follow from it. The samplers (kernels/by_triton.py,
                    kernels/host.py) name those that they read: they must follow by hand

Uses no policy and no torch. This is the hot path of the engine's host: plain decodes are handled as
arrays. There are loops over rows that compute known tokens, over rows with draft tokens, over rows
with penalties or vectors, over prompts whose log-probs are asked for, over requests that come or
go, and, while some request may not sample every id, over all rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipeinfer.memory.manager import MemoryManager, Rows
from pipeinfer.memory.pages import find_shared_prefixes
from pipeinfer.messages import Admit
from pipeinfer.params import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_TOKENS,
    NO_PENALTIES,
    penalties,
)
from pipeinfer.step import (
    LAST_TOKEN,
    NO_CHANGES,
    AppendedTokens,
    BadWords,
    Constrained,
    DraftDelta,
    LogprobRows,
    MaskRows,
    PenaltyHistory,
    PenaltyRows,
    PromptLogprobChunk,
    RequestLogitEdits,
    Step,
    StepDelta,
    VectorRows,
)
from pipeinfer.wire import DRAFT_TOKEN, EMPTY_INT64, NO_DRAFTS, unpack


class StepBuilder:
    """Builds the steps of one plan after the other. Keeps the last step, because most of the next
    one may be the same: the arrays are shared then, and never written to. shares: whether steps
    list shared prefixes of decodes.
    """

    def __init__(self, memory: MemoryManager, requests: RequestTable, shares: bool = False) -> None:
        self._memory = memory
        self._shares = shares
        self._requests = requests
        self._last: tuple[Step, np.ndarray] | None = None
        # Pages to zero, since the last step that computes anything: see Rows.
        self._pages_to_zero: list[np.ndarray] = []
        self._lengths = dict[int, int]()  # see DraftDelta, since that step

    def build(self, epoch: int, rows: Rows) -> tuple[Step, np.ndarray]:
        """Returns (step, plan_rows) of the plan that the memory manager applied last.

        - plan_rows: int64 [L], the row of the plan that each row of logits belongs to

        Rows that compute nothing are left out; rows with one token come first. Changes of slots
        wait for a step that computes something.
        """
        last = self._last
        self._lengths.update(rows.first_drafts)
        if len(rows.pages_to_zero):
            self._pages_to_zero.append(rows.pages_to_zero)
        before = (-1, -1) if last is None else (last[0].epoch, last[0].number)
        if last is not None and rows.same_as_previous and before == (epoch, rows.number - 1):
            self._last = self._next(last[0], rows), last[1]
        else:
            self._last = self._build_anew(epoch, rows)
        return self._last

    def _build_anew(self, epoch: int, rows: Rows) -> tuple[Step, np.ndarray]:
        memory = self._memory
        order, decodes = _order(rows.counts)
        slots, samples = rows.slots[order], rows.samples[order]
        ends = rows.starts[order] + rows.counts[order]
        sampling, drafts = np.flatnonzero(samples), None
        last = sampling
        if rows.drafts is not None:
            drafts = rows.drafts[order]
            last = np.repeat(sampling, 1 + drafts[sampling].clip(min=0))
            # A lower bound of the position; the device checks by position which ids are suppressed.
            # by position.
            ends = np.where(drafts == NO_DRAFTS, ends, memory.slots.num_known[slots])
        step = Step(
            epoch=epoch,
            number=rows.number,
            num_decodes=decodes,
            slots=slots,
            starts=rows.starts[order],
            counts=rows.counts[order],
            samples=samples,
            tokens=_tokens(rows, order, memory),
            fields=self._requests.fields(slots[last]),
            penalties=self._requests.penalties(slots[last]),
            delta=self._delta() if len(order) else NO_CHANGES,
            logprobs=self._requests.logprobs(slots[last], ends[last]),
            prompt_logprob_chunks=tuple(self._prompt_logprob_chunks(rows, order))
            if self._requests.prompt_logprobs
            else (),
            masked=self._requests.masked(slots[last]),
            # Rows that go on in later steps only get pages of their own, so the prefixes stay.
            shared_prefixes=find_shared_prefixes(memory.table, slots[:decodes], memory.page_size)
            if self._shares
            else None,
            vectors=self._requests.vectors(slots[last]),
            drafts=drafts,
            adapted=bool(self._requests.adapter_slots(slots).any()),
        )
        return step, order[last]

    def _next(self, last: Step, rows: Rows) -> Step:
        """Returns the step after `last`, with the same rows, one token further."""
        penalties = last.penalties
        if penalties is not None and penalties.new:
            penalties = replace(penalties, new=())
        masked = last.masked
        if masked is not None and (masked.new or masked.extended):
            masked = replace(masked, new=(), extended=())
        return Step(
            last.epoch,
            rows.number,
            last.num_decodes,
            last.slots,
            rows.starts,
            last.counts,
            last.samples,
            last.tokens,
            last.fields,
            penalties,
            self._delta(),
            self._next_logprobs(last, rows),
            (),
            masked,
            last.shared_prefixes,
            last.vectors,
            None,  # drafts
            last.adapted,
        )

    def _next_logprobs(self, last: Step, rows: Rows) -> LogprobRows | None:
        """Returns the log-prob rows of the last step; ids that were suppressed there may be allowed
        now.
        """
        if last.logprobs is None or not last.logprobs.suppressed:
            return last.logprobs
        return self._requests.logprobs(rows.slots, rows.starts + rows.counts)

    def _prompt_logprob_chunks(self, rows: Rows, order: np.ndarray) -> Iterator[PromptLogprobChunk]:
        """Yields the prompt tokens whose log-probs are asked for, of rows that compute the token
        before each.
        """
        counts = rows.counts[order]
        begins = np.cumsum(counts) - counts
        for at in np.flatnonzero(rows.ids_known[order]).tolist():
            row, slot = order[at], int(rows.slots[order[at]])
            start, count = int(rows.starts[row]), int(counts[at])
            asked = self._requests.prompt_logprob_span(slot, start + 1, start + count + 1)
            if asked is not None:
                first, end, alternatives = asked
                ids = self._memory.slots.known_tokens(slot)[first:end]
                yield PromptLogprobChunk(
                    slot, first, ids, int(begins[at]) + first - start - 1, alternatives
                )

    def _delta(self) -> StepDelta:
        """Takes the changes since the last step that computes anything."""
        pages, requests = self._memory.table.take_changes(), self._requests.take_changes()
        delta = NO_CHANGES if pages is None else StepDelta(*pages)
        if requests is not None:
            admitted, fields, edits = requests
            adapter_slots = self._requests.adapter_slots(admitted)
            delta = replace(
                delta,
                admitted=admitted,
                fields=fields,
                adapter_slots=adapter_slots,
                logit_edits=edits,
            )
        if dropped := self._requests.take_dropped_grammars():
            delta = replace(delta, dropped_grammars=dropped)
        token_ids = self._requests.take_token_ids()
        if token_ids or self._lengths:
            delta = replace(delta, drafts=DraftDelta(token_ids, self._lengths))
            self._lengths = {}
        if self._pages_to_zero:
            delta = replace(delta, pages_to_zero=np.concatenate(self._pages_to_zero))
            self._pages_to_zero.clear()
        return delta


def _order(counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns rows with one token, then rows with more, each in plan order; and the number of the
    first.
    """
    singles = np.flatnonzero(counts == 1)
    if len(singles) == len(counts):
        return singles, len(singles)
    return np.concatenate((singles, np.flatnonzero(counts > 1))), len(singles)


def _tokens(rows: Rows, order: np.ndarray, memory: MemoryManager) -> np.ndarray:
    """Returns int32 [T]: the known ids of rows that have any left; for decodes LAST_TOKEN, followed
    by DRAFT_TOKEN for each draft token.
    """
    counts = rows.counts[order]
    ends = np.cumsum(counts)
    tokens = np.full(int(ends[-1]) if len(ends) else 0, LAST_TOKEN, dtype=np.int32)
    if rows.drafts is not None:
        for at in np.flatnonzero(rows.drafts[order] > 0).tolist():
            tokens[ends[at] - counts[at] + 1 : ends[at]] = DRAFT_TOKEN
    for at in np.flatnonzero(rows.ids_known[order]).tolist():
        row, end, count = order[at], int(ends[at]), int(counts[at])
        start = int(rows.starts[row])
        known = memory.slots.known_tokens(int(rows.slots[row]))
        tokens[end - count : end] = known[start : start + count]
    return tokens


# Entries of one request: the ids that it names, and a model's end tokens.
MAX_LOGIT_EDITS = MAX_STOP_TOKENS + MAX_BIASES + 2 * MAX_BAD_WORDS + 256
LAST_POSITION = 2**31 - 1
NO_LOGPROBS = -1  # in place of a number of alternatives


class RequestTable:
    """Sampling parameters by slot on the host, arrays [max_slots]; stale in empty slots, which are
    not read.
    """

    def __init__(self, max_slots: int, keeps_token_ids: bool = False) -> None:
        """Makes an empty table. keeps_token_ids: whether steps need the known ids of new requests,
        to make drafts.
        """
        self._keeps_token_ids = keeps_token_ids
        self._token_ids: dict[int, np.ndarray] = {}  # ids by slot, since the last take
        self._fields = filled(max_slots)
        self._adapter_slots = np.zeros(max_slots, dtype=np.int32)
        self._edits: dict[int, RequestLogitEdits] = {}
        self._admitted: dict[int, None] = {}  # slots, since the last take_changes, in order
        self._factors = np.zeros((max_slots, len(NO_PENALTIES)), dtype=np.float32)
        self._penalized = np.zeros(max_slots, dtype=bool)
        self._penalty_histories: dict[
            int, PenaltyHistory
        ] = {}  # histories of slots that have not sampled yet
        self._alternatives = np.full(max_slots, NO_LOGPROBS, dtype=np.int32)  # for outputs
        self._vector_sizes = np.zeros(max_slots, dtype=np.int32)
        self._vector_ids: list[np.ndarray] = [EMPTY_INT64] * max_slots
        self._until = np.zeros(max_slots, dtype=np.int32)  # before it some id is not sampled
        self._constrained: dict[int, Constrained | None] = {}  # None: it has sampled
        self._extended: dict[int, list[AppendedTokens]] = {}  # by slot, since its last sample
        self._dropped_grammars: set[int] = set()  # slots of those, since they were taken
        # By slot: see prompt_logprob_span().
        self.prompt_logprobs: dict[int, tuple[int, int, int]] = {}

    def put(self, admit: Admit) -> None:
        """Takes the parameters of the request that enters `admit.slot`."""
        slot, params = admit.slot, admit.params
        self._admitted[slot] = None
        if self._keeps_token_ids:
            self._token_ids[slot] = unpack(admit.token_ids)
        for field in FIELDS:
            self._fields[field.name][slot] = field.of(admit)
        self._adapter_slots[slot] = admit.adapter_slot
        self._edits.pop(slot, None)
        self._until[slot] = 0
        limited = params.allowed_token_ids is not None or admit.bad_word_ids
        if limited or admit.suppressed_ids or params.logit_bias:
            self._edits[slot] = edits = logit_edits_of(admit)
            self._until[slot] = LAST_POSITION if limited else edits.until.max()
        factors = penalties(params)
        self._penalized[slot] = factors != NO_PENALTIES
        if self._penalized[slot]:
            ids = unpack(admit.token_ids)
            self._factors[slot] = factors
            self._penalty_histories[slot] = PenaltyHistory(
                slot, ids[: admit.prompt_len], ids[admit.prompt_len :]
            )
        self._constrained.pop(slot, None)
        self._extended.pop(slot, None)
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            self._constrained[slot] = constrained(admit)
        self._alternatives[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._vector_sizes[slot] = params.vector_size
        self._vector_ids[slot] = np.array(params.vector_token_ids, dtype=np.int64)
        self.prompt_logprobs.pop(slot, None)
        first, alternatives = admit.prompt_logprobs_from, params.prompt_logprobs
        if alternatives is not None and first >= 0:
            self.prompt_logprobs[slot] = first, admit.prompt_len, alternatives

    def extend(self, slot: int, first: int, ids: np.ndarray) -> None:
        """Notes output `ids` int32 [n] that an AppendTokens gave the request in `slot`, from
        position `first` on.
        """
        if slot in self._constrained:
            self._extended.setdefault(slot, []).append(AppendedTokens(slot, first, ids))

    def logprobs(self, slots: np.ndarray, positions: np.ndarray) -> LogprobRows | None:
        """Returns the rows that ask for log-probs of what they sample; None if no row does.

        - slots: int32 [L], the slot of each row of logits
        - positions: [L], the position of each sampled id
        """
        rows = np.flatnonzero(self._alternatives[slots] != NO_LOGPROBS)
        if len(rows) == 0:
            return None
        chosen = slots[rows]
        suppressed = bool((self._until[chosen] > positions[rows]).any())
        return LogprobRows(rows, self._alternatives[chosen], suppressed)

    def vectors(self, slots: np.ndarray) -> VectorRows | None:
        """Returns the rows that ask for vectors, of `slots` int32 [L]; None if no row does."""
        rows = np.flatnonzero(self._vector_sizes[slots])
        if len(rows) == 0:
            return None
        chosen = slots[rows]
        numbers: list[int] = chosen.tolist()
        token_ids = tuple([self._vector_ids[slot] for slot in numbers])
        return VectorRows(rows, self._vector_sizes[chosen], token_ids)

    def adapter_slots(self, slots: np.ndarray) -> np.ndarray:
        """Returns int32 [n], where the adapters of the requests in `slots` int32 [n] lie; 0: no
        adapter.
        """
        return self._adapter_slots[slots]

    def prompt_logprob_span(self, slot: int, first: int, end: int) -> tuple[int, int, int] | None:
        """Returns (first, end, alternatives) of the prompt tokens within `first` .. `end` - 1 whose
        log-probs are asked for; None if there are none.
        """
        asked = self.prompt_logprobs.get(slot)
        if asked is None:
            return None
        first, end = max(first, asked[0]), min(end, asked[1])
        return (first, end, asked[2]) if first < end else None

    def take_changes(
        self,
    ) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[RequestLogitEdits, ...]] | None:
        """Returns the slots that were filled since the last call, int32 [a], their fields [a] by
        name, and the logit edits of requests that have some; None if no slot was filled.
        """
        if not self._admitted:
            return None
        edits = tuple(self._edits[slot] for slot in self._admitted if slot in self._edits)
        slots = np.fromiter(self._admitted, dtype=np.int32)
        self._admitted.clear()
        return slots, dict(self.fields(slots)), edits

    def take_token_ids(self) -> dict[int, np.ndarray]:
        """Takes the known ids, int32 [n] by slot, of requests that came since the last call."""
        token_ids, self._token_ids = self._token_ids, {}
        return token_ids

    def fields(self, slots: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns the sampling fields of `slots` int32 [L], by name."""
        return {name: values[slots] for name, values in self._fields.items()}

    def penalties(self, slots: np.ndarray) -> PenaltyRows | None:
        """Returns the rows that have penalties, of `slots` int32 [L]; None if no row has any."""
        rows = np.flatnonzero(self._penalized[slots])
        if len(rows) == 0:
            return None
        chosen = slots[rows].astype(np.int64)
        new = tuple(
            self._penalty_histories.pop(slot)
            for slot in chosen.tolist()
            if slot in self._penalty_histories
        )
        return PenaltyRows(rows, chosen, self._factors[chosen], new)

    def drop_grammars(self, slots: Iterable[int]) -> None:
        """Marks the grammars in these slots as dropped: their requests have ended."""
        self._dropped_grammars.update(slot for slot in slots if slot in self._constrained)

    def drop_all_grammars(self) -> None:
        """Marks the grammars of all slots as dropped."""
        self._dropped_grammars.update(self._constrained)

    def take_dropped_grammars(self) -> tuple[int, ...]:
        """Takes the slots whose requests had a grammar and have ended since the last call."""
        dropped = tuple(self._dropped_grammars)
        self._dropped_grammars.clear()
        return dropped

    def masked(self, slots: np.ndarray) -> MaskRows | None:
        """Returns the rows that may not sample every id, of `slots` int32 [L]; None if all rows
        may.
        """
        if not self._constrained:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._constrained]
        if not rows:
            return None
        chosen, new, extended = slots[rows], list[Constrained](), list[AppendedTokens]()
        for slot in chosen.tolist():
            first = self._constrained[slot]
            if first is not None:
                new.append(first)
                self._constrained[slot] = None
            extended += self._extended.pop(slot, ())
        return MaskRows(np.array(rows, dtype=np.int64), chosen, tuple(new), tuple(extended))


def constrained(admit: Admit) -> Constrained:
    """Returns the restrictions of a request that enters its slot. It may jump forward only if a
    forced id has no effect but its place in the output: no log-prob is asked for, no penalty counts
    it, and no id is suppressed.
    """
    ids, params = unpack(admit.token_ids), admit.params
    spec, budget = params.structured_outputs, params.thinking_token_budget
    output = ids[admit.prompt_len :]
    jumps = params.logprobs is None and penalties(params) == NO_PENALTIES
    jumps = jumps and not (
        admit.suppressed_ids or admit.bad_word_ids or params.allowed_token_ids is not None
    )
    return Constrained(admit.slot, spec, budget, output, admit.reasoning, admit.prompt_len, jumps)


def logit_edits_of(admit: Admit) -> RequestLogitEdits:
    """Returns the logit edits of a request: ids that it must not sample, ids that it suppresses,
    and ids that it makes more or less likely; an id may be all of these. If the request lists
    allowed ids, only these are left.

    Outputs are counted from the prompt's end, not from the admission: a request that was preempted
    comes back with outputs among its known tokens.
    """
    params, allowed = admit.params, admit.params.allowed_token_ids
    never = dict.fromkeys([ids[0] for ids in admit.bad_word_ids if len(ids) == 1], 0.0)
    suppressed = never | dict.fromkeys(
        admit.suppressed_ids, 0.0
    )  # ids that are not sampled come first
    values = suppressed | params.logit_bias
    if allowed is not None:
        allowed_ids = frozenset(allowed)
        never, suppressed = (
            {t: 0.0 for t in named if t in allowed_ids} for named in (never, suppressed)
        )
        values = {token: params.logit_bias.get(token, 0.0) for token in (*suppressed, *allowed)}
    until = np.zeros(len(values), dtype=np.int32)
    until[: len(suppressed)] = min(admit.prompt_len + params.min_tokens, LAST_POSITION)
    until[: len(never)] = LAST_POSITION
    ids = np.fromiter(values, dtype=np.int32)
    added = np.fromiter(values.values(), dtype=np.float32)
    return RequestLogitEdits(admit.slot, ids, added, until, allowed is not None, _bad_words(admit))


def _bad_words(admit: Admit) -> BadWords | None:
    """Returns the bad words of more than one id each; None if there are none."""
    longer = [ids for ids in admit.bad_word_ids if len(ids) > 1]
    if not longer:
        return None
    known = unpack(admit.token_ids)
    ends = np.cumsum([len(ids) for ids in longer], dtype=np.int32)
    ids = np.concatenate([np.array(ids, dtype=np.int32) for ids in longer])
    recent = known[admit.prompt_len :][-MAX_BAD_WORD_IDS:]
    return BadWords(ends, ids, admit.prompt_len, len(known), recent)


# MAX_TOP_K and MAX_FLOAT32 bound the numbers of any request, so that they fit into the dtypes of
# FIELDS. The API accepts narrower ranges: see params.py.
MAX_TOP_K = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Field:
    """A sampling parameter of one number.

    Attributes:
    - name: name of the field
    - dtype: of NumPy
    - filler: value in an empty slot
    - of: returns the value of the request that `admit` admits
    """

    name: str
    dtype: Any
    filler: float
    of: Callable[[Admit], float]


FIELDS = (
    Field("temperature", np.float32, 0.0, lambda admit: min(admit.params.temperature, MAX_FLOAT32)),
    Field(
        "top_k", np.int32, 0, lambda admit: min(max(admit.params.top_k, 0), MAX_TOP_K)
    ),  # 0 is off
    Field("top_p", np.float32, 1.0, lambda admit: admit.params.top_p),  # 1 is off
    Field("min_p", np.float32, 0.0, lambda admit: min(admit.params.min_p, 1.0)),  # 0 is off
    Field("seed", np.uint64, 0, lambda admit: admit.seed & (2**64 - 1)),
)


def filled(count: int, **values: ArrayLike) -> dict[str, np.ndarray]:
    """Returns [count] of each field, by name: `values` (one for all entries, or one for each), and
    fillers for the other fields.
    """
    return {
        field.name: np.full(count, values.get(field.name, field.filler), dtype=field.dtype)
        for field in FIELDS
    }
