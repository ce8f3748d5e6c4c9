"""Tokens and texts, and all that is asked of a server beside answers."""

from __future__ import annotations

import re

import pytest
from asked import CONTEXT, MODEL, ONE, USER, said, user

# Endpoints of vLLM and SGLang that are not built here.
ELSEWHERE = [
    "/generate", "/get_model_info", "/get_server_info", "/server_info", "/health_generate",
    "/flush_cache", "/abort_request", "/v1/loads", "/load", "/invocations",
    "/inference/v1/generate", "/v1/chat/completions/batch", "/v1/chat/completions/render",
    "/pooling", "/encode", "/v2/rerank", "/classify", "/v1/audio/transcriptions",
    "/pause_generation", "/open_session",
    "/collective_rpc", "/load_lora_adapter", "/start_profile", "/v1/tokenize",
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": ONE}}


def test_texts_become_ids_and_ids_texts(http):
    for text in ("This is a test prompt. vllm1", "🚀 ünï", "", " ", "\n", "<|im_end|>"):
        for more in ({}, {"add_special_tokens": False}, {"return_token_strs": False}):
            found = http.ask("/tokenize", {"prompt": text, "model": MODEL, **more})
            assert found["count"] == len(found["tokens"])
            assert found["max_model_len"] == CONTEXT
            back = http.ask("/detokenize", {"tokens": found["tokens"], "model": MODEL})
            assert back == {"prompt": text}
    assert http.ask("/tokenize", {"prompt": ""})["tokens"] == []
    shown = http.ask("/detokenize", {"tokens": [258, 84], "skip_special_tokens": True})
    assert shown == {"prompt": "T"}


def test_chats_become_the_ids_that_their_answers_count(http):
    hello = [user("Hi there!"), said("Nice to meet you!"), user("Can I ask? vllm1")]
    for tools in ({}, {"tools": [TOOL]}):
        for more in (
            {},
            {"add_generation_prompt": False},
            {"add_special_tokens": True},
            {"messages": [*hello, said("Sure,")], "continue_final_message": True,
             "add_generation_prompt": False},
        ):  # fmt: skip
            chat = {"messages": hello, **tools, **more}
            found = http.ask("/tokenize", chat)
            asked = {**chat, "max_tokens": 1, "return_token_ids": True}
            answer = http.ask("/v1/chat/completions", asked)
            assert answer["prompt_token_ids"] == found["tokens"]
            assert answer["usage"]["prompt_tokens"] == found["count"]
    short, long = (http.ask("/tokenize", {"messages": hello, **t})["count"] for t in ({}, tools))
    assert short < long
    opened = http.ask("/tokenize", {"messages": hello, "add_generation_prompt": False})
    assert opened["count"] < short


def test_what_is_too_long_for_the_context_is_counted_all_the_same(http):
    assert http.ask("/tokenize", {"prompt": "a" * 5_000})["count"] == 5_000
    assert http.ask("/tokenize", {"messages": [user("a" * 5_000)]})["count"] > 5_000
    assert len(http.ask("/detokenize", {"tokens": [97] * 5_000})["prompt"]) == 5_000
    status, answer = http.post("/tokenize", {"prompt": "a" * 1_000_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), "there is a bound"


def test_the_model_is_shown(http, api):
    (model,) = api.models.list().data
    assert (model.id, model.object, model.root) == (MODEL, "model", MODEL)
    assert (model.max_model_len, model.parent) == (CONTEXT, None)
    assert api.models.retrieve(MODEL) == model
    status, answer = http.get("/v1/models/another")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert http.ask("/v1/chat/completions", {"model": "", "messages": USER})["model"] == MODEL


def test_the_server_says_how_it_is(http):
    assert set(http.get("/version")[1]) == {"version"}
    assert http.get("/ping")[0] == http.post("/ping", {})[0] == 200
    status, health = http.get("/health")
    assert (status, health["status"]) == (200, "ready")
    assert http.get("/health/ready")[0] == http.get("/health/live")[0] == 200
    answer = http.client.get("/health", headers={"x-request-id": "Custom"})
    assert answer.headers["x-request-id"] == "Custom"
    assert len(http.client.get("/health").headers["x-request-id"]) == 32
    assert http.client.post("/reset_prefix_cache").status_code == 200
    assert http.get("/is_sleeping") == (200, {"is_sleeping": False})


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_built_is_said_to_be_missing(http, method):
    for path in ELSEWHERE:
        answer = http.client.request(method, path, json={"text": "a"} if method == "POST" else None)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found"), path
        assert path in error["message"]
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert http.post(path, body)[0] == 501
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        status, answer = http.post(path, {"lora_name": "a", "lora_path": "/a"})
        assert (status, answer["error"]["message"]) == (501, "adapters need --enable-lora")
    assert http.get("/v1/chat/completions")[0] == 405


def test_metrics_count_what_was_asked(http):
    def counted() -> dict[str, float]:
        text = http.client.get("/metrics").text
        lines = re.findall(r"^(pipeinfer_[a-z_]+(?:\{[^}]*\})?) ([0-9.e+]+)$", text, re.M)
        return {name: float(value) for name, value in lines}

    before = counted()
    asked = {"messages": USER, "max_tokens": 5, "temperature": 0}
    usage = http.ask("/v1/chat/completions", asked)["usage"]
    http.post("/v1/chat/completions", {**asked, "n": 0})
    after = counted()
    changed = {name: after[name] - before.get(name, 0) for name in after}
    assert changed['pipeinfer_requests_total{outcome="length"}'] == 1
    assert changed["pipeinfer_generated_tokens_total"] == usage["completion_tokens"]
    assert changed["pipeinfer_prompt_tokens_total"] == usage["prompt_tokens"]


def test_the_api_describes_itself(http):
    described = http.get("/openapi.json")[1]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        post = described["paths"][path]["post"]
        assert "content" in post["requestBody"] and "200" in post["responses"]
    assert "text/event-stream" in str(described["paths"]["/v1/completions"]["post"]["responses"])
