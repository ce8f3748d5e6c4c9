"""An answer as /v1/messages shows it: blocks of content, the events while they grow, and errors.

Knows blocks, and no body.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipeinfer.gateway.dialects.blocks import BlockEvent, OutputBlock, OutputBlocks
from pipeinfer.gateway.dialects.dialect import ResponseEnd
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.shapes import ResponseMetadata, TokenUsage
from pipeinfer.gateway.survey import CHAT_LIMITS, LimitExceeded, prescan
from pipeinfer.json_values import JsonObject, JsonValue

OVERLOADED = 529
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormatter:
    """A speech of /v1/messages. `omits`: blocks of thoughts are empty. `request_id`: as the answer
    calls its request."""

    def __init__(
        self, answer: ResponseMetadata, omit_reasoning: bool = False, request_id: str | None = None
    ) -> None:
        self._answer = answer
        self._request_id = request_id
        self._omit_reasoning = omit_reasoning

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        usage = _full_usage(TokenUsage(prompt_tokens))
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def block_events(self, step: BlockEvent, scores: list[JsonValue]) -> Iterator[JsonObject]:
        block = step.block
        if step.action == "more":
            if self._omit_reasoning and block.kind == "reasoning":
                return
            kind, field = DELTAS[block.kind]
            yield {
                "type": "content_block_delta",
                "index": block.index,
                "delta": {"type": kind, field: step.text},
            }
        elif step.action == "open":
            empty = OutputBlock(block.kind, block.index, block.call_index, block.name)
            shown = self._content(empty)
            yield {"type": "content_block_start", "index": block.index, "content_block": shown}
        else:
            yield {"type": "content_block_stop", "index": block.index}

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        reason, sequence = _stop_reason(blocks, end)
        yield {
            "type": "message_delta",
            "delta": _stop_fields(reason, sequence),
            "usage": _usage(end.usage),
        }
        yield {"type": "message_stop"}

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        content: list[JsonValue] = [self._content(block) for block in blocks.all]
        return self._message(content, *_stop_reason(blocks, end), _full_usage(end.usage))

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        return error_object(error, self._request_id)

    def _message(
        self, content: list[JsonValue], reason: str | None, sequence: str | None, usage: JsonObject
    ) -> JsonObject:
        return {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": content,
            **_stop_fields(reason, sequence),
            "usage": usage,
        }

    def _content(self, block: OutputBlock) -> JsonObject:
        if block.kind == "content":
            return {"type": "text", "text": block.text, "citations": None}
        if block.kind == "reasoning":
            text = "" if self._omit_reasoning else block.text
            return {"type": "thinking", "thinking": text, "signature": ""}
        call_id = self._answer.call_id(0, block.call_index, block.name)
        if call_id.startswith("call_"):
            call_id = f"toolu_{call_id.removeprefix('call_')}"
        given = _tool_input(block.text)
        call: JsonObject = {"type": "tool_use", "id": call_id, "caller": {"type": "direct"}}
        return {**call, "name": block.name, "input": given}


def _tool_input(text: str) -> JsonObject:
    """A call's arguments. What is no JSON object, cut off perhaps, is shown under a name that no
    tool knows."""
    raw = text.encode("utf-8", "surrogatepass") or b"{}"
    try:
        for _ in prescan(raw, CHAT_LIMITS):
            continue
        return msgspec.json.decode(raw, type=JsonObject)
    except (LimitExceeded, msgspec.DecodeError, UnicodeDecodeError):
        return {"invalid_json": text}


def _stop_reason(blocks: OutputBlocks, end: ResponseEnd) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence). Where its time was up, an answer is cut as by max_tokens."""
    if end.finish != "stop":
        return "max_tokens", None
    if isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return ("tool_use" if blocks.has_calls else "end_turn"), None


def _stop_fields(reason: str | None, sequence: str | None) -> JsonObject:
    """How; what says more of that are refusals and containers, and there are none."""
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def _usage(usage: TokenUsage) -> JsonObject:
    """`input_tokens` are those that were not found in the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "server_tool_use": None,
    }


def _full_usage(usage: TokenUsage) -> JsonObject:
    """With what a message says once."""
    further: JsonObject = {"cache_creation": None, "inference_geo": None, "service_tier": None}
    return {**_usage(usage), **further}


def status_of(error: ApiError) -> int:
    """An error's status here: a server that is full, or not there yet, is overloaded."""
    return OVERLOADED if error.status == 503 else error.status


def error_object(error: ApiError, request_id: str | None = None) -> JsonObject:
    """An error as Anthropic's clients read it; `request_id`: of the header `request-id`."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail: JsonObject = {"type": kind, "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}
