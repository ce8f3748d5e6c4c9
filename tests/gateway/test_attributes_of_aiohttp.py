"""What the gateway's connections read of aiohttp's protocol that aiohttp does not document."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from aiohttp import web


@pytest.mark.parametrize("name", ["_messages", "_current_request", "_loop"])
async def test_the_protocol_has_the_attribute(name: str) -> None:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    server = web.Server(answer)
    assert hasattr(server(), name), f"aiohttp {version('aiohttp')} has no RequestHandler.{name}"
