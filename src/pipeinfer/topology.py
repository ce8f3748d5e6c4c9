"""Topology: which stages a deployment has, where each runs, and the addresses of its sockets.

A topology is read from a file, made for one host, or taken from environment variables, as
containers get them from an orchestrator. A stage has one address. A stage binds up to four sockets,
whose addresses follow from the stage's:

- inbox (PULL): every stage.
- telemetry (PUB): every stage.
- plan (PUB): a scheduler.
- group (REP): rank 0, if its group has several ranks, which meet there.

With `tcp` the sockets take four ports in a row, with `ipc` and `inproc` four names. This module
opens no socket and reads no key. docs/topology.md has the file's format.
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
from urllib.parse import urlsplit

import msgspec

from pipeinfer.command_line import counted, none_of
from pipeinfer.core import engine_id, stage_id
from pipeinfer.settings import ConfigurationError, Settings

NAMES = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
# Stages outside of groups, of which there may be several, and the settings with their numbers.
FRONTS = {"gateway": "gateways", "tokenizer": "tokenizers", "detokenizer": "detokenizers"}
# not a stage: command lines send it requests that stages cannot carry out
SUPERVISOR = "supervisor-0"


class Identity(msgspec.Struct, frozen=True):
    """A process of the pipeline.

    Attributes:
    - name: of NAMES
    - group: data-parallel group of a scheduler or an engine
    - rank: of an engine within its group
    - index: of a gateway, a tokenizer or a detokenizer
    """

    name: str
    group: int = 0
    rank: int = 0
    index: int = 0

    @property
    def id(self) -> str:
        """The stage id: "scheduler-GROUP", "engine-GROUP-RANK", or "NAME-INDEX", such as
        "gateway-0"."""
        if self.name == "engine":
            return engine_id(self.group, self.rank)
        return stage_id(self.name, self.group if self.name == "scheduler" else self.index)


class StageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A [[stage]] table of a topology file.

    Attributes:
    - name, group, rank, index: as in Identity
    - address: under which other stages reach this one, "tcp://HOST:PORT", "ipc://PATH" or
      "inproc://NAME"
    - host: name of the host that the stage runs on; "": not given
    - device: of an engine, "cpu", "cuda", "cuda:1" or "1"; "": see `Topology.gpu`
    - key: name of the stage's CURVE key; "": the default one
    - bind: the host to listen on, if that is not the address's; "": the address's
    - http: of a gateway, "http://HOST:PORT" at which gateways of other hosts ask it for answers
      that it keeps; "": they do not
    """

    name: str
    address: str
    group: int = 0
    rank: int = 0
    index: int = 0
    host: str = ""
    device: str = ""
    key: str = ""
    bind: str = ""
    http: str = ""

    @property
    def identity(self) -> Identity:
        """The stage's name and numbers."""
        return Identity(self.name, self.group, self.rank, self.index)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stage: list[StageEntry]
    settings: dict[str, Any] = {}
    supervisor: str = ""
    keys: str = ""


@dataclass(frozen=True)
class Topology:
    """All stages of one deployment, and the settings in its file.

    Attributes:
    - entries: the stages, in the file's order
    - settings: the file's [settings], by name
    - supervisor: address of the process that restarts stages; "": there is none
    - keys: the folder of the CURVE keys; "": there is none
    - secret: this process's CURVE secret key, if no file has it; "": a file has it, or there are no
      keys
    """

    entries: tuple[StageEntry, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    supervisor: str = ""
    keys: str = ""
    secret: str = field(default="", repr=False, compare=False)

    @property
    def keyed(self) -> bool:
        """Whether there are CURVE keys: tcp is encrypted then, and only holders of a key are let
        in."""
        return bool(self.keys or self.secret)

    def bind(self, stage: str) -> str:
        """The host on which stage id `stage` listens; "": the host of its address."""
        return next((e.bind for e in self.entries if e.identity.id == stage), "")

    def has_tcp(self) -> bool:
        """Whether any stage is reached over tcp."""
        return bool(self.over_tcp())

    def over_tcp(self) -> list[str]:
        """Ids of the stages that are reached over tcp, in the file's order."""
        return [e.identity.id for e in self.entries if is_tcp(e.address)]

    def address(self, stage: str) -> str:
        """The address of stage id `stage`, or of the supervisor. Raises ConfigurationError if there
        is none.
        """
        if stage == SUPERVISOR and self.supervisor:
            return self.supervisor
        return self.entry(stage).address

    def entry(self, stage: str) -> StageEntry:
        """The entry of stage id `stage`. Raises ConfigurationError if there is none."""
        for entry in self.entries:
            if entry.identity.id == stage:
                return entry
        raise ConfigurationError(f"the topology has no stage {stage!r}")

    def gpu(self, stage: str) -> int:
        """The index of the GPU that engine `stage` uses on its host.

        The number in `device` ("1", "cuda:1") if it has one, else the number of engines on that
        host that stand before it in the file. Raises ConfigurationError for a device of another
        kind.
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
        """The distinct names in `host`, in the file's order."""
        return list(dict.fromkeys(entry.host for entry in self.entries if entry.host))

    def ids(self, name: str | None = None) -> list[str]:
        """Ids of all stages, or of the stages named `name`, in the file's order."""
        return [e.identity.id for e in self.entries if name is None or e.name == name]

    def stages_on(self, host: str, name: str) -> list[StageEntry]:
        """The stages named `name` on `host` ("" for any), in the file's order. Raises
        ConfigurationError if there are none."""
        found = [e for e in self.entries if e.name == name and (not host or e.host == host)]
        if not found:
            where = f" on host {host}" if host else ""
            raise ConfigurationError(f"the topology has no stage {name!r}{where}")
        return found

    def ranks(self, group: int = 0) -> int:
        """The number of tensor-parallel ranks of `group`; 1 if the topology lists no engines."""
        return max(sum(e.name == "engine" and e.group == group for e in self.entries), 1)

    def groups(self) -> int:
        """The number of data-parallel groups; 1 if the topology lists no schedulers."""
        return max(len(self.ids("scheduler")), 1)

    def defaults(self) -> dict[str, object]:
        """Settings by name: the numbers of processes by the stages, then the file's [settings]."""
        return {**self.counts(), **self.settings}

    def counts(self) -> dict[str, int]:
        """The settings with numbers of processes, counted from the stages."""
        fronts = {setting: max(len(self.ids(name)), 1) for name, setting in FRONTS.items()}
        return {"tp": self.ranks(), "dp": self.groups(), **fronts}

    def without(self, name: str) -> Topology:
        """A copy without the stages named `name`."""
        return replace(self, entries=tuple(e for e in self.entries if e.name != name))

    def to_toml(self) -> str:
        """The text of a topology file; JSON strings are valid TOML basic strings."""
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
    """The topology of one host: the address of each stage is `prefix` followed by the stage's id.

    - settings: for the numbers of processes (`Topology.counts`)
    - prefix: such as "ipc:///tmp/x/" or "inproc://run-1-"

    Raises ConfigurationError for inproc with several ranks or gateways, and as `check_topology`
    does.
    """
    if prefix.startswith("inproc"):
        if settings.tp > 1:
            raise ConfigurationError("--in-process is one process, --tp needs one for each rank")
        if settings.gateways > 1:
            raise ConfigurationError("--in-process is one process, --gateways needs one for each")
    ranks = range(settings.tp)
    identities = [Identity("gateway", index=index) for index in range(settings.gateways)]
    identities += [Identity("tokenizer", index=index) for index in range(settings.tokenizers)]
    for group in range(settings.dp):
        identities.append(Identity("scheduler", group))
        identities += [Identity("engine", group, rank) for rank in ranks]
    identities += [Identity("detokenizer", index=index) for index in range(settings.detokenizers)]
    entries = (StageEntry(i.name, prefix + i.id, i.group, i.rank, i.index) for i in identities)
    return check_topology(Topology(tuple(entries)))


def load(path: str | Path) -> Topology:
    """Reads and checks a topology file. Raises ConfigurationError, which names the file and the
    fault.
    """
    found = read(path)
    try:
        return check_topology(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"topology {path}: {error}") from None


def read(path: str | Path) -> Topology:
    """Reads a topology file without checking it; `check_topology` does that.

    A relative folder of keys is relative to the file. Raises ConfigurationError if the file cannot
    be read or is not a topology.
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
    """Returns `topology`. Raises ConfigurationError if it cannot work: unknown stage names, wrong
    addresses, two sockets at one address, missing or surplus stages.
    """
    seen: dict[str, str] = {}
    for entry in topology.entries:
        if entry.name not in NAMES:
            raise ConfigurationError(f"stage: name: {none_of(entry.name, NAMES)}")
        check_address(entry.address, topology.keyed)
        _check_http(entry)
        for name in PORT_OFFSETS:
            endpoint = socket_address(entry.address, name)
            if endpoint in seen:
                raise ConfigurationError(
                    f"{entry.identity.id} and {seen[endpoint]} both take {endpoint}"
                )
            seen[endpoint] = entry.identity.id
    for name in FRONTS:
        indices = sorted(e.index for e in topology.entries if e.name == name)
        if not indices or indices != list(range(len(indices))):
            raise ConfigurationError(f"{name}s must have indices 0, 1, ..., not {indices}")
    _check_groups(topology)
    _check_hosts(topology)
    return topology


def _check_http(entry: StageEntry) -> None:
    if entry.http and not (entry.name == "gateway" and _is_http_place(entry.http)):
        what = "must be http://HOST:PORT or https://HOST:PORT, of a gateway"
        raise ConfigurationError(f"{entry.identity.id}: http = {entry.http!r} {what}")


def _is_http_place(url: str) -> bool:
    """Whether `url` is a scheme, a host and perhaps a port, and nothing else."""
    scheme, _, place = url.partition("://")
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unbalanced bracket, or a port that is not a number
        return False
    alone = parts.netloc == place and not set(place) & set("@\\") and place.isprintable()
    return scheme in ("http", "https") and named and alone and " " not in place


def _check_hosts(topology: Topology) -> None:
    """Raises ConfigurationError if there are several hosts and a stage has an address that other
    hosts cannot reach."""
    if len(topology.hosts()) < 2:
        return
    for entry in topology.entries:
        if not is_tcp(entry.address) or is_loopback(listen_host(entry.address)):
            raise ConfigurationError(
                f"{entry.identity.id} at {entry.address}: other hosts cannot reach it there"
            )


def _check_groups(topology: Topology) -> None:
    """Raises ConfigurationError unless every group has one scheduler and the same number of ranks,
    and groups and ranks count from 0."""
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
    """Returns `settings`. Raises ConfigurationError if one with a number of processes differs from
    `topology`."""
    of = {"tp": "engine", "dp": "group", **{setting: name for name, setting in FRONTS.items()}}
    for setting, count in topology.counts().items():
        wanted: int = getattr(settings, setting)
        if wanted != count:
            where = " in group 0" if setting == "tp" else ""
            there = counted(count, of[setting])
            raise ConfigurationError(f"--{setting} {wanted}: the topology has {there}{where}")
    return settings


# Environment variables that are not settings.
STAGES_VARIABLE = "PIPEINFER_STAGES"
KEYS_VARIABLE = "PIPEINFER_KEYS"
SECRET_VARIABLE = "PIPEINFER_CURVE_KEY"  # the only variable that a topology file cannot replace
BIND_VARIABLE = "PIPEINFER_BIND"
VARIABLES = (STAGES_VARIABLE, KEYS_VARIABLE, SECRET_VARIABLE, BIND_VARIABLE)
STAGE_FIELDS = ("host", "device", "key", "bind", "http")  # that PIPEINFER_STAGES can give


def deployed_topology(path: str | None, environ: Mapping[str, str]) -> Topology:
    """The topology of a deployment: the file `path`, overridden by environment variables.

    - path: a topology file; None: PIPEINFER_STAGES must list the stages
    - environ: the environment; the variables in VARIABLES are read

    Raises ConfigurationError.
    """
    stages, keys, secret, bind = (environ.get(name, "") for name in VARIABLES)
    if not path and not stages:
        raise ConfigurationError(f"no topology: name its file, or its stages in {STAGES_VARIABLE}")
    # Only the result is checked: variables may replace wrong or missing values of the file.
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
    """The stages in `text`, the value of PIPEINFER_STAGES: words `ID=ADDRESS[,FIELD=VALUE...]`,
    separated by white space. Raises ConfigurationError, which quotes the wrong word."""
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
    """The address of one socket of the stage at `address`.

    - socket: "inbox", "telemetry", "plan" or "group"
    """
    transport, rest = split_address(address)
    if transport != "tcp":
        return f"{address}.{socket}"
    host, port = _host_port(address, rest)
    return f"tcp://{host}:{port + PORT_OFFSETS[socket]}"


def check_address(address: str, keyed: bool = False) -> None:
    """Raises ConfigurationError for an address that pipeinfer cannot or must not use.

    - keyed: whether there are CURVE keys; without them tcp must stay on loopback
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
    """Splits an address: ("tcp", "HOST:PORT") for "tcp://HOST:PORT". Raises ConfigurationError for
    an unknown transport."""
    transport, separator, rest = address.partition("://")
    if not separator or transport not in TRANSPORTS or not rest:
        raise ConfigurationError(
            f"address {address!r} must begin with one of inproc://, ipc://, tcp://"
        )
    return transport, rest


def is_tcp(address: str) -> bool:
    """Whether the transport of `address` is tcp, the only one that reaches other hosts."""
    return address.startswith("tcp://")


def listen_host(address: str) -> str:
    """The host on which the stage at `address` opens TCP ports besides those of the bus: the
    address's host for tcp, else loopback.
    """
    transport, rest = split_address(address)
    return _host_port(address, rest)[0].strip("[]") if transport == "tcp" else "127.0.0.1"


def bind_addresses(address: str, socket: str, bind: str = "") -> list[str]:
    """The addresses to bind `socket` to, for the stage at `address`: one for each IP address of a
    host name.

    - socket: as in `socket_address`
    - bind: the host to listen on instead of the address's, "*" for all interfaces. Peers still
      connect to `address` (containers, NAT)

    Raises ConfigurationError if the host cannot be resolved.
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
    """Whether `host` is localhost or in the loopback ranges of IPv4 and IPv6."""
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
