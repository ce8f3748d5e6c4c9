"""Commands for who runs a server on one host or on several:

- `pipeinfer topology check [FILE]`: says whether a topology can work, and draws it
- `pipeinfer keys [NAME ...]`: makes CURVE key pairs for stages on several hosts
- `pipeinfer api-key NAME`: makes an API key for a client, and its line for the file of keys
- `pipeinfer swap STAGE -- COMMAND...`: another process for a stage of a running server
- `pipeinfer record`: has stages of a running server record what they take and give. The stages
  write the files, where they run
- `pipeinfer replay COMMAND`: plays a recording again, by the commands in pipeinfer/replay/. What
  the parser of `replay run` does not know is taken as a setting that wins over the recorded one, so
  that `--device cpu` or `--overlap-depth 1` work there

`chosen_topology` finds the running server that a command talks to, by its flags;
`announced_topology` also says which one it is. What a topology must hold is said in topology.py,
what keys are in bus/curve.py and gateway/api_keys.py; the supervisor of the server swaps
(runtime/supervisor.py).
"""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.bus import curve
from pipeinfer.bus.bus import ControlClient
from pipeinfer.bus.curve import keyring
from pipeinfer.command_line import CommandLine, counted
from pipeinfer.control import RecordingState, StartRecording, StopRecording, Swap, SwapState
from pipeinfer.core import stage_id
from pipeinfer.gateway import api_keys
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.runtime.servers import running_server, running_topology
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import SUPERVISOR, StageEntry, Topology, deployed_topology, is_tcp

ANYWHERE = "this host"  # of stages without `host`


def run_topology(arguments: Sequence[str]) -> int:
    """0 for a topology that holds; ConfigurationError, one line, for one that does not."""
    options = topology_parser().parse_args(arguments)
    topology = deployed_topology(options.file, os.environ)
    config.build(topology.defaults())  # its [settings] are read by the stages only when they start
    keys = keyring(topology)
    print("\n".join(drawing(topology)))
    if keys is not None:
        public = {key: stage for stage, key in keys.stages.items()}
        print(f"keys: {len(public)} public, the secret of {keys.own.name!r} is here")
    print("the topology holds")
    return 0


def drawing(topology: Topology) -> Iterator[str]:
    """Lines: every host with its stages, then who talks to whom across hosts."""
    for host in dict.fromkeys(entry.host or ANYWHERE for entry in topology.entries):
        here = [entry for entry in topology.entries if (entry.host or ANYWHERE) == host]
        wide = max(len(entry.identity.id) for entry in here)
        yield f"{host}"
        for entry in here:
            mark = "└─" if entry is here[-1] else "├─"
            yield f"  {mark} {entry.identity.id:{wide}}  {_details(entry, topology)}".rstrip()
    yield ""
    yield from _pipeline(topology)


def _pipeline(topology: Topology) -> Iterator[str]:
    """A line for each group, between what all groups share."""
    gateway, tokenizer, detokenizer = (_span(topology.ids(name)) for name in topologies.FRONTS)
    last = topology.groups() - 1
    lines = []
    for group in range(last + 1):
        engines = [e for e in topology.ids("engine") if e.startswith(f"engine-{group}-")]
        lines.append(f"{stage_id('scheduler', group)} ═► {', '.join(engines)}")
    wide = max(map(len, lines))
    start = f"{gateway} ─► {tokenizer} ─"
    for group, line in enumerate(lines):
        corner = 0 if last == 0 else 1 if group == 0 else 3 if group == last else 2
        left, right = "─┬├└"[corner] + "► ", " ─" + "─┐┤┘"[corner]
        tail = f"► {detokenizer} ─► {gateway}" if group == 0 else ""
        yield f"{start if group == 0 else '':{len(start)}}{left}{line:{wide}}{right}{tail}"


def _span(ids: list[str]) -> str:
    """ "gateway-0", or "gateway-0..3" for several."""
    return min(ids) if len(ids) == 1 else f"{min(ids)}..{len(ids) - 1}"


def _details(entry: StageEntry, topology: Topology) -> str:
    words = [entry.address]
    if entry.bind:
        words.append(f"listens on {entry.bind}")
    if entry.device:
        words.append(f"device {entry.device}")
    if is_tcp(entry.address):
        words.append(f"key {entry.key or 'pipeinfer'}" if topology.keyed else "loopback, no key")
    return "  ".join(words)


def topology_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer topology",
        description="Checks a topology, and the keys that lie on this host, and draws it.",
        epilog="Environment variables are heeded as the stages do: see docs/topology.md.",
    )
    command_line.add_argument("action", choices=("check",))
    command_line.add_argument(
        "file", nargs="?", metavar="FILE", help="default: PIPEINFER_STAGES alone"
    )
    return command_line


def run_keys(arguments: Sequence[str]) -> int:
    """0 when all pairs are written; ConfigurationError leaves those that were there alone."""
    options = keys_parser().parse_args(arguments)
    folder = Path(options.out)
    names = options.names or [curve.DEFAULT_KEY]
    for name in names:
        secret, public = curve.create_key_pair(folder, name)
        print(f"{secret} (secret, mode 0600) and {public}")
    whose = "its own .key file" if len(names) > 1 else "the .key file"
    print(f"Every host needs {whose} and all .pub files in one folder; the topology names it:")
    print(f"  keys = {str(folder)!r}")
    return 0


def keys_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer keys",
        description="Makes CURVE key pairs: NAME.key and NAME.pub. One pair for all stages is "
        "enough; with one for each host, a host can be shut out by taking its .pub file away.",
        epilog="Example: pipeinfer keys front gpu-a gpu-b --out keys",
    )
    command_line.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: {curve.DEFAULT_KEY}"
    )
    command_line.add_argument(
        "--out", metavar="DIR", default=os.curdir + "/keys", help="folder, made if need be"
    )
    return command_line


def run_api_key(arguments: Sequence[str]) -> int:
    """0; ConfigurationError for a name that cannot be. The line alone goes to stdout."""
    options = api_key_parser().parse_args(arguments)
    text, line = api_keys.new_key(options.name)
    limits = [
        f"{name}={n}" for name in api_keys.LIMIT_NAMES if (n := getattr(options, name)) is not None
    ]
    print(f"the key, shown only now: {text}", file=sys.stderr)
    print("the line for the file of --api-key-file:", file=sys.stderr, flush=True)
    print(" ".join([line, *([api_keys.ADMIN] if options.admin else []), *limits]))
    return 0


def api_key_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer api-key",
        description="Makes a random API key. The key goes to stderr, once; the line for the file "
        "of --api-key-file, which has its hash only, goes to stdout. A running server reads the "
        "file again on SIGHUP.",
        epilog="Example: pipeinfer api-key alice --requests 60 >> api_keys.txt",
    )
    command_line.add_argument("name", metavar="NAME", help="whose it is; stands in metrics")
    command_line.add_argument(
        "--admin", action="store_true", help="an operator's: sees what others ask, at /monitor"
    )
    command_line.add_argument(
        "--concurrent", type=_count, metavar="N", help="requests at a time; 0: any"
    )
    command_line.add_argument("--requests", type=_count, metavar="N", help="a minute; 0: any")
    command_line.add_argument(
        "--tokens", type=_count, metavar="N", help="of prompt and output a minute; 0: any"
    )
    return command_line


def _count(text: str) -> int:
    if api_keys.LIMIT_VALUE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError("a whole number, 0 or more")
    return int(text)


def add_server_flags(command_line: argparse.ArgumentParser) -> None:
    """--port and --topology: of the server to talk to; without either it is the only one."""
    add = command_line.add_mutually_exclusive_group().add_argument
    add("--port", type=int, metavar="N", help="of the server; default: the only one that runs here")
    add("--topology", metavar="FILE", help="of the server, in place of its port")


def chosen_topology(options: argparse.Namespace) -> Topology:
    """The topology of the server that the flags name. Raises ConfigurationError, which lists the
    servers if there are several."""
    return running_topology(options.topology, options.port)


def announced_topology(options: argparse.Namespace) -> Topology:
    """The topology as of `chosen_topology`, for commands that change a server: says on stderr which
    server was found, before anything is done to it, unless --topology names it."""
    if options.topology:
        return chosen_topology(options)
    server = running_server(options.port)
    where = f"without HTTP here, of {server.file}"
    if server.served is not None:
        where = f"at port {server.served.port}, which serves {server.served.model}"
    print(f"the server {where} (process {server.pid})", file=sys.stderr, flush=True)
    return server.topology


SUPERVISOR_TIMEOUT = 5.0  # seconds; a supervisor sends a heartbeat twice a second


def run_swap(arguments: Sequence[str]) -> int:
    """0 when the new process is ready; 1 if the old command runs again, or on no answer."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = swap_parser().parse_args(arguments[:end])
    topology = announced_topology(options)
    stage = chosen_stage(topology, options.stage)
    if not topology.supervisor:
        raise ConfigurationError(
            f"no supervisor answers for this topology. By hand: send {stage} the signal SIGUSR1 "
            "(kill -USR1 PID), and when it has ended start the other command in its place"
        )
    name = f"{os.getpid()}-{time.time_ns()}"
    request = Swap(name, stage, tuple(arguments[end + 1 :]), str(Path.cwd()))
    with ControlClient(topology, zmq.Context.instance()) as caller:
        return _follow(caller, request)


def chosen_stage(topology: Topology, name: str) -> str:
    """The id of the stage called `name`: an id, or a name that only one stage or group has."""
    if name in topology.ids():
        return name
    ids = topology.ids(name)
    groups = {entry.group for entry in topology.entries if entry.name == name}
    if not ids or (len(ids) > 1 and (name != "engine" or len(groups) > 1)):
        there = ", ".join(ids or topology.ids())
        raise ConfigurationError(f"which stage is {name!r}? There are {there}")
    return ids[0]


def swap_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer swap",
        usage="pipeinfer swap STAGE [--port N] [-- COMMAND ...]",
        description="Has STAGE hand over to a new process while requests go on. COMMAND is started "
        "in this folder, with the arguments of a stage after its own; without one the stage is "
        "started again as it was. All ranks of an engine's group go together.",
        epilog="Example: pipeinfer swap scheduler -- "
        "env PYTHONPATH=../other/src python -m pipeinfer.runtime",
    )
    command_line.add_argument("stage", metavar="STAGE", help="scheduler, engine-0-0 ...")
    add_server_flags(command_line)
    return command_line


def _follow(caller: ControlClient, request: Swap) -> int:
    """Sends the request, and prints each state of the swap."""
    caller.listen(SUPERVISOR)
    last_message, requested = time.monotonic(), False
    while time.monotonic() - last_message < SUPERVISOR_TIMEOUT:
        for _, message in caller.receive(0.2):
            last_message = time.monotonic()
            if not requested:
                requested = True
                caller.send(SUPERVISOR, request)
            elif isinstance(message, SwapState) and message.swap == request.swap:
                code = _print(message)
                if code is not None:
                    return code
    print("error: the server's supervisor does not answer; does it run?", file=sys.stderr)
    return 1


def _print(state: SwapState) -> int | None:
    """The exit code, None if it goes on."""
    if state.state == "done":
        old, new = _list(state.old), _list(state.new)
        print(
            f"{state.stage}: process {old} -> {new}, a pause of {state.seconds:.2f} s", flush=True
        )
        return 0
    if state.state == "failed":
        print(f"error: {state.stage}: {state.reason}", file=sys.stderr, flush=True)
        return 1
    if state.state == "starting":
        line = f"{state.stage}: process {_list(state.old)} has left, {_list(state.new)} starts"
        print(line, file=sys.stderr, flush=True)
    return None


def _list(pids: tuple[int, ...]) -> str:
    return ", ".join(str(pid) for pid in pids)


RECORDING_TIMEOUT = 10.0  # seconds in which a stage must send a heartbeat and an answer
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
    """A recording of several stages: waits for a heartbeat of each, asks it to record, waits for
    the end."""

    def __init__(self, caller: ControlClient, stages: list[str], request: StartRecording) -> None:
        self._caller = caller
        self._request = request
        self._silent = dict.fromkeys(stages, time.monotonic())  # stages that were not asked yet
        self._running: dict[str, float] = {}  # stages that were, and the time of their last message
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
        size = f"{counted(state.records, 'message')} in {state.bytes:,} bytes"
        print(f"{stage}: {size}, {state.reason}", flush=True)

    def _check_silence(self) -> None:
        now = time.monotonic()
        for stage, since in list(self._silent.items()):
            if now - since > RECORDING_TIMEOUT:
                del self._silent[stage]
                self._fail(stage, f"was not heard for {RECORDING_TIMEOUT:g} s; does it run?")
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
    "show": ("pipeinfer.replay.timeline", "the messages of a trace as a table"),
    "stats": ("pipeinfer.replay.timeline", "counts, bytes and latencies of traces"),
    "diff": ("pipeinfer.replay.traces", "where two traces of the same stage first differ"),
    "timeline": (
        "pipeinfer.replay.timeline",
        "traces as a timeline: a page for the browser, or a file for Perfetto",
    ),
    "session": (
        "pipeinfer.replay.requests",
        "records a session of mixed requests, to have something to replay",
    ),
    "verify": (
        "pipeinfer.replay.requests",
        "asks for an answer again, which must be the same",
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
    from pipeinfer.replay.traces import CannotReplay  # with numpy, which --help does without

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
