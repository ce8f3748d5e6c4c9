"""What an answer must be, in all the ways in which requests say it, as one StructuredOutputs.

OpenAI's response_format, vLLM's structured_outputs and guided_*, SGLang's regex, ebnf and
json_schema, llama.cpp's grammar, Ollama's format. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import Generation, ResponseFormat, Structured
from pipeinfer.grammars.bounds import GrammarError, check
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import StructuredOutputs

ANY_OBJECT = '{"type":"object"}'

Found = tuple[str, StructuredOutputs]  # by which field


def form(request: Generation) -> StructuredOutputs | None:
    """None if all texts will do. ApiError 400 for more than one form, and for one that is too large
    or that is none."""
    found = list(_asked(request))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        message = f"an answer has one form, but {names} are given"
        raise ApiError(400, message, found[1][0], "invalid_value")
    if not found:
        return None
    name, spec = found[0]
    try:
        check(spec)
    except GrammarError as error:
        raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None
    return spec


def form_field(request: Generation) -> str:
    """Which field says the form of an answer that has one."""
    return next((name for name, _ in _asked(request)), "")


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
    if given.type == "json_object":
        return StructuredOutputs(json=ANY_OBJECT)
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        message = "response_format.json_schema.schema must be given with type json_schema"
        raise ApiError(400, message, "response_format", "invalid_value")
    return StructuredOutputs(json=_text(schema))


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
