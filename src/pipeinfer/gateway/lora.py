"""The adapters that a gateway serves beside the model, by name.

Their files are looked at when they are named, and hashed: what requests carry says which content
is meant, and engines refuse files that have changed since. Knows no engine and no slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

from pipeinfer.checkpoint.lora import identify, read_lora_modules
from pipeinfer.messages import AdapterChanges, AdapterState
from pipeinfer.params import Adapter
from pipeinfer.settings import Settings


class AdapterRegistry:
    """Adapters by name, in the order in which they came.

    enabled: whether there may be any. max_rank: the greatest rank of one. changes: what differs
    from the settings' adapters.
    """

    def __init__(
        self, enabled: bool = False, max_rank: int = 0, adapters: Iterable[Adapter] = ()
    ) -> None:
        self.enabled = enabled
        self.max_rank = max_rank
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._configured = frozenset(self._by_name)
        self.changes = AdapterChanges()

    @classmethod
    def of(cls, settings: Settings) -> AdapterRegistry:
        """Those of the settings. Raises ConfigurationError for one that is not served."""
        rank = settings.max_lora_rank
        found = [
            identify(name, str(files.folder), rank)
            for name, files in read_lora_modules(settings).items()
        ]
        return cls(settings.enable_lora, rank, found)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of all."""
        return tuple(self._by_name)

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of that name, if there is one."""
        return self._by_name.get(name or "")

    def change(self, name: str, adapter: Adapter | None, gateway: int) -> None:
        """Requests may name `adapter` from now on, in the place of one with its name. None: those
        that come later may not name it any more, and those that run go on. gateway: index of this
        one."""
        state = AdapterState(
            name=name,
            version=self.changes.next_version,
            gateway=gateway,
            adapter=adapter,
            configured=name in self._configured,
        )
        self.adopt(AdapterChanges((state,)))

    def adopt(self, changes: AdapterChanges) -> bool:
        """Takes changes that this gateway, or another, was asked for; False if all were known."""
        before, self.changes = self.changes, self.changes.updated(changes)
        now = {state.name: state.adapter for state in self.changes.states}
        for state in before.states:
            now.setdefault(state.name, None)  # forgotten, so it was unloaded
        for name, adapter in now.items():
            if adapter is None:
                self._by_name.pop(name, None)
            else:
                self._by_name[name] = adapter
        return self.changes != before


def adapted_fingerprint(base: str, adapter: Adapter) -> str:
    """The fingerprint of answers with `adapter`, of a server whose own is `base`."""
    digest = blake2b(f"{base} {adapter.digest}".encode(), digest_size=8)
    return f"fp_{digest.hexdigest()}"
