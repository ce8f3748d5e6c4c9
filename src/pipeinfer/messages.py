"""The protocol: every message between stages, and the messages of each channel.

Knows no sockets, no clocks, no torch, no stage. A message is a tagged, array-like msgspec struct,
encoded as MessagePack; token sequences are raw little-endian int32 bytes, log-probs are those of
wire.py. Structs grow only at their end, with defaults; any other change is a new PROTOCOL.
control.py has the messages of people's requests to stages, such as recordings and swaps.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec

from pipeinfer.params import (
    MAX_CHOICES,
    MAX_INT,
    Adapter,
    JsonObject,
    Number,
    ReasoningContext,
    ReasoningState,
    RequestParams,
    StructuredOutputs,
)
from pipeinfer.step_cost import StepCost

PROTOCOL = 19

# names of unloaded adapters that are kept; of earlier ones only the greatest version is
REMEMBERED_UNLOADED = 8

FinishReason = Literal["stop", "length", "abort", "error"]
# How putting a group to sleep treats the group's requests. "wait": they are answered first.
# "abort": they end at once, with the output so far. "keep": they go on at waking.
SleepMode = Literal["wait", "abort", "keep"]

# Numbers of choices, from 0; `choice_ids` of params.py makes the request id of each.
Choice = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)]
Choices = Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]

# Arrays as raw little-endian bytes. A frame with an array that has no whole number of items is
# refused.
Int32s = Annotated[bytes, msgspec.Meta(extra={"item_bytes": 4})]
TOKEN_BYTES = 4  # bytes of a token id in Int32s
UInt64s = Annotated[bytes, msgspec.Meta(extra={"item_bytes": 8})]

# A size of an engine's memory or limits (pages, slots, tokens): at least 1.
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
# A counter of events; no upper bound.
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


def num_ids(ids: bytes) -> int:
    """Number of token ids in int32 bytes. Code that runs for each token divides by TOKEN_BYTES
    itself, without a call."""
    return len(ids) // TOKEN_BYTES


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: encoded as [tag, field, field, ...]."""


# ------------------------------------------------------------------- requests: gateway -> tokenizer


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """Retention of an answer beyond the life of its gateway: all stages keep the request, also when
    it has ended, until its Done or Abort; a gateway that is started again gets it back.

    Attributes:
    - stream: id of the stream that the request's choices are part of
    - owner: digest of the API key that may read the answer (gateway/auth.py)
    - seconds: how long the answer stays available after its last reader has left
    - first: number in the stream of the request's choice 0
    - format: how the answer's events are written, opaque to all but gateways
      (gateway/resumable_answers.py); empty in messages that a tokenizer sends to schedulers
    - origin: set by the tokenizer on one choice of each Submit: the encoded Adopt message, unless
      it exceeds 1 MiB. The detokenizer sends it to a restarted gateway, for the case that the
      tokenizer died too
    - kept_bytes: set by the tokenizer: approximate bytes that stages keep of the choice beside
      `origin` and its output: of its prompt and parameters, and of an Adopt that is too large for
      `origin`
    """

    stream: str
    owner: str
    seconds: float
    first: Number = 0
    format: bytes = b""
    origin: bytes = b""
    kept_bytes: NonNegativeInt = 0


class Submit(Message, frozen=True):
    """A client's request. Exactly one of `text`, `prompt_ids` and `chat` is given.

    Attributes:
    - seed: of the first choice; final, so nothing downstream draws another
    - text: prompt as text
    - prompt_ids: prompt as ids, int32 bytes
    - chat: messages, from which the chat template makes the prompt
    - template_arguments: further variables of the chat template
    - add_special_tokens: whether the tokenizer adds BOS and the like
    - priority: lower ones are served earlier
    - timeout: seconds until the request is aborted; 0: never
    - cache_salt: separates prefix caches
    - trace: W3C traceparent, or empty
    - group: data-parallel group in which the request runs already, if it was tokenized before; else
      -1
    - return_prompt_ids: Accepted brings the prompt's ids
    - return_prompt_text: Accepted brings the prompt's text, of a chat always with special tokens
    - only_encode: tokenize only; the request is answered by Accepted and never reaches a scheduler.
      With max_tokens 0 the prompt may be longer than the context
    - choices: numbers of the choices to compute; each is a request of its own from the tokenizer on
    - client: client name for FairQueue, made of hashes (gateway/auth.py)
    - fallback_grammar: grammar of the output if the grammar of `params` is refused; None: such a
      request is refused
    - token_offsets: the request's TextRows have `offsets`, where the text of each token begins
    - return_token_strs: Accepted brings the prompt's tokens as the vocabulary writes them
    - adapter: LoRA adapter of the request; its content is part of `cache_salt`
    - detokenizer: index of the detokenizer that serves this request
    - retention: how the answer outlives the gateway; None: not at all
    """

    request_id: str
    attempt: int
    gateway: int
    params: RequestParams
    seed: int
    text: str | None = None
    prompt_ids: Int32s | None = None
    chat: list[JsonObject] | None = None
    template_arguments: JsonObject = {}
    add_special_tokens: bool = True
    priority: int = 0
    timeout: float = 0.0
    cache_salt: str = ""
    trace: str = ""
    group: int = -1
    return_prompt_ids: bool = False
    return_prompt_text: bool = False
    only_encode: bool = False
    choices: Choices = (0,)
    client: str = ""
    fallback_grammar: StructuredOutputs | None = None
    token_offsets: bool = False
    return_token_strs: bool = False
    adapter: Adapter | None = None
    detokenizer: int = 0
    retention: Retention | None = None


class Abort(Message, frozen=True):
    """Forget the request everywhere. Abort travels on the request's path, so that it cannot
    overtake the request. On `recovery` it has another sense: the sender, a stage, keeps nothing of
    the request any more; gateways read that.

    Attributes:
    - group: data-parallel group whose scheduler alone forgets the request, because no tokenizer
      gave that scheduler its TokenizedRequest; -1: everywhere
    """

    request_id: str
    attempt: int
    reason: str = "client"
    group: int = -1


class Done(Message, frozen=True):
    """The clients have received these requests completely, or the retained answers were deleted or
    have expired. Every stage drops its state and forwards Done along the request's path."""

    request_ids: tuple[str, ...]


class Reattached(Message, frozen=True):
    """gateway -> tokenizer: a client reads the answers to these requests again; a previous gateway
    had begun them. The tokenizer forgets how long they waited for a client, so `Adopt.waited`
    starts at 0 if this gateway dies as well."""

    request_ids: tuple[str, ...]


class ResetCache(Message, frozen=True):
    """Request to all groups to forget cached prefixes that no request uses: gateway -> tokenizer ->
    every scheduler, after all work that was sent before.

    Attributes:
    - name: each group answers with a CacheReset of this name
    - gateway, detokenizer: indices of the gateway and the detokenizer on the way of the answers
    """

    name: str
    gateway: int = 0
    detokenizer: int = 0


class SetSleep(Message, frozen=True):
    """Request to all groups to sleep, or to wake up: gateway -> tokenizer -> every scheduler, after
    all work that was sent before; repeated until every group has done it.

    Attributes:
    - level: 1: pages are dropped, and weights leave the device; 2: weights are dropped, too; 0:
      awake
    - mode: see SleepMode
    - refuses: requests that come while the group sleeps are refused with 503; False: they wait
    """

    level: Annotated[int, msgspec.Meta(ge=0, le=2)]
    mode: SleepMode = "wait"
    refuses: bool = False


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """The latest change of an adapter that requests name `name`, by /v1/load_lora_adapter or
    /v1/unload_lora_adapter. Of two changes the one with the greater `version` holds; of equal
    versions the one of the greater `gateway`.

    Attributes:
    - version: greater than the version of any change, of any name, that `gateway` had received
    - gateway: index of the gateway that was asked for the change
    - adapter: None: it was unloaded
    - configured: --lora-modules has the name too, so its change is kept as long as the server runs
    """

    name: str
    version: NonNegativeInt
    gateway: Number
    adapter: Adapter | None = None
    configured: bool = False

    def follows(self, other: AdapterState) -> bool:
        """Whether this change holds against `other`, a change of the same name."""
        return (self.version, self.gateway) > (other.version, other.gateway)


class AdapterChanges(Message, frozen=True):
    """gateway -> tokenizers: the adapters that were loaded since the server's start, and those that
    were unloaded last. Tokenizers keep the changes for a gateway that is started again, and
    gateways for a tokenizer that is started again.

    Attributes:
    - states: one of each name; of unloaded adapters the REMEMBERED_UNLOADED latest
    - forgotten: the greatest version of an unloaded adapter that is no longer in `states`
    """

    states: tuple[AdapterState, ...] = ()
    forgotten: NonNegativeInt = 0

    @property
    def next_version(self) -> int:
        """The version of a change that follows all of these."""
        return 1 + max([self.forgotten, *(state.version for state in self.states)])

    def updated(self, others: AdapterChanges) -> AdapterChanges:
        """Merges two sets of changes; the order does not matter. If only one set has a name, its
        version is not greater than the other's `forgotten`, and it is not `configured`, the adapter
        was unloaded and forgotten there, and is left out."""
        found: dict[str, AdapterState] = {}
        for these, those in ((self, others), (others, self)):
            known = {state.name: state for state in those.states}
            for state in these.states:
                there = known.get(state.name)
                if there is None:
                    lives = state.version > those.forgotten or state.configured
                else:
                    lives = not there.follows(state)
                if lives:
                    found.setdefault(state.name, state)
        unloaded = [s for s in found.values() if s.adapter is None and not s.configured]
        unloaded.sort(key=lambda state: (state.version, state.gateway))
        forgotten = max(self.forgotten, others.forgotten)
        for state in unloaded[:-REMEMBERED_UNLOADED]:
            del found[state.name]
            forgotten = max(forgotten, state.version)
        return AdapterChanges(tuple(found.values()), forgotten)


# --------------------------------------------------------------------- work: tokenizer -> scheduler


class TokenizedRequest(Message, frozen=True):
    """A tokenized request.

    Attributes:
    - gateway, detokenizer: indices of the gateway and the detokenizer that serve this request
    - prompt_ids: int32 bytes
    - seed: of this choice
    - eos_ids: ids that end the request by themselves; empty under ignore_eos
    - priority: lower ones are served earlier
    - timeout: seconds until the request is aborted; 0: never
    - cache_salt: separates prefix caches
    - trace: W3C traceparent, or empty
    - sampling_group: request id of the first request of a parallel-sampling group, in that request
      as well. All of them have one prompt, which one of them computes first. Empty for other
      requests
    - bad_word_ids: sequences of ids that the output must not have: the tokenized `params.bad_words`
    - client: as in Submit
    - slow_grammar: the request's grammar takes long to compile
    - reasoning: reasoning tags and state; set if a grammar or a reasoning budget needs them, else
      None
    - token_offsets, adapter, retention: as in Submit
    """

    request_id: str
    attempt: int
    gateway: int
    detokenizer: int
    prompt_ids: Int32s
    params: RequestParams
    seed: int
    eos_ids: tuple[Number, ...] = ()
    priority: int = 0
    timeout: float = 0.0
    cache_salt: str = ""
    trace: str = ""
    sampling_group: str = ""
    bad_word_ids: tuple[tuple[Number, ...], ...] = ()
    client: str = ""
    slow_grammar: bool = False
    reasoning: ReasoningContext | None = None
    token_offsets: bool = False
    adapter: Adapter | None = None
    retention: Retention | None = None


class HandOver(Message, frozen=True):
    """Another group is to go on with the request. Travels on the path of the TokenizedRequest, so
    that it cannot overtake it. There are three uses:

    - tokenizer -> scheduler: a scheduler that has the request but no engine forgets it and answers
      with Delivered
    - tokenizer -> gateway, if the group is lost: the gateway answers `stage` with Delivered of the
      next attempt, which has the ids that its client has; from then on nothing of an earlier
      attempt reaches the client
    - detokenizer -> gateway, if the tokens of the groups that run a request differ: the gateway
      does the same, and sends its Delivered to the request's own tokenizer

    Attributes:
    - stage: id of the tokenizer that asks; empty from a detokenizer
    """

    request_id: str
    attempt: int
    stage: str = ""


# ------------------------------------------------------------------------ plan: scheduler -> engine


class BeginEpoch(Message, frozen=True):
    """A new epoch: forget all slots, then answer Ready(epoch). The prefix cache begins with the
    pages that the directory of kept pages lists, else empty. Plan numbers start at 0 again.

    Attributes:
    - incarnations: of the processes that take part; others answer with Hello
    """

    epoch: int
    incarnations: tuple[int, ...]


class Sleep(Message, frozen=True):
    """The epoch is over: give memory back until a BeginEpoch, as `level` of SetSleep says, then
    answer Asleep. Repeated until all ranks have answered.

    Attributes:
    - incarnations: of the processes that are to sleep
    - refuses: see SetSleep; a rank keeps it for the next scheduler
    """

    level: Annotated[int, msgspec.Meta(ge=1, le=2)]
    incarnations: tuple[int, ...]
    refuses: bool = False


class Release(Message, frozen=True):
    """The request in `slot` is over or preempted; the steps before this plan may still read and
    write its pages.

    Attributes:
    - cache_prefix: whether full pages of the computed part of (admitted tokens + `output_ids`) may
      enter the prefix cache. Tokens sampled after the request ended never enter it
    - output_ids: confirmed ids sampled since the admission, int32 bytes
    - drop_prefix: the request's logits were bad; its pages in the prefix cache are removed, except
      those that other requests use
    """

    slot: Number
    cache_prefix: bool
    output_ids: Int32s = b""
    drop_prefix: bool = False


class Admit(Message, frozen=True):
    """Puts a request into a free slot: matches its tokens in the prefix cache, and locks the pages
    found.

    Attributes:
    - token_ids: all known tokens, int32 bytes; ids at and past `prompt_len` count as output
    - prompt_len: tokens of the prompt
    - max_total: most tokens of prompt and output; rows that would exceed it are computed as empty
    - seed: of the request's noise
    - suppressed_ids: ids not sampled before `params.min_tokens` outputs
    - cache_salt: separates prefix caches
    - prompt_logprobs_from: first prompt position whose log-prob is still needed; the token before
      it must be computed, not taken from the cache. -1: no prompt log-probs needed
    - bad_word_ids, trace, reasoning: as in TokenizedRequest
    - adapter_slot: where LoadAdapter has put the request's adapter; 0: no adapter
    """

    slot: Number
    request_id: str
    token_ids: Int32s
    prompt_len: Number
    max_total: Number
    params: RequestParams
    seed: int
    suppressed_ids: tuple[Number, ...] = ()
    cache_salt: str = ""
    prompt_logprobs_from: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)] = -1
    bad_word_ids: tuple[tuple[Number, ...], ...] = ()
    trace: str = ""
    reasoning: ReasoningContext | None = None
    adapter_slot: Number = 0


class AppendTokens(Message, frozen=True):
    """Adds confirmed outputs to the engine's known tokens of the request in `slot`. Some may be
    sampled already; the others were forced by the request's grammar, and need no step each.

    Attributes:
    - ids: int32 bytes
    """

    slot: Number
    ids: Int32s


class CompileGrammar(Message, frozen=True):
    """Requests wait for a grammar: compile it, and answer GrammarCompiled. Repeated until all ranks
    have answered.

    Attributes:
    - request_id: the first request that waits
    - spec: the grammar
    - slow: compiling takes long, and other requests do not wait for it; one such grammar is asked
      for at a time
    """

    request_id: str
    spec: StructuredOutputs
    slow: bool = False


class LoadAdapter(Message, frozen=True):
    """Requests wait for an adapter: load it into `slot`, in place of the adapter there, which no
    admitted request has, after all plans before; then answer AdapterLoaded. Repeated until all
    ranks have answered.

    Attributes:
    - epoch, number: name the message; repetitions have the same ones
    - slot: from 1 on
    - adapter: with the digest that its files must have
    - next_plan: number of the first plan that comes after this message
    """

    epoch: int
    number: NonNegativeInt
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
    adapter: Adapter
    next_plan: NonNegativeInt = 0


class Plan(Message, frozen=True):
    """A plan of one step: releases, admits, appends, then rows `advance(slot, up to count tokens)`.
    A row computes known tokens not yet computed, at most `count`; if none are left, it decodes one
    from the id that the slot has sampled last. R: rows.

    Attributes:
    - number: of the plan in its epoch, from 0; after MissedPlan a plan comes again with its number
    - slots, counts: int32 bytes [R]; no slot appears twice
    - reset: cached prefixes that no request uses are forgotten between releases and admits
    - cache_slots: slots (int32 bytes). Full pages of the computed part of their prompts enter the
      prefix cache before `reset` and the admits, which may use them
    - drafts: int32 bytes [R], number of draft tokens verified in each row (count - 1). Once a
      request has had drafts, each of its rows has a value >= 0. A row with known tokens left
      computes those, as if it had no drafts. NO_DRAFTS (wire.py) for requests that never had drafts
      since their admission; empty if no row has a value
    - ends: int32 bytes [R], with `drafts`: upper bound of the computed tokens of the row's request
      after this step, assuming that all drafts are accepted; 0 in rows with NO_DRAFTS
    """

    epoch: int
    number: NonNegativeInt
    releases: tuple[Release, ...]
    admits: tuple[Admit, ...]
    slots: Int32s
    counts: Int32s
    reset: bool = False
    appends: tuple[AppendTokens, ...] = ()
    cache_slots: Int32s = b""
    drafts: Int32s = b""
    ends: Int32s = b""


# ---------------------------------------------------------------------- result: engine -> scheduler


class Hello(Message, frozen=True):
    """An engine rank is loaded and asks for an epoch, until `BeginEpoch` lists it. All ranks of a
    group must agree on the fields in AGREED (scheduler/epochs.py).

    Attributes:
    - protocol: PROTOCOL of the process
    - version: of pipeinfer
    - tp: ranks of its group
    - model: name under which the model is served
    - page_size: tokens of a page
    - pages: of the rank's KV pool
    - max_slots: requests at a time
    - max_model_len: tokens of prompt and output
    - attention: backend
    - graph_sizes: rows of the rank's decode graphs
    - step_tokens: the device's own token budget; 0: none
    - step_cost: as measured
    - kv_dtype: "fp8_e4m3", or "auto", which is the model's
    - sleep_level: at which the rank sleeps; 0: it is awake
    - refuses: of the Sleep that put the rank to sleep
    - max_drafts: most draft tokens of a row; 0: the rank verifies none
    - max_draft_rows: decodes of a step up to which rows have drafts
    - draft_model: a model makes the drafts, not n-grams
    """

    protocol: int
    version: str
    rank: Number
    tp: Number
    incarnation: int
    model: str
    page_size: PositiveInt
    pages: PositiveInt
    max_slots: PositiveInt
    max_model_len: PositiveInt
    attention: str
    graph_sizes: tuple[Number, ...] = ()
    step_tokens: Number = 0
    step_cost: StepCost | None = None
    kv_dtype: str = "auto"
    sleep_level: Number = 0
    refuses: bool = False
    max_drafts: Number = 0
    max_draft_rows: Number = 0
    draft_model: bool = False


class Asleep(Message, frozen=True):
    """The rank has released the memory that sleeping at `level` releases, and keeps `refuses` of
    Sleep for the next scheduler."""

    level: Number
    rank: Number
    incarnation: int
    refuses: bool = False


class Ready(Message, frozen=True):
    """The rank holds no request and receives plans: those of `epoch` may come.

    Attributes:
    - steps: steps that the rank's device has run so far; must be equal on all ranks
    - kept_pages: pages recovered into the prefix cache from before this epoch
    """

    epoch: int
    rank: Number
    incarnation: int
    steps: NonNegativeInt = 0
    kept_pages: NonNegativeInt = 0


class GrammarCompiled(Message, frozen=True):
    """The rank has compiled the grammar of CompileGrammar(request_id), or cannot because of
    `error`."""

    rank: Number
    incarnation: int
    request_id: str
    error: str = ""


class AdapterLoaded(Message, frozen=True):
    """The rank has carried out LoadAdapter `number` of `epoch`, or cannot because of `error`."""

    rank: Number
    incarnation: int
    epoch: int
    number: NonNegativeInt
    error: str = ""


class Admitted(Message, frozen=True):
    """Plan `number` was applied. Sent long before its tokens exist.

    Attributes:
    - slots, cached: int32 bytes, one for each admit: its slot, and how many of its tokens came from
      the prefix cache
    - free: pages that are free after the plan
    - evictable: pages that are cached and not in use
    - evicted: pages that the prefix cache has evicted in this epoch
    """

    epoch: int
    number: NonNegativeInt
    slots: Int32s
    cached: Int32s
    free: Number
    evictable: Number
    evicted: NonNegativeInt = 0


class Result(Message, frozen=True):
    """The outcome of step `number`: a row for each row of its plan, in the plan's order. R: rows.

    Attributes:
    - slots, starts, counts: int32 bytes [R]
    - starts: first computed position of the row
    - counts: tokens computed. 0: deferred, if the slot is listed in `deferred`, else nothing was
      left to do. For a row with `drafts` in the plan: 1 + number of accepted draft tokens
    - produced: int32 bytes [R], ids of `token_ids` that belong to each row; 0 if the row did not
      sample
    - token_ids: int32 bytes, row after row. A row's sampled id is followed by the ids that its
      grammar forces, which later steps may sample again
    - deferred: int32 bytes, slots without pages for this step
    - free, evictable, evicted: as in Admitted
    - digest: running hash of the rank's decisions
    - bad: int32 bytes, slots whose logits were not finite: such a row has produced nothing
    - logprobs: log-probs of the ids whose requests ask for them, in the ids' order
    - refused: by slot, why its grammar allows nothing: such a row has produced nothing either
    - mask_units: by slot, cost of one grammar mask in units (grammars/compiling.py); only for slots
      whose cost is at least COSTLY_MASK_UNITS or has just fallen below that
    """

    epoch: int
    number: NonNegativeInt
    slots: Int32s
    starts: Int32s
    counts: Int32s
    produced: Int32s
    token_ids: Int32s
    deferred: Int32s
    free: Number
    evictable: Number
    digest: int
    bad: Int32s = b""
    evicted: NonNegativeInt = 0
    logprobs: bytes = b""
    refused: dict[int, str] = {}
    mask_units: dict[int, int] = {}


class PromptLogprobs(Message, frozen=True):
    """Log-probs of prompt tokens that step `number` computed. Comes before the step's Result.

    Attributes:
    - first: position in the prompt of the first token
    - logprobs: a log-prob record for each token
    """

    epoch: int
    number: NonNegativeInt
    slot: Number
    first: Number
    logprobs: bytes


class Digests(Message, frozen=True):
    """The decisions of a rank above 0, as digests.

    Attributes:
    - first: number of the first plan
    - values: uint64 bytes, the digest after each plan from `first` on
    """

    epoch: int
    rank: Number
    first: NonNegativeInt
    values: UInt64s


class Fault(Message, frozen=True):
    """The rank leaves the epoch: a plan contradicts the rank's state, or a step failed.

    Attributes:
    - orderly: no request is to blame: the rank was asked to leave
    """

    epoch: int
    rank: int
    reason: str
    orderly: bool = False


class MissedPlan(Message, frozen=True):
    """Plan `number` was lost on its way to the rank, which has received a later plan, or a message
    that belongs after it: plan `number` and all plans after it are to be published again. The rank
    waits for them."""

    epoch: int
    rank: int
    number: NonNegativeInt


# ----------------------------------------------------------------- tokens: scheduler -> detokenizer


class OpenStream(Message, frozen=True):
    """A request of `group` that will produce tokens.

    Attributes:
    - context_ids: the prompt's last ids, int32 bytes
    - trace: W3C traceparent, or empty
    - token_offsets, retention: as in Submit
    """

    request_id: str
    attempt: int
    gateway: int
    params: RequestParams
    context_ids: Int32s
    trace: str = ""
    group: int = 0
    token_offsets: bool = False
    retention: Retention | None = None


class TokenRow(msgspec.Struct, frozen=True, array_like=True):
    """New output ids of one request, without a gap after earlier rows.

    Attributes:
    - offset: position of the first id in the output
    - ids: int32 bytes
    - finish: why the request ended; None if it goes on
    - stop_token: with "stop" by a token, the last of `ids`, which has no text and is not in the
      result
    - error: with "error", for the client
    - cached_tokens: of the prompt, from the prefix cache
    - logprobs: a log-prob record for each of `ids`, if the request asks for them
    """

    request_id: str
    offset: Number
    ids: Int32s
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str = ""
    cached_tokens: Number = 0
    logprobs: bytes = b""


class PromptTokens(Message, frozen=True):
    """Ids of a request's prompt with their log-probs, without a gap after earlier messages. All of
    them come before the first TokenRow.

    Attributes:
    - first: position of the first id in the prompt
    - ids: int32 bytes
    - logprobs: a log-prob record for each id; the prompt's first token has an empty one
    - group: group of the scheduler that sends the message; -1: unknown
    """

    request_id: str
    attempt: int
    first: Number
    ids: Int32s
    logprobs: bytes
    group: int = -1


class Tokens(Message, frozen=True):
    """The new output ids of one result of `group`, for one detokenizer.

    Attributes:
    - group: group of the scheduler that sends the message; -1: unknown
    """

    rows: tuple[TokenRow, ...]
    group: int = -1


class Refused(Message, frozen=True):
    """The request cannot be served. From a tokenizer or scheduler, for the client.

    Attributes:
    - status: of the HTTP response
    - message, param, code: of its error
    """

    request_id: str
    attempt: int
    gateway: int
    status: int
    message: str
    param: str | None = None
    code: str | None = None


class CacheReset(Message, frozen=True):
    """scheduler -> detokenizer -> gateway: requests that `group` admits from now on reuse nothing
    that was cached and unused when ResetCache came."""

    name: str
    gateway: int
    group: int


class StopHit(Message, frozen=True):
    """detokenizer -> scheduler: a stop string ended the request, or its output could not be
    decoded.

    Attributes:
    - length: output tokens until then
    """

    request_id: str
    attempt: int
    length: Number


# ---------------------------------------------------------- text: tokenizer, detokenizer -> gateway


class Accepted(Message, frozen=True):
    """tokenizer -> gateway: the request was tokenized.

    Attributes:
    - group: group that the request was sent to; -1: none, the request was only to be encoded
    - prompt_tokens: length of the prompt
    - prompt_ids, prompt_text, token_strs: as Submit asked for them; else empty
    - choices: numbers of the request's choices that this message is about
    - reasoning: state of the reasoning at the end of a chat's prompt
    - refusal: why the grammar of the request's parameters is not served, if the output is held to
      Submit.fallback_grammar instead; else empty
    """

    request_id: str
    attempt: int
    group: int
    prompt_tokens: Number
    prompt_ids: Int32s = b""
    prompt_text: str = ""
    choices: Choices = (0,)
    reasoning: ReasoningState = "before"
    refusal: str = ""
    token_strs: tuple[str, ...] = ()


class LogprobTexts(msgspec.Struct, frozen=True, array_like=True):
    """Log-probs of some tokens, with the text of each.

    Attributes:
    - logprobs: a log-prob record for each token
    - texts: the bytes of each token, followed by those of its alternatives
    - offsets: int32 bytes, characters of text before each token
    - ids: int32 bytes of prompt tokens; empty for output tokens, whose row has them
    """

    logprobs: bytes
    texts: tuple[bytes, ...]
    offsets: Int32s
    ids: Int32s = b""


class TextRow(msgspec.Struct, frozen=True, array_like=True):
    """New text of one request.

    Attributes:
    - byte_offset: bytes of text (UTF-8) before it
    - token_offset: output tokens before it
    - ids: int32 bytes; without a stop token and without the ids after a stop string
    - finish: set on the last row
    - stop_reason: the stop string or stop token id; None for the model's own EOS
    - output_tokens: accepted outputs, on the last row; a stop token counts, as in vLLM
    - cached_tokens: of the prompt, from the prefix cache
    - logprobs: of `ids`, if asked for
    - prompt: log-probs of prompt tokens from `prompt_offset` on, if asked for
    - offsets: int32 bytes, characters of the whole text before each of `ids`, if asked for
    - vector: pooled output (embedding), float32 bytes, on the last row, if asked for
    """

    request_id: str
    attempt: int
    text: str
    byte_offset: int
    token_offset: int
    ids: Int32s
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    logprobs: LogprobTexts | None = None
    prompt: LogprobTexts | None = None
    prompt_offset: int = 0
    offsets: Int32s = b""
    vector: bytes = b""


class Text(Message, frozen=True):
    """New text of requests of one gateway."""

    rows: tuple[TextRow, ...]


# ---------------------------------------------------------------------------- telemetry: all -> all

# State of a stage.
# - starting: its process runs, and builds the stage
# - loading: an engine loads weights, or waits for the other ranks of its group
# - waiting: built, but another stage is missing or has not answered
# - ready: serves
# - asleep: an engine or its scheduler, see SetSleep
# - draining: finishes live requests, or leaves, and then stops
# - failed: its configuration is wrong, or its process was fenced out; the process ends
State = Literal["starting", "loading", "waiting", "ready", "asleep", "draining", "failed"]


class Heartbeat(Message, frozen=True):
    """The state and statistics of one stage. Sent twice a second, less often in a large deployment
    (`heartbeat_period` of core.py), and at every change of state. All fields may differ in a
    replay.

    Attributes:
    - stats: statistics by name; docs/reference/statistics.md explains them
    """

    stage: str
    name: str
    group: int
    rank: int
    index: int
    pid: int
    incarnation: int
    state: State
    reason: str = ""
    stats: dict[str, float] = {}


# -------------------------------------- group: who serves, who has ended, who must end; all -> all

GroupReadiness = Literal["serves", "waits", "deserted"]


class GroupStatus(Message, frozen=True):
    """scheduler -> tokenizers: the state of a group. Repeated every `heartbeat_period`, and sent
    soon after a change of `readiness`.

    Attributes:
    - readiness: whether the group takes requests. "deserted": its engines are gone, and it can hand
      its requests over
    - requests: live ones
    - tokens: left to compute for these requests
    - capacity: tokens that the KV pool holds
    - evicted: tokens that the prefix cache has lost in this epoch
    """

    group: int
    incarnation: int
    readiness: GroupReadiness
    epoch: int = 0
    requests: int = 0
    tokens: int = 0
    capacity: int = 0
    evicted: int = 0


class RankStatus(Message, frozen=True):
    """engine -> its scheduler and the other ranks, twice a second and at every change."""

    group: int
    rank: int
    incarnation: int
    state: State


class Ended(Message, frozen=True):
    """The process `incarnation` of `stage` has ended. The supervisor that starts `stage` repeats
    this until the successor has reported.

    Attributes:
    - at: an incarnation number taken when the end was noticed. Processes of the same supervisor
      with a greater incarnation began later and were never in an epoch with the process that ended
    """

    stage: str
    incarnation: int
    at: int
    reason: str


class Fenced(Message, frozen=True):
    """any stage -> `stage`: messages of process `incarnation` are dropped. Repeated as long as that
    process sends any.

    Attributes:
    - newest: incarnation of the process that has taken its place
    - since: seconds since the first message of process `newest`
    """

    stage: str
    incarnation: int
    newest: int
    since: float


class GroupFault(Message, frozen=True):
    """scheduler -> supervisors of the engine ranks of `group`: these processes must end, and all
    ranks be started again. Repeated until they are gone."""

    group: int
    reason: str
    incarnations: tuple[int, ...] = ()


# ----------------------------------------------------------- recovery: a new process <-> neighbours


class Recover(Message, frozen=True):
    """`stage`, a new process, asks for everything that it should have. Repeated until it was
    answered.

    - Tokenizers ask gateways (Submit).
    - Schedulers ask tokenizers (TokenizedRequest) and detokenizers (Delivered).
    - Detokenizers ask schedulers (OpenStream, Tokens).
    - Gateways ask tokenizers (Adopt), then detokenizers (Adopt of requests that a tokenizer has
      forgotten, Text); requests of earlier gateways are lost unless their answers are kept.

    Attributes:
    - again: the gateway has asked before; requests that came since then are its own
    """

    stage: str
    incarnation: int
    again: bool = False


class Recovered(Message, frozen=True):
    """Stands before and after an answer of `stage`, as its brackets.

    Attributes:
    - incarnation: of the process that asked
    - opening: True in front of the answer, False at its end
    """

    stage: str
    incarnation: int
    opening: bool = False


class Delivered(Message, frozen=True):
    """Output ids that a client may have seen.

    Attributes:
    - ids: int32 bytes
    - ended: the request has ended and must not be continued. From a detokenizer: its text is
      complete. From a scheduler, with empty `ids`: no Done came for it, and the tokenizer is to
      abort it
    - finish, error: as in the scheduler's last row; None if the detokenizer ended the request
    - crashes: engines that crashed while they ran the request alone, if it is a suspect; else -1
    - logprobs: a log-prob record for each id, if asked for
    - prompt_logprobs: a log-prob record for each prompt token so far, if asked for
    """

    request_id: str
    attempt: int
    ids: Int32s
    ended: bool = False
    finish: FinishReason | None = None
    error: str = ""
    crashes: int = -1
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


class Adopt(Message, frozen=True):
    """tokenizer -> a gateway that was started again: a request of the previous gateway whose answer
    is kept. The request's text comes from its detokenizer, from the beginning; the detokenizer also
    sends this message again, for the case that the tokenizer died as well.

    Attributes:
    - stage: the tokenizer
    - submit: of the choices that are in one group, with their attempt
    - accepted: None if the request is not tokenized yet
    - waited: seconds since this tokenizer first handed the request to a restarted gateway, if no
      client has come back since; else 0
    """

    stage: str
    submit: Submit
    accepted: Accepted | None = None
    waited: float = 0.0


# -------------------------------------------------------------------------------------- channels

# The senders and the readers of each channel.
CHANNEL_USERS = {
    "requests": "gateway to tokenizer",
    "work": "tokenizer to scheduler",
    "plan": "scheduler to all engine ranks of its group",
    "result": "engine to scheduler",
    "tokens": "scheduler to detokenizer",
    "stops": "detokenizer to scheduler",
    "text": "tokenizer and detokenizer to gateway",
    "telemetry": "every stage to whoever listens",
    "group": "who serves, who has ended, who must end: stages and supervisors to one another",
    "recovery": "a new process and its neighbours; who asks for what a lost group had",
}

# The messages of each channel; a frame with any other message is refused.
CHANNELS: dict[str, Any] = {
    "requests": Union[Submit, Reattached, AdapterChanges, ResetCache, SetSleep, Abort, Done],
    "work": Union[TokenizedRequest, HandOver, ResetCache, SetSleep, Abort, Done],
    "plan": Union[BeginEpoch, Sleep, CompileGrammar, LoadAdapter, Plan],
    "result": Union[
        Hello,
        Asleep,
        Ready,
        GrammarCompiled,
        AdapterLoaded,
        Admitted,
        PromptLogprobs,
        Result,
        Digests,
        Fault,
        MissedPlan,
    ],
    "tokens": Union[OpenStream, PromptTokens, Tokens, Refused, CacheReset, Abort, Done],
    "stops": StopHit,
    "text": Union[Accepted, Refused, CacheReset, Text],
    "telemetry": Heartbeat,
    "group": Union[GroupStatus, RankStatus, Ended, Fenced, GroupFault],
    "recovery": Union[Recover, Recovered, HandOver, Delivered, Adopt, AdapterChanges, Abort],
}
