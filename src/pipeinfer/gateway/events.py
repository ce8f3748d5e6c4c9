"""Local events between the gateway's core and its driver, and readers of the log-probs in them.

They never travel on the bus. The HTTP side and the offline classes use the same ones. Knows no HTTP
beyond the status numbers of an error.
"""

from __future__ import annotations

from typing import Literal

from pipeinfer.messages import FinishReason, LogprobTexts, Message
from pipeinfer.params import JsonObject, SamplingParams, StructuredOutputs, ThoughtState

Status = Literal["starting", "ready", "degraded", "draining"]

# ----------------------------------------------------------------------------------- driver -> core


class Call(Message, frozen=True):
    """A new request; exactly one of `text`, `prompt_ids` (int32 bytes) and `chat` is given, as in
    Submit.

    request_id: unique over all gateways and their restarts. With several choices (`params.n`) each
        is answered under its own id (params.py), the first under this one.
    params: normalized; without a seed the core draws one.
    timeout: seconds from now, 0: never.
    return_prompt_ids, return_prompt_text, return_token_strs: Started brings the prompt's ids, its
        text, its tokens as the vocabulary writes them.
    only_encode: nothing is generated; one OutputDelta ends the request.
    token_offsets: each OutputDelta says where the text of its tokens begins.
    priority, cache_salt, trace, client, fallback_grammar: as in Submit.
    """

    request_id: str
    params: SamplingParams
    text: str | None = None
    prompt_ids: bytes | None = None
    chat: list[JsonObject] | None = None
    template_arguments: JsonObject = {}
    add_special_tokens: bool = True
    priority: int = 0
    timeout: float = 0.0
    cache_salt: str = ""
    trace: str = ""
    return_prompt_ids: bool = False
    return_prompt_text: bool = False
    only_encode: bool = False
    client: str = ""
    fallback_grammar: StructuredOutputs | None = None
    token_offsets: bool = False
    return_token_strs: bool = False


class Hangup(Message, frozen=True):
    """The client of a request is gone: nothing more is delivered. An unknown id is no error."""

    request_id: str
    reason: str = "client"


# ----------------------------------------------------------------------------------- core -> driver


class Started(Message, frozen=True):
    """The request was tokenized. Comes once, before the first OutputDelta.

    group: that computes it. prompt_tokens: 0 for all choices but the first, they share one prompt.
    prompt_ids: int32 bytes; this, `prompt_text` and `token_strs` are empty unless asked for.
    thoughts: where the prompt of a chat leaves them. refusal: as in Accepted.
    """

    request_id: str
    group: int
    prompt_tokens: int
    prompt_ids: bytes = b""
    prompt_text: str = ""
    thoughts: ThoughtState = "before"
    refusal: str = ""
    token_strs: tuple[str, ...] = ()


class OutputDelta(Message, frozen=True):
    """New text and output ids of a choice, gapless and without repeats.

    ids: int32 bytes. byte_offset: UTF-8 bytes of text before it. token_offset: ids before it.
    finish: of the last one alone; only there `stop_reason`, `prompt_tokens`, `output_tokens` and
        `cached_tokens` count (prompt and cached tokens are 0 for all choices but the first).
    logprobs: of `ids`. prompt: log-probs of further prompt tokens, all before the first ids.
    offsets: letters of the whole text before each of `ids`, int32 bytes. Each of these only if
        asked.
    """

    request_id: str
    text: str
    ids: bytes
    byte_offset: int
    token_offset: int
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    logprobs: LogprobTexts | None = None
    prompt: LogprobTexts | None = None
    offsets: bytes = b""


class Failed(Message, frozen=True):
    """The request ended with an error; nothing more comes.

    status: an HTTP status. param: the field that is wrong. code: see errors.CODES.
    retry_after: seconds after which trying again makes sense, 0 if it does not.
    """

    request_id: str
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 0

    @property
    def outcome(self) -> str:
        """Its label in metrics: "abort", "refused" (it never ran) or "error"."""
        if self.status == 408:
            return "abort"
        refused = self.status < 500 or self.code in ("starting", "draining")
        return "refused" if refused else "error"


class StatusChanged(Message, frozen=True):
    """The pipeline's status. answering: whether a request sent now would be served without a
    pause."""

    status: Status
    answering: bool
    reason: str = ""
