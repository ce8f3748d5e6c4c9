"""A program on a pseudo-terminal: what it shows, and keys for it."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """Runs `command` as the foreground job of its own terminal; use it as a context manager.
    `kind`: by terminfo; for a "dumb" one a line editor writes no controls of its own."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], kind: str = "vt100"
    ) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": kind},
            start_new_session=True,
            # The controlling terminal is what turns a typed Ctrl-C into a signal.
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        os.close(slave)
        self.shown = ""
        self._read_to = 0

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What was shown up to and including `text`, from where the last wait ended."""
        deadline = time.monotonic() + seconds
        while (at := self.shown.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.shown += self._read()
        begin, self._read_to = self._read_to, at + len(text)
        return self.shown[begin : self._read_to].replace("\r\n", "\n")

    def wait_for_more(self, seconds: float = 120) -> None:
        """Until something is shown past where the last wait ended."""
        deadline = time.monotonic() + seconds
        while len(self.shown) <= self._read_to:
            assert time.monotonic() < deadline, f"nothing more after {self.shown!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.shown += self._read()

    def rest(self) -> str:
        """All that was shown, once the program has closed the terminal."""
        with contextlib.suppress(AssertionError):
            while True:
                self.shown += self._read()
        return self.shown

    def press(self, key: bytes, until: str) -> None:
        """Presses a key until `until` is shown: as a person does, for Python's line editor hears
        of a signal that came just before it began to wait only with the next one."""
        for _ in range(30):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.wait_for(until, 2)
                return
        raise AssertionError(f"no {until!r} in {self.shown!r}")

    def type(self, keys: str | bytes) -> None:
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def modes(self) -> list[object]:
        """How the terminal treats what is typed: with echo, line by line ..."""
        return termios.tcgetattr(self._master)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode(errors="replace")
        except OSError as error:  # the other side is closed
            raise AssertionError(f"ended after {self.shown!r}") from error
