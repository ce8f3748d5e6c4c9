"""An answer as /v1/responses shows it: items of output, and the events while they grow.

Knows blocks and the request, whose fields the answer says again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import msgspec

from pipeinfer.gateway.dialects.blocks import CALL_BLOCKS, BlockEvent, OutputBlock, OutputBlocks
from pipeinfer.gateway.dialects.dialect import ResponseEnd
from pipeinfer.gateway.dialects.responses_body import ResponsesRequest
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.shapes import ResponseMetadata
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import SamplingParams

ITEM_ID_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
# Of calls: the type of the item, its field that grows, and the events of that.
CALL_ITEM_EVENTS = {
    "call": ("function_call", "arguments", "response.function_call_arguments"),
    "custom": ("custom_tool_call", "input", "response.custom_tool_call_input"),
}
ABORTED_MESSAGE = "the request was ended before its answer was complete: its time was up"


class ResponsesFormatter:
    """A speech of /v1/responses. `params`: as the request is sampled. `clock`: Unix seconds."""

    def __init__(
        self,
        request: ResponsesRequest,
        answer: ResponseMetadata,
        params: SamplingParams,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._fields = _echoed_fields(request, answer, params)
        self._number = 0  # of the next event

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def block_events(self, step: BlockEvent, scores: list[JsonValue]) -> Iterator[JsonObject]:
        block = step.block
        if step.action == "more":
            yield self._delta_event(block, step.text, scores)
        elif step.action == "open":
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind not in CALL_BLOCKS:
                yield self._event(
                    "response.content_part.added", **self._position(block), part=_part(block)
                )
        else:
            yield from self._done_events(block)

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        whole = self.full_response(blocks, end)
        yield self._event(f"response.{whole['status']}", response=whole)

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        status = {"length": "incomplete", "abort": "failed"}.get(end.finish or "", "completed")
        response = self._response(status, list[JsonValue](map(self._item, blocks.all)))
        response["usage"] = _usage(end)
        if status == "completed":
            response["completed_at"] = int(self._clock())
        elif status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["error"] = {"code": "server_error", "message": ABORTED_MESSAGE}
        return response

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        response = self._response("failed", list[JsonValue](map(self._item, blocks.all)))
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _delta_event(self, block: OutputBlock, text: str, scores: list[JsonValue]) -> JsonObject:
        if block.kind in CALL_BLOCKS:
            _, _, name = CALL_ITEM_EVENTS[block.kind]
            return self._event(
                f"{name}.delta", item_id=self._id(block), output_index=block.index, delta=text
            )
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._position(block), delta=text)
        return self._event(
            "response.output_text.delta", **self._position(block), delta=text, logprobs=scores
        )

    def _done_events(self, block: OutputBlock) -> Iterator[JsonObject]:
        if block.kind in CALL_BLOCKS:
            _, field, name = CALL_ITEM_EVENTS[block.kind]
            fields: JsonObject = {"name": block.name} if block.kind == "call" else {}
            fields = {"output_index": block.index, **fields, field: block.text}
            yield self._event(f"{name}.done", item_id=self._id(block), **fields)
        elif block.kind == "reasoning":
            yield self._event(
                "response.reasoning_text.done", **self._position(block), text=block.text
            )
        else:
            yield self._event(
                "response.output_text.done",
                **self._position(block),
                text=block.text,
                logprobs=block.logprobs,
            )
        if block.kind not in CALL_BLOCKS:
            yield self._event(
                "response.content_part.done", **self._position(block), part=_part(block)
            )
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, /, **fields: JsonValue) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _position(self, block: OutputBlock) -> JsonObject:
        return {"item_id": self._id(block), "output_index": block.index, "content_index": 0}

    def _id(self, block: OutputBlock) -> str:
        name = f"{self._answer.id}-{block.index}".encode()
        return f"{ITEM_ID_PREFIXES[block.kind]}_{hashlib.blake2b(name, digest_size=24).hexdigest()}"

    def _item(self, block: OutputBlock, status: str = "") -> JsonObject:
        status = status or ("completed" if block.complete else "incomplete")
        item: JsonObject = {"id": self._id(block), "status": status}
        parts: list[JsonValue] = [] if status == "in_progress" else [_part(block)]
        if block.kind in CALL_BLOCKS:
            kind, field, _ = CALL_ITEM_EVENTS[block.kind]
            call_id = self._answer.call_id(0, block.call_index, block.name)
            return {
                **item, "type": kind, "call_id": call_id, "name": block.name, field: block.text
            }  # fmt: skip
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}

    def _response(self, status: str, output: list[JsonValue]) -> JsonObject:
        return {**self._fields, "status": status, "output": output}


def _part(block: OutputBlock) -> JsonObject:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": list(block.logprobs),
    }


def _usage(end: ResponseEnd) -> JsonObject:
    usage = end.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def _echoed_fields(
    request: ResponsesRequest, answer: ResponseMetadata, params: SamplingParams
) -> JsonObject:
    """What does not change while the answer grows."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    form = request.text.format if request.text is not None else None
    verbosity = request.text.verbosity if request.text is not None else None
    shown: JsonObject = {"type": "text"}
    if form is not None:
        shown = {n: v for n, v in msgspec.to_builtins(form).items() if v is not None}
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": shown, "verbosity": verbosity or "medium"},
        "tool_choice": msgspec.to_builtins(request.tool_choice) or "auto",
        "tools": [tool.echoed() for tool in request.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
