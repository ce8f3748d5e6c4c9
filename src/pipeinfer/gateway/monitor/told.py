"""Answers of /monitor, by which they are made and described.

Knows nothing of where they come from.
"""

from __future__ import annotations

import msgspec


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened to a request. `at`: Unix seconds."""

    at: float
    name: str
    values: dict[str, float]


class StageSpan(msgspec.Struct, frozen=True):
    """A request's way through one stage; `ended`: null while it is there."""

    stage: str
    began: float
    ended: float | None
    outcome: str
    moments: list[SpanEvent]


class RequestSpans(msgspec.Struct, frozen=True):
    """A request's way through the stages, by when it came to each."""

    id: str
    passages: list[StageSpan]


class CachedPrefix(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cached prefix of so many `tokens`. `ends`: cached sequences that begin with it; `held`:
    requests that use it now. `ids` (the first) and their `text`: for an operator, if not salted."""

    tokens: int
    ends: int
    held: int
    ids: list[int] | None = None
    text: str | None = None


class GroupPrefixes(msgspec.Struct, frozen=True):
    """The largest prefixes of one group's cache."""

    group: int
    prefixes: list[CachedPrefix]


class CachedPrefixes(msgspec.Struct, frozen=True):
    """Those of all groups."""

    groups: list[GroupPrefixes]
