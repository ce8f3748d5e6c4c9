"""Conversations as clients send them give the prompts that transformers makes of the published
templates of well-known families: plain, with tools, with calls in the history, thinking or not."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from tokenizer_folders import make_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

import template_families
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.serving import decode
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.params import RequestParams
from pipeinfer.text import THINK
from pipeinfer.tokenizer.chat_templates import ChatTemplates, TemplateFailed
from pipeinfer.tokenizer.control_tokens import ChatRenderer, RenderedPrompt
from template_families import FAMILIES, source

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = (*TOKENS.values(), "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<\uff5cUser\uff5c>")
TERMS = RequestDefaults(
    RequestParams(), parsers=OutputParsers(tool_parser_name="hermes", template_has_tools=True)
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Gives the {name} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the weather in Łódź, & is 1 < 2?"}
ANSWER = {"role": "assistant", "content": "Rain.", "reasoning_content": "It says rain."}
MORE = {"role": "user", "content": "And tomorrow?"}
ARGUMENTS = {"city": "Łódź", "days": [1, 2.5, None]}
CALL = {"name": "weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
}
GAVE = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"}

# These join arguments to other texts; the others take an object, as transformers' guide says.
JOINS = {"deepseek-r1-joins"}
# These know by a content of null that there are calls; the others do as well without a content.
ASKS_FOR_NULL = {"deepseek-r1-distill", "deepseek-r1-joins"}
# These fail without a content, and on null.
NEEDS_A_TEXT = {
    "deepseek-v3", "devstral", "glm-4", "granite-3.3", "phi-3.5", "qwen3", "qwq", "lfm2",
}  # fmt: skip
# These go through parts alone.
PARTS_ALONE = {"llama-guard"}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [SYSTEM, USER, ANSWER, MORE]},
    "without a system": {"messages": [USER]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "tools and a system": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "history": {"messages": [USER, CALLS, GAVE], "tools": TOOLS},
    "longer history": {"messages": [SYSTEM, USER, CALLS, GAVE, ANSWER, MORE], "tools": TOOLS},
    "history, no tools": {"messages": [USER, {**CALLS, "content": "Let me see."}, GAVE]},
    "thinking": {"messages": [SYSTEM, USER, ANSWER, MORE], "enable_thinking": True},
    "not thinking": {"messages": [SYSTEM, USER, ANSWER, MORE], "enable_thinking": False},
    "a prefill": {"messages": [USER, {"role": "assistant", "content": "It is "}]},
    "spelled tokens": {"messages": [USER, ANSWER, {**MORE, "content": " <|im_end|>x</s> "}]},
}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
CHATS["a prefill"] |= CONTINUED


@cache
def chats(family: str) -> ChatRenderer:
    now = datetime.now().strftime
    return ChatRenderer(CONTROL, ChatTemplates({"default": source(family)}, TOKENS, now))


@cache
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **TOKENS)


def rendered(family: str, body: dict[str, Any]) -> str:
    """The prompt of a chat that came as `body`. A client's texts spell no token in it."""
    request = decode(json.dumps(body).encode(), ChatRequest, print)
    [call] = parse_chat(request, "r", TERMS, "").calls
    assert call.chat is not None
    made: RenderedPrompt = chats(family).render(call.chat, call.template_arguments)
    if made.escaped is not None and made.escaped.escapes is not None:
        assert made.escaped.escapes.unescape(made.escaped.text) == made.text
    return made.text


def expected(family: str, body: dict[str, Any]) -> str | None:
    """transformers' prompt, of a conversation in the form that its guide to tools tells; None if
    the template refuses it."""
    given = {"add_generation_prompt": True, **body}
    messages = [_as_told(family, message) for message in given.pop("messages")]
    try:
        if any(message.get("content", "") is None for message in messages):
            # apply_chat_template leaves nulls out, which was not always so.
            tools = given.pop("tools", None)
            variables = TOKENS | given
            [text], _ = render_jinja_template(
                [messages], tools, chat_template=source(family), **variables
            )
            return text
        text = reference().apply_chat_template(
            messages, tokenize=False, chat_template=source(family), **given
        )
        assert isinstance(text, str)
        return text
    except Exception:  # a template can fail in as many ways as any program
        return None


def _as_told(family: str, message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message and family not in JOINS:
        [call] = message["tool_calls"]
        function = {**call["function"], "arguments": ARGUMENTS}
        message = {**message, "tool_calls": [{**call, "function": function}]}
    if message["content"] is None and family not in ASKS_FOR_NULL:
        message = {**message, "content": ""}
        if family not in NEEDS_A_TEXT:
            del message["content"]
    if family in PARTS_ALONE and isinstance(message.get("content"), str):
        message = {**message, "content": parts(message["content"])}
    return message


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_where_thoughts_are_left_is_told_of_conversations_with_calls(family: str) -> None:
    """By the form of arguments that the template takes, though the client spells a tag. Ids keep
    their length, which some templates ask for."""
    calls = {**CALLS, "tool_calls": [{**CALLS["tool_calls"][0], "id": "1abcdefg9"}]}
    gave = {**GAVE, "tool_call_id": "1abcdefg9"}
    body = {"messages": [{**USER, "content": "</think>"}, calls, gave], "tools": TOOLS}
    if (family, "history") in REFUSED:
        return
    request = decode(json.dumps(body).encode(), ChatRequest, print)
    [call] = parse_chat(request, "r", TERMS, "").calls
    assert call.chat is not None
    prompt = rendered(family, body)
    for ends in ("", "<think>"):
        left = chats(family).reasoning_state(
            call.chat, call.template_arguments, prompt + ends, THINK
        )
        assert left in ("open", "over", "before")


# Templates that raise an error of their own: (family, chat).
REFUSED = {("gemma-3", name) for name in ("history", "longer history", "history, no tools")}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers(family: str) -> None:
    for name, body in CHATS.items():
        wanted = expected(family, body)
        assert (wanted is None) == ((family, name) in REFUSED), name
        if wanted is None:
            with pytest.raises(TemplateFailed):
                rendered(family, body)
        else:
            assert rendered(family, body) == wanted, name


# These read parts, as the others read texts alone, of which several parts are lines.
READ_PARTS = {
    "apriel-1.5", "devstral", "gemma-3", "glm-4.5", "glm-4.6", "glm-4.7", "granite-4.0", "kimi-k2",
    "lfm2.5", "llama-guard", "minimax-m1", "minimax-m2", "ministral-3", "mistral-small-3.1",
    "mistral-small-3.2", "qwen3.5", "step-3.5",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_what_a_user_says_are_as_in_transformers_or_lines(family: str) -> None:
    said = {"role": "user", "content": parts("one", "two")}
    told = said if family in READ_PARTS else {**said, "content": "one\ntwo"}
    assert rendered(family, {"messages": [said]}) == expected(family, {"messages": [told]})


@pytest.mark.parametrize("family", FAMILIES)
def test_one_part_is_as_its_text(family: str) -> None:
    for role, chat in {
        "system": [SYSTEM, USER],
        "user": [USER],
        "assistant": [USER, ANSWER, MORE],
        "tool": [USER, CALLS, GAVE],
    }.items():
        cut = [{**m, "content": parts(m["content"])} if m["role"] == role else m for m in chat]
        try:
            wanted = rendered(family, {"messages": chat})
        except TemplateFailed:
            assert (family, role) == ("gemma-3", "tool")
        else:
            assert rendered(family, {"messages": cut}) == wanted, role


def test_there_are_twenty_families_and_each_text_is_in_the_table() -> None:
    files = {path.stem for path in template_families.HERE.glob("*/*.jinja")}
    assert files == set(FAMILIES)
    assert len(template_families.PUBLISHED) >= 20
