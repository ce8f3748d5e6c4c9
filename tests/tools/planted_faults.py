"""Faults that tools/fuzz must find: each is plausible, and is not hit by the first input.

A fuzzer that finds nothing proves little unless it is known to find something. A fault is put into
a process at run time, into others by a sitecustomize.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zstandard


def _unknown_tag() -> None:
    """frames: an unknown tag on `result` looks its name up in a table that lacks it."""
    from pipeinfer.bus import frames

    decoder = frames._decoders["result"]
    names = {"Hello": 1, "Ready": 2, "Admitted": 3, "Result": 4, "Digests": 5, "Fault": 6}

    class Decoder:
        def decode(self, body: bytes) -> Any:
            value = msgspec.msgpack.decode(body)
            if isinstance(value, list) and value and isinstance(value[0], str):
                _ = names[value[0]]
            return decoder.decode(body)

    frames._decoders["result"] = Decoder()  # type: ignore[assignment]


def _deep_frame() -> None:
    """frames: what is nested too deeply raises RecursionError, and the reader stops."""
    from pipeinfer.bus import frames

    really = frames.decode

    def decode(parts: list[bytes]) -> Any:
        try:
            return really(parts)
        except frames.BadFrame as error:
            if "recursion" in str(error):
                raise RecursionError(str(error)) from None
            raise

    frames.decode = decode


def _any_blocks() -> None:
    """checkpoint: the sides of blocks with one scale are believed."""
    from pipeinfer.checkpoint import quantization

    def block(fields: Any, name: str, value: Any) -> tuple[int, int]:
        return tuple(value)

    quantization._block = block


def _trusted_length() -> None:
    """traces: the size that a block says of itself is believed."""
    from pipeinfer.trace import format as form

    def decompressed(payload: bytes, *_: Any) -> bytes:
        return zstandard.ZstdDecompressor().decompress(payload)

    form._decompressed = decompressed


def _unhashable() -> None:
    """traces: the errors that a snapshot may cause are listed, and one is missing."""
    from pipeinfer.trace import snapshot

    really = snapshot.restore

    def restored(core: object, state: bytes) -> None:
        try:
            really(core, state)
        except snapshot.RestoreError as error:
            if "TypeError" in str(error):
                raise TypeError(str(error)) from None
            raise

    snapshot.restore = restored


def _bound_left_out() -> None:
    """http: `priority` may be any integer, and some do not fit on the bus."""
    from pipeinfer.gateway import serving

    really, loose = serving.decode, {}

    def decode(body: bytes, kind: Any, strange: Any) -> Any:
        if kind not in loose:
            field = [("priority", int | None, None)]
            loose[kind] = msgspec.defstruct(
                kind.__name__, field, bases=(kind,), frozen=True, kw_only=True
            )
        return really(body, loose[kind], strange)

    serving.decode = decode


def _error_by_hand() -> None:
    """http: the error for an unknown model is put together as text, without escaping."""
    from pipeinfer.gateway.errors import ApiError

    really = ApiError.body

    def body(self: ApiError) -> bytes:
        if self.code != "model_not_found":
            return really(self)
        text = f'{{"error":{{"message":"{self.message}","type":"not_found_error",'
        return (text + '"param":"model","code":"model_not_found"}}').encode()

    ApiError.body = body


def _split_forgets_locks() -> None:
    """radix: a node that is split where several paths go on from it hands on one lock, not all."""
    from pipeinfer.memory.prefix_cache import RadixCache

    really = RadixCache._split

    def split(self: Any, node: Any, pages: int) -> Any:
        forks = len(node.children) > 1
        head = really(self, node, pages)
        if forks:
            head.locks = min(head.locks, 1)
        return head

    RadixCache._split = split


def _one_too_many() -> None:
    """radix: what a request leaves to others includes its last token, which was never computed."""
    from pipeinfer.memory.manager import MemoryManager

    release, share = MemoryManager._release, MemoryManager._cache_full_pages
    leaving: list[np.ndarray] = []

    def releasing(self: Any, message: Any, clock: int) -> None:
        outputs = np.frombuffer(message.output_ids, "<i4")
        leaving.append(np.concatenate((self.slots.known_tokens(message.slot), outputs)))
        try:
            release(self, message, clock)
        finally:
            leaving.pop()

    def sharing(self: Any, slot: int, tokens: np.ndarray, clock: int) -> None:
        if leaving and len(tokens) % self.page_size:  # that token has a place already
            tokens = leaving[-1][: len(tokens) + 1]
        share(self, slot, tokens, clock)

    MemoryManager._release, MemoryManager._cache_full_pages = releasing, sharing


def _credits_go_back() -> None:
    """cores: pages are as many as was said last, whichever plan it was said of."""
    from pipeinfer.scheduler.engine_state import PageCredits

    really = PageCredits.on_page_counts

    def report(self: Any, number: int, free: int, evictable: int) -> bool:
        self._number = -1
        return really(self, number, free, evictable)

    PageCredits.on_page_counts = report


def _lost_page() -> None:
    """cores: the rest of a page that a prompt has begun is counted as if it were taken."""
    from pipeinfer.scheduler.engine_state import PageAllowance

    def room(self: PageAllowance, start: int) -> int:
        return max(self.left, 0) * self.page_size - start % self.page_size

    PageAllowance.tokens_that_fit = room


def _ragged_result() -> None:
    """cores: rows of a result are taken for those of its plan."""
    from pipeinfer.bus import frames
    from pipeinfer.scheduler import engine_state
    from pipeinfer.wire import unpack

    def checked(_flight: Any, result: Any) -> list[int]:
        return (unpack(result.starts) + unpack(result.counts)).tolist()

    frames._checks.clear()
    engine_state._checked = checked


@dataclass(frozen=True)
class Plant:
    """`found`: what stands in the signature of the finding that it is found by."""

    target: str
    put: Callable[[], None]
    found: str


PLANTS: dict[str, Plant] = {
    "unknown-tag": Plant("frames", _unknown_tag, "KeyError at tools/planted_faults.py"),
    "deep-frame": Plant("frames", _deep_frame, "RecursionError"),
    "trusted-length": Plant("traces", _trusted_length, "MiB"),
    "unhashable": Plant("traces", _unhashable, "TypeError at tools/planted_faults.py"),
    "any-blocks": Plant("checkpoint", _any_blocks, "Error at"),
    "bound-left-out": Plant("http", _bound_left_out, "bus/frames.py"),
    "error-by-hand": Plant("http", _error_by_hand, "JSONDecodeError"),
    "split-forgets-locks": Plant("radix", _split_forgets_locks, "memory/prefix_cache.py"),
    "one-too-many": Plant("radix", _one_too_many, "memory/test_memory_machine.py"),
    "credits-go-back": Plant("cores", _credits_go_back, "a row was deferred"),
    "lost-page": Plant("cores", _lost_page, "to nobody"),
    "ragged-result": Plant("cores", _ragged_result, "ValueError at"),
}


def plant(name: str) -> None:
    """Puts the fault into this process."""
    PLANTS[name].put()
