"""/tokenize and /detokenize: a prompt's ids, or the text of ids, and nothing is generated.

The tokenizer stage answers, on the way that every prompt takes. Knows the schema and the core's
events; no tokenizer.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Call, Delta, Failed, Started
from pipeinfer.gateway.prompts import chat_prompt
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.gateway.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from pipeinfer.gateway.streams import api_error
from pipeinfer.gateway.tools import LEGACY_FIELD_NAMES as OLD_NAMES
from pipeinfer.gateway.tools import functions_to_tools
from pipeinfer.json_values import JsonObject
from pipeinfer.packing import pack, unpack
from pipeinfer.params import SamplingParams

# Fields that the body of /tokenize shares with a chat's: all that a chat's prompt depends on.
OF_CHATS = frozenset(TokenizeRequest.__struct_fields__) & frozenset(ChatRequest.__struct_fields__)
# Without an answer a prompt may be longer than the context.
ALONE = SamplingParams(max_tokens=0, skip_special_tokens=False)


def tokenize_call(request: TokenizeRequest, name: str, terms: RequestDefaults) -> Call:
    """What asks for the ids. ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    if request.prompt is None:
        chat = ChatRequest(**{field: getattr(request, field) for field in OF_CHATS})
        return replace(
            prompt_call(chat, name, terms),
            return_prompt_ids=True,
            return_token_strs=bool(request.return_token_strs),
        )
    return Call(
        request_id=name,
        params=ALONE,
        timeout=terms.timeout,
        text=request.prompt,
        add_special_tokens=request.add_special_tokens is not False,
        return_prompt_ids=True,
        return_token_strs=bool(request.return_token_strs),
        only_encode=True,
    )


def prompt_call(request: ChatRequest, name: str, terms: RequestDefaults) -> Call:
    """What asks for the prompt of a chat, also where nobody would read its answer's calls.
    ApiError 400."""
    with_tools = functions_to_tools(request)
    try:
        prompt = chat_prompt(with_tools or request, terms.parsers)
    except ApiError as error:
        raise (error if with_tools is None else renamed(error, OLD_NAMES)) from None
    return Call(
        request_id=name,
        params=ALONE,
        timeout=terms.timeout,
        chat=prompt.chat,
        template_arguments=prompt.arguments,
        add_special_tokens=bool(request.add_special_tokens),
        only_encode=True,
    )


def detokenize_call(request: DetokenizeRequest, name: str, terms: RequestDefaults) -> Call:
    """What asks for the text."""
    return Call(
        request_id=name,
        params=replace(ALONE, skip_special_tokens=bool(request.skip_special_tokens)),
        timeout=terms.timeout,
        prompt_ids=pack(request.tokens),
        return_prompt_text=True,
        only_encode=True,
    )


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
    return {
        "count": len(ids),
        "max_model_len": context_length,
        "tokens": ids,
        "token_strs": list(started.token_strs) or None,
    }
