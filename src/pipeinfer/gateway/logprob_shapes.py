"""Log-probs in the JSON of answers: OpenAI's two forms, and vLLM's for prompts.

Knows tokens with their numbers, and nothing of how they came here.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeinfer.gateway.token_scores import Likely, TokenScore
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.logprobs import finite


def of_chat(scores: Iterable[TokenScore]) -> JsonObject:
    """`logprobs` of a chat's choice."""
    return {"content": [_content(score) for score in scores], "refusal": None}


def of_completion(scores: Iterable[TokenScore], most: int, letters: int = 0) -> JsonObject:
    """`logprobs` of a completion's choice, with `most` alternatives beside each token itself;
    letters: of the answer's text before that in which offsets are counted."""
    tokens: list[JsonValue] = []
    own: list[JsonValue] = []
    likeliest: list[JsonValue] = []
    offsets: list[JsonValue] = []
    for score in scores:
        tokens.append(_name(score.own.text, "bytes:"))
        offsets.append(letters + score.offset)
        if not score.own.rank:
            own.append(None)
            likeliest.append(None)
            continue
        own.append(finite(score.own.logprob))
        top: JsonObject = {}
        for one in (score.own, *score.others[:most]):  # of equal texts the likelier id's counts
            top.setdefault(_name(one.text, "bytes:"), finite(one.logprob))
        likeliest.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": own,
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def of_prompt(scores: Iterable[TokenScore], most: int) -> list[JsonValue]:
    """vLLM's `prompt_logprobs`."""
    listed: list[JsonValue] = []
    for score in scores:
        if not score.own.rank:
            listed.append(None)
            continue
        some = {one.id: one for one in (score.own, *score.others[:most])}
        listed.append(
            {
                str(one.id): {
                    "logprob": finite(one.logprob),
                    "rank": one.rank,
                    "decoded_token": one.text.decode(errors="replace"),
                }
                for one in some.values()
            }
        )
    return listed


def _content(score: TokenScore) -> JsonObject:
    return {**_token(score.own), "top_logprobs": [_token(one) for one in score.others]}


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
