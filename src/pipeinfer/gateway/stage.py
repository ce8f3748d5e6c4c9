"""Builds the gateway stage from the settings: the core, and the HTTP driver beside it.

Reads small files of the checkpoint's folder, and hashes all of them for the fingerprint of answers;
loads no model.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from pipeinfer.checkpoint.files import read_json
from pipeinfer.checkpoint.source import FILES_TO_FETCH, find_model
from pipeinfer.control import CHANNEL
from pipeinfer.gateway import api_keys, http_server
from pipeinfer.gateway.api_keys import ApiKeys, KeyLimits
from pipeinfer.gateway.auth import AccessLog, Admission, is_protected
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.cross_origin import BrowserGuard, host_name, parse_hosts, parse_origins
from pipeinfer.gateway.health import Health, expected_stages
from pipeinfer.gateway.http_server import Certificate, HttpDriver
from pipeinfer.gateway.ledger import Backlog, RequestTraces
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.requests import RequestDefaults, sampling_defaults
from pipeinfer.gateway.serving import Service
from pipeinfer.gateway.sessions import RequestSessions
from pipeinfer.gateway.tool_parsers.registry import choose_parsers
from pipeinfer.gateway.vllm_metrics import VllmMetrics
from pipeinfer.params import JsonObject
from pipeinfer.runtime import servers
from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import Targets
from pipeinfer.text import (
    added_tokens,
    read_tokenizer_config,
    template_sources,
    tokenizer_info,
)
from pipeinfer.topology import is_loopback
from pipeinfer.version import __version__

log = logging.getLogger(__name__)

NAIVE_CACHE = "naive"  # of --cache
MAX_TOKENS = 1_000_000  # of a request whose model does not say; buckets end there
TICK = 0.1  # seconds; how late a timeout or a silent stage may be noticed


def build(context: StageContext) -> Stage:
    """The stage; ConfigurationError for a checkpoint folder that cannot be read."""
    settings = context.settings
    folder = find_model(settings, context.log_progress)
    traces = RequestTraces(str(context.incarnation), bool(settings.otlp_endpoint))
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
        core.health, core.can_serve, targets, _vllm(settings, core.health, context_length)
    )
    certificate = http_server.load_certificate(settings)
    admission = Admission(_keys(settings), _limits(settings), metrics, is_loopback(settings.host))
    files = _files(settings, folder)
    service = Service(
        core,
        RequestSessions(metrics),
        metrics,
        settings.model_name,
        terms(settings, folder, files),
        admission,
        _web_pages(settings, admission),
        settings.max_body_mib * 2**20,
        context_length,
        fingerprint=fingerprint(settings, folder),
        tokenizer_info=tokenizer_info(*files, context_length),
        monitor=None if settings.no_page else PipelineMonitor(context.topology.ids()),
        access_log=AccessLog(traces),
    )
    other_stages = [s for s in context.topology.ids() if s != context.identity.id]
    driver = HttpDriver(
        service, partial(http_server.server_url, settings), lambda: _listen(context), certificate
    )
    return Stage(
        core,
        driver,
        TICK,
        (
            *((stage, "telemetry", CHANNEL) for stage in other_stages),
            *death_subscriptions(context.topology, "telemetry"),
        ),
        before_leave=lambda: driver.leave(settings.drain_timeout),
        reload=lambda: _reload(settings, admission, certificate),
        monitor=service.monitor,
    )


def _vllm(settings: Settings, health: Health, context_length: int) -> VllmMetrics | None:
    if not settings.vllm_metrics:
        return None
    max_tokens = context_length or MAX_TOKENS
    return VllmMetrics(health, settings.model_name, max_tokens, settings.cache != NAIVE_CACHE)


TokenizerFiles = tuple[
    JsonObject, dict[str, str]
]  # the tokenizer's configuration, and chat templates


def _files(settings: Settings, folder: Path) -> TokenizerFiles:
    config = read_tokenizer_config(folder)
    return config, template_sources(folder, config, settings.chat_template)


def terms(settings: Settings, folder: Path, files: TokenizerFiles | None = None) -> RequestDefaults:
    """Defaults, bounds and parsers for requests to the checkpoint in `folder`.

    files: its tokenizer files, if they were read before. Raises ConfigurationError.
    """
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


def _limits(settings: Settings) -> KeyLimits:
    """Limits of keys that name none themselves."""
    return KeyLimits(
        settings.key_concurrent, settings.key_requests_per_minute, settings.key_tokens_per_minute
    )


def _keys(settings: Settings) -> ApiKeys:
    """The key of the settings, else the keys of their file; without any every client is let in."""
    if settings.api_key:
        return api_keys.single_key(settings.api_key, _limits(settings))
    if settings.api_key_file:
        return api_keys.read_key_file(settings.api_key_file, _limits(settings))
    return ApiKeys()


def _web_pages(settings: Settings, admission: Admission) -> BrowserGuard:
    """The name to listen on, where it is one, is the server's without being named again."""
    hosts = parse_hosts(settings.allowed_hosts)
    if not admission.needs_key and not hosts and not is_loopback(settings.host):
        log.info("no API keys: clients that use a name with a dot need --allowed-hosts NAME")
    named = hosts | {host_name(settings.host)}
    origins = parse_origins(settings.allowed_origins)
    return BrowserGuard(named, bool(hosts), origins, lambda: not admission.needs_key, is_protected)


def _reload(settings: Settings, admission: Admission, certificate: Certificate | None) -> None:
    """Reads keys and certificate again; what cannot be read stays as it was."""
    if settings.api_key_file and not settings.api_key:
        try:
            found = _keys(settings)
            if not found and admission.needs_key:
                raise ConfigurationError(f"--api-key-file {settings.api_key_file}: it is empty")
            if found:
                admission.replace_keys(found)
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
    """Sockets that the parent process handed over, or new ones."""
    if context.listen_fds:
        return servers.adopt(context.listen_fds)
    return servers.open_sockets(context.settings.host, context.settings.port)


def _context_length(settings: Settings, folder: Path) -> int:
    """For /v1/models only; what refuses a long prompt is the tokenizer stage."""
    if settings.max_model_len:
        return settings.max_model_len
    try:
        return read_json(folder, "config.json").integer("max_position_embeddings", 0, least=0)
    except ConfigurationError:
        return 0  # not shown then; the stages that need the file say what is wrong with it


# Settings by which no answer changes: who may ask and how much, where processes run and what they
# write down, what waits, and what is computed when. All others count.
WITHOUT_EFFECT = frozenset(
    (
        "all_graphs_first", "allowed_hosts", "allowed_origins", "api_key", "api_key_file", "dp",
        "drain_timeout", "flight_dir", "flight_recorder_mib", "grammar_cache_mib", "host",
        "host_loss", "in_process", "itl_target", "key_concurrent", "key_requests_per_minute",
        "key_tokens_per_minute", "kv_pages", "log_format", "log_level", "max_body_mib",
        "max_prompts", "max_queue", "max_queue_tokens", "memory_fraction", "no_page",
        "otlp_endpoint", "overlap_depth", "policy", "port", "profile", "profile_dir",
        "public_address", "record", "record_max_bytes", "request_timeout", "routing", "seed",
        "served_model_name", "stay_awake", "tls_cert", "tls_key", "topology", "ttft_target",
        "vllm_metrics", "watchdog",
    )
)  # fmt: skip
# Settings that name files, which count by what is in them.
FILE_SETTINGS = frozenset(("chat_template", "model", "revision"))
MAX_WHOLE_FILE = 32 * 2**20  # bytes up to which a file is read as a whole
SAMPLES, SAMPLE = 8, 4096  # parts of a larger one, and bytes of each: weights differ everywhere


def fingerprint(settings: Settings, model: Path) -> str:
    """The `system_fingerprint` of answers from a checkpoint's folder, or a GGUF file.

    A digest of model, tokenizer, template, settings that change answers, and version: two answers
    with one fingerprint, one seed and one request come from the same model.
    """
    digest = blake2b(digest_size=8)
    values = msgspec.to_builtins(settings)
    counted = values.keys() - WITHOUT_EFFECT - FILE_SETTINGS
    digest.update(json.dumps([__version__, {n: values[n] for n in sorted(counted)}]).encode())
    files = (
        [model] if model.is_file() else sorted({p for w in FILES_TO_FETCH for p in model.glob(w)})
    )
    for path in files:
        _add_file(digest, path)
    if settings.chat_template:
        _add_file(digest, Path(settings.chat_template))
    return f"fp_{digest.hexdigest()}"


def _add_file(digest: blake2b, path: Path) -> None:
    """Adds a file's name, size and content; of a file that cannot be read the name alone."""
    digest.update(path.name.encode("utf-8", "surrogateescape"))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= MAX_WHOLE_FILE:
                digest.update(file.read())
                return
            for part in range(SAMPLES):
                file.seek((size - SAMPLE) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    except OSError:
        return
