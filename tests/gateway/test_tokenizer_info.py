"""/tokenizer_info and token_strs: what a client needs that has no copy of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_pipeline import StartGateway

from pipeinfer.demo import demo_path
from pipeinfer.text import read_tokenizer_config, template_sources, tokenizer_info


def told(config: Any, templates: Any = None, context_length: int = 100) -> Any:
    return json.loads(tokenizer_info(config, templates or {}, context_length))


async def test_it_is_the_configuration_with_the_template_in_use(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await start_gateway()
    found = (await gateway.http().get(f"{gateway.url}/tokenizer_info")).json()
    config = read_tokenizer_config(demo_path())
    assert found.items() >= config.items()
    assert found["chat_template"] == template_sources(demo_path(), config, "")["default"]
    assert found["eos_token"] == "<|im_end|>" and found["bos_token"] is None
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }} own")
    gateway = await start_gateway(chat_template=str(path))
    found = (await gateway.http().get(f"{gateway.url}/tokenizer_info")).json()
    assert found["chat_template"] == "{{ messages }} own"


async def test_it_needs_the_key_that_tokenize_needs(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    url, right = f"{gateway.url}/tokenizer_info", {"Authorization": "Bearer secret"}
    for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), (right, 200)):
        answer = await gateway.http().get(url, headers=headers)
        assert answer.status_code == status and ("chat_template" in answer.text) == (status == 200)
    assert (await gateway.http().get(f"{gateway.url}//tokenizer_info")).status_code == 401
    assert (await gateway.http().post(url, headers=right)).status_code == 405


def test_tokens_are_texts_and_always_there() -> None:
    eos = {"content": "</s>", "lstrip": False, "special": True}
    found = told({"eos_token": eos, "image_token": "<image>", "pad_token": None})
    assert (found["eos_token"], found["pad_token"], found["unk_token"]) == ("</s>", None, None)
    assert found["image_token"] == "<image>"
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told({"tokenizer_class": "Qwen2Tokenizer"})["tokenizer_class"] == "Qwen2Tokenizer"


@pytest.mark.parametrize(
    ("most", "context", "shown"),
    [(4096, 100, 4096), (10**30, 100, 100), (None, 100, 100), (10**30, 0, None), ("x", 7, 7)],
)
def test_a_length_that_means_no_bound_is_the_servers(most: Any, context: int, shown: Any) -> None:
    assert told({"model_max_length": most}, {}, context)["model_max_length"] == shown


def test_no_path_of_a_machine_is_told() -> None:
    config = {"name_or_path": "/home/me/secret", "tokenizer_file": "/a", "auto_map": {"x": "y.py"}}
    assert "secret" not in str(found := told(config)) and not found.keys() & config.keys()


def test_of_several_templates_the_default_one_is_told() -> None:
    assert told({}, {"default": "a", "tool_use": "b"})["chat_template"] == "a"
    assert told({}, {"rag": "b"})["chat_template"] is None


@pytest.mark.parametrize("asked", [True, False, None])
async def test_tokenize_gives_the_texts_of_tokens_if_asked(
    start_gateway: StartGateway, asked: bool | None
) -> None:
    gateway = await start_gateway()
    for prompt in ({"prompt": "one two"}, {"messages": [{"role": "user", "content": "one two"}]}):
        body = {**prompt, "return_token_strs": asked}
        found = (await gateway.http().post(f"{gateway.url}/tokenize", json=body)).json()
        assert found["token_strs"] == (["one ", "two "] if asked else None)
        assert gateway.pipeline.submits[-1].return_token_strs is bool(asked)
