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
from pipeinfer.tokenizer.client_strings import Kind, rewritten, strings
from pipeinfer.tokenizer.templates import ChatTemplates

MARKS = range(0xE000, 0xF900)  # private use: no template and no white-space rule knows them
# As themselves, and as JSON and Python write them where they write ASCII only.
_NAME = re.compile(r"\w+")
_PRIVATE = re.compile("[\ue000-\uf8ff]|\\\\u[ef][0-9a-f]{3}", re.IGNORECASE)


class NoMarks(ValueError):
    """The chat holds all characters that could be marks."""


class Rendered(NamedTuple):
    """`text` is the prompt. `marked`: the same with marks, if a client's text in it spells a
    control token; else None."""

    text: str
    marked: Marked | None = None


class Marked(NamedTuple):
    """`text`: all control tokens that stand in it are the template's. `marks` are in it, if any."""

    text: str
    marks: Marks | None


class Marks:
    """Characters that a chat does not hold: one that breaks spellings, and one for each control
    token of a single character, which cannot be broken."""

    def __init__(self, single: Iterable[str], used: set[str]) -> None:
        free = (chr(code) for code in MARKS if chr(code) not in used)
        self.breaker = _next(free)
        self._singles = {ord(token): _next(free) for token in single}
        self._back: dict[int, str | None] = {ord(self.breaker): None}
        self._back |= {ord(mark): chr(code) for code, mark in self._singles.items()}

    def hide(self, text: str) -> str:
        """Without control tokens of one character."""
        return text.translate(self._singles) if self._singles else text

    def remove(self, text: str) -> str:
        """What stood there before."""
        for code, old in self._back.items():
            text = re.sub(f"\\\\u{code:04x}", _constant(old or ""), text, flags=re.IGNORECASE)
        return text.translate(self._back)


class ControlTexts:
    """`texts` are the control tokens' of one tokenizer."""

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always: bool = False
    ) -> None:
        """`always`: other texts than these may become control tokens, so that every prompt is
        given as `marked`."""
        self._templates = templates
        self._always = always
        tokens = sorted({text for text in texts if text}, key=len, reverse=True)
        self._single = [token for token in tokens if len(token) == 1]
        longer = [token for token in tokens if len(token) > 1]
        self._any = bool(tokens)
        self._whole = _one_of(tokens)
        self._breakable = _one_of(longer)
        self._inside = "\0".join(token[1:-1] for token in longer)
        self._first = {token[0] for token in tokens}
        self._last = {token[-1] for token in tokens}
        # Two characters at either end: what is longer has them, and what is shorter is a text's
        # first or last character.
        ends = {*self._single, *(token[:2] for token in longer), *(token[-2:] for token in longer)}
        self._piece = _one_of(sorted(ends))
        self._spaced = any(map(str.isspace, "".join(tokens)))

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> Rendered:
        """The prompt. Raises TemplateFailed, and NoMarks.

        A chat in which nothing looks like a control token is rendered once, as it is. Else also
        with every character of the client's by itself: if the template then writes other control
        tokens, it had joined some from parts, and that rendering is the one to use.
        """
        said = list(strings(chat, arguments)) if self._any else []
        if not any(self._doubtful(text, kind) for text, kind in said):
            text = self._templates.render(chat, arguments)
            return Rendered(text, Marked(text, None) if self._always else None)
        marks = Marks(self._single, self._used(text for text, _ in said))
        spelled = any(self._whole.search(text) for text, _ in said)
        text = self._templates.render(
            *rewritten(chat, arguments, lambda text, _: self._broken(text, marks))
        )
        strict = self._templates.render(
            *rewritten(chat, arguments, lambda text, kind: self._apart(text, kind, marks))
        )
        if self._whole.findall(text) != self._whole.findall(strict):
            text, spelled = strict, True
        marked = Marked(text, marks) if spelled or self._always else None
        return Rendered(marks.remove(text), marked)

    def _doubtful(self, text: str, kind: Kind) -> bool:
        if self._piece.search(text) is not None:
            return True
        bare = text.strip()
        if not bare or kind == "key":
            return False
        if bare[-1] in self._first or bare[0] in self._last:
            return True
        return kind == "free" and bare in self._inside

    def _used(self, texts: Iterable[str]) -> set[str]:
        used: set[str] = set()
        for text in (*texts, self._templates.source):
            for found in _PRIVATE.findall(text):
                used.add(chr(int(found[2:], 16)) if len(found) > 1 else found)
        return used

    def _broken(self, text: str, marks: Marks) -> str:
        """No control token is spelled in it any more."""
        text, before = marks.hide(text), None
        while text != before:
            before = text
            text = self._breakable.sub(lambda m: m[0][0] + marks.breaker + m[0][1:], text)
        return text

    def _apart(self, text: str, kind: Kind, marks: Marks) -> str:
        """No two of its characters can be part of one control token, nor can one of them and one of
        the template's. Names and ids that a template may look up or measure stay whole."""
        if kind != "free" and _NAME.fullmatch(text):
            return self._broken(text, marks)
        text, mark = marks.hide(text), marks.breaker
        bare = text if self._spaced else text.strip()  # so that a template can still trim it
        before, _, after = text.partition(bare) if bare else ("", "", text)
        return f"{before}{mark}{mark.join(bare)}{mark}{after}" if bare else text


def _one_of(texts: list[str]) -> re.Pattern[str]:
    """Matches the first of them that stands there; nothing at all if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _next(free: Iterator[str]) -> str:
    for mark in free:
        return mark
    raise NoMarks("the messages hold control tokens' texts and all private-use characters")


def _constant(text: str) -> Callable[[re.Match[str]], str]:
    return lambda _: text
