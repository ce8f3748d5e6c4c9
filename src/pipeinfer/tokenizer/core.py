"""The tokenizer stage without its I/O: requests in, tokenized work out to the chosen group.

Knows where requests went, so that an abort takes the same way. Knows no transport, no clock and
no model beyond its vocabulary and its length.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.core import Send
from pipeinfer.messages import Abort, Accepted, Drain, Message, Refused, State, Submit, Tick, Work
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected
from pipeinfer.tokenizer.routing import Router

DETOKENIZER = 0  # there is one so far; a request stays with the one that it was given


class TokenizerCore:
    """Encodes requests and sends each to one scheduler.

    `eos_ids`: ids that end a request by themselves. `ledger`: how many of the latest requests are
    remembered with their group. The end of a request is not seen here, so the oldest entry goes
    when there are more; an abort for a request that was forgotten goes to all groups.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        router: Router,
        groups: int,
        eos_ids: tuple[int, ...],
        ledger: int,
    ) -> None:
        self._encoder = encoder
        self._router = router
        self._all_groups = range(groups)
        self._eos_ids = eos_ids
        self._ledger = ledger
        self._group_of: dict[str, int] = {}
        self._draining = False
        self._accepted = 0
        self._refused = 0
        self._prompt_tokens = 0
        self._handlers: dict[type[Message], Callable[..., list[Send]]] = {
            Submit: self._on_submit,
            Abort: self._on_abort,
            Tick: lambda event: [],
            Drain: self._on_drain,
        }

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a tokenizer's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the tokenizer takes no {type(event).__name__}")
        return handler(event)

    def state(self) -> tuple[State, str]:
        return ("draining" if self._draining else "ready", "")

    def stats(self) -> dict[str, float]:
        return {
            "accepted_total": self._accepted,
            "refused_total": self._refused,
            "prompt_tokens_total": self._prompt_tokens,
            "ledger": len(self._group_of),
        }

    def idle(self) -> bool:
        return True  # every event is answered at once

    def _on_submit(self, event: Submit) -> list[Send]:
        gateway = f"gateway-{event.gateway}"
        if self._draining:
            self._refused += 1
            return [Send("text", gateway, _refusal(event, 503, "the server is shutting down"))]
        try:
            ids = self._encoder.encode(event)
        except Rejected as error:
            self._refused += 1
            refusal = _refusal(event, error.status, str(error), error.param, error.code)
            return [Send("text", gateway, refusal)]
        group = self._router.choose(ids, event.cache_salt)
        self._remember(event.request_id, group)
        self._accepted += 1
        self._prompt_tokens += len(ids)
        raw = ids.tobytes()
        accepted = Accepted(event.request_id, event.attempt, group, raw)
        return [
            Send("text", gateway, accepted),
            Send("work", f"scheduler-{group}", self._work(event, raw)),
        ]

    def _work(self, event: Submit, prompt_ids: bytes) -> Work:
        return Work(
            request_id=event.request_id,
            attempt=event.attempt,
            gateway=event.gateway,
            detokenizer=DETOKENIZER,
            prompt_ids=prompt_ids,
            params=event.params,
            seed=event.seed,
            eos_ids=() if event.params.ignore_eos else self._eos_ids,
            priority=event.priority,
            timeout=event.timeout,
            cache_salt=event.cache_salt,
            trace=event.trace,
        )

    def _remember(self, request_id: str, group: int) -> None:
        self._group_of.pop(request_id, None)  # a new attempt counts as new
        self._group_of[request_id] = group
        if len(self._group_of) > self._ledger:
            del self._group_of[next(iter(self._group_of))]

    def _on_abort(self, event: Abort) -> list[Send]:
        group = self._group_of.pop(event.request_id, None)
        groups = self._all_groups if group is None else (group,)
        return [Send("work", f"scheduler-{to}", event) for to in groups]

    def _on_drain(self, event: Drain) -> list[Send]:
        self._draining = True
        return []


def _refusal(
    event: Submit, status: int, message: str, param: str | None = None, code: str | None = None
) -> Refused:
    return Refused(event.request_id, event.attempt, event.gateway, status, message, param, code)
