"""`python -m pipeinfer.tokenizer.worker_main`: encodes long prompts for a tokenizer stage.

A process of its own, because templates and the tokenizers library hold the interpreter for seconds.
Its frames are MessagePack. Ends with its stage, also in the middle of a text.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pipeinfer import pipes
from pipeinfer.messages import Submit
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.core import Encoded
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected, load_encoder


class EncoderSetup(msgspec.Struct, array_like=True):
    """The first frame: what to load the encoder from."""

    folder: str
    settings: Settings


def encode_submit(encoder: PromptEncoder, submit: Submit) -> Encoded:
    """The event for the core of the stage."""
    name, attempt = submit.request_id, submit.attempt
    try:
        prompt = encoder.prompt(submit)
        ids, state, thoughts = prompt.ids.tobytes(), prompt.thought_state, prompt.thoughts
        return Encoded(name, attempt, ids, thought_state=state, thoughts=thoughts)
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
    frames, answers = pipes.served()
    with contextlib.suppress(OSError):  # what runs out of memory here need not end the stage
        Path("/proc/self/oom_score_adj").write_text("1000")
    setup = msgspec.msgpack.decode(frames.get(), type=EncoderSetup)
    encoder = load_encoder(Path(setup.folder), setup.settings, multithreaded=True).encoder
    decoder = msgspec.msgpack.Decoder(Submit)
    while True:
        answer = encode_submit(encoder, decoder.decode(frames.get()))
        pipes.write(answers, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
