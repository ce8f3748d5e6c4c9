"""Which key a socket shows and which it expects: CURVE on every tcp socket of a keyed topology.

Knows stages by id and their keys by name; files are keys.py's business, strangers gate.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq

from pipeinfer.bus import keys
from pipeinfer.bus.keys import Pair
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology.topology import Topology

DOMAIN = b"pipeinfer"  # a socket with a domain asks the gate, and takes no peer older than ZMTP 3


@dataclass(frozen=True)
class Keyring:
    """The keys that one process needs: its own, and the public ones of all stages, by stage id."""

    own: Pair
    stages: dict[str, bytes]

    @property
    def allowed(self) -> frozenset[bytes]:
        """Public keys of whoever may connect."""
        return frozenset(self.stages.values())

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before it binds: only peers that know our key, and that the gate lets in, connect."""
        socket.curve_server = True
        self._show(socket)
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in while there is no gate

    def call(self, socket: zmq.Socket[bytes], stage: str) -> None:
        """Before it connects: only to the holder of the key of stage id `stage`."""
        socket.curve_serverkey = self.stages[stage]
        self._show(socket)

    def _show(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret


def keyring(topology: Topology, stage: str = "") -> Keyring | None:
    """The keys of stage id `stage`, None if the topology has none.

    For who is no stage ("") it is the first key of the topology whose secret lies here. Raises
    ConfigurationError for a key that is missing, readable by others, or not the public one's.
    """
    if not topology.keyed:
        return None
    names = {entry.identity.id: entry.key or keys.DEFAULT for entry in topology.entries}
    own = _own(topology, [names[stage]] if stage in names else list(dict.fromkeys(names.values())))
    folder = Path(topology.keys)
    public = {own.name: own.public}
    for name in names.values():
        keys.check_name(name)
        if name == own.name and topology.keys and (folder / f"{name}.pub").exists():
            if keys.load_public(folder, name) != own.public:
                raise ConfigurationError(f"key {name}: {name}.pub does not belong to its secret")
        elif name not in public:
            public[name] = _public(topology, name)
    return Keyring(own, {id_: public[name] for id_, name in names.items()})


def _own(topology: Topology, names: list[str]) -> Pair:
    if topology.secret:
        return keys.pair(names[0], topology.secret.encode(), "PIPEINFER_CURVE_KEY")
    folder = Path(topology.keys)
    here = [name for name in names if (folder / f"{name}.key").exists()]
    if not here:
        listed = " or ".join(str(folder / f"{name}.key") for name in names)
        raise ConfigurationError(f"no secret key: {listed} is not there; see `pipeinfer keys`")
    return keys.load_pair(folder, here[0])


def _public(topology: Topology, name: str) -> bytes:
    if not topology.keys:
        raise ConfigurationError(f"key {name}: PIPEINFER_KEYS must name the folder of {name}.pub")
    return keys.load_public(Path(topology.keys), name)
