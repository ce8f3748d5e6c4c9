"""Adapters of LLM.generate, as vLLM's scripts ask for them: every stage, one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_files import checkpoint_with_adapters, peft_logits, write_adapter
from checkpoints import load_reference, make_checkpoint
from pipeinfer import LLM, LoRARequest, SamplingParams
from pipeinfer.llm import ConfigurationError, RequestError
from pipeinfer.offline import calls
from pipeinfer.settings import Settings

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
PROMPTS = ["the quick brown fox", "jumps", "over a lazy dog and further"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, and adapters of it."""
    return checkpoint_with_adapters(tmp_path_factory.mktemp("lora"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def adapted(folders: dict[str, Path], in_process: dict[str, Any]) -> Iterator[LLM]:
    further = {"enable_lora": True, "max_loras": 2, "dtype": "float32"}
    with LLM(folders["model"], **further, **in_process) as llm:
        yield llm


def request(folders: dict[str, Path], name: str) -> LoRARequest:
    return LoRARequest(name, 1, str(folders[name]))


def test_tokens_are_those_of_peft_whatever_the_batch_has(
    adapted: LLM, folders: dict[str, Path]
) -> None:
    """Three adapters take turns in two slots, beside rows without one."""
    asked = [None, *(request(folders, name) for name in ("one", "two", "three"))]
    prompts = [prompt for prompt in PROMPTS for _ in asked]
    outputs = adapted.generate(prompts, GREEDY, lora_request=asked * len(PROMPTS))
    reference = load_reference(folders["model"])
    for output, adapter in zip(outputs, asked * len(PROMPTS), strict=True):
        assert output.lora_request is adapter
        choice = output.outputs[0]
        ids = torch.tensor([*output.prompt_token_ids, *choice.token_ids])
        if adapter is None:
            with torch.inference_mode():
                logits = reference(ids[None]).logits[0]
        else:
            logits = peft_logits(reference, Path(adapter.lora_path), ids)
        expected = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        assert choice.token_ids == expected.argmax(-1).tolist()
        given = [next(iter(one.values())).logprob for one in choice.logprobs or ()]
        assert torch.allclose(torch.tensor(given), expected.max(-1).values, atol=1e-3)


def test_cached_prefixes_go_by_what_an_adapter_holds(
    adapted: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    prompt = "a prompt of more than a page " * 12

    def cached(adapter: LoRARequest | None) -> int:
        return adapted.generate(prompt, GREEDY, lora_request=adapter)[0].cached_tokens

    assert cached(None) == 0 and cached(None) > 0
    assert cached(request(folders, "one")) == 0
    assert cached(request(folders, "two")) == 0
    assert cached(LoRARequest("renamed", 7, str(folders["one"]))) > 0


def test_adapters_that_cannot_be_served_are_refused(
    adapted: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="no folder of an adapter"):
        adapted.generate("a", GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "none")))
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", hidden_size=32)
    write_adapter(tmp_path / "wide", load_reference(other), 0)
    with pytest.raises(RequestError, match=r"cannot be loaded.*the model's is"):
        adapted.generate("a", GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "wide")))
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        adapted.generate("a", GREEDY, lora_request="one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts, but 1 lora_request"):
        adapted.generate(["a", "b"], GREEDY, lora_request=[None])


def test_settings_that_do_not_go_together_are_refused(folders: dict[str, Path]) -> None:
    for options, message in (
        ({"lora_modules": f"one={folders['one']}"}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "exact": True}, "--exact: not with --enable-lora"),
        ({"enable_lora": True, "task": "embed"}, "--enable-lora: not with --task embed"),
        ({"enable_lora": True, "lora_modules": "one"}, "'one' is not NAME=PATH"),
        ({"enable_lora": True, "lora_modules": "a=/x a=/y"}, "the name 'a' is taken"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            LLM(folders["model"], **options)  # type: ignore[arg-type]


def test_adapters_that_were_used_long_ago_are_not_remembered(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "KNOWN_ADAPTERS", 2)
    known = calls.OfflineAdapters(Settings(enable_lora=True))
    names = ("one", "b", "one", "c", "d")
    assert [known.of(LoRARequest(name, 1, str(folders["one"]))).name for name in names] == [*names]
    assert [key[0] for key in known._known] == ["c", "d"]
    known.of(LoRARequest("c", 1, str(folders["one"])))
    known.of(LoRARequest("e", 1, str(folders["one"])))
    assert [key[0] for key in known._known] == ["c", "e"], "the one named longest ago goes"
