"""The harmony format of gpt-oss: its output messages, the grammar of its calls, its prompts.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends with <|start|>assistant. A recipient may also stand before the channel. Knows no
request; compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Literal

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.tool_parsers.base import (
    MESSAGE_BREAK,
    WHITESPACE,
    ParsedDelta,
    ReasoningTokenCounter,
    find_marker,
)
from pipeinfer.gateway.tool_parsers.grammars import (
    GrammarRequest,
    UnsupportedSchema,
    constraint_schema,
    json_arguments,
    quoted,
    rule,
    slashed,
)
from pipeinfer.gateway.tool_parsers.partial_json import CallObjectParser, is_json
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs
from pipeinfer.text import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ASSISTANT = "assistant"
FUNCTIONS_NAMESPACE = "functions."
# Tools of the format itself, which are not run here: calls of them are part of the reasoning.
BUILT_IN_TOOLS = frozenset(("browser", "python", "container"))
BROADCAST_RECIPIENTS = frozenset(("user", "all"))  # recipients that are no function
# Words behind the channel that belong to the header, and are no text of a message.
HEADER_WORDS = frozenset(("t", "to", "json", "code", "text"))
MAX_UNMARKED_HEADER_CHARS = 300  # characters that may be a header without its first marker
_RECIPIENT = re.compile(r"to=([^\s{]*)")
_ONLY_RECIPIENT = re.compile(r"to=\S*\s*")
_WORD = re.compile(r"\s*(\w*)")
_ROLE = re.compile(r"\s*([^\s{]*)")

HeaderSection = Literal["role", "channel", "type"]
MessageKind = Literal["content", "reasoning", "call", "nothing"]


class MessageHeader:
    """The header of a message, by sections: the role, the text behind <|channel|>, the text behind
    <|constrain|>. `opened`: a marker has begun the header; text without a marker may be no header.
    """

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self._section: HeaderSection = "role"
        self._texts: dict[HeaderSection, list[str]] = {"role": [], "channel": [], "type": []}

    def add(self, text: str) -> None:
        self._texts[self._section].append(text)

    def start_section(self, section: HeaderSection) -> None:
        """A marker begins that section."""
        self.opened, self._section = True, section
        self._texts[section].append(" ")  # sets the text of a second such section apart

    def _section_text(self, section: HeaderSection) -> str:
        return "".join(self._texts[section])

    @property
    def unmarked_text(self) -> str:
        """Text that no marker has opened."""
        return "" if self.opened else self._section_text("role")

    @property
    def recipient(self) -> str:
        """The recipient of the message; empty if there is none."""
        for section in ("role", "channel", "type"):
            if found := _RECIPIENT.search(self._section_text(section)):
                return found[1]
        return ""

    @property
    def role(self) -> str:
        """The role; empty if the header has none."""
        found = _ROLE.match(_RECIPIENT.sub(" ", self._section_text("role")))
        return found[1] if found is not None else ""

    @property
    def channel(self) -> str:
        """The channel's name; models also write it directly behind the role."""
        found = _WORD.match(_RECIPIENT.sub(" ", self._section_text("channel")))
        return (found[1] if found is not None else "") or self.role.removeprefix(ASSISTANT)

    @property
    def leftover_text(self) -> str:
        """Text that is no part of a header: of a message whose <|message|> the model forgot."""
        parts = [_ROLE.sub("", _RECIPIENT.sub(" ", self._section_text("role")), count=1)]
        for section in ("channel", "type"):
            parts.append(_WORD.sub("", _RECIPIENT.sub(" ", self._section_text(section)), count=1))
        text = "".join(parts).strip(WHITESPACE)
        return "" if text in HEADER_WORDS or (self.recipient and text[:1] != "{") else text


class HarmonyParser:
    """Parses one choice's messages.

    - analysis: reasoning
    - commentary, final: content
    - a message to a function: a call; to a built-in tool: reasoning
    - text outside of messages: content, so nothing is lost of output that breaks the format

    Between two messages of one kind stands a line end, as a delta of its own.
    """

    def __init__(
        self,
        schemas: Mapping[str, JsonObject] | None,
        continues_message: bool = False,
        parse_reasoning: bool = True,
        include_reasoning: bool = True,
        counter: ReasoningTokenCounter | None = None,
    ) -> None:
        """Arguments:
        - schemas: of the functions' parameters, by name; None: calls are not looked for
        - continues_message: the prompt ends within a final message
        - parse_reasoning: analysis is reasoning, else content
        - include_reasoning: reasoning is returned, else dropped
        - counter: gets the places of reasoning in the output text
        """
        self._counter = counter or ReasoningTokenCounter()
        self._counter.parsed_chars = 0
        self._total_chars = 0  # of all text so far
        # Place in the whole text of the marker that is being handled, or of the end.
        self._marker_position = 0
        self._schemas = schemas
        self._parse_reasoning = parse_reasoning
        self._include_reasoning = include_reasoning
        self._buffer = ""  # text that may become a marker
        self._header: MessageHeader | None = None if continues_message else MessageHeader()
        self._kind: MessageKind = "content"  # of the current message, behind its header
        self._message_started = continues_message  # some of the message's text was returned
        self._emitted_kinds = {"content": continues_message, "reasoning": False}
        self._call_count = 0
        self._arguments_parser = HarmonyArgumentsParser(0, "")

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        self._total_chars += len(text)
        deltas: list[ParsedDelta] = []
        while self._buffer:
            found = find_marker(self._buffer, MARKERS)
            if found.before:
                self._handle_text(found.before, deltas)
            self._buffer = found.tail
            if found.marker is None:
                break
            self._marker_position = self._total_chars - len(self._buffer) - len(found.marker)
            self._handle_marker(found.marker, deltas)
        if self._header is None:  # a header's text may turn out to be a message
            self._counter.parsed_chars = self._total_chars - len(self._buffer)
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        if self._buffer:
            self._handle_text(self._buffer, deltas)
        self._buffer = ""
        self._marker_position = self._total_chars
        self._end_message(deltas)
        self._counter.parsed_chars = inf
        return deltas

    def _handle_text(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Handles text between markers."""
        if self._header is None:
            self._emit(text, deltas)
            return
        self._header.add(text)
        bare = self._header.unmarked_text
        if not _may_be_header(bare):
            self._headerless_message(bare, deltas)

    def _headerless_message(self, text: str, deltas: list[ParsedDelta]) -> None:
        """A message without a header."""
        self._start_message("content", "", deltas)
        self._emit(text, deltas)

    def _handle_marker(self, marker: str, deltas: list[ParsedDelta]) -> None:
        header = self._header
        if marker in (START, END, RETURN, CALL) or (marker == CHANNEL and header is None):
            self._end_message(deltas)
            if marker == START:
                self._header = MessageHeader(opened=True)
                return
            header = self._header
        if header is None:
            return  # a second <|message|> or a late <|constrain|> is dropped
        if marker == CHANNEL:
            header.start_section("channel")
        elif marker == CONSTRAIN:
            header.start_section("type")
        elif marker == MESSAGE:
            self._start_message(
                self._message_kind(header), _function_name(header.recipient), deltas
            )
            self._open_reasoning_span(self._marker_position + len(MESSAGE))

    def _open_reasoning_span(self, at: int) -> None:
        """The message's text begins at that character."""
        if self._kind == "reasoning":
            self._counter.open_span(at)

    def _message_kind(self, header: MessageHeader) -> MessageKind:
        to, is_analysis = header.recipient, header.channel == "analysis"
        from_assistant = not header.role or header.role.startswith(ASSISTANT)
        if not from_assistant or to == ASSISTANT:
            return "nothing"  # a turn of another role, which the model invents
        name = _function_name(to)
        known = self._schemas is not None and name in self._schemas
        if to.partition(".")[0] in BUILT_IN_TOOLS and not known:
            is_analysis = True
        elif (
            self._schemas is not None
            and to not in BROADCAST_RECIPIENTS
            and name
            and name.isprintable()
        ):
            return "call"
        return "reasoning" if is_analysis and self._parse_reasoning else "content"

    def _start_message(self, kind: MessageKind, name: str, deltas: list[ParsedDelta]) -> None:
        """The header is complete, the message's text follows."""
        self._header, self._kind, self._message_started = None, kind, False
        if kind == "call":
            self._arguments_parser = HarmonyArgumentsParser(self._call_count, name)
            self._call_count += 1
            deltas += self._arguments_parser.start()

    def _emit(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Text of the message."""
        kind = self._kind
        if kind == "call":
            deltas += self._arguments_parser.feed(text)
        elif kind == "reasoning" and not self._include_reasoning:
            return
        elif kind != "nothing" and text:
            if not self._message_started and self._emitted_kinds[kind]:
                deltas.append(ParsedDelta(kind, "\n", MESSAGE_BREAK))
            self._message_started = self._emitted_kinds[kind] = True
            deltas.append(ParsedDelta(kind, text))

    def _end_message(self, deltas: list[ParsedDelta]) -> None:
        """The message ends, or its header."""
        header, self._header = self._header, MessageHeader()
        if header is None:
            self._counter.close_span(self._marker_position)
            if self._kind == "call":
                deltas += self._arguments_parser.finish()
        elif header.unmarked_text.strip(WHITESPACE):
            self._headerless_message(header.unmarked_text, deltas)
            self._header = MessageHeader()
        elif leftover := header.leftover_text:
            self._start_message(
                self._message_kind(header), _function_name(header.recipient), deltas
            )
            self._open_reasoning_span(self._marker_position - len(leftover))
            self._emit(leftover, deltas)
            self._end_message(deltas)


class HarmonyArgumentsParser:
    """The arguments, as JSON, of call number `call` to the function `name`."""

    def __init__(self, call: int, name: str) -> None:
        self._call_parser = CallObjectParser(call)
        self._name = name
        self._buffered: list[str] = []  # arguments that are no object
        self._streaming = False

    def start(self) -> Sequence[ParsedDelta]:
        """The delta with the function's name."""
        name = msgspec.json.encode(self._name).decode()
        return self._call_parser.feed(f'{{"name": {name}, "arguments": ')[0]

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        """An object is returned as it arrives; anything else when its end is known."""
        if not self._streaming and not self._buffered:
            text = text.lstrip(WHITESPACE)
            self._streaming = text[:1] == "{"
        if self._streaming:
            return self._call_parser.feed(text)[0]
        if text:
            self._buffered.append(text)
        return ()

    def finish(self) -> Sequence[ParsedDelta]:
        """The message has ended."""
        if self._streaming:
            return ()
        text = "".join(self._buffered).strip(WHITESPACE) or "{}"
        if not is_json(text):
            text = msgspec.json.encode(text).decode()
        return self._call_parser.feed(text + "}")[0]


def _function_name(recipient: str) -> str:
    """The function's name; models may leave the namespace out."""
    return recipient.removeprefix(FUNCTIONS_NAMESPACE)


def _may_be_header(text: str) -> bool:
    """Whether text that no marker has opened may be the begin of a header."""
    bare = text.lstrip()
    after_role = bare.removeprefix(ASSISTANT).lstrip()
    begun = ASSISTANT.startswith(bare) or "to=".startswith(after_role)
    return len(text) <= MAX_UNMARKED_HEADER_CHARS and (
        begun or _ONLY_RECIPIENT.fullmatch(after_role) is not None
    )


GRAMMAR_MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN)
# `opening`: usually a part of the prompt; if the template has none, the model writes it.
# `json`: the part of a header that announces JSON.
_RULES = """
opening: ({start} "assistant")?
next: {end} {start} "assistant"
said: thought | preamble
thought: {channel} "analysis" {message} text
preamble: {channel} "commentary" {message} text
final: {channel} "final" json? {message}
json: " json" | " "? {constrain} "json"
text: /(?s:.*)/
""".strip()


def harmony_grammar(request: GrammarRequest) -> str:
    """The grammar of calls in this format. Raises UnsupportedSchema.

    One call behind any reasoning, or in its place a final message that fits `content_constraint`.
    Where content is allowed: any messages, whose calls are those of the request.
    """
    calls = _calls(request)
    if request.allow_content:
        message = "(said | final text | call)"
        return _grammar(request, f"({message} next)* {message}", calls)
    if request.content_constraint is None:
        return _grammar(request, "(said next)* call", calls)
    messages = "(thought next)* (final form | (preamble next (said next)*)? call)"
    return _grammar(request, messages, [*calls, _constraint_rule(request.content_constraint)])


def final_message_grammar(request: GrammarRequest, form: StructuredOutputs) -> StructuredOutputs:
    """The constraint of the final message; no calls are allowed. Raises UnsupportedSchema."""
    return StructuredOutputs(
        grammar=_grammar(request, "(thought next)* final form", [_constraint_rule(form)])
    )


def _grammar(request: GrammarRequest, messages: str, rules: list[str]) -> str:
    names = ("start", "end", "message", "channel", "constrain")
    tags = dict(zip(names, map(request.tag, GRAMMAR_MARKERS), strict=True))
    for marker in GRAMMAR_MARKERS:
        if not request.has_special_token(marker):
            raise UnsupportedSchema(
                f"this model has no token {marker}, which sets its messages apart"
            )
    common_rules = _RULES.format(**tags)
    return "\n".join((f"start: opening {messages}", common_rules, *rules))


def _calls(request: GrammarRequest) -> list[str]:
    """A call of each function. The recipient stands before or behind the channel."""
    channel, message = request.tag(CHANNEL), request.tag(MESSAGE)
    rules: list[str] = []
    for i, name in enumerate(request.schemas):
        rules.append(f"to{i}: {quoted(f' to=functions.{name}')}")
        head = f'({channel} "commentary" to{i} | to{i} {channel} "commentary") json? {message}'
        rules.append(f"call{i}: {head} {json_arguments(request, name)}")
    return [rule("call", [f"call{i}" for i in range(len(request.schemas))]), *rules]


def _constraint_rule(form: StructuredOutputs) -> str:
    if form.json is not None:
        return f"form: %json {constraint_schema(form.json)}"
    if form.choice is not None:
        return rule("form", map(quoted, form.choice))
    if form.regex is not None:
        return f"form: /{slashed(form.regex)}/"
    raise UnsupportedSchema("a grammar cannot stand within the messages of this model")


EFFORTS = ("low", "medium", "high")


def harmony_messages(chat: Sequence[JsonObject]) -> list[JsonObject]:
    """The conversation in messages that the template shows completely; system messages first. The
    template shows one system message, one call in each message, and either reasoning or content
    beside the call; it leaves out or refuses everything else."""
    return list(_template_messages(chat))


def check_reasoning_effort(arguments: JsonObject) -> None:
    """ApiError 400 for a reasoning_effort that the model was not trained on; the template would
    show any.
    """
    effort = arguments.get("reasoning_effort")
    if "reasoning_effort" in arguments and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        message = (
            f"reasoning_effort must be one of {known} for this model, not {str(effort)[:64]!r}"
        )
        raise ApiError(400, message, "reasoning_effort", "invalid_value")


def with_descriptions(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tools as the template needs them: each with a description, if an empty one."""
    return [_with_description(tool) for tool in tools]


def _with_description(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _template_messages(chat: Sequence[JsonObject]) -> Iterator[JsonObject]:
    system = [message for message in chat if message.get("role") == "system"]
    if system:
        texts = [_text(message.get("content")) for message in system]
        yield {**system[0], "content": "\n\n".join(text for text in texts if text)}
    chat, at = [message for message in chat if message.get("role") != "system"], 0
    while at < len(chat):
        message, at = chat[at], at + 1
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
            # The template takes an empty list for calls.
            yield {key: value for key, value in message.items() if value or key != "tool_calls"}
            continue
        after = at
        while at < len(chat) and chat[at].get("role") == "tool":
            at += 1
        yield from _one_call_each(message, calls, chat[after:at])


def _one_call_each(
    message: JsonObject, calls: list[JsonValue], results: Sequence[JsonObject]
) -> Iterator[JsonObject]:
    """Each call followed by its result. The template names a result after the call before it."""
    remaining = list(results)
    message = _content_as_reasoning(message)
    for i, call in enumerate(calls):
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": ""}  # reasoning is shown with the first call
        name = call.get("id") if isinstance(call, dict) else None
        of_call = (
            remaining
            if i + 1 == len(calls)
            else [r for r in remaining if r.get("tool_call_id") == name]
        )
        remaining = [result for result in remaining if result not in of_call]
        yield from of_call


def _content_as_reasoning(message: JsonObject) -> JsonObject:
    """Content beside a call moved to the end of the reasoning: the template shows only one of
    them.
    """
    content = _text(message.get("content"))
    reasoning = _text(message.get("reasoning_content"))
    if not reasoning or not content:
        return {**message, "content": content}
    return {**message, "reasoning_content": f"{reasoning}\n{content}", "content": ""}


def _text(content: JsonValue) -> str:
    """Parts joined to one text, as chats join them; empty without content."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
