"""A core that only listens, for tests of shells."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeinfer.messages import Abort, Message, Recover


@dataclass
class ListeningCore:
    """`messages`: the Aborts and Recovers that came."""

    messages: list[Message] = field(default_factory=list)

    def handle(self, event, now):
        if isinstance(event, Abort | Recover):
            self.messages.append(event)
        return []

    def asked(self) -> list[int]:
        """Incarnations that asked what it knows, each once."""
        asked = [m.incarnation for m in self.messages if isinstance(m, Recover)]
        return list(dict.fromkeys(asked))

    def state(self):
        return "ready", ""

    def stats(self):
        return {}

    def idle(self):
        return True
