"""`python -m pipeinfer.tokenizer.trying`: tries grammars for a tokenizer stage.

Reads the checkpoint itself, so that the stage need not: a large vocabulary takes seconds, in which
the interpreter is held.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeinfer.grammars.trial import Setup, serve
from pipeinfer.text.ends import grammar_setup


class Checkpoint(msgspec.Struct, array_like=True):
    """The first frame."""

    folder: str


def _setup(frame: bytes) -> Setup:
    return grammar_setup(Path(msgspec.msgpack.decode(frame, type=Checkpoint).folder))


if __name__ == "__main__":
    serve(_setup)
