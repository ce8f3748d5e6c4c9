"""What scripts for vLLM's LLM do, with only the import changed: the offline examples of its
documentation, in our words and on the demo model."""

from __future__ import annotations

import functools
import gc
import weakref
from argparse import Namespace
from typing import Any

import psutil
import pytest
from tqdm import tqdm

from pipeinfer import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    params,
)
from pipeinfer.llm import ConfigurationError, RequestError
from pipeinfer.offline.calls import SHARED_FIELDS
from pipeinfer.offline.keywords import NEUTRAL_VALUES, VLLM_KEYWORDS, settings_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "Count from 3 to 9."},
]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_a_batch_of_texts_gives_outputs_with_all_that_is_looked_at(llm: LLM) -> None:
    prompts = ["My name is", "The largest city of France is", "Tomorrow"]
    outputs = llm.generate(prompts, sampling_params=SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished and output.lora_request is None
        first = output.outputs[0]
        assert isinstance(first.text, str) and first.finished() and first.index == 0
        assert first.cumulative_logprob is None and first.stop_reason is None
        assert output.num_cached_tokens == output.cached_tokens


def test_default_params_may_be_changed_and_stay_as_they_are(llm: LLM) -> None:
    chosen = llm.get_default_sampling_params()
    chosen.max_tokens = 3
    chosen.ignore_eos = True
    [output] = llm.generate("Once", chosen)
    assert len(output.outputs[0].token_ids) == 3
    assert llm.get_default_sampling_params().max_tokens == 16


def test_flags_of_a_script_become_keywords() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="some/model")
    parser.add_argument("--top-k", type=int)
    given = ["--max_model_len", "64", "--enforce-eager", "--tensor-parallel-size=1", "--top_k=3"]
    args = vars(parser.parse_args(given))
    assert args.pop("top_k") == 3
    settings = settings_of(args)
    assert settings == {
        "model": "some/model", "max_model_len": "64", "no_cuda_graph": True, "tp": "1",
    }  # fmt: skip
    made = EngineArgs.from_cli_args(Namespace(model="m", seed=4, other=5))
    assert vars(made) == {"model": "m", "seed": 4}


def test_prompts_are_dicts_too(llm: LLM) -> None:
    ids = list(b"Hello")
    prompts: list[Any] = [
        "Hello",
        {"prompt": "Hello"},
        {"prompt_token_ids": ids},
        TextPrompt(prompt="Hello", cache_salt="mine"),
        TokensPrompt(prompt_token_ids=ids, prompt="as I wrote it"),
        {"prompt": "Hello", "multi_modal_data": None, "mm_processor_kwargs": {}},
    ]
    outputs = llm.generate(prompts, GREEDY)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({output.outputs[0].text for output in outputs}) == 1
    shown = ["Hello", "Hello", None, "Hello", "as I wrote it", "Hello"]
    assert [output.prompt for output in outputs] == shown
    [alone] = llm.generate({"prompt": "Hello"}, GREEDY)
    assert alone.outputs == outputs[0].outputs


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": object()}}, "multi_modal_data"),
        ({"prompt_embeds": [[0.5]]}, "prompt_embeds"),
        ({}, "prompt_token_ids"),
    ],
)
def test_a_dict_that_is_no_text_is_refused(llm: LLM, prompt: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate([prompt], GREEDY)


def test_a_chat_shows_its_prompt_and_takes_a_template_as_text(llm: LLM) -> None:
    chats = [CHAT, CHAT[1:]]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert len(outputs) == 2
    assert outputs[0].prompt == (
        "<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nCount from 3 to 9.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    [other] = llm.chat(CHAT, GREEDY, chat_template=TEMPLATE, chat_template_content_format="string")
    assert other.prompt == "[system] You count.\n[user] Count from 3 to 9.\n"
    assert llm.chat(CHAT, sampling_params=GREEDY)[0].outputs == outputs[0].outputs


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "3 4"}]
    [output] = llm.chat(chat, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None and output.prompt.endswith("assistant\n3 4")
    [closed] = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
    assert closed.prompt is not None and closed.prompt.endswith("9.<|im_end|>\n")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        llm.chat(chat, GREEDY, continue_final_message=True)


def test_the_tokenizer_makes_the_prompts_of_chats(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    texts = tokenizer.apply_chat_template([CHAT, CHAT], tokenize=False, add_generation_prompt=True)
    by_text, by_chat = llm.generate(texts, GREEDY), llm.chat([CHAT, CHAT], GREEDY)
    assert [one.outputs for one in by_text] == [one.outputs for one in by_chat]
    assert tokenizer.encode(texts[0]) == by_chat[0].prompt_token_ids
    assert tokenizer.decode(by_chat[0].outputs[0].token_ids) == by_chat[0].outputs[0].text


def test_forms_of_outputs(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"brand": {"enum": ["A", "B"]}},
        "required": ["brand"],
        "additionalProperties": False,
    }
    grammar = 'root ::= "SELECT " column " from t"\ncolumn ::= "a" | "b"\n'
    forms = [
        StructuredOutputsParams(choice=["Positive", "Negative"]),
        StructuredOutputsParams(regex=r"[a-z]{1,4}@[a-z]{1,4}\.com\n"),
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(grammar=grammar),
        StructuredOutputsParams(json_object=True),
    ]
    params = [SamplingParams(structured_outputs=form, max_tokens=50, seed=5) for form in forms]
    params[1].stop = ["\n"]
    texts = [output.outputs[0].text for output in llm.generate(["Say"] * 5, params)]
    assert texts[0] in ("Positive", "Negative")
    assert texts[1].endswith(".com")
    assert "brand" in texts[2]
    assert texts[3] in ("SELECT a from t", "SELECT b from t")
    assert texts[4].startswith("{")


@pytest.mark.parametrize("choice", [["yes"], ("yes",)])
def test_a_form_may_be_a_dict_of_its_fields(llm: LLM, choice: Any) -> None:
    params = SamplingParams(structured_outputs={"choice": choice}, temperature=0)
    assert isinstance(params.structured_outputs, StructuredOutputsParams)
    assert llm.generate("Say", params)[0].outputs[0].text == "yes"
    params.structured_outputs = {"choice": ["no"]}
    assert llm.generate("Say", params)[0].outputs[0].text == "no"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"chioce": ["a"], "regex": "a"}, "structured_outputs has no chioce; its fields are json,"),
        ({"choice": ["a"], "regex": "a"}, "one form"),
        ({}, "not nothing"),
        ({"structural_tag": "x"}, "use grammar"),
        ({"choice": "abc"}, r"structured_outputs\.choice: Expected `array"),
        ({"choice": [1]}, r"structured_outputs\.choice: Expected `str`"),
        ({"regex": 5}, r"structured_outputs\.regex: Expected `str"),
        ({"json": object}, r"structured_outputs\.json: Expected `"),
        ("[a-z]+", r"is StructuredOutputsParams or a dict, not '\[a-z\]\+'"),
        (dict, "is StructuredOutputsParams or a dict, not type"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(form: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(structured_outputs=form)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("top_p", None), ("stop", 5), ("stop_token_ids", 5), ("n", "2"),
     ("max_tokens", 2.5), ("bad_words", 5), ("allowed_token_ids", 5)],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_name_alone(
    llm: LLM, name: str, value: Any
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate("a", SamplingParams(**{name: value}))
    assert str(refused.value).startswith(f"SamplingParams: {name}: Expected `")
    assert len(str(refused.value)) < 100


def test_parts_of_text_are_the_message(llm: LLM) -> None:
    parts: list[Any] = [{"type": "input_text", "text": "You"}, "count."]
    of_parts, of_text = ([{"role": "user", "content": one}] for one in (parts, "You\ncount."))
    assert llm.chat(of_parts, GREEDY)[0].prompt == llm.chat(of_text, GREEDY)[0].prompt


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of type image_url"),
        ({"type": "image_pil", "image_pil": object()}, "a part of type image_pil"),
        ({"type": "input_audio", "input_audio": {}}, "a part of type input_audio"),
        ({"image": "x"}, "a part without a type"),
        (5, "a part without a type"),
    ],
)
def test_pictures_and_sounds_in_chats_are_refused_where_they_stand(
    llm: LLM, part: Any, said: str
) -> None:
    chat = [*CHAT, {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    with pytest.raises(RequestError) as refused:
        llm.chat([CHAT, chat], GREEDY)
    assert str(refused.value) == (
        f"messages[2].content[1] is {said}. Models take and give texts only. "
        "Say it in a part of type text."
    )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages are a chat, a list of dicts"),
        (["hello"], "messages are a chat, a list of dicts"),
        ({"role": "user", "content": "x"}, "messages are a chat, a list of dicts"),
        (None, "messages are a chat, a list of dicts"),
        ([{"content": "x"}], r'messages\[0\] must be a dict with a text as its "role"'),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a text"),
    ],
)
def test_what_is_no_chat_is_refused_by_what_one_is(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("prompt", [5, None])
def test_what_is_no_prompt_is_refused_by_what_one_is(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is text, a list of token ids or a dict"):
        llm.generate(prompt, GREEDY)


def test_what_prompts_share_is_found_until_the_cache_is_reset(llm: LLM) -> None:
    shared = "Here is a table of ages. " * 8
    first, second = (llm.generate(shared + end, GREEDY)[0] for end in ("John?", "Zack?"))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 100
    assert llm.reset_prefix_cache() is True
    [third] = llm.generate(shared + "Ann?", GREEDY)
    assert third.num_cached_tokens == 0


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_gives_the_same_texts_when_it_is_woken(llm: LLM, level: int) -> None:
    prompt = "Here is a table of ages. " * 8
    [before] = llm.generate(prompt, GREEDY)
    llm.sleep(level)
    assert llm.stats()["scheduler-0"]["sleep_level"] == level
    with pytest.raises(RequestError, match="sleeps"):
        llm.generate(prompt, GREEDY)  # nobody would wake it
    llm.wake_up(tags=["weights", "kv_cache"])
    [after] = llm.generate(prompt, GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 0


def test_it_does_not_sleep_as_nobody_can(llm: LLM) -> None:
    for wrong in ({"level": 0}, {"level": 3}, {"mode": "soon"}):
        with pytest.raises(ValueError, match="level is 1 or 2"):
            llm.sleep(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="come together"):
        llm.wake_up(tags=["weights"])
    llm.wake_up()  # it is awake
    assert llm.generate("Once", GREEDY)


def test_cumulative_logprob_is_the_sum_of_the_chosen_tokens(llm: LLM) -> None:
    [output] = llm.generate("Once", SamplingParams(n=2, seed=1, logprobs=True, max_tokens=6))
    for choice in output.outputs:
        assert choice.logprobs is not None
        chosen = [
            found[id].logprob for id, found in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))


def test_a_prompt_may_have_log_probs_without_any_output(llm: LLM) -> None:
    of_prompt = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2, logprobs=1)
    some = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    none, one = llm.generate(["Hello", "Hello"], [of_prompt, some])
    assert none.prompt_logprobs == one.prompt_logprobs and none.prompt_logprobs is not None
    assert len(none.prompt_logprobs) == len(none.prompt_token_ids) == 5
    output = none.outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == ("", [], [])
    assert output.finish_reason == "length" and output.cumulative_logprob == 0


def test_ids_alone_come_without_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    without = params.clone()
    without.detokenize = False
    ids, both = llm.generate(["Hello"] * 2, [without, params])
    assert ids.outputs[0].text == "" != both.outputs[0].text
    assert ids.outputs[0].token_ids == both.outputs[0].token_ids
    with pytest.raises(RequestError, match="detokenize"):
        llm.generate("Hello", SamplingParams(detokenize=False, stop="x"))


def test_keywords_of_methods_that_ask_for_nothing_are_taken(llm: LLM) -> None:
    outputs = llm.generate(
        ["a", "b"], GREEDY, lora_request=None, priority=[2, 0], mm_processor_kwargs=None,
        tokenization_kwargs={"add_special_tokens": False, "truncation": False},
    )  # fmt: skip
    assert len(outputs) == 2
    with pytest.raises(ValueError, match="2 prompts, but 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate("a", GREEDY, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="loaded without enable_lora=True"):
        llm.generate("a", GREEDY, lora_request=LoRARequest("one", 1, "/nowhere"))
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.generate("a", GREEDY, tokenization_kwargs={"max_length": 3})
    with pytest.raises(RequestError, match="reach the template as one text"):
        llm.chat(CHAT, GREEDY, chat_template_content_format="openai")


def test_the_bar_says_tokens_a_second_and_is_quiet_without_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "tokens/s" in shown and "of outputs" in shown
    llm.generate(["a"], GREEDY, use_tqdm=functools.partial(tqdm, bar_format="mine {n}/{total}"))
    assert "mine 1/1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["encode", "reward", "classify", "beam_search", "release_kv_cache_memory", "llm_engine"]
)
def test_what_there_is_not_says_what_to_use(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM has no '{name}': "):
        getattr(llm, name)


def test_an_llm_that_nobody_holds_ends_its_processes(small: dict[str, Any]) -> None:
    before = set(psutil.Process().children())
    mine = LLM(**small, skip_tokenizer_init=True, chat_template=TEMPLATE)
    [output] = mine.chat(CHAT, GREEDY)
    assert output.prompt == "[system] You count.\n[user] Count from 3 to 9.\n"
    assert output.outputs[0].text == "" and output.outputs[0].token_ids
    held = weakref.ref(mine)
    del mine
    gc.collect()
    assert held() is None
    assert set(psutil.Process().children()) == before


def test_params_have_all_fields_of_those_that_stages_know_with_the_same_defaults() -> None:
    ours, theirs = SamplingParams(), params.RequestParams()
    assert len(SHARED_FIELDS) > 20
    for name in SHARED_FIELDS:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_params_that_say_their_defaults_ask_for_nothing() -> None:
    said = SamplingParams(
        n=1, best_of=1, detokenize=True, spaces_between_special_tokens=True, output_kind=2,
        stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, flat_logprobs=False,
        logits_processors=None, extra_args={}, skip_reading_prefix_cache=False, seed=-1,
        thinking_token_budget=-1, guided_decoding=None, repetition_detection=None,
    )  # fmt: skip
    assert said.seed is None and said.thinking_token_budget is None
    assert SamplingParams.from_optional(temperature=None, max_tokens=None).max_tokens is None
    assert said.clone() == said is not said.clone()


def test_params_name_all_that_there_is_not() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(best_of=4, logits_processors=[print], spaces_between_special_tokens=False)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any(line.startswith("best_of=4: use n") for line in lines)
    with pytest.raises(RequestError, match="no beam search"):
        BeamSearchParams(beam_width=5, max_tokens=50)
    with pytest.raises(RequestError, match="regex and choice"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(RequestError, match="not nothing"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match="structural_tag"):
        StructuredOutputsParams(json={}, structural_tag="{}")


def test_keywords_that_ask_for_nothing_are_left_out() -> None:
    given: dict[str, Any] = {
        "model": "m", "tokenizer": "m", "trust_remote_code": False, "quantization": None,
        "enable_lora": False, "pipeline_parallel_size": 1, "swap_space": 0, "seed": None,
        "disable_log_stats": True, "enable_chunked_prefill": True, "max_model_len": 64,
        "tensor_parallel_size": 1, "dtype": "half", "limit_mm_per_prompt": {"image": 0},
        "compilation_config": {}, "hf_overrides": {}, "speculative_config": None,
        "distributed_executor_backend": "mp", "generation_config": "auto", "max_logprobs": 20,
        "served_model_name": ["mine"],
    }  # fmt: skip
    assert settings_of(given) == {
        "model": "m", "enable_lora": False, "max_model_len": 64, "tp": 1, "dtype": "float16",
        "served_model_name": "mine",
    }  # fmt: skip
    nothing: dict[str, Any] = dict.fromkeys([*VLLM_KEYWORDS, *NEUTRAL_VALUES])
    assert settings_of(nothing) == {}
    assert settings_of({name: values[0] for name, values in NEUTRAL_VALUES.items()}) == {}


def test_all_keywords_that_ask_for_something_else_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        LLM(
            "m", tokenizer="other", max_cpu_loras=9, pipeline_parallel_size=2, seed=-5,
            trust_remote_code=True, kv_cache_memory_bytes=2**30, generation_config="vllm",
            max_modl_len=10, enable_chunked_prefill=False, cpu_offload_gb=4, spec_tokens=3,
            swap_space=4,
        )  # fmt: skip
    said = str(caught.value).splitlines()
    assert "unknown setting 'max_modl_len'; did you mean 'max_model_len'?" in said
    lines = dict(line.split(": ", 1) for line in said if ": " in line)
    assert len(lines) == len(said) - 1 == 11
    assert lines["swap_space=4"].startswith("Keys and values stay in the device's memory.")
    assert lines["tokenizer='other'"].startswith("The tokenizer is the checkpoint's")
    assert "when they are needed" in lines["max_cpu_loras=9"]
    assert lines["pipeline_parallel_size=2"] == "A group is as large as tp."
    assert lines["trust_remote_code=True"] == "No Python of a checkpoint runs."
    assert lines["kv_cache_memory_bytes=1073741824"].startswith("Use kv_pages.")
    assert "SamplingParams()" in lines["generation_config='vllm'"]
    assert "always cut" in lines["enable_chunked_prefill=False"]
    assert "num_speculative_tokens" in lines["spec_tokens=3"]
    assert "--seed" in lines
