"""What an engine gives back while it sleeps, and has again when it wakes: pages and weights.

    EngineMemory         a rank's pool and weights, and what its memory holder has of them
    ReloadableModel      a model of a host, which can be dropped and loaded anew
    build_with_weights   a model of a GPU whose parameters lie one behind the other in one piece of
                         memory, which is filled unless an engine before has left it filled
    GpuWeights           gives that memory back, and has it again where it was

Weights in one piece outlive their engine: a successor builds the same model, so each parameter has
the same place again. What is not kept: quantized weights, which are laid out anew when they are
loaded, and weights on a CPU, which oneDNN packs into memory of its own. Knows no plan.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import msgspec
import torch

from pipeinfer.engine.device_memory import CudaMemory, DeviceMemory, HostCopy
from pipeinfer.engine.kept_memory import POOL, WEIGHTS, KeptMemory
from pipeinfer.layers.attention import Attend
from pipeinfer.layers.placement import AllocateParameter
from pipeinfer.models.causal_lm import CausalLM, LanguageModel, VocabShard
from pipeinfer.runtime.memory_holder import Keep
from pipeinfer.step import AttentionShape

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes, as torch's own allocator has it
WITHOUT_WEIGHTS = 2  # the level of sleep from which on weights are loaded anew


class SleepingWeights(Protocol):
    """A rank's weights, of which no step is under way."""

    @property
    def memories(self) -> dict[str, DeviceMemory]:
        """Their memory that a memory holder has, by name."""
        ...

    @property
    def notes(self) -> dict[str, bytes]:
        """What its memory holder is to hand over with each of `memories`."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if they are not as they were when this process had them first."""
        ...

    def give_back(self, level: int, /) -> None:
        """As SetSleep(level) says; they may be at a lower level already."""
        ...

    def take_back(self) -> None:
        """They are as before, or as files are by now, at the same addresses."""
        ...


class WeightFiles(Protocol):
    """The files that weights are read from."""

    @property
    def key(self) -> bytes:
        """Of the files as of the last `look`, see model_key."""
        ...

    def look(self) -> None:
        """Before weights are read anew. Raises RuntimeError for files of which another engine would
        be made."""
        ...

    def check(self) -> None:
        """When they were read. Raises RuntimeError if the files are others than at the last
        `look`."""
        ...


class EngineMemory:
    """Pool and weights of one rank, whose pool is `kept` (KeptMemory.opened). Where weights are
    read anew, from `files` that are others by now, what is kept belongs to those afterwards.

    To sleep: `withdraw`, then `give_back`. To wake: `take_back`, then `keep`. give_back and
    take_back take long, and may be called on any thread; `run` calls what they do where steps are
    computed, when all that was launched has ended.
    """

    def __init__(
        self,
        kept: KeptMemory,
        weights: SleepingWeights,
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
        """Nobody believes the pages any more, and the memory holder has no memory of this rank that
        it would keep from others. On the event loop."""
        self._directory.make_unusable()
        self._withdrawn += self._kept.withdraw(POOL, *self._weights.memories)

    def give_back(self, level: int) -> None:
        """Memory that others may use; `level`: of SetSleep."""
        self._run(lambda: self._give_back(level))

    def _give_back(self, level: int) -> None:
        if self._has_pool:
            self._has_pool = False
            self._pool.give_back()
        self._reads_files = self._reads_files or level >= WITHOUT_WEIGHTS
        self._weights.give_back(level)
        gc.collect()

    def take_back(self) -> None:
        """All is there again, pages as zeros. Raises RuntimeError where there is no memory."""
        self._run(self._take_back)

    def _take_back(self) -> None:
        if self._reads_files:
            self._files.look()
        self._weights.take_back()
        if self._reads_files:
            self._files.check()
            self._reads_files = False
        self._pool.take_back()
        self._has_pool = True

    def keep(self) -> None:
        """The memory holder has all again. On the event loop."""
        self._kept.belong_to(self._files.key)
        memory, notes = {POOL: self._pool, **self._weights.memories}, self._weights.notes
        for entry in self._withdrawn:
            note = notes.get(entry.name, entry.note)
            self._kept.keep(entry.name, entry.kind, note, memory[entry.name].descriptor)
        self._withdrawn.clear()


class ReloadableModel:
    """See LanguageModel and SleepingWeights. Its weights are in memory of the host already, so at
    level 1 they stay."""

    def __init__(self, load: Callable[[], LanguageModel], trim: Callable[[], None]) -> None:
        """load: makes the model with its weights. trim: gives freed memory to the kernel."""
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
        """No other process has them."""

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
    """size: bytes of all parameters. checksum: their sum as int64, modulo 2^64."""

    size: int
    checksum: int


class ParameterSizes:
    """size: bytes of the parameters that `allocate` was asked for; they get no memory."""

    def __init__(self) -> None:
        self.size = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device "meta"."""
        self.size += _aligned(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


class WeightMemory:
    """Parameters within `data` uint8 [size], from its begin on."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._used = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next one."""
        begin, self._used = self._used, self._used + _aligned(shape, dtype)
        part = self._data[begin : begin + prod(shape) * dtype.itemsize]
        return part.view(dtype).view(shape)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def build_with_weights(
    kept: KeptMemory,
    build: Callable[[AllocateParameter], CausalLM],
    fill: Callable[[CausalLM], None],
    least: Callable[[int], int],
) -> tuple[CausalLM, GpuWeights | None]:
    """A model whose weights are final, and those; None: they are not in one piece. build: makes it
    with parameters from what it is given. fill: loads its weights and packs them. least: from a
    number of this rank to the least of all ranks, which all call it."""
    sizes = ParameterSizes()
    build(sizes.allocate)

    def fill_again(data: torch.Tensor) -> None:
        """By another model with the same places, which is packed once, as the first was."""
        fill(build(WeightMemory(data).allocate))

    found = _found_model(kept, sizes.size, build)
    if not least(found is not None or not kept.is_standby):
        kept.promote()  # there is no room for weights beside others
        found = found or _found_model(kept, sizes.size, build)
    if found is not None:
        kept.weight_bytes = sizes.size
        model, memory = found
        return model, GpuWeights(memory, fill_again)
    memory = CudaMemory(sizes.size)
    model = build(WeightMemory(memory.data).allocate)
    before = torch.cuda.memory_allocated()
    fill(model)
    gc.collect()
    if torch.cuda.memory_allocated() > before:
        log.debug("weights are not kept: some were laid out anew when they were loaded")
        kept.weight_bytes = torch.cuda.memory_allocated() + sizes.size
        return model, None
    memory.protect(writable=False)
    weights = GpuWeights(memory, fill_again)
    kept.keep(WEIGHTS, "weights", weights.notes[WEIGHTS], memory.descriptor)
    kept.weight_bytes = sizes.size
    return model, weights


class ProtectedMemory(DeviceMemory, Protocol):
    """Memory that can be made read-only, such as CudaMemory."""

    def protect(self, *, writable: bool) -> None: ...


class WeightsCopy(Protocol):
    """See HostCopy."""

    @property
    def data(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class GpuWeights:
    """See SleepingWeights. At level 1 a copy of them is in memory of the host."""

    def __init__(
        self,
        memory: ProtectedMemory,
        fill: Callable[[torch.Tensor], None],
        copy: Callable[[torch.Tensor], WeightsCopy] = HostCopy,
    ) -> None:
        """memory: has them, read-only. fill: loads them into `memory.data`."""
        self._memory, self._fill, self._copied = memory, fill, copy
        self._checksum = _checksum(memory.data)
        self._there = True
        self._copy: WeightsCopy | None = None
        self.memories: dict[str, DeviceMemory] = {WEIGHTS: memory}

    @property
    def notes(self) -> dict[str, bytes]:
        note = WeightsNote(self._memory.data.numel(), self._checksum)
        return {WEIGHTS: msgspec.msgpack.encode(note)}

    def check(self) -> None:
        if _checksum(self._memory.data) != self._checksum:
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
            self._checksum = _checksum(self._memory.data)
            gc.collect()
        else:
            self._memory.data.copy_(self._copy.data)
            self._drop_copy()
        self._memory.protect(writable=False)

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()


def _found_model(
    kept: KeptMemory, size: int, build: Callable[[AllocateParameter], CausalLM]
) -> tuple[CausalLM, CudaMemory] | None:
    """The model over the weights that an engine before has left, and their memory; None: there are
    none of `size` bytes, or they have changed. What is not of use is given back."""
    raw = kept.note(WEIGHTS)
    if raw is None:
        return None
    note = msgspec.msgpack.decode(raw, type=WeightsNote)
    if note.size != size:
        kept.discard(WEIGHTS)
        return None
    memory = CudaMemory(size, scratch=True)
    model = build(WeightMemory(memory.data).allocate)
    model.pack()  # what it writes is there already
    torch.cuda.synchronize()
    memory.map(kept.take(WEIGHTS), writable=False)
    if _checksum(memory.data) == note.checksum:
        return model, memory
    log.warning("the weights in memory have changed since they were read: they are read again")
    kept.withdraw(WEIGHTS)
    memory.unmap()
    return None


def _checksum(data: torch.Tensor) -> int:
    return int(data.view(torch.int64).sum())
