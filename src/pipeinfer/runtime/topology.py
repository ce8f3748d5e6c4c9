"""Which stages there are and where they listen; read from and written to pipeinfer.toml.

Knows no sockets: it maps a stage's id to its one address. See docs/topology.md for the format.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipeinfer.bus import addresses
from pipeinfer.settings import ConfigurationError, Settings

NAMES = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")


class Identity(msgspec.Struct, frozen=True):
    """One process of the pipeline; `index` counts gateways, tokenizers and detokenizers."""

    name: str
    group: int = 0
    rank: int = 0
    index: int = 0

    @property
    def id(self) -> str:
        """ "gateway-0", "scheduler-<group>", "engine-<group>-<rank>"."""
        if self.name == "engine":
            return f"engine-{self.group}-{self.rank}"
        return f"{self.name}-{self.group if self.name == 'scheduler' else self.index}"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[stage]] table."""

    name: str
    address: str
    group: int = 0
    rank: int = 0
    index: int = 0
    host: str = ""
    device: str = ""
    key: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.group, self.rank, self.index)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stage: list[Entry]
    settings: dict[str, Any] = {}


@dataclass(frozen=True)
class Topology:
    """All stages of one deployment, and the settings that its file carries."""

    entries: tuple[Entry, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def address(self, stage: str) -> str:
        """The address of stage id `stage`; ConfigurationError if there is no such stage."""
        for entry in self.entries:
            if entry.identity.id == stage:
                return entry.address
        raise ConfigurationError(f"the topology has no stage {stage!r}")

    def ids(self, name: str | None = None) -> list[str]:
        """Ids of all stages, or of those called `name`, in the file's order."""
        return [e.identity.id for e in self.entries if name is None or e.name == name]

    def without(self, name: str) -> Topology:
        """The same topology with no stage called `name`."""
        return Topology(tuple(e for e in self.entries if e.name != name), self.settings)

    def to_toml(self) -> str:
        """The file's text; JSON strings are TOML basic strings."""
        lines = []
        if self.settings:
            lines += [
                "[settings]",
                *(f"{k} = {json.dumps(v)}" for k, v in self.settings.items()),
                "",
            ]
        for entry in self.entries:
            fields = msgspec.structs.asdict(entry)
            shown = {k: v for k, v in fields.items() if k in ("name", "address") or v}
            lines += ["[[stage]]", *(f"{k} = {json.dumps(v)}" for k, v in shown.items()), ""]
        return "\n".join(lines)


def local(settings: Settings, prefix: str) -> Topology:
    """One host: every stage at `prefix` + its id, e.g. "ipc:///tmp/x/" or "inproc://run-1-"."""
    if settings.tp > 1 or settings.dp > 1:
        raise ConfigurationError("this version runs one engine in one group: --tp 1 --dp 1")
    identities = [Identity(name) for name in NAMES]
    entries = (Entry(i.name, prefix + i.id, i.group, i.rank, i.index) for i in identities)
    return checked(Topology(tuple(entries)))


def load(path: str | Path) -> Topology:
    """Reads and checks a topology file; ConfigurationError names the file and what is wrong."""
    try:
        raw = tomllib.loads(Path(path).read_text())
        file = msgspec.convert(raw, _File)
        return checked(Topology(tuple(file.stage), file.settings))
    except OSError as error:
        raise ConfigurationError(f"cannot read topology {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ConfigurationError) as error:
        raise ConfigurationError(f"topology {path}: {error}") from None


def checked(topology: Topology) -> Topology:
    """The topology itself, or ConfigurationError for what could not work."""
    seen: dict[str, str] = {}
    for entry in topology.entries:
        if entry.name not in NAMES:
            raise ConfigurationError(f"unknown stage {entry.name!r}; there are {', '.join(NAMES)}")
        addresses.check(entry.address)
        for name in addresses.OFFSETS:
            place = addresses.derive(entry.address, name)
            if place in seen:
                raise ConfigurationError(f"{entry.identity.id} and {seen[place]} both take {place}")
            seen[place] = entry.identity.id
    for name in NAMES:
        if len(topology.ids(name)) != 1:
            raise ConfigurationError(
                f"this version needs exactly one {name}, not {len(topology.ids(name))}"
            )
    return topology
