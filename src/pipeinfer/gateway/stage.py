"""Builds the gateway stage: the core, and the HTTP driver beside it.

Reads the settings and two small files of the checkpoint's folder; loads no model.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from pipeinfer.gateway.app import Service
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.defaults import sampling_defaults
from pipeinfer.gateway.driver import HttpDriver
from pipeinfer.gateway.health import Expected
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.port import Port
from pipeinfer.gateway.requests import Terms
from pipeinfer.models.source import resolve_model
from pipeinfer.runtime import listening
from pipeinfer.runtime.stage import Stage, StageContext, deaths
from pipeinfer.runtime.topology import Topology
from pipeinfer.settings import ConfigurationError, Settings

TICK = 0.1  # seconds; how late a timeout or a silent stage may be noticed


def build(context: StageContext) -> Stage:
    """The stage; ConfigurationError for a checkpoint folder that cannot be read."""
    settings = context.settings
    folder = resolve_model(settings.model, settings.revision)
    core = GatewayCore(
        expected_stages(context.topology),
        index=context.identity.index,
        seed=settings.seed,
        max_queue=settings.max_queue,
        incarnation=context.incarnation,
        max_queue_tokens=settings.max_queue_tokens,
    )
    metrics = Metrics(core.health)
    service = Service(
        core,
        Port(metrics),
        metrics,
        settings.model_name,
        _terms(settings, folder),
        _api_key(settings),
        settings.max_body_mib * 2**20,
        _context_length(settings, folder),
    )
    others = [s for s in context.topology.ids() if s != context.identity.id]
    driver = HttpDriver(service, settings.host, lambda: _listen(context))
    return Stage(
        core,
        driver,
        TICK,
        (*((stage, "telemetry") for stage in others), *deaths(context.topology)),
        before_leave=lambda: driver.leave(settings.drain_timeout),
    )


def _terms(settings: Settings, folder: Path) -> Terms:
    """More prompts than may wait could never be taken together."""
    most = min(settings.max_prompts, settings.max_queue)
    return Terms(sampling_defaults(folder), most, settings.request_timeout)


def _api_key(settings: Settings) -> str:
    """From the file where one is named, else the setting; "" lets everybody in."""
    if not settings.api_key_file or settings.api_key:
        return settings.api_key
    try:
        return Path(settings.api_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file {settings.api_key_file}: {error}") from None


def _listen(context: StageContext) -> list[socket.socket]:
    """The sockets of the parent process, or own ones."""
    if context.listen_fds:
        return listening.adopt(context.listen_fds)
    return listening.open_sockets(context.settings.host, context.settings.port)


def expected_stages(topology: Topology) -> list[Expected]:
    """The stages of a topology as the health table wants them."""
    return [Expected(e.identity.id, e.name, e.group, e.rank) for e in topology.entries]


class _Config(msgspec.Struct):
    max_position_embeddings: int = 0


def _context_length(settings: Settings, folder: Path) -> int:
    """For /v1/models only; what refuses a long prompt is the tokenizer stage."""
    if settings.max_model_len:
        return settings.max_model_len
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config).max_position_embeddings
    except (OSError, msgspec.DecodeError):
        return 0  # not shown then; the stages that need the file say what is wrong with it
