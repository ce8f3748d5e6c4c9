"""`pipeinfer record`: has stages of a running server record what they take and give; and `pipeinfer
replay`: plays it again.

`record` asks over the bus; the stages write the files, where they run. The commands of `replay` are
in pipeinfer/replay/. What the parser of `replay run` does not know is taken as a setting that wins
over the recorded one, so that `--device cpu` or `--overlap-depth 1` work there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import zmq

from pipeinfer import settings as config
from pipeinfer.bus.bus import ControlClient
from pipeinfer.cli.deployment import add_server_flags, announced_topology
from pipeinfer.command_line import CommandLine
from pipeinfer.control import RecordingState, StartRecording, StopRecording
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.replay.traces import CannotReplay
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology

ANSWER_TIMEOUT = 10.0  # seconds in which a stage must be heard and must answer
HEARTBEAT_TIMEOUT = 5.0  # seconds without a heartbeat after which a stage counts as lost
DEFAULT_MAX_BYTES = 1 << 30  # of one file without --max-bytes: the client may be gone by then
KEY_FILE, KEY_BYTES = "redaction.key", 32


def run_record(arguments: Sequence[str]) -> int:
    """0 when every recording ended in order; 1 if one failed or its stage was lost."""
    options = record_parser().parse_args(arguments)
    topology = announced_topology(options)
    stages = _chosen(topology, options.stage)
    with ControlClient(topology, zmq.Context.instance()) as caller:
        return _Session(caller, stages, _request(options)).run()


def record_parser() -> CommandLine:
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
    """One recording of several stages: waits for a heartbeat of each, asks it to record, waits for
    the end."""

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
        for stage, last_heard in list(self._running.items()):
            if now - last_heard > HEARTBEAT_TIMEOUT:
                self._lose(stage, f"is silent since {HEARTBEAT_TIMEOUT:g} s; its file ends there")

    def _lose(self, stage: str, what: str) -> None:
        del self._running[stage]
        self._fail(stage, what)

    def _fail(self, stage: str, what: str) -> None:
        self._failed = True
        print(f"{stage}: {what}", file=sys.stderr, flush=True)


# Each command's module, which has `add_COMMAND_arguments(parser)` and `replay_COMMAND(options)`;
# and its help.
REPLAY_COMMANDS = {
    "run": (
        "pipeinfer.replay.run",
        "a fresh stage gets the recorded inputs, and must give the recorded outputs",
    ),
    "serve": ("pipeinfer.replay.serve", "plays a recorded stage on the bus of a running pipeline"),
    "show": ("pipeinfer.replay.show", "the messages of a trace as a table"),
    "stats": ("pipeinfer.replay.show", "counts, bytes and latencies of traces"),
    "diff": ("pipeinfer.replay.compare", "where two traces of the same stage first differ"),
    "timeline": (
        "pipeinfer.replay.timeline",
        "traces as a timeline: a page for the browser, or a file for Perfetto",
    ),
    "session": (
        "pipeinfer.replay.session",
        "records a session of mixed requests, to have something to replay",
    ),
}
TAKES_SETTINGS = ("run", "session")


def replay_parser(shown: Collection[str] = tuple(REPLAY_COMMANDS)) -> CommandLine:
    """The words of the command line, with the flags of the commands `shown`."""
    command_line = CommandLine(
        prog="pipeinfer replay",
        description="Replays what stages recorded: one stage alone, every message in its place.",
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    for name, (module, text) in REPLAY_COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=description)
        if name in shown:
            getattr(importlib.import_module(module), f"add_{name}_arguments")(command)
    return command_line


def run_replay(arguments: Sequence[str]) -> int:
    """The exit code: see replay/traces.py. ConfigurationError for a setting that cannot be."""
    command_line = replay_parser(arguments[:1])
    options, rest = command_line.parse_known_args(arguments)
    module = importlib.import_module(REPLAY_COMMANDS[options.command][0])
    command = getattr(module, f"replay_{options.command}")
    try:
        if options.command in TAKES_SETTINGS:
            return command(options, config.parse_flags(rest))
        if rest:
            command_line.error(f"unknown flag or argument {rest[0]}")
        return command(options)
    except CannotReplay as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
