"""Calls of tools: what holds an answer to them, and those that were made before.

Knows no request and no text of an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.forms import OutputConstraint, unenforced_message
from pipeinfer.gateway.offered import RequestTools, check_tool_type
from pipeinfer.gateway.pieces import INPUT_PARAMETER
from pipeinfer.gateway.reading.call_grammars import (
    CallGrammar,
    GrammarRequest,
    UnsupportedInputGrammar,
    UnsupportedSchema,
)
from pipeinfer.gateway.reading.harmony_grammar import final_message_grammar
from pipeinfer.gateway.reading.registry import OutputParsers
from pipeinfer.grammars.bounds import GrammarError, check
from pipeinfer.grammars.json_schema import held
from pipeinfer.json_values import JsonObject
from pipeinfer.params import StructuredOutputs

# Letters, of all calls in a conversation. The tokenizer parses them, some 40 ms at the worst.
MAX_ARGUMENT_CHARS = 2**20


def check_tool_support(tools: RequestTools | None, parsers: OutputParsers) -> None:
    """ApiError 400 for tools that the model may call or not, if it cannot."""
    if tools is not None and not tools.required and parsers.why_no_tool_calls:
        message = f"this server's model cannot call tools: {parsers.why_no_tool_calls}"
        raise ApiError(400, message, "tools", "unsupported_parameter")


def tool_call_constraint(
    tools: RequestTools,
    parallel: bool,
    parsers: OutputParsers,
    constraint: OutputConstraint,
    closed_objects: bool,
) -> OutputConstraint:
    """What holds an answer to calls that must be made, to those that are allowed, to the schemas of
    `strict` functions and the texts of custom tools, or to calls or its `form`. `parallel`: several
    calls are wanted. `closed`: see forms.form. ApiError 400."""
    strict, forced = tools.strict & tools.allowed, tools.required
    if not (forced or strict or tools.restricted) and constraint.spec is None:
        return constraint
    held = tools.allowed if forced else strict | (tools.custom_tools & tools.allowed)
    schemas: dict[str, JsonObject | None] = {
        name: schema if name in held else None
        for name, schema in tools.schemas.items()
        if name in tools.allowed
    }
    many, param = (
        parallel and not tools.one_function,
        "tool_choice" if tools.one_function else "tools",
    )
    allow_content, after_reasoning = (
        not forced and constraint.spec is None,
        bool(parsers.reasoning_parser_name),
    )
    content_constraint, fallback_content = (
        (None, None) if forced else (constraint.spec, constraint.fallback or constraint.spec)
    )
    unenforced: dict[str, tuple[str, ...]] = {}  # by function
    grammar_of = parsers.tool_parser.grammar
    try:
        for name, schema in schemas.items():
            schemas[name], unenforced[name] = _enforceable_schema(
                name, schema, name in strict, closed_objects
            )
        wanted = GrammarRequest(
            schemas,
            many,
            allow_content,
            parsers.added_tokens,
            after_reasoning,
            content_constraint,
            tools.input_grammars,
        )
        spec = StructuredOutputs(grammar=_grammar(grammar_of, wanted, strict, unenforced))
        kept = strict | tools.custom_tools
        any_object = {name: s if name in kept else None for name, s in schemas.items()}
        fallback_request = dataclasses.replace(
            wanted, schemas=any_object, content_constraint=fallback_content
        )
        lost = ", ".join(
            [f"parameters of {name}" for name in schemas if any_object[name] is not schemas[name]]
            + [constraint.lost_in_fallback] * (content_constraint is not fallback_content)
        )
        fallback = StructuredOutputs(grammar=grammar_of(fallback_request)) if lost else None
        check(fallback or spec)
    except UnsupportedInputGrammar as error:
        param = tools.grammar_fields[error.tool]
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None
    except (UnsupportedSchema, GrammarError) as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None
    texts = tools.input_grammars.keys() & schemas.keys()
    if len(texts) == 1 and not any(schemas[name] for name in schemas.keys() - tools.custom_tools):
        param = tools.grammar_fields[texts.pop()]  # nothing else can be wrong with the grammar
    try:
        check(spec)
    except GrammarError as error:
        return OutputConstraint(fallback, (f"{lost}: {error}",), param)
    return OutputConstraint(spec, _unenforced_places(constraint, unenforced), param, fallback, lost)


def _unenforced_places(
    constraint: OutputConstraint, unenforced: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    return (*constraint.unenforced, *(place for each in unenforced.values() for place in each))


def _grammar(
    grammar: CallGrammar,
    wanted: GrammarRequest,
    strict: Container[str],
    unenforced: dict[str, tuple[str, ...]],
) -> str:
    """The grammar of calls. Functions that it cannot hold to their schema, and that are not strict,
    get any object; `left_out` says so. Raises Inexpressible."""
    try:
        return grammar(wanted)
    except UnsupportedSchema:
        schemas = dict(wanted.schemas)
    for name, schema in wanted.schemas.items():
        try:
            grammar(dataclasses.replace(wanted, schemas={name: schema}))
        except UnsupportedSchema as error:
            if name in strict or schema is None:
                raise
            schemas[name], unenforced[name] = None, (f"parameters of {name}: {error}",)
    return grammar(dataclasses.replace(wanted, schemas=schemas))


def _enforceable_schema(
    name: str, schema: JsonObject | None, strict: bool, closed_objects: bool
) -> tuple[JsonObject | None, tuple[str, ...]]:
    """The schema of a function's parameters in the words of grammars, and what they leave out.
    Raises GrammarError where a strict one is not held."""
    if not schema:
        return schema, ()
    try:
        found = held(schema, closed_objects, narrow=strict)
    except GrammarError as error:
        if strict:
            raise GrammarError(f"{name}: {error}") from None
        return None, (f"parameters of {name}: {error}",)
    if strict and found.left_out:
        raise GrammarError(f"{name}: {unenforced_message(found.left_out)}")
    places = tuple(f"{each} of {name}" for each in found.left_out)
    return found.schema if isinstance(found.schema, dict) else {}, places


def final_message_constraint(
    constraint: StructuredOutputs, parsers: OutputParsers, field: str
) -> StructuredOutputs:
    """What holds the final message of a harmony answer to `form`, which `field` asks for. ApiError
    400."""
    try:
        spec = final_message_grammar(
            GrammarRequest({}, parallel=False, added_tokens=parsers.added_tokens), constraint
        )
        check(spec)
    except (UnsupportedSchema, GrammarError) as error:
        raise ApiError(400, f"{field}: {error}", field, "invalid_value") from None
    return spec


def check_arguments_size(calls: Iterable[JsonObject]) -> None:
    """ApiError 400 where calls that were made before have more arguments than are read again."""
    texts = map(_arguments_text, calls)
    if sum(len(text) for text in texts if text is not None) > MAX_ARGUMENT_CHARS:
        message = f"the arguments of all tool_calls are longer than {MAX_ARGUMENT_CHARS} characters"
        raise ApiError(400, message, "messages", "invalid_value")


def _arguments_text(call: JsonObject) -> str | None:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    return text if isinstance(text, str) else None


def tool_call_for_template(call: JsonObject, where: str) -> JsonObject:
    """A call that was made before, as one of a function; whether a template wants its arguments as
    an object or as a text, the tokenizer finds. ApiError 400 for a call of another kind."""
    kind = call.get("type")
    if isinstance(kind, str):
        check_tool_type(kind, f"{where}.type")
    return _custom_call_as_function(call, f"{where}.custom") if kind == "custom" else call


def _custom_call_as_function(call: JsonObject, where: str) -> JsonObject:
    """The call of a custom tool as one of a function."""
    custom = call.get("custom")
    given = custom if isinstance(custom, dict) else {}
    name, text = given.get("name"), given.get("input")
    if not isinstance(name, str) or not isinstance(text, str):
        message = f"{where} must be an object with texts name and input"
        raise ApiError(400, message, where, "invalid_type")
    others = {key: value for key, value in call.items() if key != "custom"}
    return {
        **others,
        "type": "function",
        "function": {"name": name, "arguments": {INPUT_PARAMETER: text}},
    }
