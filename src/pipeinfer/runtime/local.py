"""All stages on this host: settings made ready, a topology in a temporary folder, who runs them.

Shared by `pipeinfer serve` and the offline classes. Knows no request; starts nothing by itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.checkpoint.source import find_model
from pipeinfer.close_names import did_you_mean
from pipeinfer.gguf.header import is_gguf
from pipeinfer.observe import opentelemetry
from pipeinfer.runtime import listening
from pipeinfer.runtime.find import PREFIX, TOPOLOGY, record_running
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import DEMO, ConfigurationError, Settings
from pipeinfer.topology import STAGES_VARIABLE, Topology, deployed_topology

if TYPE_CHECKING:
    from pipeinfer.runtime.entry import InProcess


@dataclass(frozen=True)
class LocalStages:
    """`service` runs the stages of `topology` as processes, or as tasks of one loop."""

    service: Supervisor | InProcess
    topology: Topology


def prepare(
    given: Mapping[str, object],
    progress: Callable[[str], None],
    check: Callable[[Settings], None] = lambda _settings: None,
) -> Settings:
    """Settings from `given` over the environment over the topology file, the model as a folder.

    A hub id is downloaded here, once, and not by every stage; `progress` is told what takes time.
    `check` sees the settings before that, and raises what should be known at once.
    Raises ConfigurationError.
    """
    named = {**config.from_environment(os.environ), **given}
    given_topology = _given(str(named.get("topology", "")))
    defaults = given_topology.defaults() if given_topology is not None else {}
    settings = config.build({**defaults, **named})
    check(settings)
    opentelemetry.check_opentelemetry(settings)
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
    listening.check_free(settings.host, settings.port)


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

    on: only the stages of that host, where the topology names several. on_give_up: told why the
    processes are not started again any more. The folder of their sockets is removed at the end.
    Raises ConfigurationError.
    """
    if settings.in_process:
        topology = _topology(settings, "inproc://")
        if topology.keyed:
            raise ConfigurationError("--in-process is one process, each stage's keys are its own")
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
        service = Supervisor(settings, topology, str(file), identities, context)
        service.on_give_up = on_give_up
        with record_running(file):
            yield LocalStages(service, topology)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
