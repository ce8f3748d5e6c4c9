"""Harmony answers as a grammar: calls that must be made, and final messages that have a form.

Before them the model may think as long as it likes, and say what it is about to do; not before a
form, which is all that the content then is. Knows no request; compiles nothing.
"""

from __future__ import annotations

from pipeinfer.gateway.reading.call_grammars import (
    GrammarRequest,
    UnsupportedSchema,
    constraint_schema,
    json_arguments,
    quoted,
    rule,
    slashed,
)
from pipeinfer.params import StructuredOutputs
from pipeinfer.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

GRAMMAR_MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN)
# `opening`: the prompt has it already, but a template that opens no answer leaves it to the model.
# `json`: how a header says that JSON follows.
_RULES = """
opening: ({start} "assistant")?
next: {end} {start} "assistant"
said: thought | preamble
thought: {channel} "analysis" {message} text
preamble: {channel} "commentary" {message} text
final: {channel} "final" json? {message}
json: " json" | " "? {constrain} "json"
text: /(?s:.*)/
""".strip()


def harmony_grammar(wanted: GrammarRequest) -> str:
    """One call behind thoughts, or in its place a final message of the wanted form. An answer that
    is free is any messages, whose calls are those that are wanted. Raises Inexpressible."""
    calls = _calls(wanted)
    if wanted.allow_content:
        message = "(said | final text | call)"
        return _grammar(wanted, f"({message} next)* {message}", calls)
    if wanted.content_constraint is None:
        return _grammar(wanted, "(said next)* call", calls)
    messages = "(thought next)* (final form | (preamble next (said next)*)? call)"
    return _grammar(wanted, messages, [*calls, _constraint_rule(wanted.content_constraint)])


def final_message_grammar(wanted: GrammarRequest, form: StructuredOutputs) -> StructuredOutputs:
    """What holds the final message to `form`, and offers no calls. Raises Inexpressible."""
    return StructuredOutputs(
        grammar=_grammar(wanted, "(thought next)* final form", [_constraint_rule(form)])
    )


def _grammar(wanted: GrammarRequest, messages: str, rules: list[str]) -> str:
    names = ("start", "end", "message", "channel", "constrain")
    tags = dict(zip(names, map(wanted.tag, GRAMMAR_MARKERS), strict=True))
    for marker in GRAMMAR_MARKERS:
        if not wanted.has_special_token(marker):
            raise UnsupportedSchema(
                f"this model has no token {marker}, which sets its messages apart"
            )
    own = _RULES.format(**tags)
    return "\n".join((f"start: opening {messages}", own, *rules))


def _calls(wanted: GrammarRequest) -> list[str]:
    """A call of each function. The recipient stands before or behind the channel."""
    channel, message = wanted.tag(CHANNEL), wanted.tag(MESSAGE)
    rules: list[str] = []
    for i, name in enumerate(wanted.schemas):
        rules.append(f"to{i}: {quoted(f' to=functions.{name}')}")
        head = f'({channel} "commentary" to{i} | to{i} {channel} "commentary") json? {message}'
        rules.append(f"call{i}: {head} {json_arguments(wanted, name)}")
    return [rule("call", [f"call{i}" for i in range(len(wanted.schemas))]), *rules]


def _constraint_rule(form: StructuredOutputs) -> str:
    if form.json is not None:
        return f"form: %json {constraint_schema(form.json)}"
    if form.choice is not None:
        return rule("form", map(quoted, form.choice))
    if form.regex is not None:
        return f"form: /{slashed(form.regex)}/"
    raise UnsupportedSchema("a grammar cannot stand within the messages of this model")
