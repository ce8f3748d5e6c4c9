"""LoRA adapters of an engine: read apart from the event loop, then put where steps find them.

    check_adapter, load_adapter   from files to matrices as one rank's share of a model has them
    AdapterLoads                  what one rank was asked to load

What is put takes the place of another adapter, so it goes to the device behind the steps that were
submitted before, and before those that come later: the scheduler admits nobody to the slot until
then. Files are checked by checkpoint/lora.py; layers/lora.py says what layers do with adapters.
Knows a bank and a device; no scheduler and no request.
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
    """Raises ConfigurationError for a module that the model has not, or has in another shape."""
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
    """The adapter's matrices on the host, as `bank` has them. Raises ConfigurationError for files
    that are not `adapter`'s any more, and as check_adapter and read_adapter do."""
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
    """An adapter that was read. after: how many steps were submitted before it was asked for."""

    message: LoadAdapter
    weights: AdapterWeights | None
    error: str
    after: int


class AdapterLoads:
    """What one rank was asked to load. All calls are on the event loop."""

    def __init__(self, bank: AdapterBank, device: Device) -> None:
        self._bank = bank
        self._device = device
        self._loaded: dict[int, str] = {}  # digests, by slot
        self._pending: dict[int, LoadAdapter] = {}  # the last that was asked for, by slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._read: deque[_Read] = deque()

    def begin(self, message: LoadAdapter, submitted: int, ready: Callable[[], None]) -> None:
        """Reads the adapter; calls ready() when `put_ready` may put it. submitted: steps so far."""
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
        """Puts what was read into its slot, once the steps before it were launched: what is to be
        said of it. launched: steps so far."""
        while self._read and self._read[0].after <= launched:
            read = self._read.popleft()
            message, slot = read.message, read.message.slot
            if self._pending.get(slot) != message:  # what was asked for later counts
                continue
            del self._pending[slot]
            if read.weights is not None:
                self._loaded[slot] = message.adapter.digest
                self._device.submit(partial(self._bank.put, slot, read.weights))
            yield AdapterRead(message.epoch, message.number, read.error)

    async def close(self) -> None:
        """Waits for what is being read."""
        await asyncio.gather(*self._tasks)


def _name(message: LoadAdapter) -> tuple[int, int]:
    """The same in all that is sent again, behind whichever plans."""
    return message.epoch, message.number


def _weights(message: LoadAdapter, bank: AdapterBank) -> AdapterWeights:
    if message.slot > bank.adapter_slots:
        raise ValueError(f"slot {message.slot}, where --max-loras is {bank.adapter_slots}")
    return load_adapter(message.adapter, bank)
