"""Structured outputs: what an answer must fit, in all the forms of requests, as StructuredOutputs.

OpenAI's response_format, vLLM's structured_outputs and guided_*, SGLang's regex, ebnf and
json_schema, llama.cpp's grammar, Ollama's format. Compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError, field_in
from pipeinfer.gateway.schema import Generation, ResponseFormat, Structured
from pipeinfer.grammars.bounds import GrammarError, check, schema_of
from pipeinfer.grammars.rewriting import compilable_schema
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'
ENTIRE_SCHEMA = "schema"  # as an entry of `unenforced`: all of the schema

FieldConstraint = tuple[str, StructuredOutputs]  # by which field


class MalformedSchema(GrammarError):
    """A schema that is no JSON Schema; the message says where, for the client."""


@dataclass(frozen=True)
class OutputConstraint:
    """What an output must fit.

    Attributes:
    - spec: None if any text will do
    - unenforced: keywords of the schema that are not enforced, see grammars/rewriting.py
    - field: of the request, that asked for it
    - fallback: the constraint where `spec` cannot be compiled; None: the request is refused then
    - fallback_omits: what the fallback does not enforce
    """

    spec: StructuredOutputs | None = None
    unenforced: tuple[str, ...] = ()
    field: str = ""
    fallback: StructuredOutputs | None = None
    fallback_omits: str = ""

    def with_field_names(self, names: Mapping[str, str]) -> OutputConstraint:
        """The same, with the field's name as the client calls it."""
        return dataclasses.replace(self, field=field_in(names, self.field))


def output_constraint(request: Generation, closed_objects: bool = True) -> OutputConstraint:
    """The constraint that the request asks for.

    `closed_objects`: see RequestDefaults. ApiError 400 for more than one form, for one that is too
    large or invalid, and for a strict schema that cannot be enforced.
    """
    found = list(_constraints(request))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        message = f"an answer has one form, but {names} are given"
        raise ApiError(400, message, found[1][0], "invalid_value")
    if not found:
        return OutputConstraint()
    name, spec = found[0]
    strict = _strict(request.response_format)
    try:
        check(spec)
        if spec.json is None:
            return OutputConstraint(spec, field=name)
        schema = schema_of(spec.json)
        try:
            return _schema_constraint(name, spec, schema, strict, closed_objects)
        except GrammarError as error:
            if strict or isinstance(error, MalformedSchema):
                raise
            return OutputConstraint(
                _fallback_json(spec, schema), (f"{ENTIRE_SCHEMA}: {error}",), name
            )
    except GrammarError as error:
        raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None


def _schema_constraint(
    name: str,
    spec: StructuredOutputs,
    schema: JsonObject | bool,
    strict: bool,
    closed_objects: bool,
) -> OutputConstraint:
    """Raises GrammarError, also for a strict schema that cannot be enforced."""
    found = compilable_schema(schema, closed_objects, narrow=strict)
    if found.malformed:
        raise MalformedSchema(f"{', '.join(found.malformed[:5])}: this is no JSON Schema")
    if strict and found.unsupported:
        raise GrammarError(unenforced_message(found.unsupported))
    spec = replace(spec, json=msgspec.json.encode(found.schema).decode())
    check(spec)
    if strict:
        return OutputConstraint(spec, field=name)
    fallback = _fallback_json(spec, schema)
    if fallback == spec:
        return OutputConstraint(spec, found.unsupported, name)
    return OutputConstraint(spec, found.unsupported, name, fallback, ENTIRE_SCHEMA)


def _fallback_json(spec: StructuredOutputs, schema: JsonObject | bool) -> StructuredOutputs:
    """In place of a schema that cannot be enforced: any JSON; an object or an array, if the schema
    describes one.
    """
    kind = "" if isinstance(schema, bool) else schema.get("type")
    if kind in ("object", "array"):
        return replace(spec, json=msgspec.json.encode({"type": kind}).decode())
    named = isinstance(schema, dict) and "properties" in schema
    return replace(spec, json=ANY_OBJECT if named else "{}")


def unenforced_message(parts: tuple[str, ...]) -> str:
    """Why a strict schema is refused."""
    return f"strict: true, but an answer cannot be held to {', '.join(parts[:5])}"


def _strict(given: ResponseFormat | None) -> bool:
    return given is not None and given.json_schema is not None and given.json_schema.strict is True


def _constraints(request: Generation) -> Iterator[FieldConstraint]:
    given = request.response_format
    if given is not None and given.type != "text":
        yield "response_format", _from_response_format(given)
    if request.structured_outputs is not None:
        yield "structured_outputs", _from_structured_outputs(request.structured_outputs)
    for name in ("guided_json", "json_schema"):
        schema: str | JsonObject | None = getattr(request, name)
        if schema is not None:
            yield name, StructuredOutputs(json=_schema_text(schema))
    for name in ("guided_regex", "regex"):
        if (regex := getattr(request, name)) is not None:
            yield name, StructuredOutputs(regex=regex)
    for name in ("guided_grammar", "ebnf", "grammar"):
        if grammar := getattr(request, name):  # llama.cpp's "" is none
            yield name, StructuredOutputs(grammar=grammar)
    if request.guided_choice is not None:
        yield "guided_choice", StructuredOutputs(choice=tuple(request.guided_choice))
    if request.format:  # Ollama's "" is none, too
        yield "format", StructuredOutputs(json=_from_ollama_format(request.format))


def _from_response_format(given: ResponseFormat) -> StructuredOutputs:
    """OpenAI's json_object has no schema. Others' may have one, and then is that schema."""
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is not None and given.schema is not None:
        message = "response_format: an answer has one form, but json_schema and schema are given"
        raise ApiError(400, message, "response_format", "invalid_value")
    schema = given.schema if schema is None else schema
    if schema is not None:
        return StructuredOutputs(json=_schema_text(schema))
    if given.type == "json_object":
        return StructuredOutputs(json=ANY_OBJECT)
    message = "response_format.json_schema.schema must be given with type json_schema"
    raise ApiError(400, message, "response_format", "invalid_value")


def _from_structured_outputs(given: Structured) -> StructuredOutputs:
    schema = None if given.json is None else _schema_text(given.json)
    if given.json_object:
        if schema is not None:
            message = "structured_outputs: an answer has one form, but json and json_object are two"
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        schema = ANY_OBJECT
    choice = None if given.choice is None else tuple(given.choice)
    return StructuredOutputs(json=schema, regex=given.regex, choice=choice, grammar=given.grammar)


def _from_ollama_format(given: str | JsonObject) -> str:
    if given == "json":
        return ANY_OBJECT
    if isinstance(given, str):
        message = 'format must be "json" or a JSON schema'
        raise ApiError(400, message, "format", "invalid_value")
    return _schema_text(given)


def _schema_text(schema: JsonValue) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
