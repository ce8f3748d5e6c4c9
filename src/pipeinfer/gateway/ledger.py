"""The gateway's requests: local events in and out, and the record of each live request.

- Call, ClientDisconnected, SetAdapters, QueueShare; Started, OutputDelta, Failed, AdoptionEnded,
  StatusChanged: events between the core and its driver, which is the HTTP side or an offline class.
  They never travel on the bus.
- decode_logprobs: log-probs as answers show them, from the packed ones that text rows carry.
- RequestRecord: what was delivered of a request, and what of a row is new.
- EndedRequests: which ends a restarted tokenizer may have missed.
- Backlog: whether there is room for more requests.
- SubmitBuilder, resubmissions: messages to the tokenizer.

Knows no client, no socket, and no HTTP beyond the status numbers of an error.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from pipeinfer.core import RecentTable
from pipeinfer.messages import (
    TOKEN_BYTES,
    Abort,
    AdapterChanges,
    Done,
    FinishReason,
    LogprobTexts,
    Message,
    Retention,
    Submit,
    TextRow,
    num_ids,
)
from pipeinfer.observe.spans import Traceparent, read_traceparent
from pipeinfer.params import (
    SEED_MASK,
    Adapter,
    JsonObject,
    JsonValue,
    ReasoningState,
    RequestParams,
    StructuredOutputs,
    choice_id,
)
from pipeinfer.wire import LOGPROB_WORDS, WORD, logprob_bytes, unpack_few, unpack_logprobs

Status = Literal["starting", "ready", "degraded", "asleep", "draining"]

# ----------------------------------------------------------------------------------- driver -> core


class Call(Message, frozen=True):
    """A new request; exactly one of `text`, `prompt_ids` (int32 bytes) and `chat` is given, as in
    Submit.

    Attributes:
    - request_id: unique over all gateways and their restarts; with several choices (`params.n`)
      each is answered under its own id (params.py), the first under this one
    - params: normalized; without a seed the core draws one
    - timeout: seconds from now, 0: never
    - return_prompt_ids, return_prompt_text, return_token_strs: Started brings the prompt's ids, its
      text, its tokens as the vocabulary writes them
    - only_encode: nothing is generated; one OutputDelta ends the request
    - token_offsets: each OutputDelta says where the text of its tokens begins
    - priority, cache_salt, trace, client, fallback_grammar, adapter, retention: as in Submit
    """

    request_id: str
    params: RequestParams
    text: str | None = None
    prompt_ids: bytes | None = None
    chat: list[JsonObject] | None = None
    template_arguments: JsonObject = {}
    add_special_tokens: bool = True
    priority: int = 0
    timeout: float = 0.0
    cache_salt: str = ""
    trace: str = ""
    return_prompt_ids: bool = False
    return_prompt_text: bool = False
    only_encode: bool = False
    client: str = ""
    fallback_grammar: StructuredOutputs | None = None
    token_offsets: bool = False
    return_token_strs: bool = False
    adapter: Adapter | None = None
    retention: Retention | None = None


class ClientDisconnected(Message, frozen=True):
    """driver -> core: no client wants more of a request. Its client is gone, has all of it, or has
    deleted the kept answer. Nothing more is delivered, and what is kept of its answer goes. An
    unknown id is no error."""

    request_id: str
    reason: str = "client"


class QueueShare(Message, frozen=True):
    """So many requests, and tokens of their prompts, may wait at this gateway; see Backlog."""

    requests: int
    tokens: int


# ----------------------------------------------------------------------------------- core -> driver


class Started(Message, frozen=True):
    """The request was tokenized. Comes once, before the first OutputDelta.

    Attributes:
    - group: that computes it
    - prompt_tokens: 0 for all choices but the first, they share one prompt
    - prompt_ids: int32 bytes; this, `prompt_text` and `token_strs` are empty unless asked for
    - reasoning: where the prompt of a chat leaves them
    - refusal: as in Accepted
    """

    request_id: str
    group: int
    prompt_tokens: int
    prompt_ids: bytes = b""
    prompt_text: str = ""
    reasoning: ReasoningState = "before"
    refusal: str = ""
    token_strs: tuple[str, ...] = ()


class OutputDelta(Message, frozen=True):
    """New text and output ids of a choice, gapless and without repeats.

    Attributes:
    - ids: int32 bytes
    - byte_offset: UTF-8 bytes of text before it
    - token_offset: ids before it
    - finish: of the last one alone; only there `stop_reason`, `prompt_tokens`, `output_tokens` and
      `cached_tokens` count (prompt and cached tokens are 0 for all choices but the first)
    - logprobs: of `ids`
    - prompt: log-probs of further prompt tokens, all before the first ids
    - offsets: characters of the whole text before each of `ids`, int32 bytes; like `logprobs` and
      `prompt`, only if asked for
    - vector: of the last one alone: float32 bytes, if asked for
    """

    request_id: str
    text: str
    ids: bytes
    byte_offset: int
    token_offset: int
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    logprobs: LogprobTexts | None = None
    prompt: LogprobTexts | None = None
    offsets: bytes = b""
    vector: bytes = b""


class Failed(Message, frozen=True):
    """The request ended with an error; nothing more comes.

    Attributes:
    - status: an HTTP status
    - param: the field that is wrong
    - code: see errors.CODES
    - retry_after: seconds after which trying again makes sense, 0 if it does not
    """

    request_id: str
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 0
    never_ran: bool = False

    @property
    def outcome(self) -> str:
        """The label of the failure in metrics: "abort", "refused" (the request never ran) or
        "error"."""
        if self.status == 408:
            return "abort"
        busy = self.never_ran and self.status == 503
        refused = self.status < 500 or busy or self.code in ("starting", "draining")
        return "refused" if refused else "error"


class SetAdapters(Message, frozen=True):
    """driver -> core: adapters were loaded or unloaded; `changes` are all since the server's start.
    A restarted gateway's driver gets them as AdapterChanges."""

    changes: AdapterChanges


class AdoptionEnded(Message, frozen=True):
    """All requests are known whose answers are kept and which the gateway before this one had; each
    came as Adopt."""


class StatusChanged(Message, frozen=True):
    """core -> driver: the pipeline's status. answering: whether a request sent now would be served
    without a pause."""

    status: Status
    answering: bool
    reason: str = ""


OFFSET_BYTES = 4  # bytes of a token's offset in the text, int32


class RankedToken(NamedTuple):
    """A token that is likely at a place. text: its bytes. rank: 1 for the likeliest."""

    id: int
    text: bytes
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Log-probs at one place of a text.

    Attributes:
    - sampled: the token that stands there, with rank 0 if nothing comes before it
    - offset: characters of text before it
    - top: the likeliest tokens, perhaps `sampled` among them
    """

    sampled: RankedToken
    offset: int
    top: list[RankedToken]


def without_first(texts: LogprobTexts, tokens: int) -> LogprobTexts:
    """A copy of the log-probs without those of the first `tokens` tokens."""
    count = max(len(texts.offsets) // OFFSET_BYTES, 1)
    return msgspec.structs.replace(
        texts,
        logprobs=texts.logprobs[tokens * len(texts.logprobs) // count :],
        texts=texts.texts[tokens * len(texts.texts) // count :],
        offsets=texts.offsets[tokens * OFFSET_BYTES :],
        ids=texts.ids[tokens * TOKEN_BYTES :],
    )


def num_alternatives(texts: LogprobTexts, tokens: int) -> int:
    """How many likely tokens are given for each of `tokens` tokens."""
    return (len(texts.logprobs) // (WORD * tokens) - LOGPROB_WORDS) // 2 if tokens else 0


def decode_logprobs(parts: Iterable[tuple[LogprobTexts, bytes]]) -> Iterator[TokenLogprobs]:
    """The log-probs of all tokens in `parts`, each with its tokens' ids (int32 bytes)."""
    return chain.from_iterable(_decode_texts(texts, ids) for texts, ids in parts)


def decode_prompt_logprobs(parts: Iterable[LogprobTexts]) -> Iterator[TokenLogprobs]:
    """The log-probs of a prompt's tokens."""
    return decode_logprobs((texts, texts.ids) for texts in parts)


def _decode_texts(texts: LogprobTexts, raw_ids: bytes) -> Iterator[TokenLogprobs]:
    ids, offsets = unpack_few(raw_ids), unpack_few(texts.offsets)
    alternatives = num_alternatives(texts, len(ids))
    found = unpack_logprobs(texts.logprobs, alternatives)
    for n, (token, offset, position) in enumerate(zip(ids, offsets, found, strict=True)):
        at = n * (1 + alternatives)
        sampled = RankedToken(token, texts.texts[at], position.logprob, position.rank)
        top = [
            RankedToken(id, texts.texts[at + rank], logprob, rank)
            for rank, (id, logprob) in enumerate(
                zip(position.ids, position.logprobs, strict=True), start=1
            )
        ]
        yield TokenLogprobs(sampled, offset, top)


TRACEPARENT = "traceparent"
TRACE_DIGITS = 32  # hexadecimal digits of a trace id
SPAN_DIGITS = 16  # of a span id


def client_traceparent(headers: Mapping[str, str]) -> str:
    """The client's W3C traceparent; "" if there is none or it is malformed."""
    given = headers.get(TRACEPARENT, "")
    return given if read_traceparent(given) is not None else ""


class RequestTraces:
    """Trace context that stages get of each request.

    Draws no entropy: ids are digests of the request's unique id and of `salt`, which this process
    alone has, so a replay comes to the same ones.

    on: whether spans are exported; else clients' traces are passed on as they are.
    """

    def __init__(self, salt: str = "", on: bool = False) -> None:
        self._salt = salt
        self._on = on

    def traceparent(self, request_id: str, given: str) -> str:
        """The traceparent for the other stages of a request whose client sent `given`.

        Names the gateway's span, in the client's trace or in a new one. A trace that its client
        does not sample is passed on as it is.
        """
        client = read_traceparent(given)
        if not self._on or (client is not None and not client.sampled):
            return given
        digest = hashlib.sha256(f"{self._salt}/{request_id}".encode()).hexdigest()
        trace_id = digest[:TRACE_DIGITS] if client is None else client.trace_id
        return Traceparent(trace_id, digest[TRACE_DIGITS : TRACE_DIGITS + SPAN_DIGITS], True).text


BYTES_PER_TOKEN = 4  # of ids exactly, of English text about
# Output tokens whose log-probs count: how many there will be is not known, and max_tokens may be
# any number.
MAX_LOGPROB_OUTPUTS = 4096
TEXT_BYTES = 28  # bytes that a text which is not all ASCII occupies beside its characters
VALUE_BYTES = 64  # bytes that a value of a chat or of template arguments occupies beside its text


def occupied_tokens(params: RequestParams, prompt_tokens: int) -> int:
    """Prompt tokens as which a request counts: its own, and bytes of its log-probs by
    BYTES_PER_TOKEN."""
    outputs = min(params.max_tokens or MAX_LOGPROB_OUTPUTS, MAX_LOGPROB_OUTPUTS)
    of_output = logprob_bytes(params.logprobs, params.vector_size)
    logprobs = prompt_tokens * logprob_bytes(params.prompt_logprobs) + outputs * of_output
    return prompt_tokens + logprobs // BYTES_PER_TOKEN


def call_tokens(call: Call) -> int:
    """Prompt tokens as which a call counts, estimated before it is tokenized."""
    return occupied_tokens(call.params, _estimated_tokens(call))


def _estimated_tokens(call: Call) -> int:
    """Prompt tokens of a call, estimated before it is tokenized.

    The number of its ids; else a quarter of the bytes that its text or chat occupies, with four for
    each letter of a text that is not all ASCII. It takes no time that grows with a text's length.
    """
    if call.prompt_ids is not None:
        return len(call.prompt_ids) // BYTES_PER_TOKEN
    found = 0
    pending: list[JsonValue] = (
        [call.text] if call.chat is None else [*call.chat, call.template_arguments]
    )
    while pending:  # no recursion: a caller of AsyncLLM may nest as deeply as it likes
        value = pending.pop()
        if isinstance(value, str):
            found += len(value) if value.isascii() else 4 * len(value) + TEXT_BYTES
            continue
        found += VALUE_BYTES
        if isinstance(value, dict):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
    return found // BYTES_PER_TOKEN + 1


BEGINNING_BYTES = 128  # so many have less than the 64 tokens that routing to groups sees at least


def prompt_beginning(call: Call) -> bytes:
    """The beginning of a prompt, equal for prompts that share a cached prefix: the salt, and the
    first bytes of the ids, of the text, or of the texts of the chat."""
    if call.prompt_ids is not None:
        found = call.prompt_ids[:BEGINNING_BYTES]
    elif call.text is not None:
        found = call.text[:BEGINNING_BYTES].encode("utf-8", "replace")[:BEGINNING_BYTES]
    else:
        found = _first_texts(call.chat or [])
    return call.cache_salt.encode("utf-8", "replace") + b"\0" + found


def _first_texts(chat: list[JsonObject]) -> bytes:
    """BEGINNING_BYTES bytes of the texts in `chat`, in its order."""
    found = b""
    pending: list[JsonValue] = [*reversed(chat)]  # the next one last
    while pending and len(found) < BEGINNING_BYTES:
        value = pending.pop()
        if isinstance(value, str):
            found += value[:BEGINNING_BYTES].encode("utf-8", "replace") + b"\0"
        elif isinstance(value, dict):
            pending += [value[name] for name in sorted(value, reverse=True)]
        elif isinstance(value, list | tuple):
            pending += reversed(value)
    return found[:BEGINNING_BYTES]


class Backlog:
    """Requests of which nothing was delivered yet, and bounds for them.

    Attributes:
    - max_requests: None: no bound
    - max_tokens: 0: no bound
    - requests, tokens: how many wait, and their prompt tokens (see occupied_tokens)
    """

    def __init__(self, max_requests: int | None = None, max_tokens: int = 0) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = self.tokens = 0

    def set_bounds(self, max_requests: int, max_tokens: int) -> None:
        """Other bounds from now on."""
        self._max_requests, self._max_tokens = max_requests, max_tokens

    def add(self, tokens: int) -> None:
        """A request of so many tokens begins to wait."""
        self.requests += 1
        self.tokens += tokens

    def grow(self, tokens: int) -> None:
        """A waiting request turned out to be larger by `tokens`."""
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """A request of so many tokens waits no more."""
        self.requests -= 1
        self.tokens -= tokens

    def refusal_reason(self, requests: int, tokens: int) -> str:
        """Why so many more requests cannot wait; "" if they can.

        A single request with more tokens than the bound is taken if no other waits.
        """
        max_requests = self._max_requests
        if max_requests is not None and self.requests + requests > max_requests:
            return f"{self.requests} requests are waiting already"
        if not self._max_tokens or not self.requests:
            return ""
        if self.tokens >= self._max_tokens or self.tokens + tokens > self._max_tokens:
            return f"requests with {self.tokens} prompt tokens are waiting already"
        return ""


MAX_ENDED = 10_000  # ended requests, at most
ENDED_LIFETIME = 60.0  # seconds for which an end is repeated to a tokenizer that was started again


class StreamGap(ValueError):
    """A row does not continue what was delivered; the text says which offsets do not meet."""


class OutputDiverged(ValueError):
    """A row that repeats ids has other ids than those that were delivered."""


class RequestRecord:
    """A live request: one choice of `submit`.

    Attributes:
    - submit: kept to the end, for a restarted tokenizer
    - choice: its number within `submit`
    - tokenizer: id of the stage that got it
    - group: that computes it, -1 until Accepted
    - size: tokens as which it counts in the backlog
    - deadline: monotonic seconds, or infinite
    - prompt_tokens: -1 until Accepted
    - num_prompt_logprobs: prompt tokens whose log-probs were delivered
    - early: rows that arrived before Accepted, which comes from another stage on another socket
    - has_output: whether text or ids were delivered
    - ids: delivered output ids, int32 bytes
    - tokens: how many
    - bytes: delivered text, in UTF-8
    - awaited: of a request that was begun by the gateway before this one: its detokenizer, which
      sends all of its text once it is asked; else empty
    """

    __slots__ = (
        "awaited",
        "bytes",
        "choice",
        "deadline",
        "early",
        "group",
        "has_output",
        "ids",
        "num_prompt_logprobs",
        "prompt_tokens",
        "size",
        "submit",
        "tokenizer",
        "tokens",
    )

    def __init__(
        self, submit: Submit, tokenizer: str, now: float, size: int, choice: int = 0
    ) -> None:
        self.submit = submit
        self.choice = choice
        self.size = size
        self.tokenizer = tokenizer
        self.deadline = now + submit.timeout if submit.timeout > 0 else float("inf")
        self.group = -1  # until the first Accepted
        self.prompt_tokens = -1  # unknown before the first Accepted
        self.early: list[TextRow] = []
        self.has_output = False
        self.bytes = 0
        self.ids = bytearray()
        self.tokens = 0
        self.num_prompt_logprobs = 0
        self.awaited = ""

    @property
    def request_id(self) -> str:
        return choice_id(self.submit.request_id, self.choice)

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    def adopt_attempt(self, attempt: int) -> bool:
        """Moves to `attempt` if it is later than the known one: another group goes on after what
        was delivered. Returns whether a message about `attempt` counts, which must be the latest.
        """
        if attempt > self.submit.attempt:
            self.submit = replace(self.submit, attempt=attempt)
            self.early.clear()
        return attempt == self.submit.attempt

    @property
    def timeout(self) -> float:
        """The request's timeout in seconds; 0: none."""
        return self.submit.timeout

    def once(self, tokens: int) -> int:
        """`tokens` of the prompt for the first choice, 0 for the others, which share its prompt."""
        return 0 if self.choice else tokens

    def advance(self, row: TextRow) -> tuple[str, bytes]:
        """(text, ids) of `row` that were not delivered yet; counts them as delivered.

        Raises StreamGap or OutputDiverged, and then delivers nothing of the row.
        """
        text, ids = row.text, row.ids
        repeated_bytes, repeated = self.bytes - row.byte_offset, self.tokens - row.token_offset
        if repeated_bytes or repeated:  # never on the undisturbed path
            ids = self._new_ids(row, repeated)
            text = self._new_text(row, repeated_bytes)
        self.bytes += len(text) if text.isascii() else len(text.encode())
        self.tokens += len(ids) // TOKEN_BYTES
        self.ids += ids
        return text, ids

    def logprobs(self, row: TextRow, ids: bytes) -> LogprobTexts | None:
        """Log-probs of `ids`, the new ones of `row`."""
        if row.logprobs is None or not ids:
            return None
        repeated = (len(row.ids) - len(ids)) // TOKEN_BYTES
        return without_first(row.logprobs, repeated) if repeated else row.logprobs

    def prompt(self, row: TextRow) -> LogprobTexts | None:
        """Log-probs of prompt tokens in `row` that were not delivered yet; counts them as
        delivered. Raises StreamGap."""
        if row.prompt is None:
            return None
        repeated, count = self.num_prompt_logprobs - row.prompt_offset, num_ids(row.prompt.ids)
        if repeated < 0:
            raise StreamGap(
                f"log-probs continue at prompt token {row.prompt_offset}, but "
                f"{self.num_prompt_logprobs} were delivered"
            )
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, row.prompt_offset + count)
        return without_first(row.prompt, repeated) if repeated < count else None

    def _new_text(self, row: TextRow, repeated_bytes: int) -> str:
        if repeated_bytes < 0:
            raise StreamGap(
                f"text continues at byte {row.byte_offset}, but {self.bytes} were delivered"
            )
        try:
            return row.text.encode()[repeated_bytes:].decode()
        except UnicodeDecodeError:
            raise StreamGap(
                f"byte {self.bytes}, to which text was delivered, lies inside a character of the "
                f"text that was sent again from byte {row.byte_offset}"
            ) from None

    def _new_ids(self, row: TextRow, repeated: int) -> bytes:
        if repeated < 0:
            raise StreamGap(
                f"tokens continue at {row.token_offset}, but {self.tokens} were delivered"
            )
        begin = TOKEN_BYTES * row.token_offset
        size = min(len(row.ids), TOKEN_BYTES * repeated)
        if not self.ids.startswith(row.ids[:size], begin):
            raise OutputDiverged
        return row.ids[TOKEN_BYTES * repeated :]


def offsets(row: TextRow, ids: bytes) -> bytes:
    """Text offsets of `ids`, the new ones of `row`; empty unless asked for."""
    return row.offsets[len(row.ids) - len(ids) :]


class EndedRequest(NamedTuple):
    """How a request ended.

    Attributes:
    - tokenizer: id of the stage that had it, "" if it belonged to another gateway
    - attempt: the last one
    - reason: of the Abort that was sent, "" if Done was sent
    - at: monotonic seconds when the pipeline was last informed
    """

    tokenizer: str
    attempt: int
    reason: str
    at: float


class EndedRequests:
    """The requests that ended within ENDED_LIFETIME.

    unreported: {tokenizer: ids} of finished requests for which no Done was sent yet.
    """

    def __init__(self) -> None:
        self._ends = RecentTable[EndedRequest](ENDED_LIFETIME, MAX_ENDED)
        self.unreported: dict[str, list[str]] = {}

    def take_unreported(self) -> list[tuple[str, Done]]:
        """(tokenizer, Done) for all unreported requests; they count as reported then."""
        done = [(tokenizer, Done(tuple(ids))) for tokenizer, ids in self.unreported.items()]
        self.unreported.clear()
        return done

    def add(self, request_id: str, end: EndedRequest) -> None:
        """Records an end, or that the pipeline was informed again."""
        if not end.reason:
            self.unreported.setdefault(end.tokenizer, []).append(request_id)
        self._ends.put(request_id, end, end.at)

    def get(self, request_id: str) -> EndedRequest | None:
        """How the request ended; None if it never did, as far as is remembered."""
        return self._ends.get(request_id)

    def recent(self, tokenizer: str, now: float) -> Iterator[Abort | Done]:
        """The ends that `tokenizer` was sent within ENDED_LIFETIME: it may have died before it read
        them."""
        of_tokenizer = [
            (name, end)
            for name, end in self._ends.items()
            if end.tokenizer in (tokenizer, "") and now - end.at < ENDED_LIFETIME
        ]
        done = tuple(name for name, end in of_tokenizer if not end.reason)
        if done:
            yield Done(done)
        for name, end in of_tokenizer:
            if end.reason:
                yield Abort(name, end.attempt, end.reason)


class SubmitBuilder:
    """Makes Submit messages of gateway number `gateway`. seed: of the seeds of calls without
    one."""

    def __init__(self, gateway: int, seed: int, traces: RequestTraces) -> None:
        self._gateway = gateway
        self._random = random.Random(seed + gateway)
        self._traces = traces

    def build(self, call: Call, detokenizer: int = 0) -> Submit:
        """The first attempt of `call`, all its choices in one message."""
        drawn = self._random.getrandbits(63)  # always, so that seeds depend on the order alone
        seed = drawn if call.params.seed is None else call.params.seed & SEED_MASK
        trace = self._traces.traceparent(call.request_id, call.trace)
        return _submit(call, self._gateway, detokenizer, seed, trace)


def _submit(call: Call, gateway: int, detokenizer: int, seed: int, trace: str) -> Submit:
    return Submit(
        request_id=call.request_id,
        attempt=1,
        gateway=gateway,
        params=replace(call.params, n=1) if call.params.n > 1 else call.params,
        seed=seed,
        text=call.text,
        prompt_ids=call.prompt_ids,
        chat=call.chat,
        template_arguments=call.template_arguments,
        add_special_tokens=call.add_special_tokens,
        priority=call.priority,
        timeout=call.timeout,
        cache_salt=call.cache_salt,
        trace=trace,
        return_prompt_ids=call.return_prompt_ids,
        return_prompt_text=call.return_prompt_text,
        only_encode=call.only_encode,
        choices=tuple(range(call.params.n)),
        client=call.client,
        fallback_grammar=call.fallback_grammar,
        token_offsets=call.token_offsets,
        return_token_strs=call.return_token_strs,
        adapter=call.adapter,
        detokenizer=detokenizer,
        retention=call.retention,
    )


def resubmissions(records: Iterable[RequestRecord]) -> Iterator[Submit]:
    """Submit messages for a restarted tokenizer: one for each group that has choices of a
    request."""
    together: dict[tuple[str, int, int], list[RequestRecord]] = {}
    for record in records:
        key = record.submit.request_id, record.group, record.attempt
        together.setdefault(key, []).append(record)
    for (_, group, _), live in together.items():
        choices = tuple(record.choice for record in live)
        yield replace(live[0].submit, group=group, choices=choices)
