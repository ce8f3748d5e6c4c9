"""Tools that a chat offers to the model, and calls that it has made before.

Knows the schema of requests; no model and no text of an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.forms import Form, unheld
from pipeinfer.gateway.reading.call_grammars import CallGrammar, Inexpressible, Wanted
from pipeinfer.gateway.reading.harmony_grammar import final_form
from pipeinfer.gateway.reading.registry import Reading
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.survey import CHAT, TooMuch, survey
from pipeinfer.grammars.bounds import GrammarError, check
from pipeinfer.grammars.json_schema import held
from pipeinfer.json_values import JsonObject
from pipeinfer.params import StructuredOutputs

# Letters, of all calls in a conversation. They are parsed on the loop, some 40 ms at the worst.
MOST_ARGUMENTS = 2**20


def tool_schemas(request: ChatRequest) -> dict[str, JsonObject] | None:
    """Schemas of the parameters of the tools that may be called, by name; None: none may be.

    ApiError 400.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            message = "tool_choice is only allowed with tools"
            raise ApiError(400, message, "tool_choice", "invalid_value")
        return None
    schemas: dict[str, JsonObject] = {}
    for i, tool in enumerate(tools):
        function, where = tool.function, f"tools[{i}].function"
        if function.name in schemas:
            message = f"{where}.name: there are two tools {function.name!r}"
            raise ApiError(400, message, f"{where}.name", "invalid_value")
        schemas[function.name] = function.parameters or {}
    _check_sendable(schemas)
    return None if choice == "none" else schemas


def check_calls(request: ChatRequest, reading: Reading) -> None:
    """ApiError 400 for tools that the model may call or not, if it cannot."""
    if request.tools and request.tool_choice in (None, "auto") and reading.no_calls:
        message = f"this server's model cannot call tools: {reading.no_calls}"
        raise ApiError(400, message, "tools", "unsupported_parameter")


def named_function(request: ChatRequest) -> str:
    """The function that must be called; none where the model may choose one."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto", "required"):
        return ""
    return choice.function.name


def call_grammar(
    request: ChatRequest,
    schemas: Mapping[str, JsonObject],
    reading: Reading,
    form: Form,
    closed: bool,
) -> Form:
    """What holds an answer to calls that must be made, to the schemas of `strict` functions, or to
    calls or its `form`; `schemas` are tool_schemas's. `closed`: see forms.form. ApiError 400."""
    choice = request.tool_choice
    strict = {tool.function.name for tool in request.tools or () if tool.function.strict}
    forced = choice not in (None, "auto")
    if not forced and not strict and form.spec is None:
        return form
    wanted_schemas: dict[str, JsonObject | None] = dict(schemas)
    many, param = request.parallel_tool_calls is not False, "tools"
    if name := named_function(request):
        many, param = False, "tool_choice"
        if name not in schemas:
            message = f"tool_choice: there is no tool {name[:100]!r}"
            raise ApiError(400, message, "tool_choice", "invalid_value")
        wanted_schemas = {name: schemas[name]}
    elif not forced:
        wanted_schemas = {
            name: schema if name in strict else None for name, schema in schemas.items()
        }
    free, thinks = not forced and form.spec is None, bool(reading.reasoning)
    content, instead = (None, None) if forced else (form.spec, form.otherwise or form.spec)
    left_out: dict[str, tuple[str, ...]] = {}  # by function
    write = reading.tool_parser.grammar
    try:
        for name, schema in wanted_schemas.items():
            wanted_schemas[name], left_out[name] = _held(name, schema, name in strict, closed)
        wanted = Wanted(wanted_schemas, many, free, reading.added, thinks, content)
        spec = StructuredOutputs(grammar=_grammar(write, wanted, strict, left_out))
        any_object = {name: s if name in strict else None for name, s in wanted.schemas.items()}
        looser = dataclasses.replace(wanted, schemas=any_object, form=instead)
        loses = ", ".join(
            [f"parameters of {n}" for n in wanted.schemas if any_object[n] is not wanted.schemas[n]]
            + [form.loses] * (content is not instead)
        )
        if not loses:
            check(spec)
            return Form(spec, _places(form, left_out), param)
        otherwise = StructuredOutputs(grammar=write(looser))
        check(otherwise)
    except (Inexpressible, GrammarError) as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None
    try:
        check(spec)
    except GrammarError as error:
        return Form(otherwise, (f"{loses}: {error}",), param)
    return Form(spec, _places(form, left_out), param, otherwise, loses)


def _places(form: Form, left_out: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (*form.left_out, *(place for each in left_out.values() for place in each))


def _grammar(
    grammar: CallGrammar,
    wanted: Wanted,
    strict: Container[str],
    left_out: dict[str, tuple[str, ...]],
) -> str:
    """The grammar of calls. Functions that it cannot hold to their schema, and that are not strict,
    get any object; `left_out` says so. Raises Inexpressible."""
    try:
        return grammar(wanted)
    except Inexpressible:
        schemas = dict(wanted.schemas)
    for name, schema in wanted.schemas.items():
        try:
            grammar(dataclasses.replace(wanted, schemas={name: schema}))
        except Inexpressible as error:
            if name in strict or schema is None:
                raise
            schemas[name], left_out[name] = None, (f"parameters of {name}: {error}",)
    return grammar(dataclasses.replace(wanted, schemas=schemas))


def _held(
    name: str, schema: JsonObject | None, strict: bool, closed: bool
) -> tuple[JsonObject | None, tuple[str, ...]]:
    """The schema of a function's parameters in the words of grammars, and what they leave out.
    Raises GrammarError where a strict one is not held."""
    if not schema:
        return schema, ()
    try:
        found = held(schema, closed, narrow=strict)
    except GrammarError as error:
        if strict:
            raise GrammarError(f"{name}: {error}") from None
        return None, (f"parameters of {name}: {error}",)
    if strict and found.left_out:
        raise GrammarError(f"{name}: {unheld(found.left_out)}")
    places = tuple(f"{each} of {name}" for each in found.left_out)
    return found.schema if isinstance(found.schema, dict) else {}, places


def held_final(form: StructuredOutputs, reading: Reading, field: str) -> StructuredOutputs:
    """What holds the final message of a harmony answer to `form`, which `field` asks for. ApiError
    400."""
    try:
        spec = final_form(Wanted({}, many=False, tokens=reading.added), form)
        check(spec)
    except (Inexpressible, GrammarError) as error:
        raise ApiError(400, f"{field}: {error}", field, "invalid_value") from None
    return spec


def _check_sendable(schemas: dict[str, JsonObject]) -> None:
    """Free-form JSON may hold numbers that the bus cannot carry."""
    try:
        msgspec.msgpack.encode(schemas)
    except OverflowError as error:
        raise ApiError(400, f"tools: {error}", "tools", "invalid_value") from None


def check_arguments(calls: Iterable[JsonObject]) -> None:
    """ApiError 400 where calls that were made before have more arguments than are read again."""
    texts = map(_arguments, calls)
    if sum(len(text) for text in texts if text is not None) > MOST_ARGUMENTS:
        message = f"the arguments of all tool_calls are longer than {MOST_ARGUMENTS} characters"
        raise ApiError(400, message, "messages", "invalid_value")


def _arguments(call: JsonObject) -> str | None:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    return text if isinstance(text, str) else None


def for_template(call: JsonObject) -> JsonObject:
    """A call that was made before, as chat templates write it: with its arguments as an object."""
    text, function = _arguments(call), call.get("function")
    if text is None or not isinstance(function, dict):
        return call
    raw = text.encode("utf-8", "surrogatepass") or b"{}"
    try:
        for _ in survey(raw, CHAT):
            pass
        arguments = msgspec.json.decode(raw, type=JsonObject)
        msgspec.msgpack.encode(arguments)
    except (TooMuch, msgspec.DecodeError, UnicodeDecodeError, OverflowError):
        return call  # as it is: what the model said, templates can write as text as well
    return {**call, "function": {**function, "arguments": arguments}}
