"""All stages as tasks of one event loop, over inproc://, for debuggers.

The same shells, cores and drivers as in separate processes; only the address differs.
"""

from __future__ import annotations

import asyncio
import logging

import zmq

from pipeinfer.messages import State
from pipeinfer.runtime.entry import run_shell
from pipeinfer.runtime.exit_codes import ORDERLY
from pipeinfer.runtime.shell import Shell
from pipeinfer.settings import Settings
from pipeinfer.topology.topology import Identity, Topology

log = logging.getLogger(__name__)


class InProcess:
    """Runs `identities` in this process until `stop()`, or until one of them ends by itself."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        identities: list[Identity],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._shells = [Shell(settings, topology, identity, context) for identity in identities]
        self._stopping = False

    async def run(self) -> int:
        """The first exit code that is not 0; nothing is started again."""
        tasks = [asyncio.create_task(run_shell(shell)) for shell in self._shells]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for shell in self._shells:
            shell.stop()
        codes = await asyncio.gather(*tasks)
        return next((code for code in codes if code != ORDERLY), ORDERLY)

    def states(self) -> dict[str, tuple[State, str]]:
        """The state of each stage by its id, and what it does or waits for."""
        return {shell.identity.id: shell.state() for shell in self._shells}

    def reload(self) -> None:
        """SIGHUP: each stage reads again what it can."""
        for shell in self._shells:
            shell.reload()

    def stop(self) -> None:
        """Drains the gateway, whose end ends the rest; without one, or called again, stops
        everything."""
        gateways = [shell for shell in self._shells if shell.identity.name == "gateway"]
        if self._stopping or not gateways:
            for shell in self._shells:
                shell.stop()
            return
        self._stopping = True
        for shell in gateways:
            shell.drain()
