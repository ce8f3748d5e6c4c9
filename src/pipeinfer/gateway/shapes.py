"""The JSON of answers: chat and text completions, whole or as server-sent events.

What is the same in all chunks of a stream is encoded once. Knows no HTTP and no core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.pieces import CallIdStyle, ParsedDelta, ParserFactory
from pipeinfer.json_values import JsonObject
from pipeinfer.messages import FinishReason
from pipeinfer.packing import unpack

DONE = b"data: [DONE]\n\n"
NULL = b"null"

_json = msgspec.json.Encoder()


class OutputOptions(msgspec.Struct, frozen=True):
    """What an answer has beside new text: log-probs with so many alternatives (None: no log-probs),
    those of the prompt, the prompt itself, the ids of prompt and output. nothing_new: and nothing
    else."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    no_new_tokens: bool = False
    token_ids: bool = False

    @property
    def more_than_text(self) -> bool:
        """Whether anything of that is asked for."""
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        return self.echo or self.token_ids or scored

    @property
    def prompt_logprobs_needed(self) -> int | None:
        """Alternatives of the prompt's tokens that are needed in all."""
        echoed = self.logprobs if self.echo else None
        return max(
            (most for most in (echoed, self.prompt_logprobs) if most is not None), default=None
        )


class ToolCallOptions(msgspec.Struct, frozen=True):
    """How an answer tells calls. `ids`: what they look like. `made`: how many calls the
    conversation has already. `named`: the client chose the function; OpenAI ends such a call with
    "stop". `older`: the one call is `function_call`."""

    id_style: CallIdStyle = ""
    previous_calls: int = 0
    function_forced: bool = False
    legacy_functions: bool = False


class ResponseMetadata(msgspec.Struct, frozen=True):
    """What all chunks and bodies of one answer say of themselves. `created`: Unix seconds.
    `fingerprint`: of the server.

    `reader`: makes what reads one choice; None where all is content."""

    chat: bool
    id: str
    created: int
    model: str
    output_options: OutputOptions = OutputOptions()
    parser_factory: ParserFactory | None = None
    tool_call_options: ToolCallOptions = ToolCallOptions()
    fingerprint: str = ""

    def call_id(self, index: int, call: int, name: str) -> str:
        """Of call number `call` in choice `index`, of the function `name`."""
        if self.tool_call_options.id_style == "numbered":
            return f"functions.{name}:{self.tool_call_options.previous_calls + call}"
        whole = f"{self.id}-{index}-{call}".encode()
        digits = hashlib.blake2b(whole, digest_size=12).hexdigest()
        return digits[:9] if self.tool_call_options.id_style == "short" else f"call_{digits}"


@dataclass
class TokenUsage:
    """Token counts, summed over the choices."""

    prompt: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0  # of the output

    def add(self, delta: Delta, reasoning: int = 0) -> None:
        """Those of a choice, whose last delta it is; so many of its tokens are thoughts."""
        self.reasoning += reasoning
        self.prompt += delta.prompt_tokens
        self.output += delta.output_tokens
        self.cached += delta.cached_tokens

    def fields(self, chat: bool) -> JsonObject:
        """As they are shown; tokens of thoughts where OpenAI has them, and where SGLang has."""
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
        """Of an answer that has not ended: what the cache had is not known yet."""
        fields = self.fields(chat)
        del fields["prompt_tokens_details"]
        return fields


@dataclass
class ParsedOutput:
    """What a reader has made of a choice; of each call its name, then pieces of its arguments or,
    of the `custom` ones, of its input."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[list[str]] = field(default_factory=list[list[str]])
    custom: set[int] = field(default_factory=set[int])

    def add(self, deltas: Sequence[ParsedDelta]) -> None:
        """Further ones, in order."""
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
    """One finished choice, or the end of one; log-probs as JSON."""

    text: str
    finish: FinishReason
    stop_reason: str | int | None
    logprobs: bytes = NULL
    prompt_logprobs: bytes | None = None
    parsed: ParsedOutput | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    def client_finish_reason(self, answer: ResponseMetadata) -> str:
        """Why it ended, for the client."""
        calling = answer.tool_call_options
        called = self.parsed is not None and bool(self.parsed.calls) and not calling.function_forced
        if not called or self.finish != "stop":
            return self.finish
        return "function_call" if calling.legacy_functions else "tool_calls"


class ChunkEncoder:
    """Encodes the chunks of one stream as SSE events, each ending in an empty line."""

    def __init__(
        self,
        answer: ResponseMetadata,
        choices: int,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        """continuous_usage: each chunk says how much there was so far."""
        kind = "chat.completion.chunk" if answer.chat else "text_completion"
        self._answer = answer
        self._kind = kind
        head = _head(answer, kind)
        usage = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        field = b'"delta":{"content":' if answer.chat else b'"text":'
        self._close = b"}" if answer.chat else b""
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

    def count(self, index: int, delta: Delta, reasoning: int) -> None:
        """Comes before the chunks of the delta, with the choice's tokens of thoughts so far."""
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
        return b',"usage":%s}\n\n' % _json.encode(total.fields_without_cache(self._answer.chat))

    def role_chunk(self, index: int, prompt_ids: list[int] | None = None) -> bytes:
        """What comes before a choice's first text: the role, in a chat, and the prompt's ids, if
        they are asked for."""
        if not self._answer.chat:
            return b""
        delta = b'{"role":"assistant","content":""}'
        said = b'[{"index":%d,"delta":%s,"logprobs":null,"finish_reason":null}]' % (index, delta)
        if prompt_ids is not None:
            said += b',"prompt_token_ids":%s' % _json.encode(prompt_ids)
        usage = self._usage
        if self._usage_by_choice is not None:  # no token of this choice has been told yet
            unsent = replace(self._usage_by_choice[index], output=0, reasoning=0)
            usage = self._usage_so_far(
                [unsent, *self._usage_by_choice[:index], *self._usage_by_choice[index + 1 :]]
            )
        return b'data: %s,"choices":%s%s' % (self._head, said, usage)

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
        """The choice's last text together with its end."""
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
        """A chunk with a piece that a reader has found."""
        return self._delta(index, _delta(self._answer, index, parsed_delta), logprobs)

    def logprobs_chunk(self, index: int, logprobs: bytes) -> bytes:
        """A chunk with log-probs of tokens that give no piece yet."""
        return self._delta(index, {}, logprobs)

    def finish_chunk(self, index: int, choice: FinishedChoice) -> bytes:
        """The end of a choice whose pieces have all been sent."""
        return self._delta(index, {}, choice.logprobs, choice)

    def _delta(
        self, index: int, delta: JsonObject, logprobs: bytes, end: FinishedChoice | None = None
    ) -> bytes:
        finish = b"null"
        if end is not None:
            reason, stop = (
                end.client_finish_reason(self._answer).encode(),
                _json.encode(end.stop_reason),
            )
            finish = b'"%s","stop_reason":%s' % (reason, stop)
        head = b'data: %s,"choices":[{"index":%d,"delta":' % (self._head, index)
        said = b'%s,"logprobs":%s,"finish_reason":%s}]' % (_json.encode(delta), logprobs, finish)
        return head + said + self._usage

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """The chunk without choices that stream_options.include_usage asks for."""
        fields = _json.encode(usage.fields(self._answer.chat))
        return b'data: %s,"choices":[],"usage":%s}\n\n' % (self._head, fields)

    @staticmethod
    def error_chunk(error: ApiError) -> bytes:
        """What ends a stream that cannot go on; no [DONE] follows."""
        return b"data: %s\n\n" % error.body()


def encode_response(
    answer: ResponseMetadata, choices: list[FinishedChoice], usage: TokenUsage
) -> bytes:
    """The whole answer of a request without `stream`."""
    kind = "chat.completion" if answer.chat else "text_completion"
    listed = [_choice(answer, i, choice) for i, choice in enumerate(choices)]
    of_prompt = b""
    if answer.chat and choices[0].prompt_logprobs is not None:  # where vLLM has it
        of_prompt = b',"prompt_logprobs":' + choices[0].prompt_logprobs
    if answer.chat and choices[0].prompt_token_ids is not None:
        of_prompt += b',"prompt_token_ids":' + _json.encode(choices[0].prompt_token_ids)
    return b'%s,"choices":%s,"usage":%s%s}' % (
        _head(answer, kind),
        _json.encode(listed),
        _json.encode(usage.fields(answer.chat)),
        of_prompt,
    )


def _head(answer: ResponseMetadata, kind: str) -> bytes:
    """The opening of the object, without a closing brace."""
    fields = {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint or None,
    }
    return _json.encode(fields)[:-1]


def _delta(answer: ResponseMetadata, index: int, parsed_delta: ParsedDelta) -> JsonObject:
    if parsed_delta.kind == "content":
        return {"content": parsed_delta.text}
    if parsed_delta.kind == "reasoning":
        return {"reasoning_content": parsed_delta.text}
    if answer.tool_call_options.legacy_functions:
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
        call_id = answer.call_id(index, parsed_delta.call_index, parsed_delta.text)
        call = {
            "index": parsed_delta.call_index,
            **_tool_call(call_id, parsed_delta.text, "", parsed_delta.kind == "custom"),
        }
    return {"tool_calls": [call]}


def _tool_call(call_id: str, name: str, text: str, custom: bool) -> JsonObject:
    """`text`: its arguments, or the input of a custom one."""
    if custom:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _message(answer: ResponseMetadata, index: int, choice: FinishedChoice) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
    said = choice.parsed
    if said is None:
        return message
    message["content"] = "".join(said.content) or (None if said.calls or said.reasoning else "")
    if said.reasoning:
        message["reasoning_content"] = "".join(said.reasoning)
    if said.calls and answer.tool_call_options.legacy_functions:
        name, *arguments = said.calls[0]
        message["function_call"] = {"name": name, "arguments": "".join(arguments)}
    elif said.calls:
        message["tool_calls"] = [
            _tool_call(
                answer.call_id(index, number, name), name, "".join(texts), number in said.custom
            )
            for number, (name, *texts) in enumerate(said.calls)
        ]
    return message


def _choice(answer: ResponseMetadata, index: int, choice: FinishedChoice) -> dict[str, object]:
    content: dict[str, object] = {"text": choice.text}
    if answer.chat:
        content = {"message": _message(answer, index, choice)}
    elif choice.prompt_logprobs is not None:
        content["prompt_logprobs"] = msgspec.Raw(choice.prompt_logprobs)
    if choice.token_ids is not None:
        content["token_ids"] = choice.token_ids
        if not answer.chat:
            content["prompt_token_ids"] = choice.prompt_token_ids
    return {
        "index": index,
        **content,
        "logprobs": msgspec.Raw(choice.logprobs),
        "finish_reason": choice.client_finish_reason(answer),
        "stop_reason": choice.stop_reason,
    }
