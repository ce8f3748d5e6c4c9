"""Chats that go on with their last message, and templates that a request brings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.tokenizer.chats import KEPT, MOST_TEMPLATE_LETTERS, Chats
from pipeinfer.tokenizer.templates import ChatTemplates, TemplateFailed

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>")
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def chats(source: str = CHATML, others: bool = True) -> Chats:
    return Chats(CONTROL, ChatTemplates({"default": source}, {}, str, others))


def conversation(content: object, role: str = "assistant") -> list:
    return [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]


@given(st.text(alphabet="a <|im_end>\n\ue000\U0010fffd", min_size=1).filter(str.strip))
def test_a_last_message_is_left_open_and_keeps_the_white_space_at_its_end(content: str) -> None:
    """Also what looks like a control token, or a mark."""
    rendered = chats().render(conversation(content), OPEN)
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.text == head + content.lstrip()
    if rendered.marked is not None:
        text = rendered.marked.text
        assert (text.count("<|im_start|>"), text.count("<|im_end|>")) == (2, 1), "the template's"
        assert rendered.marked.marks is None or rendered.marked.marks.remove(text) == rendered.text


def test_parts_of_a_last_message_go_on_where_the_last_one_ends() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    assert chats().render(conversation(parts), OPEN).text.endswith("assistant\none\ntwo ")


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
    for number in range(2 * KEPT):
        source = f"{number}: {{{{ messages[-1].content }}}}<|im_end|>"
        rendered = own.render(hi, {"chat_template": source})
        assert rendered.text == f"{number}: Hi <|im_end|><|im_end|>"
        assert rendered.marked is not None and rendered.marked.text.count("<|im_end|>") == 1
    assert own.render(hi, {}).text == usual.text
    assert own.weigh(hi, {"chat_template": "x"}) > 10 * own.weigh(hi, {})


@pytest.mark.parametrize(
    ("source", "trusted"),
    [("x", False), ("{% if %}", True), ("x" * (MOST_TEMPLATE_LETTERS + 1), True), (3, True)],
)
def test_a_requests_template_is_refused_by_its_name(source: object, trusted: bool) -> None:
    with pytest.raises(TemplateFailed) as caught:
        chats(others=trusted).render(conversation("x"), {"chat_template": source})
    assert caught.value.param == "chat_template"


def test_a_requests_template_has_the_sandbox_of_the_models_own() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) }}"):
        with pytest.raises(TemplateFailed):
            chats().render(conversation("x"), {"chat_template": source})
