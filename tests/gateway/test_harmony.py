"""Conversations reach a harmony template whole: what it would leave out, misname or refuse is told
in messages that it shows. What it shows as it is comes as transformers renders it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from harmony_tokens import MARKERS, tokenizer
from pipeinfer.gateway import anthropic, responses_api
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.serving import decode
from pipeinfer.gateway.tool_parsers.grammars import GrammarRequest, UnsupportedSchema
from pipeinfer.gateway.tool_parsers.harmony import MARKERS as OUTPUT_MARKERS
from pipeinfer.gateway.tool_parsers.harmony import (
    HarmonyParser,
    final_message_grammar,
    harmony_grammar,
    harmony_messages,
)
from pipeinfer.gateway.tool_parsers.registry import OutputParsers, choose_parsers
from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.text import CALL, END, RETURN, AddedId
from pipeinfer.tokenizer.chat_templates import ChatTemplates
from pipeinfer.tokenizer.control_tokens import ChatRenderer
from template_families import HERE

TEMPLATE = (HERE / "published" / "gpt-oss.jinja").read_text()
TERMS = RequestDefaults(RequestParams(), parsers=choose_parsers("auto", "auto", TEMPLATE))
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
SYSTEM: Any = {"role": "system", "content": "Be brief."}
USER: Any = {"role": "user", "content": "And in Wien & <Rom>?"}
ANSWER: Any = {"role": "assistant", "content": "Fine.", "reasoning_content": "Old thoughts."}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "ü"}'}


def called(*names: str, **more: Any) -> Any:
    function = [{"name": name, "arguments": json.dumps({"city": name})} for name in names]
    calls = [{"id": f"c{i + 1}", "type": "function", "function": f} for i, f in enumerate(function)]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def now(text: str) -> str:
    return datetime.now().strftime(text)


def rendered(call: Call) -> str:
    assert call.chat is not None
    chats = ChatRenderer(MARKERS, ChatTemplates({"default": TEMPLATE}, {}, now))
    return chats.render(call.chat, call.template_arguments).text


def prompt(**fields: Any) -> str:
    """Of a chat, as the tokenizer renders what the gateway sends."""
    request = decode(json.dumps(fields).encode(), ChatRequest, lambda _: None)
    [call] = parse_chat(request, "r", TERMS, "").calls
    return rendered(call)


def of_transformers(messages: list[Any], **fields: Any) -> str:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=TEMPLATE)
    text = reference.apply_chat_template(
        messages, tokenize=False, **({"add_generation_prompt": True} | fields)
    )
    return str(text)


CHATS: dict[str, list[Any]] = {
    "plain": [USER],
    "system": [SYSTEM, USER],
    "answer": [SYSTEM, USER, ANSWER, USER],
    "call that waits": [USER, called("weather", reasoning_content="I look."), RESULT],
    "call with a preamble": [USER, called("weather", content="I look."), RESULT],
    "call that was answered": [
        USER, called("weather", reasoning_content="I look."), RESULT, ANSWER, USER
    ],
    "calls in turn": [USER, called("weather"), RESULT, called("now"), RESULT],
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}, {"reasoning_effort": "high"}])
def test_what_the_template_shows_is_rendered_as_transformers_does(name: str, fields: Any) -> None:
    """There, thoughts are called `thinking`, calls have objects, and what is null is left out."""
    theirs: list[Any] = []
    for message in CHATS[name]:
        plain = {key: value for key, value in message.items() if value is not None}
        if "reasoning_content" in plain:
            plain["thinking"] = plain.pop("reasoning_content")
        if "tool_calls" in plain:
            [call] = plain["tool_calls"]
            function = call["function"]
            function = {**function, "arguments": json.loads(function["arguments"])}
            plain["tool_calls"] = [{**call, "function": function}]
        theirs.append(plain)
    assert prompt(messages=CHATS[name], **fields) == of_transformers(theirs, **fields)


def behind_system(text: str) -> str:
    return text[text.index("<|start|>user") :]


def test_thoughts_and_a_preamble_beside_a_call_are_both_shown() -> None:
    """The template refuses both; an answer of ours has them, and comes back."""
    call = called("weather", reasoning_content="Thought.", content="I look.")
    assert behind_system(prompt(messages=[USER, call, RESULT])).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Thought.\nI look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "weather"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '"{\\"sky\\": \\"ü\\"}"<|end|><|start|>assistant'
    )


def test_each_of_several_calls_is_shown_with_its_result() -> None:
    """The template shows the first alone, and names results after it."""
    second = {**RESULT, "tool_call_id": "c2", "content": "12:00"}
    call = called("weather", "now", reasoning_content="Thought.")
    for results in ([RESULT, second], [second, RESULT]):
        text = behind_system(prompt(messages=[USER, call, *results]))
        assert text.count("Thought.") == 1
        parts = text.split("<|start|>")[2:-1]
        assert [part.partition("<|")[0] for part in parts] == [
            "assistant",
            "assistant to=functions.weather",
            "functions.weather to=assistant",
            "assistant to=functions.now",
            "functions.now to=assistant",
        ]
        assert "sky" in parts[2] and "12:00" in parts[4]


def test_no_result_is_lost_whatever_its_call_is_named() -> None:
    stray = {**RESULT, "tool_call_id": "c9", "content": "stray"}
    same = {**RESULT, "content": "again"}
    text = prompt(messages=[USER, called("weather", "now"), stray, RESULT, same])
    assert [text.count(said) for said in ("stray", "sky", "again")] == [1, 1, 1]


def test_all_that_the_system_says_is_shown() -> None:
    """The template shows the first message of it alone."""
    developer = {"role": "developer", "content": [{"type": "text", "text": "No lists."}]}
    for messages in ([SYSTEM, developer, USER, USER], [SYSTEM, USER, developer, USER]):
        text = prompt(messages=messages)
        assert "# Instructions\n\nBe brief.\n\nNo lists.\n\n<|end|><|start|>user" in text
        assert text.count("<|start|>user") == 2


def test_tools_need_no_description() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    text = prompt(messages=[USER], tools=[bare])
    assert "// \ntype now = () => any;" in text


def test_a_final_message_goes_on_where_it_ends() -> None:
    goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    text = prompt(messages=[USER, {"role": "assistant", "content": "It is"}], **goes_on)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>It is")
    with pytest.raises(ApiError, match="calls tools does not go on"):
        prompt(messages=[USER, called("weather", content="It is")], **goes_on)


def test_a_chat_without_calls_stays_as_it_is() -> None:
    chat: list[Any] = [SYSTEM, USER, ANSWER, USER]
    assert harmony_messages(chat) == chat
    assert harmony_messages([USER, {**ANSWER, "tool_calls": []}]) == [USER, ANSWER]


def of_message(**fields: Any) -> str:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = decode(json.dumps(body).encode(), anthropic.MessagesRequest, lambda _: None)
    [call] = parse_chat(anthropic.to_chat(request, True, True), "r", TERMS, "").calls
    return rendered(call)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "high"),
    ],
)
def test_messages_ask_for_an_effort_by_name_or_by_budget(fields: Any, effort: str) -> None:
    assert f"Reasoning: {effort}\n" in of_message(**fields)


def test_responses_ask_for_an_effort_that_there_is() -> None:
    def of_response(effort: str) -> str:
        body = {"input": "Hi", "reasoning": {"effort": effort}}
        kind = responses_api.ResponsesRequest
        request = decode(json.dumps(body).encode(), kind, lambda _: None)
        [call] = parse_chat(responses_api.to_chat(request), "r", TERMS, "").calls
        return rendered(call)

    for effort in ("low", "medium", "high"):
        assert f"Reasoning: {effort}\n" in of_response(effort)
    for effort in ("minimal", "xhigh"):
        with pytest.raises(ApiError, match="must be one of low, medium, high"):
            of_response(effort)


TOKENIZER = tokenizer()
SIZE = TOKENIZER.get_vocab_size()
IDS: dict[str, int] = {text: TOKENIZER.token_to_id(text) for text in OUTPUT_MARKERS}
VOCABULARY = GrammarVocabulary(
    TOKENIZER.to_str(), SIZE, (IDS[RETURN], IDS[CALL]), tuple(range(SIZE))
)
ADDED = {text: AddedId(i, True) for text, i in IDS.items()}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": PARAMETERS, "weather_now": {}}
WIEN = '{"city": "Wi\\"en <", "days": 2}'
THOUGHTS = (
    "",
    "<|start|>assistant",
    "<|channel|>analysis<|message|>They want {a} call to=x.\n<|end|><|start|>assistant",
    "<|channel|>analysis<|message|><|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant",
)
HEADS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
)
FINAL = "<|channel|>final<|message|>"


def wanted(many: bool = True, **fields: Any) -> GrammarRequest:
    schemas = fields.pop("schemas", SCHEMAS)
    return GrammarRequest(schemas, many, added_tokens=ADDED, **fields)


def allows(grammar: str, text: str) -> bool:
    """Whether all of `text` is allowed, and may be the end."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = Grammar(VOCABULARY, StructuredOutputs(grammar=grammar)).matcher()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(text: str) -> ParsedOutput:
    reader, said = HarmonyParser(SCHEMAS), ParsedOutput()
    said.add(reader.feed(text))
    said.add(reader.finish())
    return said


@pytest.mark.parametrize("before", THOUGHTS)
def test_calls_that_must_be_made_stand_behind_free_thoughts(before: str) -> None:
    grammar = harmony_grammar(wanted())
    for head in HEADS:
        for name, arguments in (("weather", WIEN), ("weather_now", "{}")):
            text = before + head.format(name) + arguments
            assert allows(grammar, text), text
            [call] = read(text).calls
            assert (call[0], json.loads("".join(call[1:]))) == (name, json.loads(arguments))


@pytest.mark.parametrize("before", THOUGHTS)
def test_nothing_else_may_be_said_where_a_call_must_be_made(before: str) -> None:
    grammar, head = harmony_grammar(wanted()), HEADS[0]
    for wrong in (
        before,
        before + FINAL + "No.",
        before + "No.",
        before + head.format("wether") + WIEN,
        before + head.format("weather") + WIEN.replace("city", "town"),
        before + head.format("weather") + "{}",
        before + head.format("weather") + WIEN + "!",
        before + head.format("weather_now") + WIEN,
        before + "<|channel|>analysis<|message|>No.",
    ):
        assert not allows(grammar, wrong), wrong


FORMS: Any = {
    "schema": (
        StructuredOutputs(json=json.dumps({**PARAMETERS, "required": ["city", "days"]})),
        (WIEN, '{"city": "", "days": 3}'),
        ("", "no", "{}", WIEN + "!"),
    ),
    "object": (StructuredOutputs(json='{"type": "object", "x-guidance": {}}'), ("{}",), ("[]",)),
    "choice": (StructuredOutputs(choice=("yes", 'say "no"')), ("yes", 'say "no"'), ("", "no")),
    "regex": (StructuredOutputs(regex=r"[a-z/]+(\/|/)?"), ("abc", "a/b"), ("", "1", "a\n")),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("before", THOUGHTS)
def test_a_form_is_that_of_the_final_message(name: str, before: str) -> None:
    form, good, bad = FORMS[name]
    alone = final_message_grammar(wanted(schemas={}), form).grammar
    beside = harmony_grammar(wanted(content_constraint=form))
    assert alone is not None
    preamble = "commentary" in before
    for head in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        for text in good:
            assert allows(alone, before + head + text) != preamble
            assert allows(beside, before + head + text) != preamble
            assert preamble or "".join(read(before + head + text).content) == text
        for text in bad:
            assert not allows(alone, before + head + text), text
            assert not allows(beside, before + head + text), text
    call = before + HEADS[0].format("weather") + WIEN
    assert allows(beside, call) and not allows(alone, call)
    assert not allows(beside, call.replace("city", "town"))


def test_strict_functions_are_held_to_their_schemas_where_calls_are_free() -> None:
    free = harmony_grammar(
        wanted(allow_content=True, schemas={"weather": PARAMETERS, "weather_now": None})
    )
    for before in THOUGHTS:
        for text in (
            FINAL + "No {calls} at all.",
            HEADS[0].format("weather") + WIEN,
            HEADS[4].format("weather_now") + '{"any": [1]}',
            "<|channel|>analysis<|message|>Hm.",
            HEADS[0].format("weather") + WIEN + "<|end|><|start|>assistant" + FINAL + "Said.",
        ):
            assert allows(free, before + text), text
        assert not allows(free, before + HEADS[0].format("weather") + '{"town": "Wien"}')
        assert not allows(free, before + HEADS[0].format("other") + "{}")


def test_markers_in_a_text_are_no_markers() -> None:
    """What spells one is held to be text: only the special token ends a message."""
    ids = TOKENIZER.encode("<|channel|>analysis<|message|>a", add_special_tokens=False).ids
    spelled = [i for letter in "<|end|>" for i in TOKENIZER.encode(letter).ids]
    matcher = Grammar(VOCABULARY, StructuredOutputs(grammar=harmony_grammar(wanted()))).matcher()
    assert matcher.try_consume_tokens([*ids, *spelled, *spelled]) == len(ids) + 2 * len(spelled)
    assert matcher.try_consume_tokens([IDS[END]]) == 1
    assert matcher.compute_ff_tokens()[0] == IDS["<|start|>"]


def test_models_without_the_markers_and_grammars_within_messages_are_refused() -> None:
    lacking = {text: added for text, added in ADDED.items() if text != "<|constrain|>"}
    for tokens in ({}, lacking, {text: AddedId(i, False) for text, i in IDS.items()}):
        with pytest.raises(UnsupportedSchema, match="no token <"):
            harmony_grammar(GrammarRequest(SCHEMAS, parallel=True, added_tokens=tokens))
    with pytest.raises(UnsupportedSchema, match="cannot stand within the messages"):
        final_message_grammar(wanted(schemas={}), StructuredOutputs(grammar='start: "a"'))


READING = OutputParsers("openai", "openai_gptoss", template_has_tools=True, added_tokens=ADDED)
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


def asked(**fields: Any) -> RequestParams:
    """How a chat with these fields is sampled."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest, lambda _: None)
    return parse_chat(request, "r", RequestDefaults(RequestParams(), parsers=READING), "").params


def test_requests_are_held_as_they_ask() -> None:
    call = HEADS[0].format("weather") + WIEN
    thought = THOUGHTS[2]
    for fields, good, bad in (
        ({"response_format": FORM}, FINAL + WIEN, call),
        ({"response_format": FORM, "tools": [TOOL]}, call, FINAL + "No."),
        ({"response_format": FORM, "tools": [TOOL], "tool_choice": "none"}, FINAL + WIEN, call),
        ({"tools": [TOOL], "tool_choice": "required"}, call, FINAL + WIEN),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
         call, FINAL),
    ):  # fmt: skip
        held = asked(**fields).structured_outputs
        assert held is not None and held.grammar is not None and not held.after
        assert allows(held.grammar, thought + good) and not allows(held.grammar, thought + bad)
        assert not asked(**fields).skip_special_tokens
    for fields in ({}, {"tools": [TOOL]}):
        assert asked(**fields).structured_outputs is None
        assert not asked(**fields).skip_special_tokens


def test_calls_are_held_in_messages_also_where_no_parser_looks_for_them() -> None:
    """`--tool-parser none` leaves calls that a model makes by itself in the content."""
    reading = replace(READING, tool_parser_name="")
    request = decode(
        json.dumps(
            {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL],
             "tool_choice": "required"}
        ).encode(),
        ChatRequest,
        lambda _: None,
    )  # fmt: skip
    job = parse_chat(request, "r", RequestDefaults(RequestParams(), parsers=reading), "")
    held, call = job.params.structured_outputs, HEADS[0].format("weather") + WIEN
    assert held is not None and held.grammar is not None and allows(held.grammar, call)
    assert job.parser_factory is not None
    assert job.parser_factory().feed(call)[0].kind == "call"


def test_what_goes_on_from_a_text_has_its_form_at_once_and_no_held_calls() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]
    goes_on: Any = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert asked(**goes_on, regex="a+").structured_outputs == StructuredOutputs(regex="a+")
    assert asked(**goes_on, tools=[TOOL]).structured_outputs is None
    with pytest.raises(ApiError, match="calls cannot be constrained within a message"):
        asked(**goes_on, tools=[TOOL], tool_choice="required")


def test_what_cannot_be_held_is_refused_by_name() -> None:
    for fields, param in (
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": 3}}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": None}}, "reasoning_effort"),
    ):
        with pytest.raises(ApiError) as refused:
            asked(**fields)
        assert (refused.value.status, refused.value.param) == (400, param)
    for effort in ("low", "medium", "high"):
        asked(reasoning_effort=effort)


def test_the_text_of_a_custom_tool_is_held_and_read() -> None:
    text = StructuredOutputs(grammar='start: "say " /[^\\n]+/ NL\nNL: /\\n/')
    grammar = harmony_grammar(wanted(schemas={"query": {}}, input_grammars={"query": text}))
    for head in HEADS:
        said = head.format("query") + json.dumps({"input": 'say "ü"\\\n'}, ensure_ascii=False)
        assert allows(grammar, said)
        assert not allows(grammar, said.replace("say", "ask"))
        made = OutputParsers("openai", "openai_gptoss", True, ADDED).parser_factory(
            {"query": {}}, custom_tools=["query"]
        )
        assert made is not None
        reader, found = made("before"), ParsedOutput()
        for letter in said:
            found.add(reader.feed(letter))
        found.add(reader.finish())
        [[name, *parts]] = found.calls
        assert (name, "".join(parts), found.custom) == ("query", 'say "ü"\\\n', {0})
