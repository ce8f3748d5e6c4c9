"""What chat templates write of former calls is read back as these calls: templates show a model
how to call, so whatever they write, the parser that is chosen for them must read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Template

import template_families
from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.registry import TOOL_PARSERS, choose_parsers
from pipeinfer.gateway.tool_parsers.xml_calls import XmlTags
from pipeinfer.tokenizer.chat_templates import make_environment

# By family, which parser is chosen; of other families none is known.
PARSERS = {
    "apriel-1.5": "hunyuan_a13b",
    "deepseek-r1-joins": "deepseek_v3",
    "deepseek-r1-distill": "deepseek_v3",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v3.1": "deepseek_v31",
    "deepseek-v3.2": "deepseek_v32",
    "devstral": "mistral",
    "exaone-4": "hermes",
    "gemma-3-pythonic": "pythonic",
    "gigachat3.1": "gigachat3",
    "glm-4": "glm45",
    "glm-4.5": "glm45",
    "glm-4.6": "glm45",
    "glm-4.7": "glm47",
    "granite-3.0": "granite",
    "granite-3.3": "granite",
    "granite-4.0": "hermes",
    "hermes": "hermes",
    "kimi-k2": "kimi_k2",
    "lfm2": "lfm2",
    "lfm2.5": "lfm2",
    "llama-3": "llama3_json",
    "llama-3.2-pythonic": "pythonic",
    "mimo-vl": "hermes",
    "minimax-m2": "minimax_m2",
    "ministral-3": "mistral",
    "mistral-nemo": "mistral",
    "mistral-small-3.1": "mistral",
    "mistral-small-3.2": "mistral",
    "olmo-3": "olmo3",
    "phi-4-mini": "phi4_mini_json",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-2507-instruct": "hermes",
    "qwen3-2507-thinking": "hermes",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "qwq": "hermes",
    "seed-oss": "seed_oss",
    "step-3.5": "qwen3_coder",
    "xlam-2": "xlam",
}
# By family, the form that no parser reads, and is refused by its name.
UNREAD = {
    "apertus": "apertus",
    "command-r7b": "cohere_command",
    "internlm2": "internlm",
    "minicpm5": "minicpm5",
    "minimax-m1": "minimax_m1",
    "nemotron": "nemotron",
}
# By family, between which tags it thinks; of the others no template shows any.
REASONING = {
    "command-r7b": "cohere_command3",
    "gpt-oss": "openai_gptoss",
    "granite-3.3": "ernie45",
    "ministral-3": "mistral",
    "seed-oss": "seed_oss",
    **dict.fromkeys(
        (
            "deepseek-r1-distill", "deepseek-r1-joins", "deepseek-v3.1", "deepseek-v3.2",
            "exaone-4", "glm-4.5", "glm-4.6", "glm-4.7", "lfm2.5", "minicpm5", "minimax-m2",
            "nemotron", "qwen3", "qwen3-2507-thinking", "qwen3.5", "qwq", "smollm3", "step-3.5",
        ),
        "qwen3",
    ),
}  # fmt: skip
# These write no calls of the past, or not as they ask the model to.
SILENT = {"glm-4", "granite-3.3", "phi-4-mini", "lfm2", "llama-3.2-pythonic"}
TEXTS = {  # what their templates join to a text, where others take an object
    "deepseek-r1-joins",
}
# These say nothing beside calls, which begin so.
ALONE = {"llama-3": '{"name": "', "xlam-2": '[{"name": "'}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "number"},
        "fine": {"type": "boolean"},
        "none": {"type": "null"},
        "units": {"type": "object"},
        "places": {"type": "array"},
    },
    "required": [],
}
NAMES = ("get_weather", "now", "a.b-c_9")
ODD = ["\n", " ", '"', "'", "\\", "{", "}", "[", "]", ",", ":", "é", "北", "🌧", "\u2028", "</",
       "<tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁end｜>", "<|tool_call_end|>", "functools[",
       "```", "a", "1", "null", "True", "<function=f>", "&lt;", "%", "\t"]  # fmt: skip
WORDS = st.lists(st.sampled_from(ODD), max_size=6).map("".join) | st.text(
    st.characters(exclude_categories=["Cs", "Cc"]), max_size=6
)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6).filter(lambda x: x == x)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS,
        "days": st.integers(-(2**53), 2**53),
        "wind": NUMBERS,
        "fine": st.booleans(),
        "none": st.none(),
        "units": st.dictionaries(WORDS, VALUES, max_size=3),
        "places": st.lists(VALUES, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


ENVIRONMENT = make_environment(lambda form: form)


@cache
def template_of(family: str) -> Template:
    """Compiled when it is first asked for: every worker collects, and one compiles."""
    return ENVIRONMENT.from_string(template_families.source(family))


def written(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the family's template writes for an assistant that made `calls`."""
    made = [
        {
            "id": f"functions.{name}:{i}" if family == "kimi-k2" else f"abcdefgh{i}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if family in TEXTS else arguments,
            },
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    asked: list[Any] = [{"role": "user", "content": "?"}]
    content = None if "deepseek" in family else ""
    said: list[Any] = [*asked, {"role": "assistant", "content": content, "tool_calls": made}]
    given: Any = {"bos_token": "<s>", "eos_token": "</s>", "tools": []}
    before = template_of(family).render(messages=asked, **given)
    whole = template_of(family).render(messages=said, **given)
    same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), -1)
    return whole[same:] if same >= 0 else whole[len(before) :]


def calls_of(family: str, text: str, pieces: int) -> list[tuple[str, Any]]:
    parser = TOOL_PARSERS[PARSERS[family]]
    reader, said = parser.make_parser(dict.fromkeys(NAMES, SCHEMA)), ParsedOutput()
    for at in range(0, len(text), pieces):
        said.add(reader.feed(text[at : at + pieces]))
    said.add(reader.finish())
    return [(name, json.loads("".join(parts))) for name, *parts in said.calls]


@pytest.mark.parametrize("family", template_families.FAMILIES)
def test_parsers_are_chosen_as_published_templates_show(family: str) -> None:
    source = template_families.source(family)
    told = [name for name, parser in TOOL_PARSERS.items() if parser.matches_template(source)]
    wanted = {**PARSERS, "gpt-oss": "openai"}.get(family, "")
    assert told == [wanted] * bool(wanted)
    assert choose_parsers("auto", "none", source).tool_parser_name == wanted
    found = choose_parsers("auto", "auto", source)
    assert found.reasoning_parser_name == REASONING.get(family, "")
    assert found.unsupported_form == UNREAD.get(family, "")
    assert not (found.unsupported_form and wanted), "one form is read, or refused"
    assert (found.unsupported_form in found.why_no_tool_calls) == (
        not wanted or not found.unsupported_form
    )


def readable(family: str, arguments: dict[str, Any]) -> bool:
    """Elements cannot hold what ends them, nor texts that are not escaped their quotes."""
    if family == "lfm2.5":
        return not {"'", "\\"} & {*str(arguments.get("city"))}
    parser = TOOL_PARSERS[PARSERS[family]].make_parser
    tags = getattr(parser, "args", (None,))[0]
    if not isinstance(tags, XmlTags):
        return True
    return not any(end in str(arguments.get("city")) for end in tags.ends_of_value)


@pytest.mark.parametrize("family", sorted(PARSERS.keys() - SILENT))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=8, deadline=None)
@given(calls=CALLS, pieces=st.sampled_from([1, 3, 7, 1000]))
def test_calls_that_a_template_writes_are_read_as_the_same_calls(
    family: str, calls: list[tuple[str, dict[str, Any]]], pieces: int
) -> None:
    calls = [(name, a if readable(family, a) else {}) for name, a in calls]
    if family in ("llama-3", "gigachat3.1"):
        calls = calls[:1]
    text = written(family, calls)
    if family in ALONE:  # whose calls are all of an answer
        text = text[text.index(ALONE[family]) :]
    assert calls_of(family, text, pieces) == calls, text
