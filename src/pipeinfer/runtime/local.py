"""All stages on this host: settings made ready, a topology in a temporary folder, and what runs the
stages; and `LocalServer`, `pipeinfer serve` in a process of its own.

Shared by `pipeinfer serve`, the offline classes and tools. Knows no request.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.lora import read_lora_modules
from pipeinfer.checkpoint.pooling import read_pooling
from pipeinfer.checkpoint.source import find_model
from pipeinfer.command_line import did_you_mean
from pipeinfer.gguf.header import is_gguf
from pipeinfer.observe import observer
from pipeinfer.other_servers import flag
from pipeinfer.runtime import servers
from pipeinfer.runtime.memory_holder import keeps_memory, kept_holders
from pipeinfer.runtime.servers import PREFIX, TOPOLOGY, record_running
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import DEMO, ConfigurationError, Settings
from pipeinfer.topology import STAGES_VARIABLE, Topology, deployed_topology

if TYPE_CHECKING:
    from pipeinfer.runtime.entry import InProcess


FILES = ("chat_template", "api_key_file", "tls_cert", "tls_key")  # settings that name one to read


@dataclass(frozen=True)
class LocalStages:
    """`service` runs the stages of `topology` as processes, or as tasks of one loop."""

    service: Supervisor | InProcess
    topology: Topology


def prepare_settings(
    given: Mapping[str, object],
    progress: Callable[[str], None],
    check: Callable[[Settings], None] = lambda _settings: None,
) -> Settings:
    """Settings from `given` over the environment over the topology file, the model as a folder.

    A hub id is downloaded here, once, and not by every stage; `progress` gets lines about what
    takes time. `check` sees the settings before that, and raises what should be known at once.
    Raises ConfigurationError.
    """
    named = {**config.from_environment(os.environ), **given}
    given_topology = _given(str(named.get("topology", "")))
    defaults = given_topology.defaults() if given_topology is not None else {}
    settings = config.build({**defaults, **named})
    if given_topology is None:  # else on other hosts perhaps
        _check_files(settings)
    check(settings)
    observer.check_opentelemetry(settings)
    if settings.model in ("", DEMO):
        progress(f"no model given: serving the bundled demo model {DEMO!r}")
    folder = find_model(settings, progress)
    found = msgspec.structs.replace(settings, model=str(folder.absolute()))
    return msgspec.structs.replace(
        found,
        served_model_name=(found if is_gguf(folder) else settings).model_name,
        revision="",
        # A stage that is swapped may run in another folder.
        chat_template=_absolute(settings.chat_template),
        record=_absolute(settings.record),
        api_key_file=_absolute(settings.api_key_file),
        tls_cert=_absolute(settings.tls_cert),
        tls_key=_absolute(settings.tls_key),
        profile_dir=_absolute(settings.profile_dir),
    )


def _check_files(settings: Settings) -> None:
    for name in FILES:
        path = str(getattr(settings, name))
        try:
            if path:
                Path(path).open("rb").close()
        except OSError as error:
            why = f"cannot read {path}: {error.strerror}"
            raise ConfigurationError(f"{flag(name)}: {why}") from None


def check_model(settings: Settings) -> None:
    """Refuses what no stage could load, before any is started; `settings` are prepared. Raises
    ConfigurationError."""
    outline = read_outline(Path(settings.model), settings.model_impl)
    outline.max_model_len(settings.max_model_len)
    pooling = read_pooling(Path(settings.model), settings.task)
    read_lora_modules(settings)
    if settings.enable_lora and pooling is not None:
        raise ConfigurationError("--enable-lora: the model makes vectors, adapters are for texts")


def check_port(settings: Settings, on: str = "") -> None:
    """That the HTTP port can be had, if a gateway is to run here; `on` as for `local_stages`.

    Nobody listens yet, since that waits until the model's configuration is known to be valid.
    Raises ConfigurationError.
    """
    topology = _given(settings.topology)
    if topology is not None:
        here = _host(topology, on)
        if not any(e.name == "gateway" and e.host in here for e in topology.entries):
            return
    servers.check_free(settings.host, settings.port)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


@contextmanager
def local_stages(
    settings: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    without: str = "",
    on: str = "",
    on_give_up: Callable[[str], None] | None = None,
) -> Iterator[LocalStages]:
    """The stages of prepared `settings`, all but those called `without`: the caller runs those.

    on: only the stages of that host, where the topology names several. on_give_up: gets the reason
    why the processes are not started again any more. The folder of their sockets is removed at the
    end. Raises ConfigurationError.
    """
    if settings.keep_memory_on_stop and not keeps_memory(settings):
        why = "--in-process" if settings.in_process else "--no-keep-memory"
        raise ConfigurationError(f"--keep-memory-on-stop: memory ends with its engine ({why})")
    if settings.in_process:
        topology = _topology(settings, "inproc://")
        if topology.keyed:
            raise ConfigurationError("--in-process is one process, each stage's keys are its own")
        if settings.standby:
            raise ConfigurationError("--standby: with --in-process there is one process alone")
        from pipeinfer.runtime.entry import InProcess  # all that stages are made of

        identities = [e.identity for e in topology.entries if e.name != without]
        yield LocalStages(InProcess(settings, topology, identities, context), topology)
        return
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        topology = replace(
            _topology(settings, f"ipc://{folder}/"), supervisor=f"ipc://{folder}/supervisor"
        )
        here = _host(topology, on)
        identities = [e.identity for e in topology.entries if e.name != without and e.host in here]
        file = Path(folder, TOPOLOGY)
        file.write_text(topology.to_toml())
        names = {identity.name for identity in identities}
        with kept_holders(settings, _server_name(settings, "gateway" in names)) as kept:
            service = Supervisor(settings, topology, str(file), identities, context, kept=kept)
            service.on_give_up = on_give_up
            with record_running(file):
                yield LocalStages(service, topology)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_name(settings: Settings, has_gateway: bool) -> str:
    """By which a server finds the memory of the one before; "" if it has nothing to go by."""
    if not settings.topology and not (has_gateway and settings.port):
        return ""
    return f"{_absolute(settings.topology)} {settings.host} {settings.port}"


def _topology(settings: Settings, prefix: str) -> Topology:
    topology = _given(settings.topology)
    if topology is None:
        return topologies.local(settings, prefix)
    topologies.check_settings(settings, topology)
    return topology


def _given(file: str) -> Topology | None:
    """What `file` and the environment say; None if they leave it to us."""
    return deployed_topology(file, os.environ) if file or os.environ.get(STAGES_VARIABLE) else None


def _host(topology: Topology, on: str) -> list[str]:
    """What stands under `host` of the stages that belong here; those without one always do."""
    hosts = topology.hosts()
    if on and on not in hosts:
        there = ", ".join(hosts) or "none"
        meant = did_you_mean(on, hosts)
        reason = f"--on {on}: the topology has no such host; there is {there}{meant}"
        raise ConfigurationError(reason)
    if not on and len(hosts) > 1:
        raise ConfigurationError(f"--on must say which host this is: {', '.join(hosts)}")
    return ["", on or "".join(hosts)]


READY_LINE = "ready "


class ServerNotReady(RuntimeError):
    """A server ended before it was ready; its own words are on stderr."""


def serve_flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of the command line of `pipeinfer serve`."""
    known = config.settings_help()
    words = [str(settings["model"])] if settings.get("model") else []
    for name, value in settings.items():
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        words += ([flag] if value else []) if known[name].kind is bool else [flag, str(value)]
    return words


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL in the ready line of a process whose stdout is a pipe. Raises ServerNotReady."""
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if line.startswith(READY_LINE):
            return line.removeprefix(READY_LINE).strip()
    raise ServerNotReady(f"the server ended with code {process.wait()}")


class LocalServer:
    """`pipeinfer serve` on a free port, as a context manager; `url` is set when it is ready.

    All its graphs are captured by then, unless `settings` say otherwise. `log`: an open file for
    what it says on stderr, else that is this process's."""

    def __init__(self, settings: Mapping[str, object], log: IO[str] | None = None) -> None:
        usual = {"log_level": "warning", "all_graphs_first": True}
        words = serve_flags({**usual, **settings, "port": 0})
        command = [sys.executable, "-m", "pipeinfer", "serve", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = ""

    def __enter__(self) -> LocalServer:
        try:
            self.url = wait_ready(self.process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self.process)


def stop_process(process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """SIGTERM, and SIGKILL for a process that does not end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
