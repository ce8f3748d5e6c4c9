"""Between which tags a model thinks, and where a prompt leaves its thoughts.

The tags are a property of the model: named by --reasoning-parser, or seen in its chat template.
Whether they are open is a property of each rendered prompt. Knows texts only.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeinfer.json_values import JsonValue
from pipeinfer.params import ThoughtState

SPACE = " \t\r\n"


class ThoughtTags(NamedTuple):
    """Texts around the thoughts. `answer`: those around what the model says behind them, which is
    content without them; none if it has no such tags. `never`: what a template has only where
    `answer` stands around something else, such as the results of tools."""

    opening: str
    closing: str
    answer: tuple[str, str] = ("", "")
    never: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[str, str]:
        """Around the thoughts."""
        return self.opening, self.closing


THINK = ThoughtTags("<think>", "</think>")
COHERE = "<|START_THINKING|>", "<|END_THINKING|>"
# By the names that vLLM has for them. A template shows the first one of which it has all tags of
# answers, and a tag of thoughts.
REASONING_PARSERS: dict[str, ThoughtTags] = {
    "hunyuan_a13b": ThoughtTags(*THINK.pair, ("<answer>", "</answer>")),
    "ernie45": ThoughtTags(*THINK.pair, ("<response>", "</response>"), ("<minimax:tool_call>",)),
    **dict.fromkeys(
        (
            "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47",
            "granite_thinking_parser", "holo2", "kimi_k2", "ling3", "mimo", "minicpmv",
            "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "step3", "step3p5", "step5",
        ),
        THINK,
    ),
    "seed_oss": ThoughtTags("<seed:think>", "</seed:think>"),
    "mistral": ThoughtTags("[THINK]", "[/THINK]"),
    "minimax_m3": ThoughtTags("<mm:think>", "</mm:think>"),
    "cohere_command3": ThoughtTags(*COHERE, ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "cohere_command4": ThoughtTags(*COHERE, ("<|START_TEXT|>", "<|END_TEXT|>")),
    "plamo3": ThoughtTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "granite": ThoughtTags("Here is my thought process:", "Here is my response:"),
}  # fmt: skip


def parser_of(template: str) -> str:
    """The name of the tags that a chat template shows; none if it shows none."""
    for name, tags in REASONING_PARSERS.items():
        answers = all(tag in template for tag in tags.answer)
        others = any(mark in template for mark in tags.never)
        if answers and not others and any(tag in template for tag in tags.pair):
            return name
    return ""


def thought_tags(parser: str, template: str) -> ThoughtTags | None:
    """For a setting that names a parser, "auto" or "none", and the text of a chat template."""
    return REASONING_PARSERS.get(parser_of(template) if parser == "auto" else parser)


def thought_state(prompt: str, tags: ThoughtTags) -> ThoughtState:
    """Where a prompt leaves the thoughts of the answer: open where the opening tag comes last, over
    where it ends with the closing tag. One that stands further up belongs to another answer."""
    opened, closed = prompt.rfind(tags.opening), prompt.rfind(tags.closing)
    if opened > closed:
        return "open"
    return "over" if prompt.rstrip(SPACE).endswith(tags.closing) else "before"


def content_text(content: JsonValue) -> str:
    """The text of a message's content, whose parts go on from each other."""
    if isinstance(content, list):
        return "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
# What ends an answer: its last message, or a call that waits for a result. END does not.
HARMONY_ENDS = (RETURN, CALL)
# Of a tokenizer that has the format; <|constrain|> some leave out.
HARMONY_TOKENS = frozenset((START, END, MESSAGE, CHANNEL, *HARMONY_ENDS))
