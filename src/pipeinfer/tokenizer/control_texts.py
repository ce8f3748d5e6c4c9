"""Renders a chat so that control tokens come from the template alone, never from its client.

What a client wrote may spell a control token, or a part of one that the template completes. Marks,
characters that occur nowhere in the chat, break such spellings while the template runs and are
taken out afterwards. Knows no ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pipeinfer.json_values import JsonObject
from pipeinfer.tokenizer.client_strings import StringKind, client_strings, map_client_strings
from pipeinfer.tokenizer.templates import ChatTemplates

ESCAPE_CHARACTERS = range(
    0xE000, 0xF900
)  # private use: no template and no white-space rule knows them
# As themselves, and as JSON and Python write them where they write ASCII only.
_NAME = re.compile(r"\w+")
_PRIVATE = re.compile("[\ue000-\uf8ff]|\\\\u[ef][0-9a-f]{3}", re.IGNORECASE)


class NoEscapeCharacters(ValueError):
    """The chat holds all characters that could be marks."""


class RenderedPrompt(NamedTuple):
    """`text` is the prompt. `marked`: the same with marks, if a client's text in it spells a
    control token; else None."""

    text: str
    escaped: EscapedPrompt | None = None


class EscapedPrompt(NamedTuple):
    """`text`: all control tokens that stand in it are the template's. `marks` are in it, if any."""

    text: str
    escapes: EscapeCharacters | None


class EscapeCharacters:
    """Characters that a chat does not hold: one that breaks spellings, and one for each control
    token of a single character, which cannot be broken."""

    def __init__(self, single: Iterable[str], used: set[str]) -> None:
        free = (chr(code) for code in ESCAPE_CHARACTERS if chr(code) not in used)
        self.separator = _next_escape(free)
        self._singles = {ord(token): _next_escape(free) for token in single}
        self._originals: dict[int, str | None] = {ord(self.separator): None}
        self._originals |= {ord(mark): chr(code) for code, mark in self._singles.items()}

    def replace_single(self, text: str) -> str:
        """Without control tokens of one character."""
        return text.translate(self._singles) if self._singles else text

    def unescape(self, text: str) -> str:
        """What stood there before."""
        for code, old in self._originals.items():
            text = re.sub(f"\\\\u{code:04x}", _constant(old or ""), text, flags=re.IGNORECASE)
        return text.translate(self._originals)


class ControlTokenEscaping:
    """`texts` are the control tokens' of one tokenizer."""

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always_escaped: bool = False
    ) -> None:
        """`always`: other texts than these may become control tokens, so that every prompt is
        given as `marked`."""
        self._templates = templates
        self._always_escaped = always_escaped
        tokens = sorted({text for text in texts if text}, key=len, reverse=True)
        self._single = [token for token in tokens if len(token) == 1]
        longer = [token for token in tokens if len(token) > 1]
        self._has_control_tokens = bool(tokens)
        self._token_pattern = _any_of(tokens)
        self._long_token_pattern = _any_of(longer)
        self._inner_texts = "\0".join(token[1:-1] for token in longer)
        self._first_letters = {token[0] for token in tokens}
        self._last_letters = {token[-1] for token in tokens}
        # Two characters at either end: what is longer has them, and what is shorter is a text's
        # first or last character.
        ends = {*self._single, *(token[:2] for token in longer), *(token[-2:] for token in longer)}
        self._end_pattern = _any_of(sorted(ends))
        self._has_spaces = any(map(str.isspace, "".join(tokens)))

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> RenderedPrompt:
        """The prompt. Raises TemplateFailed, and NoMarks.

        A chat in which nothing looks like a control token is rendered once, as it is. Else also
        with every character of the client's by itself: if the template then writes other control
        tokens, it had joined some from parts, and that rendering is the one to use.
        """
        said = list(client_strings(chat, arguments)) if self._has_control_tokens else []
        if not any(self._may_spell(text, kind) for text, kind in said):
            text = self._templates.render(chat, arguments)
            return RenderedPrompt(text, EscapedPrompt(text, None) if self._always_escaped else None)
        marks = EscapeCharacters(self._single, self._used_characters(text for text, _ in said))
        spelled = any(self._token_pattern.search(text) for text, _ in said)
        text = self._templates.render(
            *map_client_strings(chat, arguments, lambda text, _: self._escape_tokens(text, marks))
        )
        strict = self._templates.render(
            *map_client_strings(
                chat, arguments, lambda text, kind: self._escape_all(text, kind, marks)
            )
        )
        if self._token_pattern.findall(text) != self._token_pattern.findall(strict):
            text, spelled = strict, True
        marked = EscapedPrompt(text, marks) if spelled or self._always_escaped else None
        return RenderedPrompt(marks.unescape(text), marked)

    def _may_spell(self, text: str, kind: StringKind) -> bool:
        if self._end_pattern.search(text) is not None:
            return True
        bare = text.strip()
        if not bare or kind == "key":
            return False
        if bare[-1] in self._first_letters or bare[0] in self._last_letters:
            return True
        return kind == "free" and bare in self._inner_texts

    def _used_characters(self, texts: Iterable[str]) -> set[str]:
        used: set[str] = set()
        for text in (*texts, self._templates.source):
            for found in _PRIVATE.findall(text):
                used.add(chr(int(found[2:], 16)) if len(found) > 1 else found)
        return used

    def _escape_tokens(self, text: str, escapes: EscapeCharacters) -> str:
        """No control token is spelled in it any more."""
        text, before = escapes.replace_single(text), None
        while text != before:
            before = text
            text = self._long_token_pattern.sub(
                lambda m: m[0][0] + escapes.separator + m[0][1:], text
            )
        return text

    def _escape_all(self, text: str, kind: StringKind, escapes: EscapeCharacters) -> str:
        """No two of its characters can be part of one control token, nor can one of them and one of
        the template's. Names and ids that a template may look up or measure stay whole."""
        if kind != "free" and _NAME.fullmatch(text):
            return self._escape_tokens(text, escapes)
        text, mark = escapes.replace_single(text), escapes.separator
        bare = text if self._has_spaces else text.strip()  # so that a template can still trim it
        before, _, after = text.partition(bare) if bare else ("", "", text)
        return f"{before}{mark}{mark.join(bare)}{mark}{after}" if bare else text


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches the first of them that stands there; nothing at all if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _next_escape(free: Iterator[str]) -> str:
    for mark in free:
        return mark
    raise NoEscapeCharacters(
        "the messages hold control tokens' texts and all private-use characters"
    )


def _constant(text: str) -> Callable[[re.Match[str]], str]:
    return lambda _: text
