"""/tokenize and /detokenize: a prompt's ids, or the text of ids, and nothing is generated.

The tokenizer stage answers, on the way that every prompt takes. Knows the schema and the core's
events; no tokenizer.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Call, Delta, Failed, Started
from pipeinfer.gateway.requests import Terms, chat_job
from pipeinfer.gateway.schema import ChatMessage, ChatRequest, DetokenizeRequest, TokenizeRequest
from pipeinfer.gateway.streams import api_error
from pipeinfer.json_values import JsonObject
from pipeinfer.packing import pack, unpack
from pipeinfer.params import SamplingParams

ONE = SamplingParams(max_tokens=1, skip_special_tokens=False)  # a prompt leaves room for an answer


def tokenize_call(request: TokenizeRequest, name: str, terms: Terms) -> Call:
    """What asks for the ids. ApiError 400."""
    call = Call(
        request_id=name,
        params=ONE,
        timeout=terms.timeout,
        return_prompt_ids=True,
        only_encode=True,
    )
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    if request.messages is not None:
        [chat] = chat_job(_chat(request, request.messages), name, terms, "").calls
        return replace(count_call(chat), return_prompt_ids=True)
    special = request.add_special_tokens is not False
    return replace(call, text=request.prompt, add_special_tokens=special)


def _chat(request: TokenizeRequest, messages: list[ChatMessage]) -> ChatRequest:
    """The chat whose prompt is asked for."""
    return ChatRequest(
        messages=messages,
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=request.add_generation_prompt,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
        tool_choice=request.tool_choice,
        chat_template=request.chat_template,
        continue_final_message=request.continue_final_message,
        documents=request.documents,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning_effort,
    )


def detokenize_call(request: DetokenizeRequest, name: str, terms: Terms) -> Call:
    """What asks for the text."""
    return Call(
        request_id=name,
        params=replace(ONE, skip_special_tokens=bool(request.skip_special_tokens)),
        timeout=terms.timeout,
        prompt_ids=pack(request.tokens),
        return_prompt_text=True,
        only_encode=True,
    )


def count_call(call: Call) -> Call:
    """What asks how long the prompt of `call` is, whose answer nobody wants."""
    return replace(call, params=ONE, only_encode=True)


class Encoded:
    """A sink of the port that waits for what the tokenizer says of the one prompt."""

    def __init__(self) -> None:
        self._said: asyncio.Future[Started | Failed] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        if not self._said.done():
            self._said.set_result(started)

    def delta(self, index: int, delta: Delta) -> None:
        """Only says that this was all."""

    def failed(self, index: int, failed: Failed) -> None:
        if not self._said.done():
            self._said.set_result(failed)

    async def prompt(self) -> Started:
        """What was said. Raises ApiError for a refusal."""
        said = await self._said
        if isinstance(said, Failed):
            raise api_error(said)
        return said


def tokens_shown(started: Started, context_length: int) -> JsonObject:
    """The answer of /tokenize, as vLLM's."""
    ids = unpack(started.prompt_ids).tolist()
    return {"count": len(ids), "max_model_len": context_length, "tokens": ids}
