"""An answer as a row of blocks, as dialects show it: a text, thoughts, or one call of a tool each.

A block is open while pieces of its kind come, and only one is. Knows pieces, and no dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeinfer.gateway.pieces import MESSAGE_BREAK, DeltaKind, ParsedDelta
from pipeinfer.json_values import JsonValue

BlockKind = Literal["content", "reasoning", "call", "custom"]
CALL_BLOCKS = ("call", "custom")


@dataclass
class OutputBlock:
    """`number`: its place in the answer. `call`: the number of the call, and `name` its tool's.
    `texts`: of it so far, arguments of a call, the input of a custom one. `logprobs`: of its
    tokens, if asked for. `complete`: closed, and not because the answer was cut within it."""

    kind: BlockKind
    index: int
    call_index: int = -1
    name: str = ""
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[JsonValue] = field(default_factory=list[JsonValue])
    complete: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)


class BlockEvent(NamedTuple):
    """What happens to a block: `text` is what "more" adds."""

    action: Literal["open", "more", "close"]
    block: OutputBlock
    text: str = ""


class OutputBlocks:
    """The blocks of one choice; `all` of them in order."""

    def __init__(self) -> None:
        self.all: list[OutputBlock] = []
        self._open: OutputBlock | None = None

    @property
    def has_calls(self) -> bool:
        """Whether any of them is a call."""
        return any(block.kind in CALL_BLOCKS for block in self.all)

    def add(self, pieces: Iterable[ParsedDelta]) -> Iterator[BlockEvent]:
        """What further pieces do, in order."""
        for piece in pieces:
            if piece.call_index == MESSAGE_BREAK:
                yield from self.close()
                continue
            if not self._goes_on(piece):
                yield from self.close()
                yield BlockEvent("open", self._new(piece))
            block = self._open
            if piece.kind not in CALL_BLOCKS and piece.text and block is not None:
                block.texts.append(piece.text)
                yield BlockEvent("more", block, piece.text)

    def close(self, *, cut: bool = False) -> Iterator[BlockEvent]:
        """Ends the block that is open, if one is. `cut`: there might have been more of it."""
        block, self._open = self._open, None
        if block is not None:
            block.complete = not cut
            yield BlockEvent("close", block)

    def add_empty(self) -> Iterator[BlockEvent]:
        """An answer of one text without a letter."""
        yield from self.add([ParsedDelta("content", "")])

    def _goes_on(self, piece: ParsedDelta) -> bool:
        block = self._open
        if block is None or piece.kind in CALL_BLOCKS:
            return False
        return block.kind == BLOCK_KINDS[piece.kind] and block.call_index == piece.call_index

    def _new(self, piece: ParsedDelta) -> OutputBlock:
        name = piece.text if piece.kind in CALL_BLOCKS else ""
        block = OutputBlock(BLOCK_KINDS[piece.kind], len(self.all), piece.call_index, name)
        self.all.append(block)
        self._open = block
        return block


BLOCK_KINDS: dict[DeltaKind, BlockKind] = {
    "content": "content",
    "reasoning": "reasoning",
    "call": "call",
    "arguments": "call",
    "custom": "custom",
    "input": "custom",
}
