"""Log-probs without HTTP, as vLLM's callers know them: for each position a dict by token id."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeinfer import LLM, AsyncLLM, SamplingParams
from pipeinfer.demo import demo_path
from pipeinfer.llm import Logprob, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def expected(ids: list[int]) -> torch.Tensor:
    """[n, vocab]: log-probs of what follows each."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype="float32").eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def check(found: dict[int, Logprob], theirs: torch.Tensor, token: int, most: int) -> None:
    assert next(iter(found)) == token and len(found) in (most, most + 1)
    for other, one in found.items():
        assert one.logprob == pytest.approx(float(theirs[other]), abs=1e-4)
        assert isinstance(one.decoded_token, str)
    best = sorted(found.values(), key=lambda one: one.rank)[:most]
    assert [one.rank for one in best] == list(range(1, most + 1))
    assert best[0].logprob == pytest.approx(float(theirs.max()), abs=1e-4)


def test_outputs_and_prompts_have_transformers_log_probs(llm: LLM, prompt_ids) -> None:
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompts = prompt_ids[:3]
    for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        output = result.outputs[0]
        theirs = expected(prompt + output.token_ids)
        assert result.prompt_logprobs is not None and output.logprobs is not None
        assert result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(prompt) and len(output.logprobs) == 12
        for n, (token, found) in enumerate(zip(prompt, result.prompt_logprobs, strict=True)):
            if found is not None:
                check(found, theirs[n - 1], token, 1)
        for n, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            check(found, theirs[len(prompt) + n - 1], token, 2)


def test_who_asks_for_none_gets_none_beside_those_who_do(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=3)
    results = llm.generate(["a", "a", "a"], [plain, GREEDY, plain], use_tqdm=False)
    assert [r.outputs[0].logprobs is None for r in results] == [True, False, True]
    assert {r.prompt_logprobs is None for r in results} == {True}


def test_a_request_without_output_has_an_empty_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=1, stop_token_ids=[100], logit_bias={100: 100.0})
    (result,) = llm.generate(["a"], params, use_tqdm=False)
    assert result.outputs[0].token_ids == [] and result.outputs[0].logprobs == []


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("most", [-1, 21])
def test_more_than_twenty_alternatives_are_refused(llm: LLM, name: str, most: int) -> None:
    with pytest.raises(RequestError, match=f"{name} must be from 0 to 20") as caught:
        llm.generate(["a"], SamplingParams(**{name: most}), use_tqdm=False)
    assert caught.value.param == name


def test_deltas_carry_the_log_probs_of_their_tokens(in_process) -> None:
    async def run():
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, prompt_logprobs=0)
        async with AsyncLLM(**in_process) as llm:
            return [delta async for delta in llm.generate("Hello", params)]

    deltas = asyncio.run(run())
    prompt = [one for delta in deltas for one in delta.prompt_logprobs or []]
    assert prompt[0] is None and [list(one) for one in prompt[1:]] == [[101], [108], [108], [111]]
    for delta in deltas:
        assert [next(iter(one)) for one in delta.logprobs or []] == delta.token_ids
