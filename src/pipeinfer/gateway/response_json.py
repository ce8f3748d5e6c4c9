"""The JSON of responses: chat and text completions, whole or as server-sent events, and log-probs.

What is the same in all chunks of a stream is encoded once. Log-probs are encoded as the tokens
come: encoding those of a long prompt at once would block the event loop. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import OutputDelta, RankedToken, Started, TokenLogprobs
from pipeinfer.gateway.tool_parsers.base import CallIdStyle, ParsedDelta, ParserFactory
from pipeinfer.messages import FinishReason
from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.wire import json_logprob, unpack

DONE = b"data: [DONE]\n\n"
NULL = b"null"

_json = msgspec.json.Encoder()


class OutputOptions(msgspec.Struct, frozen=True):
    """Parts of a response beside new text.

    Attributes:
    - logprobs: number of alternatives of each output token; None: no log-probs
    - prompt_logprobs: the same of each prompt token
    - echo: the prompt itself comes first
    - no_new_tokens: no new text is wanted (max_tokens 0)
    - token_ids: ids of prompt and output
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    no_new_tokens: bool = False
    token_ids: bool = False

    @property
    def has_logprobs_or_ids(self) -> bool:
        """Whether anything but text is asked for."""
        has_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.echo or self.token_ids or has_logprobs

    @property
    def prompt_logprobs_needed(self) -> int | None:
        """Alternatives of the prompt's tokens that must be computed, for echo and
        prompt_logprobs.
        """
        echoed = self.logprobs if self.echo else None
        return max((n for n in (echoed, self.prompt_logprobs) if n is not None), default=None)


class ToolCallOptions(msgspec.Struct, frozen=True):
    """How a response writes tool calls.

    Attributes:
    - id_style: of call ids
    - previous_calls: calls that the conversation already has
    - function_forced: the client chose the function; OpenAI ends such a call with "stop"
    - legacy_functions: the one call is `function_call`
    """

    id_style: CallIdStyle = ""
    previous_calls: int = 0
    function_forced: bool = False
    legacy_functions: bool = False


class ResponseMetadata(msgspec.Struct, frozen=True):
    """The parts that all chunks and bodies of one response have in common.

    Attributes:
    - chat: a chat, else a text completion
    - id, model: as the client sees them
    - created: Unix seconds
    - output_options, tool_call_options: what the client asked for
    - parser_factory: makes the output parser of a choice; None: all output is content
    - fingerprint: system_fingerprint of the server
    """

    chat: bool
    id: str
    created: int
    model: str
    output_options: OutputOptions = OutputOptions()
    parser_factory: ParserFactory | None = None
    tool_call_options: ToolCallOptions = ToolCallOptions()
    fingerprint: str = ""

    def call_id(self, index: int, call: int, name: str) -> str:
        """The id of call number `call` in choice `index`, of the function `name`."""
        if self.tool_call_options.id_style == "numbered":
            return f"functions.{name}:{self.tool_call_options.previous_calls + call}"
        call_name = f"{self.id}-{index}-{call}".encode()
        digits = hashlib.blake2b(call_name, digest_size=12).hexdigest()
        return digits[:9] if self.tool_call_options.id_style == "short" else f"call_{digits}"


@dataclass
class TokenUsage:
    """Token counts, summed over the choices. `reasoning` and `cached` are parts of `output` and
    `prompt`.
    """

    prompt: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0  # of the output

    def add(self, delta: OutputDelta, reasoning: int = 0) -> None:
        """Adds a choice, by its last delta; `reasoning`: its reasoning tokens."""
        self.reasoning += reasoning
        self.prompt += delta.prompt_tokens
        self.output += delta.output_tokens
        self.cached += delta.cached_tokens

    def fields(self, chat: bool) -> JsonObject:
        """The `usage` object; reasoning tokens under OpenAI's name and under SGLang's."""
        fields: JsonObject = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if chat:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
            fields["reasoning_tokens"] = self.reasoning
        return fields

    def fields_without_cache(self, chat: bool) -> JsonObject:
        """Usage of a response that has not ended: without cached tokens, which are not known
        yet."""
        fields = self.fields(chat)
        del fields["prompt_tokens_details"]
        return fields


@dataclass
class ParsedOutput:
    """The parsed output of a choice.

    Attributes:
    - content, reasoning: parts of text
    - calls: of each call the tool's name, then parts of its arguments or of its input
    - custom: indices of calls of custom tools
    """

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[list[str]] = field(default_factory=list[list[str]])
    custom: set[int] = field(default_factory=set[int])

    def add(self, deltas: Sequence[ParsedDelta]) -> None:
        """Adds further deltas, in order."""
        for parsed_delta in deltas:
            if parsed_delta.kind in ("call", "custom"):
                self.custom |= {len(self.calls)} if parsed_delta.kind == "custom" else set()
                self.calls.append([parsed_delta.text])
            elif parsed_delta.kind in ("arguments", "input"):
                self.calls[parsed_delta.call_index].append(parsed_delta.text)
            elif parsed_delta.kind == "reasoning":
                self.reasoning.append(parsed_delta.text)
            else:
                self.content.append(parsed_delta.text)


@dataclass
class FinishedChoice:
    """A finished choice, or the end of one. Log-probs are JSON; `parsed`: None where all is
    content.
    """

    text: str
    finish: FinishReason
    stop_reason: str | int | None
    logprobs: bytes = NULL
    prompt_logprobs: bytes | None = None
    parsed: ParsedOutput | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    def client_finish_reason(self, metadata: ResponseMetadata) -> str:
        """`finish_reason` as the client sees it."""
        calling = metadata.tool_call_options
        called = self.parsed is not None and bool(self.parsed.calls) and not calling.function_forced
        if not called or self.finish != "stop":
            return self.finish
        return "function_call" if calling.legacy_functions else "tool_calls"


class ChunkEncoder:
    """Encodes the chunks of one stream as SSE events, each ending in an empty line."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        choices: int,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        """`continuous_usage`: each chunk carries the usage so far."""
        kind = "chat.completion.chunk" if metadata.chat else "text_completion"
        self._metadata = metadata
        self._kind = kind
        head = _head(metadata, kind)
        usage = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        field = b'"delta":{"content":' if metadata.chat else b'"text":'
        self._close = b"}" if metadata.chat else b""
        self._prefixes = [
            b'data: %s,"choices":[{"index":%d,%s' % (head, i, field) for i in range(choices)
        ]
        self._usage = usage
        self._suffix = self._close + b',"logprobs":null,"finish_reason":null}]' + usage
        self._head = head
        self._usage_by_choice = [TokenUsage() for _ in range(choices)] if continuous_usage else None

    def started(self, index: int, started: Started) -> None:
        """Comes before a choice's first delta."""
        if self._usage_by_choice is not None:
            self._usage_by_choice[index].prompt = started.prompt_tokens

    def count(self, index: int, delta: OutputDelta, reasoning: int) -> None:
        """Comes before the chunks of a delta. `reasoning`: the choice's reasoning tokens so far."""
        if self._usage_by_choice is None:
            return
        so_far = delta.token_offset + len(unpack(delta.ids))
        self._usage_by_choice[index].output = (
            so_far if delta.finish is None else delta.output_tokens
        )
        self._usage_by_choice[index].reasoning = reasoning
        self._usage = self._usage_so_far(self._usage_by_choice)
        self._suffix = self._close + b',"logprobs":null,"finish_reason":null}]' + self._usage

    def _usage_so_far(self, counts: Sequence[TokenUsage]) -> bytes:
        total = TokenUsage(
            sum(n.prompt for n in counts),
            sum(n.output for n in counts),
            reasoning=sum(n.reasoning for n in counts),
        )
        return b',"usage":%s}\n\n' % _json.encode(total.fields_without_cache(self._metadata.chat))

    def role_chunk(self, index: int, prompt_ids: list[int] | None = None) -> bytes:
        """The chunk before a choice's first text: of a chat the role, and the prompt's ids if
        asked for.
        """
        if not self._metadata.chat:
            return b""
        delta = b'{"role":"assistant","content":""}'
        parsed = b'[{"index":%d,"delta":%s,"logprobs":null,"finish_reason":null}]' % (index, delta)
        if prompt_ids is not None:
            parsed += b',"prompt_token_ids":%s' % _json.encode(prompt_ids)
        usage = self._usage
        if self._usage_by_choice is not None:  # no token of this choice has been sent yet
            unsent = replace(self._usage_by_choice[index], output=0, reasoning=0)
            usage = self._usage_so_far(
                [unsent, *self._usage_by_choice[:index], *self._usage_by_choice[index + 1 :]]
            )
        return b'data: %s,"choices":%s%s' % (self._head, parsed, usage)

    def text_chunk(self, index: int, text: str) -> bytes:
        """A chunk of text; the hot path of streaming."""
        return self._prefixes[index] + _json.encode(text) + self._suffix

    def text_chunk_with_logprobs(self, index: int, text: str, logprobs: bytes) -> bytes:
        """A chunk of text with its log-probs as JSON."""
        return b'%s%s%s,"logprobs":%s,"finish_reason":null}]%s' % (
            self._prefixes[index],
            _json.encode(text),
            self._close,
            logprobs,
            self._usage,
        )

    def last_text_chunk(self, index: int, choice: FinishedChoice) -> bytes:
        """The choice's last text and its finish reason."""
        return b'%s%s%s,"logprobs":%s,"finish_reason":"%s","stop_reason":%s}]%s' % (
            self._prefixes[index],
            _json.encode(choice.text),
            self._close,
            choice.logprobs,
            choice.finish.encode(),
            _json.encode(choice.stop_reason),
            self._usage,
        )

    def parsed_chunk(self, index: int, parsed_delta: ParsedDelta, logprobs: bytes = NULL) -> bytes:
        """The chunk of a parsed delta."""
        return self._delta(index, _delta(self._metadata, index, parsed_delta), logprobs)

    def logprobs_chunk(self, index: int, logprobs: bytes) -> bytes:
        """Log-probs of tokens that give no parsed delta yet."""
        return self._delta(index, {}, logprobs)

    def finish_chunk(self, index: int, choice: FinishedChoice) -> bytes:
        """The finish reason of a choice whose parsed deltas have all been sent."""
        return self._delta(index, {}, choice.logprobs, choice)

    def _delta(
        self, index: int, delta: JsonObject, logprobs: bytes, finished: FinishedChoice | None = None
    ) -> bytes:
        finish = b"null"
        if finished is not None:
            reason = finished.client_finish_reason(self._metadata).encode()
            stop = _json.encode(finished.stop_reason)
            finish = b'"%s","stop_reason":%s' % (reason, stop)
        head = b'data: %s,"choices":[{"index":%d,"delta":' % (self._head, index)
        parsed = b'%s,"logprobs":%s,"finish_reason":%s}]' % (_json.encode(delta), logprobs, finish)
        return head + parsed + self._usage

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """The chunk without choices that stream_options.include_usage asks for."""
        fields = _json.encode(usage.fields(self._metadata.chat))
        return b'data: %s,"choices":[],"usage":%s}\n\n' % (self._head, fields)

    @staticmethod
    def error_chunk(error: ApiError) -> bytes:
        """Ends a stream that cannot go on; no [DONE] follows."""
        return b"data: %s\n\n" % error.body()


def encode_response(
    metadata: ResponseMetadata, choices: list[FinishedChoice], usage: TokenUsage
) -> bytes:
    """The body of the response to a request without `stream`."""
    kind = "chat.completion" if metadata.chat else "text_completion"
    encoded = [_choice(metadata, i, choice) for i, choice in enumerate(choices)]
    of_prompt = b""
    if metadata.chat and choices[0].prompt_logprobs is not None:  # beside the choices, as in vLLM
        of_prompt = b',"prompt_logprobs":' + choices[0].prompt_logprobs
    if metadata.chat and choices[0].prompt_token_ids is not None:
        of_prompt += b',"prompt_token_ids":' + _json.encode(choices[0].prompt_token_ids)
    return b'%s,"choices":%s,"usage":%s%s}' % (
        _head(metadata, kind),
        _json.encode(encoded),
        _json.encode(usage.fields(metadata.chat)),
        of_prompt,
    )


def _head(metadata: ResponseMetadata, kind: str) -> bytes:
    """The opening of the object, without a closing brace."""
    fields = {
        "id": metadata.id,
        "object": kind,
        "created": metadata.created,
        "model": metadata.model,
        "system_fingerprint": metadata.fingerprint or None,
    }
    return _json.encode(fields)[:-1]


def _delta(metadata: ResponseMetadata, index: int, parsed_delta: ParsedDelta) -> JsonObject:
    if parsed_delta.kind == "content":
        return {"content": parsed_delta.text}
    if parsed_delta.kind == "reasoning":
        return {"reasoning_content": parsed_delta.text}
    if metadata.tool_call_options.legacy_functions:
        begun: JsonObject = {"name": parsed_delta.text, "arguments": ""}
        return {
            "function_call": begun
            if parsed_delta.kind == "call"
            else {"arguments": parsed_delta.text}
        }
    call: JsonObject = {
        "index": parsed_delta.call_index,
        "function": {"arguments": parsed_delta.text},
    }
    if parsed_delta.kind == "input":
        call = {"index": parsed_delta.call_index, "custom": {"input": parsed_delta.text}}
    elif parsed_delta.kind != "arguments":
        call_id = metadata.call_id(index, parsed_delta.call_index, parsed_delta.text)
        call = {
            "index": parsed_delta.call_index,
            **_tool_call(call_id, parsed_delta.text, "", parsed_delta.kind == "custom"),
        }
    return {"tool_calls": [call]}


def _tool_call(call_id: str, name: str, text: str, custom: bool) -> JsonObject:
    """A tool call; `text`: its arguments, or the input of a custom tool."""
    if custom:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _message(metadata: ResponseMetadata, index: int, choice: FinishedChoice) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
    parsed = choice.parsed
    if parsed is None:
        return message
    message["content"] = "".join(parsed.content) or (
        None if parsed.calls or parsed.reasoning else ""
    )
    if parsed.reasoning:
        message["reasoning_content"] = "".join(parsed.reasoning)
    if parsed.calls and metadata.tool_call_options.legacy_functions:
        name, *arguments = parsed.calls[0]
        message["function_call"] = {"name": name, "arguments": "".join(arguments)}
    elif parsed.calls:
        message["tool_calls"] = [
            _tool_call(
                metadata.call_id(index, number, name), name, "".join(texts), number in parsed.custom
            )
            for number, (name, *texts) in enumerate(parsed.calls)
        ]
    return message


def _choice(metadata: ResponseMetadata, index: int, choice: FinishedChoice) -> dict[str, object]:
    content: dict[str, object] = {"text": choice.text}
    if metadata.chat:
        content = {"message": _message(metadata, index, choice)}
    elif choice.prompt_logprobs is not None:
        content["prompt_logprobs"] = msgspec.Raw(choice.prompt_logprobs)
    if choice.token_ids is not None:
        content["token_ids"] = choice.token_ids
        if not metadata.chat:
            content["prompt_token_ids"] = choice.prompt_token_ids
    return {
        "index": index,
        **content,
        "logprobs": msgspec.Raw(choice.logprobs),
        "finish_reason": choice.client_finish_reason(metadata),
        "stop_reason": choice.stop_reason,
    }


COMPLETION_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class ChatLogprobs:
    """`logprobs` of a chat's choice."""

    def __init__(self) -> None:
        self._content = JsonListEncoder()

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Adds tokens with their log-probs."""
        for position in logprobs:
            self._content.add(chat_token_logprob(position))

    def take(self) -> bytes:
        """The JSON of all tokens since the last call."""
        return b'{"content":%s,"refusal":null}' % self._content.take()


class CompletionLogprobs:
    """`logprobs` of a completion's choice, with `alternatives` alternatives beside each token
    itself."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._lists = [JsonListEncoder() for _ in COMPLETION_LOGPROB_FIELDS]

    def add(self, logprobs: Iterable[TokenLogprobs], letters: int = 0) -> None:
        """Adds tokens with their log-probs. `letters`: characters of the response's text before
        that in which offsets count."""
        for position in logprobs:
            logprob, tops = self._numbers(position)
            values = (
                _name(position.sampled.text, "bytes:"),
                logprob,
                tops,
                letters + position.offset,
            )
            for encoder, value in zip(self._lists, values, strict=True):
                encoder.add(value)

    def take(self) -> bytes:
        """See ChatLogprobs."""
        parts = zip(COMPLETION_LOGPROB_FIELDS, self._lists, strict=True)
        return b"{%s}" % b",".join(
            b'"%s":%s' % (n.encode(), encoder.take()) for n, encoder in parts
        )

    def _numbers(self, position: TokenLogprobs) -> tuple[JsonValue, JsonValue]:
        if not position.sampled.rank:
            return None, None
        tops: JsonObject = {}
        for token in (position.sampled, *position.top[: self._alternatives]):
            # If several tokens have one text, the likeliest counts.
            tops.setdefault(_name(token.text, "bytes:"), json_logprob(token.logprob))
        return json_logprob(position.sampled.logprob), tops


class PromptLogprobsOfRequest:
    """vLLM's `prompt_logprobs`, with `alternatives` alternatives."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._list = JsonListEncoder()

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Adds tokens with their log-probs."""
        for position in logprobs:
            if not position.sampled.rank:
                self._list.add(None)
                continue
            tokens = (position.sampled, *position.top[: self._alternatives])
            by_id = {token.id: token for token in tokens}
            self._list.add(
                {
                    str(token.id): {
                        "logprob": json_logprob(token.logprob),
                        "rank": token.rank,
                        "decoded_token": token.text.decode(errors="replace"),
                    }
                    for token in by_id.values()
                }
            )

    def take(self) -> bytes:
        """See ChatLogprobs."""
        return self._list.take()


class JsonListEncoder:
    """A JSON list whose values are encoded as they are added."""

    def __init__(self) -> None:
        self._encoded: list[bytes] = []

    def add(self, value: JsonValue) -> None:
        """Adds a value to the list."""
        self._encoded.append(_json.encode(value))

    def take(self) -> bytes:
        """The list of all values since the last call."""
        encoded, self._encoded = self._encoded, []
        return b"[%s]" % b",".join(encoded)


def chat_token_logprob(position: TokenLogprobs) -> JsonObject:
    """One token of a chat's log-probs."""
    tops: list[JsonValue] = [_token(token) for token in position.top]
    return {**_token(position.sampled), "top_logprobs": tops}


def _token(token: RankedToken) -> JsonObject:
    return {
        "token": _name(token.text),
        "logprob": json_logprob(token.logprob),
        "bytes": list(token.text),
    }


def _name(text: bytes, prefix: str = "") -> str:
    r"""The token's text; bytes that are part of a character as OpenAI writes them, "\\xe4\\xbd"."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return prefix + "".join(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in text)
