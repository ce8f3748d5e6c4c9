"""Replay commands that send requests to a server: `session` and `verify ANSWER`.

`session` records a session of mixed requests, to have something to replay. The requests are drawn
from a seed: short and long prompts, shared prefixes, stop strings, aborts.

`verify` asks for an answer again, which must be the same. ANSWER is a JSON file {"request": ...,
"response": ...}: the body of a request to /v1/completions or /v1/chat/completions, with a seed or
temperature 0, and what a server has answered. Without a response the server is asked and its
response is written into the file. Of a server in exact mode (docs/exact.md) any other with its
`system_fingerprint`, on the same kind of GPU, gives the same tokens and log-probs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pipeinfer import settings as config
from pipeinfer.command_line import counted
from pipeinfer.replay.traces import DIFFERENT, EQUAL, USAGE, CannotReplay
from pipeinfer.runtime.supervisor import LocalServer
from pipeinfer.settings import base_url

WORDS = ("count", "from", "pipeline", "engine", "seven", "12", "what is", "copy:", "é", "页", "🙂")
STOPS = (["e"], ["3"], ["ab", "a"], ["\n"], [" t", "10"], ["no such text"])


@dataclass(frozen=True)
class SessionRequest:
    """A request of a session: path, body, `hang_up` after so many pieces of its stream (None:
    never), and the HTTP statuses that it may get."""

    path: str
    body: dict[str, Any]
    hang_up: int | None = None
    statuses: tuple[int, ...] = (200,)


def session_requests(count: int, seed: int) -> list[SessionRequest]:
    """`count` requests; about 1 in 12 is refused, 1 in 8 abandoned, 1 in 3 has stop strings,
    1 in 20 little time."""
    source = random.Random(seed)
    return [_bad(source) if source.random() < 1 / 12 else _good(source) for _ in range(count)]


def twins(kinds: int = 12, each: int = 3) -> list[SessionRequest]:
    """Short prompts of whole pages, each several times: as the last token of a prompt is computed
    for each, so is its last page, and the cache gets pages that it has."""
    return [
        SessionRequest(
            "/v1/completions", {"prompt": [kind] * 96, "max_tokens": 1, "temperature": 0}
        )
        for kind in range(100, 100 + kinds)
        for _ in range(each)
    ]


def _good(source: random.Random) -> SessionRequest:
    body: dict[str, Any] = {
        "max_tokens": source.randint(1, 48),
        "temperature": source.choice((0, 0, 0.7, 1.0, 1.5)),
        "stream": source.random() < 0.7,
        "ignore_eos": source.random() < 0.5,
        "priority": source.choice((0, 0, 0, 1, -1)),
    }
    optional = {
        "seed": lambda: source.randrange(2**31),
        "stop": lambda: source.choice(STOPS),
        "top_k": lambda: source.choice((1, 5, 40)),
        "top_p": lambda: source.choice((0.5, 0.95)),
        "min_p": lambda: 0.05,
        "min_tokens": lambda: source.randint(1, body["max_tokens"]),
        "stop_token_ids": lambda: [source.randrange(256)],
        "logit_bias": lambda: {str(source.randrange(256)): source.choice((-100, 2.5, 6))},
        "cache_salt": lambda: source.choice(("a", "b")),
        "include_stop_str_in_output": lambda: True,
    }
    for name, draw in optional.items():
        if source.random() < 1 / 3:
            body[name] = draw()
    # A common beginning for many, so that prefixes are found.
    words = [*(("count from 1 to 9 " * 4,) if source.random() < 0.5 else ())]
    words += source.choices(WORDS, k=source.randint(1, 40))
    text = " ".join(words)
    hang_up = source.randint(0, 5) if body["stream"] and source.random() < 1 / 6 else None
    statuses = (200,)
    if source.random() < 1 / 20:
        body["timeout"], statuses = round(source.uniform(0.05, 1.0), 3), (200, 408)
    if source.random() < 0.4:
        return SessionRequest(
            "/v1/chat/completions", {**body, "messages": _chat(text)}, hang_up, statuses
        )
    return SessionRequest("/v1/completions", {**body, "prompt": text}, hang_up, statuses)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _bad(source: random.Random) -> SessionRequest:
    """Refused by the gateway, the tokenizer or the scheduler, each in its own way."""
    path = "/v1/completions"
    return source.choice(
        (
            SessionRequest(path, {"prompt": [1, 2, 999_999], "max_tokens": 4}, statuses=(400,)),
            SessionRequest(path, {"prompt": "too long " * 2_000, "max_tokens": 4}, statuses=(400,)),
            SessionRequest(path, {"prompt": "x", "max_tokens": 1_000_000}, statuses=(400,)),
            SessionRequest(path, {"prompt": "x", "temperature": -1}, statuses=(400,)),
            SessionRequest(
                "/v1/chat/completions", {"messages": _chat("hi") * 400}, statuses=(400,)
            ),
        )
    )


# Few pages, so that requests must be preempted; the largest request still fits.
DEFAULTS = {"kv_pages": 40, "page_size": 16, "threads": 1, "dtype": "float32", "device": "cpu"}
FAILED = 1


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the traces")
    parser.add_argument("--requests", type=int, default=200, metavar="N")
    parser.add_argument("--concurrency", type=int, default=24, metavar="N")
    parser.add_argument("--seed-of-requests", type=int, default=1, metavar="N")


def replay_session(options: argparse.Namespace, overrides: Mapping[str, object]) -> int:
    """0 if every request was answered as it should be."""
    settings = {**DEFAULTS, **overrides, "record": str(options.out)}
    requests = session_requests(options.requests, options.seed_of_requests)
    begun = time.monotonic()
    with LocalServer(settings) as server:
        outcomes = asyncio.run(_all(server.url, requests, options.concurrency))
        seconds = time.monotonic() - begun
    print(
        f"{counted(len(requests), 'request')} in {seconds:.1f} s: {dict(sorted(outcomes.items()))}"
    )
    for path in sorted(options.out.glob("*.pitrace")):
        print(path)
    unexpected = [name for name in outcomes if name.startswith("unexpected")]
    if unexpected:
        print(f"error: {', '.join(unexpected)}", file=sys.stderr)
    return FAILED if unexpected else EQUAL


async def _all(url: str, requests: list[SessionRequest], concurrency: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    waiting = iter(requests)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        outcomes.update(await asyncio.gather(*(_one(client, url, pair) for pair in twins())))

        async def work() -> None:
            for request in waiting:
                outcomes[await _one(client, url, request)] += 1

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return outcomes


async def _one(client: aiohttp.ClientSession, url: str, request: SessionRequest) -> str:
    """How it ended, in words."""
    body = {"model": None, **request.body}
    try:
        async with client.post(url + request.path, json=body) as answer:
            if answer.status not in request.statuses:
                text = (await answer.text())[:200]
                return f"unexpected {answer.status}, not {request.statuses}: {text}"
            if answer.status != 200:
                return f"refused {answer.status}"
            if not request.body.get("stream"):
                return str((await answer.json())["choices"][0]["finish_reason"])
            return await _stream(answer, request)
    except aiohttp.ClientError as error:
        return f"unexpected {type(error).__name__}: {error}"


async def _stream(answer: aiohttp.ClientResponse, request: SessionRequest) -> str:
    pieces, finish = 0, "unexpected end"
    async for raw in answer.content:
        if not raw.startswith(b"data: {"):
            continue
        if request.hang_up is not None and pieces >= request.hang_up:
            answer.close()
            return "hung up"
        pieces += 1
        chunk = json.loads(raw[len(b"data: ") :])
        if "error" in chunk:
            return f"unexpected {chunk['error']['message']}"
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
    return finish


class ChatTokenLogprobs(msgspec.Struct):
    """Log-probs of a chat's token. `top_logprobs` has the tokens beside it."""

    logprob: float
    top_logprobs: list[ChatTokenLogprobs] = []


class ChoiceLogprobs(msgspec.Struct):
    """`logprobs` of a choice: content of a chat, the others of a completion, whose first token has
    none if the prompt is echoed."""

    content: list[ChatTokenLogprobs] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    """The fields of a choice, of either endpoint, that must be the same."""

    token_ids: list[int] | None = None
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None


class RecordedResponse(msgspec.Struct):
    """The fields of a response that are compared."""

    system_fingerprint: str
    choices: list[Choice]


class AnswerFile(msgspec.Struct, omit_defaults=True):
    """A file that `verify` reads and writes. request: the body; response: the answer as the server
    gave it, empty if not asked for yet."""

    request: dict[str, Any]
    response: msgspec.Raw = msgspec.Raw()


# Fields of a choice, in the order in which differences are reported; log-probs come last.
COMPARED = ("token_ids", "text", "message", "finish_reason", "stop_reason")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("answer", type=Path, metavar="ANSWER", help="a JSON file")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument(
        "--logprob-tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="by which log-probs may differ; a CPU needs 0.001",
    )


def replay_verify(options: argparse.Namespace) -> int:
    """0 if the answer is the same, 1 if it is another, or comes from another fingerprint."""
    path: Path = options.answer
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=AnswerFile)
        recorded = None
        if bytes(answer.response):
            recorded = msgspec.json.decode(answer.response, type=RecordedResponse)
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotReplay(USAGE, f"{path}: {error}") from None
    request = {**answer.request, "return_token_ids": True, "stream": False}
    if request.get("seed") is None and request.get("temperature") != 0:
        raise CannotReplay(USAGE, f"{path}: the request has no seed, so each answer is another one")
    body = asyncio.run(_ask(options.url, request))
    try:
        now = msgspec.json.decode(body, type=RecordedResponse)
        if recorded is None:
            whole = msgspec.json.encode(AnswerFile(answer.request, msgspec.Raw(body)))
            path.write_bytes(msgspec.json.format(whole, indent=1) + b"\n")
            print(f"{path}: the response is written, of {now.system_fingerprint}")
            return EQUAL
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotReplay(USAGE, f"{path}, {options.url}: {error}") from None
    different = _first_difference(recorded, now, options.logprob_tolerance)
    tokens = sum(len(choice.token_ids or ()) for choice in now.choices)
    print(different or f"equal: {counted(tokens, 'token')} of {now.system_fingerprint}")
    return DIFFERENT if different else EQUAL


async def _ask(url: str, request: dict[str, Any]) -> bytes:
    """The body of the response; CannotReplay if there is none."""
    path = "chat/completions" if "messages" in request else "completions"
    key = config.build(config.from_environment(os.environ)).api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as client,
            client.post(f"{base_url(url)}/v1/{path}", json=request) as answer,
        ):
            body = await answer.read()
    except (aiohttp.ClientError, OSError) as error:
        raise CannotReplay(USAGE, f"{url}: {error}") from None
    if answer.status != 200:
        raise CannotReplay(USAGE, f"status {answer.status}: {body.decode(errors='replace')}")
    return body


def _first_difference(before: RecordedResponse, now: RecordedResponse, tolerance: float) -> str:
    """The first difference, in words; "" if there is none."""
    if before.system_fingerprint != now.system_fingerprint:
        return (
            f"another fingerprint: {before.system_fingerprint!r} has answered, "
            f"{now.system_fingerprint!r} was asked; model, settings or version differ"
        )
    if len(before.choices) != len(now.choices):
        return f"{counted(len(before.choices), 'choice')} recorded, {len(now.choices)} now"
    for number, (one, other) in enumerate(zip(before.choices, now.choices, strict=True)):
        for field in COMPARED:
            mine, theirs = getattr(one, field), getattr(other, field)
            if mine != theirs:
                return f"choice {number}: {_differs(field, mine, theirs)}"
        if where := _other_logprob(_token_logprobs(one), _token_logprobs(other), tolerance):
            return f"choice {number}: {where}"
    return ""


def _differs(field: str, before: Any, now: Any) -> str:
    if field != "token_ids" or before is None or now is None:
        return f"{field} differs: recorded {before!r}, now {now!r}"
    pairs = enumerate(zip(before, now, strict=False))
    first = next((at for at, (one, other) in pairs if one != other), None)
    if first is None:
        return f"{len(before)} tokens recorded, {len(now)} now, the first ones equal"
    return f"token {first} differs: recorded {before[first]}, now {now[first]}"


def _token_logprobs(choice: Choice) -> list[list[float]]:
    """The log-probs of each token: its own, if it has one, and those of the tokens beside it."""
    found = choice.logprobs or ChoiceLogprobs()
    if found.content is not None:
        return [[one.logprob, *(top.logprob for top in one.top_logprobs)] for one in found.content]
    own = [[] if logprob is None else [logprob] for logprob in found.token_logprobs or ()]
    beside = [list((tops or {}).values()) for tops in found.top_logprobs or [None] * len(own)]
    return [one + other for one, other in zip(own, beside, strict=False)]


def _other_logprob(before: list[list[float]], now: list[list[float]], tolerance: float) -> str:
    """Which log-prob differs first by more than `tolerance`, or ""."""
    if [*map(len, before)] != [*map(len, now)]:
        return f"log-probs of {len(before)} tokens recorded, of {len(now)} now, or of other tokens"
    for at, pair in enumerate(zip(before, now, strict=True)):
        for one, other in zip(*pair, strict=True):
            if not abs(one - other) <= tolerance:
                return f"log-prob {at} differs: recorded {one}, now {other}"
    return ""
