"""Paths as clients put them together, and the small endpoints that others' servers have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pipeinfer.demo import demo_path
from pipeinfer.gateway import sessions
from pipeinfer.gateway.anthropic import (
    CountRequest,
    MessagesRequest,
    to_chat,
    to_prompt_chat,
)
from pipeinfer.gateway.app import slash_tolerant
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.schema import PROMPT_FIELDS, ChatRequest, TokenizeRequest
from pipeinfer.gateway.serving import CHAT_FIELDS, chat_prompt_call, decode, tokenize_call
from pipeinfer.gateway.tool_parsers.registry import NO_PARSERS, OutputParsers
from pipeinfer.params import RequestParams
from pipeinfer.text import read_tokenizer_config, template_sources, tokenizer_info
from pipeinfer.version import __version__

CHAT = {"model": "test", "messages": [{"role": "user", "content": "one two"}]}


@pytest.mark.parametrize("base", ["//v1", "/v1/", "//v1//", "///v1"])
async def test_several_slashes_count_as_one(gateway: Gateway, base: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}{base}/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "one two "
        listed = await http.get(f"{gateway.url}{base}/models/test")
        assert listed.json()["id"] == "test"


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "//v1//chat/completions"])
async def test_no_number_of_slashes_leads_past_the_key(
    start_gateway: StartGateway, path: str
) -> None:
    gateway = await start_gateway(api_key="secret")
    async with httpx.AsyncClient() as http:
        for method in ("GET", "POST"):
            answer = await http.request(method, f"{gateway.url}{path}", json=CHAT)
            assert answer.status_code == 401, answer.text


@pytest.mark.parametrize("path", ["/v1x/models", "/v1/modelsx", "/x/v1/models", "/v1models"])
async def test_other_paths_are_still_no_paths(gateway: Gateway, path: str) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(gateway.url + path)).status_code == 404


def test_a_loose_route_has_its_path_in_it() -> None:
    assert slash_tolerant("/v1/chat/completions") == "/{_:/*}v1{_0:/+}chat{_1:/+}completions"


async def test_version_ping_and_what_no_model_can(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/version")).json() == {"version": __version__}
        assert (await http.get("/ping")).status_code == 200
        assert (await http.post("/ping")).status_code == 200
        refused = await http.post("/v1/embeddings", json={"model": "test", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_implemented")


async def test_metrics_come_as_openmetrics_to_who_accepts_it(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        plain = await http.get("/metrics")
        wanted = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}
        open_metrics = await http.get("/metrics", headers=wanted)
    assert plain.headers["content-type"].startswith("text/plain")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    found = {family.name: family for family in text_string_to_metric_families(open_metrics.text)}
    stop = [s for s in found["pipeinfer_requests"].samples if s.labels == {"outcome": "stop"}]
    assert ("pipeinfer_requests_total", 1.0) in [(s.name, s.value) for s in stop]


def told(config: Any, templates: Any = None, context_length: int = 100) -> Any:
    return json.loads(tokenizer_info(config, templates or {}, context_length))


async def test_it_is_the_configuration_with_the_template_in_use(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await start_gateway()
    found = (await gateway.http().get(f"{gateway.url}/tokenizer_info")).json()
    config = read_tokenizer_config(demo_path())
    assert found.items() >= config.items()
    assert found["chat_template"] == template_sources(demo_path(), config, "")["default"]
    assert found["eos_token"] == "<|im_end|>" and found["bos_token"] is None
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }} own")
    gateway = await start_gateway(chat_template=str(path))
    found = (await gateway.http().get(f"{gateway.url}/tokenizer_info")).json()
    assert found["chat_template"] == "{{ messages }} own"


async def test_it_needs_the_key_that_tokenize_needs(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    url, right = f"{gateway.url}/tokenizer_info", {"Authorization": "Bearer secret"}
    for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), (right, 200)):
        answer = await gateway.http().get(url, headers=headers)
        assert answer.status_code == status and ("chat_template" in answer.text) == (status == 200)
    assert (await gateway.http().get(f"{gateway.url}//tokenizer_info")).status_code == 401
    assert (await gateway.http().post(url, headers=right)).status_code == 405


def test_tokens_are_texts_and_always_there() -> None:
    eos = {"content": "</s>", "lstrip": False, "special": True}
    found = told({"eos_token": eos, "image_token": "<image>", "pad_token": None})
    assert (found["eos_token"], found["pad_token"], found["unk_token"]) == ("</s>", None, None)
    assert found["image_token"] == "<image>"
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told({"tokenizer_class": "Qwen2Tokenizer"})["tokenizer_class"] == "Qwen2Tokenizer"


@pytest.mark.parametrize(
    ("most", "context", "shown"),
    [(4096, 100, 4096), (10**30, 100, 100), (None, 100, 100), (10**30, 0, None), ("x", 7, 7)],
)
def test_a_length_that_means_no_bound_is_the_servers(most: Any, context: int, shown: Any) -> None:
    assert told({"model_max_length": most}, {}, context)["model_max_length"] == shown


def test_no_path_of_a_machine_is_told() -> None:
    config = {"name_or_path": "/home/me/secret", "tokenizer_file": "/a", "auto_map": {"x": "y.py"}}
    assert "secret" not in str(found := told(config)) and not found.keys() & config.keys()


def test_of_several_templates_the_default_one_is_told() -> None:
    assert told({}, {"default": "a", "tool_use": "b"})["chat_template"] == "a"
    assert told({}, {"rag": "b"})["chat_template"] is None


@pytest.mark.parametrize("asked", [True, False, None])
async def test_tokenize_gives_the_texts_of_tokens_if_asked(
    start_gateway: StartGateway, asked: bool | None
) -> None:
    gateway = await start_gateway()
    for prompt in ({"prompt": "one two"}, {"messages": [{"role": "user", "content": "one two"}]}):
        body = {**prompt, "return_token_strs": asked}
        found = (await gateway.http().post(f"{gateway.url}/tokenize", json=body)).json()
        assert found["token_strs"] == (["one ", "two "] if asked else None)
        assert gateway.pipeline.submits[-1].return_token_strs is bool(asked)


async def reset(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/reset_prefix_cache", headers=headers)


async def test_it_is_200_and_empty_when_the_group_has_answered(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    assert (await reset(gateway.url)).status_code == 401
    answer = await reset(gateway.url, authorization="Bearer secret")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_group_that_does_not_answer_is_named(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESET_TIMEOUT", 0.05)
    gateway = await start_gateway()
    gateway.pipeline.resets = [1]  # another than the one that there is
    answer = await reset(gateway.url)
    assert answer.status_code == 503 and "groups [0]" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "reset_unanswered"


CALLING = RequestDefaults(
    RequestParams(), parsers=OutputParsers(tool_parser_name="hermes", template_has_tools=True)
)
MUTE = RequestDefaults(RequestParams(), parsers=NO_PARSERS)
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "thinking": "t", "function_call": {"name": "f"}},
    {"role": "function", "name": "f", "content": "c"},
    {"role": "assistant", "content": "x "},
]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
# Fields that say which ids of a prompt are kept or shown, and are refused by name.
OF_IDS = {"prompt", "truncate_prompt_tokens", "truncation_side", "skip_special_tokens"}
BODIES: list[dict[str, Any]] = [
    {},
    {"messages": HISTORY},
    {"messages": HISTORY, **OPEN},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [FUNCTION]},
    {"functions": [FUNCTION], "function_call": "none"},
    {"functions": [FUNCTION], "function_call": {"name": "f"}},
    {"chat_template": "x", "documents": [{"text": "d"}], "enable_thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True, "x": [1]}},
]


def tokenized(body: dict[str, Any], terms: RequestDefaults = CALLING) -> Call:
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    return tokenize_call(decode(raw, TokenizeRequest, print), "t", terms)


def asked(body: dict[str, Any]) -> Call:
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    [call] = parse_chat(decode(raw, ChatRequest, print), "c", CALLING, "").calls
    return call


def prompt(call: Call) -> tuple[object, ...]:
    return call.chat, call.template_arguments, call.add_special_tokens


def test_every_field_of_which_a_chats_prompt_depends_is_one_of_tokenize() -> None:
    assert PROMPT_FIELDS & set(ChatRequest.__struct_fields__) - OF_IDS <= CHAT_FIELDS
    for name in OF_IDS - {"prompt"}:
        with pytest.raises(ApiError, match=f"^{name} is not supported"):
            tokenized({name: 1})


def test_bodies_here_have_every_field_that_is_shared() -> None:
    assert {name for body in BODIES for name in body} == CHAT_FIELDS - {"model"}


@pytest.mark.parametrize("body", BODIES)
def test_a_chat_is_tokenized_as_it_is_answered(body: dict[str, Any]) -> None:
    call = tokenized(body)
    assert prompt(call) == prompt(asked(body))
    assert call.only_encode and call.return_prompt_ids


@pytest.mark.parametrize("body", [{"tools": [TOOL]}, {"functions": [FUNCTION]}])
def test_tools_are_counted_where_nobody_would_read_calls(body: dict[str, Any]) -> None:
    assert tokenized(body, MUTE).template_arguments == {"tools": [TOOL]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions[1].name"),
        ({"functions": [FUNCTION], "tools": [TOOL]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_a_chat_refuses_is_refused_here_by_the_same_name(
    body: dict[str, Any], param: str
) -> None:
    for ask in (tokenized, asked):
        with pytest.raises(ApiError) as caught:
            ask(body)
        assert caught.value.param == param


MESSAGES: list[dict[str, Any]] = [
    {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x "}]},
    {"chat_template_kwargs": {"x": 1}},
]


@pytest.mark.parametrize("body", MESSAGES)
def test_messages_are_counted_as_they_are_answered(body: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], **body}
    counted = decode(json.dumps(fields).encode(), CountRequest, print)
    answered = decode(json.dumps({"max_tokens": 1, **fields}).encode(), MessagesRequest, print)
    [call] = parse_chat(to_chat(answered, True), "c", CALLING, "").calls
    assert prompt(chat_prompt_call(to_prompt_chat(counted), "t", CALLING)) == prompt(call)
