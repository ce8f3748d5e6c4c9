"""The HTTP client of the benchmark: requests to an OpenAI-compatible server, streamed and timed;
what the times say, and how far the client itself distorted them.

- `Endpoint` says where requests go and encodes them.
- `stream_request` and `stream_all` send requests and note when each chunk arrives, in a
  `RequestTiming`.
- `first_model`, `drop_refused_fields`, `calibrate_words` and `warm_up` prepare a measurement.
- `benchmark_metrics` are the statistics of timings; `LoopLagMonitor` and `client_stats` watch the
  client.

Times in memory are seconds of one monotonic clock; those of results are milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import aiohttp
import msgspec
import numpy as np

from pipeinfer.bench.dataset import CustomDataset, RandomDataset, SampleRequest, TokenRange
from pipeinfer.params import JsonObject, JsonValue


class EncodedRequest(msgspec.Struct, frozen=True):
    """A request whose body is encoded before it is due.

    body: JSON.
    output_len: `max_tokens` of the body.
    prompt_len: tokens of the prompt; 0 where the prompt is text.
    """

    body: bytes
    output_len: int
    prompt_len: int = 0


class Endpoint(msgspec.Struct, frozen=True):
    """A server, and the fields that all requests to it share.

    url: of the server, without `/v1`.
    chat: send to `/v1/chat/completions`, else to `/v1/completions`.
    model: as in the body; None: the server's only one.
    api_key: sent as a bearer token; "": none.
    temperature, ignore_eos: as in the body.
    exact_length: an answer with another number of tokens than `max_tokens` counts as failed.
    include_usage: ask for token counts with `stream_options`.
    timeout: seconds of a whole answer; 0: no limit.
    extra_body: further fields of the body, as given by the user.
    """

    url: str
    chat: bool = False
    model: str | None = None
    api_key: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    exact_length: bool = True
    include_usage: bool = True
    timeout: float = 0.0
    extra_body: JsonObject = {}

    @property
    def api_url(self) -> str:
        """The URL that requests are posted to."""
        return f"{self.url}/v1/{'chat/completions' if self.chat else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        known = {"content-type": "application/json"}
        return known | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def encode(self, request: SampleRequest) -> EncodedRequest:
        """The body of one request. Token ids need the completions endpoint."""
        body: JsonObject = {"model": self.model, "max_tokens": request.output_len}
        if self.chat:
            user: JsonObject = {"role": "user", "content": request.text}
            body["messages"] = [*request.messages] or [user]
        else:
            body["prompt"] = [*request.prompt_ids] or request.text
        body |= {"temperature": self.temperature, "stream": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        encoded = msgspec.json.encode(body | self.extra_body)
        return EncodedRequest(encoded, request.output_len, len(request.prompt_ids))


DATA_PREFIX = b"data:"  # of a server-sent event
DONE = b"[DONE]"  # the data of the last event of a stream
OTHER_PREFIXES = (b"event:", b"id:", b"retry:", b":")  # lines of an event that are not data
READ_TIMEOUT = 600.0  # seconds without a byte after which an answer counts as lost
KEEPALIVE = 2.0  # seconds that an idle connection is kept: servers close theirs after 5
MAX_ERROR_CHARS = 200  # of a server's error that are reported

# Kinds of failures, as in the "failures" of a result.
TIMEOUT = "timeout"
CUT = "cut stream"
GARBAGE = "garbage"
REFUSED = "no connection"
ERROR_IN_STREAM = "error in stream"
WRONG_LENGTH = "wrong length"
NO_TOKENS = "no tokens"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: JsonValue = None
    function_call: JsonValue = None


class _Choice(msgspec.Struct):
    """One choice of a chunk. A token may have no text yet; the role that opens a chat's stream is
    no token."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text) or self.finish_reason is None
        if delta.content or delta.reasoning_content or delta.reasoning:
            return True
        if delta.tool_calls or delta.function_call:
            return True
        return delta.role is None and self.finish_reason is None


class _Chunk(msgspec.Struct):
    """The fields that are read of a chunk. The last chunk has usage and no choices."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: JsonValue = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Failed(Exception):
    """A stream that cannot be read further. args: the kind of failure, the error's text."""


def session(endpoint: Endpoint) -> aiohttp.ClientSession:
    """An HTTP session without a limit on connections, with the endpoint's headers and timeout."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout or None, sock_read=READ_TIMEOUT),
        headers=endpoint.headers,
    )


async def stream_request(
    client: aiohttp.ClientSession, endpoint: Endpoint, request: EncodedRequest, due: float
) -> RequestTiming:
    """Sends one request and reads its stream to the end.

    due: when the request should be sent, of time.perf_counter(). A failure does not raise: it is in
    the `failure` and `error` of the timing.
    """
    timing = RequestTiming(due, prompt_tokens=request.prompt_len, max_tokens=request.output_len)
    await stream_into(client, endpoint, request, timing)
    return timing


async def stream_all(endpoint: Endpoint, requests: Sequence[SampleRequest]) -> list[RequestTiming]:
    """Sends all requests at once from this process, and gives their timings in order."""
    async with session(endpoint) as client:
        now = time.perf_counter()
        asked = [endpoint.encode(request) for request in requests]
        return list(
            await asyncio.gather(*(stream_request(client, endpoint, one, now) for one in asked))
        )


async def stream_into(
    client: aiohttp.ClientSession,
    endpoint: Endpoint,
    request: EncodedRequest,
    timing: RequestTiming,
) -> None:
    """Like `stream_request`, into a timing that the caller may read meanwhile."""
    timing.sent = time.perf_counter()
    try:
        async with client.post(endpoint.api_url, data=request.body) as answer:
            if answer.status != 200:
                text = (await answer.content.read(4096)).decode(errors="replace")
                raise _Failed(f"status {answer.status}", text)
            await _read_stream(answer, timing)
    except _Failed as failed:
        timing.failure, timing.error = failed.args[0], failed.args[1][:MAX_ERROR_CHARS]
    except TimeoutError as error:
        timing.failure, timing.error = TIMEOUT, f"no answer in time {error}".rstrip()
    except aiohttp.ClientConnectorError as error:
        timing.failure, timing.error = REFUSED, str(error)[:MAX_ERROR_CHARS]
    except (aiohttp.ClientError, OSError) as error:
        timing.failure, timing.error = CUT, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except ValueError as error:  # a line that is longer than any piece
        timing.failure, timing.error = GARBAGE, str(error)[:MAX_ERROR_CHARS]
    if timing.failure and not timing.error:
        timing.error = timing.failure
    if not timing.error and endpoint.exact_length and timing.output_tokens != request.output_len:
        timing.failure, timing.error = (
            WRONG_LENGTH,
            f"{timing.output_tokens} tokens instead of {request.output_len}",
        )


async def _read_stream(answer: aiohttp.ClientResponse, timing: RequestTiming) -> None:
    """Reads all chunks. A server ends a stream with a finish reason, with [DONE], or with both."""
    ended = False
    async for raw in answer.content:
        now = time.perf_counter()
        if raw.startswith(DATA_PREFIX):
            data = raw[len(DATA_PREFIX) :].strip()
            ended = data == DONE or _read_chunk(timing, data, now) or ended
        elif raw.strip() and not raw.startswith(OTHER_PREFIXES):
            raise _Failed(GARBAGE, f"no event of a stream: {_shortened(raw)}")
    if not ended:
        raise _Failed(CUT, f"it ended after {len(timing.chunk_times)} pieces without saying so")
    if not timing.chunk_times:
        raise _Failed(NO_TOKENS, "an answer without any token")
    if not timing.has_usage:
        timing.output_tokens = len(timing.chunk_times)


def _read_chunk(timing: RequestTiming, data: bytes, now: float) -> bool:
    """Takes one chunk into the timing, and says whether it had a finish reason."""
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _Failed(GARBAGE, f"{error}: {_shortened(data)}") from None
    if chunk.error is not None:
        raise _Failed(ERROR_IN_STREAM, _shortened(msgspec.json.encode(chunk.error)))
    finished = False
    if chunk.choices:
        timing.last_chunk_time = now
        finished = any(choice.finish_reason is not None for choice in chunk.choices)
        if any(choice.has_token() for choice in chunk.choices) or (
            finished and not timing.chunk_times
        ):
            timing.chunk_times.append(now)
    if chunk.usage is not None:
        timing.has_usage, timing.output_tokens = True, chunk.usage.completion_tokens
        timing.prompt_tokens = chunk.usage.prompt_tokens or timing.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        timing.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    return finished


def _shortened(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()[:MAX_ERROR_CHARS]


SHORT_PROBE_WORDS = 24  # of the shorter prompt whose tokens are counted
LONG_PROBE_WORDS = 96  # of the longer one: their difference tells the tokens of a word
UNUSED_RANGE = TokenRange(1, 1)  # where `lengths` says how long requests are
WARMUP_MAX_TOKENS = 16  # of output, in a request of the warm-up
WARMUP_SEED = 1_000_000_007  # added to the seed, so that no measured prompt is cached before
MODELS_TIMEOUT = 30.0  # seconds of GET /v1/models


class ServerNotUsable(RuntimeError):
    """The server cannot be measured; the text says why."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(endpoint: Endpoint) -> str:
    """The id of the first model of /v1/models. Raises ServerNotUsable."""
    address = f"{endpoint.url}/v1/models"
    try:
        async with (
            session(endpoint) as client,
            client.get(address, timeout=aiohttp.ClientTimeout(MODELS_TIMEOUT)) as answer,
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
    """Sends one short request, and leaves `stream_options` out if the server refuses them."""
    request = RandomDataset(TokenRange(8, 8), TokenRange(2, 2), WARMUP_SEED).sample(0)
    (timing,) = await stream_all(endpoint, [request])
    if timing.failure.startswith("status 4") and "stream_options" in timing.error:
        return msgspec.structs.replace(endpoint, include_usage=False)
    return endpoint


async def calibrate_words(endpoint: Endpoint, dataset: RandomDataset) -> tuple[RandomDataset, bool]:
    """The dataset with as many words as make the wanted tokens, and whether the server reported
    token counts. Two prompts of different length give the tokens of a word and of the chat
    template."""
    if dataset.highest_id is not None:
        return dataset, True
    probe = RandomDataset(
        UNUSED_RANGE,
        UNUSED_RANGE,
        dataset.seed + WARMUP_SEED,
        lengths=[(SHORT_PROBE_WORDS, 1), (LONG_PROBE_WORDS, 1)],
    )
    timings = await stream_all(endpoint, [probe.sample(0), probe.sample(1)])
    few, many = (timing.prompt_tokens for timing in timings)
    if not few < many:
        return dataset, False
    each = (many - few) / (LONG_PROBE_WORDS - SHORT_PROBE_WORDS)
    around = max(few - each * SHORT_PROBE_WORDS, 0.0)
    return msgspec.structs.replace(dataset, tokens_per_word=each, template_tokens=around), True


async def warm_up(
    endpoint: Endpoint, dataset: RandomDataset | CustomDataset, requests: int
) -> list[RequestTiming]:
    """Sends `requests` requests of few output tokens at once. They are like the measured ones; a
    random dataset draws them from another seed."""
    asked = [dataset.warmup_sample(index, WARMUP_SEED) for index in range(requests)]
    return await stream_all(endpoint, [_short_output(request) for request in asked])


def _short_output(request: SampleRequest) -> SampleRequest:
    return msgspec.structs.replace(request, output_len=min(request.output_len, WARMUP_MAX_TOKENS))


OTHER_FAILURE = "other"  # the kind of a failure that has no name of its own


class RequestTiming(msgspec.Struct, array_like=True):
    """What the client saw of one request.

    due: the planned arrival. Latencies count from here, so that a client that sends late does not
        make the server look faster.
    chunk_times: when each chunk with a token arrived.
    output_tokens: of the answer; as many as chunks where the server does not count them.
    prompt_tokens: of the prompt.
    error: text of the failure; "": none.
    failure: its kind, as in the "failures" of a result.
    sent: when the request was sent; 0.0 before.
    end: when the last chunk arrived, with or without a token.
    cached_tokens: prompt tokens that came from the server's prefix cache.
    max_tokens: of the request.
    has_usage: the server reported token counts.
    """

    due: float
    chunk_times: list[float] = []
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    failure: str = ""
    sent: float = 0.0
    last_chunk_time: float = 0.0
    cached_tokens: int = 0
    max_tokens: int = 0
    has_usage: bool = False

    @property
    def success(self) -> bool:
        return not self.error and bool(self.chunk_times)

    @property
    def failure_kind(self) -> str:
        """The kind of its failure; "" if it succeeded."""
        return "" if self.success else self.failure or OTHER_FAILURE

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first token."""
        return self.chunk_times[0] - self.due

    @property
    def end_time(self) -> float:
        """When the stream ended; a server may say so in a chunk without a token."""
        return max(self.last_chunk_time, self.chunk_times[-1])

    @property
    def e2e(self) -> float:
        """Seconds from `due` to the end."""
        return self.end_time - self.due

    @property
    def send_delay(self) -> float:
        """Seconds from `due` until the client sent the request."""
        return max(self.sent - self.due, 0.0)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between chunks."""
        return [
            late - early
            for early, late in zip(self.chunk_times, self.chunk_times[1:], strict=False)
        ]

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.end_time - self.chunk_times[0]) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True)
class GoodputTarget:
    """A request counts for goodput if it succeeded within both limits.

    ttft: seconds to the first token.
    tpot: mean seconds of a token after the first.
    """

    ttft: float
    tpot: float

    def met_by(self, timing: RequestTiming) -> bool:
        return timing.success and timing.ttft <= self.ttft and timing.tpot <= self.tpot


class BenchmarkMetrics(TypedDict):
    """The metrics of a load; times are milliseconds by percentile, empty without values."""

    requests: int
    failed: int
    failures: dict[str, int]
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    goodput_per_s: float
    good_share: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    longest_gap_ms: float
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds of values in seconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), values.tolist(), strict=True))


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """The percentiles with mean and maximum, in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds) * 1e3
    ends = {"mean": float(values.mean()), "max": float(values.max())}
    return percentiles(seconds) | ends


def benchmark_metrics(timings: Sequence[RequestTiming], target: GoodputTarget) -> BenchmarkMetrics:
    """Metrics of all requests that were sent, from the first arrival to the last end.

    Failed requests count in `requests`, `failed` and `failures` alone. The order does not matter.
    """
    succeeded = [timing for timing in timings if timing.success]
    start = min((timing.due for timing in timings), default=0.0)
    seconds = max([timing.end_time - start for timing in succeeded] + [0.0])
    prompt = sum(timing.prompt_tokens for timing in succeeded)
    output = sum(timing.output_tokens for timing in succeeded)
    gaps = [gap for timing in succeeded for gap in timing.itls]
    failures = Counter(timing.failure_kind for timing in timings if timing.failure_kind)
    good = sum(target.met_by(timing) for timing in timings)

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "requests": len(timings),
        "failed": len(timings) - len(succeeded),
        "failures": dict(sorted(failures.items())),
        "seconds": seconds,
        "requests_per_s": rate(len(succeeded)),
        "tokens_per_s": rate(output),
        "prompt_tokens_per_s": rate(prompt),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(timing.cached_tokens for timing in succeeded),
        "goodput_per_s": rate(good),
        "good_share": good / len(timings) if timings else 0.0,
        "ttft_ms": distribution([timing.ttft for timing in succeeded]),
        "itl_ms": distribution(gaps),
        "longest_gap_ms": max(gaps, default=0.0) * 1e3,
        "tpot_ms": distribution([timing.tpot for timing in succeeded if timing.output_tokens > 1]),
        "e2e_ms": distribution([timing.e2e for timing in succeeded]),
    }


LAG_SAMPLE_SECONDS = 0.02  # between two samples of the event loop's lag
ALLOWED_LAG_SHARE = 0.1  # of the server's median times, that the client's own delay may be
ALLOWED_LAG_SECONDS = 0.005  # of delay that does not matter: timers are no finer than 1 ms
BUSY_CPU_SHARE = 0.9  # of a core: beyond, a worker process has no time left


class ClientLoad(msgspec.Struct, array_like=True):
    """How busy one worker process was.

    loop_lags: seconds that its event loop was late, at each sample.
    cpu_share: CPU seconds per second.
    """

    loop_lags: list[float]
    cpu_share: float


class LoopLagMonitor:
    """Samples the lag of the event loop that it runs in, until it is cancelled."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._began, self._used = time.perf_counter(), time.process_time()

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SAMPLE_SECONDS
            await asyncio.sleep(LAG_SAMPLE_SECONDS)
            self._lags.append(max(time.perf_counter() - due, 0.0))

    def client_load(self) -> ClientLoad:
        """What was sampled so far."""
        passed = time.perf_counter() - self._began
        return ClientLoad(
            self._lags, (time.process_time() - self._used) / passed if passed else 0.0
        )


class ClientStats(msgspec.Struct, frozen=True):
    """How much the client itself may have distorted the times.

    processes: worker processes.
    lag_ms: lag of their event loops, milliseconds by percentile.
    late_ms: of requests, from due to sent, milliseconds by percentile.
    busy: CPU share of the busiest worker.
    """

    processes: int
    lag_ms: dict[str, float]
    late_ms: dict[str, float]
    busy: float


def client_stats(loads: Sequence[ClientLoad], timings: Sequence[RequestTiming]) -> ClientStats:
    """Statistics over all worker processes of a load."""
    return ClientStats(
        processes=len(loads),
        lag_ms=percentiles([lag for load in loads for lag in load.loop_lags]),
        late_ms=percentiles([timing.send_delay for timing in timings if timing.sent]),
        busy=max((load.cpu_share for load in loads), default=0.0),
    )


def client_warnings(client: ClientStats, measured: BenchmarkMetrics) -> list[str]:
    """Sentences about delays of the client that are in the measured times."""
    warnings: list[str] = []
    times = [measured[name].get("p50", 0.0) for name in ("ttft_ms", "itl_ms")]
    smallest = min([one for one in times if one > 0], default=0.0)
    allowed = max(ALLOWED_LAG_SHARE * smallest, ALLOWED_LAG_SECONDS * 1e3)
    lag, late = client.lag_ms.get("p99", 0.0), client.late_ms.get("p99", 0.0)
    if lag > allowed:
        warnings.append(
            f"the client was late itself: its event loop by {lag:.1f} ms (p99), which is in all "
            "these times"
        )
    if late > allowed:
        warnings.append(f"requests were sent up to {late:.1f} ms (p99) after they were due")
    if client.busy > BUSY_CPU_SHARE:
        warnings.append(f"a process of the client computed {client.busy:.0%} of the time")
    if warnings:
        warnings[-1] += "; more --processes help, or another machine for the client"
    return warnings
