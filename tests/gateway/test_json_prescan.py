"""The survey of a JSON text against what is found when everything is built."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeinfer.gateway.schema import (
    SLICE_BYTES,
    JsonLimitExceeded,
    JsonLimits,
    JsonPrescan,
    prescan,
)

WIDE = JsonLimits(depth=10**9, values=10**9, containers=10**9, members=10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=30,
)
# Texts that are mostly what the survey must tell apart.
BROKEN = st.lists(st.sampled_from(list(b'[]{},:"\\a1 \xff')), max_size=60).map(bytes)


def depth(value: Any) -> int:
    """Levels of lists and objects."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


def containers(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(containers, inner))


def commas(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(len(value) - 1, 0) + sum(map(commas, inner))


def members(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    own, inner = (len(value), value.values()) if isinstance(value, dict) else (0, value)
    return own + sum(map(members, inner))


def in_pieces(body: bytes, cuts: list[int]) -> JsonPrescan:
    seen = JsonPrescan(WIDE)
    ends = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(ends):
        seen.feed(body[start:end])
    return seen


def byte_by_byte(body: bytes) -> tuple[int, int, int, int]:
    """(depth, values, containers, members) by looking at one byte after the other."""
    level = deepest = opened = separators = colons = at = 0
    inside = False
    while at < len(body):
        byte = body[at : at + 1]
        if byte == b"\\" and body[at + 1 : at + 2] in (b"\\", b'"'):
            at += 2
            continue
        if byte == b'"':
            inside = not inside
        elif not inside:
            level += (byte in b"[{") - (byte in b"]}")
            opened += byte in b"[{"
            separators += byte == b","
            colons += byte == b":"
            deepest = max(deepest, level)
        at += 1
    return deepest, 1 + separators + opened, opened, colons


@given(JSON, st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_a_survey_finds_what_the_built_value_has_wherever_it_is_cut(
    value: Any, plain: bool, cuts: list[int]
) -> None:
    body = json.dumps(value, ensure_ascii=plain).encode()
    seen = in_pieces(body, cuts)
    assert (seen.depth, seen.containers) == (depth(value), containers(value))
    assert seen.values == 1 + commas(value) + containers(value)
    assert seen.members == members(value)


@given(BROKEN, st.lists(st.integers(0, 10**6), max_size=12))
@example(b'["\\\\\\"]"', [3, 4, 5])
@example(b'"\\\\"[', [2])
def test_broken_text_is_surveyed_as_one_would_read_it(body: bytes, cuts: list[int]) -> None:
    seen = in_pieces(body, cuts)
    assert (seen.depth, seen.values, seen.containers, seen.members) == byte_by_byte(body)


SMALL = st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 5), st.integers(0, 6))


@given(BROKEN, SMALL, st.integers(1, 7))
def test_a_bound_holds_exactly_and_wherever_the_text_is_cut(
    body: bytes, bounds: tuple[int, int, int, int], size: int
) -> None:
    found = byte_by_byte(body)
    allowed = all(have <= most for have, most in zip(found, bounds, strict=True))
    seen = JsonPrescan(JsonLimits(*bounds))
    try:
        for start in range(0, len(body), size):
            seen.feed(body[start : start + size])
    except JsonLimitExceeded:
        assert not allowed
    else:
        assert allowed


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" * 100, "64 levels"),
        (b"[]," * 100_001, "100000 lists"),
        (b"1," * 10**6, "1000000 val"),
        (b'"a":1,' * 100_001, "100000 members"),
    ],
)
def test_what_was_exceeded_is_named(body: bytes, what: str) -> None:
    with pytest.raises(JsonLimitExceeded, match=what):
        list(prescan(body, JsonLimits()))


@pytest.mark.parametrize("unit", [b"a", b'"', b'"a",', b"[", b",", b":", b'\\"', b'{"a":"\\\\"},'])
def test_no_slice_holds_a_loop_for_long(unit: bytes) -> None:
    """Whatever the body is made of; 3 ms at most were measured."""
    body = unit * (2**22 // len(unit))
    iterations, longest, before = 0, 0.0, time.thread_time()
    for _ in prescan(body, WIDE):
        now = time.thread_time()
        iterations, longest, before = iterations + 1, max(longest, now - before), now
    assert iterations == len(body) // SLICE_BYTES - (len(body) % SLICE_BYTES == 0)
    assert longest < 0.02
