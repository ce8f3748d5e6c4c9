"""What an answer must be, in all the ways in which requests say it, as one StructuredOutputs.

OpenAI's response_format, vLLM's structured_outputs and guided_*, SGLang's regex, ebnf and
json_schema, llama.cpp's grammar, Ollama's format. Schemas are put into the words of the grammars'
compiler. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import Generation, ResponseFormat, Structured
from pipeinfer.grammars.bounds import GrammarError, check, schema_of
from pipeinfer.grammars.json_schema import held
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import StructuredOutputs

ANY_OBJECT = '{"type":"object"}'

Found = tuple[str, StructuredOutputs]  # by which field


@dataclass(frozen=True)
class Form:
    """`spec`: None if all texts will do. `left_out`: keywords of its schema that an answer is not
    held to, see grammars/json_schema.py. `field`: of the request, that asked for it."""

    spec: StructuredOutputs | None = None
    left_out: tuple[str, ...] = ()
    field: str = ""


def form(request: Generation, closed: bool = True) -> Form:
    """What the request asks for. `closed`: objects have only the properties that their schema
    names, unless it says otherwise. ApiError 400 for more than one form, for one that is too large
    or that is none, and for a strict schema that an answer cannot be held to."""
    found = list(_asked(request))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        message = f"an answer has one form, but {names} are given"
        raise ApiError(400, message, found[1][0], "invalid_value")
    if not found:
        return Form()
    name, spec = found[0]
    strict = _strict(request.response_format)
    try:
        check(spec)
        if spec.json is None:
            return Form(spec, field=name)
        schema = held(schema_of(spec.json), closed, narrow=strict)
        text = msgspec.json.encode(schema.schema).decode()
        spec = replace(spec, json=text)
        check(spec)
    except GrammarError as error:
        raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None
    if strict and schema.left_out:
        raise ApiError(400, f"{name}: {unheld(schema.left_out)}", name, "invalid_value")
    return Form(spec, schema.left_out, name)


def unheld(left_out: tuple[str, ...]) -> str:
    """Why a strict schema is refused."""
    return f"strict: true, but an answer cannot be held to {', '.join(left_out[:5])}"


def _strict(given: ResponseFormat | None) -> bool:
    return given is not None and given.json_schema is not None and given.json_schema.strict is True


def _asked(request: Generation) -> Iterator[Found]:
    given = request.response_format
    if given is not None and given.type != "text":
        yield "response_format", _response_format(given)
    if request.structured_outputs is not None:
        yield "structured_outputs", _structured(request.structured_outputs)
    for name in ("guided_json", "json_schema"):
        schema: str | JsonObject | None = getattr(request, name)
        if schema is not None:
            yield name, StructuredOutputs(json=_text(schema))
    for name in ("guided_regex", "regex"):
        if (regex := getattr(request, name)) is not None:
            yield name, StructuredOutputs(regex=regex)
    for name in ("guided_grammar", "ebnf", "grammar"):
        if grammar := getattr(request, name):  # llama.cpp's "" is none
            yield name, StructuredOutputs(grammar=grammar)
    if request.guided_choice is not None:
        yield "guided_choice", StructuredOutputs(choice=tuple(request.guided_choice))
    if request.format:  # Ollama's "" is none, too
        yield "format", StructuredOutputs(json=_ollama(request.format))


def _response_format(given: ResponseFormat) -> StructuredOutputs:
    """OpenAI's json_object has no schema. Others' may have one, and then is that schema."""
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is not None and given.schema is not None:
        message = "response_format: an answer has one form, but json_schema and schema are given"
        raise ApiError(400, message, "response_format", "invalid_value")
    schema = given.schema if schema is None else schema
    if schema is not None:
        return StructuredOutputs(json=_text(schema))
    if given.type == "json_object":
        return StructuredOutputs(json=ANY_OBJECT)
    message = "response_format.json_schema.schema must be given with type json_schema"
    raise ApiError(400, message, "response_format", "invalid_value")


def _structured(given: Structured) -> StructuredOutputs:
    schema = None if given.json is None else _text(given.json)
    if given.json_object:
        if schema is not None:
            message = "structured_outputs: an answer has one form, but json and json_object are two"
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        schema = ANY_OBJECT
    choice = None if given.choice is None else tuple(given.choice)
    return StructuredOutputs(json=schema, regex=given.regex, choice=choice, grammar=given.grammar)


def _ollama(given: str | JsonObject) -> str:
    if given == "json":
        return ANY_OBJECT
    if isinstance(given, str):
        message = 'format must be "json" or a JSON schema'
        raise ApiError(400, message, "format", "invalid_value")
    return _text(given)


def _text(schema: JsonValue) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
