"""Bodies of requests: what is taken, what becomes of it, and which error names which field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.gateway.anthropic import MessagesRequest
from pipeinfer.gateway.errors import IGNORED_FIELDS, REFUSED, ApiError
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.metrics import MAX_LOGGED_NAMES, Metrics
from pipeinfer.gateway.requests import (
    BILLING_HEADER,
    RequestDefaults,
    parse_chat,
    parse_completion,
    sampling_defaults,
    without_billing_header,
)
from pipeinfer.gateway.responses_api import ResponsesRequest
from pipeinfer.gateway.schema import Body, ChatRequest, CompletionRequest, TokenizeRequest
from pipeinfer.gateway.serving import MAX_OBJECTS, BodyType, decode, prescanned
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.messages import Submit
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import AddedId
from pipeinfer.wire import pack

DEFAULTS = RequestParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, max_tokens=None)
HELLO = [{"role": "user", "content": "hello"}]


TERMS = RequestDefaults(DEFAULTS, max_prompts=4)


def read(body: bytes, kind: type[BodyType]) -> BodyType:
    """What the HTTP side does with a body."""
    for _ in prescanned(body, kind):
        pass
    return decode(body, kind, lambda names: None)


def chat(**fields: object) -> list[Call]:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    return list(parse_chat(read(body, ChatRequest), "id", TERMS, "").calls)


def completion(**fields: object) -> list[Call]:
    body = json.dumps({"prompt": "hello", **fields}).encode()
    job = parse_completion(read(body, CompletionRequest), "id", TERMS, "")
    calls = list(job.calls)
    assert len(calls) == job.choices
    return calls


def refused(make: object, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)  # type: ignore[operator]
    assert caught.value.status == 400
    return caught.value


def test_checkpoint_defaults_fill_what_the_client_leaves_open() -> None:
    params = chat()[0].params
    assert params == DEFAULTS
    params = chat(temperature=0, top_p=None, top_k=-1, min_p=0.0)[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.9, 0, 0.0)


def test_every_supported_parameter_reaches_the_call() -> None:
    [call] = chat(
        stop="a", stop_token_ids=[7], seed=5, max_tokens=9, min_tokens=2, ignore_eos=True,
        skip_special_tokens=False, include_stop_str_in_output=True, priority=-3, timeout=1.5,
        cache_salt="salt", chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False, add_special_tokens=True, repetition_penalty=1.1,
        presence_penalty=-2, frequency_penalty=0.5, logit_bias={"7": 100, "0": -0.5},
    )  # fmt: skip
    assert call.params == RequestParams(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, stop=("a",), stop_token_ids=(7,), seed=5,
        max_tokens=9, min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, repetition_penalty=1.1, presence_penalty=-2.0,
        frequency_penalty=0.5, logit_bias={7: 100.0, 0: -0.5},
    )  # fmt: skip
    assert (call.priority, call.timeout, call.cache_salt) == (-3, 1.5, "salt")
    assert call.template_arguments == {"enable_thinking": False, "add_generation_prompt": False}
    assert call.add_special_tokens and call.chat == HELLO


def test_fields_that_concern_the_template_are_given_to_it() -> None:
    [call] = chat(
        enable_thinking=True, reasoning_effort="high", documents=[{"title": "a"}],
        chat_template="x", continue_final_message=True, add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False, "more": 1},
    )  # fmt: skip
    assert call.template_arguments == {
        "enable_thinking": False, "reasoning_effort": "high", "documents": [{"title": "a"}],
        "chat_template": "x", "continue_final_message": True, "add_generation_prompt": False,
        "more": 1,
    }  # fmt: skip
    assert chat(continue_final_message=False)[0].template_arguments == {}
    least = {"enable_thinking": False, "reasoning_effort": "none"}
    assert chat(reasoning_effort="none")[0].template_arguments == least
    asked = chat(reasoning_effort="none", enable_thinking=True)[0].template_arguments
    assert asked == {"enable_thinking": True, "reasoning_effort": "none"}
    assert refused(chat, documents=[{"a": 2**70}]).param in ("documents", "chat_template_kwargs")


def test_max_new_tokens_is_another_name_of_max_tokens() -> None:
    for make in (chat, completion):
        assert make(max_new_tokens=5)[0].params.max_tokens == 5
        assert make(max_new_tokens=5, max_tokens=6)[0].params.max_tokens == 6
        assert refused(make, max_new_tokens=-1).param == "max_new_tokens"
    assert chat(max_new_tokens=5, max_completion_tokens=7)[0].params.max_tokens == 7


def test_the_end_of_a_prompt_may_be_all_that_is_wanted_of_it() -> None:
    for make in (chat, completion):
        for kept in (1, -1, 2**31 - 1):
            assert make(truncate_prompt_tokens=kept)[0].params.truncate_prompt_tokens == kept
        for wrong in (0, -2):
            assert refused(make, truncate_prompt_tokens=wrong).param == "truncate_prompt_tokens"
        for side in ("left", "right"):
            assert make(truncation_side=side)[0].params.truncation_side == side
        assert refused(make, truncation_side="middle").param == "truncation_side"


def test_every_pair_of_salt_and_extra_key_has_a_prefix_cache_of_its_own() -> None:
    texts = ("", "a", "b", "ab", "1:a", "\0", "\x001:ab", "\x000:a")
    for make in (chat, completion):
        salts = {
            make(cache_salt=salt, extra_key=extra)[0].cache_salt
            for salt in texts
            for extra in texts
        }
        assert len(salts) == len(texts) ** 2
        assert make(cache_salt="a")[0].cache_salt == "a"
        assert make(cache_salt="a", extra_key="")[0].cache_salt == "a"
        assert make()[0].cache_salt == make(extra_key=None)[0].cache_salt == ""
        assert refused(make, extra_key="x" * 1025).param == "extra_key"


def test_thoughts_of_a_message_are_understood_by_both_of_their_names() -> None:
    said = {"role": "assistant", "content": "b"}
    for fields in (
        {"reasoning": "t"},
        {"reasoning_content": "t"},
        {"reasoning": "u", "reasoning_content": "t"},
    ):
        [call] = chat(messages=[*HELLO, {**said, **fields}])
        assert call.chat == [*HELLO, {**said, "reasoning_content": "t"}]
    [call] = chat(messages=[*HELLO, {**said, "phase": "commentary"}])
    assert call.chat == [*HELLO, {**said, "phase": "commentary"}]


def test_max_tokens_defaults_to_all_that_fits_in_a_chat_and_16_otherwise() -> None:
    assert chat()[0].params.max_tokens is None
    assert chat(max_tokens=3)[0].params.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4)[0].params.max_tokens == 4
    assert completion()[0].params.max_tokens == 16
    assert completion(max_tokens=None)[0].params.max_tokens == 16


def test_templates_add_special_tokens_to_chats_and_the_tokenizer_to_texts() -> None:
    assert not chat()[0].add_special_tokens
    assert completion()[0].add_special_tokens
    assert not completion(add_special_tokens=False)[0].add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [
        ("a", [("id", "a", None)]),
        ([1, 2], [("id", None, [1, 2])]),
        (["a"], [("id", "a", None)]),
        (["a", "b"], [("id-0", "a", None), ("id-1", "b", None)]),
        ([[1], [2, 3]], [("id-0", None, [1]), ("id-1", None, [2, 3])]),
    ],
)
def test_each_prompt_makes_one_call(prompt: object, calls: list[tuple[object, ...]]) -> None:
    expected = [(name, text, None if ids is None else pack(ids)) for name, text, ids in calls]
    assert [(c.request_id, c.text, c.prompt_ids) for c in completion(prompt=prompt)] == (expected)


def test_parts_of_a_content_and_null_beside_calls_stay_what_they_are() -> None:
    """How they are shown is the template's business."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tool = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    [call] = chat(
        messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts},
                  tool, {"role": "tool", "content": "4", "tool_call_id": "1"}]
    )  # fmt: skip
    assert call.chat == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]


WRONG_CHAT_FIELDS: list[tuple[dict[str, object], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": 100.5}, "temperature"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": ["x", "x" * 312_000]}, "stop"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias"),
    ({"logit_bias": {"7": -101}}, "logit_bias"),
    ({"logit_bias": {"7": "1"}}, "logit_bias"),
    ({"logit_bias": {"7": None}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"7.5": 1}}, "logit_bias"),
    ({"logit_bias": {"seven": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"logit_bias": [7]}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 86_400.5}, "timeout"),
    ({"messages": HELLO * 10_001}, "messages"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"chat_template_kwargs": {"n": 2**70}}, "chat_template_kwargs"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"n": 2**70}]}]}, "messages"),
]  # fmt: skip


def test_a_wrong_chat_field_is_named() -> None:
    for fields, param in WRONG_CHAT_FIELDS:
        error = refused(chat, **fields)
        assert error.param == param, fields
        assert param.split("[")[0].replace("_", " ") in error.message.replace("_", " ")
        assert len(error.body()) < 3000


def test_the_largest_allowed_values_pass() -> None:
    [call] = chat(
        messages=HELLO * 10_000, temperature=100, repetition_penalty=0.01, top_k=2**31 - 1,
        max_tokens=2**31 - 1, min_tokens=2**31 - 1, stop=["é" * 1024] * 16, timeout=86_400,
        stop_token_ids=[2**31 - 1] * 1024,
        logit_bias={str(2**31 - 1 - n): 100 * (-1) ** n for n in range(1024)},
    )  # fmt: skip
    assert call.chat is not None and len(call.chat) == 10_000
    assert call.timeout == 86_400


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_biases_are_as_none_given(nothing: object) -> None:
    assert chat(logit_bias=nothing)[0].params == DEFAULTS


def test_an_assistant_that_called_a_function_need_not_say_anything() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}
    [call] = chat(messages=[{"role": "user", "content": "a"}, called])
    assert call.chat is not None and call.chat[1]["content"] is None


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_what_a_model_refused_to_say_is_text(role: str) -> None:
    refused = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    [call] = chat(messages=[{"role": role, "content": refused}])
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert call.chat == [{"role": role, "content": texts}]
    [call] = chat(messages=[{"role": role, "content": None, "refusal": "no"}])
    assert call.chat == [{"role": role, "content": "no"}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_messages_have_three_names(name: str) -> None:
    [call] = chat(messages=[{"role": "assistant", "content": "a", name: "r"}])
    assert call.chat == [{"role": "assistant", "content": "a", "reasoning_content": "r"}]


def test_top_p_0_leaves_the_best_token_alone() -> None:
    assert 0 < chat(top_p=0)[0].params.top_p < 1e-30


def test_a_timeout_of_0_is_refused_in_words_of_its_own() -> None:
    error = refused(chat, timeout=0)
    assert error.param == "timeout" and "leave it out" in error.message


def test_a_number_that_no_float_holds_is_no_bias() -> None:
    with pytest.raises(ApiError) as caught:
        read(b'{"prompt": "a", "logit_bias": {"7": 1e999}}', CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


def test_the_number_of_prompts_is_bounded_before_any_is_made() -> None:
    most = TERMS.max_prompts
    assert len(completion(prompt=["a"] * most)) == most
    for prompt in (["a"] * (most + 1), [[1]] * (most + 1)):
        error = refused(completion, prompt=prompt)
        assert error.param == "prompt" and "at most 4 prompts" in error.message
    assert len(completion(prompt=[1] * 1000)) == 1, "ids are one prompt"


def test_a_call_is_built_when_its_turn_comes() -> None:
    body = read(b'{"prompt": ["a", "b", "c"]}', CompletionRequest)
    job = parse_completion(body, "id", TERMS, "")
    assert job.choices == 3
    calls = iter(job.calls)
    assert (next(calls).text, next(calls).text) == ("a", "b")


def test_a_request_without_a_timeout_gets_the_servers() -> None:
    def timeout(terms: RequestDefaults, **fields: object) -> float:
        body = read(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)
        [call] = parse_completion(body, "id", terms, "").calls
        return call.timeout

    assert timeout(RequestDefaults(DEFAULTS, timeout=60.0)) == 60.0
    assert timeout(RequestDefaults(DEFAULTS, timeout=60.0), timeout=90) == 90.0
    assert timeout(RequestDefaults(DEFAULTS, timeout=0.0)) == 0.0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt"),
        (["a", [1]], "prompt"),
        ([-1], "prompt[0]"),
        ([[1, 2**31]], "prompt[0][1]"),
        (5, "prompt"),
        (None, "prompt"),
        ([1.5], "prompt[0]"),
    ],
)
def test_a_wrong_prompt_is_named(prompt: object, param: str) -> None:
    error = refused(completion, prompt=prompt)
    assert error.param is not None
    assert error.param.replace("[...]", "[0]") in (param, param.replace("[1]", "[0]"))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        read(b"{}", ChatRequest)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b'{"messages": [}',
        b"\xff",
        b'{"model": "\xff"}',
        b'{"messages": []}x',
    ],
    ids=range(7),
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(body, ChatRequest)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


def nested(levels: int) -> bytes:
    """A chat whose template arguments make it that deep in all."""
    inner = b"[" * (levels - 2) + b"]" * (levels - 2)
    return b'{"messages": [%s], "chat_template_kwargs": {"a": %s}}' % (
        b'{"role": "user", "content": "hello"}', inner,
    )  # fmt: skip


def test_nesting_is_bounded_before_anything_is_built() -> None:
    assert parse_chat(read(nested(64), ChatRequest), "id", TERMS, "").choices == 1
    for levels in (65, 978, 980, 100_000):
        with pytest.raises(ApiError, match="nested deeper than 64") as caught:
            read(nested(levels), ChatRequest)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [], "chat_template_kwargs": {"a": ' + b"[" * 100_000,
        b'{"messages": [{"role": "assistant", "tool_calls": [{"a": ' + b'{"a":' * 70,
        b'{"tools": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"whatever": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"chat_template_kwargs": {"a": [' + b"1," * 100_000 + b"1]}}",
        b'{"chat_template_kwargs": {"a": [' + b"{}," * 50_000 + b"{}]}}",
    ],
    ids=range(6),
)
def test_what_is_too_deep_or_too_much_is_refused_wherever_it_stands(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"nested deeper|more than 100000") as caught:
        read(body, ChatRequest)
    assert caught.value.status == 400


def test_a_million_values_are_the_most_of_a_completion() -> None:
    def ids(count: int) -> bytes:
        return b'{"prompt": [' + b"7," * (count - 1) + b"7]}"

    [call] = parse_completion(read(ids(999_998), CompletionRequest), "id", TERMS, "").calls
    assert call.prompt_ids == pack([7]) * 999_998
    with pytest.raises(ApiError, match="more than 1000000 values"):
        read(ids(999_999), CompletionRequest)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"1", b"[" * 100_000], ids=range(5))
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(body, ChatRequest)
    assert caught.value.status == 400


def test_what_is_not_built_is_refused_by_name_but_its_neutral_value_passes() -> None:
    bodies: dict[type[Body], dict[str, object]] = {
        ChatRequest: {"messages": HELLO}, CompletionRequest: {"prompt": "hello"},
        ResponsesRequest: {"input": "hello"}, MessagesRequest: {"messages": HELLO, "max_tokens": 1},
    }  # fmt: skip
    for name in REFUSED:
        lacking = [kind for kind in bodies if name not in kind.__struct_fields__]
        assert lacking, f"{name}: a field that all bodies have is refused nowhere"
        for kind in lacking:
            for neutral in (None, *REFUSED[name]):
                assert read(json.dumps({**bodies[kind], name: neutral}).encode(), kind), name
            for asked in (3, ["x" * 100] * 100, {"a": [1]}):
                body = json.dumps({**bodies[kind], name: asked}).encode()
                error = refused(read, body=body, kind=kind)
                assert error.param == name and "not supported" in error.message


def test_a_number_that_no_float_holds_is_refused_where_nothing_is_built() -> None:
    with pytest.raises(ApiError, match="best_of is not supported"):
        read(b'{"messages": [{"role": "user", "content": "a"}], "best_of": 1e999}', ChatRequest)


def test_bytes_that_are_no_text_are_refused_where_nothing_is_built() -> None:
    with pytest.raises(ApiError, match="raw is not supported"):
        read(b'{"messages": [{"role": "user", "content": "a"}], "raw": "\xff\xfe"}', ChatRequest)


def test_asking_for_zero_log_probs_is_not_the_same_as_asking_for_none() -> None:
    assert completion(logprobs=False)[0].params.logprobs is None
    assert completion(logprobs=0)[0].params.logprobs == 0
    assert chat(logprobs=False)[0].params.logprobs is None
    assert chat(logprobs=True)[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20)[0].params.logprobs == 20
    assert chat(top_logprobs=0)[0].params.logprobs is None
    assert chat(prompt_logprobs=0)[0].params.prompt_logprobs == 0


def test_log_probs_that_cannot_be_had_are_refused_by_name() -> None:
    for fields in ({"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}):
        error = refused(chat, **fields)
        assert error.param == "top_logprobs" and "only allowed with logprobs" in error.message
    for most in (21, -1):
        assert refused(chat, logprobs=True, top_logprobs=most).param == "top_logprobs"
        assert refused(chat, prompt_logprobs=most).param == "prompt_logprobs"
        assert refused(completion, logprobs=most).param == "logprobs"
        assert f"from 0 to 20, not {most}" in refused(completion, logprobs=most).message
    assert refused(chat, logprobs=5).param == "logprobs"
    assert refused(completion, logprobs=True).param == "logprobs"
    assert refused(completion, top_logprobs=2).code == "unsupported_parameter"
    assert refused(chat, echo=True).code == "unsupported_parameter"
    assert refused(completion, prompt_logprobs=2, stream=True).param == "prompt_logprobs"


def test_an_echo_with_log_probs_needs_those_of_the_prompt() -> None:
    [call] = completion(logprobs=3, echo=True)
    assert (call.params.logprobs, call.params.prompt_logprobs) == (3, 3)
    assert call.return_prompt_text
    [call] = completion(logprobs=3, echo=True, prompt_logprobs=7)
    assert (call.params.logprobs, call.params.prompt_logprobs) == (3, 7)
    [call] = completion(echo=True)
    assert (call.params.logprobs, call.params.prompt_logprobs) == (None, None)
    assert not completion(logprobs=3)[0].return_prompt_text


def test_the_one_output_behind_a_prompt_with_log_probs_always_has_a_log_prob() -> None:
    def ignores(**fields: object) -> bool:
        return completion(**fields)[0].params.ignore_eos

    assert ignores(logprobs=1, echo=True, max_tokens=1)
    assert not ignores(logprobs=1, echo=True, max_tokens=2)
    assert not ignores(logprobs=1, max_tokens=1)
    assert not ignores(echo=True, max_tokens=1)


def test_nothing_may_be_asked_for_only_where_the_prompt_is_echoed() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 0, "echo": True}).encode()
    job = parse_completion(read(body, CompletionRequest), "id", TERMS, "")
    assert job.output_options.no_new_tokens
    assert [call.params.max_tokens for call in job.calls] == [1]
    assert refused(completion, max_tokens=0).param == "max_tokens"
    assert refused(completion, max_tokens=-1, echo=True).param == "max_tokens"


def test_harmless_fields_are_ignored_and_those_that_nobody_knows_are_told() -> None:
    told: list[Sequence[str]] = []
    fields = {name: [1] for name in IGNORED_FIELDS} | {"whatever": [1], "prompt": "a", "n": 1}
    assert decode(json.dumps(fields).encode(), CompletionRequest, told.append)
    assert told == [["whatever"]]
    assert not IGNORED_FIELDS & REFUSED.keys()


WITHIN: list[tuple[type[Body], dict[str, Any], list[str]]] = [
    (
        ChatRequest,
        {"messages": [
            {"role": "user", "contents": "b", "content": [{"type": "text", "text": "a", "txt": 1}]},
            {"role": "assistant", "content": "a", "reasonings": "c", "contents": "b", "odd": None},
        ]},
        ["messages.contents", "messages.content.txt", "messages.reasonings", "messages.contents"],
    ),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"}],
         "tools": [{"type": "function",
                    "function": {"name": "f", "schema": {}, "parameters": {"x": 1}}}],
         "stream": True, "stream_options": {"usage": True, "include_use": True}},
        ["tools.function.schema", "stream_options.include_use"],
    ),
    (
        ResponsesRequest,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "txt": 1}]},
                   {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x",
                    "odd": 1}]},
        ["input.content.txt", "input.odd"],
    ),
    (
        MessagesRequest,
        {"max_tokens": 1, "messages": [{"role": "user", "odd": 1, "content": [
            {"type": "text", "text": "a", "cache_control": {}},
            {"type": "tool_result", "tool_use_id": "c", "content": [
                {"type": "text", "text": "", "z": 1}]},
        ]}]},
        ["messages.odd", "messages.content.content.z"],
    ),
    (TokenizeRequest, {"messages": [{"role": "user", "content": "a", "odd": 1}]}, ["messages.odd"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "names"), WITHIN)
def test_fields_within_a_body_that_nobody_knows_are_told(
    kind: type[Body], body: dict[str, Any], names: list[str]
) -> None:
    told: list[str] = []
    assert decode(json.dumps(body).encode(), kind, told.extend)
    assert sorted(told) == sorted(names)


def test_what_an_answers_message_says_may_be_sent_back_without_a_word() -> None:
    message = {
        "role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [{"id": "1", "function": {"name": "f", "odd": 1}}],
        "reasoning_content": "r",
    }  # fmt: skip
    told: list[str] = []
    assert decode(json.dumps({"messages": [message]}).encode(), ChatRequest, told.extend)
    assert not told


def test_of_many_objects_within_a_body_the_first_are_looked_at() -> None:
    messages = [{"role": "user", "content": "a", "odd": 1}] * (MAX_OBJECTS + 10)
    told: list[str] = []
    assert decode(json.dumps({"messages": messages}).encode(), ChatRequest, told.extend)
    assert len(told) == MAX_OBJECTS


def test_unknown_fields_are_counted_and_logged_once_by_name(caplog) -> None:
    metrics = Metrics(Health((), 5.0))
    for _ in range(3):
        metrics.count_unknown_fields(["temprature", "x" * 1000])
    metrics.count_unknown_fields([f"name{n}" for n in range(1000)])
    assert metrics.registry.get_sample_value("pipeinfer_unknown_fields_total") == 1006
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == MAX_LOGGED_NAMES and sum("temprature" in one for one in said) == 1
    assert max(map(len, said)) < 150


def test_a_call_has_every_field_of_a_submit_that_a_client_decides() -> None:
    decided = set(Submit.__struct_fields__) - {
        "attempt", "gateway", "detokenizer", "seed", "group",
    }  # fmt: skip
    assert set(Call.__struct_fields__) == decided - {"choices"}, "these are all of params.n"


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(tmp_path) == RequestParams(max_tokens=None)
    file = tmp_path / "generation_config.json"
    file.write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,'
        ' "repetition_penalty": 1.05}'
    )
    assert sampling_defaults(tmp_path) == RequestParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=None
    )
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigurationError, match="top_p"):
        sampling_defaults(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigurationError, match="generation_config"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_are_kept_where_thoughts_are_told_by_them(special: bool) -> None:
    tags = {"[THINK]": AddedId(5, special), "[/THINK]": AddedId(6, special)}
    terms = RequestDefaults(
        DEFAULTS, parsers=OutputParsers(reasoning_parser_name="mistral", added_tokens=tags)
    )
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    [call] = parse_chat(read(body, ChatRequest), "id", terms, "").calls
    assert call.params.skip_special_tokens == (not special)


LINE = f"{BILLING_HEADER} cc_version=2.1; cch=7adab;"
USER = {"role": "user", "content": "Hello"}


def system(content):
    return {"role": "system", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{LINE}\nBe short.", "Be short."),
        (f"{LINE}\n\nBe short.\n\nOr not.", "Be short.\n\nOr not."),
        (parts(LINE, "Be short."), parts("Be short.")),
        (parts("Be short.", f"{LINE}\nOr not."), parts("Be short.", "Or not.")),
        ("Be short.", "Be short."),
        (f"Quote: {LINE}", f"Quote: {LINE}"),
        (parts("a", ""), parts("a", "")),
    ],
)
def test_the_line_goes_and_the_rest_stays(content, left) -> None:
    assert without_billing_header([system(content), USER]) == [system(left), USER]


def test_a_message_of_nothing_else_goes_unless_it_is_all_there_is() -> None:
    assert without_billing_header([system(LINE), USER]) == [USER]
    assert without_billing_header([system(parts(LINE)), USER]) == [USER]
    assert without_billing_header([system(LINE)]) == [system(LINE)]


def test_what_others_say_is_theirs() -> None:
    said = [{"role": role, "content": LINE} for role in ("user", "assistant", "tool")]
    assert without_billing_header(said) == said
