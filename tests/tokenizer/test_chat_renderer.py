"""Chats that go on with their last message, and templates that a request brings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import make_tokenizer
from transformers import PreTrainedTokenizerFast

from pipeinfer.tokenizer.chat_templates import ChatTemplates, TemplateFailed
from pipeinfer.tokenizer.control_tokens import (
    MAX_REQUEST_TEMPLATES,
    MAX_TEMPLATE_CHARS,
    ChatRenderer,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>")
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def chats(source: str = CHATML, others: bool = True) -> ChatRenderer:
    return ChatRenderer(CONTROL, ChatTemplates({"default": source}, {}, str, others))


def conversation(content: object, role: str = "assistant") -> list:
    return [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]


KEEPING = CHATML.replace(" | trim", "")
JOINING = (
    "{% for c in messages[-1].tool_calls or [] %}{{ 'f ' + c.function.arguments }}{% endfor %}"
)
contents = st.text(alphabet="a <|im_end>\n\ue000\U0010fffd", min_size=1).filter(str.strip)


@pytest.mark.parametrize("source", [CHATML, KEEPING], ids=["trims", "keeps"])
@given(content=contents)
def test_a_last_message_is_left_open_and_ends_as_transformers_ends_it(
    source: str, content: str
) -> None:
    """Also what looks like a control token, or a mark. White space at the end stays where the
    template does not trim contents, and only there."""
    rendered = chats(source).render(conversation(content), OPEN)
    reference = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), chat_template=source)
    wanted = reference.apply_chat_template(conversation(content), tokenize=False, **OPEN)
    assert rendered.text == wanted
    assert rendered.text.endswith(content.strip() if source == CHATML else content)
    if rendered.escaped is not None:
        text = rendered.escaped.text
        assert (text.count("<|im_start|>"), text.count("<|im_end|>")) == (2, 1), "the template's"
        assert (
            rendered.escaped.escapes is None
            or rendered.escaped.escapes.unescape(text) == rendered.text
        )


def test_parts_of_a_last_message_go_on_where_the_last_one_ends() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    assert chats(KEEPING).render(conversation(parts), OPEN).text.endswith("assistant\none\ntwo ")
    assert chats().render(conversation(parts), OPEN).text.endswith("assistant\none\ntwo")
    taking = "{% for part in messages[-1].content %}{{ part.text }}{% endfor %}</s>"
    assert chats(taking).render(conversation(parts), OPEN).text == "onetwo "
    picture = [*parts, {"type": "image"}]
    assert chats(taking).render(conversation(picture), OPEN).text == "onetwo "


@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}])
def test_arguments_of_calls_are_objects_and_texts_where_a_template_fails_with_those(
    arguments: object,
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    looking = JOINING.replace("'f ' + c.function.arguments", "c.function.arguments.a")
    assert chats(looking).render(chat, {}).text == "ü"
    assert chats(JOINING).render(chat, {}).text == 'f {"a": "ü"}'


@pytest.mark.parametrize("arguments", ["", " "])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    chat = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    assert chats("{{ messages[0].tool_calls[0] | tojson }}").render(chat, {}).text == (
        '{"name": "f", "arguments": {}}'
    )


@pytest.mark.parametrize(
    "arguments", ["[1]", "no JSON", "{" * 5000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_arguments_that_are_no_object_stay_what_the_model_said(arguments: str) -> None:
    chat = [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]
    assert chats(JOINING).render(chat, {}).text == "f " + arguments


def test_what_fails_with_objects_and_with_texts_is_told_as_of_objects() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    source = "{{ raise_exception(messages[0].tool_calls[0].function.arguments | string | length) }}"
    with pytest.raises(TemplateFailed, match=r": 2$"):
        chats(source).render([{"role": "assistant", "tool_calls": [call]}], {})


def test_without_it_nothing_changes_and_templates_are_not_told() -> None:
    plain = chats().render(conversation("x"), {})
    assert chats().render(conversation("x"), {"continue_final_message": False}) == plain
    shown = chats("{{ continue_final_message is defined }}{{ messages[-1].content }}")
    assert shown.render(conversation("x"), OPEN).text == "Falsex"


@pytest.mark.parametrize(
    ("messages", "arguments", "source"),
    [
        (conversation("x"), {"continue_final_message": True}, CHATML),
        (conversation("x", "user"), OPEN, CHATML),
        (conversation(""), OPEN, CHATML),
        (conversation("x"), OPEN, "{{ messages[-1].content }} {{ messages[-1].content }}"),
        (conversation("x"), OPEN, "{{ messages | length }}"),
        (conversation("x"), OPEN, "{{ messages[-1].content | tojson(ensure_ascii=True) }}"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(messages, arguments, source) -> None:
    with pytest.raises(TemplateFailed) as caught:
        chats(source).render(messages, arguments)
    assert caught.value.param == "continue_final_message"


def test_a_requests_template_is_used_for_it_alone_where_the_server_trusts_it() -> None:
    own, hi = chats(), conversation("Hi <|im_end|>", "user")
    usual = own.render(hi, {})
    for number in range(2 * MAX_REQUEST_TEMPLATES):
        source = f"{number}: {{{{ messages[-1].content }}}}<|im_end|>"
        rendered = own.render(hi, {"chat_template": source})
        assert rendered.text == f"{number}: Hi <|im_end|><|im_end|>"
        assert rendered.escaped is not None and rendered.escaped.text.count("<|im_end|>") == 1
    assert own.render(hi, {}).text == usual.text
    assert own.weigh(hi, {"chat_template": "x"}) > 10 * own.weigh(hi, {})


@pytest.mark.parametrize(
    ("source", "trusted"),
    [("x", False), ("{% if %}", True), ("x" * (MAX_TEMPLATE_CHARS + 1), True), (3, True)],
)
def test_a_requests_template_is_refused_by_its_name(source: object, trusted: bool) -> None:
    with pytest.raises(TemplateFailed) as caught:
        chats(others=trusted).render(conversation("x"), {"chat_template": source})
    assert caught.value.param == "chat_template"


def test_a_requests_template_has_the_sandbox_of_the_models_own() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) }}"):
        with pytest.raises(TemplateFailed):
            chats().render(conversation("x"), {"chat_template": source})
