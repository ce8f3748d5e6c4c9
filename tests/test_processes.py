"""Frames on a pipe: whole or not at all, and never later than asked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from pipeinfer.processes import read_frame, write_frame

LARGE = bytes(range(256)) * 10_000  # a pipe holds a fortieth of it


@pytest.fixture
def pipe() -> Iterator[tuple[int, BinaryIO]]:
    """Where to read, and where to write without a buffer."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0) as stream:
        yield reading, stream  # type: ignore[misc]


def test_frames_of_any_length_come_whole_and_in_order(pipe: tuple[int, BinaryIO]) -> None:
    sent = [b"", b"a", LARGE, b"end"]
    thread = threading.Thread(target=lambda: [write_frame(pipe[1], body) for body in sent])
    thread.start()
    assert [read_frame(pipe[0], 30.0) for _ in sent] == sent
    thread.join()


@pytest.mark.parametrize("written", [b"", b"\x05\0", b"\x05\0\0\0", b"\x05\0\0\0four"])
def test_half_a_frame_is_none(pipe: tuple[int, BinaryIO], written: bytes) -> None:
    pipe[1].write(written)
    begun = time.monotonic()
    assert read_frame(pipe[0], 0.05) is None
    assert time.monotonic() - begun >= 0.05
    pipe[1].close()
    assert read_frame(pipe[0]) is None


def test_a_pipe_that_nobody_reads_is_an_error(pipe: tuple[int, BinaryIO]) -> None:
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        write_frame(pipe[1], b"a")
    os.dup2(pipe[1].fileno(), pipe[0])  # for the fixture, which closes both
