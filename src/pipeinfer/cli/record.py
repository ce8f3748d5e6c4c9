"""`pipeinfer record`: has stages of a running server record what they take and give.

Knows how to ask over the bus and what to print; stages write the files, where they run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.cli.running import add_server_flags, announced_topology
from pipeinfer.command_line import CommandLine
from pipeinfer.control import RecordingState, StartRecording, StopRecording
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology

ANSWER_TIMEOUT = 10.0  # seconds in which a stage must be heard and must answer
HEARTBEAT_TIMEOUT = 5.0  # seconds without a heartbeat after which a stage counts as lost
DEFAULT_MAX_BYTES = 1 << 30  # of one file, if nobody says otherwise: whoever asked may be gone
KEY_FILE, KEY_BYTES = "redaction.key", 32


def run(arguments: Sequence[str]) -> int:
    """0 when every recording ended in order; 1 if one failed or its stage was lost."""
    options = parser().parse_args(arguments)
    topology = announced_topology(options)
    stages = _chosen(topology, options.stage)
    with ControlClient(topology, zmq.Context.instance()) as caller:
        return _Session(caller, stages, _request(options)).run()


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer record",
        description="Records stages of a running server into DIR, one file each, until a limit is "
        "reached or Ctrl-C is pressed. `pipeinfer replay` reads the files.",
    )
    add = command_line.add_argument
    add_server_flags(command_line)
    add("--stage", metavar="STAGE", action="append", help="engine, scheduler-0 ...; default: all")
    add("--out", metavar="DIR", required=True, help="as the stages' hosts see it")
    add("--seconds", type=_positive(float), default=0.0, metavar="N")
    add("--messages", type=_positive(int), default=0, metavar="M", help="of each stage")
    add(
        "--max-bytes",
        type=_positive(int),
        default=DEFAULT_MAX_BYTES,
        metavar="B",
        help="of each file",
    )
    redact = f"leave out texts, rename token ids; without KEYFILE the key is in DIR/{KEY_FILE}"
    add("--redact", nargs="?", const="", metavar="KEYFILE", help=redact)
    fresh = (
        "an engine begins anew with empty memory, so that a replay can compute all that it did; "
        "streams pause for a moment. On by default unless redacted"
    )
    add("--fresh-epoch", action=argparse.BooleanOptionalAction, default=None, help=fresh)
    return command_line


def _positive(kind: type[float] | type[int]):
    def convert(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError("must be above 0")
        return value

    return convert


def _request(options: argparse.Namespace) -> StartRecording:
    out = Path(options.out).absolute()
    key = "" if options.redact is None else _key(options.redact, out)
    fresh = options.redact is None if options.fresh_epoch is None else options.fresh_epoch
    return StartRecording(
        recording=f"{os.getpid()}-{time.time_ns()}",
        out=str(out),
        seconds=options.seconds,
        messages=options.messages,
        max_bytes=options.max_bytes,
        fresh_epoch=fresh,
        redact=key,
    )


def _key(file: str, out: Path) -> str:
    """The key as hexadecimal text; made and kept in `out` if no file is named."""
    path = Path(file) if file else out / KEY_FILE
    try:
        if not file and not path.exists():
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as key_file:
                key_file.write(secrets.token_hex(KEY_BYTES) + "\n")
        text = path.read_text().strip()
        if not 16 <= len(bytes.fromhex(text)) <= 64:
            raise ValueError
    except OSError as error:
        raise ConfigurationError(f"--redact: {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(
            f"--redact: {path}: a key is 32 to 128 hexadecimal digits"
        ) from None
    return text


def _chosen(topology: Topology, named: list[str] | None) -> list[str]:
    """Stage ids, in the topology's order, by id or by name."""
    everything = topology.ids()
    if not named:
        return everything
    chosen: set[str] = set()
    for name in named:
        ids = {name} & set(everything) or set(topology.ids(name))
        if not ids:
            raise ConfigurationError(f"--stage: no {name!r}; there are {', '.join(everything)}")
        chosen |= ids
    return [stage for stage in everything if stage in chosen]


class _Session:
    """One recording of several stages: waits for each to be heard, asks it, waits for its end."""

    def __init__(self, caller: ControlClient, stages: list[str], request: StartRecording) -> None:
        self._caller = caller
        self._request = request
        self._silent = dict.fromkeys(stages, time.monotonic())  # stages that were not asked yet
        self._running: dict[str, float] = {}  # stages that were, and when they were heard last
        self._begun: set[str] = set()
        self._incarnations: dict[str, int] = {}
        self._failed = False
        for stage in stages:
            caller.listen(stage)

    def run(self) -> int:
        stopping = False
        while self._silent or self._running:
            try:
                for header, message in self._caller.receive(0.2):
                    self._on_message(header.sender, header.incarnation, message)
                self._check_silence()
            except KeyboardInterrupt:
                if stopping:
                    return 1
                stopping = True
                self._silent.clear()
                for stage in self._running:
                    self._caller.send(stage, StopRecording(self._request.recording))
        return int(self._failed)

    def _on_message(self, stage: str, incarnation: int, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, RecordingState):
            if message.recording == self._request.recording:
                self._on_state(stage, message)
        elif isinstance(message, Heartbeat):
            if stage in self._silent and message.state not in ("starting", "loading"):
                del self._silent[stage]
                self._running[stage] = now
                self._incarnations[stage] = incarnation
                self._caller.send(stage, self._request)
            elif stage in self._running:
                if incarnation != self._incarnations[stage]:
                    self._lose(stage, "was restarted; what it recorded before is in its file")
                else:
                    self._running[stage] = now

    def _on_state(self, stage: str, state: RecordingState) -> None:
        if state.state == "recording":
            self._begun.add(stage)
            print(f"{stage}: recording into {state.path}", flush=True)
            return
        self._running.pop(stage, None)
        if state.state == "failed":
            self._failed = True
            print(f"{stage}: failed: {state.reason}", file=sys.stderr, flush=True)
            return
        size = f"{state.records:,} messages in {state.bytes:,} bytes"
        print(f"{stage}: {size}, {state.reason}", flush=True)

    def _check_silence(self) -> None:
        now = time.monotonic()
        for stage, since in list(self._silent.items()):
            if now - since > ANSWER_TIMEOUT:
                del self._silent[stage]
                self._fail(stage, f"was not heard for {ANSWER_TIMEOUT:g} s; does it run?")
        for stage, heard in list(self._running.items()):
            if now - heard > HEARTBEAT_TIMEOUT:
                self._lose(stage, f"is silent since {HEARTBEAT_TIMEOUT:g} s; its file ends there")

    def _lose(self, stage: str, what: str) -> None:
        del self._running[stage]
        self._fail(stage, what)

    def _fail(self, stage: str, what: str) -> None:
        self._failed = True
        print(f"{stage}: {what}", file=sys.stderr, flush=True)
