"""LoRA adapters of an engine: read on threads beside the event loop, then put where steps find
them.

    check_adapter, load_adapter   files to matrices in the layout of one rank's shard of a model
    AdapterLoads                  adapters that one rank was asked to load

A new adapter takes the slot of another one, so it goes to the device behind the steps that were
submitted before, and before those that come later: the scheduler admits no request with this slot
until then. Files are checked by checkpoint/lora.py; layers/lora.py computes with adapters. Uses a
bank and a device; no scheduler and no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from pipeinfer.checkpoint.lora import AdapterFiles, files_digest, read_adapter
from pipeinfer.engine.core import AdapterRead
from pipeinfer.engine.device import Device
from pipeinfer.layers.lora import AdapterBank, AdapterWeights, LowRankPair
from pipeinfer.messages import LoadAdapter
from pipeinfer.params import Adapter
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)


def check_adapter(files: AdapterFiles, bank: AdapterBank) -> None:
    """Raises ConfigurationError for a module that the model does not have, or has in another
    shape.
    """
    shapes = bank.shapes()
    for name, pair in files.pairs.items():
        shape = shapes.get(name)
        if shape is None:
            what = "experts are not served" if ".experts" in name else "the model has none"
            raise ConfigurationError(
                f"{files.folder}: {name[:200]} is no linear layer that adapters can change: {what}"
            )
        found = pair.b.shape[0], pair.a.shape[1]
        if found != shape:
            raise ConfigurationError(
                f"{files.folder}: {name[:200]} changes a matrix {list(found)}, the model's is "
                f"{list(shape)}"
            )


def load_adapter(adapter: Adapter, bank: AdapterBank) -> AdapterWeights:
    """Returns the adapter's matrices on the host, in the layout of `bank`. Raises
    ConfigurationError for files that have changed since `adapter` was named, and as check_adapter
    and read_adapter do.
    """
    folder = Path(adapter.path)
    files = read_adapter(folder, bank.rank)
    check_adapter(files, bank)
    weights = bank.laid_out(_read_pairs(files))
    if files_digest(folder) != adapter.digest:
        raise ConfigurationError(f"{folder}: the files are others than when it was named")
    return weights


def _read_pairs(files: AdapterFiles) -> dict[str, LowRankPair]:
    file = next(iter(files.pairs.values())).a.file
    try:
        opened: Any = safe_open(str(file), framework="pt")
        with opened as reader:
            return {
                name: LowRankPair(
                    reader.get_tensor(pair.a.slice.name),
                    reader.get_tensor(pair.b.slice.name),
                    pair.scale,
                )
                for name, pair in files.pairs.items()
            }
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None


class _Read(NamedTuple):
    """An adapter that was read.

    Attributes:
    - message: the LoadAdapter that asked for the adapter
    - weights: matrices; None: they lie in the slot already, or cannot be read
    - error: "" or why they cannot be read
    - after: number of steps that were submitted before the LoadAdapter came
    """

    message: LoadAdapter
    weights: AdapterWeights | None
    error: str
    after: int


class AdapterLoads:
    """The adapters that one rank was asked to load. All calls are on the event loop."""

    def __init__(self, bank: AdapterBank, device: Device) -> None:
        self._bank = bank
        self._device = device
        self._loaded: dict[int, str] = {}  # digests, by slot
        self._pending: dict[int, LoadAdapter] = {}  # the last that was asked for, by slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._read: deque[_Read] = deque()

    def begin(self, message: LoadAdapter, submitted: int, ready: Callable[[], None]) -> None:
        """Begins to read the adapter; ready() is called when `put_ready` may put it. submitted:
        number of steps so far.
        """
        pending = self._pending.get(message.slot)
        if pending is not None and _name(pending) == _name(message):  # asked for again
            return
        self._pending[message.slot] = message
        if self._loaded.get(message.slot) == message.adapter.digest:
            self._read.append(_Read(message, None, "", submitted))
            ready()
            return
        task = asyncio.create_task(self._load(message, submitted, ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, message: LoadAdapter, submitted: int, ready: Callable[[], None]) -> None:
        weights, error = None, ""
        try:
            weights = await asyncio.to_thread(_weights, message, self._bank)
        except Exception as failed:
            log.warning("adapter %s: %s", message.adapter.name, failed)
            error = str(failed)
        self._read.append(_Read(message, weights, error, submitted))
        ready()

    def put_ready(self, launched: int) -> Iterator[AdapterRead]:
        """Puts adapters that were read into their slots, as far as the steps before them were
        launched; yields a report of each. launched: number of steps so far.
        """
        while self._read and self._read[0].after <= launched:
            read = self._read.popleft()
            message, slot = read.message, read.message.slot
            if self._pending.get(slot) != message:  # a later LoadAdapter counts
                continue
            del self._pending[slot]
            if read.weights is not None:
                self._loaded[slot] = message.adapter.digest
                self._device.submit(partial(self._bank.put, slot, read.weights))
            yield AdapterRead(message.epoch, message.number, read.error)

    async def close(self) -> None:
        """Waits for the adapters that are being read."""
        await asyncio.gather(*self._tasks)


def _name(message: LoadAdapter) -> tuple[int, int]:
    """Returns the epoch and number of a message, which are equal in all its repetitions, whatever
    plans they follow.
    """
    return message.epoch, message.number


def _weights(message: LoadAdapter, bank: AdapterBank) -> AdapterWeights:
    if message.slot > bank.adapter_slots:
        raise ValueError(f"slot {message.slot}, where --max-loras is {bank.adapter_slots}")
    return load_adapter(message.adapter, bank)
