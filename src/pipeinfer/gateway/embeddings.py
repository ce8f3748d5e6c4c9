"""/v1/embeddings, in OpenAI's form: a vector for each text.

- EmbeddingRequest: the body.
- embedding_calls: from a body to the core's calls, one for each text.
- VectorSink: gathers the vectors.
- embedding_response: the answer.

A call for a vector samples one token, which nobody sees. Knows no HTTP and no tokens.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call, Failed, OutputDelta, Started
from pipeinfer.gateway.requests import (
    RequestDefaults,
    listed_prompts,
    prompt_calls,
    shared_call,
)
from pipeinfer.gateway.response_encoders import api_error
from pipeinfer.gateway.schema import (
    AddSpecialTokens,
    Int32,
    PoolingBody,
    TokenId,
    TruncatePromptTokens,
    TruncationSide,
    about,
)
from pipeinfer.params import InvalidParameter, JsonObject, JsonValue, SamplingParams, normalized


class EmbeddingRequest(PoolingBody, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    # fmt: off
    input: Annotated[str | list[TokenId | str | list[TokenId]], about(
        "A text, a list of token ids, or a list of at most `--max-prompts` of either. Each gives a "
        "vector. Required.")]
    encoding_format: Annotated[Literal["float", "base64"] | None, about(
        "`base64`: a vector is a text, its numbers as little-endian float32. Default: `float`, a "
        "list of numbers.")] = None
    dimensions: Annotated[Int32 | None, about(
        "So many of a vector's first numbers are kept, before it gets its length. For models that "
        "were trained for it. Default: all.")] = None
    normalize: Annotated[bool | None, about(
        "Vectors get the length 1. Default: as the checkpoint's modules.json has it, else "
        "true.")] = None
    prompt_name: Annotated[str | None, about(
        "Which of the checkpoint's prompts (config_sentence_transformers.json) comes before each "
        "text, as `query`. Not with token ids. Default: the checkpoint's default, mostly "
        "none.")] = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None
    add_special_tokens: AddSpecialTokens = None
    # fmt: on


VECTORS_AT_ONCE = 2  # that are written before others get their turn, 1 ms at 4,096 numbers each


class VectorOptions(msgspec.Struct, frozen=True):
    """How a request wants its vectors.

    Attributes:
    - size: numbers of each
    - normalize: they get the length 1
    - as_base64: they are written as texts
    """

    size: int
    normalize: bool
    as_base64: bool


def vector_options(request: EmbeddingRequest, pooling: Pooling) -> VectorOptions:
    """ApiError 400 for more dimensions than the model has."""
    size = pooling.hidden_size if request.dimensions is None else request.dimensions
    if not 1 <= size <= pooling.hidden_size:
        message = f"dimensions must be from 1 to {pooling.hidden_size}, not {size}"
        raise ApiError(400, message, "dimensions", "invalid_value")
    normalize = pooling.normalize if request.normalize is None else request.normalize
    return VectorOptions(size, normalize, request.encoding_format == "base64")


def embedding_calls(
    request: EmbeddingRequest,
    request_id: str,
    options: VectorOptions,
    pooling: Pooling,
    defaults: RequestDefaults,
    trace: str,
) -> list[Call]:
    """One call for each text or list of ids. If there are several, their ids are `request_id` with
    -0, -1 ... ApiError 400."""
    prompts = listed_prompts(request.input, defaults.max_prompts, "input")
    before = prompt_before(request, pooling)
    shared = shared_call(request, embedding_params(request, options.size), defaults, trace)
    if request.prompt_name is not None and not isinstance(prompts[0], str):
        message = "prompt_name is not allowed with token ids"
        raise ApiError(400, message, "prompt_name", "invalid_value")
    special = request.add_special_tokens is not False
    return list(prompt_calls(shared, request_id, prompts, special, before))


def vector_params(size: int) -> SamplingParams:
    """Of a request for a vector: one token, which costs least."""
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, vector_size=size)


def embedding_params(request: EmbeddingRequest, size: int) -> SamplingParams:
    """Of a call for a vector of `size` numbers. ApiError 400."""
    kept, side = request.truncate_prompt_tokens, request.truncation_side
    params = replace(vector_params(size), truncate_prompt_tokens=kept)
    if side is not None:
        params = replace(params, truncation_side=side)
    try:
        return normalized(params)
    except InvalidParameter as error:
        raise ApiError(400, str(error), error.param, "invalid_value") from None


def prompt_before(request: EmbeddingRequest, pooling: Pooling) -> str:
    """The checkpoint's prompt that comes before each text. ApiError 400."""
    name = pooling.default_prompt if request.prompt_name is None else request.prompt_name
    if not name:
        return ""
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "the checkpoint has none"
        message = f"prompt_name {name[:100]!r} is no prompt of the checkpoint: {known}"
        raise ApiError(400, message, "prompt_name", "invalid_value")
    return pooling.prompts[name]


def as_vector(raw: bytes, normalize: bool) -> np.ndarray:
    """float32 [n] of the bytes that the engine gave."""
    vector = np.frombuffer(raw, dtype="<f4")
    length = float(np.linalg.norm(vector)) if normalize else 0.0
    return vector / np.float32(length) if length else vector


class VectorSink:
    """A ResponseSink that waits for the vectors of all calls."""

    def __init__(self, calls: int) -> None:
        self._vectors: list[bytes | None] = [None] * calls
        self._missing = calls
        self._prompt_tokens = 0
        self._result: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        """The end of the call says how long its prompt is."""

    def delta(self, index: int, delta: OutputDelta) -> None:
        if delta.finish is None or self._result.done():
            return
        if not delta.vector:  # it was aborted before it had one
            message = "the server fell asleep before the vector was computed"
            self.failed(index, Failed(delta.request_id, 503, message, code="asleep"))
            return
        self._prompt_tokens += delta.prompt_tokens
        self._vectors[index] = delta.vector
        self._missing -= 1
        if not self._missing:
            self._result.set_result(None)

    def failed(self, index: int, failed: Failed) -> None:
        if not self._result.done():
            self._result.set_result(failed)

    async def vectors(self) -> tuple[list[bytes], int]:
        """The vectors in the order of the calls, and tokens of all prompts. Raises ApiError."""
        failed = await self._result
        if failed is not None:
            raise api_error(failed)
        return [vector for vector in self._vectors if vector is not None], self._prompt_tokens


async def embedding_response(
    vectors: list[bytes], prompt_tokens: int, options: VectorOptions, model: str
) -> bytes:
    """The JSON of /v1/embeddings. Others get their turn meanwhile: a thousand vectors are millions
    of numbers."""
    data: list[msgspec.Raw] = []
    for index, raw in enumerate(vectors):
        vector = as_vector(raw, options.normalize)
        written: JsonValue = (
            base64.b64encode(vector.tobytes()).decode() if options.as_base64 else vector.tolist()
        )
        row: JsonObject = {"object": "embedding", "index": index, "embedding": written}
        data.append(msgspec.Raw(msgspec.json.encode(row)))
        if index % VECTORS_AT_ONCE == VECTORS_AT_ONCE - 1:
            await asyncio.sleep(0)
    usage: JsonObject = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return msgspec.json.encode(answer)
