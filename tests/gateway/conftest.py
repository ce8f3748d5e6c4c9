"""Fixtures: a gateway stage over real HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import uvloop
from gateway_pipeline import Gateway, Pipeline, StartGateway

from pipeinfer import topology as topologies
from pipeinfer.core import Tick
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.stage import HttpDriver, build
from pipeinfer.messages import Message
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: object, item: object) -> dict[str, LoopFactory]:
    """The gateway's process runs on uvloop, so do its tests."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True, scope="session")
def patience() -> None:
    """Clients of httpx wait five seconds, which a machine that others use may take for nothing."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    default.connect = default.read = default.write = default.pool = 60.0


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """start_gateway(ready=True, left=None, **settings) -> Gateway; all are stopped at the end.
    left: by stage, what it tells of the gateway before this one."""
    started: list[Gateway] = []

    async def start(
        ready: bool = True, left: dict[str, list[Message]] | None = None, **values: object
    ) -> Gateway:
        settings = Settings(**{"port": 0, "served_model_name": "test", **values})  # type: ignore
        # No socket of the bus is opened; several gateways may not be in one process.
        prefix = "inproc://" if settings.gateways == 1 else f"ipc://{os.getpid()}-"
        topology = topologies.local(settings, f"{prefix}gateway-test-")
        context = StageContext(settings, topology, Identity("gateway"), 1, lambda *_: None)
        if settings.gateways > 1:  # they share a port, which the supervisor opens
            port = socket.create_server(("127.0.0.1", 0))
            context = dataclasses.replace(context, listen_fds=(port.detach(),))
        stage = build(context)
        core, driver = stage.core, stage.driver
        assert isinstance(core, GatewayCore) and isinstance(driver, HttpDriver)
        pipeline = Pipeline(core, driver)
        started.append(Gateway(core, driver, pipeline, stage.reload))
        pipeline.left_by = left or {}
        await driver.start(pipeline.feed)
        pipeline.feed(Tick())
        if ready:
            pipeline.beat()
        return started[-1]

    yield start
    for gateway in started:
        await gateway.stop()


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    """A ready gateway with default settings."""
    return await start_gateway()
