"""Tools that a chat offers to its model: those that it is shown, and those that it may call.

A template knows functions alone, so a custom tool is shown as a function of one text, its input.
Knows the schema of requests; no model and no text of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pipeinfer.gateway.errors import ApiError, required
from pipeinfer.gateway.reading.call_grammars import input_schema
from pipeinfer.gateway.schema import (
    ChatRequest,
    Choice,
    CustomTool,
    Function,
    NamedTool,
    Tool,
)
from pipeinfer.grammars.bounds import MOST_BYTES
from pipeinfer.json_values import JsonObject
from pipeinfer.params import StructuredOutputs

TOOL_TYPES = ("function", "custom")


@dataclass(frozen=True)
class RequestTools:
    """`shown`: all tools, as functions. `schemas`: of the parameters of each, by name. `strict`:
    those whose calls are always held. `custom`: those that take a text, `texts` what it is held to,
    and `places` where the request says so. `allowed`: those that may be called. `forced`: some of
    them must be; `named`: the client chose the one."""

    as_functions: list[JsonObject] = field(default_factory=list[JsonObject])
    schemas: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    strict: frozenset[str] = frozenset()
    custom_tools: frozenset[str] = frozenset()
    input_grammars: dict[str, StructuredOutputs] = field(
        default_factory=dict[str, StructuredOutputs]
    )
    grammar_fields: dict[str, str] = field(default_factory=dict[str, str])
    allowed: frozenset[str] = frozenset()
    required: bool = False
    one_function: bool = False

    @property
    def restricted(self) -> bool:
        """Whether the model is shown tools that it may not call."""
        return len(self.allowed) < len(self.schemas)


def request_tools(request: ChatRequest) -> RequestTools | None:
    """What the request offers; None: nothing. ApiError 400."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            message = "tool_choice is only allowed with tools"
            raise ApiError(400, message, "tool_choice", "invalid_value")
        return None
    kinds: dict[str, str] = {}
    functions = [_function(tool, f"tools[{i}]", kinds) for i, tool in enumerate(tools)]
    schemas = {function.name: function.parameters or {} for function in functions}
    _check_sendable(schemas)
    if choice == "none":
        return None
    customs = {
        f"tools[{i}].custom.format": tool.custom
        for i, tool in enumerate(tools)
        if tool.type == "custom" and tool.custom is not None
    }
    texts = {
        tool.name: text for tool in customs.values() if (text := _input_grammar(tool)) is not None
    }
    if sum(len(text.grammar or text.regex or "") for text in texts.values()) > MOST_BYTES:
        message = f"tools: grammars of custom tools have at most {MOST_BYTES} letters together"
        raise ApiError(400, message, "tools", "invalid_value")
    allowed, forced = _allowed_tools(choice, kinds)
    named = not (choice is None or isinstance(choice, str) or choice.type == "allowed_tools")
    return RequestTools(
        [{"type": "function", "function": msgspec.to_builtins(each)} for each in functions],
        schemas,
        frozenset((*texts, *(function.name for function in functions if function.strict))),
        frozenset(tool.name for tool in customs.values()),
        texts,
        {tool.name: where for where, tool in customs.items()},
        allowed,
        forced,
        named,
    )


def _function(tool: Tool, where: str, kinds: dict[str, str]) -> Function:
    """The tool as a function; its kind is noted in `kinds`, by its name."""
    check_tool_type(tool.type, f"{where}.type")
    where = f"{where}.{tool.type}"
    if tool.type == "function":
        function = required(tool.function, where)
    else:
        custom = required(tool.custom, where)
        function = Function(
            custom.name, custom.description, input_schema(_input_annotations(custom, where))
        )
    if function.name in kinds:
        message = f"{where}.name: there are two tools {function.name!r}"
        raise ApiError(400, message, f"{where}.name", "invalid_value")
    kinds[function.name] = tool.type
    return function


def check_tool_type(kind: str, where: str, *more: str) -> None:
    """ApiError 400 for a type of tool that is not served; `more` are served there."""
    if kind not in (*TOOL_TYPES, *more):
        known = ", ".join(map(repr, (*TOOL_TYPES, *more)))
        message = f"{where}: {kind[:100]!r} is not supported, only {known} are"
        raise ApiError(400, message, where, "unsupported_parameter")


def _input_annotations(tool: CustomTool, where: str) -> JsonObject:
    """What a model is told of the tool's input. ApiError 400 for a grammar that is not there."""
    if tool.format is None or tool.format.type == "text":
        return {}
    grammar = required(tool.format.grammar, f"{where}.format.grammar")
    kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
    return {"description": f"A text of this {kind}:\n{grammar.definition}"}


def _input_grammar(tool: CustomTool) -> StructuredOutputs | None:
    grammar = None if tool.format is None else tool.format.grammar
    if grammar is None or tool.format is None or tool.format.type == "text":
        return None
    if grammar.syntax == "regex":
        return StructuredOutputs(regex=grammar.definition)
    return StructuredOutputs(grammar=grammar.definition)


def _allowed_tools(choice: Choice | None, kinds: Mapping[str, str]) -> tuple[frozenset[str], bool]:
    """The tools that may be called, and whether one of them must be. `kinds`: of all, by name."""
    if choice is None or isinstance(choice, str):
        return frozenset(kinds), choice == "required"
    check_tool_type(choice.type, "tool_choice.type", "allowed_tools")
    if choice.type != "allowed_tools":
        one = NamedTool(choice.type, choice.function, choice.custom)
        return frozenset((_tool_name(one, "tool_choice", kinds),)), True
    allowed = required(choice.allowed_tools, "tool_choice.allowed_tools")
    where = "tool_choice.allowed_tools.tools"
    if not allowed.tools:
        message = f"{where} must not be empty; tool_choice none offers no tools"
        raise ApiError(400, message, where, "invalid_value")
    names = {_tool_name(tool, f"{where}[{i}]", kinds) for i, tool in enumerate(allowed.tools)}
    return frozenset(names), allowed.mode == "required"


def _tool_name(tool: NamedTool, where: str, kinds: Mapping[str, str]) -> str:
    """The name of a tool that the request offers."""
    check_tool_type(tool.type, f"{where}.type")
    given = tool.function if tool.type == "function" else tool.custom
    name = required(given, f"{where}.{tool.type}").name
    if kinds.get(name) != tool.type:
        where += f".{tool.type}.name" if where != "tool_choice" else ""
        message = f"{where}: there is no {tool.type} tool {name[:100]!r} in tools"
        raise ApiError(400, message, where, "invalid_value")
    return name


def _check_sendable(schemas: dict[str, JsonObject]) -> None:
    """Free-form JSON may hold numbers that the bus cannot carry."""
    try:
        msgspec.msgpack.encode(schemas)
    except OverflowError as error:
        raise ApiError(400, f"tools: {error}", "tools", "invalid_value") from None
