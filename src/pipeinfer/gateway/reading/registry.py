"""Which readers a model's answers need: by name, or as its chat template shows.

Readers are made for one choice of an answer each. Knows names and templates' texts, no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeinfer.gateway.pieces import Piece, Plain, Reader
from pipeinfer.gateway.reading.call_grammars import (
    CallGrammar,
    hermes,
    json_list,
    llama3,
    mistral,
    qwen3_coder,
)
from pipeinfer.gateway.reading.llama3 import Llama3
from pipeinfer.gateway.reading.marked import HERMES, JSON_LIST, MISTRAL, Marked
from pipeinfer.gateway.reading.qwen3_coder import Qwen3Coder
from pipeinfer.gateway.reading.thinking import Thinking, amid_thoughts
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.added import Added

Schemas = Mapping[str, JsonObject]  # of the tools' parameters, by name


@dataclass(frozen=True)
class ToolParser:
    """`special`: its markers are special tokens, whose texts are left out else. `grammar`: of what
    it reads."""

    make: Callable[[Schemas], Reader]
    grammar: CallGrammar
    special: bool = False


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": ToolParser(lambda _: Marked(HERMES), hermes),
    "llama3_json": ToolParser(Llama3, llama3, special=True),
    "mistral": ToolParser(lambda _: Marked(MISTRAL), mistral, special=True),
    "qwen3_coder": ToolParser(Qwen3Coder, qwen3_coder),
}
# Of models that have no form of their own, and say what a grammar makes them say.
ANY_MODEL = ToolParser(lambda _: Marked(JSON_LIST, begun=True), json_list)
# By name, whether the prompt opens the thoughts.
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}


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

    def going_on(self, said: str) -> Reading:
        """Of answers that go on from what was `said` of them: behind thoughts, or amid those that
        are open there."""
        if not self.reasoning:
            return self
        return replace(self, reasoning="deepseek_r1" if amid_thoughts(said) else "")

    def reader(
        self, schemas: Schemas | None, one_call: bool = False, thoughts: bool = True
    ) -> Callable[[], Reader] | None:
        """Makes a reader for each choice; None where all is content. `schemas`: None if calls are
        not looked for. `one_call`: further ones are left out. `thoughts`: they are shown."""
        calls = self.tool_parser.make if schemas is not None else None
        begun = REASONING_PARSERS.get(self.reasoning)
        if calls is None and begun is None:
            return None

        def make() -> Reader:
            reader: Reader = Plain() if calls is None else calls(schemas or {})
            if one_call:
                reader = FirstCall(reader)
            return InParts(reader if begun is None else Thinking(reader, begun, thoughts))

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
    reasoning = _named(
        "reasoning-parser", reasoning_parser, REASONING_PARSERS, _reasoning_of(template)
    )
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


def _reasoning_of(template: str) -> str:
    if "<think>" not in template:
        return ""
    opening = template.rpartition("add_generation_prompt")[2]
    open_ended = "<think>" in opening and "</think>" not in opening
    return "deepseek_r1" if open_ended else "qwen3"
