"""Answers of models that think, or do not, by the shapes of five families' templates: what stands
where is told by each prompt, and forms, calls and budgets begin where the thoughts end."""

import json

import openai
import pytest

from servers import Server, fetch
from thinking_models import QUESTION, SCHEMA, TEMPLATES, make_thinking

FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
SHAPES = pytest.mark.parametrize("shape", TEMPLATES)
# Of each shape a whole answer, of one also a stream and several choices.
WAYS = pytest.mark.parametrize(
    ("shape", "more"),
    [
        *((shape, {}) for shape in TEMPLATES),
        ("opens or is silent", {"stream": True}),
        ("opens or closes", {"n": 3}),
    ],
)
OPEN = [shape for shape in TEMPLATES if "opens" in shape]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Whose requests bring the templates."""
    folder = tmp_path_factory.mktemp("thinking") / "m"
    model = make_thinking(folder, TEMPLATES["opens or closes"], "<think>", "</think>")
    flags = "--trust-request-chat-template", "--served-model-name", "m", "--kv-pages", "512"
    with Server(str(model), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as client:
        yield client


def chat(api, shape, off=False, extra=None, **more):
    """(thoughts, content) of the choices, all of which are the same."""
    body = {"chat_template": TEMPLATES[shape], **(OFF if off else {}), **(extra or {})}
    usual = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    made = api.chat.completions.create(extra_body=body, **(usual | more))
    if not more.get("stream"):
        said = {
            ((c.message.model_extra or {}).get("reasoning_content") or "", c.message.content or "")
            for c in made.choices
        }
        assert len(said) == 1
        return said.pop()
    deltas = [chunk.choices[0].delta for chunk in made if chunk.choices]
    reasoning = "".join((d.model_extra or {}).get("reasoning_content") or "" for d in deltas)
    return reasoning, "".join(d.content or "" for d in deltas)


@WAYS
def test_thinking_that_is_switched_off_leaves_content_alone(api, shape, more):
    reasoning, content = chat(api, shape, off=True, **more)
    assert not reasoning and content and "</think>" not in content


@SHAPES
def test_thoughts_are_open_where_the_prompt_has_opened_them(api, shape):
    reasoning, content = chat(api, shape)
    assert (bool(reasoning), bool(content)) == (shape in OPEN, shape not in OPEN)


@WAYS
@pytest.mark.parametrize("off", [False, True])
def test_a_form_is_all_of_the_content(api, shape, off, more):
    """After three tokens of thoughts where the prompt has opened them."""
    budget = {"thinking_token_budget": 3}
    reasoning, content = chat(api, shape, off, budget, response_format=FORM, **more)
    assert json.loads(content)["sum"] in (20, 21, 22) and content.startswith("{")
    assert bool(reasoning) == (shape in OPEN and not off)


@SHAPES
@pytest.mark.parametrize("off", [False, True])
def test_a_call_that_must_be_made_is_made_behind_thoughts(api, shape, off):
    body = {"chat_template": TEMPLATES[shape], "thinking_token_budget": 3, **(OFF if off else {})}
    made = api.chat.completions.create(
        model="m", messages=QUESTION, temperature=0, max_tokens=80, extra_body=body, tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "tell"}},
    )  # fmt: skip
    message = made.choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments)["sum"] in (20, 21, 22) and not message.content


def test_a_chat_that_goes_on_keeps_its_form_and_its_thoughts(api):
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    regex = {"guided_regex": "[0-9]{2}"}
    for said, thinks in (("<think>7 +", True), ("<think>7 +</think>It is ", False), ("It", False)):
        messages = [*QUESTION, {"role": "assistant", "content": said}]
        body = {"chat_template": TEMPLATES["history alone"], **goes_on}
        reasoning, content = chat(api, "history alone", extra=body, messages=messages)
        assert (bool(reasoning), bool(content)) == (thinks, not thinks)
        if not thinks:
            found = chat(api, "history alone", extra=body | regex, messages=messages)
            assert found == ("", found[1]) and found[1].isdigit() and len(found[1]) == 2


@pytest.mark.parametrize("shape", ["opens or is silent", "opens or closes"])
def test_other_dialects_switch_thinking_off(server, shape):
    sent = {"model": "m", "max_tokens": 40, "temperature": 0}
    own = {"chat_template_kwargs": {"chat_template": TEMPLATES[shape]}}
    body = {**sent, **own, "messages": QUESTION, "thinking": {"type": "disabled"}}
    status, told = server.post("/v1/messages", body)
    assert status == 200 and [block["type"] for block in told["content"]] == ["text"]
    body = {**own, "model": "m", "temperature": 0, "max_output_tokens": 40,
            "input": "What is 7 + 15?", "reasoning": {"effort": "none"}}  # fmt: skip
    for form in ({}, {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}):
        status, told = server.post("/v1/responses", body | form)
        assert status == 200 and [item["type"] for item in told["output"]] == ["message"]
    assert json.loads(told["output"][0]["content"][0]["text"]) == {"sum": 22}


@pytest.mark.parametrize("stop", [None, ["no such text"]])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_the_thoughts_that_a_budget_allows(server, stop, n):
    """Whole, streamed, as a response and as a message; the tags are not counted."""
    shape = {"chat_template": TEMPLATES["opens or closes"]}
    body = {**shape, "messages": QUESTION, "temperature": 0, "max_tokens": 40, "n": n, "stop": stop,
            "thinking_token_budget": 3}  # fmt: skip
    made = server.post("/v1/chat/completions", body)[1]["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = fetch(f"{server.url}/v1/chat/completions", json.dumps(body).encode())[1]
    last = json.loads(streamed.split("data: ")[-2])["usage"]
    for usage in (made, last):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 * n}
        assert usage["reasoning_tokens"] == 3 * n
    body = {"chat_template_kwargs": shape, "messages": QUESTION, "temperature": 0, "max_tokens": 40,
            "stop_sequences": stop,
            "thinking": {"type": "enabled", "budget_tokens": 3}}  # fmt: skip
    usage = server.post("/v1/messages", body)[1]["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}
    body = {"chat_template_kwargs": shape, "input": "What is 7 + 15?", "temperature": 0,
            "max_output_tokens": 8, "stop": stop}  # fmt: skip
    usage = server.post("/v1/responses", body)[1]["usage"]
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    assert usage["output_tokens"] - 1 <= reasoning <= usage["output_tokens"]  # an end is no thought


def test_completions_whose_prompts_have_begun_to_think(api):
    prompt = "<|im_start|>user\nWhat is 7 + 15?<|im_end|>\n<|im_start|>assistant\n"
    form, budget = {"guided_json": SCHEMA}, {"thinking_token_budget": 3}
    usual = {"model": "m", "temperature": 0, "max_tokens": 60}

    def said(text, **more):
        return api.completions.create(prompt=text, extra_body=more, **usual).choices[0].text

    assert json.loads(said(prompt, **form)) == {"sum": 22}
    assert json.loads(said(prompt, **form, **budget)) == {"sum": 22}
    reasoning, _, content = said(prompt + "<think>\n", **form, **budget).partition("</think>")
    assert len(reasoning) == 3 and json.loads(content)["sum"] in (20, 21, 22)
    reasoning, closed, _ = said(prompt + "<think>\n", **budget).partition("</think>")
    assert closed and len(reasoning) == 3
