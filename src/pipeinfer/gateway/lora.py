"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

An adapter is loaded when a token was computed with it: then its files are right, and an engine has
it. Whoever may use them makes the server read folders of its hosts, so they need an API key. Knows
Serving; what an adapter is on disk is checkpoint/lora.py's business.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, ClassVar

from aiohttp import web
from msgspec import Meta

from pipeinfer.checkpoint.lora import identify
from pipeinfer.gateway.errors import ApiError, Refusals
from pipeinfer.gateway.ledger import Call, Failed, OutputDelta, Started
from pipeinfer.gateway.requests import AdapterRegistry
from pipeinfer.gateway.response_encoders import api_error
from pipeinfer.gateway.schema import Body, about
from pipeinfer.gateway.serving import Serving
from pipeinfer.params import Adapter, RequestParams
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import pack

LOAD_TIMEOUT = 120.0  # seconds until an engine has computed a token with an adapter
MAX_NAME_CHARS = 256
AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(Body, frozen=True, kw_only=True):
    """The body of /v1/load_lora_adapter."""

    unsupported_fields: ClassVar[Refusals] = {}
    # fmt: off
    lora_name: Annotated[AdapterName, about(
        "What requests call it, of at most 256 characters. Required.")]
    lora_path: Annotated[Annotated[str, Meta(min_length=1, max_length=4096)], about(
        "A folder with PEFT's files, on the hosts of the server. Required.")]
    load_inplace: Annotated[bool | None, about(
        "An adapter of that name is replaced. Default: false.")] = None
    # fmt: on


class UnloadAdapterRequest(Body, frozen=True, kw_only=True):
    """The body of /v1/unload_lora_adapter. Requests that run go on."""

    unsupported_fields: ClassVar[Refusals] = {}
    # fmt: off
    lora_name: Annotated[AdapterName, about("The adapter's name. Required.")]
    # fmt: on


class LoraHandlers:
    """Handlers of both endpoints; one adapter is loaded at a time."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._context = serving.context
        self._lock = asyncio.Lock()

    async def load(self, request: web.Request) -> web.StreamResponse:
        registry = self._registry(request)
        body = await self._serving.read_body(request, LoadAdapterRequest)
        async with self._lock:
            self._check_name(registry, body)
            try:
                adapter = await asyncio.to_thread(
                    identify, body.lora_name, body.lora_path, registry.max_rank
                )
            except ConfigurationError as error:
                raise ApiError(400, str(error), "lora_path", "adapter_not_loaded") from None
            await self._try(request, adapter)
            await self._spread(adapter.name, adapter)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.StreamResponse:
        registry = self._registry(request)
        body = await self._serving.read_body(request, UnloadAdapterRequest)
        async with self._lock:
            if registry.get(body.lora_name) is None:
                message = f"there is no adapter {body.lora_name!r}"
                raise ApiError(404, message, "lora_name", "model_not_found")
            await self._spread(body.lora_name, None)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _spread(self, name: str, adapter: Adapter | None) -> None:
        """Changes it at all gateways, and for those that are started again. Raises ApiError 503 if
        one of them does not answer."""
        heard = await self._context.peers.change_adapter(name, adapter)
        self._context.sessions.set_adapters(self._context.defaults.adapters.changes)
        if not heard:
            message = "not all gateways have answered; they will hear of it"
            raise ApiError(503, message, code="gateway_unanswered", retry_after=1)

    def _registry(self, request: web.Request) -> AdapterRegistry:
        """The gateway's adapters, for a client that may change them."""
        registry, admission = self._context.defaults.adapters, self._context.admission
        if not registry.enabled:
            raise ApiError(501, "adapters need --enable-lora", code="not_implemented")
        if not admission.needs_key:
            message = "adapters are loaded over HTTP where an API key is set, see --api-key"
            raise ApiError(403, message, code="api_key_needed")
        if not admission.may_operate(request):
            raise ApiError(403, "an operator's key is needed", code="operators_only")
        return registry

    def _check_name(self, registry: AdapterRegistry, body: LoadAdapterRequest) -> None:
        name = body.lora_name
        if name == self._context.model or (
            registry.get(name) is not None and not body.load_inplace
        ):
            message = f"the name {name!r} is taken; load_inplace replaces an adapter"
            raise ApiError(400, message, "lora_name", "invalid_value")

    async def _try(self, request: web.Request, adapter: Adapter) -> None:
        """Has a token computed with it. Raises ApiError."""
        call = Call(
            request_id=f"lora-{uuid.uuid4().hex}",
            params=RequestParams(max_tokens=1, temperature=0.0),
            prompt_ids=pack([0]),
            timeout=LOAD_TIMEOUT,
            cache_salt=adapter.salted(""),
            adapter=adapter,
        )
        sink, admission = _EndSink(), self._context.admission
        async with self._context.sessions.open([call], admission.metered(request, sink)):
            failed = await sink.end
        if failed is not None:
            raise api_error(failed)


class _EndSink:
    """A ResponseSink that waits for the end. end: None, or why the request has failed."""

    def __init__(self) -> None:
        self.end: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        """The end is waited for."""

    def delta(self, index: int, delta: OutputDelta) -> None:
        if delta.finish is not None and not self.end.done():
            self.end.set_result(None)

    def failed(self, index: int, failed: Failed) -> None:
        if not self.end.done():
            self.end.set_result(failed)
