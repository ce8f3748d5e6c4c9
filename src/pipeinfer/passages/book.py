"""Requests on their way through one stage, and the moments of each: bounded, whatever comes.

Knows neither what moments mean nor a clock: times are passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from pipeinfer.control import Moment, Passage

MOST_OPEN = 16_384  # requests; more than the gateway lets wait and the scheduler lets run
MOST_MOMENTS = 32  # of a passage; then the latest takes the place of the one before


class Way:
    """A request that is in the stage. `flowing`: its first output was marked. `attempt`: the
    gateway's, as the stage knows it. `span`: see Passage. `output`: how much of it there is by now,
    where that is counted; an ended passage says so itself."""

    __slots__ = ("attempt", "began", "flowing", "moments", "output", "span", "trace")

    def __init__(self, began: float, trace: str, attempt: int) -> None:
        self.began = began
        self.trace = trace
        self.attempt = attempt
        self.flowing = False
        self.output: Moment | None = None
        self.span = ""
        self.moments: list[Moment] = []


class Book:
    """The passages of `stage`. `ended(passage)` is called at the end of each.

    Of more than `most` open ones the oldest is forgotten.
    """

    def __init__(
        self,
        stage: str,
        ended: Callable[[Passage], object],
        most: int = MOST_OPEN,
    ) -> None:
        self.stage = stage
        self._ended = ended
        self._most = most
        self._open: OrderedDict[str, Way] = OrderedDict()
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Open passages."""
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def get(self, request_id: str) -> Way | None:
        """The open passage of a request."""
        return self._open.get(request_id)

    def begin(self, request_id: str, at: float, trace: str = "", attempt: int = 0) -> bool:
        """Opens a passage; False if the request has one, which goes on."""
        if request_id in self._open:
            return False
        self._open[request_id] = Way(at, trace, attempt)
        self._changed[request_id] = None
        while len(self._open) > self._most:
            forgotten, _ = self._open.popitem(last=False)
            self._changed.pop(forgotten, None)
        return True

    def mark(self, request_id: str, at: float, name: str, **values: float) -> None:
        """Something happened to a request; nothing if it has no passage."""
        way = self._open.get(request_id)
        if way is not None:
            if len(way.moments) >= MOST_MOMENTS:
                del way.moments[-1]
            way.moments.append(Moment(at, name, values))
            self._changed[request_id] = None

    def worth_a_look(self, request_id: str, finish: str | None) -> Way | None:
        """The open passage of which an output came, if that is its last or none was marked; hot
        path: asked once for every token of every request, of which most say nothing new."""
        way = self._open.get(request_id)
        return None if way is None or (way.flowing and finish is None) else way

    def first(self, request_id: str, at: float, name: str, **values: float) -> None:
        """Marks the first output; nothing for further ones, until it starts over."""
        way = self._open.get(request_id)
        if way is not None and not way.flowing:
            way.flowing = True
            self.mark(request_id, at, name, **values)

    def count(self, request_id: str, at: float, output_tokens: int) -> None:
        """So many output tokens were there at that time; hot path, while somebody looks."""
        way = self._open.get(request_id)
        if way is not None:
            way.output = Moment(at, "streamed", {"output_tokens": output_tokens})
            self._changed[request_id] = None

    def amend(self, request_id: str, name: str, **values: float) -> None:
        """Adds to the latest moment of that name, if there is one."""
        way = self._open.get(request_id)
        for index in reversed(range(len(way.moments) if way is not None else 0)):
            assert way is not None
            moment = way.moments[index]
            if moment.name == name:
                way.moments[index] = Moment(moment.at, name, {**moment.values, **values})
                self._changed[request_id] = None
                return

    def end(self, request_id: str, at: float, outcome: str = "") -> None:
        """Ends a passage; nothing if there is none."""
        way = self._open.pop(request_id, None)
        if way is not None:
            self._changed.pop(request_id, None)
            self._ended(self._passage(request_id, way, at, outcome))

    def finish(self, request_id: str, at: float, outcome: str, **values: float) -> None:
        """Ends a passage whose request is complete; `values`: of the last moment."""
        self.mark(request_id, at, "finished", **values)
        self.end(request_id, at, outcome)

    def end_all(self, at: float, outcome: str) -> None:
        """Ends every passage."""
        for request_id in list(self._open):
            self.end(request_id, at, outcome)

    def changes(self, most: int) -> list[Passage]:
        """Open passages that began or had a moment since they were told, up to so many."""
        told = list(islice(self._changed, most))
        for request_id in told:
            del self._changed[request_id]
        return [self._passage(request_id, self._open[request_id]) for request_id in told]

    def _passage(self, request_id: str, way: Way, ended: float = 0.0, outcome: str = "") -> Passage:
        streamed = (way.output,) if way.output is not None and not ended else ()
        return Passage(
            stage=self.stage,
            request_id=request_id,
            began=way.began,
            ended=ended,
            outcome=outcome,
            trace=way.trace,
            moments=(*way.moments, *streamed),
            span=way.span,
        )
