"""The whole pipeline as a user meets it: five processes, the official client, the demo model."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from pipeinfer.demo import copy_task, demo_path, recall_task

STAGES = ["detokenizer", "engine", "gateway", "scheduler", "tokenizer"]


@functools.cache
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def ask(server, question: str, **more):
    return client(server).chat.completions.create(
        model="pipeinfer-demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **more,
    )


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_ps_shows_five_processes_named_after_their_stages(server):
    stages = server.health()["stages"]
    assert sorted(stage["name"] for stage in stages) == STAGES
    assert len({stage["pid"] for stage in stages}) == 5
    for stage in stages:
        assert stage["name"] in command(stage["pid"])


def test_only_the_engine_has_torch_in_its_memory(server):
    for stage in server.health()["stages"]:
        mapped = Path(f"/proc/{stage['pid']}/maps").read_text()
        assert ("libtorch" in mapped) == (stage["name"] == "engine"), stage["name"]


def test_copying_and_recall_through_the_paged_cache(server):
    rng = random.Random(7)
    copying = [copy_task(rng, 40) for _ in range(10)]
    recall = [recall_task(rng, 6) for _ in range(20)]
    with ThreadPoolExecutor(10) as pool:
        for tasks, tokens, least in ((copying, 100, 10), (recall, 40, 18)):
            asked = [pool.submit(ask, server, question, max_tokens=tokens) for question, _ in tasks]
            said = [one.result().choices[0].message.content for one in asked]
            right = sum(text == answer for text, (_, answer) in zip(said, tasks, strict=True))
            assert right >= least


def test_200_concurrent_streams_give_the_text_of_one_at_a_time(server):
    rng = random.Random(3)
    questions = [copy_task(rng, rng.randint(5, 40))[0] for _ in range(10)]
    expected = [ask(server, q, max_tokens=60).choices[0].message.content for q in questions]

    async def stream(api: openai.AsyncOpenAI, question: str) -> tuple[str, str | None]:
        text, finish = "", None
        async for chunk in await api.chat.completions.create(
            model="pipeinfer-demo",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=60,
            stream=True,
        ):
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        return text, finish

    async def everybody():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            return await asyncio.gather(*(stream(api, questions[i % 10]) for i in range(200)))

    answers = asyncio.run(everybody())
    assert all(finish in ("stop", "length") for _, finish in answers)
    assert [text for text, _ in answers] == [expected[i % 10] for i in range(200)]


def test_prefix_is_reused_and_said_in_usage(server):
    question = copy_task(random.Random(11), 40)[0]
    first, second = ask(server, question, max_tokens=5), ask(server, question, max_tokens=5)
    assert second.usage.prompt_tokens_details.cached_tokens >= 32
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.choices[0].message.content == first.choices[0].message.content


def test_cache_salt_separates_prefix_caches(server):
    question = copy_task(random.Random(12), 40)[0]
    ask(server, question, max_tokens=2)
    salted = ask(server, question, max_tokens=2, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_extra_keys_separate_prefix_caches_in_every_dialect(server):
    question = copy_task(random.Random(15), 40)[0]
    turns = [{"role": "user", "content": question}]
    bodies = {
        "chat/completions": ({"messages": turns}, ("prompt_tokens_details", "cached_tokens")),
        "completions": ({"prompt": question}, ("prompt_tokens_details", "cached_tokens")),
        "responses": ({"input": question}, ("input_tokens_details", "cached_tokens")),
        "messages": ({"messages": turns}, ("cache_read_input_tokens",)),
    }

    def cached(path, **salts):
        body, way = bodies[path]
        most = "max_output_tokens" if path == "responses" else "max_tokens"
        status, answer = server.post(f"/v1/{path}", {**body, most: 2, "temperature": 0, **salts})
        assert status == 200, answer
        found = answer["usage"]
        for name in way:
            found = found[name]
        return found

    for path in bodies:
        tenants = [{"extra_key": f"{path} a"}, {"extra_key": f"{path} b"}]
        tenants += [{**tenant, "cache_salt": "s"} for tenant in tenants]
        assert [cached(path, **tenant) for tenant in tenants] == [0] * 4, path
        assert all(cached(path, **tenant) >= 32 for tenant in tenants), path


def test_nothing_of_before_is_found_behind_a_reset_of_the_prefix_cache(server):
    question = copy_task(random.Random(13), 40)[0]
    ask(server, question, max_tokens=2)
    assert ask(server, question, max_tokens=2).usage.prompt_tokens_details.cached_tokens >= 32
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    assert ask(server, question, max_tokens=2).usage.prompt_tokens_details.cached_tokens == 0


def test_other_dialects_give_the_words_of_a_chat(server):
    question = copy_task(random.Random(14), 20)[0]
    expected = ask(server, question, max_tokens=30).choices[0].message.content
    body = {"model": "pipeinfer-demo", "temperature": 0, "max_output_tokens": 30}
    made = client(server).responses.create(input=question, **body)
    assert made.output_text == expected
    turns = [{"role": "user", "content": question}]
    message = {"messages": turns, "temperature": 0, "max_tokens": 30}
    answer = httpx.post(f"{server.url}/v1/messages", json=message, timeout=60).json()
    assert answer["content"] == [{"type": "text", "text": expected, "citations": None}]
    count = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"messages": turns}).json()
    usage = answer["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_log_probs_of_a_response_are_those_of_a_chat_in_streams_as_well(server):
    question = copy_task(random.Random(15), 20)[0]
    chat = ask(server, question, max_tokens=12, logprobs=True, top_logprobs=2)
    expected = [(one.token, len(one.top_logprobs)) for one in chat.choices[0].logprobs.content]
    body = {"model": "pipeinfer-demo", "temperature": 0, "max_output_tokens": 12, "input": question}
    asked = {**body, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = client(server).responses.create(**asked)
    [part] = made.output[0].content
    assert [(one.token, len(one.top_logprobs)) for one in part.logprobs] == expected
    events = list(client(server).responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    tokens = [one.token for event in deltas for one in event.logprobs]
    assert tokens == [token for token, _ in expected][: len(tokens)] and len(tokens) > 1
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == tokens
    plain = client(server).responses.create(**body)
    assert plain.output[0].content[0].logprobs == [] and plain.output_text == made.output_text


def test_seeded_sampling_repeats(server):
    def sampled(seed: int) -> str:
        answer = client(server).completions.create(
            model="pipeinfer-demo", prompt="once upon", temperature=1.5, max_tokens=30, seed=seed
        )
        return answer.choices[0].text

    assert sampled(5) == sampled(5)
    assert len({sampled(seed) for seed in range(6)}) > 1


def test_penalties_change_what_is_said_again_and_neutral_ones_nothing(server):
    def said(repetition: float = 1.0, **penalties: float) -> str:
        answer = client(server).completions.create(
            model="pipeinfer-demo", prompt="once upon", temperature=1.0, max_tokens=60, seed=3,
            **penalties, extra_body={"ignore_eos": True, "repetition_penalty": repetition},
        )  # fmt: skip
        return answer.choices[0].text

    usual = said()
    assert said(frequency_penalty=0, presence_penalty=0) == usual
    changed = {said(frequency_penalty=2), said(frequency_penalty=-2), said(repetition=1.5)}
    assert len(changed | {usual}) == 4


def test_biases_choose_and_ban_tokens(server):
    def said(**more) -> str:
        answer = client(server).completions.create(
            model="pipeinfer-demo", prompt="once upon", max_tokens=12, seed=3, **more
        )
        return answer.choices[0].text

    usual = said(temperature=0)
    assert said(temperature=0, logit_bias={}) == usual
    for temperature in (0, 1.5):
        assert said(temperature=temperature, logit_bias={"120": 100}) == "x" * 12
    banned = {str(byte): -100 for byte in usual.encode()}
    assert not set(said(temperature=0, logit_bias=banned)) & set(usual)
    chat = ask(server, "count from 3 to 12", max_tokens=5, logit_bias={"120": 100})
    assert chat.choices[0].message.content == "xxxxx"
    for wrong in ({"10000000": 1}, {"120": 100.5}, {"x": 1}):
        with pytest.raises(openai.BadRequestError) as raised:
            said(logit_bias=wrong)
        assert raised.value.body["param"] == "logit_bias"


def test_allowed_ids_and_bad_words_choose_what_may_be_said(server):
    def said(**more) -> str:
        more = {"max_tokens": 12, "seed": 3, "n": 2} | more
        answer = client(server).completions.create(
            model="pipeinfer-demo", prompt="once upon", **more
        )
        first, second = answer.choices
        assert more.get("temperature") or first.text == second.text
        return first.text + second.text

    usual = said(temperature=0)
    for temperature in (0, 1.5):
        few = said(temperature=temperature, extra_body={"allowed_token_ids": [120, 121]})
        assert set(few) <= set("xy") and len(few) == 24, "no end of the model's is among them"
    for length in (1, 2, 3, 5):
        word = usual.lstrip()[:length]
        body = {"bad_words": [word]}
        assert word in usual and word not in said(temperature=0, extra_body=body)
        assert word not in said(temperature=1, extra_body=body)
    for wrong in ({"allowed_token_ids": [264]}, {"bad_words": [""]}):
        with pytest.raises(openai.BadRequestError) as raised:
            said(extra_body=wrong)
        assert raised.value.body["param"] == next(iter(wrong))


@pytest.mark.parametrize("chat", [True, False])
def test_ids_of_prompt_and_output_come_with_the_answer_and_with_its_chunks(server, chat):
    def asked(**more):
        more = {"model": "pipeinfer-demo", "max_tokens": 9, "temperature": 0} | more
        kept = {"return_token_ids": True, "truncate_prompt_tokens": 12}
        if chat:
            messages = [{"role": "user", "content": "count from 3 to 12"}]
            return client(server).chat.completions.create(
                messages=messages, extra_body=kept, **more
            )
        return client(server).completions.create(prompt="once upon a time", extra_body=kept, **more)

    whole = asked(n=2)
    text = whole.choices[0].message.content if chat else whole.choices[0].text
    assert whole.choices[0].token_ids == whole.choices[1].token_ids == list(text.encode())
    prompt = whole.prompt_token_ids if chat else whole.choices[1].prompt_token_ids
    assert len(prompt) == 12 and (chat or bytes(prompt) == b" upon a time"[-12:])
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = asked(stream=True, stream_options=options)
    choices = [chunk.choices[0] for chunk in chunks]
    texts = [(one.delta.content if chat else one.text) or "" for one in choices]
    ids = [getattr(one, "token_ids", None) or [] for one in choices]
    assert "".join(texts) == text and [i for some in ids for i in some] == list(text.encode())
    first = chunks[0] if chat else choices[0]
    assert first.prompt_token_ids == prompt
    told = [chunk.usage.completion_tokens for chunk in chunks]
    assert told == sorted(told) and told[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {12}


def test_a_last_message_goes_on(server):
    def asked(last: str):
        messages = [
            {"role": "user", "content": "count from 3 to 12"},
            {"role": "assistant", "content": last},
        ]
        more = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client(server).chat.completions.create(
            model="pipeinfer-demo", messages=messages, temperature=0, extra_body=more
        )
        return answer.choices[0].message.content

    whole = ask(server, "count from 3 to 12").choices[0].message.content
    for length in (1, 4, 6):
        assert whole[:length] + asked(whole[:length]) == whole
        turns = [
            {"role": "user", "content": "count from 3 to 12"},
            {"role": "assistant", "content": whole[:length]},
        ]
        body = {"max_tokens": 60, "messages": turns, "temperature": 0}
        said = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
        assert whole[:length] + said["content"][0]["text"] == whole
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server, "x", extra_body={"chat_template": "{{ messages }}"})
    assert raised.value.body["param"] == "chat_template"


def test_stop_string_ends_the_text_before_it(server):
    whole = ask(server, "count from 3 to 12", max_tokens=60).choices[0].message.content
    assert " 7 " in whole
    cut = ask(server, "count from 3 to 12", max_tokens=60, stop=[" 7"])
    assert cut.choices[0].message.content == whole[: whole.index(" 7")]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < len(whole)


def test_errors_of_the_tokenizer_reach_the_client(server):
    with pytest.raises(openai.BadRequestError) as raised:
        client(server).completions.create(model="pipeinfer-demo", prompt="a" * 50_000)
    assert raised.value.body["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as raised:
        client(server).completions.create(model="pipeinfer-demo", prompt=[1, 10_000_000])
    assert raised.value.body["param"] == "prompt"


def test_texts_become_ids_and_ids_texts(server):
    text = "<|im_start|>user\nfünf 🦀<|im_end|>\n"
    status, found = server.post("/tokenize", {"prompt": text})
    assert status == 200 and found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] > found["count"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": text})
    chat = {"messages": [{"role": "user", "content": "fünf 🦀"}]}
    _, rendered = server.post("/tokenize", {**chat, "add_generation_prompt": False})
    assert rendered["tokens"] == found["tokens"]
    _, opened = server.post("/tokenize", chat)
    ours = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert server.post("/tokenize", {**chat, "chat_template": ours})[0] == 400  # as of a chat
    counted = server.post("/tokenize", {**chat, "temperature": 0.5, "max_tokens": 9, "n": 3})
    assert counted == (200, opened)
    assert (
        opened["tokens"][: found["count"]] == found["tokens"] and opened["count"] > found["count"]
    )
    long = "one two three " * 60
    ids = server.post("/tokenize", {"prompt": long})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": long})
    for body in ({}, {"prompt": "a", **chat}, {"prompt": [1, 2]}, {"prompt": "a" * 500_000}):
        assert server.post("/tokenize", body)[0] == 400, body
    assert server.post("/detokenize", {"tokens": [1, 10_000_000]})[0] == 400
    told = server.post("/tokenize", {"prompt": "7 + ü", "return_token_strs": True})[1]
    texts = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    assert told["token_strs"] == [texts.id_to_token(token) for token in told["tokens"]]
    info = json.loads(server.get("/tokenizer_info")[1])
    [end] = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})[1][
        "tokens"
    ]
    assert server.post("/detokenize", {"tokens": [end]})[1]["prompt"] == info["eos_token"]
    assert info["model_max_length"] >= told["max_model_len"]


def test_a_response_counts_as_it_is_answered_and_drops_turns_that_do_not_fit(server):
    body = {"input": [{"role": "user", "content": f"turn {n} " + "x" * 300} for n in range(9)]}
    status, counted = server.post("/v1/responses/input_tokens", body)
    assert status == 200 and counted["input_tokens"] > 2048  # said, though it does not fit
    status, refused = server.post("/v1/responses", body)
    assert status == 400 and refused["error"]["param"] == "input"
    body["truncation"] = "auto"
    status, counted = server.post("/v1/responses/input_tokens", body)
    assert status == 200 and 1024 < counted["input_tokens"] < 2048
    answered = server.post("/v1/responses", {**body, "max_output_tokens": 4})[1]
    assert answered["truncation"] == "auto" and answered["usage"]["input_tokens"] <= 2044
    less = server.post("/v1/responses", {**body, "max_output_tokens": 300})[1]
    assert less["usage"]["input_tokens"] <= 1748
    assert less["usage"]["input_tokens"] < answered["usage"]["input_tokens"]
    short = {"input": "What is 7 + 15?", "instructions": "be short"}
    counted = server.post("/v1/responses/input_tokens", short)[1]
    answered = server.post("/v1/responses", {**short, "max_output_tokens": 4})[1]
    assert counted["input_tokens"] == answered["usage"]["input_tokens"]


def test_metrics_count_what_was_served(server):
    question = copy_task(random.Random(13), 40)[0]
    ask(server, question, max_tokens=5)
    before = server.metric("pipeinfer_generated_tokens_total")
    answer = ask(server, question, max_tokens=40)
    after = server.metric("pipeinfer_generated_tokens_total")
    # A stop token is billed but has no text: the counter counts ids that were delivered.
    assert after - before in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    server.wait(lambda: 0 < server.metric("pipeinfer_prefix_cache_hit_ratio") < 1, "the ratio")
    assert server.metric("pipeinfer_pages_free") > 0
