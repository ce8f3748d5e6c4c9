"""An answer as a row of blocks, as dialects show it: a text, thoughts, or one call of a tool each.

A block is open while pieces of its kind come, and only one is. Knows pieces, and no dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeinfer.gateway.pieces import NEXT, Kind, Piece
from pipeinfer.json_values import JsonValue

BlockKind = Literal["content", "reasoning", "call", "custom"]
CALLS = ("call", "custom")


@dataclass
class Block:
    """`number`: its place in the answer. `call`: the number of the call, and `name` its tool's.
    `texts`: of it so far, arguments of a call, the input of a custom one. `logprobs`: of its
    tokens, if asked for. `complete`: closed, and not because the answer was cut within it."""

    kind: BlockKind
    number: int
    call: int = -1
    name: str = ""
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[JsonValue] = field(default_factory=list[JsonValue])
    complete: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)


class Step(NamedTuple):
    """What happens to a block: `text` is what "more" adds."""

    what: Literal["open", "more", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one choice; `all` of them in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def called(self) -> bool:
        """Whether any of them is a call."""
        return any(block.kind in CALLS for block in self.all)

    def take(self, pieces: Iterable[Piece]) -> Iterator[Step]:
        """What further pieces do, in order."""
        for piece in pieces:
            if piece.call == NEXT:
                yield from self.close()
                continue
            if not self._goes_on(piece):
                yield from self.close()
                yield Step("open", self._new(piece))
            block = self._open
            if piece.kind not in CALLS and piece.text and block is not None:
                block.texts.append(piece.text)
                yield Step("more", block, piece.text)

    def close(self, *, cut: bool = False) -> Iterator[Step]:
        """Ends the block that is open, if one is. `cut`: there might have been more of it."""
        block, self._open = self._open, None
        if block is not None:
            block.complete = not cut
            yield Step("close", block)

    def empty(self) -> Iterator[Step]:
        """An answer of one text without a letter."""
        yield from self.take([Piece("content", "")])

    def _goes_on(self, piece: Piece) -> bool:
        block = self._open
        if block is None or piece.kind in CALLS:
            return False
        return block.kind == KINDS[piece.kind] and block.call == piece.call

    def _new(self, piece: Piece) -> Block:
        name = piece.text if piece.kind in CALLS else ""
        block = Block(KINDS[piece.kind], len(self.all), piece.call, name)
        self.all.append(block)
        self._open = block
        return block


KINDS: dict[Kind, BlockKind] = {
    "content": "content",
    "reasoning": "reasoning",
    "call": "call",
    "arguments": "call",
    "custom": "custom",
    "input": "custom",
}
