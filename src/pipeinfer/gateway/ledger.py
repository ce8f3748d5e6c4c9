"""The root ledger's entries: live requests with what was delivered of them, and ended ones.

Knows no client and no socket; it decides what of a row is new, and which ends a tokenizer that was
started again may have missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from pipeinfer.choices import choice_id
from pipeinfer.gateway.token_scores import without_first
from pipeinfer.messages import Abort, Done, LogprobTexts, Submit, TextRow
from pipeinfer.recent import Recent

MOST_ENDED = 10_000  # ended requests, at most
ENDED_LIFETIME = 60.0  # seconds for which an end is repeated to a tokenizer that was started again


class Hole(ValueError):
    """A row does not continue what was delivered; the text says which offsets do not meet."""


class Diverged(ValueError):
    """A row that repeats ids has other ids than those that were delivered."""


class Record:
    """One live request: a choice of what `submit` asks for.

    `submit` is kept to the end, for a tokenizer that was started again. `early` holds rows that
    overtook Accepted: they come from another stage, on another socket. `ids` (int32 bytes) are the
    output ids that were delivered, `tokens` how many these are, `bytes` (UTF-8) how much text was,
    `scored` the prompt tokens whose log-probs were. `size`: prompt tokens that it counts for while
    it waits.
    """

    __slots__ = (
        "bytes",
        "choice",
        "deadline",
        "early",
        "group",
        "ids",
        "prompt_tokens",
        "scored",
        "size",
        "started",
        "submit",
        "tokenizer",
        "tokens",
    )

    def __init__(
        self, submit: Submit, tokenizer: str, now: float, size: int, choice: int = 0
    ) -> None:
        self.submit = submit
        self.choice = choice
        self.size = size
        self.tokenizer = tokenizer
        self.deadline = now + submit.timeout if submit.timeout > 0 else float("inf")
        self.group = -1  # until the first Accepted
        self.prompt_tokens = -1  # unknown before the first Accepted
        self.early: list[TextRow] = []
        self.started = False  # a row was delivered
        self.bytes = 0
        self.ids = bytearray()
        self.tokens = 0
        self.scored = 0

    @property
    def request_id(self) -> str:
        return choice_id(self.submit.request_id, self.choice)

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    def hears(self, attempt: int) -> bool:
        """Whether what is said of this attempt counts. Later ones than were known do: another group
        goes on with the request after what was delivered, and what came of earlier ones is void."""
        if attempt > self.submit.attempt:
            self.submit = replace(self.submit, attempt=attempt)
            self.early.clear()
        return attempt == self.submit.attempt

    @property
    def timeout(self) -> float:
        """Seconds; 0: never."""
        return self.submit.timeout

    def once(self, tokens: int) -> int:
        """`tokens` of the prompt, to be counted: choices have one prompt, and the first counts."""
        return 0 if self.choice else tokens

    def advance(self, row: TextRow) -> tuple[str, bytes]:
        """(text, ids) of `row` that were not delivered yet; counts them as delivered.

        Raises Hole or Diverged, and then delivers nothing of the row.
        """
        text, ids = row.text, row.ids
        seen, known = self.bytes - row.byte_offset, self.tokens - row.token_offset
        if seen or known:  # never on the undisturbed path
            ids = self._new_ids(row, known)
            text = self._new_text(row, seen)
        self.bytes += len(text) if text.isascii() else len(text.encode())
        self.tokens += len(ids) // 4
        self.ids += ids
        return text, ids

    def logprobs(self, row: TextRow, ids: bytes) -> LogprobTexts | None:
        """Those of `ids`, the new ones of `row`."""
        if row.logprobs is None or not ids:
            return None
        known = (len(row.ids) - len(ids)) // 4
        return without_first(row.logprobs, known) if known else row.logprobs

    def prompt(self, row: TextRow) -> LogprobTexts | None:
        """Log-probs of prompt tokens in `row` that were not delivered yet; counts them as
        delivered. Raises Hole."""
        if row.prompt is None:
            return None
        known, many = self.scored - row.prompt_offset, len(row.prompt.ids) // 4
        if known < 0:
            raise Hole(
                f"log-probs continue at prompt token {row.prompt_offset}, but {self.scored} were "
                "delivered"
            )
        self.scored = max(self.scored, row.prompt_offset + many)
        return without_first(row.prompt, known) if known < many else None

    def _new_text(self, row: TextRow, seen: int) -> str:
        if seen < 0:
            raise Hole(f"text continues at byte {row.byte_offset}, but {self.bytes} were delivered")
        try:
            return row.text.encode()[seen:].decode()
        except UnicodeDecodeError:
            raise Hole(
                f"byte {self.bytes}, to which text was delivered, lies inside a character of the "
                f"text that was sent again from byte {row.byte_offset}"
            ) from None

    def _new_ids(self, row: TextRow, known: int) -> bytes:
        if known < 0:
            raise Hole(f"tokens continue at {row.token_offset}, but {self.tokens} were delivered")
        begin = 4 * row.token_offset
        many = min(len(row.ids), 4 * known)
        if not self.ids.startswith(row.ids[:many], begin):
            raise Diverged
        return row.ids[known * 4 :]


def offsets(row: TextRow, ids: bytes) -> bytes:
    """Those of `ids`, the new ones of `row`; none unless they were asked for."""
    return row.offsets[len(row.ids) - len(ids) :]


class EndedRequest(NamedTuple):
    """How a request ended. `tokenizer`: "" if it was another gateway's. `reason`: of the Abort that
    was sent, "" if Done was. `at`: seconds, when the pipeline was told last."""

    tokenizer: str
    attempt: int
    reason: str
    at: float


class EndedRequests:
    """The requests that ended in the last minute. untold: those that end with Done, of which their
    tokenizers have not heard; by tokenizer."""

    def __init__(self) -> None:
        self._ends = Recent[EndedRequest](ENDED_LIFETIME, MOST_ENDED)
        self.unreported: dict[str, list[str]] = {}

    def take_unreported(self) -> list[tuple[str, Done]]:
        """What to tell which tokenizer of those that were untold."""
        told = [(tokenizer, Done(tuple(ids))) for tokenizer, ids in self.unreported.items()]
        self.unreported.clear()
        return told

    def add(self, request_id: str, end: EndedRequest) -> None:
        """Records an end, or that the pipeline was told again."""
        if not end.reason:
            self.unreported.setdefault(end.tokenizer, []).append(request_id)
        self._ends.put(request_id, end, end.at)

    def get(self, request_id: str) -> EndedRequest | None:
        """How the request ended; None if it never did, as far as is remembered."""
        return self._ends.get(request_id)

    def recent(self, tokenizer: str, now: float) -> Iterator[Abort | Done]:
        """What `tokenizer` was told in the last minute; it may have died before it read it."""
        mine = [
            (name, end)
            for name, end in self._ends.items()
            if end.tokenizer in (tokenizer, "") and now - end.at < ENDED_LIFETIME
        ]
        done = tuple(name for name, end in mine if not end.reason)
        if done:
            yield Done(done)
        for name, end in mine:
            if end.reason:
                yield Abort(name, end.attempt, end.reason)
