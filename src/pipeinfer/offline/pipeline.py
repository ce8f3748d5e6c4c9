"""The stages of a caller's own model: processes or tasks, and a gateway core in this process that
has no HTTP.

Knows topology, processes and the gateway's core; nothing of prompts and outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import zmq

from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.events import Call, Failed, Hangup, OutputDelta, Started, StatusChanged
from pipeinfer.gateway.health import StageStatus, expected_stages
from pipeinfer.gateway.ledger import RequestTraces
from pipeinfer.gateway.sessions import CacheResets
from pipeinfer.gateway.stage import TICK
from pipeinfer.messages import CacheReset, Message, State
from pipeinfer.params import choice_ids
from pipeinfer.runtime import entry
from pipeinfer.runtime.child import MISCONFIGURED
from pipeinfer.runtime.entry import InProcess
from pipeinfer.runtime.local import local_stages
from pipeinfer.runtime.shell import ProcessOptions, Shell
from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity, Topology


class OutputSink(Protocol):
    """Takes what one request gets; the last is a delta with `finish`, or a failure."""

    def started(self, started: Started) -> None: ...

    def delta(self, delta: OutputDelta) -> None: ...

    def failed(self, failed: Failed) -> None: ...


class OfflineDriver:
    """Routes by request id. `on_ready` is called each time the pipeline became ready."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._sinks: dict[str, OutputSink] = {}
        self._feed: Callable[[Message], None] | None = None
        self._resets = CacheResets()

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed

    def open(self, call: Call, sinks: Sequence[OutputSink]) -> None:
        """Sends the call; what comes of each choice goes to its sink, a refusal perhaps before this
        returns."""
        assert self._feed is not None
        names = choice_ids(call.request_id, range(call.params.n))
        self._sinks.update(zip(names, sinks, strict=True))
        self._feed(call)

    def hang_up(self, request_id: str) -> None:
        """Aborts the request if it still runs; its sink gets nothing more."""
        if self._sinks.pop(request_id, None) is not None and self._feed is not None:
            self._feed(Hangup(request_id))

    async def reset_caches(self, stages: Iterable[StageStatus]) -> set[int]:
        """Groups of `stages` that were asked to forget what is cached, and have not said so."""
        assert self._feed is not None
        return await self._resets.reset(self._feed, stages)

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs; what nobody waits for is dropped."""
        if isinstance(message, OutputDelta):  # hot path: once for every token of every request
            if message.finish is None:
                sink = self._sinks.get(message.request_id)
            else:
                sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                sink.delta(message)
        elif isinstance(message, Started):
            if (sink := self._sinks.get(message.request_id)) is not None:
                sink.started(message)
        elif isinstance(message, Failed):
            if (sink := self._sinks.pop(message.request_id, None)) is not None:
                sink.failed(message)
        elif isinstance(message, CacheReset):
            self._resets.on_answer(message)
        elif isinstance(message, StatusChanged) and message.status == "ready":
            self._on_ready()

    def fail_all(self, reason: str, code: str) -> None:
        """Ends every live request with an error and aborts it in the pipeline."""
        for request_id, sink in list(self._sinks.items()):
            self.hang_up(request_id)
            sink.failed(Failed(request_id, 503, reason, code=code))

    async def stop(self) -> None:
        """Nothing: the pipeline knows why it ends, and fails what still runs with that reason."""

    def stats(self) -> dict[str, float]:
        return {}


PATIENCE = 3.0  # seconds that the stages get to end by themselves: nothing is left to finish


class PipelineStopped(RuntimeError):
    """The pipeline ended by itself; the text says why, the stages' log says more."""


class Pipeline:
    """All stages for one caller, on the event loop that is running. Used once: start, then stop."""

    def __init__(self, settings: Settings) -> None:
        """`settings` are prepared: the model is a local folder."""
        self._settings = settings
        self._resources = ExitStack()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._driver = OfflineDriver(self._on_ready)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._core: GatewayCore | None = None
        self._shell: Shell | None = None
        self._service: Supervisor | InProcess | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopped: asyncio.Task[None] | None = None
        self._cause = ""  # why nothing is answered any more

    async def start(self) -> None:
        """Returns when requests are answered. Raises ConfigurationError or PipelineStopped."""
        try:
            self._begin()
            await self._ready
        except BaseException:
            await self.stop()
            raise

    def open(self, call: Call, sinks: Sequence[OutputSink]) -> None:
        """Sends a call, with a sink for each choice. Raises PipelineStopped if the pipeline is not
        there any more."""
        if self._cause or self._stopped is not None:
            raise PipelineStopped(self._cause or "it was closed")
        self._driver.open(call, sinks)

    def hang_up(self, call: Call) -> None:
        """Aborts those of its choices that still run."""
        for name in choice_ids(call.request_id, range(call.params.n)):
            self._driver.hang_up(name)

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes that no request uses; whether all groups have done so."""
        if self._core is None or self._cause or self._stopped is not None:
            raise PipelineStopped(self._cause or "it was closed")
        return not await self._driver.reset_caches(self._core.health.stages.values())

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics in each stage's latest heartbeat, by stage id."""
        rows = {} if self._core is None else self._core.health.stages
        return {stage: dict(row.stats) for stage, row in rows.items()}

    def states(self) -> dict[str, tuple[State, str]]:
        """The state of each stage by its id, and what it does or waits for."""
        return {} if self._service is None else self._service.states()

    async def stop(self) -> None:
        """Fails what runs and ends all stages; returns when they are gone. Callable again."""
        if self._stopped is None:
            self._stopped = self._loop.create_task(self._stop())
        await asyncio.shield(self._stopped)

    # ------------------------------------------------------------------------------------ beginning

    def _begin(self) -> None:
        stages = self._resources.enter_context(
            local_stages(
                self._settings, self._context, without="gateway", on_give_up=self._on_give_up
            )
        )
        self._service = stages.service
        # The caller's own loop, and perhaps the only core that it has: awake only if asked to be.
        poll_seconds = entry.BUSY_POLL_SECONDS if self._settings.stay_awake == "always" else 0.0
        self._shell = Shell(
            self._settings, stages.topology, Identity("gateway"), self._context, self._build,
            ProcessOptions(busy_poll=poll_seconds),
        )  # fmt: skip
        self._core = GatewayCore(
            expected_stages(stages.topology),
            seed=self._settings.seed,
            incarnation=self._shell.incarnation,
            traces=RequestTraces(str(self._shell.incarnation), bool(self._settings.otlp_endpoint)),
        )
        for work in (self._shell.run(), self._service.run()):
            task = self._loop.create_task(work)
            task.add_done_callback(self._on_end)
            self._tasks.append(task)

    def _build(self, context: StageContext) -> Stage:
        assert self._core is not None
        return Stage(self._core, self._driver, TICK, _other_telemetry(context.topology))

    # --------------------------------------------------------------------------------- what happens

    def _on_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _on_give_up(self, reason: str) -> None:
        """A stage cannot go on; the aborts let the others end without delay."""
        self._cause = reason
        self._driver.fail_all(reason, "pipeline_stopped")

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        """The shell or the stages ended; unasked, that is the end of everything."""
        # A loop that is shut down around an open pipeline cancels all of its tasks.
        error = PipelineStopped("cancelled") if task.cancelled() else task.exception()
        if self._stopped is not None:
            return
        self._cause = self._cause or str(error or "the stages have ended")
        self._driver.fail_all(self._cause, "pipeline_stopped")
        if self._ready.done():
            return
        if error is None and task.result() == MISCONFIGURED:
            error = ConfigurationError(f"{self._cause}; its own message is on stderr")
        self._ready.set_exception(error or PipelineStopped(self._cause))

    # ----------------------------------------------------------------------------------------- end

    async def _stop(self) -> None:
        """The shell first: it still has aborts to send, and the stages then have nothing to do."""
        self._driver.fail_all("the pipeline was closed", "closed")
        if self._shell is not None and self._service is not None:
            if not self._ready.done():
                self._ready.set_exception(PipelineStopped("it was closed while it started"))
            shell, stages = self._tasks
            self._shell.stop()
            await asyncio.wait([shell])
            await self._stop_stages(self._service, stages)
        self._resources.close()
        self._context.destroy(linger=0)

    @staticmethod
    async def _stop_stages(service: Supervisor | InProcess, task: asyncio.Task[Any]) -> None:
        service.stop()
        _, running = await asyncio.wait([task], timeout=PATIENCE)
        if running:
            service.stop()  # a supervisor kills now
            await asyncio.wait([task])


def _other_telemetry(topology: Topology) -> tuple[tuple[str, str], ...]:
    others = topology.without("gateway").ids()
    return (
        *((stage, "telemetry") for stage in others),
        *death_subscriptions(topology, "telemetry"),
    )
