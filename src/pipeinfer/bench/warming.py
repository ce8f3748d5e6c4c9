"""Before anything is measured: which model there is, what the server makes of words, a warm-up.

Asks the server a few times, one process, and gives back an endpoint and prompts that fit it.
"""

from __future__ import annotations

import aiohttp
import msgspec

from pipeinfer.bench import streaming
from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.latency import RequestTiming
from pipeinfer.bench.prompts import CustomDataset, RandomDataset, SampleRequest
from pipeinfer.bench.span import TokenRange

FEW, MANY = 24, 96  # words of the two prompts whose tokens are counted
NUMBERED = TokenRange(1, 1)
MOST_OUTPUT = 16  # tokens of a request of the warm-up
SEED = 1_000_000_007  # added to the usual one: what is measured must not be in a cache
MODELS_SECONDS = 30.0


class ServerNotUsable(RuntimeError):
    """The server does not answer as it should; the text says how."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(endpoint: Endpoint) -> str:
    """The first of /v1/models. Raises NoAnswer."""
    address = f"{endpoint.url}/v1/models"
    try:
        async with (
            streaming.session(endpoint) as client,
            client.get(address, timeout=aiohttp.ClientTimeout(MODELS_SECONDS)) as answer,
        ):
            body = await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ServerNotUsable(f"{address}: {error or type(error).__name__}") from None
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, msgspec.ValidationError):
        models = []
    if answer.status != 200 or not models:
        shown = body[:200].decode(errors="replace")
        raise ServerNotUsable(
            f"{address} names no model; name it with --model: {answer.status} {shown}"
        )
    return models[0].id


async def drop_refused_fields(endpoint: Endpoint) -> Endpoint:
    """The endpoint without `stream_options`, if the server refuses them."""
    request = RandomDataset(TokenRange(8, 8), TokenRange(2, 2), SEED).sample(0)
    (line,) = await streaming.stream_all(endpoint, [request])
    if line.failure.startswith("status 4") and "stream_options" in line.error:
        return msgspec.structs.replace(endpoint, usage=False)
    return endpoint


async def calibrate_words(endpoint: Endpoint, drawn: RandomDataset) -> tuple[RandomDataset, bool]:
    """The prompts with as many words as make the wanted tokens, and whether the server said how
    many these are: two prompts tell what a word is and what is around them."""
    if drawn.highest_id is not None:
        return drawn, True
    probe = RandomDataset(NUMBERED, NUMBERED, drawn.seed + SEED, lengths=[(FEW, 1), (MANY, 1)])
    lines = await streaming.stream_all(endpoint, [probe.sample(0), probe.sample(1)])
    few, many = (line.prompt_tokens for line in lines)
    if not few < many:
        return drawn, False
    each = (many - few) / (MANY - FEW)
    around = max(few - each * FEW, 0.0)
    return msgspec.structs.replace(drawn, tokens_per_word=each, tokens_around=around), True


async def warm_up(
    endpoint: Endpoint, source: RandomDataset | CustomDataset, requests: int
) -> list[RequestTiming]:
    """So many requests of few tokens at once, like those that come; with other words, if these are
    drawn."""
    asked = [source.warmup_sample(index, SEED) for index in range(requests)]
    return await streaming.stream_all(endpoint, [_short(request) for request in asked])


def _short(request: SampleRequest) -> SampleRequest:
    return msgspec.structs.replace(request, output=min(request.output_len, MOST_OUTPUT))
