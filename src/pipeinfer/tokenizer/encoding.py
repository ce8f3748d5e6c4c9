"""What a tokenizer has accepted and not encoded yet: long prompts, which are under way elsewhere.

Knows no driver. Bounded by the gateways' limit on waiting requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.messages import Submit


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One request. `alone`: as for ledger.Entry; said when the request came, since it may be an
    older one that the gateways told of."""

    submit: Submit
    alone: bool


class Encoding:
    """By request, in the order in which they came. `abandoned`: how many ended before they were
    encoded, since nobody wanted them any more."""

    def __init__(self) -> None:
        self._prompts: dict[str, LongPrompt] = {}
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def put(self, prompt: LongPrompt) -> None:
        """A new attempt takes the place of an older one."""
        self.forget(prompt.submit.request_id)
        self._prompts[prompt.submit.request_id] = prompt

    def get(self, request_id: str, attempt: int) -> LongPrompt | None:
        """If this attempt of the request is under way."""
        prompt = self._prompts.get(request_id)
        return prompt if prompt is not None and prompt.submit.attempt == attempt else None

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is under way."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.submit.attempt >= attempt

    def encoded(self, request_id: str) -> None:
        """It is not under way any more."""
        del self._prompts[request_id]

    def forget(self, request_id: str) -> None:
        """Nobody wants it; unknown ones are fine."""
        self.abandoned += self._prompts.pop(request_id, None) is not None

    def forget_gateway(self, gateway: int) -> None:
        """What that gateway sent."""
        kept = {n: p for n, p in self._prompts.items() if p.submit.gateway != gateway}
        self.abandoned += len(self._prompts) - len(kept)
        self._prompts = kept

    def clear(self) -> None:
        """Another process goes on."""
        self._prompts.clear()
