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
from typing import Any

import msgspec
import zmq

from pipeinfer import settings as config
from pipeinfer.models.source import resolve_model
from pipeinfer.runtime import topology as topologies
from pipeinfer.runtime.find import PREFIX, TOPOLOGY, alive
from pipeinfer.runtime.inprocess import InProcess
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.runtime.topology import Topology
from pipeinfer.settings import DEMO, Settings


@dataclass(frozen=True)
class LocalStages:
    """`service` runs the stages of `topology` as processes, or as tasks of one loop."""

    service: Supervisor | InProcess
    topology: Topology


def prepare(given: Mapping[str, Any], say: Callable[[str], None]) -> Settings:
    """Settings from `given` over the environment over the topology file, the model as a folder.

    A hub id is downloaded here, once, and not by every stage; `say` is told what takes time.
    Raises ConfigurationError.
    """
    named = {**config.from_environment(os.environ), **given}
    file = named.get("topology")
    settings = config.build({**(topologies.load(file).defaults() if file else {}), **named})
    if settings.model in ("", DEMO):
        say(f"no model given: serving the bundled demo model {DEMO!r}")
    folder = resolve_model(settings.model, settings.revision, say)
    return msgspec.structs.replace(
        settings,
        served_model_name=settings.model_name,
        model=str(folder.absolute()),
        revision="",
        # A stage that is swapped may run in another folder.
        chat_template=_absolute(settings.chat_template),
        record=_absolute(settings.record),
        profile_dir=_absolute(settings.profile_dir),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


@contextmanager
def local_stages(
    settings: Settings, context: zmq.Context[zmq.Socket[bytes]], without: str = ""
) -> Iterator[LocalStages]:
    """The stages of prepared `settings`, all but those called `without`: the caller runs those.

    The folder of their sockets is removed at the end. Raises ConfigurationError.
    """
    if settings.in_process:
        topology = _topology(settings, "inproc://")
        identities = [e.identity for e in topology.entries if e.name != without]
        yield LocalStages(InProcess(settings, topology, identities, context), topology)
        return
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        topology = replace(
            _topology(settings, f"ipc://{folder}/"), supervisor=f"ipc://{folder}/supervisor"
        )
        identities = [e.identity for e in topology.entries if e.name != without]
        file = Path(folder, TOPOLOGY)
        file.write_text(topology.to_toml())
        service = Supervisor(settings, topology, str(file), identities, context)
        with alive(file):
            yield LocalStages(service, topology)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _topology(settings: Settings, prefix: str) -> Topology:
    if settings.topology:
        topology = topologies.load(settings.topology)
        topologies.fitting(settings, topology)
        return topology
    return topologies.local(settings, prefix)
