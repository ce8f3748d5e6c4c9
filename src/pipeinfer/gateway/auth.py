"""The checks in front of the HTTP handlers: keys, rate limits, access log, and browser guard.

- Admission: API keys and their limits, and what each request uses of them.
- AccessLog: one line of the log for each request.
- ClientHashes: names of clients for the other stages.
- Cors, BrowserGuard: what web pages may ask of this server. A browser that reaches a server without
  keys gives that access to each page it shows: a page posts what needs no preflight, or points its
  own name to the server's address (DNS rebinding) and reads all answers. With keys none of this
  matters, because no page knows a key.

Knows requests as HTTP sees them, not what a request asks for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer.gateway.api_keys import (
    LIMIT_NAMES,
    ApiKeys,
    KeyLimitExceeded,
    KeyLimits,
    KeyUsage,
)
from pipeinfer.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, Handler
from pipeinfer.gateway.ledger import Failed, OutputDelta, RequestTraces, Started, client_traceparent
from pipeinfer.gateway.metrics import MetricCounter, Metrics
from pipeinfer.gateway.peers import LimitName, Peers
from pipeinfer.gateway.sessions import ResponseSink
from pipeinfer.messages import TOKEN_BYTES
from pipeinfer.observe.spans import read_traceparent
from pipeinfer.runtime.logs import ACCESS
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import is_loopback

ANONYMOUS = "anonymous"  # the client of requests without a key; all share its limits
PROTECTED_PATHS = (
    "/v1",
    "/tokenize",
    "/tokenizer_info",
    "/score",
    "/rerank",
    "/detokenize",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/monitor",
)  # and all that is below
# Headers that proxies add. Proxies may be on this host, and their clients elsewhere.
PROXY_HEADERS = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip")
# Requests that a client may make also where so many of its answers run as may.
ENDS_ANSWERS = re.compile("/*v1/+responses/+[^/]+/+cancel")
SLASHES = re.compile("/+")  # routes take several for one
RATE_LIMIT_HEADERS = "x-ratelimit-"  # as OpenAI's servers call them


class Client:
    """State of one API key, or of all clients where no key is needed.

    Attributes:
    - name: the key's
    - account: what it uses
    - admin: whether the key is an operator's
    - prompt, output: counters of tokens, labelled with the name
    """

    __slots__ = ("account", "admin", "name", "output", "prompt")

    def __init__(self, name: str, account: KeyUsage, metrics: Metrics) -> None:
        self.name = name
        self.account = account
        self.admin = False
        self.prompt, self.output = metrics.key_counters(name)

    def use_tokens(self, counter: MetricCounter, tokens: int, clock: Callable[[], float]) -> None:
        """Counts tokens, and takes them from the key's tokens a minute."""
        counter.count += tokens
        if self.account.limits.tokens:
            self.account.use_tokens(tokens, clock())


class Principal(NamedTuple):
    """The sender of a request, found by its API key.

    Attributes:
    - name: of the key, or ANONYMOUS
    - operator: whether requests of other clients may be shown
    - sees: hash of the client whose requests may be shown in any case; None: there are no keys, and
      all may be
    """

    name: str
    operator: bool
    sees: str | None


class RequestUsage:
    """The part of the pipeline that one HTTP request has used.

    Attributes:
    - request_id: of its first call
    - finish: finish reason of the choice that ended last
    - prompt_tokens, output_tokens: of all its choices
    """

    __slots__ = ("finish", "output_tokens", "prompt_tokens", "request_id")

    def __init__(self) -> None:
        self.request_id = ""
        self.prompt_tokens = self.output_tokens = 0
        self.finish = ""


class ClientRequest:
    """An HTTP request while it is handled.

    Attributes:
    - client: who sent it
    - choices: answers that are made for it, as counted against the key's limit
    - limited: whether a limit refused it
    - outcome: its label in metrics
    - usage: see RequestUsage
    """

    __slots__ = ("choices", "client", "limited", "outcome", "usage")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.choices = 0
        self.limited = False
        self.outcome = "abort"  # its client went away
        self.usage = RequestUsage()


CLIENT_REQUEST = web.RequestKey("client_request", ClientRequest)


class Admission:
    """Checks keys and limits.

    Arguments:
    - anonymous: limits that all clients share if there are no keys
    - loopback: whether the server listens on loopback alone; clients of this host then count as
      operators if there are no keys
    - peers: the gateways that hold the limits together with this one; None: it is the only one
    """

    def __init__(
        self,
        keys: ApiKeys,
        anonymous: KeyLimits,
        metrics: Metrics,
        loopback: bool = False,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        self._metrics = metrics
        self._peers = peers
        self._loopback = loopback
        self._clock = clock
        self._keys = ApiKeys()
        self._clients: dict[str, Client] = {}
        self._names = ClientHashes()
        if keys:
            self.replace_keys(keys)
        else:
            account = KeyUsage(anonymous, clock())
            self._clients[ANONYMOUS] = Client(ANONYMOUS, account, metrics)
            self._share(self._clients[ANONYMOUS])

    def _share(self, client: Client) -> None:
        if self._peers is not None:
            self._peers.share(client.name, client.account, LIMIT_NAMES)

    @property
    def needs_key(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    def principal(self, request: web.Request) -> Principal:
        """The sender of `request`, by the keys that are valid now: long-lived answers ask
        repeatedly.

        Raises ApiError 401 if the request's key is missing, wrong or withdrawn.
        """
        client = self._authenticate(request)
        keyless = not self._keys and self._loopback and _on_this_host(request)
        sees = self._names.of_key(client.name) if self._keys else None
        return Principal(client.name, client.admin or keyless, sees)

    def owner(self, request: web.Request) -> str:
        """The owner of the answers to `request`: a digest of its key's name. Raises ApiError
        401."""
        return self._names.of_key(self._authenticate(request).name)

    def adopted(self, owner: str) -> ClientRequest | None:
        """A request of `owner` that another gateway has let in; None if that key is no more."""
        for name, client in self._clients.items():
            if self._names.of_key(name) == owner:
                return ClientRequest(client)
        return None

    def hold_adopted(self, request: ClientRequest, choices: int) -> Callable[[], None]:
        """Counts running answers of an adopted request until the returned function is called,
        whatever the limits."""
        account = request.client.account
        account.release(-choices)
        return lambda: account.release(choices)

    def metered_adopted(self, request: ClientRequest, sink: ResponseSink) -> ResponseSink:
        """A sink as `metered` makes it, for a request that another gateway has let in."""
        return _MeteredSink(sink, request, self._clock)

    def may_operate(self, request: web.Request) -> bool:
        """Whether the sender of `request` may use endpoints that concern all clients. If some keys
        are marked `admin`, only their holders may."""
        admins = any(client.admin for client in self._clients.values())
        return not admins or self._authenticate(request).admin

    def replace_keys(self, keys: ApiKeys) -> None:
        """Uses other keys from now on. A key whose name stays keeps its usage; requests that run
        go on."""
        now, before = self._clock(), self._clients
        self._keys = keys
        self._clients = {}
        for key in keys:
            client = before.get(key.name)
            if client is None:
                client = Client(key.name, KeyUsage(key.limits, now), self._metrics)
            client.account.set_limits(key.limits, now)
            client.admin = key.admin
            self._clients[key.name] = client
            self._share(client)

    def middleware(self) -> Middleware:
        """Stands in front of every handler: checks key and limits before a body is read."""

        @web.middleware
        async def admission(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not is_protected(request.path):
                return await handler(request)
            client = self._authenticate(request)
            if request.method != "POST" or ENDS_ANSWERS.fullmatch(request.path):
                return await handler(request)
            client_request = request[CLIENT_REQUEST] = ClientRequest(client)
            try:
                await self._borrow(client, 0, 1, 1)
                self._raise_if_limited(client_request, client.account.start_request(self._clock()))
                client_request.choices = 1
                response = await handler(request)
                client_request.outcome = _outcome(client_request, response.status)
                return response
            except ApiError as error:
                client_request.outcome = _outcome(client_request, error.status)
                raise
            except web.HTTPException as error:
                client_request.outcome = _outcome(client_request, error.status)
                raise
            except asyncio.CancelledError:
                raise
            except Exception:
                client_request.outcome = "error"
                raise
            finally:
                client.account.release(client_request.choices)
                self._metrics.count_key_request(client.name, client_request.outcome)

        return admission

    async def count_choices(self, request: web.Request, prompts: int, choices: int) -> None:
        """Counts a request as `prompts` requests and as `choices` running answers, before it is
        sent on.

        Raises ApiError 429 if that exceeds the client's limits.
        """
        client_request = request[CLIENT_REQUEST]
        if choices > client_request.choices:
            client = client_request.client
            await self._borrow(client, 1, prompts, choices)
            self._raise_if_limited(
                client_request, client.account.admit_choices(prompts, choices, self._clock())
            )
            client_request.choices = choices

    def hold_choices(self, request: web.Request) -> Callable[[], None]:
        """Lets the running answers of a request count until the returned function is called, which
        may be after the request's handler has ended."""
        client_request = request[CLIENT_REQUEST]
        account, choices = client_request.client.account, client_request.choices
        client_request.choices = 0
        return lambda: account.release(choices)

    def metered(self, request: web.Request, sink: ResponseSink) -> ResponseSink:
        """`sink`, and each token that it is given is counted as the client's."""
        return _MeteredSink(sink, request[CLIENT_REQUEST], self._clock)

    def client_hash(self, request: web.Request) -> str:
        """The client's hash for the other stages; see ClientHashes."""
        if self.needs_key:
            return self._names.of_key(request[CLIENT_REQUEST].client.name)
        return self._names.of_connection(request)

    async def add_limit_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the client's limits and what remains of them to a response's headers."""
        client_request: ClientRequest | None = request.get(CLIENT_REQUEST)
        if client_request is None:
            return
        account = client_request.client.account
        limits = account.limits.requests, account.limits.tokens
        for name, limit in zip(("requests", "tokens"), limits, strict=True):
            if limit:
                remaining = max(account.free(name, self._clock()), 0)
                if self._peers is not None:
                    of = LimitName(client_request.client.name, name)
                    remaining += self._peers.limits.free_elsewhere(of)
                response.headers[f"{RATE_LIMIT_HEADERS}limit-{name}"] = str(limit)
                response.headers[f"{RATE_LIMIT_HEADERS}remaining-{name}"] = str(remaining)

    def _authenticate(self, request: web.Request) -> Client:
        if not self._keys:
            return self._clients[ANONYMOUS]
        token = _token(request)
        key = self._keys.find(token.encode(errors="surrogateescape"))
        if key is None or not token:
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")
        return self._clients[key.name]

    async def _borrow(self, client: Client, inside: int, prompts: int, choices: int) -> None:
        """If the shares of the client's limits are too small for what KeyUsage.excess takes, takes
        what other gateways have left of them."""
        for _ in LIMIT_NAMES if self._peers is not None else ():
            excess = client.account.excess(inside, prompts, choices, self._clock())
            if excess is None or not excess.lacking[1]:
                return
            assert self._peers is not None
            await self._peers.borrow(client.name, *excess.lacking)

    @staticmethod
    def _raise_if_limited(client_request: ClientRequest, excess: KeyLimitExceeded | None) -> None:
        if excess is not None:
            client_request.limited = True
            raise ApiError(
                429, excess.reason, code="rate_limit_exceeded", retry_after=math.ceil(excess.wait)
            )


def is_protected(path: str) -> bool:
    """Whether a path needs a key if the server has keys."""
    return SLASHES.sub("/", path).startswith(PROTECTED_PATHS)


def _on_this_host(request: web.Request) -> bool:
    """Whether the client runs on this host, as far as can be known."""
    forwarded = any(name in request.headers for name in PROXY_HEADERS)
    return not forwarded and is_loopback(request.remote or "")


def _token(request: web.Request) -> str:
    """The key that a client sent, as bearer token or as `x-api-key`; else empty."""
    if "Authorization" not in request.headers:
        return request.headers.get("x-api-key", "").strip()
    scheme, _, token = request.headers["Authorization"].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _outcome(client_request: ClientRequest, status: int) -> str:
    if client_request.limited:
        return "limited"
    if status == CLIENT_CLOSED_REQUEST:
        return "abort"
    if status < 400:
        return "ok"
    return "error" if status >= 500 and status != 503 else "refused"


class _MeteredSink:
    """Passes events on to `sink`, and counts their tokens as the client's."""

    __slots__ = ("_client", "_clock", "_sink", "_usage")

    def __init__(
        self, sink: ResponseSink, client_request: ClientRequest, clock: Callable[[], float]
    ) -> None:
        self._sink = sink
        self._client = client_request.client
        self._usage = client_request.usage
        self._clock = clock

    def started(self, index: int, started: Started) -> None:
        client = self._client
        client.use_tokens(client.prompt, started.prompt_tokens, self._clock)
        self._usage.request_id = self._usage.request_id or started.request_id
        self._usage.prompt_tokens += started.prompt_tokens
        self._sink.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        if delta.ids:  # hot path: once for every token of every stream
            client, tokens = self._client, len(delta.ids) // TOKEN_BYTES
            client.use_tokens(client.output, tokens, self._clock)
            self._usage.output_tokens += tokens
        if delta.finish is not None:
            self._usage.finish = delta.finish
        self._sink.delta(index, delta)

    def failed(self, index: int, failed: Failed) -> None:
        self._usage.request_id = self._usage.request_id or failed.request_id
        self._sink.failed(index, failed)


log = logging.getLogger(ACCESS)

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_X_REQUEST_ID = web.RequestKey("name", str)


def x_request_id(request: web.Request) -> str:
    """The value of `x-request-id` in the answer: the client's own if it is sane, else a new one."""
    name = request.get(_X_REQUEST_ID, "")
    if not name:
        given = request.headers.get(REQUEST_ID, "")
        name = request[_X_REQUEST_ID] = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
    return name


class AccessLog:
    """Writes a line of the log for each request that a client sent to the pipeline.

    Stands around all other middlewares, so it logs the status that the client sees. traces: names
    the trace of each request.
    """

    def __init__(self, traces: RequestTraces, clock: Callable[[], float] = time.monotonic) -> None:
        self._traces = traces
        self._clock = clock

    def middleware(self) -> Middleware:
        """To stand before all others."""

        @web.middleware
        async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
            wanted = request.method == "POST" and is_protected(request.path)
            if not wanted or not log.isEnabledFor(logging.INFO):
                return await handler(request)
            began, status = self._clock(), CLIENT_CLOSED_REQUEST
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                self._log_request(request, status, self._clock() - began)

        return access

    def _log_request(self, request: web.Request, status: int, seconds: float) -> None:
        client_request: ClientRequest | None = request.get(CLIENT_REQUEST)
        given = client_traceparent(request.headers)
        fields: dict[str, object] = {
            "method": request.method,
            "path": request.path,
            "x_request_id": x_request_id(request),
            "status": status,
            "seconds": round(seconds, 6),
            "outcome": "abort" if status == CLIENT_CLOSED_REQUEST else "refused",
        }
        prompt = output = 0
        if client_request is not None:
            usage = client_request.usage
            prompt, output = usage.prompt_tokens, usage.output_tokens
            given = self._traces.traceparent(usage.request_id, given) if usage.request_id else given
            fields |= {
                "request_id": usage.request_id,
                "key": client_request.client.name,
                "outcome": client_request.outcome,
                "finish": usage.finish,
                "prompt_tokens": prompt,
                "output_tokens": output,
            }
        parent = read_traceparent(given)
        if parent is not None:
            fields["trace_id"] = parent.trace_id
        log.info(
            "%s %s %d %s in %.3f s, %d prompt and %d output tokens, %s",
            request.method,
            request.path,
            status,
            fields["outcome"],
            seconds,
            prompt,
            output,
            fields.get("request_id") or "no request",
            extra=fields,
        )


IPV6_HOST_BYTES = 8  # bytes of an IPv6 address that its host has


class ClientHashes:
    """Hashes of clients for the other stages: no address and no name of a key leaves the gateway.

    Clients take turns where they wait (FairQueue). Where keys are needed a client is a key.
    Else a client is a connection of a host: a proxy has connections of many users, and several
    programs of one host are several clients. A host is an IPv4 address, or the /64 of an IPv6
    address.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(16)  # an address is soon found by its plain hash

    def of_key(self, name: str) -> str:
        """Hash of a key's name, the same in all gateways."""
        return blake2b(name.encode(), digest_size=8).hexdigest()

    def of_connection(self, request: web.Request) -> str:
        """Hash of the host, "/", and hash of its connection."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        return self.of_peer(request.remote or "", peer)

    def of_peer(self, address: str, peer: object) -> str:
        """The hash of a client without a key, as `of_connection` makes it. peer: address and port,
        which differ between connections."""
        return f"{self._hash(host_bytes(address))}/{self._hash(repr(peer).encode())}"

    def _hash(self, name: bytes) -> str:
        return blake2b(name, key=self._secret, digest_size=8).hexdigest()


def host_bytes(address: str) -> bytes:
    """The bytes that all addresses of a host share."""
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode()
    return known.packed if known.version == 4 else _ipv6_host(known.packed)


def _ipv6_host(packed: bytes) -> bytes:
    mapped = packed[:12] == bytes(10) + b"\xff\xff"
    return packed[12:] if mapped else packed[:IPV6_HOST_BYTES]


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@\[\]:]+)(:[0-9]{1,5})?")
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")  # of headers; more than any client sends
METHODS = "GET, POST, DELETE"
EXPOSED_HEADERS = (
    "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-schema-left-out, "
    "x-pipeinfer-stream"
)
MAX_AGE = "600"  # seconds for which a browser need not ask again


@dataclass(frozen=True)
class Cors:
    """Cross-origin resource sharing, without credentials: a page sends its key itself.

    origins: those that may read answers; {"*"}: all, empty: none.
    """

    origins: frozenset[str] = frozenset()

    def middleware(self) -> Middleware:
        """Answers preflight requests of browsers."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = "Access-Control-Request-Method" in request.headers
            if request.method != "OPTIONS" or not is_preflight or not self.allow_origin(request):
                return await handler(request)
            headers = {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Max-Age": MAX_AGE,
            }
            requested_headers = request.headers.get("Access-Control-Request-Headers", "")
            if HEADER_NAMES.fullmatch(requested_headers):
                headers["Access-Control-Allow-Headers"] = requested_headers
            return web.Response(status=204, headers=headers)

        return preflight

    async def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers by which an allowed page may read the response, also if it is an
        error."""
        if not self.origins:
            return
        if "*" not in self.origins:
            response.headers.add("Vary", "Origin")  # caches must not mix up pages
        allowed = self.allow_origin(request)
        if allowed:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    def allow_origin(self, request: web.Request) -> str:
        """The value of Access-Control-Allow-Origin; "" for none."""
        origin = request.headers.get("Origin", "")
        if not origin:
            return ""
        if "*" in self.origins:
            return "*"
        return origin if origin in self.origins else ""


def parse_origins(text: str) -> Cors:
    """Reads --allowed-origins: origins with commas between them, or *. Raises
    ConfigurationError."""
    origins = [word.strip().lower() for word in text.split(",") if word.strip()]
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            message = "must be like https://example.org or http://localhost:3000, without a path"
            raise ConfigurationError(f"--allowed-origins: {origin!r} {message}")
    return Cors(frozenset(origins))


PRIVATE_NAME = re.compile(r"[a-z0-9_-]*")  # without a dot: no page of the web has such a name
HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")
# Paths for load balancers and Prometheus, under any name. Their answers have no data of clients.
ANY_HOST_PATHS = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version")
MAX_NAME_LETTERS = 253  # characters of a name, of which DNS has no more


@dataclass(frozen=True)
class BrowserGuard:
    """Refuses requests that web pages of other sites make.

    Attributes:
    - hosts: names with a dot under which the server may be reached; {"*"}: all
    - hosts_named: whether --allowed-hosts is set; then other names are refused also with keys
    - cors: the origins that are allowed
    - keyless(): whether no key is needed now
    - is_protected(path): whether the path would need a key
    """

    hosts: frozenset[str]
    hosts_named: bool
    cors: Cors
    keyless: Callable[[], bool]
    is_protected: Callable[[str], bool]

    def middleware(self) -> Middleware:
        """Stands behind the CORS middleware, which answers preflights, and before keys, bodies."""

        @web.middleware
        async def pages(request: web.Request, handler: Handler) -> web.StreamResponse:
            keyless = self.keyless()
            if (keyless or self.hosts_named) and request.path not in ANY_HOST_PATHS:
                self._check_host(request)
            if keyless and request.method != "OPTIONS" and self.is_protected(request.path):
                self._check_origin(request)
                if request.method == "POST":
                    _check_json(request)
            return await handler(request)

        return pages

    def _check_host(self, request: web.Request) -> None:
        """Raises ApiError 403 for another name. Browsers always send Host, so none is allowed."""
        host = request.host if "Host" in request.headers else ""
        name = host_name(host)
        if not is_private_name(name) and name not in self.hosts and "*" not in self.hosts:
            shown = name[:MAX_NAME_LETTERS]
            message = (
                f"this server is asked by the name {shown!r}, which it does not know: set "
                f"--allowed-hosts {shown}, or ask by an IP address"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, request: web.Request) -> None:
        """Raises ApiError 403 for a page of another site, by Sec-Fetch-Site, which pages cannot
        write. Browsers send it over https and to localhost; elsewhere Origin, but for GETs."""
        origin = request.headers.get("Origin", "")
        site = request.headers.get("Sec-Fetch-Site", "")
        if site:
            cross_origin = site not in ("same-origin", "none")
        else:
            host = request.headers.get("Host", "")
            cross_origin = bool(origin) and origin.partition("://")[2].lower() != host.lower()
        if cross_origin and not self.cors.allow_origin(request):
            page = repr(origin[:MAX_NAME_LETTERS]) if origin else "another site"
            message = f"a web page of {page} may not ask: --allowed-origins names those that may"
            raise ApiError(403, message, code="origin_not_allowed")


def _check_json(request: web.Request) -> None:
    """Refuses bodies of other types, which a page may send without a preflight. A body without a
    type, and none at all (aiohttp names a type for it all the same), is refused from browsers
    alone, which send Origin or Sec-Fetch-Site."""
    given = request.headers.get("Content-Type")
    if given is None or not request.body_exists:
        bad = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    else:
        bad = JSON_TYPE.fullmatch(given.partition(";")[0].strip().lower()) is None
    if bad:
        had = f"not {given[:MAX_NAME_LETTERS]!r}" if given else "which is missing"
        message = f"the body must be JSON: send the header `Content-Type: application/json`, {had}"
        raise ApiError(415, message, code="unsupported_media_type")


def host_name(host: str) -> str:
    """The name in a Host header: without port and brackets, in lower case."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0] if host.count(":") == 1 else host
    return name.lower().removesuffix(".")


def is_private_name(name: str) -> bool:
    """Whether no page of the web can have this name: an IP address, a name without a dot,
    *.localhost."""
    if PRIVATE_NAME.fullmatch(name) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def parse_hosts(text: str) -> frozenset[str]:
    """Reads --allowed-hosts: names with commas between them, or *. Raises ConfigurationError."""
    names = [word.strip().lower().removesuffix(".") for word in text.split(",") if word.strip()]
    for name in names:
        if name != "*" and HOST_NAME.fullmatch(name) is None and not is_private_name(name):
            message = "must be a name like gateway.example.org, without scheme, port and path"
            raise ConfigurationError(f"--allowed-hosts: {name!r} {message}")
    return frozenset(names)
