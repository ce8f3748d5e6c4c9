"""The two ways in which memory decisions can go wrong, both fatal to the epoch, not the process.

Knows no plan and no page.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """The plan asks for what cannot be: a used slot admitted again, an empty one released."""


class IntegrityError(Exception):
    """An invariant of the memory does not hold; the message has the numbers."""
