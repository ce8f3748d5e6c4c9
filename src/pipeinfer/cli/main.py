"""The command `pipeinfer`, and its first subcommands.

- `main` finds the subcommand and turns its errors into exit codes. Each is imported only when it is
  called. What a subcommand's module imports is paid for by its `--help`, so that heavy modules are
  imported by its `run` alone.
- `pipeinfer serve [MODEL]`: the whole pipeline on this host, as child processes. `serve` begins and
  stops; what happens between is the supervisor's and the stages'.
- `pipeinfer doctor [MODEL]`: whether `serve` would start here with the same settings, and what it
  would choose. It asks the code that would refuse at a start; it starts no stage and reads no
  weights.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import platform
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.command_line import CommandLine, counted, did_you_mean
from pipeinfer.runtime import servers
from pipeinfer.runtime.logs import discard_unread, open_streams
from pipeinfer.runtime.servers import FOLDER_PREFIX, running_servers
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import Targets, describe_rate
from pipeinfer.topology import Topology
from pipeinfer.version import __version__

# Each subcommand's module, which has `run_COMMAND(arguments)` and `COMMAND_parser()`; and its help.
COMMANDS = {
    "serve": ("pipeinfer.cli.main", "serve a model over HTTP"),
    "generate": ("pipeinfer.cli.generate", "complete prompts on the terminal"),
    "chat": ("pipeinfer.cli.generate", "talk to a model on the terminal"),
    "record": ("pipeinfer.cli.operate", "record what stages of a running server take and give"),
    "replay": ("pipeinfer.cli.operate", "play again what stages recorded"),
    "keys": ("pipeinfer.cli.operate", "make keys for stages on several hosts"),
    "api-key": ("pipeinfer.cli.operate", "make an API key for a client"),
    "topology": ("pipeinfer.cli.operate", "check and draw which stage runs where"),
    "doctor": ("pipeinfer.cli.main", "say whether a model could be served on this host"),
    "bench": ("pipeinfer.cli.bench", "measure a server's latency and throughput over HTTP"),
    "top": ("pipeinfer.cli.top", "show what the stages of a running server do"),
    "swap": ("pipeinfer.cli.operate", "put another process in the place of a running stage"),
}
WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 ended in order, 2 wrong usage or configuration, 1 everything else; 141, as a
    shell reports SIGPIPE, if the reader of the output has gone."""
    open_streams()
    with _until_pipe_closed():
        return _run_command(list(sys.argv[1:] if arguments is None else arguments))


def _run_command(arguments: list[str]) -> int:
    command = parser().parse_args(arguments[:1]).command
    if command is None:
        print(parser().format_help(), end="", file=sys.stderr)
        return WRONG_USAGE
    if command not in COMMANDS:
        print(f"error: unknown command {command!r}{_suggestion(command)}", file=sys.stderr)
        return WRONG_USAGE
    try:
        _check_working_directory()
        return _function(command, "run_{}")(arguments[1:])
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        return 1


def parser() -> CommandLine:
    """The words of the command line, up to the subcommand."""
    command_line = _Pipeinfer(
        prog="pipeinfer",
        description="An inference server as a pipeline of processes.",
        usage="pipeinfer COMMAND [FLAG ...]",
    )
    command_line.add_argument("--version", action="version", version=f"pipeinfer {__version__}")
    command_line.formatter_class = argparse.RawDescriptionHelpFormatter
    listing = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    command_line.epilog = f"commands:\n{listing}\n\n`pipeinfer COMMAND --help` says more."
    command_line.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return command_line


class _Pipeinfer(CommandLine):
    """`--help-all` shows the flags of all subcommands."""

    def format_help_all(self) -> str:
        parsers = [command_parser(command) for command in COMMANDS]
        texts = [self.format_help(), *(one.format_help_all() for one in parsers)]
        return f"\n{'-' * 80}\n\n".join(texts)


def command_parser(command: str) -> CommandLine:
    """The parser of a subcommand."""
    return _function(command, "{}_parser")()


def _function(command: str, name: str) -> Callable[..., Any]:
    """`run_record` or `record_parser` of the module that has the subcommand."""
    module = importlib.import_module(COMMANDS[command][0])
    return getattr(module, name.format(command.replace("-", "_")))


def _suggestion(command: str) -> str:
    """The end of the error about an unknown subcommand: what is close to it, or all there are."""
    known = [*COMMANDS, "--help", "--version"]
    return did_you_mean(command, known) or f": there are {', '.join(COMMANDS)}"


@contextmanager
def _until_pipe_closed() -> Iterator[None]:
    """Ends the process quietly once the reader of its output has gone: `pipeinfer doctor | head`.
    What a command has opened is closed before."""
    try:
        try:
            yield
        finally:
            for output in (sys.stdout, sys.stderr):
                output.flush()  # here, and not when it is too late to say how this ended
    except BrokenPipeError:
        if not discard_unread():
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None


def _check_working_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        message = "the working directory does not exist any more: change to one that does"
        raise ConfigurationError(message) from None


if TYPE_CHECKING:
    from pipeinfer.gateway.health import StageStatus
    from pipeinfer.runtime.entry import InProcess
    from pipeinfer.runtime.logs import StatusLine
    from pipeinfer.runtime.supervisor import Supervisor

log = logging.getLogger(__name__)

# Flags that `--help` shows, of serve and of doctor.
ESSENTIAL = (
    "--host", "--port", "--served-model-name", "--api-key", "--device", "--dtype", "--tp", "--dp",
    "--max-model-len", "--memory-fraction", "--log-level",
)  # fmt: skip


def run_serve(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; SIGHUP has the gateway read its keys again. Returns the exit
    code."""
    flags = vars(serve_parser().parse_args(arguments))
    on = str(flags.pop("on"))

    import uvloop
    import zmq

    from pipeinfer.checkpoint.source import local_model
    from pipeinfer.runtime.logs import StatusLine, set_up_logging
    from pipeinfer.runtime.supervisor import check_model, check_port, local_stages, prepare_settings

    def on_settings(settings: config.Settings) -> None:
        set_up_logging(settings, "pipeinfer")
        if local_model(settings.model) is None:
            check_port(settings, on)  # before a download

    settings = prepare_settings(flags, log.info, on_settings)
    check_model(settings)
    check_port(settings, on)
    with local_stages(settings, zmq.Context.instance(), on=on) as stages:
        return uvloop.run(_run(stages.service, StatusLine(settings.log_format == "text")))


def serve_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer serve",
        description="Serves MODEL (a folder, a hub id, or nothing for the demo) over HTTP.",
        epilog="Every flag is also an environment variable: --kv-pages is PIPEINFER_KV_PAGES. "
        "Names of vLLM and SGLang, such as --tensor-parallel-size, are understood as well.",
        essential=ESSENTIAL,
    )
    add_model(command_line)
    command_line.add_argument(
        "--on", metavar="HOST", default="", help="only the stages with this `host` in the topology"
    )
    command_line.add_argument(
        "-v", "--verbose", dest="log_level", action="store_const", const="debug",
        default=argparse.SUPPRESS, help="log the details: --log-level debug",
    )  # fmt: skip
    config.add_flags(command_line)
    return command_line


def add_model(command_line: argparse.ArgumentParser) -> None:
    """MODEL, with a flag before it or without: other servers want the one or the other."""
    help_text = "a folder, a GGUF file or a hub id; default: the demo"
    command_line.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help_text
    )
    also = ("--model", "--model-path")
    command_line.add_argument(
        *also, dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


async def _run(service: Supervisor | InProcess, line: StatusLine) -> int:
    import asyncio

    from pipeinfer.runtime.entry import add_reload_handler
    from pipeinfer.runtime.logs import show_until_ready

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    add_reload_handler(loop, service.reload, service.stop)
    starting = asyncio.create_task(show_until_ready(service.states, line))
    try:
        return await service.run()
    finally:
        starting.cancel()
        line.clear()


GPU_PACKAGES = ("flashinfer-python", "sglang-kernel", "triton")
GPU_TOOLS = ("nvcc", "ninja", "c++")  # for kernels that are built at the first start
HEARTBEAT_WAIT = 3.0  # seconds in which a stage of a running server says something
OTHER_OPEN_FILES = 256  # of a gateway, besides connections

CheckStatus = Literal["ok", "note", "bad"]
Finding = tuple[CheckStatus, str, str]  # how it is, what was looked at, what was found


def run_doctor(arguments: Sequence[str]) -> int:
    """0 if `serve` would start, 1 if something is in the way."""
    flags = vars(doctor_parser().parse_args(arguments))
    found: list[Finding] = []
    for finding in _findings(flags):
        found.append(finding)
        mark, subject, text = finding
        print(f"{mark:5} {subject:10} {text}", flush=True)
    wrong = sum(mark == "bad" for mark, _, _ in found)
    print("`pipeinfer serve` would start" if not wrong else f"in the way: {wrong}")
    return 1 if wrong else 0


def doctor_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer doctor",
        description="Says whether `pipeinfer serve` with the same MODEL and settings would start "
        "on this host, and what it would choose. Reads no weights; a hub id is downloaded.",
        essential=ESSENTIAL,
    )
    add_model(command_line)
    config.add_flags(command_line)
    return command_line


def _findings(flags: dict[str, object]) -> Iterator[Finding]:
    yield "ok", "pipeinfer", f"{__version__}, Python {platform.python_version()}"
    gpus = yield from _check_devices()

    from pipeinfer.runtime.supervisor import prepare_settings

    try:
        settings = prepare_settings(flags, lambda text: None)
    except ConfigurationError as error:
        yield "bad", "settings", str(error)
        return
    yield _check_model(settings)
    yield _check_texts(settings)
    yield from _check_gpu_count(settings, gpus)
    yield _check_sockets(settings)
    yield from _check_http(settings)
    yield _check_steps(settings)
    if settings.standby:
        text = "a second process of each engine has the weights too, before any loss, a GPU's in "
        text += "common; the memory for pages leaves as much free as the engine takes beside them"
        yield "note", "standby", text
    yield _check_port(settings)
    yield _check_open_files(settings)
    for server in running_servers():
        at = f"{server.served.url}, {server.served.model}, " if server.served else ""
        yield "note", "running", f"a server: {at}process {server.pid}, {server.file}"
        yield from _running_targets(server.topology)


def _check_devices() -> Iterator[Finding]:
    """Findings about the device that engines compute on; the value is the number of GPUs."""
    import torch

    from pipeinfer.engine.machine import available_bytes, doctor_line

    free = available_bytes() / 2**30
    threads = counted(torch.get_num_threads(), "thread")
    yield "ok", "CPU", f"{threads}, {free:.1f} GiB of memory free"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        yield "note", "GPU", f"torch {torch.__version__} sees none: engines compute on the CPU"
        return 0
    for number in range(gpus):
        major, minor = torch.cuda.get_device_capability(number)
        free, total = (part / 2**30 for part in torch.cuda.mem_get_info(number))
        name = torch.cuda.get_device_name(number)
        text = f"{number}: {name}, capability {major}.{minor}, {free:.0f} of {total:.0f} GiB free"
        yield "ok", "GPU", text
        yield "note", "GPU", f"{number}: {doctor_line((major, minor))}"
    for package in GPU_PACKAGES:
        yield _check_package(package)
    missing = [tool for tool in GPU_TOOLS if shutil.which(tool) is None]
    if missing:
        yield "note", "compilers", f"no {', '.join(missing)}: kernels may fail to build"
    return gpus


def _check_package(name: str) -> Finding:
    from importlib import metadata

    try:
        return "ok", "package", f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return "note", "package", f"{name} is missing: pip install 'pipeinfer[cuda]'"


def _check_model(settings: Settings) -> Finding:
    """A finding about the model: an engine's choices for it, or why an engine would not start."""
    from pipeinfer.engine.choices import choose_engine

    try:
        chosen = choose_engine(settings, Path(settings.model))
    except ConfigurationError as error:
        return "bad", "model", str(error)
    dtype = str(chosen.dtype).removeprefix("torch.")
    kv = "" if chosen.kv_scales is None else f" with keys and values in {chosen.kv_dtype}"
    return (
        "ok",
        "model",
        f"{settings.served_model_name}: {counted(chosen.layers, 'layer')}, {dtype}{kv}, on "
        f"{chosen.device}, attention {chosen.attention}, pages of {chosen.page_size} tokens, "
        f"requests of up to {chosen.max_model_len:,}",
    )


def _check_texts(settings: Settings) -> Finding:
    """A finding about the checkpoint's parts that the tokenizer and the gateway read."""
    from pipeinfer.checkpoint.pooling import read_pooling
    from pipeinfer.gateway.stage import request_defaults
    from pipeinfer.tokenizer.prompts import load_encoder

    folder = Path(settings.model)
    try:
        built, granted = load_encoder(folder, settings), request_defaults(settings, folder)
        pooling = read_pooling(folder, settings.task)
    except ConfigurationError as error:
        return "bad", "texts", str(error)
    if built.no_grammars_because and settings.grammar_backend != "none":
        return "note", "texts", built.no_grammars_because
    ends = f"end tokens {', '.join(map(str, built.eos_ids)) or 'none'}"
    if pooling is not None:
        made = "scores of pairs" if pooling.scores else f"vectors of {pooling.hidden_size} numbers"
        return "ok", "texts", f"{made}; {ends}"
    tools = granted.parsers.tool_parser_name or "none"
    parsers = f"tools by {tools}, reasoning by {granted.parsers.reasoning_parser_name or 'none'}"
    return "ok", "texts", f"{ends}; {parsers}"


def _check_gpu_count(settings: Settings, gpus: int) -> Iterator[Finding]:
    wanted = settings.tp * settings.dp
    if gpus and settings.device != "cpu" and not settings.topology and wanted > gpus:
        yield "bad", "GPU", f"--tp {settings.tp} --dp {settings.dp} take {wanted}, here are {gpus}"


def _check_steps(settings: Settings) -> Finding:
    """The targets that are asked for; what they allow, engines measure."""
    targets, fixed = Targets(settings.itl_target, settings.ttft_target), settings.mixed_step_tokens
    if settings.policy != "mixed":
        return "ok", "steps", f"as the policy {settings.policy} composes them, without targets"
    if fixed:
        return "ok", "steps", f"beside streams of {fixed:,} tokens, without targets"
    if not targets.ttft:
        return "ok", "steps", "no --ttft-target: those beside streams are short"
    itl = f"up to {1e3 * targets.itl:g} ms" if targets.itl else "as long as it takes"
    text = f"beside streams {itl}, so that prompts wait at most {targets.ttft:g} s"
    return "ok", "steps", text


def _running_targets(topology: Topology) -> Iterator[Finding]:
    """Findings about the groups of a running server: what the targets for steps allow them, as
    their engines measured at their start, and how their last engine took over. Groups that still
    start, or have ended, are left out."""
    import zmq

    from pipeinfer.bus.bus import ControlClient
    from pipeinfer.cli.top import listen
    from pipeinfer.gateway.health import ExpectedStage, Health, describe_takeover

    health = Health([ExpectedStage(stage, "scheduler") for stage in topology.ids("scheduler")])
    rows = health.stages.values()
    with ControlClient(topology, zmq.Context.instance()) as caller:
        for stage in health.stages:
            caller.listen(stage)
        listen(caller, health, HEARTBEAT_WAIT, lambda beat: all(map(_measured, rows)))
    for row in rows:
        if _measured(row):
            tokens, rate = row.stats["target_step_tokens"], row.stats["target_prompt_rate"]
            yield "note", "targets", f"{row.stage}: {describe_rate(tokens, rate)}"
            if takeover := describe_takeover(row.stats):
                yield "note", "takeover", f"{row.stage}: {takeover}"


def _measured(row: StageStatus) -> bool:
    """Whether its heartbeat says so: one that still starts says nothing yet."""
    return "target_step_tokens" in row.stats


def _check_sockets(settings: Settings) -> Finding:
    """Whether the paths of sockets between the stages are short enough."""
    folder = Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}12345678")
    if settings.topology or settings.in_process:
        return "ok", "sockets", "where the topology says" if settings.topology else "none"
    try:
        topologies.local(settings, f"ipc://{folder}/")
    except ConfigurationError as error:
        return "bad", "sockets", str(error)
    return "ok", "sockets", f"in {folder.parent}"


def _check_http(settings: Settings) -> Iterator[Finding]:
    """Whether the gateway could read what the settings name for it."""
    from pipeinfer.gateway import api_keys, auth, stage
    from pipeinfer.gateway.api_keys import KeyLimits

    try:
        auth.parse_origins(settings.allowed_origins)
        auth.parse_hosts(settings.allowed_hosts)
        if stage.load_certificate(settings) is not None:
            yield "ok", "TLS", settings.tls_cert
        if settings.api_key_file and not settings.api_key:
            found = len(api_keys.read_key_file(settings.api_key_file, KeyLimits()))
            mark: CheckStatus = "ok" if found else "note"
            yield mark, "API keys", f"{found} in {settings.api_key_file}"
    except ConfigurationError as error:
        yield "bad", "HTTP", str(error)


def _check_port(settings: Settings) -> Finding:
    try:
        servers.check_free(settings.host, settings.port)
    except ConfigurationError as error:
        return "bad", "port", str(error)
    return "ok", "port", f"{settings.host}:{settings.port} is free"


def _check_open_files(settings: Settings) -> Finding:
    """Each connection of a client is an open file of the gateway."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    streams = soft - OTHER_OPEN_FILES
    text = f"{soft:,} may be open, enough for about {max(streams, 0):,} connections"
    if streams < settings.max_running:
        return "note", "files", f"{text}, less than --max-running {settings.max_running}: ulimit -n"
    return "ok", "files", text
