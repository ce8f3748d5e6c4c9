"""Models whose weights outlive their engine: all parameters that stay lie in one piece of memory.

    WeightMemory        places in that memory, one behind the other
    build_on_gpu        a model with its weights in memory of cuMemCreate
    build_on_host       a model with its weights in a memfd that is sealed

A successor builds an equal model, so each parameter gets the same place, at addresses with scratch
behind them, and then maps the memory there: it fills no parameter and packs no matrix. Matrices
that oneDNN has packed have places, too, behind the parameters, in the order in which they were
packed.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from math import prod

import msgspec
import torch

from pipeinfer.engine.device_memory import CudaMemory, SealedMemory
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.sleeping import GpuWeights, HostWeights, WeightsNote, checksum_of
from pipeinfer.layers.placement import ParameterMemory
from pipeinfer.layers.weight import layout_of, packed_bytes, packed_over
from pipeinfer.models.causal_lm import CausalLM

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes, as torch's own allocator has it

Build = Callable[[ParameterMemory], CausalLM]  # with parameters there, not yet filled
Fill = Callable[[CausalLM], None]  # loads weights and packs them


class PackedMatrix(msgspec.Struct, frozen=True, array_like=True):
    """A matrix that was made when the model was packed.

    Attributes:
    - begin, size: its bytes in the memory
    - shape: of the matrix
    - dtype: torch's name, without "torch."
    - layout: index in PackedMatrices.layouts
    """

    begin: int
    size: int
    shape: tuple[int, ...]
    dtype: str
    layout: int


class PackedMatrices(msgspec.Struct, array_like=True):
    """All packed matrices of a model, in the order in which they were packed.

    Attributes:
    - layouts: the different layouts of oneDNN; b"" for matrices that torch reads
    - matrices: the matrices
    """

    layouts: list[bytes]
    matrices: list[PackedMatrix]


class ParameterSizes:
    """A ParameterMemory without memory, which counts bytes. size: bytes of the parameters that
    stay.
    """

    final = True

    def __init__(self) -> None:
        self.size = 0

    def stays(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Counts the bytes; returns a tensor on the device "meta"."""
        self.size += aligned(prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device="meta")

    def temporary(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor on the device "meta"."""
        return torch.empty(shape, dtype=dtype, device="meta")

    def packed(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("a model without values is not packed")


class WeightMemory:
    """A ParameterMemory within `data` uint8 [size], from its beginning on.

    Attributes:
    - used: bytes
    - complete: whether all that stays is in the memory
    """

    def __init__(
        self, data: torch.Tensor, matrices: PackedMatrices | None = None, *, final: bool = False
    ) -> None:
        """Memory for one model.

        - matrices: list in which packed matrices are noted, or, if `final`, were noted; None:
          packed matrices are not put into the memory
        - final: the memory has, or will have, its final values
        """
        self.final = final
        self.used, self.complete = 0, True
        self._data, self._matrices = data, matrices
        self._next = 0

    def stays(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._place(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def temporary(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.final:
            return torch.empty((), dtype=dtype, device=device).expand(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    def packed(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._matrices is None:
            self.complete = False
            return make()
        if not self.final:
            self._put(make(), self._matrices)
        found = self._matrices.matrices[self._next]
        self._next += 1
        values, dtype = self._data[found.begin :][: found.size], getattr(torch, found.dtype)
        layout = self._matrices.layouts[found.layout]
        if layout:
            return packed_over(values, found.shape, dtype, layout)
        return values.view(dtype).view(found.shape)

    def _put(self, made: torch.Tensor, into: PackedMatrices) -> None:
        if made.is_mkldnn:
            values, layout = packed_bytes(made), layout_of(made)
        else:
            values, layout = made.contiguous().view(-1).view(torch.uint8), b""
        if layout not in into.layouts:
            into.layouts.append(layout)
        begin, name = self.used, str(made.dtype).removeprefix("torch.")
        self._place(len(values)).copy_(values)
        index = into.layouts.index(layout)
        into.matrices.append(PackedMatrix(begin, len(values), tuple(made.shape), name, index))

    def _place(self, size: int) -> torch.Tensor:
        begin, self.used = self.used, self.used + aligned(size)
        if self.used > len(self._data):
            raise RuntimeError(f"weights take more than {len(self._data)} bytes")
        return self._data[begin : begin + size]


def aligned(size: int) -> int:
    """Returns `size` rounded up: bytes to the next parameter."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def build_on_gpu(
    kept: KeptMemory, name: str, build: Build, fill: Fill, least: Callable[[int], int]
) -> tuple[CausalLM, GpuWeights | None]:
    """Returns a model with final weights, and the weights, kept under `name`; None: not all that
    stays is in one piece of memory. least: returns the least of the numbers with which all ranks
    call it.
    """
    sizes, others = ParameterSizes(), torch.cuda.memory_allocated()
    build(sizes)

    def fill_again(data: torch.Tensor) -> None:
        """Fills `data` by another model with the same places, which is packed once, as the first
        was.
        """
        fill(build(WeightMemory(data)))

    found = _left_on_gpu(kept, name, sizes.size, build)
    if not least(found is not None or not kept.is_standby):
        kept.promote()  # there is no room for weights beside others
        found = found or _left_on_gpu(kept, name, sizes.size, build)
    kept.weight_bytes += sizes.size
    if found is not None:
        model, memory = found
        return model, GpuWeights(name, memory, fill_again)
    memory = CudaMemory(sizes.size)
    places = WeightMemory(memory.data)
    model = build(places)
    fill(model)
    gc.collect()
    if not places.complete:
        log.debug("weights are not kept: some were laid out anew when they were loaded")
        kept.weight_bytes += torch.cuda.memory_allocated() - others
        return model, None
    memory.protect(writable=False)
    weights = GpuWeights(name, memory, fill_again)
    kept.keep(name, "weights", weights.notes[name], memory.descriptor)
    return model, weights


def _left_on_gpu(
    kept: KeptMemory, name: str, size: int, build: Build
) -> tuple[CausalLM, CudaMemory] | None:
    """Returns the model over the weights that an earlier engine has left, and their memory; None:
    there are none of `size` bytes, or they have changed. Weights of no use are given back.
    """
    note = _note_of(kept, name, size)
    if note is None:
        return None
    memory = CudaMemory(size, scratch=True)
    model = build(WeightMemory(memory.data, final=True))
    model.pack()
    torch.cuda.synchronize()
    memory.map(kept.take(name), writable=False)
    if checksum_of(memory.data) == note.checksum:
        return model, memory
    log.warning("the weights in memory have changed since they were read: they are read again")
    kept.withdraw(name)
    memory.unmap()
    return None


def _note_of(kept: KeptMemory, name: str, size: int) -> WeightsNote | None:
    """Returns the note of weights that were left; None: there are none of `size` bytes. Weights of
    another size are given back.
    """
    raw = kept.note(name)
    note = None if raw is None else msgspec.msgpack.decode(raw, type=WeightsNote)
    if note is not None and note.size != size:
        kept.discard(name)
        return None
    return note


def build_on_host(
    kept: KeptMemory, name: str, build: Build, fill: Fill
) -> tuple[CausalLM, HostWeights]:
    """Returns a model with final weights, and the weights, kept under `name`. A standby that is
    lent no weights reads its own.
    """
    sizes = ParameterSizes()
    build(sizes)
    note = _note_of(kept, name, sizes.size)
    found = None if note is None else kept.take(name)
    if note is not None and found is not None:
        size = os.fstat(found).st_size
        memory = SealedMemory(size)
        raw = os.pread(found, note.table, size - note.table)
        matrices = msgspec.msgpack.decode(raw, type=PackedMatrices)
        model = build(WeightMemory(memory.data, matrices, final=True))
        model.pack()
        memory.map(found)
    else:
        memory = SealedMemory(sizes.size + _host_bytes())
        model, note = _read(memory, sizes.size, build, fill)
        kept.keep(name, "weights", msgspec.msgpack.encode(note), memory.descriptor)

    def read_again() -> WeightsNote:
        return _read(memory, sizes.size, build, fill)[1]

    kept.weight_bytes += memory.size
    return model, HostWeights(name, memory, note, read_again)


def _read(
    memory: SealedMemory, parameters: int, build: Build, fill: Fill
) -> tuple[CausalLM, WeightsNote]:
    """Reads a model into `memory`, which is scratch before and sealed afterwards."""
    memory.take_back()
    matrices = PackedMatrices([], [])
    places = WeightMemory(memory.data, matrices)
    model = build(places)
    fill(model)
    gc.collect()
    raw = msgspec.msgpack.encode(matrices)
    memory.seal(places.used, raw)
    return model, WeightsNote(parameters, 0, len(raw))


def no_room_for_weights() -> str:
    """The reason why the host gives no addresses for weights, such as strict accounting of memory;
    "" if it gives them.
    """
    try:
        SealedMemory(2 * _host_bytes())
    except OSError as error:
        return str(error)
    return ""


def _host_bytes() -> int:
    """Upper bound of the bytes of packed matrices: the host's memory. Packed matrices are not much
    larger than their sources, but only oneDNN can tell by how much.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
