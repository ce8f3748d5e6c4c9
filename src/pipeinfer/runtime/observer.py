"""Observes a stage while somebody asked for it: which requests pass, and what its steps take.

Stands beside the tap in the shell. Unasked, a scheduler alone keeps sums of its last minute. Knows
clocks and the channel `control`; what messages mean is read in passages/.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from pipeinfer.control import Observed, Passage, StepMade, Watch
from pipeinfer.core import Send
from pipeinfer.messages import Message
from pipeinfer.passages.book import Book
from pipeinfer.passages.exchange import Exchange, Observer
from pipeinfer.passages.registry import observer
from pipeinfer.passages.steps import LastMinute
from pipeinfer.runtime.spans import Spans
from pipeinfer.settings import Settings
from pipeinfer.topology.topology import Identity

log = logging.getLogger(__name__)

PERIOD = 0.25  # seconds between two answers
LONGEST = 3600.0  # seconds of one question; who wants more asks again
MOST_PASSAGES = 256  # of an answer, far below what a frame of telemetry may have
MOST_ENDED = 4096  # that wait to be told; the oldest go
MOST_STEPS = 2048  # the same


class StageObserver:
    """Of one stage. `active`: whether exchanges are wanted; the shell asks before it shows one.

    `say` publishes an answer. It has a loop as soon as it is asked for something.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        incarnation: int,
        say: Callable[[Observed], None],
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._spans: Spans | None = None
        self._incarnation = incarnation
        self._say = say
        self._until = 0.0  # on the loop's clock: when nobody looks any more
        self._timer: asyncio.TimerHandle | None = None
        self._observer: Observer | None = None
        self._ended: deque[Passage] = deque(maxlen=MOST_ENDED)
        self._steps: deque[StepMade] = deque(maxlen=MOST_STEPS)
        self._minute: LastMinute | None = None  # of a scheduler
        self._past = False  # whether it is asked for
        self.active = False

    def begin(self) -> None:
        """The stage begins. ConfigurationError if spans are wanted and cannot be had."""
        self._begin_minute()
        if self._settings.otlp_endpoint:
            self._spans = Spans(self._settings, self._identity)
            self._observe()

    def control(self, message: Message) -> None:
        """Takes a message of the channel `control`."""
        if isinstance(message, Watch) and message.seconds > 0:
            loop = asyncio.get_running_loop()
            self._until = max(self._until, loop.time() + min(message.seconds, LONGEST))
            self._past |= message.past
            self._observe()
            if self._timer is None:
                self._timer = loop.call_later(PERIOD, self._tell)

    def saw(self, event: Message, sends: Sequence[Send], began: float) -> None:
        """The core took `event` at monotonic time `began`, and `sends` are on their way."""
        wall, now = time.time(), time.monotonic()
        exchange = Exchange(event, sends, wall - (now - began), wall)
        try:
            if self._minute is not None:
                self._minute.saw(exchange)
            if self._observer is not None:
                self._observer.saw(exchange)
        except Exception:  # a stage does not end of what only looks at it
            log.exception("nothing is observed for now: %s", type(event).__name__)
            self._begin_minute()
            self._forget()

    async def close(self) -> None:
        """The stage ends; what still passes does so no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.active = False
        if self._spans is not None:
            if self._observer is not None:
                self._observer.book.end_all(time.time(), "left")
            await self._spans.close()

    def _observe(self) -> None:
        if self._observer is None:
            self._observer = observer(self._identity.name, Book(self._identity.id, self._end))
        self.active = True

    def _begin_minute(self) -> None:
        if self._identity.name == "scheduler":
            self._minute = LastMinute(self._settings.itl_target, self._stepped)
            self.active = True

    def _stepped(self, step: StepMade) -> None:
        if self._timer is not None:
            self._steps.append(step)

    def _end(self, passage: Passage) -> None:
        if self._spans is not None:
            self._spans.add(passage)
        if self._timer is not None:
            self._ended.append(passage)

    def _tell(self) -> None:
        """Four times a second, while somebody looks."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._observer is None:
            return
        most = min(len(self._ended), MOST_PASSAGES)
        passages = [self._ended.popleft() for _ in range(most)]
        passages += self._observer.book.changes(MOST_PASSAGES - most)
        past: tuple[StepMade, ...] = ()
        if self._past and self._minute is not None:
            past = self._minute.sums(self._steps[0].at if self._steps else time.time())
        self._past = False
        if passages or self._steps or past:
            told = Observed(
                stage=self._identity.id,
                incarnation=self._incarnation,
                passages=tuple(passages),
                steps=tuple(self._steps),
                past=past,
            )
            self._steps.clear()
            self._say(told)
        if loop.time() < self._until:
            self._timer = loop.call_later(PERIOD, self._tell)
        elif self._spans is None:
            self._forget()
        else:
            self._ended.clear()

    def _forget(self) -> None:
        """What comes until it is asked again is missed, so that what it knows would be wrong. What
        is kept of a scheduler's steps begins anew only if it could not be read."""
        self._ended.clear()
        self._steps.clear()
        self._observer = None
        self.active = self._minute is not None
        if self._spans is not None:
            self._observe()
