"""The protocol: every message between stages, and which of them travels on which channel.

Knows no sockets, no clocks, no torch, no stage. A message is a tagged, array-like msgspec
struct, encoded as MessagePack; token sequences are raw little-endian int32 bytes, log-probs are
those of wire.py. Structs grow only at their end, with defaults; any other change is a new PROTOCOL.
control.py has what a person asks.
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

REMEMBERED_UNLOADED = 8  # names of unloaded adapters; of others only the version is known

FinishReason = Literal["stop", "length", "abort", "error"]
# What becomes of the requests that a group has when it is put to sleep: they are answered first,
# end at once with what they have, or go on at waking.
SleepMode = Literal["wait", "abort", "keep"]

# Numbers of choices, from 0; params.py says what the request of each is called.
Choice = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)]
Choices = Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]

# Arrays as raw little-endian bytes. Where one has no whole number of items the frame is not read.
Int32s = Annotated[bytes, msgspec.Meta(extra={"item_bytes": 4})]
UInt64s = Annotated[bytes, msgspec.Meta(extra={"item_bytes": 8})]

# Of the memory of an engine: there is none without a page.
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
# What has happened so far, in an epoch of any length.
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all that travels: encoded as [tag, field, field, ...]."""


# ------------------------------------------------------------------- requests: gateway -> tokenizer


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How the answer to a request outlives its gateway: all stages keep the request, also when it
    has ended, until its Done or Abort; a gateway that is started again gets it back.

    Attributes:
    - stream: id of the stream that the request's choices are part of
    - owner: digest of the key that may have it (gateway/auth.py)
    - seconds: for which it is kept where nobody reads it
    - first: number in the stream of the request's choice 0
    - format: how its events are written, opaque to all but gateways (gateway/resumable_answers.py);
      empty behind the tokenizer
    - origin: behind the tokenizer, of one choice of a Submit: its Adopt, encoded, if that is not
      too large. So a gateway that is started again hears of it from the detokenizer, too
    - kept_bytes: behind the tokenizer: that stages keep of the choice, about, beside `origin` and
      its output: of its prompt and parameters, and of an Adopt that is too large for `origin`
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
    - seed: final; that of the first choice
    - text: prompt as text
    - prompt_ids: prompt as ids, int32 bytes
    - chat: messages, which the chat template makes a prompt of
    - template_arguments: further variables of the chat template
    - add_special_tokens: whether the tokenizer adds BOS and the like
    - priority: lower ones are served earlier
    - timeout: seconds until it is aborted; 0: never
    - cache_salt: separates prefix caches
    - trace: W3C traceparent, or empty
    - group: data-parallel group in which it runs already, if it was tokenized before; else -1
    - return_prompt_ids: Accepted brings the prompt's ids
    - return_prompt_text: Accepted brings the prompt's text, of a chat always with special tokens
    - only_encode: nothing but Accepted is wanted, and no group hears of it; with max_tokens 0 the
      prompt may be longer than the context
    - choices: numbers of those that are wanted; each is a request of its own from the tokenizer on
    - client: who asks, as FairQueue takes it, in hashes (gateway/auth.py)
    - fallback_grammar: what the output must be where the grammar of `params` is refused; None: such
      a request is an error
    - token_offsets: rows of its text say where the text of each token begins
    - return_token_strs: Accepted brings the prompt's tokens as the vocabulary writes them
    - adapter: that it is computed with; its content is part of `cache_salt`
    - detokenizer: index of its own
    - retention: how its answer outlives the gateway; None: not at all
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
    """Forget the request everywhere. Travels on the request's path, so that it cannot overtake it;
    on `recovery` it tells gateways that a stage keeps no more of a request.

    Attributes:
    - group: data-parallel group whose scheduler alone forgets the request, because nobody gave that
      scheduler its TokenizedRequest; -1: everywhere
    """

    request_id: str
    attempt: int
    reason: str = "client"
    group: int = -1


class Done(Message, frozen=True):
    """Their clients have all of these requests, or what was kept of them was deleted or has
    expired: forget them, and pass it on down their path."""

    request_ids: tuple[str, ...]


class Reattached(Message, frozen=True):
    """gateway -> tokenizer: a client reads again what the gateway before this one had begun of
    these requests. So they have waited for nobody if this gateway dies as well."""

    request_ids: tuple[str, ...]


class ResetCache(Message, frozen=True):
    """All groups are to forget cached prefixes that no request uses: gateway -> tokenizer -> every
    scheduler, behind all work that was sent before.

    Attributes:
    - name: each group answers CacheReset under it
    - gateway, detokenizer: indices of those through which the answers come
    """

    name: str
    gateway: int = 0
    detokenizer: int = 0


class SetSleep(Message, frozen=True):
    """All groups are to sleep, or to wake up: gateway -> tokenizer -> every scheduler, behind all
    work that was sent before; repeated until every group does.

    Attributes:
    - level: 1: pages are dropped, and weights leave the device; 2: weights are dropped, too; 0:
      awake
    - mode: see SleepMode
    - refuses: what comes meanwhile is refused with 503, and does not wait
    """

    level: Annotated[int, msgspec.Meta(ge=0, le=2)]
    mode: SleepMode = "wait"
    refuses: bool = False


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """The latest change of an adapter that requests name `name`, by /v1/load_lora_adapter or
    /v1/unload_lora_adapter: of two changes the one with the greater `version` holds, of equal ones
    that of the greater `gateway`.

    Attributes:
    - version: greater than that of any change, of any name, that `gateway` knew of
    - gateway: index of the one that was asked to change it
    - adapter: None: it was unloaded
    - configured: --lora-modules has the name too, so its change must be known as long as the server
      runs
    """

    name: str
    version: NonNegativeInt
    gateway: Number
    adapter: Adapter | None = None
    configured: bool = False

    def follows(self, other: AdapterState) -> bool:
        """Whether this change holds, where the other is of the same name."""
        return (self.version, self.gateway) > (other.version, other.gateway)


class AdapterChanges(Message, frozen=True):
    """gateway -> tokenizers: the adapters that were loaded since the server's start, and those that
    were unloaded last. Tokenizers keep them for a gateway that is started again, and gateways for a
    tokenizer that is.

    Attributes:
    - states: one of each name. Of those that were unloaded, the REMEMBERED_UNLOADED latest
    - forgotten: the greatest version of an unloaded adapter that is no longer in `states`
    """

    states: tuple[AdapterState, ...] = ()
    forgotten: NonNegativeInt = 0

    @property
    def next_version(self) -> int:
        """The version of a change that follows all of these."""
        return 1 + max([self.forgotten, *(state.version for state in self.states)])

    def updated(self, others: AdapterChanges) -> AdapterChanges:
        """What both know together, whichever comes first. A name that only one of them has, and not
        above what the other has forgotten, was unloaded."""
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
    - gateway, detokenizer: indices of its own
    - prompt_ids: int32 bytes
    - seed: of this choice
    - eos_ids: ids that end it by themselves; empty under ignore_eos
    - priority: lower ones are served earlier
    - timeout: seconds until it is aborted; 0: never
    - cache_salt: separates prefix caches
    - trace: W3C traceparent, or empty
    - sampling_group: request id of the first one of a parallel-sampling group, in its own
      TokenizedRequest as well. They have one prompt, which one of them computes first. Empty for
      others
    - bad_word_ids: sequences of ids that its output must not have, as `params.bad_words` are
      spelled
    - client: who asks, as in Submit
    - slow_grammar: its grammar takes long to compile
    - reasoning: where its grammar or its budget of thoughts needs to know of them
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
    """Another group is to go on with the request: a group that has it, and no engine, forgets it
    and answers with Delivered. On the path of the TokenizedRequest, so that it cannot overtake it.

    If the group is lost, the gateway answers `stage` with Delivered of the next attempt, which has
    the ids that its client has: from then on nothing of an earlier attempt reaches the client. A
    detokenizer asks the gateway the same if the tokens of the groups that run a request differ; the
    request's own tokenizer learns it then.

    Attributes:
    - stage: id of the tokenizer that asks; empty from a detokenizer
    """

    request_id: str
    attempt: int
    stage: str = ""


# ------------------------------------------------------------------------ plan: scheduler -> engine


class BeginEpoch(Message, frozen=True):
    """A new epoch: forget all slots, then answer Ready(epoch). The prefix tree holds what the
    directory of kept pages says, else nothing. Plan numbers start at 0 again.

    Attributes:
    - incarnations: of the processes that take part; others say Hello
    """

    epoch: int
    incarnations: tuple[int, ...]


class Sleep(Message, frozen=True):
    """The epoch is over: give memory back until a BeginEpoch, as `level` of SetSleep says, then
    answer Asleep. Sent until all ranks have.

    Attributes:
    - incarnations: of the processes that are to sleep
    - refuses: see SetSleep; for the scheduler that comes after this one
    """

    level: Annotated[int, msgspec.Meta(ge=1, le=2)]
    incarnations: tuple[int, ...]
    refuses: bool = False


class Release(Message, frozen=True):
    """The request in `slot` is over or preempted; the steps before this plan may still read and
    write its pages.

    Attributes:
    - cache_prefix: what was computed of (admitted tokens + `output_ids`) may enter the prefix
      cache, a surplus token never
    - output_ids: confirmed ids sampled since the admission, int32 bytes
    - drop_prefix: its logits were bad; what the cache has of it goes, as far as nobody else uses it
    """

    slot: Number
    cache_prefix: bool
    output_ids: Int32s = b""
    drop_prefix: bool = False


class Admit(Message, frozen=True):
    """Puts a request into a free slot: match its tokens in the prefix cache, lock what is found.

    Attributes:
    - token_ids: all known tokens, int32 bytes; ids at and past `prompt_len` count as output
    - prompt_len: tokens of the prompt
    - max_total: most tokens of prompt and output; rows that would exceed it are computed as empty
    - seed: of its noise
    - suppressed_ids: ids not sampled before `params.min_tokens` outputs
    - cache_salt: separates prefix caches
    - prompt_logprobs_from: log-probs of the prompt's tokens from this position on are wanted, so
      what comes right before it is computed; -1: of none, or they are known
    - bad_word_ids, trace, reasoning: as in TokenizedRequest
    - adapter_slot: where LoadAdapter has put its adapter; 0: it has none
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
    """The engine's known tokens of the request in `slot` grow by confirmed outputs. Some may be
    sampled already; the others were forced by its grammar, and need no step each.

    Attributes:
    - ids: int32 bytes
    """

    slot: Number
    ids: Int32s


class CompileGrammar(Message, frozen=True):
    """Requests wait for a grammar: compile it, and answer GrammarCompiled. Sent until all ranks
    have answered.

    Attributes:
    - request_id: the first that waits
    - spec: the grammar
    - slow: it takes long, and others do not wait for it; one such grammar is asked for at a time
    """

    request_id: str
    spec: StructuredOutputs
    slow: bool = False


class LoadAdapter(Message, frozen=True):
    """Requests wait for an adapter: put it in the place of what is in `slot`, which no admitted
    request has, behind all plans before; then answer AdapterLoaded. Sent until all ranks have
    answered.

    Attributes:
    - epoch, number: name the message: what is sent again has the same ones
    - slot: from 1 on
    - adapter: what its files must be
    - next_plan: number of the first plan that comes behind it
    """

    epoch: int
    number: NonNegativeInt
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
    adapter: Adapter
    next_plan: NonNegativeInt = 0


class Plan(Message, frozen=True):
    """One step: releases, admits, extends, then rows `advance(slot, up to count tokens)`. A row
    computes known tokens not yet computed, at most `count`; where none are left, it decodes one
    from the id that the slot has sampled last. R: rows.

    Attributes:
    - number: of the plan in its epoch, from 0; one that was before comes again after MissedPlan
    - slots, counts: int32 bytes [R]; no slot stands twice
    - reset: cached prefixes that no request uses are forgotten between releases and admits
    - cache_slots: slots (int32 bytes). Whole pages of what is computed of their prompts enter the
      prefix cache before `reset` and the admits, which may use them
    - drafts: int32 bytes [R], draft tokens that a row verifies behind its first token, count - 1 of
      them; from the first such row of a request on, all its rows say how many, maybe 0. A row with
      known tokens left computes those, as if it had no drafts. NO_DRAFTS (wire.py) in rows of other
      requests. Empty: all rows are of others
    - ends: int32 bytes [R], where `drafts` are: how many tokens at most are computed of the row's
      request after this step. What its drafts may become is counted as if all were accepted
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
    """An engine rank is loaded and asks for an epoch, until `BeginEpoch` lists it. Ranks must agree
    on `model` to `step_tokens`, on `kv_dtype` and on drafts.

    Attributes:
    - protocol: PROTOCOL of the process
    - version: of pipeinfer
    - tp: ranks of its group
    - model: name that it is served by
    - page_size: tokens of a page
    - pages: of its KV pool
    - max_slots: requests at a time
    - max_model_len: tokens of prompt and output
    - attention: backend
    - graph_sizes: rows of its decode graphs
    - step_tokens: the device's own token budget; 0: none
    - step_cost: as measured
    - kv_dtype: "fp8_e4m3", or "auto", which is the model's
    - sleep_level: at which it sleeps; 0: it is awake
    - refuses: of the Sleep that it follows
    - max_drafts: draft tokens of a row at most; 0: it verifies none. max_draft_rows: decodes of a
      step up to which rows have some. draft_model: a model makes them, not n-grams
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
    """The rank has given back what sleeping at `level` gives back, and keeps `refuses` of Sleep for
    the scheduler that comes after this one."""

    level: Number
    rank: Number
    incarnation: int
    refuses: bool = False


class Ready(Message, frozen=True):
    """The rank holds no request and hears plans: those of `epoch` may come.

    Attributes:
    - steps: that its device has made so far
    - kept_pages: in its prefix cache, computed before this epoch
    """

    epoch: int
    rank: Number
    incarnation: int
    steps: NonNegativeInt = 0
    kept_pages: NonNegativeInt = 0


class GrammarCompiled(Message, frozen=True):
    """The rank has what CompileGrammar(request_id) asked for, or cannot have it because of
    `error`."""

    rank: Number
    incarnation: int
    request_id: str
    error: str = ""


class AdapterLoaded(Message, frozen=True):
    """The rank has done what LoadAdapter `number` of `epoch` asked for, or cannot because of
    `error`."""

    rank: Number
    incarnation: int
    epoch: int
    number: NonNegativeInt
    error: str = ""


class Admitted(Message, frozen=True):
    """Plan `number` was applied. Sent long before its tokens exist.

    Attributes:
    - slots, cached: int32 bytes, one for each admit: so many tokens of it came from the prefix
      cache
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
    """What step `number` did: a row for each row of its plan, in the plan's order. R: rows.

    Attributes:
    - slots, starts, counts: int32 bytes [R]. `starts`: first computed position. `counts`: tokens
      computed; 0: deferred, if listed in `deferred`, else nothing was left to do. Of a row with
      `drafts` in the plan, those that count: its first token, and the drafts that were accepted
    - produced: int32 bytes [R], ids of `token_ids` that belong to each row; 0 where it did not
      sample
    - token_ids: int32 bytes, row after row. Behind a row's sampled id come those that its grammar
      forces, which later steps may sample again
    - deferred: int32 bytes, slots without pages for this step
    - free, evictable, evicted: as in Admitted
    - digest: running hash of the rank's decisions
    - bad: int32 bytes, slots whose logits were not finite: such a row has produced nothing
    - logprobs: log-probs of the ids whose requests ask for them, in the ids' order
    - refused: by slot, why its grammar allows nothing: such a row has produced nothing either
    - mask_units: by slot, what a mask costs in units of work (grammars/compiling.py), where that is
      much, or no longer is
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
    """Log-probs of prompt tokens that step `number` found. Comes before its Result.

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
    """What a rank above 0 decided.

    Attributes:
    - first: number of the first plan
    - values: uint64 bytes, the digest after each plan from `first` on
    """

    epoch: int
    rank: Number
    first: NonNegativeInt
    values: UInt64s


class Fault(Message, frozen=True):
    """The rank leaves the epoch: a plan that cannot be, a step that does not add up.

    Attributes:
    - orderly: no request of it is to blame: the rank was told to
    """

    epoch: int
    rank: int
    reason: str
    orderly: bool = False


class MissedPlan(Message, frozen=True):
    """A later plan came, or what belongs behind one, so plan `number` was lost on its way to the
    rank: it and all plans behind it are to be published again. The rank waits for them.
    """

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
    """New output ids of one request, without a gap to those before.

    Attributes:
    - offset: position of the first id in the output
    - ids: int32 bytes
    - finish: why it ended; None if it goes on
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
    """Ids of a request's prompt with their log-probs, without a gap to those before. All of them
    come before the first row.

    Attributes:
    - first: position of the first id in the prompt
    - ids: int32 bytes
    - logprobs: a log-prob record for each id; the prompt's first token has an empty one
    - group: whose scheduler sends it; -1: unknown
    """

    request_id: str
    attempt: int
    first: Number
    ids: Int32s
    logprobs: bytes
    group: int = -1


class Tokens(Message, frozen=True):
    """Everything that one result of `group` brought, for one detokenizer.

    Attributes:
    - group: whose scheduler sends it; -1: unknown
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
    """scheduler -> detokenizer -> gateway: what `group` admits from now on finds nothing that was
    cached and unused when ResetCache came.
    """

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
    - group: where it went; -1: nowhere, it was only to be encoded
    - prompt_tokens: length of the prompt
    - prompt_ids, prompt_text, token_strs: as Submit asked for them; else empty
    - choices: numbers of the request's choices that are meant
    - reasoning: where the prompt of a chat leaves them
    - refusal: why the grammar of its parameters is not served, where the output is held to
      Submit.fallback_grammar; else empty
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
    """Log-probs of some tokens, to be shown.

    Attributes:
    - logprobs: a log-prob record for each token
    - texts: the bytes of each token, followed by those of its alternatives
    - offsets: int32 bytes, letters of text before each token
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
    - ids: int32 bytes; without a stop token and what lies past a stop string's cut
    - finish: set on the last row
    - stop_reason: the stop string or stop token id; None for the model's own EOS
    - output_tokens: accepted outputs, on the last row; a stop token counts, as in vLLM
    - cached_tokens: of the prompt, from the prefix cache
    - logprobs: of `ids`, if asked for
    - prompt: log-probs of prompt tokens from `prompt_offset` on, if asked for
    - offsets: int32 bytes, letters of the whole text before each of `ids`, if asked for
    - vector: float32 bytes, on the last row, if asked for
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

State = Literal["starting", "loading", "waiting", "ready", "asleep", "draining", "failed"]


class Heartbeat(Message, frozen=True):
    """Twice a second, less often in a large deployment (core.py), and at every
    change of state. All fields may differ in a replay.

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
    """scheduler -> tokenizers, again and again (`heartbeat_period`), and soon after a change of
    `readiness`.

    Attributes:
    - readiness: whether it takes requests. "deserted": its engines are gone, and it can hand its
      requests over
    - requests: live ones
    - tokens: that are left to compute of them
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
    """The process `incarnation` of `stage` has ended. Whoever starts `stage` repeats it until the
    successor is heard.

    Attributes:
    - at: of processes that the same one started, those with a greater number began later, and have
      never met it
    """

    stage: str
    incarnation: int
    at: int
    reason: str


class Fenced(Message, frozen=True):
    """any stage -> `stage`, again as long as it speaks: what process `incarnation` says is not
    heard.

    Attributes:
    - newest: incarnation of the process that has taken its place
    - since: seconds since the first message of that one
    """

    stage: str
    incarnation: int
    newest: int
    since: float


class GroupFault(Message, frozen=True):
    """scheduler -> whoever starts the engine ranks of `group`, until they are gone: these processes
    must end, and all ranks be started again.
    """

    group: int
    reason: str
    incarnations: tuple[int, ...] = ()


# ----------------------------------------------------------- recovery: a new process <-> neighbours


class Recover(Message, frozen=True):
    """`stage`, a new process, asks for all that it should know, until it was answered.

    - Tokenizers ask gateways (Submit).
    - Schedulers ask tokenizers (TokenizedRequest) and detokenizers (Delivered).
    - Detokenizers ask schedulers (OpenStream, Tokens).
    - Gateways ask tokenizers (Adopt), then detokenizers (Adopt of what a tokenizer has forgotten,
      Text); requests of older ones are lost unless their answers are kept.

    Attributes:
    - again: of a gateway that has asked before: what came since then is its own
    """

    stage: str
    incarnation: int
    again: bool = False


class Recovered(Message, frozen=True):
    """Stands before and behind an answer of `stage`.

    Attributes:
    - incarnation: the asker's
    - opening: the answer begins; else it has ended
    """

    stage: str
    incarnation: int
    opening: bool = False


class Delivered(Message, frozen=True):
    """Output ids that a client may have seen.

    Attributes:
    - ids: int32 bytes
    - ended: no more of them is wanted
    - finish, error: as in the scheduler's last row; None if the detokenizer ended it
    - crashes: of engines that ran it alone, if it is suspected of one; else -1
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
    """tokenizer -> a gateway that was started again: a request of the gateway before it whose
    answer is kept. Its text comes from its detokenizer, from the beginning; and so does this,
    again, for the case that the tokenizer died as well.

    Attributes:
    - stage: the tokenizer
    - submit: of the choices that are in one group, with their attempt
    - accepted: None if the request is not tokenized yet
    - waited: seconds since a gateway died under it for the first time, and no client came back
    """

    stage: str
    submit: Submit
    accepted: Accepted | None = None
    waited: float = 0.0


# -------------------------------------------------------------------------------------- channels

# Who sends on each channel, and who reads it.
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

# The messages of each channel; a frame of any other is not read.
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
