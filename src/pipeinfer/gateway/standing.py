"""What clients are told of the pipeline: its status, and whether a request would be answered.

Knows the health table and whether this gateway drains; no client and no request.
"""

from __future__ import annotations

from pipeinfer.gateway.events import Status, StatusChanged
from pipeinfer.gateway.health import Health


class Readiness:
    """Of one gateway. was_ready: the pipeline has been ready at some time."""

    def __init__(self, health: Health) -> None:
        self.status: Status = "starting"
        self.draining = False
        self.was_ready = False
        self._health = health
        self._published: StatusChanged | None = None

    @property
    def can_serve(self) -> bool:
        """Whether a request that came now would be answered without a pause."""
        return self.was_ready and not self.draining and self._health.can_serve()

    def status_change(self) -> StatusChanged | None:
        """The status, whenever it differs from what was told last."""
        complete = self._health.all_ready()
        self.was_ready = self.was_ready or complete
        if self.draining:
            self.status = "draining"
        elif complete:
            self.status = "ready"
        else:
            self.status = "degraded" if self.was_ready else "starting"
        told = StatusChanged(self.status, self.can_serve, self._health.reason())
        if told == self._published:
            return None
        self._published = told
        return told
