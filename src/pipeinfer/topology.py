"""Topology: which stages there are, where each runs, and under which address others reach it.

Read from a file, made for one host, or said by environment variables, as containers get it from an
orchestrator. Maps a stage's id to its one address, from which the addresses of its sockets follow:
a stage binds up to four sockets, its inbox (PULL), its telemetry, a scheduler its plans (PUB), and
the first rank of several where they meet (REP). With `tcp` they take four ports in a row; with
`ipc` and `inproc` four names. Opens no sockets, reads no key; docs/topology.md has the format.
"""

from __future__ import annotations

import ipaddress
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Any

import msgspec

from pipeinfer.close_names import none_of
from pipeinfer.settings import ConfigurationError, Settings

NAMES = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
SUPERVISOR = "supervisor-0"  # no stage, but what command lines ask for what stages cannot do


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


class StageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[stage]] table."""

    name: str
    address: str
    group: int = 0
    rank: int = 0
    index: int = 0
    host: str = ""
    device: str = ""
    key: str = ""
    bind: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.group, self.rank, self.index)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stage: list[StageEntry]
    settings: dict[str, Any] = {}
    supervisor: str = ""
    keys: str = ""


@dataclass(frozen=True)
class Topology:
    """All stages of one deployment, and the settings that its file carries.

    `supervisor`: address of the process that starts them again, "" where nobody does. `keys`: the
    folder of their CURVE keys; `secret`: that of this process, where it is not in a file.
    """

    entries: tuple[StageEntry, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    supervisor: str = ""
    keys: str = ""
    secret: str = field(default="", repr=False, compare=False)

    @property
    def keyed(self) -> bool:
        """Whether tcp is encrypted, and open to holders of the keys alone."""
        return bool(self.keys or self.secret)

    def bind(self, stage: str) -> str:
        """The host on which stage id `stage` listens, "" for that of its address."""
        return next((e.bind for e in self.entries if e.identity.id == stage), "")

    def has_tcp(self) -> bool:
        """Whether any stage is reached over tcp."""
        return bool(self.over_tcp())

    def over_tcp(self) -> list[str]:
        """Ids of the stages that are reached over tcp."""
        return [e.identity.id for e in self.entries if is_tcp(e.address)]

    def address(self, stage: str) -> str:
        """The address of stage id `stage`; ConfigurationError if there is no such stage."""
        if stage == SUPERVISOR and self.supervisor:
            return self.supervisor
        return self.entry(stage).address

    def entry(self, stage: str) -> StageEntry:
        """What the file says of stage id `stage`; ConfigurationError if there is no such stage."""
        for entry in self.entries:
            if entry.identity.id == stage:
                return entry
        raise ConfigurationError(f"the topology has no stage {stage!r}")

    def gpu(self, stage: str) -> int:
        """Which GPU of its host an engine takes: what `device` says ("1", "cuda:1"), else as many
        as there are engines before it on that host.
        """
        entry = self.entry(stage)
        number = entry.device.removeprefix("cuda").removeprefix(":")
        if number.isdecimal():
            return int(number)
        if entry.device not in ("", "cpu", "cuda"):
            raise ConfigurationError(f"{stage}: device {entry.device!r} is none; try cuda:0")
        engines = (e for e in self.entries if e.name == "engine" and e.host == entry.host)
        return [e.identity.id for e in engines].index(stage)

    def hosts(self) -> list[str]:
        """The names under `host`, in the file's order."""
        return list(dict.fromkeys(entry.host for entry in self.entries if entry.host))

    def ids(self, name: str | None = None) -> list[str]:
        """Ids of all stages, or of those called `name`, in the file's order."""
        return [e.identity.id for e in self.entries if name is None or e.name == name]

    def ranks(self, group: int = 0) -> int:
        """How many engines compute together in `group`; 1 if they are not listed."""
        return max(sum(e.name == "engine" and e.group == group for e in self.entries), 1)

    def groups(self) -> int:
        """How many data-parallel groups there are; 1 if their schedulers are not listed."""
        return max(len(self.ids("scheduler")), 1)

    def defaults(self) -> dict[str, object]:
        """What the file says of settings, and what follows from its stages."""
        return {"tp": self.ranks(), "dp": self.groups(), **self.settings}

    def without(self, name: str) -> Topology:
        """The same topology with no stage called `name`."""
        return replace(self, entries=tuple(e for e in self.entries if e.name != name))

    def to_toml(self) -> str:
        """The file's text; JSON strings are TOML basic strings."""
        heads = {"supervisor": self.supervisor, "keys": self.keys}
        lines = [f"{name} = {json.dumps(value)}" for name, value in heads.items() if value]
        lines += [""] * bool(lines)
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
    if settings.tp > 1 and prefix.startswith("inproc"):
        raise ConfigurationError("--in-process is one process, --tp needs one for each rank")
    ranks = range(settings.tp)
    identities = [Identity("gateway"), Identity("tokenizer")]
    for group in range(settings.dp):
        identities.append(Identity("scheduler", group))
        identities += [Identity("engine", group, rank) for rank in ranks]
    identities.append(Identity("detokenizer"))
    entries = (StageEntry(i.name, prefix + i.id, i.group, i.rank, i.index) for i in identities)
    return check_topology(Topology(tuple(entries)))


def load(path: str | Path) -> Topology:
    """Reads and checks a topology file; ConfigurationError names the file and what is wrong."""
    found = read(path)
    try:
        return check_topology(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"topology {path}: {error}") from None


def read(path: str | Path) -> Topology:
    """What a topology file says, for `checked`. A relative folder of keys is one beside the file.

    ConfigurationError if it cannot be read, or is no topology at all.
    """
    try:
        raw = tomllib.loads(Path(path).read_text())
        file = msgspec.convert(raw, _File)
        keys = str(Path(path).absolute().parent / file.keys) if file.keys else ""
        return Topology(tuple(file.stage), file.settings, file.supervisor, keys)
    except OSError as error:
        raise ConfigurationError(f"cannot read topology {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"topology {path}: {error}") from None


def check_topology(topology: Topology) -> Topology:
    """The topology itself, or ConfigurationError for what could not work."""
    seen: dict[str, str] = {}
    for entry in topology.entries:
        if entry.name not in NAMES:
            raise ConfigurationError(f"stage: name: {none_of(entry.name, NAMES)}")
        check_address(entry.address, topology.keyed)
        for name in PORT_OFFSETS:
            endpoint = socket_address(entry.address, name)
            if endpoint in seen:
                raise ConfigurationError(
                    f"{entry.identity.id} and {seen[endpoint]} both take {endpoint}"
                )
            seen[endpoint] = entry.identity.id
    for name in ("gateway", "tokenizer", "detokenizer"):
        count = len(topology.ids(name))
        if count != 1:
            raise ConfigurationError(f"this version needs exactly one {name}, not {count}")
    _check_groups(topology)
    _check_hosts(topology)
    return topology


def _check_hosts(topology: Topology) -> None:
    """With several hosts, each stage is somewhere where the others can reach it."""
    if len(topology.hosts()) < 2:
        return
    for entry in topology.entries:
        if not is_tcp(entry.address) or is_loopback(listen_host(entry.address)):
            raise ConfigurationError(
                f"{entry.identity.id} at {entry.address}: other hosts cannot reach it there"
            )


def _check_groups(topology: Topology) -> None:
    """Every group has one scheduler and the same number of ranks; both count from 0."""
    groups = sorted(e.group for e in topology.entries if e.name == "scheduler")
    if not groups or groups != list(range(len(groups))):
        raise ConfigurationError(f"schedulers must have groups 0, 1, ..., not {groups}")
    engines = [e for e in topology.entries if e.name == "engine"]
    for engine in engines:
        if engine.group not in groups:
            raise ConfigurationError(f"{engine.identity.id} has no scheduler-{engine.group}")
    wanted = list(range(topology.ranks()))
    for group in groups:
        ranks = sorted(e.rank for e in engines if e.group == group)
        if ranks != wanted:
            raise ConfigurationError(
                f"engines of group {group} must have ranks {wanted}, not {ranks}"
            )


def check_settings(settings: Settings, topology: Topology) -> Settings:
    """The settings themselves; ConfigurationError if they ask for other engines than there are."""
    if settings.tp != topology.ranks():
        raise ConfigurationError(
            f"--tp {settings.tp}: the topology has {topology.ranks()} engines in group 0"
        )
    if settings.dp != topology.groups():
        raise ConfigurationError(f"--dp {settings.dp}: the topology has {topology.groups()} groups")
    return settings


# Environment variables that are no settings.
STAGES_VARIABLE = "PIPEINFER_STAGES"
KEYS_VARIABLE = "PIPEINFER_KEYS"
SECRET_VARIABLE = "PIPEINFER_CURVE_KEY"  # the only one that no file can say
BIND_VARIABLE = "PIPEINFER_BIND"
VARIABLES = (STAGES_VARIABLE, KEYS_VARIABLE, SECRET_VARIABLE, BIND_VARIABLE)
STAGE_FIELDS = ("host", "device", "key", "bind")  # of a stage, beside its name and address


def deployed_topology(path: str | None, environ: Mapping[str, str]) -> Topology:
    """The topology of file `path`, changed by `environ`. Without a file the variables say it all.

    Raises ConfigurationError.
    """
    stages, keys, secret, bind = (environ.get(name, "") for name in VARIABLES)
    if not path and not stages:
        raise ConfigurationError(f"no topology: name its file, or its stages in {STAGES_VARIABLE}")
    # A file whose stages, or missing keys, are replaced need not hold for itself.
    found = read(path) if path else Topology(())
    entries = parse_stages(stages) if stages else found.entries
    if bind:
        entries = tuple(msgspec.structs.replace(e, bind=e.bind or bind) for e in entries)
    changed = replace(
        found, entries=entries, keys=keys or found.keys, secret=secret or found.secret
    )
    try:
        return check_topology(changed)
    except ConfigurationError as error:
        source = STAGES_VARIABLE if stages or not path else f"topology {path}"
        raise ConfigurationError(f"{source}: {error}") from None


def parse_stages(text: str) -> tuple[StageEntry, ...]:
    """The stages of PIPEINFER_STAGES: `ID=ADDRESS[,FIELD=VALUE...]`, separated by white space.

    Raises ConfigurationError, which quotes the word that is wrong.
    """
    return tuple(_stage(word) for word in text.split())


def _stage(word: str) -> StageEntry:
    stage, _, rest = word.partition("=")
    address, *more = rest.split(",")
    fields = {name: value for name, _, value in (pair.partition("=") for pair in more)}
    name, *numbers = stage.split("-")
    wrong = next((field for field in fields if field not in STAGE_FIELDS), None)
    if wrong is not None:
        raise ConfigurationError(f"{STAGES_VARIABLE}: {word}: {none_of(wrong, STAGE_FIELDS)}")
    counts = [int(number) for number in numbers if number.isdigit()]
    wanted = 2 if name == "engine" else 1
    if name not in NAMES or not address or len(counts) != len(numbers) or len(counts) != wanted:
        raise ConfigurationError(
            f"{STAGES_VARIABLE}: {word}: must be ID=ADDRESS, as gateway-0=tcp://front:7000 or "
            "engine-0-1=ipc:///run/pipeinfer/engine-0-1"
        )
    if name in ("engine", "scheduler"):
        entry = StageEntry(name, address, counts[0], counts[-1] if name == "engine" else 0)
    else:
        entry = StageEntry(name, address, index=counts[0])
    return msgspec.structs.replace(entry, **fields)


# --------------------------------------------------------------- addresses of a stage's sockets

TRANSPORTS = ("inproc", "ipc", "tcp")
PORT_OFFSETS = {"inbox": 0, "telemetry": 1, "plan": 2, "group": 3}
LAST_PORT = 65535 - max(PORT_OFFSETS.values())


def socket_address(address: str, socket: str) -> str:
    """The address of `socket` ("inbox", "telemetry", "plan", "group") of the stage at `address`."""
    transport, rest = split_address(address)
    if transport != "tcp":
        return f"{address}.{socket}"
    host, port = _host_port(address, rest)
    return f"tcp://{host}:{port + PORT_OFFSETS[socket]}"


def check_address(address: str, keyed: bool = False) -> None:
    """Raises ConfigurationError for an address that pipeinfer cannot or must not use.

    keyed: there are CURVE keys, so tcp may leave this host.
    """
    transport, rest = split_address(address)
    if transport == "tcp":
        host, port = _host_port(address, rest)
        if not 0 < port <= LAST_PORT:
            raise ConfigurationError(f"{address}: the port must be between 1 and {LAST_PORT}")
        if not keyed and not is_loopback(host):
            raise ConfigurationError(
                f"{address}: tcp addresses other than loopback need CURVE keys: make them with "
                "`pipeinfer keys` and name their folder in the topology, keys = FOLDER"
            )
        if host == "*" or _unspecified(host):
            raise ConfigurationError(
                f"{address}: others cannot connect to {host}; name this host, and bind = {host!r}"
            )
    elif transport == "ipc" and len(rest.encode()) > 90:
        raise ConfigurationError(
            f"{address}: a path for ipc has at most 90 bytes; if it is one of temporary files, set "
            "TMPDIR to a shorter folder"
        )


def split_address(address: str) -> tuple[str, str]:
    """("tcp", "host:port") of "tcp://host:port"."""
    transport, separator, rest = address.partition("://")
    if not separator or transport not in TRANSPORTS or not rest:
        raise ConfigurationError(
            f"address {address!r} must begin with one of inproc://, ipc://, tcp://"
        )
    return transport, rest


def is_tcp(address: str) -> bool:
    """Whether it can be reached from other hosts, as far as its transport goes."""
    return address.startswith("tcp://")


def listen_host(address: str) -> str:
    """Where a stage at `address` listens for TCP beside the bus: loopback unless it is tcp."""
    transport, rest = split_address(address)
    return _host_port(address, rest)[0].strip("[]") if transport == "tcp" else "127.0.0.1"


def bind_addresses(address: str, socket: str, bind: str = "") -> list[str]:
    """Where to bind `socket` of the stage at `address`: for a host name, all that it means.

    bind: a host to listen on instead, "*" for all; peers reach it under `address` (containers,
    NAT). Raises ConfigurationError for a name that means nothing.
    """
    derived = socket_address(address, socket)
    transport, rest = split_address(derived)
    if transport != "tcp":
        return [derived]
    host, port = _host_port(derived, rest)
    host = bind.strip("[]") or host.strip("[]")
    if host == "*":
        return [f"tcp://*:{port}"]
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"{derived}: host {host!r}: {error.strerror}") from None
    numbers = dict.fromkeys(str(place[0]) for *_, place in found)
    return [f"tcp://[{n}]:{port}" if ":" in n else f"tcp://{n}:{port}" for n in numbers]


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback ranges of IPv4 and IPv6."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _host_port(address: str, rest: str) -> tuple[str, int]:
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigurationError(f"address {address!r} must be tcp://HOST:PORT")
    return host, int(port)
