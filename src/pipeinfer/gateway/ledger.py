"""The root ledger's entry: one request, its latest attempt, and how much of it was delivered.

Knows no stage and no client; it decides what of a row is new.
"""

from __future__ import annotations

from pipeinfer.messages import Submit, TextRow


class Hole(ValueError):
    """A row does not continue what was delivered; the text says which offsets do not meet."""


class Record:
    """One live request.

    `submit` is kept until the first row, so that it can be sent again. `early` holds rows that
    overtook Accepted: they come from another stage, on another socket. `tokens` and `bytes` count
    what was delivered (output ids, UTF-8 bytes of text).
    """

    __slots__ = (
        "accepted",
        "attempt",
        "bytes",
        "deadline",
        "early",
        "group",
        "prompt_tokens",
        "request_id",
        "started",
        "submit",
        "timeout",
        "tokenizer",
        "tokens",
    )

    def __init__(self, submit: Submit, tokenizer: str, now: float) -> None:
        self.request_id = submit.request_id
        self.submit: Submit | None = submit
        self.attempt = submit.attempt
        self.tokenizer = tokenizer
        self.timeout = submit.timeout
        self.deadline = now + submit.timeout if submit.timeout > 0 else float("inf")
        self.accepted = False  # this attempt has a group
        self.group = -1
        self.prompt_tokens = -1  # unknown before the first Accepted
        self.early: list[TextRow] = []
        self.started = False  # a row of some attempt was delivered
        self.bytes = 0
        self.tokens = 0

    def advance(self, row: TextRow) -> tuple[str, bytes]:
        """(text, ids) of `row` that were not delivered yet; counts them as delivered.

        Raises Hole, and then delivers nothing of the row.
        """
        text, ids = row.text, row.ids
        seen, known = self.bytes - row.byte_offset, self.tokens - row.token_offset
        if seen or known:  # never on the undisturbed path
            text, ids = self._rest_of_text(row, seen), self._rest_of_ids(row, known)
        self.bytes += len(text) if text.isascii() else len(text.encode())
        self.tokens += len(ids) // 4
        return text, ids

    def _rest_of_text(self, row: TextRow, seen: int) -> str:
        if seen < 0:
            raise Hole(f"text continues at byte {row.byte_offset}, but {self.bytes} were delivered")
        try:
            return row.text.encode()[seen:].decode()
        except UnicodeDecodeError:
            raise Hole(
                f"byte {self.bytes}, to which text was delivered, lies inside a character of the "
                f"text that was sent again from byte {row.byte_offset}"
            ) from None

    def _rest_of_ids(self, row: TextRow, known: int) -> bytes:
        if known < 0:
            raise Hole(f"tokens continue at {row.token_offset}, but {self.tokens} were delivered")
        return row.ids[known * 4 :]
