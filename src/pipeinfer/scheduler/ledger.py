"""What a scheduler remembers of requests that it does not run: ended ones, and ones not yet known.

A request that finished is kept, whole, until its client has it; the ids of those that are over for
good, because their work may be told once more; what detokenizers delivered of requests whose work
has not come; and which ones another group took over. Knows no bus and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from pipeinfer.messages import Abort, Delivered
from pipeinfer.packing import pack
from pipeinfer.recent import Recent
from pipeinfer.scheduler.outbox import Last, home
from pipeinfer.scheduler.request import Request

REMEMBERED = 10_000  # ids of requests that are over, at most
LATELY = 60.0  # seconds for which they are remembered
ORPHANED = 60.0  # seconds that what was delivered waits for its work
KEPT = 3_600.0  # seconds, at most, after which one that has finished is asked after


class Ledger:
    """Of one scheduler; `tokenizers` and `detokenizers` are the stages that may know a request.
    patience: seconds, at least, that a finished request waits for its Done; no more than KEPT."""

    def __init__(
        self, tokenizers: Sequence[str], detokenizers: Sequence[str], patience: float = KEPT
    ) -> None:
        self._patience = min(patience, KEPT)
        self.tokenizers = tuple(tokenizers)
        self.detokenizers = tuple(detokenizers)
        self.kept: dict[str, tuple[Request, Last]] = {}
        self._delivered: dict[str, tuple[Delivered, float]] = {}
        self._over = Recent[float](LATELY, REMEMBERED)  # the last attempt of each
        self._moved: dict[str, str] = {}  # to another group; where its output goes
        self._aged: set[str] = set()  # ids that were kept at the last sweep
        self._sweep_at = 0.0

    def keep(self, request: Request, last: Last) -> None:
        """`request` ended with `last`; its detokenizer may have to be told again."""
        self.kept[request.id] = request, last

    def settled(self, request_id: str, attempt: int) -> bool:
        """True if this attempt of the request has ended here, so that its work is a repetition.

        An earlier one that has ended is forgotten: another group went on with it since.
        """
        if self._ended(request_id) >= attempt:
            return True
        kept = self.kept.get(request_id)
        if kept is not None and kept[0].work.attempt < attempt:
            del self.kept[request_id]
            return False
        return kept is not None

    def _ended(self, request_id: str) -> float:
        """The last attempt of it that is over for good; 0: none."""
        return self._over.get(request_id) or 0

    def put(self, delivered: Delivered, now: float) -> Abort | None:
        """What a detokenizer delivered of a request that is not live; what to answer, if anything.

        It waits for its work, unless the request is over.
        """
        name, attempt = delivered.request_id, delivered.attempt
        if self._ended(name) >= attempt:
            return Abort(name, attempt, "it has ended")
        kept = self.kept.get(name)
        if kept is None or kept[0].work.attempt < attempt:
            self._delivered[name] = delivered, now
        return None

    def hand_over(self, request: Request, crashes: int) -> Delivered:
        """What another group needs to go on with it. Its end will be told here as well."""
        self._moved[request.id] = home(request)
        ids, attempt = pack(request.outputs), request.work.attempt
        return Delivered(
            request_id=request.id,
            attempt=attempt,
            ids=ids,
            crashes=crashes,
            logprobs=bytes(request.logprobs),
            prompt_logprobs=bytes(request.prompt_logprobs),
        )

    @property
    def orphans(self) -> int:
        """Requests of which something was delivered, but whose work nobody has told."""
        return len(self._delivered)

    def claim(self, request_id: str) -> Delivered | None:
        """What was delivered of a request whose work has come."""
        self._moved.pop(request_id, None)
        delivered, _ = self._delivered.pop(request_id, (None, 0.0))
        return delivered

    def end(self, request_id: str, now: float, attempt: float = inf) -> tuple[str, ...]:
        """The request is over for good, up to this `attempt`; returns the detokenizers that may
        know it."""
        self._over.put(request_id, attempt, now)
        if self._delivered.pop(request_id, None) is not None:
            return self.detokenizers
        request, _ = self.kept.pop(request_id, (None, None))
        moved = self._moved.pop(request_id, None)
        if request is not None:
            return (home(request),)
        return () if moved is None else (moved,)

    def complete(self, now: float) -> None:
        """All neighbours have told what they know: from now on, what is missing may be lost."""
        for name, (delivered, _) in self._delivered.items():
            self._delivered[name] = delivered, now

    def lost(self, now: float) -> Iterator[tuple[str, Abort]]:
        """(detokenizer, what to tell it) of requests whose work never came.

        Not to be asked before the neighbours have told all.
        """
        late = [d for d, since in self._delivered.values() if now - since > ORPHANED]
        for delivered in late:
            del self._delivered[delivered.request_id]
            abort = Abort(delivered.request_id, delivered.attempt, "nobody asked for it")
            yield from ((to, abort) for to in self.detokenizers)

    def unclaimed(self, now: float) -> list[Delivered]:
        """Of those that have finished, and that no Done came for: what to tell a tokenizer, which
        aborts them wherever they are. Their gateway is lost, or somebody has lost their end."""
        if now < self._sweep_at:
            return []
        aged = [request for name, (request, _) in self.kept.items() if name in self._aged]
        self._aged = set(self.kept)
        self._sweep_at = now + self._patience
        return [
            Delivered(request_id=r.id, attempt=r.work.attempt, ids=b"", ended=True) for r in aged
        ]
