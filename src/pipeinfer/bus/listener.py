"""Hears what stages publish of themselves without being one: for supervisors and tools.

Binds nothing, sends nothing.
"""

from __future__ import annotations

import zmq

from pipeinfer.bus.frames import TELEMETRY_BYTES
from pipeinfer.bus.reader import Handler, Reader
from pipeinfer.bus.wires import Wires
from pipeinfer.topology.topology import Topology


class Listener:
    """Subscribes to what stages publish on `telemetry` and `group`."""

    def __init__(self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._wires = Wires(topology, context)
        self._reader = Reader()

    def listen(self, stage: str, *channels: str) -> None:
        """Subscribes to stage id `stage`, which need not be there yet: to `channels`, or to its
        telemetry.

        ConfigurationError if the topology has keys and none of them lies here.
        """
        self._wires.open()
        socket = self._wires.socket(zmq.SUB)
        for channel in channels or ("telemetry",):
            socket.subscribe(channel.encode())
        socket.maxmsgsize = TELEMETRY_BYTES
        self._wires.connect(socket, stage, "telemetry")
        self._reader.add(socket)

    def start(self, handler: Handler) -> None:
        """From now on `handler(channel, header, message)` gets what is heard."""
        self._reader.start(handler)

    def close(self) -> None:
        self._reader.close()
