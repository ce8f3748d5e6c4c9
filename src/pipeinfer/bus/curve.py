"""CURVE on every TCP socket of a topology with keys: key files, which key a socket shows and which
it expects, and which peers may connect.

    NAME.key  the secret key, one line of Z85 text, mode 0600
    NAME.pub  the public key, one line of Z85 text

docs/topology.md lists which process needs which file. Knows stages by id, and no message.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pipeinfer.command_line import counted
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology

DEFAULT_KEY = "pipeinfer"  # name of the key pair of a stage whose entry has no `key`
KEY_CHARS = 40  # characters of a key
# Folder of secrets that an orchestrator mounts into one container alone, with any file mode.
SECRETS = Path("/run/secrets")


@dataclass(frozen=True)
class KeyPair:
    """A key pair of this process. `repr` shows only its name."""

    name: str
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.name!r})"


def create_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a key pair; returns (secret file, public file). Raises ConfigurationError if a file
    exists."""
    check_key_name(name)
    public, secret = zmq.curve_keypair()
    files = folder / f"{name}.key", folder / f"{name}.pub"
    for file in files:
        if file.exists():
            raise ConfigurationError(f"{file} exists; a key is never overwritten")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, key, mode in zip(files, (secret, public), (0o600, 0o644), strict=True):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(key + b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {folder}: {error.strerror}") from None
    return files


def check_key_name(name: str) -> None:
    """Raises ConfigurationError for a name that is no plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigurationError(f"key {name!r}: a name has letters, digits, '.', '-' and '_'")


def load_key_pair(folder: Path, name: str) -> KeyPair:
    """The pair of NAME.key. Raises ConfigurationError if the file cannot, or must not, be used."""
    file = folder / f"{name}.key"
    secret = _line(file)
    if not file.is_relative_to(SECRETS) and file.stat().st_mode & 0o077:
        raise ConfigurationError(f"{file}: others may read this secret key; chmod 600 it")
    return key_pair(name, secret, str(file))


def key_pair(name: str, secret: bytes, source: str) -> KeyPair:
    """The pair of a secret key in Z85; `source`: where it comes from, for errors."""
    if len(secret) != KEY_CHARS:
        raise ConfigurationError(f"{source}: a key has {KEY_CHARS} characters, not {len(secret)}")
    try:
        return KeyPair(name, zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigurationError(f"{source}: this is no CURVE key") from None


def load_public(folder: Path, name: str) -> bytes:
    """The public key of NAME.pub, or of NAME.key if only that file is there."""
    file = folder / f"{name}.pub"
    if not file.exists() and (folder / f"{name}.key").exists():
        return load_key_pair(folder, name).public
    key = _line(file)
    if len(key) != KEY_CHARS:
        raise ConfigurationError(f"{file}: a key has {KEY_CHARS} characters, not {len(key)}")
    return key


def _line(file: Path) -> bytes:
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read key {file}: {error.strerror}") from None


LOG_PERIOD = 60.0  # seconds between two lines
MAX_REASONS = 8  # reasons that a line names; the others are counted only


class RefusalLog:
    """Counts refusals by reason.

    Attributes:
    - total: since the start
    """

    def __init__(self, log: logging.Logger) -> None:
        self.total = 0
        self._log = log
        self._counts: dict[str, int] = {}
        self._suppressed = 0
        self._next = 0.0

    def record(self, reason: str) -> None:
        """Counts a refusal; memory stays bounded, whatever the reasons are."""
        self.total += 1
        if reason in self._counts or len(self._counts) < MAX_REASONS:
            self._counts[reason] = self._counts.get(reason, 0) + 1
        else:
            self._suppressed += 1

    def log_suppressed(self, now: float) -> None:
        """Logs the refusals since the last line, at most once in LOG_PERIOD. `now`: seconds."""
        if not self._counts or now < self._next:
            return
        named = [f"{reason} ({counted(count, 'time')})" for reason, count in self._counts.items()]
        if self._suppressed:
            named.append(f"others ({counted(self._suppressed, 'time')})")
        self._log.warning("handshakes refused: %s", "; ".join(named))
        self._counts.clear()
        self._suppressed = 0
        self._next = now + LOG_PERIOD


log = logging.getLogger(__name__)

ZAP = "inproc://zeromq.zap.01"
POLL_MS = 1_000
BY_PROTOCOL, BY_KEY = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH
BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class CurveAuthenticator:
    """Lets holders of `allowed` keys connect to the sockets of `context`, and logs once a minute
    which peers were refused. A context has at most one authenticator.

    Answers libzmq's authentication requests (ZAP, ZeroMQ RFC 27), and reads the events of
    handshakes that failed before libzmq asked. Runs in a thread of its own, so that a busy stage
    delays no answer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self._context = context
        self._allowed = {z85.decode(key) for key in allowed}
        self._refusals = RefusalLog(log)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        place = f"inproc://curve-{id(self)}"
        self._wakeup = context.socket(zmq.PAIR)
        self._wakeup_receiver = context.socket(zmq.PAIR)
        self._wakeup_receiver.bind(place)
        self._wakeup.connect(place)
        self._new: SimpleQueue[tuple[zmq.Socket[bytes], str]] = SimpleQueue()
        self._watched = 0
        self._thread = threading.Thread(target=self._run, name="curve authenticator", daemon=True)
        self._thread.start()

    @property
    def refused_handshakes(self) -> int:
        """Number of handshakes that were refused or failed, since the start."""
        return self._refusals.total

    def watch_socket(self, socket: zmq.Socket[bytes], peer: str) -> None:
        """Counts the failed handshakes of `socket` from now on; to be called before the socket
        binds, or connects to `peer`.

        - peer: "" for a socket that binds
        """
        self._watched += 1
        place = f"inproc://curve-{id(self)}-{self._watched}"
        socket.monitor(place, BY_PROTOCOL | BY_KEY | BROKEN_OFF)
        monitor = self._context.socket(zmq.PAIR)
        monitor.linger, monitor.rcvhwm = 0, 0
        monitor.connect(place)
        self._new.put((monitor, peer))
        self._wakeup.send(b"new")

    def close(self) -> None:
        """Stops letting peers in. To be called when the watched sockets are closed."""
        self._wakeup.send(b"")
        self._thread.join()
        self._wakeup.close(linger=0)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        peers: dict[zmq.Socket[bytes], str] = {}
        poller = zmq.Poller()
        for socket in (self._zap, self._wakeup_receiver):
            poller.register(socket, zmq.POLLIN)
        open_ = True
        while open_:
            for socket, _ in poller.poll(POLL_MS):
                if socket is self._zap:
                    self._answer(self._zap.recv_multipart())
                elif socket is self._wakeup_receiver:
                    open_ = bool(self._wakeup_receiver.recv())
                elif not self._on_monitor_event(socket.recv_multipart(), peers[socket]):
                    poller.unregister(socket)
                    del peers[socket]
                    socket.close(linger=0)
            while not self._new.empty():
                monitor, peer = self._new.get()
                peers[monitor] = peer
                poller.register(monitor, zmq.POLLIN)
            self._refusals.log_suppressed(time.monotonic())
        for socket in (self._zap, self._wakeup_receiver, *peers):
            socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """Answers one ZAP request: version, id, domain, address, identity, mechanism,
        credentials."""
        if len(request) < 6:  # libzmq asks otherwise; but without an answer no other peer gets one
            self._refusals.record(f"a question of {len(request)} parts about nobody")
            number = request[1] if len(request) > 1 else b""
            self._zap.send_multipart([b"1.0", number, b"500", b"malformed", b"", b""])
            return
        version, number, _, address, _, mechanism, *credentials = request
        key = credentials[0] if mechanism == b"CURVE" and credentials else b""
        if key in self._allowed:
            status, text = b"200", b"OK"
        else:
            self._refusals.record(f"{address.decode('ascii', 'replace')} shows an unknown key")
            # Not 400: after that a peer never tries again, and its queue is lost with the attempt.
            status, text = b"300", b"unknown key"
        self._zap.send_multipart([version, number, status, text, b"", b""])

    def _on_monitor_event(self, parts: list[bytes], peer: str) -> bool:
        """Takes one event of a watched socket; False when it was the last."""
        try:
            monitor_event = parse_monitor_message(parts)
        except (RuntimeError, ValueError) as error:
            self._refusals.record(f"an event of a socket that cannot be read: {error}")
            return True
        event, place = monitor_event["event"], monitor_event["endpoint"].decode("ascii", "replace")
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        if peer:
            self._refusals.record(f"{peer} at {place} breaks off the handshake; is each key right?")
        elif event != BY_KEY:  # a wrong key is known from the ZAP request, with its address
            self._refusals.record(f"somebody at {place} does not know its key")
        return True


# With a domain libzmq asks the authenticator, and takes no peer older than ZMTP 3.
ZAP_DOMAIN = b"pipeinfer"


@dataclass(frozen=True)
class Keyring:
    """The keys that one process needs: its own, and the public ones of all stages, by stage id."""

    own: KeyPair
    stages: dict[str, bytes]

    @property
    def allowed(self) -> frozenset[bytes]:
        """Public keys of the peers that may connect."""
        return frozenset(self.stages.values())

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Gives `socket` its keys before it binds: only peers that have this process's public key,
        and that the authenticator allows, connect."""
        socket.curve_server = True
        self._show(socket)
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no peer gets in without an authenticator

    def secure_client(self, socket: zmq.Socket[bytes], stage: str) -> None:
        """Gives `socket` its keys before it connects: only to the holder of the key of stage id
        `stage`."""
        socket.curve_serverkey = self.stages[stage]
        self._show(socket)

    def _show(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret


def keyring(topology: Topology, stage: str = "") -> Keyring | None:
    """The keys of stage id `stage`; None if the topology has none.

    A process that is no stage ("") gets the first key of the topology whose secret is on this host.
    Raises ConfigurationError for a key that is missing, readable by others, or not the public
    one's.
    """
    if not topology.keyed:
        return None
    names = {entry.identity.id: entry.key or DEFAULT_KEY for entry in topology.entries}
    own = _own(topology, [names[stage]] if stage in names else list(dict.fromkeys(names.values())))
    folder = Path(topology.keys)
    public = {own.name: own.public}
    for name in names.values():
        check_key_name(name)
        if name == own.name and topology.keys and (folder / f"{name}.pub").exists():
            if load_public(folder, name) != own.public:
                raise ConfigurationError(f"key {name}: {name}.pub does not belong to its secret")
        elif name not in public:
            public[name] = _public(topology, name)
    return Keyring(own, {id_: public[name] for id_, name in names.items()})


def _own(topology: Topology, names: list[str]) -> KeyPair:
    if topology.secret:
        return key_pair(names[0], topology.secret.encode(), "PIPEINFER_CURVE_KEY")
    folder = Path(topology.keys)
    here = [name for name in names if (folder / f"{name}.key").exists()]
    if not here:
        listed = " or ".join(str(folder / f"{name}.key") for name in names)
        raise ConfigurationError(f"no secret key: {listed} is not there; see `pipeinfer keys`")
    return load_key_pair(folder, here[0])


def _public(topology: Topology, name: str) -> bytes:
    if not topology.keys:
        raise ConfigurationError(f"key {name}: PIPEINFER_KEYS must name the folder of {name}.pub")
    return load_public(Path(topology.keys), name)
