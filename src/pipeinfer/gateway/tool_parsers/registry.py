"""The tool and reasoning parsers, by name and by what a model's chat template shows.

Parsers are made for one choice of an answer each. Knows names and templates, no request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict, Unpack

import msgspec

from pipeinfer.command_line import none_of
from pipeinfer.gateway.tool_parsers.base import (
    AnswerTagParser,
    CallIdStyle,
    ChoiceParser,
    OutputParser,
    ParsedDelta,
    ParserFactory,
    PlainTextParser,
    ReasoningParser,
    ReasoningTokenCounter,
)
from pipeinfer.gateway.tool_parsers.grammars import CallGrammar
from pipeinfer.gateway.tool_parsers.harmony import HarmonyParser, harmony_grammar
from pipeinfer.gateway.tool_parsers.json_calls import (
    DEEPSEEK_SEPARATOR,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GIGACHAT3,
    GRANITE,
    HERMES,
    HUNYUAN,
    JSON_LIST,
    KIMI_ARGUMENT_BEGIN,
    KIMI_K2,
    MISTRAL,
    PHI4_MINI,
    XLAM,
    JsonCallMarkers,
    JsonCallParser,
    Llama3Parser,
    bare_list_grammar,
    hermes_grammar,
    llama3_grammar,
    marked_list_grammar,
    marked_object_grammar,
    mistral_grammar,
    section_grammar,
)
from pipeinfer.gateway.tool_parsers.partial_json import CustomToolParser
from pipeinfer.gateway.tool_parsers.pythonic import (
    LFM2,
    OLMO3,
    PYTHONIC,
    PythonicFormat,
    PythonicParser,
    pythonic_grammar,
)
from pipeinfer.gateway.tool_parsers.xml_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    XmlCallParser,
    XmlTags,
    xml_grammar,
)
from pipeinfer.params import JsonObject, ReasoningState
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import (
    CHANNEL,
    MESSAGE,
    REASONING_PARSERS,
    START,
    AddedId,
    ReasoningTags,
    parser_of,
    reasoning_state,
)

Schemas = Mapping[str, JsonObject]  # of the tools' parameters, by name


@dataclass(frozen=True)
class ToolParser:
    """A format of tool calls: how it is parsed and how it is enforced.

    Attributes:
    - make_parser: from the tools' schemas by name to the parser of one choice
    - grammar: of exactly the calls that the parser parses
    - template_patterns: regular expressions; a chat template that matches all of them uses the
      format
    - excluding_patterns: regular expressions that such a template does not match
    - markers: texts that may be special tokens; if they are, special tokens must not be skipped
    - special: the models' tokenizers have the markers as special tokens
    - call_ids: style of call ids that the models' templates want
    """

    make_parser: Callable[[Schemas], OutputParser]
    grammar: CallGrammar
    template_patterns: tuple[str, ...] = ()
    excluding_patterns: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    special: bool = False
    call_ids: CallIdStyle = ""

    def matches_template(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        found = (re.search(pattern, template) is not None for pattern in self.template_patterns)
        return (
            bool(self.template_patterns)
            and all(found)
            and not any(re.search(pattern, template) for pattern in self.excluding_patterns)
        )


class _ToolParserOptions(TypedDict, total=False):
    excluding_patterns: tuple[str, ...]
    special: bool
    call_ids: CallIdStyle


def _marked(
    markers: JsonCallMarkers,
    grammar: CallGrammar,
    *template_patterns: str,
    **options: Unpack[_ToolParserOptions],
) -> ToolParser:
    """A parser of JSON calls behind markers."""
    return ToolParser(
        lambda _: JsonCallParser(markers),
        grammar,
        template_patterns,
        markers=markers.markers,
        **options,
    )


def _elements(
    tags: XmlTags, *template_patterns: str, **options: Unpack[_ToolParserOptions]
) -> ToolParser:
    """A parser of calls as XML-like elements."""
    factory, grammar = partial(XmlCallParser, tags), xml_grammar(tags)
    return ToolParser(factory, grammar, template_patterns, markers=tags.markers, **options)


def _pythonic(
    style: PythonicFormat, *template_patterns: str, **options: Unpack[_ToolParserOptions]
) -> ToolParser:
    """A parser of calls as Python writes them."""
    factory = partial(PythonicParser, style)
    return ToolParser(
        factory, pythonic_grammar(style), template_patterns, markers=style.markers, **options
    )


# Text between a tag and JSON in a template: line ends and the template's syntax.
_SYNTAX = r"(?:\\n|[^<>\w])*"
_OBJECT = rf"<tool_call>(?:{_SYNTAX}\{{\\?[\"'](?:name|arguments)\b|[^<>]{{0,80}}\|\s*tojson)"
_LINE = r"</arg_key>(?:\\n|\n)"

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": _marked(
        HERMES, hermes_grammar, _OBJECT,
        excluding_patterns=("<function=", "<arg_key>", "<invoke"),
    ),
    "llama3_json": ToolParser(
        Llama3Parser,
        llama3_grammar,
        (r'\{"name": [^{}"]*, "parameters": ',),
        ("<function=", "<tool_call>"),
        ("<|python_tag|>",),
        special=True,
    ),
    "mistral": _marked(MISTRAL, mistral_grammar, r"\[TOOL_CALLS\]", special=True, call_ids="short"),
    "qwen3_coder": _elements(QWEN3_CODER, "<tool_call>", "<function=", "<parameter="),
    "glm45": _elements(GLM45, "<tool_call>", "<arg_key>", "<arg_value>", _LINE),
    "glm47": _elements(
        GLM47, "<tool_call>", "<arg_key>", "<arg_value>", excluding_patterns=(_LINE,)
    ),
    "deepseek_v3": _marked(
        DEEPSEEK_V3,
        section_grammar(
            DEEPSEEK_V3, "function", DEEPSEEK_SEPARATOR, "{}\n```json\n", foot="\n```", between="\n"
        ),
        DEEPSEEK_SEPARATOR,
        "```json",
        special=True,
    ),
    "deepseek_v31": _marked(
        DEEPSEEK_V31,
        section_grammar(DEEPSEEK_V31, "{}", DEEPSEEK_SEPARATOR),
        DEEPSEEK_SEPARATOR,
        excluding_patterns=("```json",),
        special=True,
    ),
    "deepseek_v32": _elements(DEEPSEEK_V32, "｜DSML｜", "function_calls>", special=True),
    "deepseek_v4": _elements(
        DEEPSEEK_V4, "｜DSML｜", "tool_calls>",
        excluding_patterns=("function_calls>",), special=True,
    ),
    "kimi_k2": _marked(
        KIMI_K2,
        section_grammar(KIMI_K2, "functions.{}:0", KIMI_ARGUMENT_BEGIN),
        re.escape(KIMI_K2.opening),
        re.escape(KIMI_ARGUMENT_BEGIN),
        special=True,
        call_ids="numbered",
    ),
    "seed_oss": _elements(SEED_OSS, "<seed:tool_call>", "<function=", "<parameter=", special=True),
    "minimax_m2": _elements(MINIMAX_M2, "<minimax:tool_call>", '<invoke name="', "<parameter name"),
    "granite": _marked(
        GRANITE, marked_list_grammar(GRANITE), re.escape(GRANITE.opening), special=True
    ),
    "hunyuan_a13b": _marked(HUNYUAN, marked_list_grammar(HUNYUAN), r"<tool_calls>\["),
    "phi4_mini_json": _marked(PHI4_MINI, marked_list_grammar(PHI4_MINI), r"functools\["),
    "xlam": ToolParser(
        lambda _: JsonCallParser(XLAM, opened=True),
        partial(bare_list_grammar, key="arguments"),
        ('"name": "tool_call_name", "arguments"',),
    ),
    "gigachat3": _marked(
        GIGACHAT3, marked_object_grammar(GIGACHAT3), re.escape(GIGACHAT3.opening), special=True
    ),
    "pythonic": _pythonic(PYTHONIC, r"func_name1\(param"),
    "lfm2": _pythonic(
        LFM2, r"<\|tool_(?:call|list)_start\|>|List of tools: \[", special=True
    ),
    "olmo3": _pythonic(OLMO3, "<function_calls>", excluding_patterns=("｜DSML｜",)),
    "openai": ToolParser(
        HarmonyParser, harmony_grammar, tuple(map(re.escape, (START, CHANNEL, MESSAGE))),
        special=True,
    ),
}  # fmt: skip
# For models without a format of their own, which follow a grammar.
ANY_MODEL = ToolParser(lambda _: JsonCallParser(JSON_LIST, opened=True), bare_list_grammar)
# {format that no parser parses: regular expression of chat templates that use it}; most names are
# vLLM's.
UNSUPPORTED_FORMS = {
    "functiongemma": "<start_function_call>",
    "gemma4": r"<\|tool_call>call:",
    "cohere_command": r"<\|START_ACTION\|>",
    "internlm": r"<\|action_start\|>",
    "apertus": r"<\|tools_prefix\|>",
    "granite-20b-fc": "<function_call>",
    "minicpm5": "<function name=",
    "minimax_m1": "<tool_calls></tool_calls>",
    "minimax_m3": r"\]<\]minimax\[>\[",
    "nemotron": "<TOOLCALL>",
    "kimi_k3": r"<\|end_of_msg\|>",
    "gigachat3_0": r"<\|role_sep\|>",  # of version 3.0, in messages of their own
    "functionary": r"start_tag => `<function`|>>>\$\{recipient\}",
    "muse_glimmer": "<atem:function_calls>",
    "hy_v3": r"<tool_call\{\}>",
    "solar_open": r"<\|tool_call:begin\|>",
    "command_r_plus": r"Write \\?'Action:\\?'",
}
# The harmony parser's names as tool parser and as reasoning parser, as in vLLM.
HARMONY = ("openai", "openai_gptoss")


class ParserOptions(msgspec.Struct, frozen=True):
    """Properties of a request on which its output parsers depend: see OutputParsers.parser_factory.

    Attributes:
    - continues_message: see OutputParsers
    """

    schemas: dict[str, JsonObject] | None = None
    first_call_only: bool = False
    include_reasoning: bool = True
    strip_answer: bool = False
    custom_tools: tuple[str, ...] = ()
    continues_message: bool = False


@dataclass(frozen=True)
class OutputParsers:
    """Which parsers the output of the served model needs.

    Attributes:
    - tool_parser_name, reasoning_parser_name: names, or empty for none
    - template_has_tools: the chat template shows tools to the model
    - added_tokens: tokens by their text
    - continues_message: the prompt ends within the answer's last message
    - tools_disabled: --tool-parser is none
    - unsupported_form: a format that the template uses and no parser parses
    """

    tool_parser_name: str = ""
    reasoning_parser_name: str = ""
    template_has_tools: bool = False
    added_tokens: Mapping[str, AddedId] = field(default_factory=dict[str, AddedId])
    continues_message: bool = False
    tools_disabled: bool = False
    unsupported_form: str = ""

    @property
    def harmony(self) -> bool:
        """Whether output has the harmony format, which one parser parses."""
        return self.tool_parser_name == HARMONY[0] or self.reasoning_parser_name == HARMONY[1]

    @property
    def calls_need_special_tokens(self) -> bool:
        """Whether calls are recognised by special tokens."""
        if not self.tool_parser_name:
            return False
        parser = TOOL_PARSERS[self.tool_parser_name]
        known = (self.added_tokens.get(marker) for marker in parser.markers)
        return parser.special or any(token is not None and token.special for token in known)

    @property
    def why_no_tool_calls(self) -> str:
        """Why the model calls no tools by itself; empty if it does."""
        if not self.template_has_tools:
            return "its chat template has no tools"
        if self.tools_disabled:
            return "--tool-parser is none"
        return "" if self.tool_parser_name else self._unknown_form

    @property
    def _unknown_form(self) -> str:
        named = f"{self.unsupported_form}, a form" if self.unsupported_form else "a form"
        parsers = ", ".join(TOOL_PARSERS)
        return f"its chat template writes calls in {named} that no --tool-parser knows: {parsers}"

    @property
    def tool_parser(self) -> ToolParser:
        """The parser of calls that a grammar enforces."""
        if self.harmony:
            return TOOL_PARSERS[HARMONY[0]]
        return TOOL_PARSERS[self.tool_parser_name] if self.tool_parser_name else ANY_MODEL

    def continuing_message(self) -> OutputParsers:
        """A copy for an answer that continues the last message."""
        return replace(self, continues_message=True)

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        """The tags around reasoning."""
        return REASONING_PARSERS.get(self.reasoning_parser_name)

    @property
    def _reasoning_markers(self) -> tuple[str, ...]:
        return (
            ()
            if self.reasoning_tags is None
            else (*self.reasoning_tags.pair, *self.reasoning_tags.answer)
        )

    @property
    def reasoning_needs_special_tokens(self) -> bool:
        """Whether reasoning is recognised by special tokens."""
        tokens = [
            self.added_tokens[tag] for tag in self._reasoning_markers if tag in self.added_tokens
        ]
        return any(token.special for token in tokens)

    def reasoning_state(self, answer: str) -> ReasoningState:
        """The state of reasoning behind `answer`, the begin of an answer."""
        return (
            "over" if self.reasoning_tags is None else reasoning_state(answer, self.reasoning_tags)
        )

    def factory_for(self, options: ParserOptions | None) -> ParserFactory | None:
        """parser_factory, of a request with these options; None: its output is not parsed."""
        if options is None:
            return None
        parsers = self.continuing_message() if options.continues_message else self
        return parsers.parser_factory(
            options.schemas,
            options.first_call_only,
            options.include_reasoning,
            options.strip_answer,
            options.custom_tools,
        )

    def parser_factory(
        self,
        schemas: Schemas | None,
        first_call_only: bool = False,
        include_reasoning: bool = True,
        strip_answer: bool = False,
        custom_tools: Collection[str] = (),
    ) -> ParserFactory | None:
        """Makes the parser of each choice; None where all output is content.

        Arguments:
        - schemas: of the tools' parameters, by name; None: calls are not looked for
        - first_call_only: further calls are dropped
        - include_reasoning: reasoning is returned, else dropped
        - strip_answer: white space before the answer is dropped
        - custom_tools: names of tools that take a text
        """
        factory = self._make_factory(schemas, first_call_only, include_reasoning, strip_answer)
        if factory is None or not custom_tools:
            return factory

        def with_custom_tools(state: ReasoningState) -> ChoiceParser:
            parser = factory(state)
            return BoundedFeedParser(CustomToolParser(parser, custom_tools), parser.reasoning)

        return with_custom_tools

    def _make_factory(
        self,
        schemas: Schemas | None,
        first_call_only: bool,
        include_reasoning: bool,
        strip_answer: bool,
    ) -> ParserFactory | None:
        if self.harmony:
            return self._harmony_factory(schemas, first_call_only, include_reasoning)
        calls = self.tool_parser.make_parser if schemas is not None else None
        tags = self.reasoning_tags
        if calls is None and tags is None:
            return None

        def make(state: ReasoningState = "before") -> ChoiceParser:
            parser: OutputParser = PlainTextParser() if calls is None else calls(schemas or {})
            if first_call_only:
                parser = FirstCallParser(parser)
            if tags is not None and tags.answer[0]:
                parser = AnswerTagParser(parser, *tags.answer)
            if tags is None or state == "over":
                return BoundedFeedParser(parser)
            counter = ReasoningTokenCounter()
            opened = state == "open"
            return BoundedFeedParser(
                ReasoningParser(parser, tags, opened, include_reasoning, strip_answer, counter),
                counter,
            )

        return make

    def _harmony_factory(
        self, schemas: Schemas | None, first_call_only: bool, include_reasoning: bool
    ) -> ParserFactory:
        def make(_state: ReasoningState = "before") -> ChoiceParser:
            counter = ReasoningTokenCounter()
            parser = HarmonyParser(
                schemas,
                self.continues_message,
                bool(self.reasoning_parser_name),
                include_reasoning,
                counter,
            )
            return BoundedFeedParser(
                FirstCallParser(parser) if first_call_only else parser, counter
            )

        return make


NO_PARSERS = OutputParsers()
MAX_FEED_CHARS = 1024  # characters that a parser gets at a time


class BoundedFeedParser:
    """Feeds long texts to a parser in parts. Parsers copy the text behind a marker, so a long text
    of many markers, which comes after a stall, would cost the square of its length.
    """

    def __init__(
        self, parser: OutputParser, reasoning: ReasoningTokenCounter | None = None
    ) -> None:
        """`reasoning`: the counter that `parser` fills; None if it parses no reasoning."""
        self._parser = parser
        self.reasoning = reasoning or ReasoningTokenCounter()

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        if len(text) <= MAX_FEED_CHARS:
            deltas = self._parser.feed(text)
        else:
            parts = (text[at : at + MAX_FEED_CHARS] for at in range(0, len(text), MAX_FEED_CHARS))
            deltas = [delta for part in parts for delta in self._parser.feed(part)]
        self.reasoning.update_count()
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas = self._parser.finish()
        self.reasoning.update_count()
        return deltas


class FirstCallParser:
    """Drops all calls but the first."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        return [delta for delta in self._parser.feed(text) if delta.call_index <= 0]

    def finish(self) -> Sequence[ParsedDelta]:
        return [delta for delta in self._parser.finish() if delta.call_index <= 0]


def choose_parsers(
    tool_parser: str,
    reasoning_parser: str,
    template: str,
    added: Mapping[str, AddedId] | None = None,
) -> OutputParsers:
    """The parsers for settings that name one, "auto" or "none", and a chat template's text. Raises
    ConfigurationError for an unknown name.
    """
    tools = _resolve("tool-parser", tool_parser, TOOL_PARSERS, _tool_parser_of(template))
    known = (*REASONING_PARSERS, HARMONY[1])
    channels = TOOL_PARSERS[HARMONY[0]].matches_template(template)
    of_template = HARMONY[1] if channels else parser_of(template)
    reasoning = _resolve("reasoning-parser", reasoning_parser, known, of_template)
    if tools == HARMONY[0] and reasoning_parser == "auto":
        reasoning = HARMONY[1]
    if reasoning == HARMONY[1] and tool_parser == "auto":
        tools = HARMONY[0]
    unsupported = (
        name
        for name, marker in UNSUPPORTED_FORMS.items()
        if not tools and re.search(marker, template)
    )
    return OutputParsers(
        tools, reasoning, "tools" in template, added or {}, tools_disabled=tool_parser == "none",
        unsupported_form=next(unsupported, ""),
    )  # fmt: skip


def _resolve(flag: str, name: str, known: Collection[str], detected: str) -> str:
    """The parser that a flag names; `detected`: by the chat template."""
    if name == "auto":
        return detected
    if name == "none":
        return ""
    if name not in known:
        raise ConfigurationError(f"--{flag}: {none_of(name, ('auto', 'none', *known))}")
    return name


def _tool_parser_of(template: str) -> str:
    return next((name for name, one in TOOL_PARSERS.items() if one.matches_template(template)), "")
