"""What scripts for SGLang's Engine do, with only the import changed: the offline examples of its
documentation, in our words and on the demo model."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

import pipeinfer as sgl
from pipeinfer import async_stream_and_merge, stream_and_merge
from pipeinfer.llm import ConfigurationError, RequestError

PROMPTS = ["My name is", "The largest city of France is", "Tomorrow"]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine(in_process: dict[str, Any]) -> Iterator[Any]:
    llm = sgl.Engine(
        model_path="", grammar_backend="xgrammar", disable_overlap_schedule=False,
        trust_remote_code=False, pp_size=1, **in_process,
    )  # fmt: skip
    yield llm
    llm.shutdown()


def test_a_batch_gives_a_dict_for_each_prompt(engine: Any) -> None:
    outputs = engine.generate(PROMPTS, {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 8})
    assert len(outputs) == 3
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        info = output["meta_info"]
        assert isinstance(output["text"], str)
        assert info["prompt_tokens"] == len(prompt)
        assert info["completion_tokens"] == len(output["output_ids"]) <= 8
        assert info["finish_reason"]["type"] in ("length", "stop")


def test_one_prompt_gives_one_dict_and_ids_do_as_texts(engine: Any) -> None:
    one = engine.generate("Hello", GREEDY)
    [listed] = engine.generate(["Hello"], [GREEDY])
    by_ids = engine.generate(input_ids=list(b"Hello"), sampling_params=GREEDY)
    assert one["text"] == listed["text"] == by_ids["text"]
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert len(engine.generate("Hello", {"ignore_eos": True})["output_ids"]) == 128
    two = engine.generate("Hello", {**GREEDY, "n": 2})
    assert [output["text"] for output in two] == [one["text"]] * 2


def test_streams_have_the_text_so_far_and_end_as_the_whole(engine: Any) -> None:
    whole = engine.generate("Hello", GREEDY)
    chunks = list(engine.generate("Hello", GREEDY, stream=True))
    texts = [chunk["text"] for chunk in chunks]
    assert len(texts) > 3 and texts[-1] == whole["text"]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    info = chunks[-1]["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 12}
    assert info["prompt_tokens"] == 5
    assert stream_and_merge(engine, "Hello", GREEDY) == whole["text"]
    last = {
        chunk["index"]: chunk["text"] for chunk in engine.generate(PROMPTS, GREEDY, stream=True)
    }
    assert [last[n] for n in range(3)] == [o["text"] for o in engine.generate(PROMPTS, GREEDY)]


def test_a_stream_that_is_left_is_aborted(engine: Any) -> None:
    for chunk in engine.generate(
        "Hello", {"max_new_tokens": 2000, "ignore_eos": True}, stream=True
    ):
        assert chunk["meta_info"]["completion_tokens"] < 2000
        break
    assert engine.generate("Hello", GREEDY)["text"]


def test_on_a_loop_of_the_callers(engine: Any) -> None:
    expected = [output["text"] for output in engine.generate(PROMPTS, GREEDY)]

    async def run() -> None:
        outputs = await engine.async_generate(PROMPTS, GREEDY)
        assert [output["text"] for output in outputs] == expected
        each = await asyncio.gather(*(engine.async_generate(p, GREEDY) for p in PROMPTS))
        assert [output["text"] for output in each] == expected
        parts = [part async for part in async_stream_and_merge(engine, PROMPTS[0], GREEDY)]
        assert len(parts) > 3 and "".join(parts) == expected[0]

    asyncio.run(run())


def test_forms_and_stops_by_their_names(engine: Any) -> None:
    shape: dict[str, Any] = {"type": "object", "properties": {"n": {"const": 7}}}
    schema = json.dumps({**shape, "required": ["n"], "additionalProperties": False})
    forms = [{"regex": "(Paris|Rome)"}, {"json_schema": schema}, {"ebnf": 'root ::= "Hi" | "Ho"'}]
    texts = [output["text"] for output in engine.generate(["x"] * 3, forms)]
    assert texts[0] in ("Paris", "Rome") and texts[2] in ("Hi", "Ho")
    assert texts[1].replace(" ", "") == '{"n":7}'
    whole = engine.generate("Hello", GREEDY)["text"]
    stop = whole[4:6]
    cut = engine.generate("Hello", {**GREEDY, "stop": stop})
    kept = engine.generate("Hello", {**GREEDY, "stop": [stop], "no_stop_trim": True})
    assert cut["text"] == whole[: whole.index(stop)]
    assert kept["text"] == cut["text"] + stop
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_log_probs_of_outputs_and_prompts(engine: Any) -> None:
    output = engine.generate(
        "Hello", GREEDY, return_logprob=True, top_logprobs_num=2, logprob_start_len=0
    )
    info = output["meta_info"]
    own = info["output_token_logprobs"]
    assert [token for _, token, _ in own] == output["output_ids"]
    assert all(len(top) in (2, 3) and top[0][0] >= top[1][0] for top in info["output_top_logprobs"])
    assert own[0][0] == pytest.approx(info["output_top_logprobs"][0][0][0])
    of_prompt = info["input_token_logprobs"]
    assert of_prompt[0] == (None, ord("H"), None) and len(of_prompt) == 5
    assert all(logprob < 0 for logprob, _, _ in of_prompt[1:])
    plain = engine.generate(
        "Hello", {**GREEDY, "max_new_tokens": 0}, return_logprob=True, logprob_start_len=1
    )
    assert plain["output_ids"] == [] and plain["meta_info"]["output_token_logprobs"] == []
    # Alone, a prompt is computed in steps of other shapes than in other tests.
    got = [logprob for logprob, _, _ in plain["meta_info"]["input_token_logprobs"]]
    assert got == pytest.approx([logprob for logprob, _, _ in of_prompt[1:]], abs=1e-4)


def test_what_there_is_not_is_refused_by_name(engine: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate("x", {"stop_regex": "a", "beam_width": 4, "stop_regx": 1})
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(RequestError, match="image_data"):
        engine.generate("x", GREEDY, image_data=["a.png"])
    engine.generate("x", GREEDY, image_data=None, lora_path=None, return_hidden_states=False)
    with pytest.raises(RequestError, match="either prompt or input_ids"):
        engine.generate()
    with pytest.raises(ConfigurationError, match=r"chunked_prefill_size=4096: Use max_step_tokens"):
        sgl.Engine(model_path="m", chunked_prefill_size=4096)
    assert engine.flush_cache() is True
