"""What is wrong is refused by the name of the field that is wrong, in the API's own form, and
harms nobody."""

from __future__ import annotations

import re

import pytest
from asked import CONTEXT, NAMED, ONE, TOOL, USER, VOCABULARY, system, user

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RIGHT = {
    CHAT: {"messages": USER},
    COMPLETION: {"prompt": "3 4 5"},
    RESPONSES: {"input": "Count from 3 to 9."},
    MESSAGES: {"messages": USER, "max_tokens": 4},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/messages/count_tokens": {"messages": USER},
}
BEYOND = VOCABULARY
UNKNOWN_REF = {"type": "object", "properties": {"foo": "bar"}}
UNKNOWN_TYPE = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "unknown"}}},
    },
}
NO_GBNF = 'root ::= statementwithouta\nstatement ::= "a"'

# Of chats and completions: the fields, and the parameter that the error names.
GENERATION = [
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": "2"}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": None}}, "stream_options"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"stream": True, "stream_options": "usage"}, "stream_options"),
    ({"structured_outputs": {"regex": {"1": "Python"}}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]}, "structured_outputs"),
    ({"structured_outputs": {"json": UNKNOWN_REF}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": NO_GBNF}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
     "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "value": ONE}}, "response_format.value"),
    ({"response_format": {"type": "json_schema", "schema": ONE, "json_schema": {"schema": ONE}}},
     "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"json_schema": "INVALID"}, "json_schema"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 100_000_000, "max_tokens": 1}, "n"),
    ({"logit_bias": {str(BEYOND): 1}}, "logit_bias"),
    ({"logit_bias": {"no_id": 50}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 0.6}, "thinking_token_budget"),
    ({"thinking_token_budget": 10}, "thinking_token_budget"),  # the model does not think
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"stop_regex": "and|or"}, "stop_regex"),
    ({"lora_path": "x"}, "lora_path"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"token_ids_logprob": [1, 2]}, "token_ids_logprob"),
    ({"session_params": {"id": "s"}}, "session_params"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    ({"max_new_tokens": 2**40}, "max_new_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [BEYOND]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [BEYOND]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"timeout": -1}, "timeout"),
    ({"priority": 1.5}, "priority"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
]  # fmt: skip
OF_CHATS = [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21, "stream": True}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"separate_reasoning": False}, "separate_reasoning"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [*USER, {"role": "my-custom-role", "content": "a"}]}, "messages[1].role"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [user(3)]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": []}]},
     "messages[1].content"),
    ({"messages": [user([{"text": "a"}])]}, "messages[0].content[0].type"),
    ({"messages": [user(["a"])]}, "messages[0].content[0]"),
    ({"messages": [user([{"type": "image_url", "image_url": {"url": "https://a/b"}}])]},
     "messages[0].content[0].type"),
    ({"messages": [system([{"type": "input_audio", "input_audio": {}}])]},
     "messages[0].content[0].type"),
    ({"messages": [user("a" * 3000)]}, "messages"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
     "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 123}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": "abc"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"description": "a"}}]},
     "tools[0].function.name"),
    ({"tools": [UNKNOWN_TYPE], "tool_choice": "required"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
     "tools[0].function.parameters"),
]  # fmt: skip
OF_COMPLETIONS = [
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 30, "stream": True}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": "2"}, "logprobs"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[5], [-1]]}, "prompt[1][0]"),
    ({"prompt": [999_999]}, "prompt"),
    ({"prompt": [BEYOND]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": [[[5]]]}, "prompt[0][0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "a" * 3000}, "prompt"),
    ({"prompt": [97] * CONTEXT}, "prompt"),
    ({"prompt": None, "prompt_embeds": []}, "prompt_embeds"),
    ({"suffix": "b"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"messages": USER}, "messages"),
    ({"tools": [TOOL]}, "tools"),
]
OF_RESPONSES = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [user([{"type": "input_image", "image_url": "http://a"}])]},
     "input[0].content[0].type"),
    ({"input": "a" * 3000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": CONTEXT}, "max_output_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
    ({"previous_input_messages": USER}, "previous_input_messages"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"background": 1}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"enable_response_messages": True}, "enable_response_messages"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"seed": 2**64}, "seed"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
    ({"tools": "abc"}, "tools"),
    ({"tools": [None]}, "tools[0]"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
     "structured_outputs"),
]  # fmt: skip
OF_MESSAGES = [
    {"max_tokens": -1}, {"max_tokens": 0}, {"max_tokens": None}, {"messages": []},
    {"messages": "hi"}, {"temperature": -1}, {"stop_sequences": "a"}, {"stream": "yes"},
    {"thinking": {"type": "something-new"}},
    {"thinking": {"type": "enabled", "budget_tokens": -1}}, {"tool_choice": {"type": "any"}},
    {"tools": [{"name": "f", "input_schema": ONE}], "tool_choice": {"type": "tool", "name": "g"}},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"mcp_servers": [{"type": "url"}]}, {"container": {"id": "c"}},
    {"messages": [user([{"type": "image", "source": {"type": "base64", "data": "ab"}}])]},
    {"messages": [system([{"type": "tool_addition", "tool": {}}]), *USER]},
    {"messages": [*USER, {"role": "assistant", "content": []}]},
]  # fmt: skip
OF_TOKENIZE = [
    ({"prompt": None}, "prompt"),
    ({"messages": USER}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": None, "messages": []}, "messages"),
    ({"prompt": None, "messages": USER, "continue_final_message": True}, "continue_final_message"),
]
OF_DETOKENIZE = [
    ({"tokens": [-1]}, "tokens[0]"),
    ({"tokens": [2**40]}, "tokens[0]"),
    ({"tokens": [999_999]}, "tokens"),
    ({"tokens": [[1]]}, "tokens[0]"),
    ({"tokens": ["a"]}, "tokens[0]"),
    ({"tokens": None}, "tokens"),
]
TABLES = {
    CHAT: GENERATION + OF_CHATS,
    COMPLETION: GENERATION + OF_COMPLETIONS,
    RESPONSES: OF_RESPONSES,
    "/tokenize": OF_TOKENIZE,
    "/detokenize": OF_DETOKENIZE,
}
INNARDS = re.compile(r"0x[0-9a-f]{6}|site-packages|\.py\b|/src/|Traceback|object at|msgspec")


@pytest.mark.parametrize("path", TABLES)
def test_the_wrong_field_is_named(http, path):
    for fields, param in TABLES[path]:
        status, answer = http.post(path, {**RIGHT[path], **fields})
        assert status == 400, (fields, answer)
        error = answer["error"]
        assert error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and not INNARDS.search(error["message"]), (fields, error)
    http.ask(path, RIGHT[path])


def test_errors_of_messages_have_anthropics_form(http):
    for fields in OF_MESSAGES:
        status, answer = http.post(MESSAGES, {**RIGHT[MESSAGES], **fields})
        assert status == 400, (fields, answer)
        assert answer["type"] == "error", fields
        assert answer["error"]["type"] == "invalid_request_error", fields
        assert answer["error"]["message"], fields
    http.ask(MESSAGES, RIGHT[MESSAGES])


def test_a_stream_that_cannot_begin_is_a_plain_error(http):
    long = {
        CHAT: {"messages": [user("a" * 3000)]},
        COMPLETION: {"prompt": "a" * 3000},
        RESPONSES: {"input": "a" * 3000},
        MESSAGES: {"messages": [user("a" * 3000)], "max_tokens": 4},
    }
    for path, body in long.items():
        for stream in (True, False):
            status, answer = http.post(path, {**body, "stream": stream})
            assert status == 400 and str(CONTEXT) in answer["error"]["message"], path


@pytest.mark.parametrize("path", RIGHT)
def test_bodies_that_are_no_object_and_other_models_are_refused(http, path):
    for raw in (b"this is not {{{", b'["a"]', b"42", b"null", b"true", b'"a"', b"", b"{}"):
        status, _ = http.post(path, raw=raw)
        assert status == 400, raw
    status, answer = http.post(path, RIGHT[path], content_type="text/plain")
    assert status == 415, answer
    form = "application/x-www-form-urlencoded"
    assert http.post(path, raw=b"a=b", content_type=form)[0] == 415
    status, answer = http.post(path, {**RIGHT[path], "model": "another"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


def test_an_error_is_short_however_long_what_is_wrong_is(http):
    wrong = [
        {"messages": [user([{"type": "t" * 10_000}])]},
        {"messages": [user([{"text": 1} for _ in range(500)])]},
        {"messages": USER, "max_tokens": "A" * 100_000},
        {"messages": USER, "x" * 10_000: 1, "suffix": "y" * 10_000},
        {"messages": USER, "structured_outputs": {"regex": "(" * 10_000}},
    ]
    for body in wrong:
        status, answer = http.post(CHAT, body)
        assert status == 400
        assert len(answer["error"]["message"]) < 2_000, answer
