"""Common parts of the translations of other APIs: bodies become chats, parsed deltas become
responses.

ConversationBuilder collects a chat from smaller parts; OutputBlocks cut an answer into blocks;
TranslatedEncoder drives a ResponseFormatter. The bodies and events of each API are the business of
anthropic.py and responses_api.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.ledger import OutputDelta, Started, decode_logprobs
from pipeinfer.gateway.requests import ParsedRequest, RequestDefaults, parse_chat
from pipeinfer.gateway.response_json import ResponseMetadata, TokenUsage, chat_token_logprob
from pipeinfer.gateway.schema import ChatMessage, ChatRequest, ContentPart, Role
from pipeinfer.gateway.tool_parsers.base import (
    MESSAGE_BREAK,
    DeltaKind,
    OutputParser,
    ParsedDelta,
    PlainTextParser,
    ReasoningTokenCounter,
)
from pipeinfer.messages import FinishReason
from pipeinfer.params import JsonObject, JsonValue

TRUNCATED_REASONS = ("length", "abort")  # finish reasons of an output that is not complete

_json = msgspec.json.Encoder()


class ResponseEnd:
    """How a response ended. `finish`: None until it has; `usage`: what it took."""

    def __init__(self) -> None:
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = TokenUsage()

    def set_from(self, delta: OutputDelta, reasoning: int) -> None:
        """From the last delta. `reasoning`: number of reasoning tokens."""
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        self.usage.add(delta, reasoning)


class ResponseFormatter(Protocol):
    """Formats one response as the JSON objects of another API. Events have their name as
    `type`.
    """

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        """Events before the first block."""
        ...

    def block_events(self, step: BlockEvent, logprobs: list[JsonValue]) -> Iterator[JsonObject]:
        """Events of a change of a block. `logprobs`: log-probs of tokens that came with it."""
        ...

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        """Events of the end."""
        ...

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        """The whole response as one object."""
        ...

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        """The event of an error within the response."""
        ...


class TranslatedEncoder:
    """The response encoder of one choice in another API; by events if it `streams`."""

    def __init__(
        self, metadata: ResponseMetadata, formatter: ResponseFormatter, streams: bool
    ) -> None:
        self._parser_factory = metadata.parser_factory
        self._parser: OutputParser = PlainTextParser()
        self._reasoning_counter = ReasoningTokenCounter()
        self._formatter = formatter
        self._streams = streams
        self._blocks = OutputBlocks()
        self._end = ResponseEnd()
        self._prompt_tokens = 0
        self._started = False
        self._pending_logprobs: list[JsonValue] = []  # of tokens whose text is still to come

    @property
    def ended(self) -> bool:
        return self._end.finish is not None

    def started(self, index: int, started: Started) -> None:
        self._prompt_tokens = started.prompt_tokens
        if self._parser_factory is not None:
            parser = self._parser_factory(started.reasoning)
            self._parser, self._reasoning_counter = parser, parser.reasoning

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        if not delta.text and not delta.ids and delta.finish is None:
            return b""
        if self._streams:
            return b"".join(map(server_sent_event, self._events(delta)))
        for _ in self._events(delta):
            continue  # the blocks collect the output
        return (
            _json.encode(self._formatter.full_response(self._blocks, self._end))
            if self.ended
            else b""
        )

    def error(self, error: ApiError) -> bytes:
        return server_sent_event(self._formatter.error_event(error, self._blocks, self._end))

    def _events(self, delta: OutputDelta) -> Iterator[JsonObject]:
        formatter, blocks = self._formatter, self._blocks
        if not self._started:
            self._started = True
            yield from formatter.start_events(self._prompt_tokens)
        if delta.logprobs is not None:
            self._pending_logprobs += map(
                chat_token_logprob, decode_logprobs([(delta.logprobs, delta.ids)])
            )
        self._reasoning_counter.add_offsets(delta.offsets)
        parsed = [*self._parser.feed(delta.text)]
        if delta.finish is not None:
            parsed += self._parser.finish()
        yield from self._formatted(blocks.add(parsed))
        if delta.finish is None:
            return
        self._end.set_from(delta, self._reasoning_counter.count)
        if not blocks.all:
            yield from self._formatted(blocks.add_empty())
        yield from self._formatted(blocks.close(truncated=delta.finish in TRUNCATED_REASONS))
        yield from formatter.end_events(blocks, self._end)

    def _formatted(self, steps: Iterable[BlockEvent]) -> Iterator[JsonObject]:
        for step in steps:
            logprobs: list[JsonValue] = []
            if step.action == "more":
                logprobs, self._pending_logprobs = self._pending_logprobs, []
                if step.block.kind == "content":
                    step.block.logprobs += logprobs
            yield from self._formatter.block_events(step, logprobs)


def server_sent_event(content: JsonObject) -> bytes:
    """A server-sent event, named by its `type`."""
    return b"event: %s\ndata: %s\n\n" % (str(content["type"]).encode(), _json.encode(content))


def parse_translated_chat(
    request: ChatRequest,
    request_id: str,
    defaults: RequestDefaults,
    trace: str,
    names: Mapping[str, str],
) -> ParsedRequest:
    """parse_chat, whose errors name the fields as the API calls them. `names`: by those of
    chats.
    """
    try:
        parsed = parse_chat(request, request_id, defaults, trace)
        return replace(parsed, constraint=parsed.constraint.with_field_names(names))
    except ApiError as error:
        raise renamed(error, names) from None


BlockKind = Literal["content", "reasoning", "call", "custom"]
CALL_BLOCKS = ("call", "custom")


@dataclass
class OutputBlock:
    """A block of an answer.

    Attributes:
    - kind: a text ("content"), "reasoning", or one call of a tool ("call", "custom")
    - index: place in the answer
    - call_index, name: of the call
    - texts: text, arguments or input so far
    - logprobs: of its tokens, if asked for
    - complete: closed, and not because the output was cut off within it
    """

    kind: BlockKind
    index: int
    call_index: int = -1
    name: str = ""
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[JsonValue] = field(default_factory=list[JsonValue])
    complete: bool = False

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self.texts)


class BlockEvent(NamedTuple):
    """A change of a block: it opens, gets more `text`, or closes."""

    action: Literal["open", "more", "close"]
    block: OutputBlock
    text: str = ""


class OutputBlocks:
    """The blocks of one choice, in order. One block is open while deltas of its kind come."""

    def __init__(self) -> None:
        self.all: list[OutputBlock] = []
        self._open: OutputBlock | None = None

    @property
    def has_calls(self) -> bool:
        """Whether a block is a call."""
        return any(block.kind in CALL_BLOCKS for block in self.all)

    def add(self, deltas: Iterable[ParsedDelta]) -> Iterator[BlockEvent]:
        """Adds parsed deltas; yields the changes of the blocks in order."""
        for delta in deltas:
            if delta.call_index == MESSAGE_BREAK:
                yield from self.close()
                continue
            if not self._continues_block(delta):
                yield from self.close()
                yield BlockEvent("open", self._open_block(delta))
            block = self._open
            if delta.kind not in CALL_BLOCKS and delta.text and block is not None:
                block.texts.append(delta.text)
                yield BlockEvent("more", block, delta.text)

    def close(self, *, truncated: bool = False) -> Iterator[BlockEvent]:
        """Closes the open block. `truncated`: the output ended within it."""
        block, self._open = self._open, None
        if block is not None:
            block.complete = not truncated
            yield BlockEvent("close", block)

    def add_empty(self) -> Iterator[BlockEvent]:
        """An answer of one empty text."""
        yield from self.add([ParsedDelta("content", "")])

    def _continues_block(self, delta: ParsedDelta) -> bool:
        block = self._open
        if block is None or delta.kind in CALL_BLOCKS:
            return False
        return block.kind == BLOCK_KINDS[delta.kind] and block.call_index == delta.call_index

    def _open_block(self, delta: ParsedDelta) -> OutputBlock:
        name = delta.text if delta.kind in CALL_BLOCKS else ""
        block = OutputBlock(BLOCK_KINDS[delta.kind], len(self.all), delta.call_index, name)
        self.all.append(block)
        self._open = block
        return block


BLOCK_KINDS: dict[DeltaKind, BlockKind] = {
    "content": "content",
    "reasoning": "reasoning",
    "call": "call",
    "arguments": "call",
    "custom": "custom",
    "input": "custom",
}


@dataclass
class _AssistantTurn:
    """Output of the assistant in one turn; becomes one message."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    calls: list[JsonObject] = field(default_factory=list[JsonObject])
    phase: str | None = None


class ConversationBuilder:
    """Builds a chat from APIs that cut a conversation into smaller parts than messages.

    Reasoning, text and calls of one assistant's turn become one message, as chat templates want it.
    """

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: _AssistantTurn | None = None

    def add_message(self, role: Role, texts: Sequence[str], phase: str | None = None) -> None:
        """Adds a message of one or several texts. A system message behind another one is joined to
        it: most templates know one. `phase`: of the assistant's, for templates that ask.
        """
        if role == "assistant":
            turn = self._current_turn()
            if turn.content or turn.calls:
                self._end_turn()
            turn = self._current_turn()
            turn.content += texts or [""]
            turn.phase = phase
            return
        self._end_turn()
        role = "system" if role == "developer" else role
        last = self._messages[-1] if self._messages else None
        if role == "system" and last is not None and last.role == "system":
            self._messages[-1] = ChatMessage(role, "\n\n".join((_joined_text(last), *texts)))
        else:
            self._messages.append(ChatMessage(role, _content(texts)))

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning of the assistant, before what it says."""
        if self._turn is not None and (self._turn.content or self._turn.calls):
            self._end_turn()
        self._current_turn().reasoning.append(text)

    def add_tool_call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a call of the assistant; `arguments` are JSON."""
        function: JsonObject = {"name": name, "arguments": arguments}
        call: JsonObject = {"id": call_id, "type": "function", "function": function}
        self._current_turn().calls.append(call)

    def add_custom_call(self, call_id: str, name: str, text: str) -> None:
        """Adds a call of a custom tool."""
        custom: JsonObject = {"name": name, "input": text}
        self._current_turn().calls.append({"id": call_id, "type": "custom", "custom": custom})

    def add_tool_result(self, call_id: str, texts: Sequence[str]) -> None:
        """Adds the result of a call."""
        self._end_turn()
        self._messages.append(ChatMessage("tool", _content(texts), tool_call_id=call_id))

    def messages(self) -> list[ChatMessage]:
        """Ends the conversation; returns its messages."""
        self._end_turn()
        return self._messages

    def _current_turn(self) -> _AssistantTurn:
        if self._turn is None:
            self._turn = _AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        message = ChatMessage(
            "assistant",
            _content(turn.content) if turn.content or not turn.calls else None,
            tool_calls=turn.calls or None,
            reasoning_content="".join(turn.reasoning) or None,
            phase=turn.phase,
        )
        self._messages.append(message)


def _content(texts: Sequence[str]) -> str | list[ContentPart]:
    """The content of a message: a single text as it is; of several, the template decides how they
    are joined."""
    if len(texts) == 1:
        return texts[0]
    return [ContentPart("text", text) for text in texts] if texts else ""


def _joined_text(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n\n".join(part.text or "" for part in message.content)
    return message.content or ""
