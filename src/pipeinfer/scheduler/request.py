"""A request in the scheduler: a token sequence, and how far the engine has come with it.

Knows no pages and no bus. Positions follow from one number: if the scheduler gave an engine K ids
of a request, and the engine has computed c tokens of it, it has sampled max(c - K + 1, 0). Ids that
a grammar forces are known before they are computed: `jump` sends them to the engine (jump-forward
decoding).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from pipeinfer.core import remaining_decodes
from pipeinfer.messages import Delivered, FinishReason, Hello, TokenizedRequest, num_ids
from pipeinfer.wire import logprob_bytes, no_logprob

# taken off the arrival number of resumed requests: they come first, in their order
RESUMED = 1 << 40
UNKNOWN_OUTPUT = 256  # output tokens assumed for a request without max_tokens
DRAFT_RATE_STEP = 1 / 4  # how much one step's draft tokens change the rate of accepted ones


@dataclass(slots=True, eq=False)
class Request:
    """State of a live request. Lengths are in tokens.

    - confirmed: reported by a Result
    - projected: expected after all steps in flight. The engine's MemoryManager works with projected
      values only: its SlotArrays.num_projected (memory/pages.py) is `projected` here, less rows
      that it has deferred

    Attributes:
    - work: the message of the request; its prompt stays there, as bytes
    - arrival: number among all requests of this scheduler
    - arrived_at: when the request came, in seconds by the SuspendAwareClock of SchedulerCore
    - admitted_at: when it first got a slot, by the same clock
    - deadline: by the clock of events; infinite without one
    - max_total: most tokens, prompt and output, that it may have
    - prompt_len: tokens of the prompt
    - outputs: ids, int32, that results have confirmed
    - stops: ids that end the request
    - phase: see Phase
    - slot: slot of the engine; -1 unless the request runs
    - admission: how often it was admitted; rows of older admissions are stale
    - admitted_len: tokens that the last admission sent
    - known_len: those, and ids that the engine got since (K above)
    - computed: tokens that results have confirmed as computed
    - projected: tokens that are computed after the steps in flight, if no row is deferred
    - drafted: has had draft tokens since its last admission
    - reached: maximum of `projected` since the request has drafts; the engine holds pages for that
      many tokens
    - counts_in_flight: planned tokens of each step in flight since the last admission, oldest
      first. A drafted request's entry is -(1 + drafts): how many drafts are accepted is not known
      before the step's result, and `projected` counts all
    - steps_in_flight: steps without a result that have a row of the request, of older admissions,
      too
    - first_cache_hit: tokens that the prefix cache had at the first admission, -1 until known
    - cache_hit: tokens that the prefix cache had at the last admission
    - deferrals: steps in a row in which the engine had no page for the request
    - crashes_alone: engines that crashed while they ran the request alone
    - lost_in_flight: a step of the request was in flight when an engine was lost, and the request
      has had no token since
    - bad_logits: the logits were not finite, so that no request may reuse this one's pages
    - lost_tokens: tokens computed by an engine that was lost since; 0 once its successor has
      reported how many of them it found in kept pages
    - queued_tokens: tokens to compute, as counted when the request came into the queue
    - prefix_source: the request whose pages this one will share
    - shared_len: tokens at the beginning whose pages are shared with `prefix_source`; 0: the whole
      prompt
    - logprobs, prompt_logprobs: packed log-probs of the outputs, or the vector, and of the prompt's
      tokens so far
    - logprob_size, prompt_logprob_size: bytes of each of these; 0 if they are not asked for
    - draft_rate: 0 to 1, share of its latest draft tokens that were accepted; see Drafter
    - adapter_slot: slot of the engines where the adapter lies or will lie; 0: no adapter, or none
      yet
    - mask_units: cost of one mask of the grammar, as an engine last reported; -1 before
    - mask_turn: number of the plan that last had a mask of it, counted by MaskBudget; below 0: its
      next mask is paid for, and it goes first
    """

    work: TokenizedRequest
    arrival: int
    deadline: float
    max_total: int = 0
    prompt_len: int = 0
    outputs: array[int] = field(default_factory=lambda: array("i"))
    stops: frozenset[int] = frozenset()
    slot: int = -1
    admission: int = 0
    admitted_len: int = 0
    known_len: int = 0
    computed: int = 0
    projected: int = 0
    counts_in_flight: list[int] = field(default_factory=list[int])
    steps_in_flight: int = 0
    first_cache_hit: int = -1
    cache_hit: int = 0
    deferrals: int = 0
    crashes_alone: int = 0
    lost_in_flight: bool = False
    lost_tokens: int = 0
    queued_tokens: int = 0
    phase: Phase = "new"
    bad_logits: bool = False
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    logprob_size: int = 0
    prompt_logprob_size: int = 0
    logprobs: bytearray = field(default_factory=bytearray)
    prompt_logprobs: bytearray = field(default_factory=bytearray)
    prefix_source: Request | None = None
    shared_len: int = 0
    mask_units: int = -1
    mask_turn: int = 0
    drafted: bool = False
    reached: int = 0
    draft_rate: float = 1.0
    adapter_slot: int = 0

    @property
    def id(self) -> str:
        return self.work.request_id

    @property
    def length(self) -> int:
        """Number of prompt tokens and confirmed outputs."""
        return self.prompt_len + len(self.outputs)

    @property
    def sampled_ids(self) -> array[int]:
        """Confirmed output ids that the engine has sampled itself, and did not get from the
        scheduler. `computed` tokens give the id of position `computed`, too."""
        return self.outputs[self.known_len - self.prompt_len : self.computed + 1 - self.prompt_len]

    @property
    def sampled(self) -> bool:
        """Whether the request got output since the last admission."""
        return self.known_len > self.admitted_len or bool(self.sampled_ids)

    @property
    def num_forced_ahead(self) -> int:
        """Number of known ids that the steps in flight do not compute. Without forced ids it is 1
        at most."""
        return self.prompt_len + len(self.outputs) - self.projected

    @property
    def prefilling(self) -> bool:
        """True while tokens are to be computed that were known at admission, or that a grammar has
        forced since; outputs may exist already."""
        return self.projected < self.known_len

    @property
    def provides_prefix(self) -> bool:
        """Whether a request that the next plan admits finds this prompt in the prefix cache: the
        step that completed the prompt has given its result, and there was a plan after that step.
        """
        return (
            self.phase == "running"
            and self.admitted_len <= self.computed
            and self.admitted_len < self.projected
        )

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens that the request finds in the pages of its `prefix_source`, if the next
        plan admits it."""
        lead = self.prefix_source
        if lead is None or self.prompt_logprobs_from >= 0:
            return 0
        if self.shared_len:
            return (
                self.shared_len
                if lead.phase == "running" and lead.projected >= self.shared_len
                else 0
            )
        return min(self.prompt_len, self.length - 1) if lead.provides_prefix else 0

    @property
    def prefix_unpublished(self) -> bool:
        """Whether the request will share pages of a prompt that is not in the prefix cache by
        itself."""
        lead = self.prefix_source
        return (
            lead is not None
            and self.shared_len > 0
            and self.prefix_tokens > 0
            and not lead.provides_prefix
        )

    @property
    def exhausted(self) -> bool:
        """True when the steps in flight bring the request to its length limit."""
        return (
            self.projected >= self.known_len
            and remaining_decodes(self.projected, self.max_total) <= 0
        )

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens still to be computed if the request grows to its max_tokens; without
        max_tokens UNKNOWN_OUTPUT output tokens are assumed."""
        max_tokens = self.work.params.max_tokens
        outputs = UNKNOWN_OUTPUT if max_tokens is None else max_tokens
        known = self.known_len - self.computed if self.phase == "running" else self.length
        return max(known, 0) + max(outputs - len(self.outputs), 0)

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens that have their log-probs."""
        size = self.prompt_logprob_size
        return len(self.prompt_logprobs) // size if size else 0

    @property
    def prompt_logprobs_from(self) -> int:
        """Admit.prompt_logprobs_from of the next admission."""
        return self.num_prompt_logprobs if 0 < self.num_prompt_logprobs < self.prompt_len else -1

    def move(self, phase: Phase) -> None:
        """Changes the phase; AssertionError if that is no transition of NEXT. Called only by the
        container that takes the request over, or by the code that ends it."""
        assert phase in NEXT[self.phase], f"{self.id} is {self.phase} and cannot be {phase} now"
        self.phase = phase

    def project(self, count: int, drafts: int = 0) -> int:
        """Projects one more row of at most `count` tokens, `drafts` of them draft tokens; returns
        the number of tokens that the row will compute."""
        before = self.projected
        if before < self.known_len:
            self.projected = min(before + count, self.known_len)
        elif self.drafted or drafts:
            self.drafted, count = True, -1 - drafts
            self.projected = min(before - count, self.max_total - 1)
            self.reached = max(self.reached, self.projected)
        elif before + 1 < self.max_total:  # hot path: `remaining_decodes` of core.py, written out
            self.projected = before + 1
        self.counts_in_flight.append(count)
        self.steps_in_flight += 1
        return self.projected - before

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """Updates `draft_rate` after a row that had `drafts` draft tokens, `accepted` of them
        accepted."""
        if drafts:
            self.draft_rate += DRAFT_RATE_STEP * (accepted / drafts - self.draft_rate)

    def confirm(self, computed: int) -> None:
        """Takes the result of the oldest row in flight, after which the engine is at `computed`;
        projects the later rows anew."""
        del self.counts_in_flight[0]
        self.replay_in_flight(computed)

    def replay_in_flight(self, computed: int) -> None:
        """Projects the rows in flight anew: the engine is at `computed` tokens before them."""
        self.computed = computed
        for count in self.counts_in_flight:
            if computed < self.known_len:
                computed = min(computed + abs(count), self.known_len)
            elif count < 0:
                computed = min(computed - count, self.max_total - 1)
            elif computed + 1 < self.max_total:  # `remaining_decodes`, written out
                computed += 1
        self.projected = computed

    def admit(self, hit: int = 0, expected: int = 0) -> None:
        """Prepares an admission with all tokens of the request; the slot is given when the plan is
        written.

        - hit: tokens expected from the prefix cache, as far as pages are reserved by it
        - expected: tokens expected from the prefix cache, for the length of the next rows. The
          engine's Admitted corrects both
        """
        self.admission += 1
        self.admitted_len = self.known_len = self.length
        self.cache_hit = hit
        self.computed = self.projected = max(hit, expected)
        self.deferrals = self.reached = 0
        self.drafted = False
        self.counts_in_flight.clear()

    def jump(self, count: int) -> array[int]:
        """Plans that the next row computes `count` tokens, and returns the ids of these and of
        earlier tokens that the engine has not got."""
        begin = self.known_len - self.prompt_len
        self.known_len = self.projected + count
        return self.outputs[begin : self.known_len - self.prompt_len]

    def resume(self, delivered: Delivered) -> None:
        """Continues the request after output that another scheduler had sampled, and that was
        delivered.

        How much of the prompt was cached then is not known any more. Log-probs that are lost,
        because a gateway alone has the ids, are zeros: the client has them already.
        """
        self.outputs = array("i", delivered.ids)
        self.logprobs = bytearray(delivered.logprobs)
        if len(delivered.prompt_logprobs) > len(self.prompt_logprobs):
            self.prompt_logprobs = bytearray(delivered.prompt_logprobs)
        if self.outputs:
            _fill(self.logprobs, len(self.outputs) * self.logprob_size)
            _fill(self.prompt_logprobs, self.prompt_len * self.prompt_logprob_size)
        self.first_cache_hit = 0
        self.lost_tokens = self.length - 1 if self.outputs else 0
        self.arrival = self.arrival % RESUMED - RESUMED  # once, also if this is called twice

    def truncate(self, length: int) -> None:
        """Cuts the outputs to the first `length` tokens."""
        del self.outputs[length:]
        del self.logprobs[length * self.logprob_size :]

    def add_prompt_logprobs(self, first: int, raw: bytes) -> int:
        """Takes log-probs of prompt tokens from position `first` on; returns how many are new.
        ValueError if log-probs before `first` are missing, or the bytes do not fit the prompt."""
        known, size = self.num_prompt_logprobs, self.prompt_logprob_size
        if first > known:
            raise ValueError(f"log-probs from token {first} on, where {known} are known")
        if not size or len(raw) % size or first < 0 or first + len(raw) // size > self.prompt_len:
            raise ValueError(
                f"{len(raw)} bytes of log-probs from token {first} on, of {size} bytes for each of "
                f"{self.prompt_len} tokens"
            )
        self.prompt_logprobs += raw[(known - first) * self.prompt_logprob_size :]
        return self.num_prompt_logprobs - known

    def append(
        self, tokens: list[int], logprobs: bytes = b""
    ) -> tuple[FinishReason | None, int | None]:
        """Appends confirmed output ids with their log-probs; ids after a stop token or the length
        limit are dropped.

        Returns (finish reason, None if the request goes on; the stop token, None if there is none).
        """
        if self.logprob_size:
            self.logprobs += logprobs
        finish = self._accept(tokens)
        if self.logprob_size:
            del self.logprobs[len(self.outputs) * self.logprob_size :]
        return finish

    def _accept(self, tokens: list[int]) -> tuple[FinishReason | None, int | None]:
        outputs, max_outputs = self.outputs, self.max_total - self.prompt_len
        for token in tokens:
            outputs.append(token)
            if token in self.stops:
                return "stop", token
            if len(outputs) >= max_outputs:
                return "length", None
        return None, None

    def on_epoch_lost(self) -> None:
        """The epoch has ended: the request has lost its slot, and its computed tokens may be
        lost."""
        self.move("lost")
        self.free_slot()
        self.lost_tokens = max(self.lost_tokens, self.computed)

    def take_recomputed(self, found: int) -> int:
        """Takes an engine's report, at an admission, that its pages have `found` tokens of the
        request. Returns the number of tokens that a lost engine had computed and that are computed
        anew; each is counted once."""
        lost, self.lost_tokens = self.lost_tokens, 0
        return max(lost - found, 0)

    def free_slot(self) -> None:
        """Takes the slot away; rows in flight still report."""
        self.slot = -1


def _fill(logprobs: bytearray, size: int) -> None:
    """Appends zeros up to `size` bytes."""
    logprobs.extend(bytes(max(size - len(logprobs), 0)))


def request_of(work: TokenizedRequest, arrival: int, now: float, since: float = 0.0) -> Request:
    """A new request.

    - arrival: number among all requests of the scheduler
    - now: seconds by the clock of events; the deadline is `now` + timeout, or infinite without
      timeout
    - since: seconds by the SuspendAwareClock, as `Request.arrived_at`
    """
    of_prompt = work.params.prompt_logprobs
    return Request(
        work=work,
        arrival=arrival,
        deadline=now + work.timeout if work.timeout > 0 else float("inf"),
        arrived_at=since,
        prompt_len=num_ids(work.prompt_ids),
        stops=frozenset(work.eos_ids) | frozenset(work.params.stop_token_ids),
        logprob_size=logprob_bytes(work.params.logprobs, work.params.vector_size),
        prompt_logprob_size=logprob_bytes(of_prompt),
        prompt_logprobs=bytearray() if of_prompt is None else bytearray(no_logprob(of_prompt)),
    )


# Plain strings: they are stored in a scheduler's snapshot as they are.
Phase = Literal[
    "new",  # in none of the planner's containers yet
    "waiting",  # in the queue
    # until another request has computed their common prompt, or its beginning
    "waiting_for_prefix",
    "waiting_for_grammar",  # until engines have compiled it, or the mask budget allows its masks
    "waiting_for_adapter",  # until engines have loaded it
    "quarantined",  # it may have crashed an engine
    "running",  # it holds a slot
    "lost",  # its slot went with the epoch
    "finished",
]

NEXT: dict[Phase, tuple[Phase, ...]] = {
    "new": (
        "waiting",
        "waiting_for_prefix",
        "waiting_for_grammar",
        "waiting_for_adapter",
        "quarantined",
        "finished",
    ),
    "waiting": (
        "running",
        "waiting_for_prefix",
        "waiting_for_grammar",
        "waiting_for_adapter",
        "finished",
    ),
    "waiting_for_prefix": ("waiting", "waiting_for_grammar", "waiting_for_adapter", "finished"),
    "waiting_for_grammar": ("waiting", "waiting_for_prefix", "waiting_for_adapter", "finished"),
    "waiting_for_adapter": ("waiting", "waiting_for_prefix", "waiting_for_grammar", "finished"),
    "quarantined": ("running", "finished"),
    "running": ("waiting", "waiting_for_prefix", "waiting_for_grammar", "lost", "finished"),
    "lost": ("waiting", "waiting_for_prefix", "waiting_for_grammar", "quarantined", "finished"),
    "finished": (),
}


class TooLong(ValueError):
    """The request can never be served by this group.

    Attributes:
    - param: the request's field to blame
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def max_total(request: Request, shape: Hello) -> int:
    """Most tokens, prompt and output, that `request` may have on engines with the limits `shape`;
    raises TooLong.

    A given max_tokens must fit as it is; without max_tokens the result is as much as fits.
    """
    prompt, max_tokens = request.prompt_len, request.work.params.max_tokens
    pool = shape.pages * shape.page_size
    limit = min(shape.max_model_len, pool)
    if max_tokens is not None and prompt + max_tokens > limit:
        where = "the model's context" if limit == shape.max_model_len else "the KV pool"
        raise TooLong(
            "max_tokens",
            f"{prompt} prompt tokens and max_tokens {max_tokens} do not fit into {where} of "
            f"{limit} tokens",
        )
    if prompt >= limit:
        raise TooLong("prompt", f"the prompt has {prompt} tokens, at most {limit - 1} fit")
    return limit if max_tokens is None else prompt + max_tokens
