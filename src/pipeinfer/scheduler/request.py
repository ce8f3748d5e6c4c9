"""One request as the scheduler sees it: a token sequence, and how far the engine has come with it.

Knows no pages and no bus. Positions follow from one number: an engine that has computed c of a
request's tokens, K of which it was told, has sampled c - K + 1 more (none if c < K). Ids that a
grammar forces are known before they are computed: `jump` tells the engine of them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pipeinfer.logprobs import size, unscored
from pipeinfer.messages import Delivered, FinishReason, Work
from pipeinfer.scheduler.phase import NEXT, Phase

RESUMED = 1 << 40  # requests that ran elsewhere come before those that only waited, in their order
TOKEN_BYTES = 4  # of packed ids
UNKNOWN_OUTPUT = 256  # output tokens that a request without max_tokens is taken to need


@dataclass(slots=True, eq=False)
class Request:
    """State of a live request; see `SchedulerCore` for who changes what.

    The prompt stays as it came, in `work`: nobody looks at single ids of it.
    since: when it came, by the clock that plans are made by. admitted: when it first got a slot, by
    the same. queued: the tokens as which it counts
    while it waits. slot: -1 unless it runs.
    told: tokens told at the last admission. known: those, and what was told since (K).
    computed: confirmed by results. projected: what will be computed once the steps in flight are
    done, if none is deferred. counts_in_flight: what was planned for each of those steps, oldest
    first. steps_in_flight: how many there are, also after it lost its slot.
    cached: tokens from the prefix cache at the first admission, hit: at the last. behind: for whose
    prompt it has waited, which is its own, or, where `common` is not 0, begins with as many tokens
    as its own.
    admission: how often it was admitted; rows of older admissions are stale. spoiled: its logits
    were bad, so that nobody may reuse what was computed of it.
    logprobs, prompt_logprobs: scores of its outputs, and of its prompt's tokens so far; of
    score_size and prompt_score_size bytes each, 0 where they are not asked for.
    mask_units: what a mask of it costs, as engines found out last, -1 before. mask_turn: the plan
    in which it had one last, counted by MaskBudget.
    """

    work: Work
    arrival: int
    deadline: float
    max_total: int = 0
    prompt_len: int = 0
    outputs: array[int] = field(default_factory=lambda: array("i"))
    stops: frozenset[int] = frozenset()
    slot: int = -1
    admission: int = 0
    told: int = 0
    known: int = 0
    computed: int = 0
    projected: int = 0
    counts_in_flight: list[int] = field(default_factory=list[int])
    steps_in_flight: int = 0
    cached: int = -1
    hit: int = 0
    deferrals: int = 0
    lone_crashes: int = 0
    queued: int = 0
    phase: Phase = "new"
    spoiled: bool = False
    since: float = 0.0
    admitted: float = 0.0
    score_size: int = 0
    prompt_score_size: int = 0
    logprobs: bytearray = field(default_factory=bytearray)
    prompt_logprobs: bytearray = field(default_factory=bytearray)
    behind: Request | None = None
    common: int = 0
    mask_units: int = -1
    mask_turn: int = 0

    @property
    def id(self) -> str:
        return self.work.request_id

    @property
    def length(self) -> int:
        """Prompt and confirmed outputs."""
        return self.prompt_len + len(self.outputs)

    @property
    def confirmed(self) -> array[int]:
        """Output ids that the engine has sampled, and was not told."""
        return self.outputs[self.known - self.prompt_len : self.computed + 1 - self.prompt_len]

    @property
    def sampled(self) -> bool:
        """Whether it got output since the last admission."""
        return self.known > self.told or bool(self.confirmed)

    @property
    def ahead(self) -> int:
        """Ids that are known, and will not be computed once the steps in flight are done. Without
        forced ones it is 1 at most."""
        return self.prompt_len + len(self.outputs) - self.projected

    @property
    def prefilling(self) -> bool:
        """True while tokens known at admission are to be computed; outputs may exist already."""
        return self.projected < self.known

    @property
    def lends(self) -> bool:
        """Whether a request that the next plan admits finds the prompt in the prefix cache: the
        step that completed it has given its result, and there was a plan behind that step."""
        return self.phase == "running" and self.told <= self.computed and self.told < self.projected

    @property
    def shared(self) -> int:
        """Tokens that it will find in the pages of another, if the next plan admits it."""
        lead = self.behind
        if lead is None or self.score_from >= 0:
            return 0
        if self.common:
            return self.common if lead.phase == "running" and lead.projected >= self.common else 0
        return min(self.prompt_len, self.length - 1) if lead.lends else 0

    @property
    def borrows(self) -> bool:
        """Whether what it will find is of a prompt that is not in the prefix cache by itself."""
        lead = self.behind
        return lead is not None and self.common > 0 and self.shared > 0 and not lead.lends

    @property
    def exhausted(self) -> bool:
        """True when the steps in flight bring it to its length limit."""
        return self.projected >= self.known and self.projected + 1 >= self.max_total

    @property
    def left(self) -> int:
        """Tokens still to be computed if it grows to its max_tokens, as far as that is known."""
        wanted = self.work.params.max_tokens
        outputs = UNKNOWN_OUTPUT if wanted is None else wanted
        known = self.known - self.computed if self.phase == "running" else self.length
        return max(known, 0) + max(outputs - len(self.outputs), 0)

    @property
    def scored(self) -> int:
        """Prompt tokens that have their scores."""
        return len(self.prompt_logprobs) // self.prompt_score_size if self.prompt_score_size else 0

    @property
    def score_from(self) -> int:
        """See messages.Admit."""
        return self.scored if 0 < self.scored < self.prompt_len else -1

    def move(self, phase: Phase) -> None:
        """Only whoever keeps it from now on moves it, or who ends it."""
        assert phase in NEXT[self.phase], f"{self.id} is {self.phase} and cannot be {phase} now"
        self.phase = phase

    def take(self, count: int) -> int:
        """Projects one more row of at most `count` tokens; returns how many it will compute."""
        before = self.projected
        if before < self.known:
            self.projected = min(before + count, self.known)
        elif before + 1 < self.max_total:
            self.projected = before + 1
        self.counts_in_flight.append(count)
        self.steps_in_flight += 1
        return self.projected - before

    def confirm(self, computed: int) -> None:
        """The oldest row in flight has left the engine at `computed`; projects the others anew."""
        del self.counts_in_flight[0]
        self.rebase(computed)

    def rebase(self, computed: int) -> None:
        """The engine is at `computed` before the rows in flight."""
        self.computed = computed
        for count in self.counts_in_flight:
            if computed < self.known:
                computed = min(computed + count, self.known)
            elif computed + 1 < self.max_total:
                computed += 1
        self.projected = computed

    def begin(self, hit: int = 0) -> None:
        """It will be admitted with all its tokens; its slot is given when the plan is written. The
        prefix cache should have `hit` of them, until the engine has said what it has."""
        self.admission += 1
        self.told = self.known = self.length
        self.computed = self.projected = self.hit = hit
        self.deferrals = 0
        self.counts_in_flight.clear()

    def jump(self, count: int) -> array[int]:
        """The next row computes `count` tokens; returns those of them, and of tokens before, that
        the engine was not told."""
        begin = self.known - self.prompt_len
        self.known = self.projected + count
        return self.outputs[begin : self.known - self.prompt_len]

    def resume(self, delivered: Delivered) -> None:
        """It will go on after output that another scheduler had sampled, and that was delivered.

        How much of its prompt was cached then is not known any more. Scores that nobody knows any
        more, because a gateway alone has the ids, are zeros: its client has them.
        """
        self.outputs = array("i", delivered.ids)
        self.logprobs = bytearray(delivered.logprobs)
        if len(delivered.prompt_logprobs) > len(self.prompt_logprobs):
            self.prompt_logprobs = bytearray(delivered.prompt_logprobs)
        if self.outputs:
            _fill(self.logprobs, len(self.outputs) * self.score_size)
            _fill(self.prompt_logprobs, self.prompt_len * self.prompt_score_size)
        self.cached = 0
        self.arrival -= RESUMED

    def cut(self, length: int) -> None:
        """So many outputs are all there are."""
        del self.outputs[length:]
        del self.logprobs[length * self.score_size :]

    def score(self, first: int, raw: bytes) -> int:
        """Takes scores of prompt tokens from position `first` on; returns how many are new.
        ValueError if some before them are missing, or they are no prompt's."""
        known, size = self.scored, self.prompt_score_size
        if first > known:
            raise ValueError(f"log-probs from token {first} on, where {known} are known")
        if not size or len(raw) % size or first < 0 or first + len(raw) // size > self.prompt_len:
            raise ValueError(
                f"{len(raw)} bytes of log-probs from token {first} on, of {size} bytes for each of "
                f"{self.prompt_len} tokens"
            )
        self.prompt_logprobs += raw[(known - first) * self.prompt_score_size :]
        return self.scored - known

    def accept(
        self, tokens: list[int], logprobs: bytes = b""
    ) -> tuple[FinishReason | None, int | None]:
        """Appends confirmed output ids with their scores; what follows a stop token or the limit
        does not exist.

        Returns with what that ends it, if it does, and the stop token if it is one.
        """
        if self.score_size:
            self.logprobs += logprobs
        finish = self._accept(tokens)
        if self.score_size:
            del self.logprobs[len(self.outputs) * self.score_size :]
        return finish

    def _accept(self, tokens: list[int]) -> tuple[FinishReason | None, int | None]:
        outputs, most = self.outputs, self.max_total - self.prompt_len
        for token in tokens:
            outputs.append(token)
            if token in self.stops:
                return "stop", token
            if len(outputs) >= most:
                return "length", None
        return None, None

    def leave(self) -> None:
        """It has no slot any more; rows in flight still report."""
        self.slot = -1


def _fill(scores: bytearray, size: int) -> None:
    """Zeros up to `size` bytes."""
    scores.extend(bytes(max(size - len(scores), 0)))


def from_work(work: Work, arrival: int, now: float, since: float = 0.0) -> Request:
    """A request in its first state. Deadline: `now` + timeout, or never."""
    of_prompt = work.params.prompt_logprobs
    return Request(
        work=work,
        arrival=arrival,
        deadline=now + work.timeout if work.timeout > 0 else float("inf"),
        since=since,
        prompt_len=len(work.prompt_ids) // TOKEN_BYTES,
        stops=frozenset(work.eos_ids) | frozenset(work.params.stop_token_ids),
        score_size=size(work.params.logprobs),
        prompt_score_size=size(of_prompt),
        prompt_logprobs=bytearray() if of_prompt is None else bytearray(unscored(of_prompt)),
    )
