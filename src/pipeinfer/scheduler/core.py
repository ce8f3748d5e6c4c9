"""The scheduler without I/O: requests as token sequences in, numbered plans out.

Owns who runs next, chunking, preemption and the end of a request by token or length; it keeps up to
`overlap_depth` steps in flight and corrects late what it learns late. Knows no pages (only counts
of them), no text and no device.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import (
    Abort,
    Admit,
    Admitted,
    Drain,
    Fault,
    GroupFault,
    Hello,
    Message,
    Open,
    Plan,
    Ready,
    Refused,
    Release,
    Result,
    State,
    StopHit,
    Tick,
    TokenRow,
    Tokens,
    Work,
    pack,
)
from pipeinfer.scheduler import policies
from pipeinfer.scheduler.board import Board
from pipeinfer.scheduler.credits import Credits
from pipeinfer.scheduler.epochs import Epochs
from pipeinfer.scheduler.flights import Flights, OutOfOrder
from pipeinfer.scheduler.limits import TooLong, max_total
from pipeinfer.scheduler.probation import Probation
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request, from_work

CONTEXT_TOKENS = 16  # of the prompt, so that the decoder knows what the first output follows
DEFAULT_STEP_TOKENS = 2048
DEFERRALS = 2  # of one request in a row, after which somebody else must give way


@dataclass(frozen=True)
class SchedulerOptions:
    """What the core needs of the settings. max_step_tokens: token budget of a step; 0 leaves it to
    the engine, and an engine that says nothing gets DEFAULT_STEP_TOKENS.
    """

    policy: str = "mixed"
    overlap_depth: int = 2
    max_running: int = 256
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    watchdog: float = 120.0
    tp: int = 1


class SchedulerCore:
    """See core.Core. `first_epoch` must exceed every epoch of earlier schedulers of this group."""

    def __init__(self, options: SchedulerOptions, group: int = 0, first_epoch: int = 0) -> None:
        self.options, self.group = options, group
        self._policy = policies.create(options.policy)
        self._epochs = Epochs(options.tp, first_epoch)
        self._credits = Credits(1, 0)
        self._budget = 0  # tokens of a step, known when an epoch begins
        self._queue = WaitingQueue()
        self._probation = Probation()
        self._live: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._flights = Flights()
        self._free_slots: list[int] = []
        self._releases: list[Release] = []
        self._released_pages = 0
        self._number = 0
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._draining = False
        self._out: list[Send] = []
        self._rows: dict[int, list[TokenRow]] = {}
        self.counts = dict.fromkeys(
            ("plans", "planned_tokens", "preemptions", "epochs", "finished"), 0
        )
        self._handlers: dict[type[Message], Callable[[Any, float], None]] = {
            Work: self._on_work,
            Abort: self._on_abort,
            StopHit: self._on_stop_hit,
            Hello: self._on_hello,
            Ready: self._on_ready,
            Admitted: self._on_admitted,
            Result: self._on_result,
            Fault: self._on_fault,
            Tick: self._on_tick,
            Drain: self._on_drain,
        }

    def handle(self, event: Message, now: float) -> list[Send]:
        """One event; see core.Core."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return []  # e.g. telemetry
        handler(event, now)
        self._pump(now)
        self._send_rows()
        out, self._out = self._out, []
        return out

    def state(self) -> tuple[State, str]:
        if self._draining:
            return "draining", ""
        return ("ready", "") if self._epochs.running else ("waiting", self._epochs.reason)

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "waiting": len(self._live) - len(self._running),
            "in_flight": len(self._flights),
            "deferred_total": self._flights.deferred,
            **{f"{name}_total": count for name, count in self.counts.items()},
        }

    def idle(self) -> bool:
        return not self._live and not len(self._flights)

    # -------------------------------------------------------------------------------- requests

    def _on_work(self, work: Work, now: float) -> None:
        known = self._live.get(work.request_id)
        if known is not None:
            if work.attempt <= known.work.attempt:
                return
            self._drop(known)  # sent again by its gateway: start over
        if self._draining:
            self._refuse(work, 503, "the server is shutting down", None)
            return
        self._arrivals += 1
        request = from_work(work, self._arrivals, now)
        try:
            if self._epochs.running:
                request.max_total = max_total(request, self._epochs.shape)
        except TooLong as error:
            self._refuse(work, 400, str(error), error.param)
            return
        self._live[request.id] = request
        self._queue.push(request)
        if request.deadline < float("inf"):
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
        opened = Open(
            work.request_id, work.attempt, work.gateway, work.params, len(request.prompt),
            pack(request.prompt[-CONTEXT_TOKENS:]), work.trace, self.group,
        )  # fmt: skip
        self._out.append(Send("tokens", f"detokenizer-{work.detokenizer}", opened))

    def _on_abort(self, abort: Abort, _now: float) -> None:
        request = self._live.get(abort.request_id)
        if request is None or request.work.attempt > abort.attempt:
            return
        self._out.append(Send("tokens", f"detokenizer-{request.work.detokenizer}", abort))
        self._drop(request)

    def _on_stop_hit(self, hit: StopHit, _now: float) -> None:
        request = self._live.get(hit.request_id)
        if request is None or request.work.attempt != hit.attempt:
            return  # it ended by itself in the meantime; the detokenizer's word reached the client
        del request.outputs[hit.length :]
        self._drop(request)

    def _refuse(self, work: Work, status: int, message: str, param: str | None) -> None:
        refused = Refused(work.request_id, work.attempt, work.gateway, status, message, param)
        self._out.append(Send("tokens", f"detokenizer-{work.detokenizer}", refused))

    def _finish(self, request: Request, row: TokenRow) -> None:
        self._rows.setdefault(request.work.detokenizer, []).append(row)
        self.counts["finished"] += 1
        self._drop(request)

    def _fail(self, request: Request, reason: str, message: str) -> None:
        finish = "abort" if reason == "abort" else "error"
        row = TokenRow(request.id, len(request.outputs), b"", finish, None, message)
        self._finish(request, row)

    def _drop(self, request: Request) -> None:
        """Forgets a request; its slot is released with the next plan."""
        request.done = True
        del self._live[request.id]
        if request.id in self._running:
            del self._running[request.id]
            self._release(request)
        else:
            self._queue.forget(request)

    def _release(self, request: Request) -> None:
        """What was computed may stay in the prefix cache, as far as it was confirmed."""
        self._releases.append(Release(request.slot, True, pack(request.confirmed)))
        self._released_pages += max(self._credits.between(request.hit, request.computed), 0)
        request.leave()

    # ------------------------------------------------------------------------------ the engine

    def _on_hello(self, hello: Hello, _now: float) -> None:
        if self._epochs.hello(hello):
            self._lose_everything()
        self._begin()

    def _begin(self) -> None:
        begin = self._epochs.begin()
        if begin is not None:
            self._out.append(Send("plan", EVERYONE, begin))

    def _on_ready(self, ready: Ready, _now: float) -> None:
        if not self._epochs.ready(ready):
            return
        shape = self._epochs.shape
        self._credits = Credits(shape.page_size, shape.pages)
        self._budget = self.options.max_step_tokens or shape.step_tokens or DEFAULT_STEP_TOKENS
        slots = min(shape.max_slots, self.options.max_running, self._budget)
        self._free_slots = list(range(slots))
        self._number = 0
        self.counts["epochs"] += 1
        for request in list(self._live.values()):
            try:
                request.max_total = max_total(request, shape)
            except TooLong as error:
                self._fail(request, "error", str(error))

    def _on_fault(self, fault: Fault, _now: float) -> None:
        if self._epochs.running and fault.epoch == self._epochs.epoch:
            self._end_epoch(f"rank {fault.rank}: {fault.reason}")

    def _end_epoch(self, reason: str, forget: bool = False) -> None:
        self._epochs.end(reason, forget)
        self._lose_everything()

    def _lose_everything(self) -> None:
        """Every request goes back to the queue with the tokens it has; suspects wait apart."""
        flying = self._flights.crash()
        suspects = [request for request in flying if request.slot >= 0]
        accused = set(map(id, suspects))
        for request in self._running.values():
            request.leave()
            if id(request) not in accused:
                self._queue.push(request)
        self._running.clear()
        self._releases.clear()
        self._released_pages = 0
        guilty = self._probation.accuse(suspects)
        if guilty is not None:
            self._fail(guilty, "error", "the engine crashed repeatedly on this request")

    def _on_admitted(self, admitted: Admitted, _now: float) -> None:
        if self._epochs.running and admitted.epoch == self._epochs.epoch:
            self._credits.report(admitted.number, admitted.free, admitted.evictable)
            self._flights.matched(admitted)

    def _on_result(self, result: Result, _now: float) -> None:
        if not self._epochs.running or result.epoch != self._epochs.epoch:
            return
        self._credits.report(result.number, result.free, result.evictable)
        try:
            for request, tokens in self._flights.land(result):
                self._accept(request, tokens)
        except OutOfOrder as error:
            self._end_epoch(str(error))

    def _accept(self, request: Request, tokens: list[int]) -> None:
        """Confirmed output ids; what follows a stop token or the limit does not exist."""
        offset, finish, stop_token = len(request.outputs), None, None
        for token in tokens:
            request.outputs.append(token)
            if token in request.stops:
                finish, stop_token = "stop", token
                break
            if request.length >= request.max_total:
                finish = "length"
                break
        self._probation.cleared(request)
        row = TokenRow(
            request.id, offset, _pack_few(request.outputs[offset:]), finish, stop_token, "",
            max(request.cached, 0),
        )  # fmt: skip
        if finish is None:
            self._rows.setdefault(request.work.detokenizer, []).append(row)
        else:
            self._finish(request, row)

    def _send_rows(self) -> None:
        for detokenizer, rows in self._rows.items():
            self._out.append(Send("tokens", f"detokenizer-{detokenizer}", Tokens(tuple(rows))))
        self._rows.clear()

    # ------------------------------------------------------------------------------- the clock

    def _on_tick(self, _tick: Tick, now: float) -> None:
        if not self._epochs.running:
            self._begin()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.done:
                self._fail(request, "abort", "the request's timeout is over")
        late = self._flights.overdue(now, self.options.watchdog)
        if late is not None:
            reason = f"no result of plan {late} in {self.options.watchdog:g} s"
            self._end_epoch(reason, forget=True)
            self._out.append(Send("telemetry", EVERYONE, GroupFault(self.group, reason)))

    def _on_drain(self, _drain: Drain, _now: float) -> None:
        self._draining = True

    # -------------------------------------------------------------------------------- the loop

    def _pump(self, now: float) -> None:
        """Publishes steps until enough are in flight or nothing is left to do."""
        while self._epochs.running and len(self._flights) < self.options.overlap_depth:
            board = Board(
                list(self._running.values()), self._queue, self._credits,
                len(self._free_slots) + len(self._releases), self._budget,
                not len(self._flights), self._released_pages,
            )  # fmt: skip
            if not self._compose(board):
                return
            if not board.rows and not board.preempted and not self._releases:
                return
            self._publish(board, now)

    def _compose(self, board: Board) -> bool:
        """Fills the board; False if the steps in flight must report first."""
        head = self._queue.head()
        if self._probation.tried or (self._probation and (head is None or not head.admission)):
            if len(self._flights):
                return False  # a suspect runs alone, at depth 1
            suspect = self._probation.next()
            if suspect is not None:
                board.run_alone(suspect)
                return True
        if any(request.deferrals >= DEFERRALS for request in self._running.values()):
            board.relieve()
        self._policy.compose(board)
        return True

    def _publish(self, board: Board, now: float) -> None:
        """Writes the plan: releases, then admits, then rows."""
        for request in board.preempted:
            self._preempt(request)
        releases, self._releases = tuple(self._releases), []
        self._free_slots.extend(release.slot for release in releases)
        admits = tuple(self._admit(request) for request in board.admitted)
        rows = [(request, count) for request, count in board.rows if request.slot >= 0]
        slots, counts = pack([r.slot for r, _ in rows]), pack([count for _, count in rows])
        plan = Plan(self._epochs.epoch, self._number, releases, admits, slots, counts)
        self.counts["planned_tokens"] += self._flights.launch(self._number, rows, now)
        self._credits.plan(self._number, board.pages)
        self._out.append(Send("plan", EVERYONE, plan))
        self._number += 1
        self._released_pages = 0
        self.counts["plans"] += 1

    def _preempt(self, request: Request) -> None:
        del self._running[request.id]
        pages = self._released_pages
        self._release(request)
        self._released_pages = pages  # the board has counted them
        request.deferrals = 0
        self._queue.push(request)
        self.counts["preemptions"] += 1

    def _admit(self, request: Request) -> Admit:
        request.slot = self._free_slots.pop()
        self._running[request.id] = request
        work, params = request.work, request.work.params
        suppress = tuple(sorted(request.stops)) if params.min_tokens > 0 else ()
        return Admit(
            request.slot, request.id, pack(request.prompt + request.outputs), len(request.prompt),
            request.max_total, params, work.seed, suppress, work.cache_salt,
        )  # fmt: skip


def _pack_few(ids: list[int]) -> bytes:
    """`pack` for a handful of ids, for which an array costs more than its use."""
    return b"".join([token.to_bytes(4, "little", signed=True) for token in ids])
