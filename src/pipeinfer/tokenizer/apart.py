"""`python -m pipeinfer.tokenizer.apart`: encodes long prompts for a tokenizer stage, one at a time.

A process of its own, because templates and the tokenizers library hold the interpreter for seconds.
Speaks frames on stdin and stdout: 4 bytes of length, little endian, then MessagePack. Ends with
its stage.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from pipeinfer.messages import Submit
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.building import make_encoder
from pipeinfer.tokenizer.events import Encoded
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected


class Setup(msgspec.Struct, array_like=True):
    """The first frame: what the stage's own encoder was made of."""

    folder: str
    settings: Settings


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """BrokenPipeError if nobody reads."""
    stream.write(len(body).to_bytes(4, "little"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream, which may come at any place."""
    head = stream.read(4)
    body = stream.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    return body if len(head) == 4 and len(body) == int.from_bytes(head, "little") else None


def encoded(encoder: PromptEncoder, submit: Submit) -> Encoded:
    """What the stage is told of a request."""
    name, attempt = submit.request_id, submit.attempt
    try:
        return Encoded(name, attempt, encoder.encode(submit).tobytes())
    except Rejected as error:
        return Encoded(
            request_id=name,
            attempt=attempt,
            status=error.status,
            message=str(error),
            param=error.param,
            code=error.code,
        )


def main() -> None:
    """Serves until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not break a frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, whose end ends this
    with contextlib.suppress(OSError):  # what runs out of memory here need not end the stage
        Path("/proc/self/oom_score_adj").write_text("1000")
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(frames,), daemon=True).start()
    setup = msgspec.msgpack.decode(frames.get(), type=Setup)
    encoder = make_encoder(Path(setup.folder), setup.settings, alone=True).encoder
    decoder = msgspec.msgpack.Decoder(Submit)
    while True:
        answer = encoded(encoder, decoder.decode(frames.get()))
        write_frame(answers, msgspec.msgpack.encode(answer))


def _listen(frames: queue.SimpleQueue[bytes]) -> None:
    """Ends the process with its stage, also in the middle of a text."""
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        frames.put(frame)
    os._exit(0)


if __name__ == "__main__":
    main()
