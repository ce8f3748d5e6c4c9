"""Log-probs in the JSON of answers: OpenAI's two forms, and vLLM's for prompts.

All of them are lists by token, and are encoded as the tokens come: a long prompt's take longer than
an event loop may stand still. Knows tokens with their numbers, and nothing of how they came here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipeinfer.gateway.token_scores import Likely, TokenScore
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.logprobs import finite

COMPLETION_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_json = msgspec.json.Encoder()


class ChatLogprobs:
    """`logprobs` of a chat's choice."""

    def __init__(self) -> None:
        self._content = JsonListEncoder()

    def add(self, scores: Iterable[TokenScore]) -> None:
        """More tokens."""
        for score in scores:
            self._content.add(chat_token_logprob(score))

    def take(self) -> bytes:
        """The JSON of all tokens since it was taken last."""
        return b'{"content":%s,"refusal":null}' % self._content.take()


class CompletionLogprobs:
    """`logprobs` of a completion's choice, with `most` alternatives beside each token itself."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lists = [JsonListEncoder() for _ in COMPLETION_LOGPROB_FIELDS]

    def add(self, scores: Iterable[TokenScore], letters: int = 0) -> None:
        """More tokens; letters: of the answer's text before that in which offsets are counted."""
        for score in scores:
            own, tops = self._numbers(score)
            values = _name(score.own.text, "bytes:"), own, tops, letters + score.offset
            for listed, value in zip(self._lists, values, strict=True):
                listed.add(value)

    def take(self) -> bytes:
        """See ChatLogprobs."""
        parts = zip(COMPLETION_LOGPROB_FIELDS, self._lists, strict=True)
        return b"{%s}" % b",".join(b'"%s":%s' % (n.encode(), listed.take()) for n, listed in parts)

    def _numbers(self, score: TokenScore) -> tuple[JsonValue, JsonValue]:
        if not score.own.rank:
            return None, None
        tops: JsonObject = {}
        for one in (score.own, *score.others[: self._most]):  # of equal texts the likelier's counts
            tops.setdefault(_name(one.text, "bytes:"), finite(one.logprob))
        return finite(score.own.logprob), tops


class PromptLogprobs:
    """vLLM's `prompt_logprobs`, with `most` alternatives."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._list = JsonListEncoder()

    def add(self, scores: Iterable[TokenScore]) -> None:
        """More tokens."""
        for score in scores:
            if not score.own.rank:
                self._list.add(None)
                continue
            some = {one.id: one for one in (score.own, *score.others[: self._most])}
            self._list.add(
                {
                    str(one.id): {
                        "logprob": finite(one.logprob),
                        "rank": one.rank,
                        "decoded_token": one.text.decode(errors="replace"),
                    }
                    for one in some.values()
                }
            )

    def take(self) -> bytes:
        """See ChatLogprobs."""
        return self._list.take()


class JsonListEncoder:
    """Values, encoded as they are added."""

    def __init__(self) -> None:
        self._encoded: list[bytes] = []

    def add(self, value: JsonValue) -> None:
        """One more."""
        self._encoded.append(_json.encode(value))

    def take(self) -> bytes:
        """The list of all values since it was taken last."""
        encoded, self._encoded = self._encoded, []
        return b"[%s]" % b",".join(encoded)


def chat_token_logprob(score: TokenScore) -> JsonObject:
    """One token of a chat's choice."""
    tops: list[JsonValue] = [_token(one) for one in score.others]
    return {**_token(score.own), "top_logprobs": tops}


def _token(one: Likely) -> JsonObject:
    return {
        "token": _name(one.text),
        "logprob": finite(one.logprob),
        "bytes": list(one.text),
    }


def _name(text: bytes, prefix: str = "") -> str:
    """The token as text; one that is a part of a character as OpenAI writes it: "\\xe4\\xbd"."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return prefix + "".join(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in text)
