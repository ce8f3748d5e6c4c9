"""The W3C header `traceparent`: which trace a request belongs to, and which span it comes from.

Knows no header's way and no span. https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class Traceparent(NamedTuple):
    """Both ids as hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def text(self) -> str:
        """As the header has it."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def read(text: str) -> Traceparent | None:
    """What the header says; None if it is none that may be gone on with."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags = found.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Traceparent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
