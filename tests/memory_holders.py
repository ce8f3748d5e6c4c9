"""A memory holder on a thread, for tests of what an engine leaves."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeinfer.runtime.memory_holder import MemoryHolder, listen


@contextmanager
def running_holder(clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Its address."""
    address = f"@pipeinfer-test-{secrets.token_hex(8)}"
    made = MemoryHolder(listen(address), clock)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield address
    finally:
        made.stop()
        thread.join()
