"""Memory that an engine gives back while it sleeps and takes back when it wakes: pages and weights.

    EngineMemory      a rank's pool and weights, and what its memory holder has of them
    GpuWeights, HostWeights   weights in one piece of memory (weight_memory.py), which is given
                      back, and taken back at the same addresses
    ReloadableModel   any other model of a host, which can be dropped and loaded anew

No plan is known here.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from pipeinfer.engine.device_memory import DeviceMemory, HostCopy, SealedMemory
from pipeinfer.engine.kept_memory import POOL, KeptMemory
from pipeinfer.layers.attention import Attend
from pipeinfer.models.causal_lm import LanguageModel, VocabShard
from pipeinfer.runtime.memory_holder import Keep
from pipeinfer.step import AttentionShape

log = logging.getLogger(__name__)

WITHOUT_WEIGHTS = 2  # the level of sleep from which on weights are loaded anew


class SleepingWeights(Protocol):
    """A rank's weights, while no step is in flight."""

    @property
    def memories(self) -> dict[str, DeviceMemory]:
        """Memory of the weights that a memory holder has, by name."""
        ...

    @property
    def notes(self) -> dict[str, bytes]:
        """Note that the memory holder hands over with each of `memories`, by name."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if the weights have changed since this process had them first."""
        ...

    def give_back(self, level: int, /) -> None:
        """Gives memory back as SetSleep(level) asks for; the weights may be at a lower level
        already.
        """
        ...

    def take_back(self) -> None:
        """Makes the weights as before, or as the files are now, at the same addresses."""
        ...


class WeightFiles(Protocol):
    """The files that weights are read from."""

    @property
    def key(self) -> bytes:
        """Key of the files as of the last `look`, see model_key."""
        ...

    def look(self) -> None:
        """Takes note of the files, before weights are read anew. Raises RuntimeError for files that
        need another engine.
        """
        ...

    def check(self) -> None:
        """Checks the files after the weights were read. Raises RuntimeError if the files have
        changed since the last `look`.
        """
        ...


class EngineMemory:
    """Pool and weights of one rank whose pool is in `kept` (KeptMemory.opened). If weights are read
    anew from `files` that have changed, what is kept belongs to the new files afterwards.

    To sleep: `withdraw`, then `give_back`. To wake: `take_back`, then `keep`. give_back and
    take_back take long, and may be called on any thread; `run` does their work on the device's
    thread, when all launched steps have ended.
    """

    def __init__(
        self,
        kept: KeptMemory,
        weights: Sequence[SleepingWeights],
        run: Callable[[Callable[[], None]], None],
        files: WeightFiles,
    ) -> None:
        assert kept.opened is not None
        self._kept = kept
        self._pool, self._directory = kept.opened.memory, kept.opened.directory
        self._weights, self._files = weights, files
        self._reads_files = False  # when it wakes
        self._run = run
        self._withdrawn: list[Keep] = []
        self._has_pool = True

    def withdraw(self) -> None:
        """Makes the page directory unusable, and withdraws this rank's memory from the memory
        holder, which would hold it otherwise. On the event loop.
        """
        self._directory.make_unusable()
        names = [name for one in self._weights for name in one.memories]
        self._withdrawn += self._kept.withdraw(POOL, *names)

    def give_back(self, level: int) -> None:
        """Gives memory back, for others to use. level: of SetSleep."""
        self._run(lambda: self._give_back(level))

    def _give_back(self, level: int) -> None:
        if self._has_pool:
            self._has_pool = False
            self._pool.give_back()
        self._reads_files = self._reads_files or level >= WITHOUT_WEIGHTS
        for one in self._weights:
            one.give_back(level)
        gc.collect()

    def take_back(self) -> None:
        """Takes all memory back, pages as zeros. Raises RuntimeError if there is not enough
        memory.
        """
        self._run(self._take_back)

    def _take_back(self) -> None:
        if self._reads_files:
            self._files.look()
        for one in self._weights:
            one.take_back()
        if self._reads_files:
            self._files.check()
            self._reads_files = False
        self._pool.take_back()
        self._has_pool = True

    def keep(self) -> None:
        """Gives the memory to the memory holder again. On the event loop."""
        self._kept.belong_to(self._files.key)
        memory: dict[str, DeviceMemory] = {POOL: self._pool}
        notes: dict[str, bytes] = {}
        for one in self._weights:
            memory |= one.memories
            notes |= one.notes
        for entry in self._withdrawn:
            note = notes.get(entry.name, entry.note)
            self._kept.keep(entry.name, entry.kind, note, memory[entry.name].descriptor)
        self._withdrawn.clear()


class ReloadableModel:
    """LanguageModel and SleepingWeights of a model that is loaded anew when it wakes. Its weights
    are in memory of the host already, so at level 1 they stay.
    """

    def __init__(self, load: Callable[[], LanguageModel], trim: Callable[[], None]) -> None:
        """Loads the model.

        - load: makes the model with its weights
        - trim: gives freed memory to the kernel
        """
        self._load, self._trim = load, trim
        self._model: LanguageModel | None = load()
        self._shapes = self._model.attention_shapes()
        self.vocab_shard: VocabShard = self._model.vocab_shard
        self.capture_may_fail = self._model.capture_may_fail
        self.memories: dict[str, DeviceMemory] = {}
        self.notes: dict[str, bytes] = {}

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._loaded(tokens, positions, attend, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.logits(hidden)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.local_logits(hidden)

    def attention_shapes(self) -> Sequence[AttentionShape]:
        return self._shapes

    def check(self) -> None:
        """Does nothing: no other process has these weights."""

    def give_back(self, level: int) -> None:
        if level >= WITHOUT_WEIGHTS:
            self._model = None
            gc.collect()
            self._trim()

    def take_back(self) -> None:
        if self._model is None:
            self._model = self._load()
            self._trim()

    @property
    def _loaded(self) -> LanguageModel:
        if self._model is None:
            raise RuntimeError("the model sleeps: its weights are not there")
        return self._model


class WeightsNote(msgspec.Struct, frozen=True):
    """Note that a memory holder keeps with weights.

    Attributes:
    - size: bytes of all parameters
    - checksum: sum of the parameters as int64, modulo 2^64; 0 for sealed memory
    - table: bytes of the PackedMatrices (weight_memory.py) at the end of the memory; 0: none
    """

    size: int
    checksum: int
    table: int = 0


class HostWeights:
    """SleepingWeights in memory of the host, sealed. At level 1 they stay there."""

    def __init__(
        self,
        name: str,
        memory: SealedMemory,
        note: WeightsNote,
        read: Callable[[], WeightsNote],
    ) -> None:
        """Weights that were read or taken.

        - name: under which the memory is kept
        - memory: has the weights, sealed
        - note: of the weights
        - read: reads the weights anew into `memory` that was given back
        """
        self._name, self._memory, self._note, self._read = name, memory, note, read
        self._there = True
        self.memories: dict[str, DeviceMemory] = {name: memory}

    @property
    def notes(self) -> dict[str, bytes]:
        return {self._name: msgspec.msgpack.encode(self._note)}

    def check(self) -> None:
        """Does nothing: sealed memory cannot change."""

    def give_back(self, level: int) -> None:
        if level >= WITHOUT_WEIGHTS and self._there:
            self._there = False
            self._memory.give_back()

    def take_back(self) -> None:
        if not self._there:
            self._note = self._read()
            self._there = True


class ProtectedMemory(DeviceMemory, Protocol):
    """Memory that can be made read-only, such as CudaMemory."""

    def protect(self, *, writable: bool) -> None: ...


class WeightsCopy(Protocol):
    """A copy of weights on the host, such as HostCopy."""

    @property
    def data(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class GpuWeights:
    """SleepingWeights in memory of a GPU. At level 1 memory of the host has a copy."""

    def __init__(
        self,
        name: str,
        memory: ProtectedMemory,
        fill: Callable[[torch.Tensor], None],
        copy: Callable[[torch.Tensor], WeightsCopy] = HostCopy,
    ) -> None:
        """Weights that were loaded or taken.

        - name: under which the memory is kept
        - memory: has the weights, read-only
        - fill: loads the weights into `memory.data`
        - copy: makes the copy on the host
        """
        self._name = name
        self._memory, self._fill, self._copied = memory, fill, copy
        self._checksum = checksum_of(memory.data)
        self._there = True
        self._copy: WeightsCopy | None = None
        self.memories: dict[str, DeviceMemory] = {name: memory}

    @property
    def notes(self) -> dict[str, bytes]:
        note = WeightsNote(self._memory.data.numel(), self._checksum)
        return {self._name: msgspec.msgpack.encode(note)}

    def check(self) -> None:
        if checksum_of(self._memory.data) != self._checksum:
            raise RuntimeError("the weights in memory have changed since they were read")

    def give_back(self, level: int) -> None:
        if level >= WITHOUT_WEIGHTS:
            self._drop_copy()
        elif self._there:
            self._copy = self._copied(self._memory.data)
        if self._there:
            self._there = False
            self._memory.give_back()
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        log.debug("asleep, torch holds %d bytes, of which %d are in use", reserved, allocated)

    def take_back(self) -> None:
        self._memory.take_back()
        self._there = True
        if self._copy is None:
            self._fill(self._memory.data)
            self._checksum = checksum_of(self._memory.data)
            gc.collect()
        else:
            self._memory.data.copy_(self._copy.data)
            self._drop_copy()
        self._memory.protect(writable=False)

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()


def checksum_of(data: torch.Tensor) -> int:
    """Returns the sum of `data` as int64, see WeightsNote."""
    return int(data.view(torch.int64).sum())
