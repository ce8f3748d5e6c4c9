"""Builds the gateway stage from the settings: the core, and the HTTP server beside it.

- build: reads small files of the checkpoint's folder, and hashes all of them for the fingerprint of
  answers; loads no model.
- HttpDriver: the server's address, TLS certificate, and when connections are accepted.

Knows the line that says "ready"; the handlers are in app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec
from aiohttp import web

from pipeinfer.checkpoint.files import read_json
from pipeinfer.checkpoint.pooling import read_pooling
from pipeinfer.checkpoint.source import FILES_TO_FETCH, find_model
from pipeinfer.control import CHANNEL
from pipeinfer.gateway import api_keys
from pipeinfer.gateway.api_keys import ApiKeys, KeyLimits
from pipeinfer.gateway.app import build_app
from pipeinfer.gateway.auth import (
    AccessLog,
    Admission,
    BrowserGuard,
    host_name,
    is_protected,
    parse_hosts,
    parse_origins,
)
from pipeinfer.gateway.connections import (
    Acceptor,
    Connections,
    connection_limit,
    has_more_than_its_share,
)
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.errors import Handler
from pipeinfer.gateway.health import Health, expected_stages
from pipeinfer.gateway.ledger import AdoptionEnded, Backlog, RequestTraces, StatusChanged
from pipeinfer.gateway.metrics import Metrics, RollingLatencies, VllmMetrics
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.peers import HostGateways, Peers, SharedQueue, is_forwarded
from pipeinfer.gateway.pooling import takes_query_and_document
from pipeinfer.gateway.requests import AdapterRegistry, RequestDefaults, sampling_defaults
from pipeinfer.gateway.response_handlers import Adopter
from pipeinfer.gateway.resumable_answers import ResumableAnswers
from pipeinfer.gateway.retention import ResponseStore, RetentionBounds
from pipeinfer.gateway.serving import HandlerContext
from pipeinfer.gateway.sessions import RequestSessions
from pipeinfer.gateway.tool_parsers.registry import choose_parsers
from pipeinfer.messages import AdapterChanges, Adopt, Message
from pipeinfer.params import JsonObject
from pipeinfer.runtime import servers
from pipeinfer.runtime.logs import CLEAR_LINE, can_rewrite, discard_unread
from pipeinfer.runtime.servers import close_all
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
# Tokens of a request at most, where the context length is not known: histograms end there.
MAX_TOKENS = 1_000_000
TICK = 0.1  # seconds between two ticks: so late may a timeout or a silent stage be noticed


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
        core.health, core.can_serve, targets, _vllm_metrics(settings, core.health, context_length)
    )
    certificate = load_certificate(settings)
    files = _tokenizer_files(settings, folder)
    defaults = request_defaults(settings, folder, files)
    monitor = None if settings.no_page else PipelineMonitor(context.topology.ids())
    gateways = context.topology.ids("gateway")
    peers = Peers(
        context.identity,
        context.incarnation,
        gateways,
        core.health,
        defaults.adapters,
        metrics.gateways.counted,
        monitor,
    )
    if len(gateways) > 1:
        metrics.gateways.stage = context.identity.id
    admission = Admission(
        _api_keys(settings),
        _key_limits(settings),
        metrics,
        is_loopback(settings.host),
        peers=peers,
    )
    bounds = RetentionBounds(settings.kept_mib * 2**20, settings.key_kept_mib * 2**20)
    sessions = RequestSessions(metrics)
    answers = ResumableAnswers(
        bounds,
        settings.reattach,
        release=sessions.release,
        abandon=sessions.abandon,
        claim=sessions.claim,
    )
    metrics.register_resumable_streams(answers.streams)
    pooling = read_pooling(folder, settings.task)
    if settings.enable_lora and pooling is not None:
        raise ConfigurationError("--enable-lora: the model makes vectors, adapters are for texts")
    queue = SharedQueue(core, sessions.feed, settings.max_queue, settings.max_queue_tokens)
    handler_context = HandlerContext(
        core,
        sessions,
        metrics,
        settings.model_name,
        defaults,
        admission,
        _browser_guard(settings, admission),
        answers,
        peers,
        _siblings(context, core.health),
        settings.max_body_mib * 2**20,
        context_length,
        fingerprint=fingerprint(settings, folder),
        tokenizer_info=tokenizer_info(*files, context_length),
        monitor=monitor,
        access_log=AccessLog(traces),
        pooling=pooling,
        template_roles=takes_query_and_document(files[1].values()),
        store=ResponseStore(settings.store) if settings.store else None,
    )
    other_stages = [s for s in context.topology.ids() if s != context.identity.id]
    driver = HttpDriver(
        handler_context,
        partial(server_url, settings),
        lambda: _listen(context),
        certificate,
        queue=queue,
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
        reload=lambda: _reload_keys_and_certificate(settings, admission, certificate),
        control=peers,
    )


def _vllm_metrics(settings: Settings, health: Health, context_length: int) -> VllmMetrics | None:
    if not settings.vllm_metrics:
        return None
    max_tokens = context_length or MAX_TOKENS
    return VllmMetrics(health, settings.model_name, max_tokens, settings.cache != NAIVE_CACHE)


# The tokenizer's configuration, and chat templates.
TokenizerFiles = tuple[JsonObject, dict[str, str]]


def _tokenizer_files(settings: Settings, folder: Path) -> TokenizerFiles:
    config = read_tokenizer_config(folder)
    return config, template_sources(folder, config, settings.chat_template)


def request_defaults(
    settings: Settings, folder: Path, files: TokenizerFiles | None = None
) -> RequestDefaults:
    """Defaults, bounds and parsers for requests to the checkpoint in `folder`.

    files: its tokenizer files, if they were read before. Raises ConfigurationError.
    """
    # A request with more prompts than may wait would always be refused.
    max_prompts = min(settings.max_prompts, settings.max_queue)
    config, templates = files or _tokenizer_files(settings, folder)
    parsers = choose_parsers(
        settings.tool_parser,
        settings.reasoning_parser,
        "\n".join(templates.values()),
        added_tokens(folder, config),
    )
    if parsers.template_has_tools and not parsers.tool_parser_name and not parsers.tools_disabled:
        log.warning(
            "tools are refused unless tool_choice demands a call: %s", parsers.why_no_tool_calls
        )
    closed = not settings.allow_additional_properties
    return RequestDefaults(
        sampling_defaults(folder),
        max_prompts,
        settings.request_timeout,
        parsers,
        closed,
        AdapterRegistry.of(settings),
    )


def _key_limits(settings: Settings) -> KeyLimits:
    """Limits of keys that name none themselves."""
    return KeyLimits(
        settings.key_concurrent, settings.key_requests_per_minute, settings.key_tokens_per_minute
    )


def _api_keys(settings: Settings) -> ApiKeys:
    """The key of the settings, else the keys of their file; without keys all clients are served."""
    if settings.api_key:
        return api_keys.single_key(settings.api_key, _key_limits(settings))
    if settings.api_key_file:
        return api_keys.read_key_file(settings.api_key_file, _key_limits(settings))
    return ApiKeys()


def _browser_guard(settings: Settings, admission: Admission) -> BrowserGuard:
    """The guard; the name that the server listens on is allowed without being listed."""
    hosts = parse_hosts(settings.allowed_hosts)
    if not admission.needs_key and not hosts and not is_loopback(settings.host):
        log.info(
            "There are no API keys, so requests to a host name with a dot in it are refused unless "
            "--allowed-hosts lists the name."
        )
    named = hosts | {host_name(settings.host)}
    origins = parse_origins(settings.allowed_origins)
    return BrowserGuard(named, bool(hosts), origins, lambda: not admission.needs_key, is_protected)


def _reload_keys_and_certificate(
    settings: Settings, admission: Admission, certificate: Certificate | None
) -> None:
    """Reads keys and certificate again; one that cannot be read stays as it was."""
    if settings.api_key_file and not settings.api_key:
        try:
            found = _api_keys(settings)
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


def _siblings(context: StageContext, health: Health) -> HostGateways:
    """The gateways that share the port with this one, and those of other hosts."""
    me, topology = context.identity, context.topology
    address, others = topology.address(me.id), dict[str, str]()
    first = True
    if context.listen_fds:
        here = topology.stages_on(topology.entry(me.id).host, me.name)
        others = {e.identity.id: e.address for e in here if e.identity != me}
        first = all(e.index >= me.index for e in here)
    elsewhere: dict[str, list[str]] = {}
    for entry in topology.entries:
        apart = entry.http != topology.entry(me.id).http and entry.identity.id not in others
        if entry.http and apart and entry.identity != me:
            elsewhere.setdefault(entry.http, []).append(entry.identity.id)
    return HostGateways(me.id, address, others, health, first=first, elsewhere=elsewhere)


def _context_length(settings: Settings, folder: Path) -> int:
    """The model's context length for /v1/models; the tokenizer stage refuses long prompts."""
    if settings.max_model_len:
        return settings.max_model_len
    try:
        return read_json(folder, "config.json").integer("max_position_embeddings", 0, least=0)
    except ConfigurationError:
        return 0  # not shown; the stages that need the file report what is wrong with it


# Settings that change no answer: access and limits, where processes run and what they record,
# queues, and the order of the work. All other settings are part of the fingerprint.
WITHOUT_EFFECT = frozenset(
    (
        "all_graphs_first", "allowed_hosts", "allowed_origins", "api_key", "api_key_file",
        "detokenizers", "dp",
        "drain_timeout", "flight_dir", "flight_recorder_mib", "gateways",
        "grammar_cache_mib", "host",
        "host_loss", "in_process", "itl_target", "keep_memory_on_stop", "kept_memory_timeout",
        "kept_mib", "key_concurrent", "key_kept_mib", "key_requests_per_minute",
        "key_tokens_per_minute", "kv_pages", "log_format", "log_level", "lora_modules",
        "max_body_mib", "max_loras", "max_prompts", "max_queue", "max_queue_tokens",
        "memory_fraction", "no_keep_memory", "no_page", "otlp_endpoint", "overlap_depth", "policy",
        "port", "profile", "profile_dir",
        "public_address", "reattach", "record", "record_max_bytes", "request_timeout", "routing",
        "seed", "served_model_name", "standby", "stay_awake", "store", "tls_cert", "tls_key",
        "tokenizers", "topology", "ttft_target", "vllm_metrics", "watchdog",
    )
)  # fmt: skip
# Settings on which no token depends in exact mode: how steps are composed and computed.
WITHOUT_EFFECT_IF_EXACT = frozenset(
    (
        "all_reduce", "attention", "cache", "cuda_graph_max_batch", "max_running",
        "max_step_tokens", "mixed_step_tokens", "moe_backend", "no_cuda_graph", "page_size",
        "num_speculative_tokens", "speculate", "speculative_max_requests",
    )
)  # fmt: skip
# Settings that name files, whose contents are part of the fingerprint.
FILE_SETTINGS = frozenset(("chat_template", "model", "revision"))
MAX_WHOLE_FILE = 32 * 2**20  # bytes up to which a file is read as a whole
# Number of parts that are read of a larger file: enough, since weights differ everywhere.
SAMPLES = 8
SAMPLE_BYTES = 4096  # bytes of each part


def fingerprint(settings: Settings, model: Path) -> str:
    """The `system_fingerprint` of answers from a checkpoint's folder, or a GGUF file.

    A digest of model, tokenizer, template, settings that change answers, and version: two answers
    with one fingerprint, one seed and one request come from the same model. In exact mode they are
    the same, on the same kind of GPU, which is no part of it.
    """
    digest = blake2b(digest_size=8)
    values = msgspec.to_builtins(settings)
    counted = values.keys() - WITHOUT_EFFECT - FILE_SETTINGS
    if settings.exact:
        counted -= WITHOUT_EFFECT_IF_EXACT
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
                file.seek((size - SAMPLE_BYTES) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError:
        return


class Certificate:
    """The certificate chain and key of two files. context: makes connections; reload() changes
    it."""

    def __init__(self, chain: str, key: str) -> None:
        """Raises ConfigurationError if the files cannot be read, or do not belong together."""
        self._chain = chain
        self._key = key
        self.context = self._read()

    def reload(self) -> None:
        """Uses the present content of the files for new connections.

        Raises ConfigurationError as the constructor does; then nothing changes.
        """
        self._read()  # a half-loaded pair must not get into the context that is in use
        self.context.load_cert_chain(self._chain, self._key, password=_refuse_password)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for flag, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            try:
                with Path(path).open("rb"):
                    pass
            except OSError as error:
                raise ConfigurationError(f"{flag} {path}: {error.strerror or error}") from None
        try:
            context.load_cert_chain(self._chain, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or "one of them is no PEM file of its kind"
            pair = f"--tls-cert {self._chain} --tls-key {self._key}"
            raise ConfigurationError(f"{pair}: {reason}") from None
        return context


def _refuse_password() -> str:
    """In place of OpenSSL's prompt for a password on the terminal."""
    raise ValueError("a key with a password")


def load_certificate(settings: Settings) -> Certificate | None:
    """The certificate that the settings name; None for plain HTTP. Raises ConfigurationError."""
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise ConfigurationError("--tls-cert and --tls-key need each other")
    return Certificate(settings.tls_cert, settings.tls_key)


def server_url(settings: Settings, port: int) -> str:
    """The URL by which users reach a server that listens on `port`: its public address if set."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    public = settings.public_address.rstrip("/")
    # A port alone, 0.0.0.0 and [::] stand for all addresses of the host, as in Docker's `-p`.
    at, _, published = public.rpartition(":")
    if published.isdecimal() and at in ("", "0.0.0.0", "[::]"):
        public = f"127.0.0.1:{published}"
    return public if "://" in public else f"{scheme}://{public or f'{host}:{port}'}"


SHUTDOWN_TIMEOUT = 5.0  # seconds that handlers have to finish when the server stops
QUIET_SECONDS = 2.0  # seconds without a request after which idle connections may be closed
LEAVE_POLL = 0.01  # seconds between two checks whether requests run
FIRST_HEARTBEATS = 1.0  # seconds within which heartbeats of all running stages have come
SIBLINGS_POLL = 0.05  # seconds between two checks whether the other gateways are ready


class HttpDriver:
    """Serves `handler_context` over HTTP or, with a `certificate`, HTTPS.

    Attributes:
    - listen(): gives the sockets, which the driver closes
    - url_of(port): the URL for users
    - queue: of which this gateway has a share
    - url: set by start()
    """

    def __init__(
        self,
        handler_context: HandlerContext,
        url_of: Callable[[int], str],
        listen: Callable[[], list[socket.socket]],
        certificate: Certificate | None = None,
        *,
        queue: SharedQueue,
    ) -> None:
        self._context = handler_context
        self._adopter = Adopter(handler_context)
        self._certificate = certificate
        self._url_of = url_of
        self._listen = listen
        self._sockets: list[socket.socket] = []
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._servers: list[Acceptor] = []
        self._ready = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._open = self._leaving = False
        self._queue = queue
        self._to_announce = handler_context.siblings.first
        self._latencies = RollingLatencies(handler_context.metrics)
        self._in_flight = 0  # requests whose handlers run
        self.url = ""

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Listens. Raises ConfigurationError if the address is taken.

        Connections are accepted when the pipeline is ready, at the latest after FIRST_HEARTBEATS:
        clients of a restarted gateway need not be refused as "starting".
        """
        self._context.sessions.bind(feed)
        self._context.peers.share("", self._queue, SharedQueue.KINDS)
        self._sockets = self._listen()
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT
        )
        await runner.setup()
        assert runner.server is not None
        self._runner = runner
        metrics = self._context.metrics
        self._connections = Connections(
            runner.server,
            connection_limit(),
            metrics.bad_requests.inc,
            metrics.refused_connections.inc,
        )
        self._context.siblings.listen(self._connections)
        self.url = self._url_of(self._sockets[0].getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._connections))

    def deliver(self, message: Message) -> None:
        """Takes local events of the core."""
        if isinstance(message, StatusChanged):
            if message.status != "starting":
                self._ready.set()
            self._announce()
        elif isinstance(message, Adopt | AdoptionEnded | AdapterChanges):
            self._adopter.on_message(message)
        else:
            self._context.sessions.deliver(message)  # type: ignore[arg-type]

    async def leave(self, seconds: float) -> None:
        """Leaves new connections to other processes with the same sockets, and ends its own.

        Each connection ends with its next answer, which has "Connection: close", and at the latest
        after `seconds`.
        """
        if self._runner is None or self._runner.server is None:
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        self._leaving = True
        self._end_monitor_feeds()
        await self._end_accepting()
        self._close_servers()
        quiet_since = clock()
        while clock() < min(quiet_since + QUIET_SECONDS, deadline):
            await asyncio.sleep(LEAVE_POLL)
            if self._in_flight or self._context.answers.running:
                quiet_since = clock()
        self._context.siblings.close()
        self._context.answers.leave()
        self._context.sessions.fail_all(503, "the server is shutting down")
        self._runner.server.pre_shutdown()  # wakes those that wait for a request
        await self._runner.server.shutdown(SHUTDOWN_TIMEOUT)

    async def stop(self) -> None:
        """Ends running streams with an error, sends what is buffered, closes all connections."""
        self._end_monitor_feeds()
        self._context.siblings.close()
        self._context.sessions.fail_all(503, "the server is shutting down")
        await self._end_accepting()
        self._close_servers()
        if self._connections is not None:
            self._connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        self._context.answers.close()
        if self._context.store is not None:
            await asyncio.to_thread(self._context.store.close)

    def stats(self) -> dict[str, float]:
        """connections: open ones; and of the last minute, see RollingLatencies."""
        connections = len(self._connections) if self._connections is not None else 0
        return {"connections": float(connections), **self._latencies.stats(time.monotonic())}

    def _has_more_than_its_share(self, connections: Connections) -> bool:
        return has_more_than_its_share(len(connections), self._context.siblings.connections())

    def _app(self) -> web.Application:
        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            if is_forwarded(request):  # by a gateway that stays, and asks again
                return await handler(request)
            self._in_flight += 1
            try:
                return await handler(request)
            finally:
                self._in_flight -= 1

        async def end_connection(_request: web.Request, response: web.StreamResponse) -> None:
            if self._leaving:
                response.force_close()
                # force_close() comes too late for aiohttp's own header, and without the header a
                # client sends its next request on this connection.
                response.headers["Connection"] = "close"

        app = build_app(self._context)
        app.middlewares.insert(0, counted)
        app.on_response_prepare.append(end_connection)
        return app

    async def _accept(self, connections: Connections) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), FIRST_HEARTBEATS)
        await self._context.peers.meet()
        certificate = self._certificate
        context = None if certificate is None else certificate.context
        accepted = partial(connections.accept, context=context)
        yields = partial(self._has_more_than_its_share, connections)
        self._servers = [Acceptor(one, accepted, yields) for one in self._sockets]
        self._open = True
        self._announce()

    def _end_monitor_feeds(self) -> None:
        """Monitor feeds never end by themselves, and the shutdown would wait for them."""
        if self._context.monitor is not None:
            self._context.monitor.leaving = True

    def _close_servers(self) -> None:
        """Accepts no more connections; open ones stay."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def _end_accepting(self) -> None:
        self._to_announce = False
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        if not self._open:
            close_all(self._sockets)

    def _announce(self) -> None:
        """Says once that the server is ready: each gateway that shares the port takes requests
        then, since a client may reach any of them."""
        if self._open and self._to_announce and self._context.core.status == "ready":
            if not self._context.siblings.all_ready():
                asyncio.get_running_loop().call_later(SIBLINGS_POLL, self._announce)
                return
            self._to_announce = False
            sees = "see the pipeline" if self._context.pooling is not None else "chat"
            page = ""
            if self._context.monitor is not None:
                page = f"{sees} in a browser at {self.url}, "
            log.info("%ssend requests to %s/v1, stop with Ctrl-C", page, self.url)
            over = CLEAR_LINE if can_rewrite(sys.stdout) else ""
            try:
                print(f"{over}ready {self.url}", file=sys.stdout, flush=True)
            except BrokenPipeError:  # stdout is closed, which is no reason to end
                discard_unread()
