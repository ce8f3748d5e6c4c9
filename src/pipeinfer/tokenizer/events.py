"""Local events of the tokenizer: a long prompt leaves for the lanes, and its ids come back; a
grammar is tried, and the verdict comes back.

They never travel on the bus. Knows neither how prompts are encoded nor where.
"""

from __future__ import annotations

from pipeinfer.messages import Message
from pipeinfer.params import Thoughts, ThoughtState


class Encode(Message, frozen=True):
    """core -> driver: encode the prompt of this request, which the core still has.

    `weight`: about how many bytes there are to render and to encode. `client`: as in Submit.
    """

    request_id: str
    attempt: int
    weight: int
    client: str = ""


class Encoded(Message, frozen=True):
    """driver -> core: its ids (int32 bytes), or if `status` is not 0 why it is refused. `left`,
    `thoughts`: as for Prompt."""

    request_id: str
    attempt: int
    prompt_ids: bytes = b""
    status: int = 0
    message: str = ""
    param: str | None = None
    code: str | None = None
    left: ThoughtState = "before"
    thoughts: Thoughts | None = None


class EncodeNext(Message, frozen=True):
    """core -> driver, and back: encode one of the short prompts that wait in the core. The driver
    gives these back one in each turn of its loop, so that other messages come between them."""


class Try(Message, frozen=True):
    """core -> driver: try the grammar of this request, which the core still has. `client`: as in
    Submit."""

    request_id: str
    attempt: int
    client: str = ""


class Tried(Message, frozen=True):
    """driver -> core: the grammar is served, or if `status` is not 0 why it is not. `grammar`: its
    digest, of which that holds; empty if only this request is meant. `slow`: it took so long to
    compile that others must not wait for it."""

    request_id: str
    attempt: int
    status: int = 0
    message: str = ""
    grammar: bytes = b""
    slow: bool = False
