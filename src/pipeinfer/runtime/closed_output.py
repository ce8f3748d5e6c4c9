"""Standard output and error whose reader has gone, as behind `| head`.

Knows no command and no stage.
"""

from __future__ import annotations

import os
import select


def discard_unread() -> bool:
    """Sends what is printed from now on, and what still lies in buffers, nowhere, where nobody
    reads it any more; whether there was such an output."""
    closed = [number for number in (1, 2) if _has_no_reader(number)]
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:
            os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
