"""The worst that one client may send, as a table: a name, the requests, and what may be answered.

Made for the demo model: 264 token ids, a token for each byte, a context of 2,048 tokens. A bound of
the server has two cases here, at it and beyond it. Knows no server.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import raw_http
from pipeinfer.gateway.requests import MAX_PROMPTS
from pipeinfer.gateway.schema import MAX_DEPTH, MAX_MESSAGES
from pipeinfer.params import (
    MAX_REPETITION,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MIN_REPETITION,
    MIN_TOP_P,
)

CONTEXT, VOCABULARY, LONGEST_TOKEN = 2048, 264, 13
MEGABYTES = 5_000_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

Build = Callable[[], list[bytes]]


@dataclass(frozen=True)
class Case:
    """`build`: the requests, sent in turn on each of `connections`. `answers`: what may come back
    ("429" always may): statuses, "closed", "0" where nobody waits for one, and "cut" where all may
    still be under way when the time is over. `unlimited`: by a key without limits."""

    name: str
    build: Build
    answers: str
    send: raw_http.SendMethod = raw_http.whole
    connections: int = 4
    unlimited: bool = False

    @property
    def expected(self) -> frozenset[str]:
        """All that may come back."""
        return frozenset((*self.answers.split(), "429"))


def chat(headers: Mapping[str, str] | None = None, **fields: Any) -> bytes:
    """A chat request of 16 tokens, with `fields` in its body."""
    body = {"messages": [{"role": "user", "content": "Copy: abc"}], "max_tokens": 16, **fields}
    return raw_http.request(CHAT, json.dumps(body).encode(), headers)


def completion(**fields: Any) -> bytes:
    """A completion of 4 tokens, with `fields` in its body."""
    body = json.dumps({"prompt": "abc", "max_tokens": 4, **fields})
    return raw_http.request(COMPLETION, body.encode())


def chats(name: str, expected: str, connections: int = 4, **fields: Any) -> Case:
    """A case of one chat request."""
    return Case(name, lambda: [chat(**fields)], expected, connections=connections)


def completions(name: str, expected: str, connections: int = 4, **fields: Any) -> Case:
    """A case of one completion request."""
    return Case(name, lambda: [completion(**fields)], expected, connections=connections)


def nested(depth: int) -> Any:
    """`depth` lists within each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _deep(field: str, depth: int) -> bytes:
    """A chat with `depth` lists in `field`, put in as text: no encoder goes so deep."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    if field == "tool_calls":
        body["messages"].insert(0, {"role": "assistant", "tool_calls": [{"a": "HERE"}]})
    else:
        body[field] = {"a": "HERE"}
    value = "[" * depth + "]" * depth
    return raw_http.request(CHAT, json.dumps(body).replace('"HERE"', value).encode())


def _each(*contents: bytes) -> Build:
    return lambda: list(contents)


def _stops(letters: int) -> list[str]:
    """Strings that almost match a text of one letter, at every place."""
    return ["a" * (letters - 2) + chr(ord("b") + n) + "a" for n in range(MAX_STOP_STRINGS)]


def _gzip(body: bytes, cut: int = 0) -> bytes:
    packed = gzip.compress(body, 1)
    return raw_http.request(CHAT, packed[: len(packed) - cut], {"Content-Encoding": "gzip"})


def _broken_gzip() -> list[bytes]:
    good = gzip.compress(json.dumps({"messages": []}).encode())
    bodies = (b"this is no gzip", good[:10], good[:-4], good[:15] + b"\xff" * 9, b"\x1f\x8b")
    return [raw_http.request(CHAT, body, {"Content-Encoding": "gzip"}) for body in bodies]


MALFORMED = (
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    b"GET /health HTTP/9.9\r\n\r\n",
    b"G\x00T /health HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(5000)) + b"\r\n",
    b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n",
)

# A digit takes nearly a second to compile, and nothing cancels it.
SLOW_SCHEMA: dict[str, Any] = {"type": "integer", "multipleOf": 999983}
LONG_CHAIN: dict[str, Any] = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1100)},
        "d1100": {"type": "integer"},
    },
}
EXPLODING = "(" * 30 + "a" + "{1,30})" * 30
RULES = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000)) + 'r3000: "b"\n'
# Each letter may go on, or begin, any of 600 rules; beside it one that begins so behind a Z alone,
# which the trial of it hardly meets. And one that needs new states with each letter.
NAMES = " | ".join(f"t{n}" for n in range(600))
PARTS = "\n".join(f"t{n}: /[a-z]{{1,{n + 1}}}/ t{n * 7 % 600}?" for n in range(600))
AMBIGUOUS = f"start: r+\nr: {NAMES}\n{PARTS}"
LATE = f"start: /[^Z]*/ (/Z/ r+)?\nr: {NAMES}\n{PARTS}"
COUNTS = "\n".join(f"T{n}: /[a-z]{{0,{n}}}x[a-z]{{0,{n}}}/" for n in range(400))
GROWING = f"start: ({' | '.join(f'T{n}' for n in range(400))})+\n{COUNTS}"
MANY_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {f"k{n}": {"type": "integer"} for n in range(1500)},
}
LIST_OF_TEXTS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "maxLength": 9},
    "minItems": 40,
}

DEPTH = MAX_DEPTH - 2  # within a value of an object of the body's
LETTERS = MAX_STOP_CHARS

CASES: tuple[Case, ...] = (
    # ------------------------------------------------------------------------------- nested JSON
    Case("nested at the bound", lambda: [chat(chat_template_kwargs={"a": nested(DEPTH)})], "200"),
    Case(
        "nested beyond the bound",
        lambda: [_deep("chat_template_kwargs", n) for n in (DEPTH + 1, 980)], "400",
    ),
    Case(
        "nested near the stack's end",
        lambda: [_deep("chat_template_kwargs", n) for n in range(970, 985)], "400",
    ),
    Case(
        "tool_calls near the stack's end",
        lambda: [_deep("tool_calls", n) for n in range(965, 985)], "400",
    ),
    Case("nested far beyond", lambda: [_deep("chat_template_kwargs", 100_000)], "400"),
    Case("nested 900,000 deep", lambda: [_deep("tool_calls", 900_000)], "400"),
    Case(
        "wide arguments",
        lambda: [chat(chat_template_kwargs={f"k{n}": n for n in range(90_000)})], "200 400",
    ),
    Case(
        "wider arguments",
        lambda: [chat(chat_template_kwargs={f"k{n}": n for n in range(300_000)})], "400",
    ),
    # -------------------------------------------------------------------------------- parameters
    Case(
        "small repetition_penalty",
        lambda: [chat(repetition_penalty=p) for p in (1e-300, 1e-38, 5e-324, 1e-20)], "400",
    ),
    Case(
        "repetition_penalty at its bounds",
        lambda: [
            chat(repetition_penalty=p, max_tokens=200, ignore_eos=True)
            for p in (MIN_REPETITION, MAX_REPETITION)
        ], "200",
    ),
    Case(
        "large repetition_penalty",
        lambda: [chat(repetition_penalty=p) for p in (1e300, 1e38)], "400",
    ),
    Case(
        "parameters at their edges",
        lambda: [
            chat(temperature=1e-300), chat(temperature=MAX_TEMPERATURE), chat(top_p=MIN_TOP_P),
            chat(top_p=5e-324, temperature=1.0), chat(top_p=0, temperature=1.0),
            chat(top_k=2**31 - 1, temperature=1.0),
            chat(min_p=1.0, temperature=1.0), chat(seed=2**64 - 1), chat(seed=-(2**63)),
            chat(presence_penalty=2, frequency_penalty=-2), chat(priority=2**31 - 1),
            chat(priority=-(2**31) + 1), chat(timeout=24 * 3600), chat(cache_salt="s" * 1024),
            chat(logit_bias={"0": -100, "97": 100}),
            chat(logit_bias={str(token): 100 for token in range(VOCABULARY)}),
        ], "200",
    ),
    Case(
        "parameters beyond their edges",
        lambda: [
            chat(temperature=1e300), chat(top_p=-0.1), chat(top_k=2**31), chat(min_p=1.1),
            chat(seed=2**64), chat(timeout=1e9), chat(cache_salt="s" * 1025),
            chat(min_tokens=2**63), chat(presence_penalty=3), chat(max_tokens=2**31),
            chat(priority=2**70), chat(logit_bias={"97": 100.5}), chat(logit_bias={"-1": 1}),
            chat(logit_bias={str(VOCABULARY): 1}),
        ], "400",
    ),
    Case(
        "short timeouts", lambda: [
            chat(timeout=t, max_tokens=500, ignore_eos=True) for t in (1e-9, 0.01, 0.1)
        ], "200 408",
    ),
    chats("all ids stop", "400", min_tokens=16, stop_token_ids=list(range(VOCABULARY))),
    chats(
        "all ids but one stop", "200 cut", connections=16,
        min_tokens=500, max_tokens=500, stop_token_ids=list(range(1, VOCABULARY)), temperature=1.0,
    ),
    chats(
        "as many stop ids as may be", "200 400",
        min_tokens=8, stop_token_ids=list(range(256, 256 + MAX_STOP_TOKENS)),
    ),
    # What is large is made when it is sent.
    Case(
        "a million stop ids",
        lambda: [chat(min_tokens=8, stop_token_ids=list(range(10**6)))], "400",
    ),
    Case(
        "one stop id a million times",
        lambda: [chat(min_tokens=8, stop_token_ids=[97] * 10**6)], "400",
    ),
    chats("ten thousand biases", "400", logit_bias={str(token): 1 for token in range(10**4)}),
    Case(
        "a million biases",
        lambda: [completion(logit_bias={str(n): 1 for n in range(10**6 - 9)})], "400",
    ),
    # --------------------------------------------------------------------------- lists of prompts
    Case("5 MB of prompts", lambda: [completion(prompt=["a"] * (MEGABYTES // 4))], "400"),
    Case(
        "32 MB of prompts", lambda: [completion(prompt=["a"] * (32 * 2**20 // 5))], "400 413",
    ),
    Case(
        "prompts at the bound",
        lambda: [completion(prompt=["a"] * MAX_PROMPTS, max_tokens=1)], "200 cut", unlimited=True,
    ),
    Case(
        "long prompts at the bound",
        lambda: [completion(prompt=["a" * (CONTEXT - 8)] * MAX_PROMPTS, max_tokens=1)],
        "200 cut", connections=2, unlimited=True,
    ),
    completions("prompts beyond the bound", "400", prompt=["a"] * (MAX_PROMPTS + 1)),
    completions("prompts of ids", "400", prompt=[[1]] * 500_000),
    completions("empty prompts", "400", prompt=[""] * 500_000),
    # -------------------------------------------------------------------------------- long texts
    chats("text of 5 MB", "400", messages=[{"role": "user", "content": "a" * MEGABYTES}]),
    completions("prompt of 5 MB", "400", prompt="ab " * (MEGABYTES // 3)),
    completions("prompt that just may fit", "400", prompt="a" * (CONTEXT * LONGEST_TOKEN)),
    completions("prompt that just fits", "200 cut", prompt="a" * (CONTEXT - 5)),
    completions("control tokens", "200 400", prompt="<|im_end|>" * 2000),
    completions("5 MB of token ids", "400", prompt=[97] * (MEGABYTES // 4)),
    chats(
        "as many messages as may be", "400",
        messages=[{"role": "user", "content": "a"}] * MAX_MESSAGES,
    ),
    chats(
        "100,000 parts of a message", "400",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}],
    ),
    chats("half a character", "200 400", messages=[{"role": "user", "content": "\ud800" * 50}]),
    # -------------------------------------------------------------------------------------- stops
    completions(
        "stop strings at the bound", "200 cut", connections=8,
        prompt="a" * 900, max_tokens=500, ignore_eos=True, stop=_stops(LETTERS),
    ),
    completions("stop strings beyond the bound", "400", stop=_stops(LETTERS + 1)),
    completions("stop strings of 5 MB", "400", prompt="a" * 900, stop=_stops(312_000)),
    completions("17 stop strings", "400", stop=["x"] * (MAX_STOP_STRINGS + 1)),
    completions("a million stop strings", "400", stop=["x"] * 10**6),
    # ----------------------------------------------------------------------------------- grammars
    chats("a schema that takes long", "400 cut", guided_json=SLOW_SCHEMA),
    chats("a chain of references", "200 400", guided_json=LONG_CHAIN),
    chats("a chain of rules", "200 400", guided_grammar=RULES),
    chats("an expression that explodes", "200 400 500", guided_regex=EXPLODING),
    # About as long as a grammar may take to compile.
    chats("many optional keys", "200 400", guided_json=MANY_KEYS),
    chats("a grammar of 5 MB", "400", guided_grammar="a" * MEGABYTES),
    chats("a schema nested beyond the bound", "400", guided_json={"a": nested(DEPTH + 1)}),
    Case(
        "schemas that nobody knows yet",
        lambda: [chat(guided_regex=f"[a-c]{{{n}}}x") for n in range(1, 200)], "200",
    ),
    chats("an ambiguous grammar", "400", 8, guided_grammar=AMBIGUOUS),
    chats("a grammar whose states grow", "400", 8, guided_grammar=GROWING),
    chats(
        "a grammar that is ambiguous later", "200 cut 500", 8,
        guided_grammar=LATE, logit_bias={"90": 100}, max_tokens=30,
    ),
    chats("masks in every step", "200 cut", 16, guided_json=LIST_OF_TEXTS, max_tokens=500),
    chats("as many choices as may be", "200 cut", n=128, max_tokens=50, ignore_eos=True),
    chats("choices in every place", "200 cut", n=16, max_tokens=200, ignore_eos=True),
    # --------------------------------------------------------------------------------- below JSON
    Case("broken gzip", _broken_gzip, "400"),
    Case("gzip bomb", lambda: [_gzip(b" " * (200 << 20))], "400 413"),
    Case("malformed requests", lambda: list(MALFORMED), "400 401 200 closed", connections=2),
    Case("half-closed", lambda: [chat()], "200", raw_http.half_closed),
    Case("slow requests", lambda: [chat()], "408 closed cut", raw_http.slow, 64),
    Case("dropped connections", _each(b""), "0 closed", raw_http.dropped, 64),
    Case(
        "dropped requests", lambda: [chat(max_tokens=1000, ignore_eos=True, stream=True)],
        "0 closed", raw_http.dropped, 32,
    ),
    Case(
        "unread streams", lambda: [chat(max_tokens=1000, ignore_eos=True, stream=True)],
        "200 closed cut", raw_http.unread, 16,
    ),
    Case("pipelined", lambda: [chat(max_tokens=1) * 200], "200"),
    # ------------------------------------------------------------------------------- simply much
    chats("small requests", "200", max_tokens=1, connections=32),
    chats("whole contexts", "200 cut", connections=64, max_tokens=2000, ignore_eos=True),
    completions(
        "long prompts", "200 cut", connections=32, prompt="a" * (CONTEXT - 5),
    ),
    Case(
        "salts", lambda: [completion(prompt="a" * 1000, cache_salt=f"s{n}") for n in range(500)],
        "200", connections=8,
    ),
)  # fmt: skip
