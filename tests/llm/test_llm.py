"""The synchronous LLM on the demo model: what comes back, in which order, and what is refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeinfer import LLM, SamplingParams, StructuredOutputsParams
from pipeinfer.demo import demo_path
from pipeinfer.llm import RequestError
from pipeinfer.offline import calls
from pipeinfer.params import JsonObject

GREEDY = SamplingParams(temperature=0, max_tokens=40)
EOS = 258


def test_greedy_tokens_are_those_of_transformers(llm: LLM, prompt_ids: list[list[int]]) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype="float32").eval()
    results = llm.generate(prompt_ids, GREEDY, use_tqdm=False)
    for prompt, result in zip(prompt_ids, results, strict=True):
        with torch.inference_mode():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        expected = ids[0, len(prompt) :].tolist()
        reason = "length"
        if expected[-1] == EOS:
            expected, reason = expected[:-1], "stop"
        output = result.outputs[0]
        assert (output.token_ids, output.finish_reason) == (expected, reason)
        assert output.stop_reason is None
        assert result.prompt_token_ids == prompt
        assert result.prompt is None


def test_a_text_prompt_gives_what_its_ids_give(
    llm: LLM, prompts: list[str], prompt_ids: list[list[int]]
) -> None:
    texts = llm.generate(prompts[:3], GREEDY, use_tqdm=False)
    ids = llm.generate(prompt_ids[:3], GREEDY, use_tqdm=False)
    assert [r.outputs for r in texts] == [r.outputs for r in ids]
    assert [r.prompt for r in texts] == prompts[:3]
    assert [r.prompt_token_ids for r in texts] == prompt_ids[:3]


def test_a_bias_concerns_its_own_prompt_alone(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(max_tokens=5, logit_bias={120: 100.0}), GREEDY]
    plain, biased, again = llm.generate(["count"] * 3, params, use_tqdm=False)
    assert biased.outputs[0].text == "xxxxx"
    assert plain.outputs == again.outputs and "x" not in plain.outputs[0].text


def test_what_may_be_said_concerns_its_own_prompt_alone(llm: LLM) -> None:
    few = SamplingParams(max_tokens=5, allowed_token_ids=[120, 121])
    plain, some = llm.generate(["count"] * 2, [GREEDY, few], use_tqdm=False)
    assert set(some.outputs[0].text) <= set("xy")
    word = plain.outputs[0].text.strip()[:3]
    other, again = llm.generate(
        ["count"] * 2, [msgspec.structs.replace(GREEDY, bad_words=[word]), GREEDY], use_tqdm=False
    )
    assert word not in other.outputs[0].text and again.outputs == plain.outputs
    [kept] = llm.generate("count", SamplingParams(truncate_prompt_tokens=3), use_tqdm=False)
    assert kept.prompt_token_ids == plain.prompt_token_ids[-3:]


def test_results_come_in_the_order_of_prompts_each_with_its_own_params(llm: LLM) -> None:
    lengths = [30, 1, 12, 2, 25, 7]
    prompts = [f"prompt number {i}" for i in range(len(lengths))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [r.prompt for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == lengths
    assert {r.outputs[0].finish_reason for r in results} == {"length"}
    assert len({r.request_id for r in results}) == len(results)


def test_hundreds_of_prompts_in_one_call_all_come_back(llm: LLM) -> None:
    prompts = [[40 + i % 80, 41 + i // 80] for i in range(600)]
    results = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [r.prompt_token_ids for r in results] == prompts
    assert {len(r.outputs[0].token_ids) for r in results} == {2}


def test_callers_on_several_threads_get_their_own_results(llm: LLM) -> None:
    got: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        prompts = [[97 + number, 97 + i] for i in range(20)]
        got[number] = [r.prompt_token_ids for r in llm.generate(prompts, use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: [[97 + n, 97 + i] for i in range(20)] for n in range(3)}


def test_without_params_the_checkpoints_defaults_hold(llm: LLM, prompts: list[str]) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=16)
    default = llm.generate(prompts[1], use_tqdm=False)[0].outputs[0]
    greedy = llm.generate(prompts[1], SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0]
    assert default == greedy
    assert len(default.token_ids) == 16


def test_seeded_sampling_repeats_and_seeds_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=20, ignore_eos=True)
        return llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids

    assert sample(1) == sample(1) != sample(2)


def test_chats_are_prompts_in_the_form_of_the_models_template(llm: LLM, prompts: list[str]) -> None:
    questions = [text.split("\n")[1].removesuffix("<|im_end|>") for text in prompts]
    chats = [[{"role": "user", "content": question}] for question in questions]
    expected = [r.outputs for r in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [r.outputs for r in llm.chat(chats, GREEDY, use_tqdm=False)] == expected
    assert [r.outputs for r in llm.chat(chats[0], GREEDY, use_tqdm=False)] == expected[:1]


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["none", "null"])
def test_a_message_of_a_chat_may_only_call_tools(llm: LLM, content: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    user, gave = {"role": "user", "content": "q"}, {"role": "tool", "content": "42"}

    def prompt(**content: Any) -> object:
        chat = [user, {"role": "assistant", "tool_calls": [call], **content}, gave]
        return llm.chat(chat, GREEDY, use_tqdm=False)[0].prompt_token_ids

    assert prompt(**content) == prompt(content="")


def test_tools_that_the_template_would_leave_out_are_refused(llm: LLM) -> None:
    tools: list[JsonObject] = [{"type": "function", "function": {"name": "now"}}]
    chat = [{"role": "user", "content": "now?"}]
    with pytest.raises(RequestError, match="chat template has none"):
        llm.chat(chat, GREEDY, tools=tools, use_tqdm=False)
    shown = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    [answer] = llm.chat(chat, GREEDY, tools=tools, chat_template=shown, use_tqdm=False)
    [plain] = llm.generate(["now"], GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == plain.prompt_token_ids


def test_a_dict_is_no_parameters_of_sampling(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams, not a dict"):
        llm.generate("a", {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]


def test_tools_of_a_chat_are_a_variable_of_its_template() -> None:
    tools: list[JsonObject] = [{"type": "function", "function": {"name": "now"}}]
    given, _ = calls.template_arguments({"enable_thinking": False}, {"tools": tools})
    asked = calls.chat("r", [{"role": "user", "content": "now?"}], GREEDY, given)
    assert asked.call.template_arguments == {"enable_thinking": False, "tools": tools}
    nothing = {"tools": None, "chat_template": None, "add_generation_prompt": True}
    assert calls.template_arguments(None, nothing) == ({}, {})


def test_a_stop_string_ends_text_and_ids_and_is_the_reason(llm: LLM, prompts: list[str]) -> None:
    whole = llm.generate(prompts[1], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.text[10:13]
    params = SamplingParams(temperature=0, max_tokens=40, stop=(stop,))
    output = llm.generate(prompts[1], params, use_tqdm=False)[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    # As in vLLM, the ids go up to the end of the stop string. A token is a byte here.
    assert output.token_ids == list((output.text + stop).encode())


def test_a_repeated_prompt_is_found_in_the_cache(llm: LLM) -> None:
    prompt = [60 + i for i in range(100)]
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 64
    assert first.outputs == second.outputs


def test_metrics_say_when_tokens_came(llm: LLM) -> None:
    before = time.monotonic()
    metrics = llm.generate("abc", GREEDY, use_tqdm=False)[0].metrics
    assert metrics.first_token_time is not None and metrics.last_token_time is not None
    assert before <= metrics.arrival_time < metrics.first_token_time
    assert metrics.first_token_time < metrics.last_token_time <= time.monotonic()


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([]) == []


def test_numpy_ids_are_ids(llm: LLM, prompt_ids: list[list[int]]) -> None:
    arrays = [np.array(ids, dtype=np.int64) for ids in prompt_ids[:2]]
    results = llm.generate(arrays, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert [r.prompt_token_ids for r in results] == prompt_ids[:2]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_params_of_another_length_are_a_value_error(llm: LLM, count: int) -> None:
    with pytest.raises(ValueError, match=f"2 prompts, but {count} SamplingParams"):
        llm.generate(["a", "b"], [GREEDY] * count)


def test_a_refused_prompt_raises_and_aborts_the_others(llm: LLM) -> None:
    assert any(aborted_with_a_refused_one(llm) for _ in range(5)), "none was aborted"


def aborted_with_a_refused_one(llm: LLM) -> bool:
    """False if the others ended by themselves, as they may while the machine stands still."""
    endless = SamplingParams(max_tokens=2000, ignore_eos=True)
    before = llm.stats()["engine-0-0"]["sampled_tokens_total"]
    with pytest.raises(RequestError, match=r"prompt 2: .*2048.*3000") as caught:
        llm.generate(["a", "b", "x" * 3000], endless, use_tqdm=False)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason in (
        "length",
        "stop",
    )
    return sampled_when_idle(llm, before) < before + 2 * 2000


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", {}, "prompt"),
        ([264], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1, 2.5], {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"max_tokens": 2.5}, "params"),
        ("a", {"temperature": "hot"}, "params"),
        ("a", {"stop": ("\ud800",)}, "params"),
        ("a", {"stop_token_ids": (300,)}, "stop_token_ids"),
        ("a", {"logit_bias": {264: 1.0}}, "logit_bias"),
        ("a", {"logit_bias": {7: "much"}}, "logit_bias"),
    ],
)
def test_a_wrong_request_is_refused_and_hurts_nobody(
    llm: LLM, prompt: Any, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    assert caught.value.param == param
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": object()}],
        [{"role": "user", "content": 2**70}],
        [["user", "Hello"]],
    ],
)
def test_a_chat_that_cannot_travel_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, use_tqdm=False)


def sampled_when_idle(llm: LLM, before: float, seconds: float = 120) -> float:
    """Tokens sampled in all, once there are more than `before` and no stage holds a request."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = llm.stats()
        sampled = stats["engine-0-0"]["sampled_tokens_total"]
        held = (
            stats["scheduler-0"]["running"],
            stats["scheduler-0"]["waiting"],
            stats["engine-0-0"]["slots_used"],
            stats["detokenizer-0"]["running"],
        )
        if sampled > before and not any(held):
            return sampled
        time.sleep(0.05)
    raise AssertionError(f"still held: {stats}")


def test_choices_of_a_prompt_are_what_their_seeds_give_and_it_is_computed_once(
    llm: LLM, prompts: list[str]
) -> None:
    prompt = "of nobody else: " + "".join(prompts) + "and more"
    params = SamplingParams(temperature=1.5, seed=2**64 - 2, max_tokens=12, n=4)
    # What the engine has told when it tells of this one is all that was before.
    told = engine(llm)["prompt_tokens_total"]
    llm.generate([[7] * 1000], SamplingParams(max_tokens=1), use_tqdm=False)
    before = settled(llm, told + 1000)
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    long, page = len(result.prompt_token_ids), before["page_tokens"]
    assert before["kv_fp8"] == 0, "pages hold what the model computes in"
    rest = long - (long - 1) // page * page
    after = settled(llm, before["prompt_tokens_total"] + 4 * long)
    outputs = sum(len(one.token_ids) + (one.finish_reason == "stop") for one in result.outputs)
    computed = after["computed_tokens_total"] - before["computed_tokens_total"]
    once = long + 3 * rest
    assert once <= computed <= once + outputs + 4, "a surplus token of each at most"
    assert after["cached_tokens_total"] - before["cached_tokens_total"] == 3 * (long - rest)
    assert result.cached_tokens == 0
    assert [one.index for one in result.outputs] == [0, 1, 2, 3]
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    each = [msgspec.structs.replace(params, seed=seed, n=1) for seed in seeds]
    alone = llm.generate([prompt] * 4, each, use_tqdm=False)
    assert [one.text for one in result.outputs] == [single.outputs[0].text for single in alone]
    assert len({one.text for one in result.outputs}) == 4
    times = result.metrics
    assert times.first_token_time is not None and times.last_token_time is not None
    assert times.arrival_time < times.first_token_time < times.last_token_time


def test_choices_without_a_seed_differ_and_greedy_ones_do_not(llm: LLM) -> None:
    warm = SamplingParams(max_tokens=12, n=3, ignore_eos=True)
    greedy = msgspec.structs.replace(warm, temperature=0)
    several, same = llm.generate(["any", "any"], [warm, greedy], use_tqdm=False)
    assert len({one.text for one in several.outputs}) == 3
    assert len({one.text for one in same.outputs}) == 1


@pytest.mark.parametrize("n", [0, -1, 129])
def test_a_number_of_choices_out_of_range_is_refused(llm: LLM, n: int) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate("x", SamplingParams(n=n), use_tqdm=False)
    assert error.value.param == "n"


def engine(llm: LLM) -> dict[str, float]:
    return llm.stats()["engine-0-0"]


def settled(llm: LLM, prompt_tokens: float) -> dict[str, float]:
    """What the engine says when it has admitted so many tokens and computes nothing."""
    end = time.monotonic() + 120
    while (told := engine(llm))["prompt_tokens_total"] < prompt_tokens or told["slots_used"]:
        assert time.monotonic() < end, told
        time.sleep(0.05)
    return told


def test_outputs_of_a_given_form(llm: LLM) -> None:
    schema: Any = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    forms = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(choice=["left", "right"]),  # type: ignore[arg-type]
        StructuredOutputsParams(regex="[ab]{3}"),
    ]
    params = [SamplingParams(max_tokens=60, structured_outputs=one, seed=1) for one in forms]
    texts = [r.outputs[0].text for r in llm.generate(["What?"] * 3, params, use_tqdm=False)]
    assert msgspec.json.decode(texts[0])["n"] <= 99
    assert texts[1] in ("left", "right")
    assert len(texts[2]) == 3 and set(texts[2]) <= set("ab")
    with pytest.raises(RequestError, match="unclosed group"):
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
        llm.generate("What?", bad, use_tqdm=False)
