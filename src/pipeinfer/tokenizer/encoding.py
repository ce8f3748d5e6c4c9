"""What a tokenizer has accepted and not encoded yet: long prompts, which are under way elsewhere.

Knows no driver. Bounded by the gateways' limit on waiting requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.messages import Submit


@dataclass(frozen=True, slots=True)
class Pending:
    """One request. `alone`: as for ledger.Entry; said when the request came, since it may be an
    older one that the gateways told of."""

    submit: Submit
    alone: bool


class Encoding:
    """By request, in the order in which they came."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, pending: Pending) -> None:
        """A new attempt takes the place of an older one."""
        self._pending[pending.submit.request_id] = pending

    def get(self, request_id: str, attempt: int) -> Pending | None:
        """If this attempt of the request is under way."""
        pending = self._pending.get(request_id)
        return pending if pending is not None and pending.submit.attempt == attempt else None

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is under way."""
        pending = self._pending.get(request_id)
        return pending is not None and pending.submit.attempt >= attempt

    def forget(self, request_id: str) -> None:
        """It is encoded, or nobody wants it; unknown ones are fine."""
        self._pending.pop(request_id, None)

    def forget_gateway(self, gateway: int) -> None:
        """What that gateway sent."""
        kept = {n: p for n, p in self._pending.items() if p.submit.gateway != gateway}
        self._pending = kept

    def clear(self) -> None:
        """Another process goes on."""
        self._pending.clear()
