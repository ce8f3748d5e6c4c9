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

    enabled: whether there may be any. max_rank: the greatest rank of one.
    """

    def __init__(
        self, enabled: bool = False, max_rank: int = 0, adapters: Iterable[Adapter] = ()
    ) -> None:
        self.enabled = enabled
        self.max_rank = max_rank
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._changes: dict[str, AdapterState] = {}  # the latest of each name

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
        before = self._changes.get(name)
        version = 1 if before is None else before.version + 1
        self.adopt(AdapterState(name=name, version=version, gateway=gateway, adapter=adapter))

    def adopt(self, change: AdapterState) -> bool:
        """Takes a change that this gateway, or another, was asked for; False if a later one is
        known."""
        known = self._changes.get(change.name)
        if known is not None and not change.follows(known):
            return False
        self._changes[change.name] = change
        if change.adapter is None:
            self._by_name.pop(change.name, None)
        else:
            self._by_name[change.name] = change.adapter
        return True

    def state(self, name: str) -> AdapterState:
        """The latest change of that name."""
        return self._changes[name]

    def changes(self) -> AdapterChanges:
        """All changes since the server's start."""
        return AdapterChanges(tuple(self._changes.values()))


def adapted_fingerprint(base: str, adapter: Adapter) -> str:
    """The fingerprint of answers with `adapter`, of a server whose own is `base`."""
    digest = blake2b(f"{base} {adapter.digest}".encode(), digest_size=8)
    return f"fp_{digest.hexdigest()}"
