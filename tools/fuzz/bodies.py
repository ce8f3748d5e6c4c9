"""Bodies of the two endpoints as plain values, drawn from the schema, and raw JSON for its edges.

Knows the schema's fields, those that are not built among them.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from fuzz import examples, values
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest
from pipeinfer.gateway.unsupported_fields import REFUSED

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KINDS = {CHAT: ChatRequest, COMPLETION: CompletionRequest}
DEPTHS = (2, 30, 63, 64, 65, 66, 500, 900, 975, 979, 985, 1100, 20_000)

HUGE = tuple(msgspec.Raw(str(n).encode()) for n in (2**64, -(2**63) - 1, 10**40, -(10**40)))

encode = msgspec.json.Encoder().encode
_infos = {path: inspect.type_info(kind) for path, kind in KINDS.items()}


def plain(path: str) -> dict[str, Any]:
    """A request that is answered."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "one two three"}]}
    return {"prompt": "one two three"}


def example(path: str, source: Random) -> dict[str, Any]:
    """A request that is mostly good: a few fields are drawn, at their edges too."""
    whole = examples.drawn(_infos[path], source)
    whole.pop("model", None)
    few = source.sample(sorted(whole), min(len(whole), source.choice((1, 2, 3, 6))))
    return {**plain(path), **{name: whole[name] for name in few}}


def raw(source: Random) -> msgspec.Raw:
    """JSON that an encoder would not write."""
    depth = source.choice(DEPTHS)
    many = source.choice((3, 17, 300, 5000))
    return msgspec.Raw(
        source.choice(
            (
                b"[" * depth + b"]" * depth,
                b'{"a":' * depth + b"1" + b"}" * depth,
                b'[{"a":' * depth + b"1" + b"}]" * depth,
                b"[" + b",".join([b'"a"'] * many) + b"]",
                b"[" + b",".join([b"97"] * many) + b"]",
                b'"' + b"a" * many + b'"',
                b"1e400",
                b"-1e-400",
                b"1E5",
                b"0.1e-7",
                b"1" * 400,
                b"-" + b"9" * 30,
                str(source.choice(values.ATOMS[8:13])).encode(),
                b"18446744073709551616",
                b'"\\ud800"',
                b'"\\udc00\\ud800"',
                b'"\xff\xfe"',
                b'"\\u0000"',
                b"NaN",
                b"Infinity",
                b"tru",
            )
        )
    )


def mutated(body: bytes, source: Random) -> bytes:
    """Another body, made from one."""
    try:
        value = msgspec.json.decode(body)
        if not isinstance(value, dict):
            return body
        if source.random() < 0.3:
            fields = (*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)
            value[source.choice((*fields, *REFUSED))] = source.choice(
                source.choice((values.ATOMS, values.ATOMS, HUGE))
            )
            return encode(value)
        return encode(values.mutated(value, source, raw))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body
