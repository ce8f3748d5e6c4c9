"""The tools of a chat, and what an answer must fit: structured outputs, grammars of tool calls.

- RequestTools: the tools that a chat offers. Templates know functions alone: a custom tool is shown
  as a function of one text, its input.
- tool_call_constraint: what calls of these tools must fit.
- OutputConstraint: what an answer must fit, in all the forms of requests: OpenAI's response_format,
  vLLM's structured_outputs and guided_*, SGLang's regex, ebnf and json_schema, llama.cpp's grammar,
  Ollama's format.

Knows the schema of requests; no output text. Compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError, field_in, required
from pipeinfer.gateway.schema import (
    ChatMessage,
    ChatRequest,
    Choice,
    CustomTool,
    Function,
    Generation,
    NamedTool,
    ResponseFormat,
    Structured,
    Tool,
    ToolChoice,
)
from pipeinfer.gateway.tool_parsers.base import INPUT_PARAMETER
from pipeinfer.gateway.tool_parsers.grammars import (
    CallGrammar,
    GrammarRequest,
    UnsupportedInputGrammar,
    UnsupportedSchema,
    input_schema,
)
from pipeinfer.gateway.tool_parsers.harmony import final_message_grammar
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.grammars.bounds import MAX_GRAMMAR_BYTES, GrammarError, check, schema_of
from pipeinfer.grammars.rewriting import compilable_schema
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs

# Characters of the arguments of all calls in a conversation. The tokenizer parses them, some 40 ms
# at the worst.
MAX_ARGUMENT_CHARS = 2**20


def check_tool_support(tools: RequestTools | None, parsers: OutputParsers) -> None:
    """ApiError 400 for optional tools if the model cannot call any."""
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
    """The constraint of an answer with tools. ApiError 400.

    It enforces required calls, allowed tools, schemas of strict functions, input grammars, or that
    an answer is calls or fits its own `constraint`. `parallel`: several calls are wanted.
    """
    strict, forced = tools.strict & tools.allowed, tools.required
    if not (forced or strict or tools.restricted) and constraint.spec is None:
        return constraint
    enforced = tools.allowed if forced else strict | (tools.custom_tools & tools.allowed)
    schemas: dict[str, JsonObject | None] = {
        name: schema if name in enforced else None
        for name, schema in tools.schemas.items()
        if name in tools.allowed
    }
    param = "tool_choice" if tools.one_function else "tools"
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
        grammar_request = GrammarRequest(
            schemas,
            parallel=parallel and not tools.one_function,
            allow_content=not forced and constraint.spec is None,
            added_tokens=parsers.added_tokens,
            after_reasoning=bool(parsers.reasoning_parser_name),
            content_constraint=content_constraint,
            input_grammars=tools.input_grammars,
        )
        spec = StructuredOutputs(grammar=_grammar(grammar_of, grammar_request, strict, unenforced))
        with_schema = strict | tools.custom_tools
        any_object = {name: s if name in with_schema else None for name, s in schemas.items()}
        fallback_request = dataclasses.replace(
            grammar_request, schemas=any_object, content_constraint=fallback_content
        )
        omitted = ", ".join(
            [f"parameters of {name}" for name in schemas if any_object[name] is not schemas[name]]
            + [constraint.fallback_omits] * (content_constraint is not fallback_content)
        )
        fallback = StructuredOutputs(grammar=grammar_of(fallback_request)) if omitted else None
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
        return OutputConstraint(fallback, (f"{omitted}: {error}",), param)
    return OutputConstraint(
        spec, _unenforced_parts(constraint, unenforced), param, fallback, omitted
    )


def _unenforced_parts(
    constraint: OutputConstraint, unenforced: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    return (*constraint.unenforced, *(part for each in unenforced.values() for part in each))


def _grammar(
    grammar: CallGrammar,
    grammar_request: GrammarRequest,
    strict: Container[str],
    unenforced: dict[str, tuple[str, ...]],
) -> str:
    """The grammar of calls. Raises UnsupportedSchema.

    A function that is not strict may have any object as its arguments if the grammar cannot enforce
    its schema; `unenforced` gets the reason, by the function's name.
    """
    try:
        return grammar(grammar_request)
    except UnsupportedSchema:
        schemas = dict(grammar_request.schemas)
    for name, schema in grammar_request.schemas.items():
        try:
            grammar(dataclasses.replace(grammar_request, schemas={name: schema}))
        except UnsupportedSchema as error:
            if name in strict or schema is None:
                raise
            schemas[name], unenforced[name] = None, (f"parameters of {name}: {error}",)
    return grammar(dataclasses.replace(grammar_request, schemas=schemas))


def _enforceable_schema(
    name: str, schema: JsonObject | None, strict: bool, closed_objects: bool
) -> tuple[JsonObject | None, tuple[str, ...]]:
    """(a function's schema with the keywords that grammars enforce, the other keywords). Raises
    GrammarError if a strict schema cannot be enforced.
    """
    if not schema:
        return schema, ()
    try:
        found = compilable_schema(schema, closed_objects, narrow=strict)
    except GrammarError as error:
        if strict:
            raise GrammarError(f"{name}: {error}") from None
        return None, (f"parameters of {name}: {error}",)
    if strict and found.unsupported:
        raise GrammarError(f"{name}: {unenforced_message(found.unsupported)}")
    unsupported = tuple(f"{each} of {name}" for each in found.unsupported)
    return found.schema if isinstance(found.schema, dict) else {}, unsupported


def final_message_constraint(
    constraint: StructuredOutputs, parsers: OutputParsers, field: str
) -> StructuredOutputs:
    """The constraint of a harmony answer's final message. `field`: of the request, for errors.
    ApiError 400.
    """
    try:
        spec = final_message_grammar(
            GrammarRequest({}, parallel=False, added_tokens=parsers.added_tokens), constraint
        )
        check(spec)
    except (UnsupportedSchema, GrammarError) as error:
        raise ApiError(400, f"{field}: {error}", field, "invalid_value") from None
    return spec


def check_arguments_size(calls: Iterable[JsonObject]) -> None:
    """ApiError 400 if the arguments of earlier calls are longer than MAX_ARGUMENT_CHARS."""
    texts = map(_arguments_text, calls)
    if sum(len(text) for text in texts if text is not None) > MAX_ARGUMENT_CHARS:
        message = f"the arguments of all tool_calls are longer than {MAX_ARGUMENT_CHARS} characters"
        raise ApiError(400, message, "messages", "invalid_value")


def _arguments_text(call: JsonObject) -> str | None:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    return text if isinstance(text, str) else None


def tool_call_for_template(call: JsonObject, where: str) -> JsonObject:
    """An earlier call as the call of a function; the tokenizer finds out whether the template takes
    arguments as an object or as text. ApiError 400 for an unknown type.
    """
    kind = call.get("type")
    if isinstance(kind, str):
        check_tool_type(kind, f"{where}.type")
    return _custom_call_as_function(call, f"{where}.custom") if kind == "custom" else call


def _custom_call_as_function(call: JsonObject, where: str) -> JsonObject:
    """The call of a custom tool as the call of a function."""
    custom = call.get("custom")
    given = custom if isinstance(custom, dict) else {}
    name, text = given.get("name"), given.get("input")
    if not isinstance(name, str) or not isinstance(text, str):
        message = f"{where} must be an object with texts name and input"
        raise ApiError(400, message, where, "invalid_type")
    other_fields = {key: value for key, value in call.items() if key != "custom"}
    return {
        **other_fields,
        "type": "function",
        "function": {"name": name, "arguments": {INPUT_PARAMETER: text}},
    }


TOOL_TYPES = ("function", "custom")


@dataclass(frozen=True)
class RequestTools:
    """The tools that a request offers.

    Attributes:
    - as_functions: all tools, as functions for the chat template
    - schemas: of the parameters of each tool, by name
    - strict: names whose calls always fit their schema
    - custom_tools: names of tools that take a text
    - input_grammars: of custom tools, by name
    - grammar_fields: where in the request a custom tool's format stands, by name
    - allowed: names that may be called
    - required: one of them must be called
    - one_function: the client chose the function
    """

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
    """The tools of the request; None: none. ApiError 400."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            message = "tool_choice is only allowed with tools"
            raise ApiError(400, message, "tool_choice", "invalid_value")
        return None
    kinds: dict[str, str] = {}
    functions = [_function(tool, f"tools[{i}]", kinds) for i, tool in enumerate(tools)]
    schemas = {function.name: function.parameters or {} for function in functions}
    check_sendable("tools", dict[str, JsonValue](schemas))
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
    if sum(len(text.grammar or text.regex or "") for text in texts.values()) > MAX_GRAMMAR_BYTES:
        message = (
            f"tools: grammars of custom tools have at most {MAX_GRAMMAR_BYTES} characters together"
        )
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


def check_tool_type(kind: str, where: str, *further: str) -> None:
    """ApiError 400 for a tool type that is not supported. `further`: types beside TOOL_TYPES that
    are.
    """
    if kind not in (*TOOL_TYPES, *further):
        supported = ", ".join(map(repr, (*TOOL_TYPES, *further)))
        message = f"{where}: {kind[:100]!r} is not supported, only {supported} are"
        raise ApiError(400, message, where, "unsupported_parameter")


def _input_annotations(tool: CustomTool, where: str) -> JsonObject:
    """The description of a custom tool's input for the model. ApiError 400 for a missing
    grammar.
    """
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


def check_sendable(param: str, value: JsonValue) -> None:
    """ApiError 400 for free-form JSON with numbers that the bus cannot carry."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None


# {field of a chat with tools: the field of a chat with functions}.
LEGACY_FIELD_NAMES = {"tools": "functions", "tool_choice": "function_call"}


def functions_to_tools(request: ChatRequest) -> ChatRequest | None:
    """The request with tools in place of `functions`, OpenAI's older form; None without functions.
    ApiError 400.
    """
    choice = request.function_call
    if not request.functions:
        if choice not in (None, "none", "auto"):
            message = "function_call is only allowed with functions"
            raise ApiError(400, message, "function_call", "invalid_value")
        return None
    for name in ("tools", "tool_choice"):
        if getattr(request, name) is not None:
            message = f"{name} is not allowed with functions: they say the same"
            raise ApiError(400, message, name, "invalid_value")
    return replace(
        request,
        functions=None,
        function_call=None,
        tools=[Tool("function", function) for function in request.functions],
        tool_choice=_tool_choice(request),
        parallel_tool_calls=False,
    )


def _tool_choice(request: ChatRequest) -> Literal["none", "auto"] | ToolChoice | None:
    choice = request.function_call
    if isinstance(choice, str) or choice is None:
        return choice
    return ToolChoice("function", choice)


def function_messages_to_tool_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Earlier calls and results of functions as those of tools. ApiError 400."""
    if any(message.function_call is not None or message.role == "function" for message in messages):
        return list(_as_tool_messages(messages))
    return messages


def _as_tool_messages(messages: list[ChatMessage]) -> Iterator[ChatMessage]:
    """A result belongs to the last call of its function."""
    ids: dict[str, str] = {}
    for i, message in enumerate(messages):
        called = message.function_call
        # Nine letters and digits, as templates of Mistral's demand.
        call_id = f"call{i:05d}"
        if message.role == "function":
            call_id, text = ids.get(message.name or "", call_id), message.content or ""
            yield replace(message, role="tool", content=text, tool_call_id=call_id)
        elif called is None:
            yield message
        elif message.tool_calls:
            where = f"messages[{i}].function_call"
            text = f"{where} is not allowed beside tool_calls: a message calls in one way"
            raise ApiError(400, text, where, "invalid_value")
        else:
            ids[str(called.get("name"))] = call_id
            call: JsonObject = {"id": call_id, "type": "function", "function": called}
            yield replace(message, function_call=None, tool_calls=[call])


ANY_OBJECT = '{"type":"object"}'
ENTIRE_SCHEMA = "schema"  # as an entry of `unenforced`: all of the schema

FieldConstraint = tuple[str, StructuredOutputs]  # by which field


class MalformedSchema(GrammarError):
    """A schema that is no JSON Schema; the message says where, for the client."""


@dataclass(frozen=True)
class OutputConstraint:
    """The constraint that an output must fit.

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
        """A copy with the field's name as the client calls it."""
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
    return f"strict: true, but an answer cannot be constrained by {', '.join(parts[:5])}"


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
