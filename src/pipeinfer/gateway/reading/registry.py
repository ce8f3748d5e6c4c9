"""Which readers a model's answers need: by name, or as its chat template shows.

Readers are made for one choice of an answer each. Knows names and templates' texts, no request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict, Unpack

from pipeinfer.close_names import none_of
from pipeinfer.gateway.pieces import AnswerReader, CallIds, MakeReader, Piece, Plain, Reader
from pipeinfer.gateway.reading.call_grammars import (
    CallGrammar,
    hermes,
    in_elements,
    in_lists,
    in_objects,
    in_python,
    in_section,
    json_list,
    llama3,
    mistral,
)
from pipeinfer.gateway.reading.custom_inputs import CustomInputs
from pipeinfer.gateway.reading.elements import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    Elements,
    ElementTags,
)
from pipeinfer.gateway.reading.enclosed import Enclosed
from pipeinfer.gateway.reading.harmony import Harmony
from pipeinfer.gateway.reading.harmony_grammar import harmony
from pipeinfer.gateway.reading.llama3 import Llama3
from pipeinfer.gateway.reading.marked import (
    ARGUMENT_BEGIN,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GIGACHAT3,
    GRANITE,
    HERMES,
    HUNYUAN,
    JSON_LIST,
    KIMI_K2,
    MISTRAL,
    PHI4_MINI,
    SEPARATOR,
    XLAM,
    Marked,
    Marks,
)
from pipeinfer.gateway.reading.pythonic import LFM2, OLMO3, PYTHONIC, CallList, Pythonic
from pipeinfer.gateway.reading.thinking import Thinking
from pipeinfer.gateway.reasoning_tokens import ReasoningTokens
from pipeinfer.json_values import JsonObject
from pipeinfer.params import ThoughtState
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.files import AddedId
from pipeinfer.text.thoughts import (
    CHANNEL,
    MESSAGE,
    REASONING_PARSERS,
    START,
    ThoughtTags,
    parser_of,
    thought_state,
)

Schemas = Mapping[str, JsonObject]  # of the tools' parameters, by name


@dataclass(frozen=True)
class ToolParser:
    """How one form of calls is read and written.

    `grammar`: of what `make`'s reader reads. `shown`: what a chat template has that shows this
    form, all of them; `never`: what it has only where it shows another one. Regular expressions.
    `markers`: texts that may be special tokens, whose texts are left out else. `special`: they are
    such in the tokenizers of these models. `ids`: of calls, as their templates want them."""

    make: Callable[[Schemas], Reader]
    grammar: CallGrammar
    shown: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    special: bool = False
    ids: CallIds = ""

    def told_by(self, template: str) -> bool:
        """Whether a chat template shows this form."""
        found = (re.search(mark, template) is not None for mark in self.shown)
        return (
            bool(self.shown)
            and all(found)
            and not any(re.search(mark, template) for mark in self.never)
        )


class _More(TypedDict, total=False):
    never: tuple[str, ...]
    special: bool
    ids: CallIds


def _marked(marks: Marks, grammar: CallGrammar, *shown: str, **more: Unpack[_More]) -> ToolParser:
    """Of calls that are JSON behind markers."""
    return ToolParser(lambda _: Marked(marks), grammar, shown, markers=marks.markers, **more)


def _elements(tags: ElementTags, *shown: str, **more: Unpack[_More]) -> ToolParser:
    """Of calls that are elements."""
    made, grammar = partial(Elements, tags), in_elements(tags)
    return ToolParser(made, grammar, shown, markers=tags.markers, **more)


def _pythonic(style: CallList, *shown: str, **more: Unpack[_More]) -> ToolParser:
    """Of calls as Python writes them."""
    made = partial(Pythonic, style)
    return ToolParser(made, in_python(style), shown, markers=style.markers, **more)


# What may stand between a tag and JSON where a template says both: line ends and its own syntax.
_SYNTAX = r"(?:\\n|[^<>\w])*"
_OBJECT = rf"<tool_call>(?:{_SYNTAX}\{{\\?[\"'](?:name|arguments)\b|[^<>]{{0,80}}\|\s*tojson)"
_LINE = r"</arg_key>(?:\\n|\n)"

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": _marked(HERMES, hermes, _OBJECT, never=("<function=", "<arg_key>", "<invoke")),
    "llama3_json": ToolParser(
        Llama3,
        llama3,
        (r'\{"name": [^{}"]*, "parameters": ',),
        ("<function=", "<tool_call>"),
        ("<|python_tag|>",),
        special=True,
    ),
    "mistral": _marked(MISTRAL, mistral, r"\[TOOL_CALLS\]", special=True, ids="short"),
    "qwen3_coder": _elements(QWEN3_CODER, "<tool_call>", "<function=", "<parameter="),
    "glm45": _elements(GLM45, "<tool_call>", "<arg_key>", "<arg_value>", _LINE),
    "glm47": _elements(GLM47, "<tool_call>", "<arg_key>", "<arg_value>", never=(_LINE,)),
    "deepseek_v3": _marked(
        DEEPSEEK_V3,
        in_section(
            DEEPSEEK_V3, "function", SEPARATOR, "{}\n```json\n", foot="\n```", between="\n"
        ),
        SEPARATOR,
        "```json",
        special=True,
    ),
    "deepseek_v31": _marked(
        DEEPSEEK_V31,
        in_section(DEEPSEEK_V31, "{}", SEPARATOR),
        SEPARATOR,
        never=("```json",),
        special=True,
    ),
    "deepseek_v32": _elements(DEEPSEEK_V32, "｜DSML｜", "function_calls>", special=True),
    "deepseek_v4": _elements(
        DEEPSEEK_V4, "｜DSML｜", "tool_calls>", never=("function_calls>",), special=True
    ),
    "kimi_k2": _marked(
        KIMI_K2,
        in_section(KIMI_K2, "functions.{}:0", ARGUMENT_BEGIN),
        re.escape(KIMI_K2.opening),
        re.escape(ARGUMENT_BEGIN),
        special=True,
        ids="numbered",
    ),
    "seed_oss": _elements(SEED_OSS, "<seed:tool_call>", "<function=", "<parameter=", special=True),
    "minimax_m2": _elements(MINIMAX_M2, "<minimax:tool_call>", '<invoke name="', "<parameter name"),
    "granite": _marked(GRANITE, in_lists(GRANITE), re.escape(GRANITE.opening), special=True),
    "hunyuan_a13b": _marked(HUNYUAN, in_lists(HUNYUAN), r"<tool_calls>\["),
    "phi4_mini_json": _marked(PHI4_MINI, in_lists(PHI4_MINI), r"functools\["),
    "xlam": ToolParser(
        lambda _: Marked(XLAM, begun=True),
        partial(json_list, key="arguments"),
        ('"name": "tool_call_name", "arguments"',),
    ),
    "gigachat3": _marked(
        GIGACHAT3, in_objects(GIGACHAT3), re.escape(GIGACHAT3.opening), special=True
    ),
    "pythonic": _pythonic(PYTHONIC, r"func_name1\(param"),
    "lfm2": _pythonic(
        LFM2, r"<\|tool_(?:call|list)_start\|>|List of tools: \[", special=True
    ),
    "olmo3": _pythonic(OLMO3, "<function_calls>", never=("｜DSML｜",)),
    "openai": ToolParser(
        Harmony, harmony, tuple(map(re.escape, (START, CHANNEL, MESSAGE))), special=True
    ),
}  # fmt: skip
# Of models that have no form of their own, and say what a grammar makes them say.
ANY_MODEL = ToolParser(lambda _: Marked(JSON_LIST, begun=True), json_list)
# Forms that no parser reads, by what a chat template has that shows them: most by vLLM's names.
UNREAD_FORMS = {
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
# Parts of one reader, by vLLM's names.
HARMONY = ("openai", "openai_gptoss")


@dataclass(frozen=True)
class Reading:
    """How answers of one model are read. `tools`, `reasoning`: names of parsers, or none.
    `takes_tools`: the chat template shows tools to the model. `added`: tokens by their text.
    `goes_on`: the prompt ends amid the answer's last message. `off`: the settings want no
    parser of tools. `unread`: a form that the template shows, and no parser reads."""

    tools: str = ""
    reasoning: str = ""
    takes_tools: bool = False
    added: Mapping[str, AddedId] = field(default_factory=dict[str, AddedId])
    goes_on: bool = False
    off: bool = False
    unread: str = ""

    @property
    def harmony(self) -> bool:
        """Whether answers are messages of the harmony format, which one reader reads."""
        return self.tools == HARMONY[0] or self.reasoning == HARMONY[1]

    @property
    def special(self) -> bool:
        """Whether calls are told by special tokens."""
        if not self.tools:
            return False
        parser = TOOL_PARSERS[self.tools]
        known = (self.added.get(marker) for marker in parser.markers)
        return parser.special or any(token is not None and token.special for token in known)

    @property
    def no_calls(self) -> str:
        """Why the model calls no tools by itself; empty where it does."""
        if not self.takes_tools:
            return "its chat template has no tools"
        if self.off:
            return "--tool-parser is none"
        return "" if self.tools else self._unknown_form

    @property
    def _unknown_form(self) -> str:
        named = f"{self.unread}, a form" if self.unread else "a form"
        parsers = ", ".join(TOOL_PARSERS)
        return f"its chat template writes calls in {named} that no --tool-parser knows: {parsers}"

    @property
    def tool_parser(self) -> ToolParser:
        """Of calls that the model is made to say."""
        if self.harmony:
            return TOOL_PARSERS[HARMONY[0]]
        return TOOL_PARSERS[self.tools] if self.tools else ANY_MODEL

    def going_on(self) -> Reading:
        """Of answers that go on from the last message."""
        return replace(self, goes_on=True)

    @property
    def tags(self) -> ThoughtTags | None:
        """Around the thoughts."""
        return REASONING_PARSERS.get(self.reasoning)

    @property
    def _told_by(self) -> tuple[str, ...]:
        return () if self.tags is None else (*self.tags.pair, *self.tags.answer)

    @property
    def special_thoughts(self) -> bool:
        """Whether thoughts are told by special tokens."""
        tokens = [self.added[tag] for tag in self._told_by if tag in self.added]
        return any(token.special for token in tokens)

    def left(self, said: str) -> ThoughtState:
        """Where what was `said` of an answer leaves its thoughts."""
        return "over" if self.tags is None else thought_state(said, self.tags)

    def reader(
        self,
        schemas: Schemas | None,
        one_call: bool = False,
        thoughts: bool = True,
        padded: bool = False,
        custom: Collection[str] = (),
    ) -> MakeReader | None:
        """Makes a reader for each choice; None where all is content. `schemas`: None if calls are
        not looked for. `one_call`: further ones are left out. `thoughts`: they are shown.
        `padded`: as for Thinking. `custom`: tools that take a text."""
        made = self._reader(schemas, one_call, thoughts, padded)
        if made is None or not custom:
            return made

        def translated(state: ThoughtState) -> AnswerReader:
            reader = made(state)
            return InParts(CustomInputs(reader, custom), reader.reasoning)

        return translated

    def _reader(
        self, schemas: Schemas | None, one_call: bool, thoughts: bool, padded: bool
    ) -> MakeReader | None:
        if self.harmony:
            return self._harmony(schemas, one_call, thoughts)
        calls = self.tool_parser.make if schemas is not None else None
        tags = self.tags
        if calls is None and tags is None:
            return None

        def make(state: ThoughtState = "before") -> AnswerReader:
            reader: Reader = Plain() if calls is None else calls(schemas or {})
            if one_call:
                reader = FirstCall(reader)
            if tags is not None and tags.answer[0]:
                reader = Enclosed(reader, *tags.answer)
            if tags is None or state == "over":
                return InParts(reader)
            reasoning = ReasoningTokens()
            begun = state == "open"
            return InParts(Thinking(reader, tags, begun, thoughts, padded, reasoning), reasoning)

        return make

    def _harmony(self, schemas: Schemas | None, one_call: bool, thoughts: bool) -> MakeReader:
        def make(_state: ThoughtState = "before") -> AnswerReader:
            reasoning = ReasoningTokens()
            reader = Harmony(schemas, self.goes_on, bool(self.reasoning), thoughts, reasoning)
            return InParts(FirstCall(reader) if one_call else reader, reasoning)

        return make


NOTHING = Reading()
PART = 1024  # letters


class InParts:
    """Reads a text in parts: what follows a marker is copied, which in a whole text of markers,
    after a stall or where a gateway took over, would grow as its square."""

    def __init__(self, reader: Reader, reasoning: ReasoningTokens | None = None) -> None:
        """`reasoning`: as the reader fills it; None where it finds no thoughts."""
        self._reader = reader
        self.reasoning = reasoning or ReasoningTokens()

    def read(self, text: str) -> Sequence[Piece]:
        if len(text) <= PART:
            pieces = self._reader.read(text)
        else:
            parts = (text[at : at + PART] for at in range(0, len(text), PART))
            pieces = [piece for part in parts for piece in self._reader.read(part)]
        self.reasoning.settle()
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces = self._reader.end()
        self.reasoning.settle()
        return pieces


class FirstCall:
    """Leaves out all calls but the first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, text: str) -> Sequence[Piece]:
        return [piece for piece in self._reader.read(text) if piece.call <= 0]

    def end(self) -> Sequence[Piece]:
        return [piece for piece in self._reader.end() if piece.call <= 0]


def reading(
    tool_parser: str,
    reasoning_parser: str,
    template: str,
    added: Mapping[str, AddedId] | None = None,
) -> Reading:
    """For settings that name parsers, "auto" or "none", and the text of a chat template.
    Raises ConfigurationError for a name that is unknown."""
    tools = _named("tool-parser", tool_parser, TOOL_PARSERS, _tools_of(template))
    known = (*REASONING_PARSERS, HARMONY[1])
    channels = TOOL_PARSERS[HARMONY[0]].told_by(template)
    thoughts = HARMONY[1] if channels else parser_of(template)
    reasoning = _named("reasoning-parser", reasoning_parser, known, thoughts)
    if tools == HARMONY[0] and reasoning_parser == "auto":
        reasoning = HARMONY[1]
    if reasoning == HARMONY[1] and tool_parser == "auto":
        tools = HARMONY[0]
    told = (name for name, mark in UNREAD_FORMS.items() if not tools and re.search(mark, template))
    return Reading(
        tools, reasoning, "tools" in template, added or {}, off=tool_parser == "none",
        unread=next(told, ""),
    )  # fmt: skip


def _named(flag: str, name: str, known: Collection[str], found: str) -> str:
    if name == "auto":
        return found
    if name == "none":
        return ""
    if name not in known:
        raise ConfigurationError(f"--{flag}: {none_of(name, ('auto', 'none', *known))}")
    return name


def _tools_of(template: str) -> str:
    return next((name for name, one in TOOL_PARSERS.items() if one.told_by(template)), "")
