"""Which readers a model's answers need: by name, or as its chat template shows.

Readers are made for one choice of an answer each. Knows names and templates' texts, no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeinfer.gateway.pieces import MakeReader, Piece, Plain, Reader
from pipeinfer.gateway.reading.call_grammars import (
    CallGrammar,
    hermes,
    json_list,
    llama3,
    mistral,
    qwen3_coder,
)
from pipeinfer.gateway.reading.enclosed import Enclosed
from pipeinfer.gateway.reading.hermes import Hermes
from pipeinfer.gateway.reading.json_list import JsonList
from pipeinfer.gateway.reading.llama3 import Llama3
from pipeinfer.gateway.reading.mistral import Mistral
from pipeinfer.gateway.reading.qwen3_coder import Qwen3Coder
from pipeinfer.gateway.reading.thinking import Thinking
from pipeinfer.json_values import JsonObject
from pipeinfer.params import ThoughtState
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.added import Added
from pipeinfer.text.thoughts import REASONING_PARSERS, Tags, left, parser_of

Schemas = Mapping[str, JsonObject]  # of the tools' parameters, by name


@dataclass(frozen=True)
class ToolParser:
    """`special`: its markers are special tokens, whose texts are left out else. `grammar`: of what
    it reads."""

    make: Callable[[Schemas], Reader]
    grammar: CallGrammar
    special: bool = False


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": ToolParser(lambda _: Hermes(), hermes),
    "llama3_json": ToolParser(Llama3, llama3, special=True),
    "mistral": ToolParser(lambda _: Mistral(), mistral, special=True),
    "qwen3_coder": ToolParser(Qwen3Coder, qwen3_coder),
}
# Of models that have no form of their own, and say what a grammar makes them say.
ANY_MODEL = ToolParser(lambda _: JsonList(), json_list)


@dataclass(frozen=True)
class Reading:
    """How answers of one model are read. `tools`, `reasoning`: names of parsers, or none.
    `takes_tools`: the chat template shows tools to the model. `added`: tokens by their text."""

    tools: str = ""
    reasoning: str = ""
    takes_tools: bool = False
    added: Mapping[str, Added] = field(default_factory=dict[str, Added])

    @property
    def special(self) -> bool:
        """Whether calls are told by special tokens."""
        return bool(self.tools) and TOOL_PARSERS[self.tools].special

    @property
    def calls(self) -> bool:
        """Whether the model calls tools by itself."""
        return bool(self.tools) and self.takes_tools

    @property
    def tool_parser(self) -> ToolParser:
        """Of calls that the model is made to say."""
        return TOOL_PARSERS[self.tools] if self.tools else ANY_MODEL

    @property
    def tags(self) -> Tags | None:
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
        return "over" if self.tags is None else left(said, self.tags)

    def reader(
        self,
        schemas: Schemas | None,
        one_call: bool = False,
        thoughts: bool = True,
        padded: bool = False,
    ) -> MakeReader | None:
        """Makes a reader for each choice; None where all is content. `schemas`: None if calls are
        not looked for. `one_call`: further ones are left out. `thoughts`: they are shown.
        `padded`: as for Thinking."""
        calls = self.tool_parser.make if schemas is not None else None
        tags = self.tags
        if calls is None and tags is None:
            return None

        def make(state: ThoughtState = "before") -> Reader:
            reader: Reader = Plain() if calls is None else calls(schemas or {})
            if one_call:
                reader = FirstCall(reader)
            if tags is not None and tags.answer[0]:
                reader = Enclosed(reader, *tags.answer)
            if tags is None or state == "over":
                return InParts(reader)
            return InParts(Thinking(reader, tags, state == "open", thoughts, padded))

        return make


NOTHING = Reading()
PART = 1024  # letters


class InParts:
    """Reads a text in parts: what follows a marker is copied, which in a whole text of markers,
    after a stall or where a gateway took over, would grow as its square."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, text: str) -> Sequence[Piece]:
        if len(text) <= PART:
            return self._reader.read(text)
        parts = (text[at : at + PART] for at in range(0, len(text), PART))
        return [piece for part in parts for piece in self._reader.read(part)]

    def end(self) -> Sequence[Piece]:
        return self._reader.end()


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
    added: Mapping[str, Added] | None = None,
) -> Reading:
    """For settings that name parsers, "auto" or "none", and the text of a chat template.
    Raises ConfigurationError for a name that is unknown."""
    tools = _named("tool-parser", tool_parser, TOOL_PARSERS, _tools_of(template))
    reasoning = _named("reasoning-parser", reasoning_parser, REASONING_PARSERS, parser_of(template))
    return Reading(tools, reasoning, "tools" in template, added or {})


def _named(flag: str, name: str, known: Mapping[str, object], found: str) -> str:
    if name == "auto":
        return found
    if name == "none":
        return ""
    if name not in known:
        names = ", ".join(("auto", "none", *known))
        raise ConfigurationError(f"--{flag}: {name!r} is none of {names}")
    return name


def _tools_of(template: str) -> str:
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template:
        return "llama3_json"
    return ""
