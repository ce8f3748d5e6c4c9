"""What an answer must be, in the words of several servers, as one StructuredOutputs.

Knows the fields of requests; compiles nothing, and knows no tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import Generation
from pipeinfer.grammars.bounds import GrammarError, check
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import StructuredOutputs

ANY_OBJECT = '{"type": "object"}'
# Of vLLM's object; these ask for what is so anyway, or for nothing.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
    "disable_fallback": (None, False, True),
    "disable_any_whitespace": (None, False, True),
    "disable_additional_properties": (None, False),
}


def structured(request: Generation) -> StructuredOutputs | None:
    """None where the answer is free. ApiError 400, also where two fields ask for something."""
    found: dict[str, StructuredOutputs] = {}
    for name, read in _FIELDS.items():
        value = getattr(request, name)
        spec = None if value is None else read(name, value)
        if spec is not None:
            found[name] = spec
    if len(found) > 1:
        first, second, *_ = found
        message = f"{first} and {second} are both given; an answer can have one form only"
        raise ApiError(400, message, second, "invalid_value")
    for name, spec in found.items():
        return checked(name, spec)
    return None


def checked(name: str, spec: StructuredOutputs) -> StructuredOutputs:
    """`spec`, which the field `name` asks for, if it is not too large; else ApiError 400."""
    try:
        check(spec)
    except GrammarError as error:
        raise _wrong(name, str(error)) from None
    return spec


def _wrong(name: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{name}: {message}", name, code)


def _schema(name: str, value: JsonValue) -> StructuredOutputs:
    """A schema, as an object or as text."""
    match value:
        case str():
            return StructuredOutputs(json=value)
        case dict() | bool():
            return StructuredOutputs(json=msgspec.json.encode(value).decode())
        case _:
            raise _wrong(name, "a schema must be an object, or text")


def _text(name: str, value: JsonValue) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "it must be a text that is not empty")
    return value


def _regex(name: str, value: JsonValue) -> StructuredOutputs:
    return StructuredOutputs(regex=_text(name, value))


def _grammar(name: str, value: JsonValue) -> StructuredOutputs:
    return StructuredOutputs(grammar=_text(name, value))


def _choice(name: str, value: JsonValue) -> StructuredOutputs:
    if not isinstance(value, list):
        raise _wrong(name, "it must be a list of texts")
    return StructuredOutputs(choice=tuple(_text(name, text) for text in value))


def _json_object(name: str, value: JsonValue) -> StructuredOutputs | None:
    if not isinstance(value, bool):
        raise _wrong(name, "it must be true or false")
    return StructuredOutputs(json=ANY_OBJECT) if value else None


def _response_format(name: str, value: JsonObject) -> StructuredOutputs | None:
    """OpenAI's."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json=ANY_OBJECT)
    if kind != "json_schema":
        shown = msgspec.json.encode(kind).decode()[:100]
        message = f"{name}.type: {shown} is none of text, json_object and json_schema"
        raise ApiError(400, message, f"{name}.type", "unsupported_parameter")
    form = value.get("json_schema")
    schema = form.get("schema") if isinstance(form, dict) else None
    where = f"{name}.json_schema.schema"
    if schema is None:
        raise _wrong(where, "it must be given")
    if not isinstance(schema, dict):
        raise _wrong(where, "it must be an object")
    return _schema(where, schema)


def _format(name: str, value: JsonValue) -> StructuredOutputs | None:
    """Ollama's."""
    if value == "":
        return None
    if value == "json":
        return StructuredOutputs(json=ANY_OBJECT)
    if not isinstance(value, dict):
        raise _wrong(name, 'it must be "json" or a schema')
    return _schema(name, value)


def _of_vllm(name: str, value: JsonObject) -> StructuredOutputs | None:
    """vLLM's object, one of whose members says the form."""
    found: dict[str, StructuredOutputs] = {}
    for key, given in value.items():
        where = f"{name}.{key[:100]}"
        if key in _NEUTRAL:
            if given not in _NEUTRAL[key]:
                raise _wrong(where, "it is not supported", "unsupported_parameter")
            continue
        read = _MEMBERS.get(key)
        if read is None:
            raise _wrong(where, f"{name} has no such member", "unsupported_parameter")
        spec = None if given is None else read(where, given)
        if spec is not None:
            found[key] = spec
    if len(found) != 1:
        said = " and ".join(found) or "none"
        forms = ", ".join(_MEMBERS)
        raise _wrong(name, f"exactly one of {forms} must be given, not {said}")
    return next(iter(found.values()))


Read = Callable[..., StructuredOutputs | None]

_MEMBERS: dict[str, Read] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_FIELDS: dict[str, Read] = {
    "response_format": _response_format,
    "structured_outputs": _of_vllm,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
    "json_schema": _schema,
    "format": _format,
}
