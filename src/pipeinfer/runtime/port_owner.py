"""Whose a TCP port is that somebody listens on: its process, as far as this user may see it.

Reads /proc, so it knows nothing on other systems; opens no sockets.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeinfer.runtime.find import running_servers

PROC = Path("/proc")
LISTEN_STATE = "0A"  # the state of a socket in /proc/net/tcp
MAX_NAME_CHARS = 60  # characters of a process's name
UNSEEN = "by a process that this user cannot see"


def port_owner(host: str, port: int) -> str:
    """What a message says of whose an address is: "by process 4711 (nginx)", of a server of
    pipeinfer also its model. `host`: a number, "" for all of this host's. "" if nobody is found."""
    inodes = set(_inodes(host, port))
    pids = sorted(_holders(inodes))
    # A server that starts has bound its port and does not listen yet: only its own word tells.
    for server in running_servers():
        served = server.served
        if server.pid in pids or (not inodes and served is not None and served.port == port):
            model = f", model {served.model}" if served is not None else ""
            return f"by process {server.pid} (pipeinfer serve{model})"
    if not inodes:
        return ""
    return f"by process {pids[0]} ({_name(pids[0])})" if pids else UNSEEN


def _inodes(host: str, port: int) -> Iterator[str]:
    """Of the sockets that listen on `port` at an address that `host` meets."""
    wanted = ipaddress.ip_address(host.partition("%")[0] or "::")
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no such family here, or no /proc that may be read
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                address, _, number = local.partition(":")
                if state == LISTEN_STATE and int(number, 16) == port and _meets(wanted, address):
                    yield more[5]


def _meets(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address, address: str) -> bool:
    """`address`: words of 32 bits in hexadecimal, each in the order of this machine's bytes."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    other = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    if isinstance(other, ipaddress.IPv6Address) and other.ipv4_mapped is not None:
        other = other.ipv4_mapped
    return wanted == other or wanted.is_unspecified or other.is_unspecified


def _holders(inodes: set[str]) -> Iterator[int]:
    """The processes of this user that have one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in PROC.glob("[0-9]*/fd") if wanted else ():
        with suppress(OSError):  # it ended meanwhile, or is somebody else's
            if any(_link(file) in wanted for file in folder.iterdir()):
                yield int(folder.parent.name)


def _link(file: Path) -> str:
    try:
        return os.readlink(file)  # noqa: PTH115 (a Path would lose "socket:[...]"'s form)
    except OSError:  # closed meanwhile
        return ""


def _name(pid: int) -> str:
    """The program's name; of Python also which module or script it runs. No further argument is
    shown: some are secret."""
    try:
        name = (PROC / str(pid) / "comm").read_text().strip()
        words = (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it has ended
        return "?"
    if Path(words[0]).name.startswith("python"):
        what, *rest = _program(words[1:]) or [""]
        if what == "-m" and rest:
            more = 2 if rest[0].startswith("pipeinfer") else 1  # its command, or its stage
            name = " ".join(["python -m", *rest[:more]])
        elif what and not what.startswith("-"):
            name = f"python {Path(what).name}"
    return name[:MAX_NAME_CHARS]


def _program(words: list[str]) -> list[str]:
    """Python's arguments from the script, or from the flag of a module or of code, on."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]  # these have a value
    return words
