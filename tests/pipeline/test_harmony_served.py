"""A model that speaks harmony, gpt-oss in small with the published template, through all stages:
its markers are tokens of prompts and answers, its answers end with a call, and forms hold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from checkpoints import make_checkpoint
from harmony_tokens import tokenizer
from servers import Server
from template_families import HERE

TODAY = 'strftime_now("%Y-%m-%d")'
# A day that stays: what is sampled depends on the prompt.
TEMPLATE = (HERE / "published" / "gpt-oss.jinja").read_text().replace(TODAY, '"2026-11-30"')
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Wien", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CITIES = ({"city": "Wien"}, {"city": "Rom"})
QUESTION: Any = [{"role": "user", "content": "Where <|end|> is it fine?"}]
TOKENS = tokenizer()
RETURN, CALL, END, MESSAGE = map(
    TOKENS.token_to_id, ("<|return|>", "<|call|>", "<|end|>", "<|message|>")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("gpt-oss")
    make_checkpoint(
        folder,
        "GptOssForCausalLM",
        tokenizer=False,
        eos_token_id=RETURN,
        pad_token_id=RETURN,
        max_position_embeddings=4096,
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [RETURN]}))
    TOKENS.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--served-model-name", "test", "--dtype", "float32", "--kv-pages", "512")
    with Server(str(folder), *flags, "--threads", "1", "--no-page") as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(api: openai.OpenAI, **fields: Any) -> Any:
    """ReasoningContext of a model that was never trained end soon where their end is likely."""
    usual: Any = {"max_tokens": 400, "seed": 3, "logit_bias": {str(END): 6}}
    return api.chat.completions.create(model="test", messages=QUESTION, **(usual | fields))


def test_calls_and_forms_are_held_behind_thoughts_whole_and_streamed(api: openai.OpenAI) -> None:
    forced: Any = {"tools": [TOOL], "tool_choice": "required"}
    [choice] = asked(api, **forced).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) in CITIES
    chunks = [chunk.choices[0].delta for chunk in asked(api, **forced, stream=True)]
    parts = [call.function for delta in chunks for call in delta.tool_calls or ()]
    assert "".join(part.arguments for part in parts) == call.function.arguments
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        [choice] = asked(api, response_format=FORM, **fields).choices
        assert choice.finish_reason == "stop" and json.loads(choice.message.content) in CITIES


def test_tokens_of_the_channel_of_thoughts_are_counted(api: openai.OpenAI) -> None:
    """Between the marker of its message and the next one, as the ids themselves say."""
    analysis = {str(TOKENS.encode("analysis").ids[0]): 9, str(END): 5}
    form: Any = {"response_format": FORM, "logit_bias": analysis, "max_tokens": 150}
    made = asked(api, **form, extra_body={"return_token_ids": True})
    ids = made.choices[0].token_ids
    messages = TOKENS.decode(ids, skip_special_tokens=False).split("<|message|>")
    assert all(head.endswith("analysis") for head in messages[:-1]) and len(messages) > 3
    reasoning, amid = 0, False
    for token in ids:
        amid = amid and token != END
        reasoning += amid
        amid = amid or token == MESSAGE
    assert reasoning and made.usage.completion_tokens_details.reasoning_tokens == reasoning
    chunks = [*asked(api, **form, stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == reasoning


def test_an_answer_ends_with_a_call_though_the_checkpoint_does_not_say_so(
    api: openai.OpenAI,
) -> None:
    made = asked(api, temperature=0, logit_bias={str(CALL): 100})
    assert made.usage.completion_tokens == 1 and made.choices[0].finish_reason == "stop"


def test_a_response_is_held_as_a_chat_is(server: Server) -> None:
    tool = {"type": "function", "name": "weather", "parameters": CITY}
    response = {
        "input": "Hi",
        "tools": [tool],
        "tool_choice": "required",
        "seed": 3,
        "logit_bias": {str(END): 6},
        "reasoning": {"effort": "low"},
    }
    made = httpx.post(f"{server.url}/v1/responses", json=response, timeout=60).json()
    assert made["status"] == "completed", made
    assert json.loads(made["output"][-1]["arguments"]) in CITIES


def test_the_template_writes_tokens_and_a_client_writes_letters(server: Server) -> None:
    """The client's <|end|> is text; else the ids are those of transformers."""
    reference = PreTrainedTokenizerFast(tokenizer_object=TOKENS, chat_template=TEMPLATE)
    body = {"model": "test", "messages": QUESTION}
    ids = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    theirs: Any = reference.apply_chat_template(QUESTION, add_generation_prompt=True)
    spelled = [i for letter in "<|end|>" for i in TOKENS.encode(letter).ids]
    at = (
        len(theirs["input_ids"])
        - 1
        - theirs["input_ids"][::-1].index(TOKENS.token_to_id("<|message|>"))
    )
    at = theirs["input_ids"].index(END, at)
    assert ids == [*theirs["input_ids"][:at], *spelled, *theirs["input_ids"][at + 1 :]]


def test_without_a_page_there_is_no_feed(server: Server) -> None:
    assert server.get("/monitor/events")[0] == server.get("/")[0] == 404


NOTE: Any = {
    "type": "object",
    "properties": {"note": {"type": "string", "minLength": 60, "maxLength": 60}},
    "required": ["note"],
    "additionalProperties": False,
}


class Streamed:
    """A streamed chat that thinks and then calls a tool; `during(self)` is asked after each chunk,
    and told what came so far."""

    def __init__(self, api: openai.OpenAI, during: Callable[[Streamed], object]) -> None:
        self.reasoning, self.content, self.arguments = "", "", ""
        self.finish: str | None = None
        tool = {"type": "function", "function": {"name": "write", "parameters": NOTE}}
        likely = {str(TOKENS.token_to_id("a")): 4}  # so that it begins with its analysis
        more: Any = {"tool_choice": "required", "max_tokens": 900, "seed": 10, "logit_bias": likely}
        said = asked(api, tools=[tool], stream=True, **more)
        for chunk in said:
            delta = chunk.choices[0].delta
            self.reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            self.content += delta.content or ""
            calls = [call.function for call in delta.tool_calls or ()]
            self.arguments += "".join(call.arguments or "" for call in calls)
            self.finish = chunk.choices[0].finish_reason or self.finish
            during(self)

    def whole(self) -> tuple[object, ...]:
        return self.reasoning, self.content, self.arguments, self.finish


def test_an_engine_that_dies_amid_thoughts_and_amid_a_call_changes_neither(
    api: openai.OpenAI, server: Server
) -> None:
    calm = Streamed(api, lambda _: None)
    assert len(calm.reasoning) > 50 and calm.finish == "tool_calls"
    assert len(json.loads(calm.arguments)["note"]) == 60
    killed: dict[str, int] = {}

    def another() -> int | None:
        pid = server.pid("engine")
        return None if pid in killed.values() else pid

    def strike(said: Streamed) -> None:
        """Once in each. The gateway may have the tokens of a new engine before it hears of it."""
        where = "call" if len(said.arguments) > 20 else "thoughts" * (len(said.reasoning) > 5)
        if where and where not in killed:
            killed[where] = server.wait(another, "the engine is another one")
            os.kill(killed[where], signal.SIGKILL)

    assert Streamed(api, strike).whole() == calm.whole()
    assert [*killed] == ["thoughts", "call"]
