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

    def add(self, deltas: Iterable[ParsedDelta]) -> Iterator[BlockEvent]:
        """What further pieces do, in order."""
        for delta in deltas:
            if delta.call_index == MESSAGE_BREAK:
                yield from self.close()
                continue
            if not self._continues_block(delta):
                yield from self.close()
                yield BlockEvent("open", self._open_block(delta))
            block = self._open
            if delta.kind not in CALL_BLOCKS and delta.text and block is not None:
                block.texts.append(delta.text)
                yield BlockEvent("more", block, delta.text)

    def close(self, *, cut: bool = False) -> Iterator[BlockEvent]:
        """Ends the block that is open, if one is. `cut`: there might have been more of it."""
        block, self._open = self._open, None
        if block is not None:
            block.complete = not cut
            yield BlockEvent("close", block)

    def add_empty(self) -> Iterator[BlockEvent]:
        """An answer of one text without a letter."""
        yield from self.add([ParsedDelta("content", "")])

    def _continues_block(self, delta: ParsedDelta) -> bool:
        block = self._open
        if block is None or delta.kind in CALL_BLOCKS:
            return False
        return block.kind == BLOCK_KINDS[delta.kind] and block.call_index == delta.call_index

    def _open_block(self, delta: ParsedDelta) -> OutputBlock:
        name = delta.text if delta.kind in CALL_BLOCKS else ""
        block = OutputBlock(BLOCK_KINDS[delta.kind], len(self.all), delta.call_index, name)
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
