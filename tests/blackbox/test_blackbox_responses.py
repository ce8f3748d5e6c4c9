"""Responses by OpenAI's client: items, streams event by event, calls, and what has no memory."""

from __future__ import annotations

import json

import pytest
from asked import COUNTED, MODEL, ONE, QUESTION, system, user

TOOLS = [{"type": "function", "name": name, "parameters": ONE} for name in ("f", "g")]
NAMED = {"type": "function", "name": "g"}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
# What every event that ends something follows, with only its like between.
BEGINNING = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
    "response.completed": "response.created",
    "response.incomplete": "response.created",
}


@pytest.fixture
def ask(api):
    def ask(input=QUESTION, extra=None, **more):
        usual = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
        return api.responses.create(input=input, extra_body=extra, **(usual | more))

    return ask


def test_every_way_of_asking_is_one_conversation(ask):
    ways = [
        QUESTION,
        [user(QUESTION)],
        [user([{"type": "input_text", "text": QUESTION}])],
        [{"type": "message", **user(QUESTION)}],
        [system("Finish with QED."), user(QUESTION), {"role": "assistant", "content": "15. QED."},
         user(QUESTION)],
        [user("Hello."),
         {"type": "reasoning", "id": "r", "summary": [],
          "content": [{"type": "reasoning_text", "text": "hm"}]},
         user(QUESTION)],
        [user("Hello."),
         {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
         user(QUESTION)],
        [user("Hello."), {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
         user(QUESTION)],
    ]  # fmt: skip
    for way in ways:
        found = ask(way, max_output_tokens=5)
        assert (found.status, found.output_text) == ("incomplete", COUNTED[:5]), way
        assert found.incomplete_details.reason == "max_output_tokens" and found.error is None
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    whole = ask(reasoning={"effort": "none"})
    assert (whole.status, whole.output_text) == ("completed", COUNTED)
    assert whole.incomplete_details is None
    assert ask(instructions="Be short.").usage.input_tokens > whole.usage.input_tokens


def test_an_unfinished_message_goes_on_and_a_finished_one_does_not(ask):
    def last(status: str | None) -> list[dict]:
        content = [{"type": "output_text", "text": "3 4 5", "annotations": []}]
        item = {"type": "message", "id": "msg_1", "role": "assistant", "content": content}
        return [user(QUESTION), {**item, "status": status} if status else item]

    for status in ("in_progress", "incomplete"):
        assert ask(last(status)).output_text == " 6 7 8 9"
    for status in ("completed", None):
        assert ask(last(status)).output_text == COUNTED
    cut = ask(max_output_tokens=5)
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    rest = ask([user(QUESTION), *cut.output])
    assert cut.output_text + rest.output_text == COUNTED
    assert ask([*last("incomplete"), user(QUESTION)]).output_text == COUNTED


def test_log_probs_come_whole_and_in_a_stream(ask):
    for top in (None, 0, 5):
        whole = ask(**LOGPROBS, extra={"top_logprobs": top})
        (part,) = whole.output[0].content
        assert {len(token.top_logprobs) for token in part.logprobs} == {top or 0}
        assert "".join(token.token for token in part.logprobs) == COUNTED
    told = []
    for event in ask(**LOGPROBS, top_logprobs=3, stream=True):
        if event.type == "response.output_text.delta":
            assert event.logprobs and all(token.logprob <= 0 for token in event.logprobs)
            assert all(len(token.top_logprobs) == 3 for token in event.logprobs)
            told += event.logprobs
        elif event.type == "response.output_item.done":
            item = event.item
    assert "".join(token.token for token in told) == COUNTED
    assert event.response.output == [item]
    assert [one.token for one in item.content[0].logprobs] == [one.token for one in told]
    assert ask().output[0].content[0].logprobs == []


def test_parameters_of_other_endpoints_work(ask):
    extra = {
        "top_k": 40, "repetition_penalty": 1.2, "seed": 42, "stop_token_ids": [42], "min_p": 0.1,
        "ignore_eos": True, "skip_special_tokens": True, "logit_bias": {"4": 1},
    }  # fmt: skip
    found = ask(temperature=0.7, top_p=0.9, extra=extra)
    assert found.status in ("completed", "incomplete") and found.output
    for stop in ("7", ["8", "7"]):
        assert ask(extra={"stop": stop}).output_text == "3 4 5 6 "
    assert ask(extra={"structured_outputs": {"regex": "[ab]{3}"}}).output_text.strip("ab") == ""
    asked = {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}
    asked |= {"metadata": {"a": "b"}}
    found = ask(**asked, store=True, background=False, service_tier="auto", truncation="disabled")
    assert {name: getattr(found, name) for name in asked} == asked
    assert (found.background, found.store) == (False, False)
    assert found.previous_response_id is None


def test_penalties_of_chats_work_and_what_asks_for_nothing_is_taken(ask):
    assert ask(extra={"frequency_penalty": 2, "presence_penalty": 2}).output_text != COUNTED
    extra = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "previous_input_messages": [],
        "prompt_cache_retention": "in-memory", "prompt_cache_options": {"mode": "explicit"},
    }  # fmt: skip
    asked = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    asked |= {"previous_response_id": None, "include": None, "user": None, "top_p": 1.0}
    assert ask(extra=extra, **asked).output_text == COUNTED


def test_the_first_event_says_the_request_again(ask):
    format = {"type": "json_schema", "name": "one", "schema": ONE, "strict": True}
    asked = {"text": {"format": format}, "prompt_cache_key": "k", "safety_identifier": "s"}
    first, *_, last = ask(**asked, metadata={"a": "b"}, stream=True)
    for event in (first, last):
        shown = event.response.model_dump(by_alias=True)
        assert shown["text"]["format"]["schema"] == ONE
        assert "schema_" not in shown["text"]["format"]
        assert (shown["prompt_cache_key"], shown["safety_identifier"]) == ("k", "s")
        assert shown["metadata"] == {"a": "b"}
    assert (first.response.output, first.response.usage) == ([], None)
    plain = next(iter(ask(stream=True))).response
    assert plain.prompt_cache_key is None and plain.safety_identifier is None


def test_a_stream_that_is_cut_is_incomplete_to_its_last_item(ask):
    *events, last = ask(max_output_tokens=5, stream=True)
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert done.status == "incomplete" and last.response.output == [done]
    assert done.content[0].text == COUNTED[:5]


def test_forms_are_those_of_the_api(ask):
    schema = {"type": "json_schema", "name": "one", "schema": ONE}
    for form in (schema, {**schema, "strict": True}, {"type": "json_object", "schema": ONE}):
        assert json.loads(ask(text={"format": form}).output_text) == {"a": 1}
    assert ask(text={"format": {"type": "text"}}).output_text == COUNTED


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", NAMED], ids=str)
def test_a_stream_is_well_nested_and_adds_up_to_its_last_event(ask, choice):
    asked = {} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 120}
    events = list(ask(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    open_: list[str] = []
    for kind in (event.type for event in events):
        if kind in BEGINNING:
            assert open_.pop() == BEGINNING[kind], kind
        elif kind.endswith((".added", ".created")) or (
            kind.endswith(".delta") and open_[-1] != kind
        ):
            open_.append(kind)
    assert not open_
    last = events[-1].response
    assert events[0].response.id == last.id and last.status == "completed"
    whole = ask(**asked)
    assert [_shown(item) for item in last.output] == [_shown(item) for item in whole.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    texts = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(texts) == last.output_text
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    calls = [item for item in last.output if item.type == "function_call"]
    assert "".join(arguments) == "".join(call.arguments for call in calls)
    assert bool(calls) == (choice in ("required", NAMED))
    if choice == NAMED:
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("g", {"a": 1})]


def _shown(item) -> tuple:
    texts = [part.text for part in item.content] if item.type == "message" else item.arguments
    return item.type, item.status, texts


def test_calls_and_their_results_go_back(ask):
    question = user(QUESTION)
    made = ask(tools=TOOLS, tool_choice=NAMED, max_output_tokens=120)
    (call,) = made.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"}
    assert ask([question, call, result, question], tools=TOOLS).output_text == COUNTED
    parts = {**result, "output": [{"type": "input_text", "text": "20"}]}
    arguments = json.dumps({"filters": {"city": "Oslo", "at": [1, {"b": None}]}})
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    told = [question, item, {**parts, "call_id": "c"}, call.model_dump(), result, question]
    assert ask(told).output_text == COUNTED
    cut = ask(tools=TOOLS, tool_choice="required", max_output_tokens=10)
    assert cut.status == "incomplete"
    assert all(item.type != "function_call" for item in cut.output)
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_without_a_store_nothing_is_stored(http):
    status, answer = http.post("/v1/responses", {"input": QUESTION, "store": True})
    assert (status, answer["store"]) == (200, False)
    for path in (f"/v1/responses/{answer['id']}", "/v1/responses/resp_1/input_items"):
        assert http.get(path)[0] == 404
    status, answer = http.post(f"/v1/responses/{answer['id']}/cancel", {})
    assert (status, answer["error"]["code"]) == (404, "response_not_found")
