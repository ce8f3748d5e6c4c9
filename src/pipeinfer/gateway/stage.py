"""Builds the gateway stage: the core, and the HTTP driver beside it.

Reads the settings and two small files of the checkpoint's folder; loads no model.
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path

from pipeinfer.checkpoint.fields import read_json
from pipeinfer.checkpoint.source import find_model
from pipeinfer.control import CHANNEL
from pipeinfer.gateway import address, keys, tls
from pipeinfer.gateway.access import Access
from pipeinfer.gateway.admission import Admission, guarded
from pipeinfer.gateway.backlog import Backlog
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.cors import read_origins
from pipeinfer.gateway.driver import HttpDriver
from pipeinfer.gateway.fingerprint import fingerprint
from pipeinfer.gateway.health import Health, expected_stages
from pipeinfer.gateway.keys import Keys
from pipeinfer.gateway.limits import Limits
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.port import Port
from pipeinfer.gateway.requests import RequestDefaults, sampling_defaults
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.sight import Sight
from pipeinfer.gateway.tls import Certificate
from pipeinfer.gateway.tool_parsers.registry import choose_parsers
from pipeinfer.gateway.tracing import Traces
from pipeinfer.gateway.vllm_metrics import VllmMetrics
from pipeinfer.gateway.web_pages import WebPages, host_name, read_hosts
from pipeinfer.json_values import JsonObject
from pipeinfer.runtime import listening
from pipeinfer.runtime.stage import Stage, StageContext, deaths
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_budget import Targets
from pipeinfer.text.added import added_tokens
from pipeinfer.text.template_sources import read_tokenizer_config, template_sources
from pipeinfer.text.tokenizer_info import tokenizer_info
from pipeinfer.topology.addresses import is_loopback

log = logging.getLogger(__name__)

NO_CACHE = "naive"  # of --cache
MOST_TOKENS = 1_000_000  # of a request whose model does not say; buckets end there
TICK = 0.1  # seconds; how late a timeout or a silent stage may be noticed


def build(context: StageContext) -> Stage:
    """The stage; ConfigurationError for a checkpoint folder that cannot be read."""
    settings = context.settings
    folder = find_model(settings, context.say)
    traces = Traces(str(context.incarnation), bool(settings.otlp_endpoint))
    core = GatewayCore(
        expected_stages(context.topology),
        index=context.identity.index,
        seed=settings.seed,
        backlog=Backlog(settings.max_queue, settings.max_queue_tokens),
        incarnation=context.incarnation,
        traces=traces,
        host_loss=settings.host_loss,
    )
    targets = Targets(settings.itl_target, settings.ttft_target)
    context_length = _context_length(settings, folder)
    metrics = Metrics(
        core.health, core.answering, targets, _vllm(settings, core.health, context_length)
    )
    certificate = tls.certificate(settings)
    admission = Admission(_keys(settings), _limits(settings), metrics, is_loopback(settings.host))
    files = _files(settings, folder)
    service = Service(
        core,
        Port(metrics),
        metrics,
        settings.model_name,
        terms(settings, folder, files),
        admission,
        _web_pages(settings, admission),
        settings.max_body_mib * 2**20,
        context_length,
        fingerprint=fingerprint(settings, folder),
        tokenizer_info=tokenizer_info(*files, context_length),
        sight=None if settings.no_page else Sight(context.topology.ids()),
        access=Access(traces),
    )
    others = [s for s in context.topology.ids() if s != context.identity.id]
    driver = HttpDriver(
        service, partial(address.url, settings), lambda: _listen(context), certificate
    )
    return Stage(
        core,
        driver,
        TICK,
        (
            *((stage, "telemetry", CHANNEL) for stage in others),
            *deaths(context.topology, "telemetry"),
        ),
        before_leave=lambda: driver.leave(settings.drain_timeout),
        reload=lambda: _reload(settings, admission, certificate),
        eyes=service.sight,
    )


def _vllm(settings: Settings, health: Health, context_length: int) -> VllmMetrics | None:
    if not settings.vllm_metrics:
        return None
    most = context_length or MOST_TOKENS
    return VllmMetrics(health, settings.model_name, most, settings.cache != NO_CACHE)


Files = tuple[JsonObject, dict[str, str]]  # the tokenizer's configuration, and chat templates


def _files(settings: Settings, folder: Path) -> Files:
    config = read_tokenizer_config(folder)
    return config, template_sources(folder, config, settings.chat_template)


def terms(settings: Settings, folder: Path, files: Files | None = None) -> RequestDefaults:
    """What the server grants with the checkpoint in `folder`, of which `files` were read perhaps.
    Raises ConfigurationError."""
    # More prompts than may wait could never be taken together.
    most = min(settings.max_prompts, settings.max_queue)
    config, templates = files or _files(settings, folder)
    read = choose_parsers(
        settings.tool_parser,
        settings.reasoning_parser,
        "\n".join(templates.values()),
        added_tokens(folder, config),
    )
    if read.template_has_tools and not read.tool_parser_name and not read.tools_disabled:
        log.warning(
            "tools are refused unless tool_choice demands a call: %s", read.why_no_tool_calls
        )
    closed = not settings.allow_additional_properties
    return RequestDefaults(sampling_defaults(folder), most, settings.request_timeout, read, closed)


def _limits(settings: Settings) -> Limits:
    """Of each key that has none of its own."""
    return Limits(
        settings.key_concurrent, settings.key_requests_per_minute, settings.key_tokens_per_minute
    )


def _keys(settings: Settings) -> Keys:
    """The setting's key, else those of the file where one is named; none lets everybody in."""
    if settings.api_key:
        return keys.plain(settings.api_key, _limits(settings))
    if settings.api_key_file:
        return keys.read(settings.api_key_file, _limits(settings))
    return Keys()


def _web_pages(settings: Settings, admission: Admission) -> WebPages:
    """The name to listen on, where it is one, is the server's without being named again."""
    hosts = read_hosts(settings.allowed_hosts)
    if not admission.keyed and not hosts and not is_loopback(settings.host):
        log.info("no API keys: clients that use a name with a dot need --allowed-hosts NAME")
    named = hosts | {host_name(settings.host)}
    origins = read_origins(settings.allowed_origins)
    return WebPages(named, bool(hosts), origins, lambda: not admission.keyed, guarded)


def _reload(settings: Settings, admission: Admission, certificate: Certificate | None) -> None:
    """Reads keys and certificate again; what cannot be read stays as it was."""
    if settings.api_key_file and not settings.api_key:
        try:
            found = _keys(settings)
            if not found and admission.keyed:
                raise ConfigurationError(f"--api-key-file {settings.api_key_file}: it is empty")
            if found:
                admission.replace(found)
            log.info("read %d API keys again", len(found))
        except ConfigurationError as error:
            log.error("the API keys stay as they were: %s", error)
    if certificate is not None:
        try:
            certificate.reload()
            log.info("read the TLS certificate again")
        except ConfigurationError as error:
            log.error("the TLS certificate stays as it was: %s", error)


def _listen(context: StageContext) -> list[socket.socket]:
    """The sockets of the parent process, or own ones."""
    if context.listen_fds:
        return listening.adopt(context.listen_fds)
    return listening.open_sockets(context.settings.host, context.settings.port)


def _context_length(settings: Settings, folder: Path) -> int:
    """For /v1/models only; what refuses a long prompt is the tokenizer stage."""
    if settings.max_model_len:
        return settings.max_model_len
    try:
        return read_json(folder, "config.json").integer("max_position_embeddings", 0, least=0)
    except ConfigurationError:
        return 0  # not shown then; the stages that need the file say what is wrong with it
