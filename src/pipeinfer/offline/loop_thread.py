"""An event loop on a thread of its own, for callers that block.

Knows coroutines; no model.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import TypeVar

import uvloop

T = TypeVar("T")

WAKE = 0.1  # seconds that a wait takes at most, and between two calls of `meanwhile`
CANCELLING = 1.0  # seconds that a cancelled coroutine is waited for


class LoopThread:
    """Runs coroutines for other threads, among them the main one, which Ctrl-C interrupts."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        # A daemon: a caller who never closes it must still be able to exit.
        self._thread = threading.Thread(target=self._work, name="pipeinfer", daemon=True)
        self._thread.start()

    def run(
        self, coroutine: Coroutine[object, None, T], meanwhile: Callable[[], None] | None = None
    ) -> T:
        """The coroutine's result. If the wait is interrupted, the coroutine is cancelled first."""
        over = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_telling(coroutine, over), self._loop)
        try:
            # In slices: a signal that comes just before a wait would not end it.
            while not wait([future], WAKE).done:
                if meanwhile is not None:
                    meanwhile()
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(CANCELLING)
            raise

    def submit(self, coroutine: Coroutine[object, None, T]) -> Future[T]:
        """Begins the coroutine for a caller that waits otherwise, as on a loop of its own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, coroutine: Coroutine[object, None, object]) -> None:
        """Begins the coroutine and does not wait for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the thread; not from itself."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _telling(coroutine: Coroutine[object, None, T], over: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        over.set()
