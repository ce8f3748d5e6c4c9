"""Requests of a soak: questions with known answers, how they are sent, and how answers are read.

Questions follow from a seed and are made for the demo model, with every way of sampling. Each way
has a fixed seed, so that sampled texts repeat as greedy ones do. Around good requests the mix has
impatient, bad and hostile ones.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from chaos import cases
from chaos.cases import CASES, CHAT, COMPLETION, Case
from harness import raw_http
from pipeinfer import demo

MANY = 240
PREFIXES = 6  # beginnings of 100 to 400 tokens that many questions share
TOKENS = 24  # of an answer, at most
GREEDY = {"temperature": 0.0}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logit_bias": {"97": 3, "98": -100}},
    {"temperature": 0.8, "stop": ["1", "7 8", "e"]},
    {"temperature": 0.8, "stop_token_ids": [101, 116]},
    {"temperature": 0.6, "min_tokens": 12},
    {"temperature": 1.0, "guided_regex": "[a-f]{3,9}-[0-9]{2}"},
    {"temperature": 0.8, "guided_choice": ["apples", "apricots", "pears"]},
    {"temperature": 0.8, "allowed_token_ids": [*range(97, 123), 258]},
    {"temperature": 0.8, "bad_words": ["e", "an"]},
    {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False},
    {"temperature": 0.0, "stop": ["4 5", "is", "="], "include_stop_str_in_output": True},
)


@dataclass(frozen=True)
class Question:
    """`body`: of a request to `path`, without what changes from one time to the next. `right`: the
    answer that the demo model should give, "" where nobody knows."""

    path: str
    body: dict[str, Any]
    right: str = ""


def questions(seed: int, many: int = MANY) -> list[Question]:
    """So many: half greedy, a third behind a shared beginning, some behind a long one
    of their own."""
    source = random.Random(f"questions {seed}")
    shared = [_turns(source, source.randint(100, 400)) for _ in range(PREFIXES)]
    return [_drawn(source, number, shared) for number in range(many)]


def _drawn(source: random.Random, number: int, shared: list[list[dict[str, str]]]) -> Question:
    asked, right = _task(source)
    messages = [{"role": "user", "content": asked}]
    place = source.random()
    if place < 0.03:
        messages = _turns(source, source.randint(500, 900)) + messages
    elif place < 0.38:
        messages = source.choice(shared) + messages
    body: dict[str, Any] = {"max_tokens": TOKENS, "seed": number, **GREEDY}
    if source.random() < 0.5:
        body |= source.choice(SAMPLING)
        body["max_tokens"] = source.randint(12, TOKENS)
        right = ""
    if place > 0.9:  # the same words as plain text, which no template frames
        return Question(COMPLETION, {"prompt": f"{asked} {right}", **body})
    return Question(CHAT, {"messages": messages, **body}, right)


def _task(source: random.Random) -> demo.Turn:
    kinds = (
        lambda: demo.copy_task(source, source.randint(4, 20)),
        lambda: demo.count_task(source, 8),
        lambda: demo.sum_task(source),
        lambda: demo.recall_task(source, source.randint(2, 6)),
    )
    return source.choice(kinds)()


def _turns(source: random.Random, letters: int) -> list[dict[str, str]]:
    """Turns of other tasks, together about so many letters, each of which is a token."""
    made: list[dict[str, str]] = []
    while letters > 0:
        asked, answer = _task(source)
        made += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        letters -= len(asked) + len(answer)
    return made


Kind = Literal["good", "hang up", "bad", "time out", "hostile"]
PARTS: dict[Kind, int] = {"good": 84, "hang up": 10, "bad": 5, "time out": 2, "hostile": 1}
LONG = {"max_tokens": 400, "ignore_eos": True, "skip_special_tokens": False}  # tokens
EARLY = 0.3  # of those that hang up: before there is any answer
# Hostile cases that cost neither side much, and whose answer says how it must have been counted.
CHEAP = (
    "nested at the bound", "nested beyond the bound", "nested near the stack's end",
    "tool_calls near the stack's end", "small repetition_penalty", "parameters at their edges",
    "parameters beyond their edges", "all ids stop", "as many stop ids as may be",
    "prompts beyond the bound", "prompt that just may fit", "half a character",
    "stop strings beyond the bound", "17 stop strings", "broken gzip", "malformed requests",
    "half-closed", "dropped connections",
)  # fmt: skip
LAST = b'"priority": 2147483647'  # whose client waits while any other does


@dataclass(frozen=True)
class Asked:
    """One request. `question`: of a good one. `hold`: of one that hangs up, after how many pieces;
    0 is before the first byte of an answer. `wanted`: the status of a bad one. `keyed`: whether it
    counts as a request of a key. `kept`: its connection is used again. `case`: of a hostile one."""

    kind: Kind
    content: bytes
    question: int = -1
    hold: int = 0
    wanted: int = 200
    keyed: bool = True
    kept: bool = True
    case: Case | None = None


def drawn(seed: int, number: int, questions: list[Question]) -> Asked:
    """Request `number`."""
    source = random.Random(f"{seed} {number}")
    [kind] = source.choices(list(PARTS), list(PARTS.values()))
    if kind == "good":
        return _good(source, questions)
    if kind == "bad":
        return source.choice(bad())
    if kind == "hostile":
        return source.choice(hostile())
    body = source.choice(questions).body
    body = {"messages": [{"role": "user", "content": "hi"}], **body, **LONG}
    for name in ("prompt", "stop", "stop_token_ids", "include_stop_str_in_output"):
        body.pop(name, None)
    if kind == "time out":
        body |= {"timeout": source.choice((0.001, 0.02, 0.1)), "stream": source.random() < 0.5}
        return Asked(kind, _post(CHAT, body), kept=source.random() < 0.7)
    if source.random() < EARLY:
        body["stream"] = source.random() < 0.5
        return Asked(kind, _post(CHAT, body, {"Expect": "100-continue"}))
    return Asked(kind, _post(CHAT, {**body, "stream": True}), hold=source.randint(1, 5))


def plain(questions: list[Question], number: int) -> Asked:
    """A question as it is."""
    question = questions[number]
    return Asked("good", _post(question.path, question.body), number)


def _good(source: random.Random, questions: list[Question]) -> Asked:
    number = source.randrange(len(questions))
    question = questions[number]
    body = dict(question.body)
    if source.random() < 0.6:
        body["stream"] = True
        if source.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
    if source.random() < 0.2:
        body["priority"] = source.randint(-3, 3)
    if source.random() < 0.15:  # nothing of it is in the cache, and nobody else will find it there
        body["cache_salt"] = f"{source.getrandbits(64):x}"
    if source.random() < 0.3:
        body["timeout"] = 300.0
    return Asked("good", _post(question.path, body), number, kept=source.random() < 0.8)


@cache
def bad() -> tuple[Asked, ...]:
    """Each of the bad requests."""
    wanted = (
        (400, cases.chat(temperature="hot")),
        (400, cases.chat(messages="hello")),
        (400, cases.chat(max_tokens=-1)),
        (400, cases.chat(n=0)),
        (400, cases.chat(tools=[{"type": "function"}])),
        (404, cases.chat(model="somebody-else")),
        (400, cases.completion(prompt="a" * 5000)),
        (400, cases.completion(prompt=[97, cases.VOCABULARY])),
        (400, cases.completion(prompt="abc", stop=[""])),
        (400, raw_http.request(CHAT, b'{"messages": [')),
        (415, raw_http.request(CHAT, b"{}", {"Content-Encoding": "br"})),
        (404, raw_http.request("/v1/nothing", b"{}")),
    )
    of_a_key = (Asked("bad", content, wanted=status) for status, content in wanted)
    return (*of_a_key, Asked("bad", raw_http.request(CHAT, method="GET"), wanted=405, keyed=False))


@cache
def hostile() -> tuple[Asked, ...]:
    """Each request of the cheap hostile cases that is answered however much others ask for."""
    chosen = [case for case in CASES if case.name in CHEAP]
    assert len(chosen) == len(CHEAP), "a case has another name now"
    contents = [(case, content) for case in chosen for content in case.build()]
    served = [(case, content) for case, content in contents if LAST not in content]
    assert len(served) == len(contents) - 1, "it is written in another way now"
    return tuple(Asked("hostile", content, case=case) for case, content in served)


def _post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    return raw_http.request(path, json.dumps(body).encode(), headers)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENCE = 120.0  # seconds for an answer
INVITED = b"HTTP/1.1 100"
LEAVE = 0.03  # seconds at most after which a client leaves that has sent everything


@dataclass(frozen=True)
class Answer:
    """`status`: 0 where the client left before it. `finish`: of a completion; "" where it left
    within it, or where there is none. `code`: of an error."""

    status: int
    text: str = ""
    finish: str = ""
    code: str = ""


class Lines:
    """Connections to a server, used again where both sides like."""

    def __init__(self, address: raw_http.Address) -> None:
        self.address = address
        self._idle: list[Stream] = []

    async def ask(self, asked: Asked) -> Answer:
        """Sends it, and goes as far as its client wants. OSError, TimeoutError, or
        asyncio.IncompleteReadError if the server does not."""
        async with asyncio.timeout(PATIENCE):
            if asked.case is not None:
                answer = await asked.case.send(self.address, asked.content)
                return _whole(answer) if answer.status else Answer(0)
            if asked.kind == "hang up":
                return await self._hung_up(asked)
            return await self._to_its_end(asked)

    def close(self) -> None:
        """Those that nobody uses."""
        for _, writer in self._idle:
            writer.close()

    async def _to_its_end(self, asked: Asked) -> Answer:
        reader, writer = self._idle.pop() if self._idle else await raw_http.connect(self.address)
        again = False
        try:
            writer.write(asked.content)
            status, headers = await raw_http.head(reader)
            if headers.get("content-type", "").startswith("text/event-stream"):
                data = b"".join([chunk async for chunk in raw_http.chunks(reader)])
                found = _streamed(status, data)
            else:
                body = await reader.readexactly(int(headers["content-length"]))
                found = _whole(raw_http.Answer(status, headers, body))
            again = asked.kept and headers.get("connection") != "close"
            return found
        finally:
            if again:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _hung_up(self, asked: Asked) -> Answer:
        """Leaves after `hold` pieces of a stream; or, once the server has asked for the body and
        so has counted the request, some moments after it was sent."""
        reader, writer = await raw_http.connect(self.address)
        try:
            if asked.hold:
                writer.write(asked.content)
                status, _ = await raw_http.head(reader)
                pieces = raw_http.chunks(reader)
                for _ in range(asked.hold):
                    await anext(pieces)
                return Answer(status)
            head, _, body = asked.content.partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            invited = await reader.readuntil(b"\r\n\r\n")
            if not invited.startswith(INVITED):
                raise raw_http.Closed(f"no invitation: {invited[:80]!r}")
            writer.write(body)
            await asyncio.sleep(LEAVE * (len(body) % 8) / 7)
            return Answer(0)
        finally:
            if len(asked.content) % 2:
                writer.close()
            else:
                writer.transport.abort()  # with a reset instead of an orderly end


def _whole(answer: raw_http.Answer) -> Answer:
    content: Any = json.loads(answer.body)
    if "error" in content:
        return Answer(answer.status, code=str(content["error"]["code"]))
    if "choices" not in content:  # /health, in one of the malformed requests
        return Answer(answer.status)
    [choice] = content["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(answer.status, text, choice["finish_reason"])


def _streamed(status: int, data: bytes) -> Answer:
    """ConnectionError for a stream that does not end as one should."""
    if not data.endswith(b"data: [DONE]\n\n"):
        raise ConnectionError(f"a stream ended with {data[-200:]!r}")
    text, finish = "", ""
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: {"):
            content = json.loads(event[len(b"data: ") :])
            for choice in content["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                text += piece or ""
                finish = choice["finish_reason"] or finish
    return Answer(status, text, finish)
