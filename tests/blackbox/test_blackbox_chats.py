"""Chats by OpenAI's client: log-probs, streams, choices, usage, messages, tools, forms of old."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from asked import CONTEXT, COUNTED, END, MODEL, NAMED, ONE, TOOL, USER, said, system, text, user

CHAT = "/v1/chat/completions"
USAGE = {"include_usage": True}
CONTINUOUS = {**USAGE, "continuous_usage_stats": True}


@pytest.fixture
def ask(api):
    def ask(messages=USER, extra=None, **more):
        usual = {"model": MODEL, "temperature": 0, "max_completion_tokens": 10}
        return api.chat.completions.create(messages=messages, extra_body=extra, **(usual | more))

    return ask


def content(answer) -> str:
    return answer.choices[0].message.content


def test_log_probs_come_as_asked_for(ask):
    for asked, most in (({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)):
        assert _most(ask(**asked)) == most
    for top in (0, 5, 20):
        answer = ask(logprobs=True, top_logprobs=top)
        assert _most(answer) == top
        tokens = answer.choices[0].logprobs.content
        assert len(tokens) == answer.usage.completion_tokens
        assert all(top.logprob <= 0 for token in tokens for top in token.top_logprobs)
    assert _most(ask(extra={"logprobs": True, "top_logprobs": None})) == 0, "null is as not given"


def _most(answer) -> int | None:
    """Alternatives of each token."""
    found = answer.choices[0].logprobs
    if found is None:
        return None
    (most,) = {len(token.top_logprobs) for token in found.content}
    return most


def test_log_probs_of_a_prompt_have_so_many_alternatives(ask):
    assert "prompt_logprobs" not in (ask().model_extra or {})
    for most in (0, 1, 2):
        found = ask(extra={"prompt_logprobs": most}).prompt_logprobs
        assert found[0] is None
        for entry in found[1:]:
            assert max(most, 1) <= len(entry) <= most + 1
            for token in entry.values():
                assert token["logprob"] <= 0 < token["rank"]


def test_a_conversation_goes_on_and_its_usage_adds_up(ask):
    first = ask([system("you are a helpful assistant"), *USER], logprobs=True, top_logprobs=5)
    assert first.id and first.created and first.object == "chat.completion"
    (choice,) = first.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == COUNTED[:10]
    assert first.usage.completion_tokens == 10
    assert first.usage.total_tokens == first.usage.prompt_tokens + 10
    second = ask([system("you are a helpful assistant"), *USER, said(COUNTED), *USER])
    assert content(second) == COUNTED[:10]
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


@pytest.mark.parametrize("top", [None, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_streams_say_what_the_whole_answer_says(ask, top, n):
    asked = {"n": n, "temperature": 1, "seed": 3}
    if top is not None:
        asked |= {"logprobs": True, "top_logprobs": top}
    whole = ask(**asked)
    chunks = list(ask(**asked, stream=True, stream_options=USAGE))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].created
    *told, last = chunks
    assert last.choices == [] and last.usage.model_dump() | _cached(0) == (
        whole.usage.model_dump() | _cached(0)
    )
    assert all(chunk.usage is None for chunk in told)
    for index in range(n):
        mine = [c.choices[0] for c in told if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(c.delta.role is None for c in mine[1:])
        ends = [c.finish_reason for c in mine if c.finish_reason]
        assert ends == [whole.choices[index].finish_reason] and mine[-1].finish_reason
        texts = "".join(c.delta.content or "" for c in mine)
        assert texts == whole.choices[index].message.content
        logprobs = [t for c in mine if c.logprobs for t in c.logprobs.content]
        expected = whole.choices[index].logprobs.content if top else []
        assert list(map(_tokens, logprobs)) == list(map(_tokens, expected))
        # Choices are computed together or one after the other, which changes last bits.
        assert _numbers(logprobs) == pytest.approx(_numbers(expected), abs=1e-4)


def _tokens(entry) -> list[str]:
    return [entry.token, *(other.token for other in entry.top_logprobs)]


def _numbers(logprobs) -> list[float]:
    return [one.logprob for entry in logprobs for one in (entry, *entry.top_logprobs)]


def _cached(count: int) -> dict:
    return {"prompt_tokens_details": count}


def test_usage_comes_when_it_is_asked_for(ask):
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        asked = {} if options is None else {"stream_options": options}
        assert all(c.usage is None and c.choices for c in ask(**asked, stream=True))
    before, counts = -1, []
    long = [user("a" * 1_500)]  # several chunks of a prompt
    extra = {"min_tokens": 10}
    asked = {"logprobs": True, "top_logprobs": 5, "stream_options": CONTINUOUS, "extra": extra}
    tokens = 0
    for chunk in ask(long, **asked, stream=True):
        usage = chunk.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens > 1_500
        assert usage.completion_tokens >= before
        before = usage.completion_tokens
        if chunk.choices and chunk.choices[0].logprobs:
            tokens += len(chunk.choices[0].logprobs.content)
        if chunk.choices:
            counts.append(tokens)
            assert usage.completion_tokens == tokens
    assert before == tokens == 10 and len(counts) > 3


def test_choices_are_several_and_differ_where_they_may(ask):
    for n in (1, 2, 5):
        answer = ask(n=n, temperature=2, seed=42, max_completion_tokens=6)
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert len({choice.message.content for choice in answer.choices}) > n // 2
    again = ask(n=5, temperature=2, seed=42, max_completion_tokens=6)
    assert [c.message for c in again.choices] == [c.message for c in answer.choices]
    assert len({choice.message.content for choice in ask(n=3).choices}) == 1, "greedy"
    for seed in (2**63 - 1, -(2**63), 0):
        assert content(ask(seed=seed)) == COUNTED[:10]


def test_a_content_is_the_same_as_text_and_in_parts(http, ask):
    same = [
        [USER[0]],
        [user([text(USER[0]["content"])])],
        [{**USER[0], "name": "somebody"}],
        [{**USER[0], "extra_field": "0"}],
    ]
    assert {content(ask(messages)) for messages in same} == {COUNTED[:10]}
    heard = [
        [system("Be short."), *USER],
        [system([text("Be short.")]), *USER],
        [{"role": "developer", "content": "Be short."}, *USER],
    ]
    tokens = [http.ask("/tokenize", {"messages": messages})["tokens"] for messages in heard]
    assert tokens[0] == tokens[1] == tokens[2]


def test_an_answer_goes_on_from_its_last_message(ask):
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask([*USER, said("3 4 5")], extra=extra, max_completion_tokens=30)
    assert (content(answer), answer.choices[0].finish_reason) == (" 6 7 8 9", "stop")


def test_a_cut_prompt_leaves_room_for_as_many_more_tokens(http, ask):
    every = http.ask("/tokenize", {"messages": USER})["tokens"]
    ends = {"logit_bias": {END: 100}}  # at once, whatever may still come
    for side, kept in (("right", every[:4]), ("left", every[-4:])):
        extra = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        answer = ask(extra=extra, max_completion_tokens=CONTEXT - 4, **ends)
        assert (answer.prompt_token_ids, answer.usage.completion_tokens) == (kept, 1)
    body = {"messages": USER, "max_tokens": CONTEXT - 3, "truncate_prompt_tokens": 4}
    status, answer = http.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    long = {"messages": [user("a" * 3_000)], "truncate_prompt_tokens": -1, **ends}
    assert http.ask(CHAT, {**long, "max_tokens": 50})["usage"]["prompt_tokens"] == CONTEXT - 50
    usage = http.ask(CHAT, long)["usage"]
    assert usage["prompt_tokens"] < CONTEXT and usage["completion_tokens"] == 1
    assert http.ask(CHAT, {**long, "messages": USER})["usage"]["prompt_tokens"] == len(every)


def test_many_without_a_limit_need_no_room_for_their_longest_answers(ask):
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask(max_completion_tokens=None), range(48)))
    assert {content(answer) for answer in answers} == {COUNTED}
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_what_ended_an_answer_is_told(http, path):
    prompt = "<|im_start|>user\nCount from 3 to 9.<|im_end|>\n<|im_start|>assistant\n"
    asked = {"messages": USER} if path == CHAT else {"prompt": prompt}

    def end(**fields):
        body = {**asked, "temperature": 0, "max_tokens": 20, **fields}
        (choice,) = http.ask(path, body)["choices"]
        found = choice["message"]["content"] if path == CHAT else choice["text"]
        return found, choice["finish_reason"], choice["stop_reason"]

    if path != CHAT:
        assert end(stop=["9", "5 6"]) == ("3 4 ", "stop", "5 6")
        assert end(stop_token_ids=[ord("5")]) == ("3 4 ", "stop", ord("5"))
        assert end(max_tokens=5) == ("3 4 5", "length", None)
        return
    assert end() == (COUNTED, "stop", None)
    assert end(max_tokens=5) == ("3 4 5", "length", None)
    assert end(stop="7") == ("3 4 5 6 ", "stop", "7")
    assert end(stop=["9", "5 6"]) == ("3 4 ", "stop", "5 6")
    assert end(stop="7", include_stop_str_in_output=True) == ("3 4 5 6 7", "stop", "7")
    assert end(stop="7", min_tokens=10) == (COUNTED, "stop", None)
    assert end(stop_token_ids=[ord("7")]) == ("3 4 5 6 ", "stop", ord("7"))
    assert end(stop="\n", stop_token_ids=[END])[:2] == (COUNTED, "stop")
    assert end(ignore_eos=True)[1] == "length"
    assert end(ignore_eos=True, max_tokens=14)[0].startswith(COUNTED)
    assert end(min_tokens=20)[1] == "length"


def test_ids_of_tokens_are_those_of_the_texts(http, ask):
    extra = {"return_token_ids": True}
    prompt = [system("You like emojis."), user("I love cats 🐱")]
    whole = ask(prompt, extra=extra, max_completion_tokens=30)
    assert whole.prompt_token_ids == http.ask("/tokenize", {"messages": prompt})["tokens"]
    ids = whole.choices[0].token_ids
    assert http.ask("/detokenize", {"tokens": ids})["prompt"] == content(whole)
    chunks = list(ask(prompt, extra=extra, max_completion_tokens=30, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert all("prompt_token_ids" not in chunk.model_dump() for chunk in chunks[1:])
    told = [(c.choices[0].model_extra or {}).get("token_ids") or [] for c in chunks if c.choices]
    assert [token for tokens in told for token in tokens] == ids
    assert "token_ids" not in ask().choices[0].model_dump()


def test_biases_penalties_and_lists_of_tokens_do_what_they_say(ask):
    assert content(ask(logit_bias={str(ord("z")): 100})) == "z" * 10
    assert content(ask(extra={"allowed_token_ids": [42]})) == "*" * 10
    assert "4" not in content(ask(extra={"bad_words": ["4"]}))
    assert content(ask(presence_penalty=2, frequency_penalty=2)) != COUNTED[:10]
    assert content(ask(extra={"repetition_penalty": 100})) != COUNTED[:10]
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "thinking_token_budget": -1}
    assert content(ask(extra=neutral, presence_penalty=0, frequency_penalty=0)) == COUNTED[:10]


def test_what_changes_nothing_is_taken(ask):
    extra = {
        "metadata": {"a": "b"}, "store": True, "user": "x", "service_tier": "auto",
        "modalities": ["text"], "safety_identifier": "s", "prompt_cache_key": "k", "rid": "r",
        "request_id": "q", "best_of": 1, "echo": False, "separate_reasoning": True,
        "stream_reasoning": False, "use_beam_search": False, "length_penalty": 1.0,
        "spaces_between_special_tokens": True, "return_tokens_as_token_ids": False,
        "no_stop_trim": False, "lora_path": None, "priority": -5, "some_future_field": {"a": 1},
        "tool_choice": "none", "tools": None, "response_format": {"type": "text"},
        "structured_outputs": None, "logit_bias": {}, "stop": None, "seed": None,
        "return_hidden_states": False, "stop_regex": [], "custom_logit_processor": None,
        "session_params": None, "watermarking": False, "data_parallel_rank": 0,
        "return_prompt_token_ids": False, "prompt_cache_retention": "24h",
    }  # fmt: skip
    assert content(ask(extra=extra)) == COUNTED[:10]


def test_whole_numbers_may_be_written_with_a_point(http):
    numbers = {"max_tokens": 10.0, "top_k": 40.0, "seed": 4.0, "n": 1.0, "min_tokens": 2.0}
    found = http.ask(CHAT, {"messages": USER, "temperature": 0, **numbers, "priority": -1.0})
    assert found["choices"][0]["message"]["content"] == COUNTED[:10]
    asked = {"prompt": [51.0, 32.0, 52.0], "max_tokens": 1.0, "logprobs": 2.0}
    found = http.ask("/v1/completions", {**asked, "stop_token_ids": [1.0]})
    assert found["usage"]["prompt_tokens"] == 3
    thinking = {"type": "enabled", "budget_tokens": 2048.0}
    asked = {"messages": USER, "max_tokens": 30.0, "temperature": 0, "thinking": thinking}
    assert http.ask("/v1/messages", asked)["content"][0]["text"] == COUNTED
    found = http.ask("/v1/responses", {"input": USER, "max_output_tokens": 30.0, "temperature": 0})
    assert found["output"][0]["content"][0]["text"] == COUNTED
    assert http.ask("/detokenize", {"tokens": [97.0]})["prompt"] == "a"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made_is_whole_or_cut(ask, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 100}
    whole = ask(**asked).choices[0]
    assert not whole.message.content
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "f") and call.id
    assert json.loads(call.function.arguments) == {"a": 1}
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = [chunk.choices[0] for chunk in ask(**asked, stream=True)]
    assert not any(chunk.delta.content for chunk in chunks)
    calls = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert [c.function.name for c in calls if c.function.name] == ["f"]
    assert "".join(c.function.arguments or "" for c in calls) == call.function.arguments
    assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]
    cut = ask(**asked | {"max_completion_tokens": 1}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    cut = ask(**asked | {"max_completion_tokens": 1}, stream=True)
    assert [c.choices[0].finish_reason for c in cut][-1] == "length"


def test_tools_that_need_not_be_called_leave_the_answer_alone(ask):
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        message = ask(tools=[TOOL], **more).choices[0].message
        assert message.content == COUNTED[:10]
        assert "tool_calls" not in message.model_dump(exclude_unset=True)
    plain = {"type": "function", "function": {"name": "g"}}
    for function in ({}, {"parameters": {}}, {"parameters": None, "strict": None}):
        tool = {**plain, "function": {**plain["function"], **function}}
        assert content(ask(extra={"tools": [tool]})) == COUNTED[:10]


def test_calls_of_before_are_taken_in_every_form(ask):
    def called(arguments: str, content: str | None = None) -> dict:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "c", "type": "function", "function": function}
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    result = {"role": "tool", "tool_call_id": "c", "content": "1234"}

    def answered(messages: list[dict]) -> str:
        return content(ask([*USER, *messages, *USER], max_completion_tokens=4))

    for arguments in ("{}", "", '{"a": 1}', '{"l": {"m": [1, {"n": null}]}}', "[1]"):
        assert answered([called(arguments), result]) == COUNTED[:4]
    others = [
        [called("{}", "I call."), {**result, "content": [text("1234")]}],
        [called("{}"), result, called("{}"), result],
        [{"role": "assistant", "content": "hi", "tool_calls": []}],
        [{"role": "assistant", "content": "hi", "tool_calls": None}],
        [{"role": "assistant", "content": "", "refusal": None, "annotations": []}],
        [{"role": "assistant", "content": "hi", "reasoning": "I think."}],
    ]
    for messages in others:
        assert answered(messages) == COUNTED[:4], messages


def test_a_line_for_the_maker_of_a_client_is_no_part_of_the_prompt(http, claude):
    def line(salt: str) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.286; cch={salt};"

    def ids(*messages: dict) -> list[int]:
        return http.ask("/tokenize", {"messages": [*messages, *USER]})["tokens"]

    plain = ids(system("Be short."))
    for salt in ("7adab", "986dd"):
        assert ids(system(line(salt) + "\nBe short.")) == plain
        assert ids(system([text(line(salt)), text("Be short.")])) == plain
        assert ids(system(line(salt))) == ids()
    for message in (system("Quote: " + line("a")), user(line("a") + "Hello")):
        assert len(ids(message)) > len(line("a")), "elsewhere it is a text like others"

    def tokens(**asked) -> int:
        asked = {"model": MODEL, "messages": USER, **asked}
        return claude.messages.count_tokens(**asked).input_tokens

    assert tokens(system=[text(line("a")), text("Be short.")]) == tokens(system="Be short.")
    assert tokens(system=[text(line("b"))]) == tokens()
    within = [*USER, system([text(line("c")), text("Be short.")]), said("a"), *USER]
    bare = [*USER, system("Be short."), said("a"), *USER]
    assert tokens(messages=within) == tokens(messages=bare)


def test_a_name_that_a_schema_has_elsewhere_is_found(ask):
    """Where SGLang, llama.cpp and others look for the schema of a form."""
    forms = [
        {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}},
        {"type": "json_schema", "json_schema": {"schema": ONE, "strict": True}},
        {"type": "json_schema", "schema": ONE},
        {"type": "json_object", "schema": ONE},
        {"type": "json_object", "json_schema": {"schema": ONE}},
    ]
    for form in forms:
        answer = ask(extra={"response_format": form}, max_completion_tokens=40)
        assert json.loads(content(answer)) == {"a": 1}, form
