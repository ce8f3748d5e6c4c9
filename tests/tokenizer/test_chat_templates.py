"""Conversations are rendered as transformers renders them, and templates stay in their sandbox."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import make_tokenizer
from transformers import PreTrainedTokenizerFast

from pipeinfer.settings import ConfigurationError
from pipeinfer.text import read_tokenizer_config
from pipeinfer.tokenizer.chat_templates import ChatTemplates, TemplateFailed, load_templates
from pipeinfer.tokenizer.control_tokens import ChatRenderer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": " What is 1 < 2 & 'é'? "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTrue.", "name": None}
REASONED = {"role": "assistant", "content": "True.", "reasoning": "One is less."}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, REASONED],
    [USER, ANSWER],
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"add_generation_prompt": False},
    {"tools": [{"type": "function", "function": {"name": "sum", "description": "<é> & 'x'"}}]},
    {"bos_token": "<other>", "date_string": "1 Jan 2000"},
]


def now(template: str) -> str:
    return datetime.now().strftime(template)


def one(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, TOKENS, now)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_rendering_equals_transformers(template: str, arguments: dict[str, Any]) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), chat_template=template, **TOKENS
    )
    rendered = 0
    for chat in CHATS:
        options = {"add_generation_prompt": True, **arguments}
        expected = reference.apply_chat_template(chat, tokenize=False, **options)
        assert one(template).render(chat, arguments) == expected
        rendered += len(str(expected))
    assert rendered > 100


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}",
        "{{ {'b': '<é>', 'a': [1, none]} | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ messages | tojson }} {{ dict(a=1) }} {{ tools is none }} {{ unknown is defined }}",
        "{{ messages[0].missing }}|{{ messages[0].content | upper }}|{{ eos_token }}",
        "  {% if true %}\n  x\n  {% endif %}\n  y\n",
    ],
)
def test_language_extensions_equal_transformers(source: str) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), chat_template=source, **TOKENS
    )
    expected = reference.apply_chat_template([USER, ANSWER], tokenize=False)
    assert one(source).render([USER, ANSWER], {}) == expected


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
EACH = "{% for part in m.content %}{{ part.text }}{% endfor %}"
TYPED = EACH.replace("m.content", "m.content | selectattr('type', 'equalto', 'text')")
CONTENTS = {
    "texts": ("{{ m.content + '|' }}", "one\ntwo|", "three|"),
    "texts, and nothing else": ("{{ m.content if m.content is string }}|", "one\ntwo|", "three|"),
    "writes whatever comes": ("{{ m.content }}|", "one\ntwo|", "three|"),
    "writes whatever comes as JSON": ("{{ m.content | tojson }}|", '"one\\ntwo"|', '"three"|'),
    "the first part": (
        "{{ m.content if m.content is string else m.content[0].text }}|",
        "one\ntwo|",
        "three|",
    ),
    "either": (
        "{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}|",
        "onetwo|",
        "three|",
    ),
    "parts": (EACH + "|", "onetwo|", "three|"),
    "parts by type": (TYPED + "|", "onetwo|", "three|"),
    "parts, or an error": (
        "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}" + EACH + "|",
        "onetwo|",
        "three|",
    ),
    "parts, and only with tools": (
        "{% if not tools %}{{ raise_exception('tools!') }}{% endif %}" + EACH + "|",
        "onetwo|",
        "three|",
    ),
}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", CONTENTS)
def test_a_content_comes_in_the_form_that_the_template_reads(name: str, role: str) -> None:
    shown, of_parts, of_text = CONTENTS[name]
    templates = one("{% for m in messages %}" + shown + "{% endfor %}")
    chat = [{"role": role, "content": PARTS}, {"role": role, "content": "three"}]
    assert templates.render(chat, {"tools": [{}]}) == of_parts + of_text
    assert chat == [{"role": role, "content": PARTS}, {"role": role, "content": "three"}]


def test_roles_may_be_read_in_forms_of_their_own() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '|' }}{% else %}"
        + EACH + "|{% endif %}{% endfor %}"
    )  # fmt: skip
    chat = [{"role": role, "content": PARTS} for role in ("system", "user")]
    assert one(source).render(chat, {}) == "one\ntwo|onetwo|"
    chat = [{"role": role, "content": "three"} for role in ("system", "user")]
    assert one(source).render(chat, {}) == "three|three|"


def test_other_parts_than_texts_are_left_to_the_template() -> None:
    chat = [{"role": "user", "content": [*PARTS, {"type": "image"}]}]
    source = "{% for part in messages[0].content %}{{ part.text or '<image>' }}{% endfor %}"
    assert one(source).render(chat, {}) == "onetwo<image>"


CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
CALLED = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
NULLS = {
    "asks for null": ("{{ 'nothing' if m.content is none }}" + CALLED, "nothingf"),
    "asks for a text": ("{{ 'text' if m.content is string else 'none' }}" + CALLED, "nonef"),
    "asks whether there is one": ("{{ m.content if m.content }}" + CALLED, "f"),
    "writes it": ("{{ m.content }}" + CALLED, "f"),
    "writes it as JSON": ("{{ m.content | tojson }}" + CALLED, '""f'),
    "joins it": ("{{ m.content + '|' }}" + CALLED, "|f"),
    "asks, and joins arguments": (
        "{{ 'nothing' if m.content is none }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}",
        'nothingf{"a": 1}',
    ),
}


@pytest.mark.parametrize("message", [CALLING, {**CALLING, "content": None}], ids=["none", "null"])
@pytest.mark.parametrize("name", NULLS)
def test_a_content_of_null_is_null_where_the_template_can_take_it(
    name: str, message: dict[str, Any]
) -> None:
    shown, expected = NULLS[name]
    templates = one("{% for m in messages %}" + shown + "{% endfor %}")
    assert ChatRenderer((), templates).render([message], {}).text == expected


def test_what_a_template_raises_is_told_to_the_client() -> None:
    with pytest.raises(TemplateFailed, match="refused the messages: roles must alternate"):
        one("{{ raise_exception('roles must alternate') }}").render([USER], {})
    with pytest.raises(TemplateFailed, match="can only concatenate str"):
        one("{{ 'a' + messages[0].content }}").render([{"role": "user", "content": [1]}], {})
    with pytest.raises(TemplateFailed, match="no messages"):
        one("a").render([], {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__name__'] }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{% set _ = messages.append(1) %}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    chat = [dict(USER)]
    with pytest.raises(TemplateFailed):
        one(source).render(chat, {})
    assert chat == [USER]


def test_arguments_cannot_replace_the_messages() -> None:
    assert one("{{ messages | length }}").render([USER], {"messages": [1, 2, 3]}) == "1"


def loaded(folder: Path, override: str = "") -> ChatTemplates:
    return load_templates(folder, read_tokenizer_config(folder), override, now)


def test_the_template_file_goes_before_the_configuration(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint(chat_template="from the configuration{{ eos_token }}")
    assert loaded(folder).render([USER], {}) == "from the configuration</s>"
    (folder / "chat_template.jinja").write_text("from the file{{ bos_token }}")
    assert loaded(folder).render([USER], {}) == "from the file<s>"
    (folder / "mine.jinja").write_text("mine")
    assert loaded(folder, str(folder / "mine.jinja")).render([USER], {}) == "mine"


def test_of_named_templates_tools_choose_theirs(checkpoint: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    templates = loaded(checkpoint(chat_template=named))
    assert templates.render([USER], {}) == "plain"
    assert templates.render([USER], {"tools": [{"type": "function"}]}) == "tools"
    templates = loaded(checkpoint(chat_template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(TemplateFailed, match="only: rag"):
        templates.render([USER], {})


def test_named_templates_in_files_are_found(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert loaded(folder).render([USER], {"tools": [{}]}) == "tools"


def test_a_checkpoint_without_a_template_says_so(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(TemplateFailed, match="no chat template"):
        loaded(checkpoint()).render([USER], {})


def test_a_broken_template_fails_chats_but_a_broken_override_fails_the_start(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint(chat_template="{% for %}")
    with pytest.raises(TemplateFailed, match="broken, line 1"):
        loaded(folder).render([USER], {})
    (folder / "mine.jinja").write_text("{% nonsense %}")
    with pytest.raises(ConfigurationError, match=r"--chat-template: .*mine\.jinja, line 1"):
        loaded(folder, str(folder / "mine.jinja"))
    with pytest.raises(ConfigurationError, match="cannot read chat template"):
        loaded(folder, str(folder / "missing.jinja"))
