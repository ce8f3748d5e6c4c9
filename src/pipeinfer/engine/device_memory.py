"""Memory that a descriptor names, so that it can outlive the process that made it.

    DeviceMemory   protocol: bytes as a tensor, and their descriptor
    HostMemory     a memfd
    SealedMemory   a memfd that no process can write any more
    CudaMemory     memory of the driver's virtual memory calls (cuMemCreate), at an address that
                   stays the same when the memory behind it is given back and made anew
    HostCopy       a copy of memory of a GPU on the host

Physical memory lives as long as a mapping or a descriptor of it. No page and no weight is known
here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:  # memory of a host can be looked at without torch
    import torch

    from pipeinfer.attention.interface import KVPool

log = logging.getLogger(__name__)

GRANULARITY = 2 << 20  # bytes: a multiple of the granularity of cuMemCreate on every GPU so far
SCRATCH_BYTES = 64 << 20  # bytes of the memory behind every part of a scratch range
TOUCHING_THREADS = 8  # threads that make memory of the host together
TOUCHED_BYTES = 64 << 20  # bytes that one thread makes at once: a multiple of a huge page

# Linux's; the mmap module has no mapping at a given address.
MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class DeviceMemory(Protocol):
    """Bytes that a descriptor names.

    Attributes:
    - descriptor: of the memory; this process's own, open as long as the memory is there
    - data: uint8 [size], at the memory's addresses

    The addresses last as long as the process; the memory behind them may change, so that tensors
    and CUDA graphs that hold addresses stay valid. Without own memory the addresses are scratch,
    with little or no memory behind them: writes are lost, and reads give any value.
    """

    @property
    def descriptor(self) -> int: ...

    @property
    def data(self) -> torch.Tensor: ...

    def zero_pages(self, pool: KVPool, pages: np.ndarray, /) -> None:
        """Zeroes `pages` int32 [n] of the pool that was made with this memory."""
        ...

    def give_back(self) -> None:
        """Frees the memory for others; the addresses must not be read or written until
        `take_back`.
        """
        ...

    def take_back(self) -> None:
        """Puts memory behind the addresses again, all zero. Raises RuntimeError if there is
        none.
        """
        ...

    def map(self, descriptor: int, /) -> None:
        """Puts the memory of `descriptor`, which this object owns from now on, behind the
        addresses.
        """
        ...


# (size in bytes, descriptor or None): memory of that size that the descriptor names; None: new
# memory, all zero.
Allocate = Callable[[int, int | None], DeviceMemory]


class HostMemory:
    """DeviceMemory of a host; takes real memory only for pages that were written."""

    def __init__(self, size: int, descriptor: int | None = None, *, scratch: bool = False) -> None:
        """Makes memory, or reserves addresses as scratch.

        - size: bytes
        - descriptor: of a memfd of `size` bytes, which this object owns from now on; None: new
          memory
        - scratch: no memory until `map` or `take_back`
        """
        self.descriptor = -1
        self._mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.array = np.frombuffer(self._mapped, np.uint8)
        if not scratch:
            self.map(_new_memfd(size) if descriptor is None else descriptor)

    @property
    def data(self) -> torch.Tensor:
        from pipeinfer.kernels.interface import tensor_of

        return tensor_of(self.array)

    def zero_pages(self, pool: KVPool, pages: np.ndarray) -> None:
        """Zeroes the pages, and gives back the memory that they took."""
        for begin, end in pool.byte_runs(pages):
            self.zero(begin, end)

    def give_back(self) -> None:
        self.zero(0, len(self.array))

    def take_back(self) -> None:
        """Makes new memory if there is none; real memory comes page by page, as it is written."""
        if self.descriptor < 0:
            self.map(_new_memfd(len(self.array)))

    def map(self, descriptor: int) -> None:
        """Turns scratch into memory; to be called once."""
        _map_at(self.array, len(self.array), mmap.MAP_SHARED, WRITABLE, descriptor)
        self.descriptor = descriptor

    def zero(self, begin: int, end: int) -> None:
        """Zeroes bytes begin .. end - 1."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.array[begin:end] = 0
            return
        self.array[begin:first] = 0
        self.array[last:end] = 0
        self._mapped.madvise(mmap.MADV_REMOVE, first, last - first)


def _new_memfd(size: int, flags: int = os.MFD_CLOEXEC) -> int:
    descriptor = os.memfd_create("pipeinfer", flags)
    os.ftruncate(descriptor, size)
    return descriptor


def _map_at(array: np.ndarray, size: int, flags: int, access: int, descriptor: int = -1) -> None:
    """Puts memory behind the first `size` bytes of `array`."""
    address = array.ctypes.data
    if size and _libc.mmap(address, size, access, flags | MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped where it is to be")


class SealedMemory:
    """DeviceMemory of a host that is written once and then sealed: no process can write it any
    more, this one included. Every process with a descriptor reads the sealed content.
    """

    def __init__(self, size: int) -> None:
        """Reserves `size` bytes of addresses, which are scratch until `map` or `take_back`; memory
        is taken only for bytes that are written.
        """
        self.descriptor = -1
        self._mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.array = np.frombuffer(self._mapped, np.uint8)

    @property
    def data(self) -> torch.Tensor:
        from pipeinfer.kernels.interface import tensor_of

        return tensor_of(self.array)

    @property
    def size(self) -> int:
        """Bytes of the memory; 0 while there is none."""
        return 0 if self.descriptor < 0 else os.fstat(self.descriptor).st_size

    def zero_pages(self, pool: KVPool, pages: np.ndarray) -> None:
        raise TypeError("no pages are in sealed memory")

    def take_back(self) -> None:
        """Makes new memory, which can be written until `seal`."""
        self.descriptor = _new_memfd(len(self.array), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _map_at(self.array, len(self.array), mmap.MAP_SHARED, WRITABLE, self.descriptor)

    def seal(self, size: int, more: bytes) -> None:
        """Seals the first `size` bytes of the memory, followed by `more`, which has no address."""
        descriptor, self.descriptor = self.descriptor, -1
        self._let_go()
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, more, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        self._map(descriptor, size)

    def map(self, descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise RuntimeError("memory that is to be read is not sealed")
        self._map(descriptor, min(os.fstat(descriptor).st_size, len(self.array)))

    def give_back(self) -> None:
        self._let_go()
        os.close(self.descriptor)
        self.descriptor = -1

    def _map(self, descriptor: int, size: int) -> None:
        # Private, since older kernels map no sealed memory as shared; no process writes it.
        # Populated at once, so that it counts as this process's, and no step waits for it.
        _map_at(self.array, size, mmap.MAP_PRIVATE | MAP_POPULATE, mmap.PROT_READ, descriptor)
        self.descriptor = descriptor

    def _let_go(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        _map_at(self.array, len(self.array), flags, WRITABLE)


class CudaMemory:
    """DeviceMemory of the current GPU. `unmap` gives the memory behind the addresses back."""

    def __init__(self, size: int, descriptor: int | None = None, *, scratch: bool = False) -> None:
        """Makes memory, or reserves addresses as scratch.

        - size: bytes
        - descriptor: of memory of cuMemCreate of `size` bytes, which this object owns from now on;
          None: new memory
        - scratch: until `map` or `take_back` the same small piece of memory stands behind every
          part of the range
        """
        import torch

        self._driver = CudaDriver()
        self._size = -(-size // GRANULARITY) * GRANULARITY
        self._address = self._driver.reserve(self._size)
        self._mapped: list[tuple[int, int]] = []  # address and size of each mapping
        self._descriptor = -1
        if scratch:
            self._map_scratch()
        else:
            self.map(descriptor)
        self.data = torch.as_tensor(_Bytes(self._address, size), device="cuda")
        if descriptor is None and not scratch:
            self.data.zero_()
            torch.cuda.synchronize()

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def map(self, descriptor: int | None = None, *, writable: bool = True) -> None:
        """Puts the memory of `descriptor` behind the addresses; None: new memory."""
        self.unmap()
        if descriptor is None:
            handle = self._driver.create(self._size)
            descriptor = self._driver.export(handle)
        else:
            handle = self._driver.take(descriptor)
        self._descriptor = descriptor
        self._map(self._address, self._size, handle)
        self._driver.release(handle)  # the mapping holds it
        self.protect(writable=writable)

    def protect(self, *, writable: bool) -> None:
        """Allows or forbids kernels of this process to write the memory; before it forbids, waits
        for kernels that write. Other processes may write in any case.
        """
        import torch

        if not writable:
            torch.cuda.synchronize()
        self._driver.set_access(self._address, self._size, writable)

    def unmap(self) -> None:
        """Gives the memory back, unless others have a descriptor of it. The caller must have waited
        for all kernels that read or write it.
        """
        for address, size in self._mapped:
            self._driver.unmap(address, size)
        self._mapped.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def give_back(self) -> None:
        self.unmap()

    def take_back(self) -> None:
        import torch

        self.map()
        self.data.zero_()
        torch.cuda.synchronize()

    def zero_pages(self, pool: KVPool, pages: np.ndarray) -> None:
        pool.zero_pages(pages)

    def _map_scratch(self) -> None:
        whole, rest = divmod(self._size, SCRATCH_BYTES)
        for size, times in ((SCRATCH_BYTES, whole), (rest, 1)):
            if size and times:
                handle = self._driver.create(size)
                for _ in range(times):
                    behind = sum(mapped for _, mapped in self._mapped)
                    self._map(self._address + behind, size, handle)
                self._driver.release(handle)
        self.protect(writable=True)

    def _map(self, address: int, size: int, handle: object) -> None:
        self._driver.map(address, size, handle)
        self._mapped.append((address, size))


class HostCopy:
    """A copy of memory of the current GPU on the host.

    Attributes:
    - data: uint8 [size]. Pinned by the driver, so that copies are as fast as the bus; not by torch,
      which rounds sizes up to a power of two, and keeps what is freed. If the driver does not pin
      that much, copies are slower
    """

    def __init__(self, data: torch.Tensor) -> None:
        """Copies `data` uint8 [size] from the GPU."""
        self._driver = CudaDriver()
        self.data = touched_memory(data.numel())
        self._pinned = True
        try:
            self._driver.pin(self.data.data_ptr(), self.data.numel())
        except RuntimeError as error:
            self._pinned = False
            log.warning("memory for a copy of the weights is not pinned: %s", error)
        self.data.copy_(data)

    def close(self) -> None:
        """Unpins the memory; no copy may be in flight."""
        if self._pinned:
            self._driver.unpin(self.data.data_ptr())
            self._pinned = False


def touched_memory(size: int) -> torch.Tensor:
    """Returns uint8 [size] of the host, all zero, whose pages were made on several cores: if the
    driver pins pages that do not exist yet, one core makes them all, at some 3 GB/s.
    """
    import torch

    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(start: int) -> None:
        data[start : start + TOUCHED_BYTES].zero_()

    with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
        list(pool.map(touch, range(0, size, TOUCHED_BYTES)))
    return data


def cuda_unsupported_reason() -> str:
    """The reason why there can be no CudaMemory here, such as a driver that exports no descriptors;
    "" if there is none.
    """
    try:
        CudaMemory(GRANULARITY).unmap()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""


class _Bytes:
    """An object with __cuda_array_interface__ for `size` bytes at `address`, from which torch makes
    a uint8 tensor.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


class CudaDriver:
    """The driver's virtual memory calls for the current GPU. Raises RuntimeError with the driver's
    name of an error; ImportError without the package cuda-bindings, which torch for CUDA brings
    along.

    Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html.
    """

    def __init__(self) -> None:
        import torch

        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        device = torch.cuda.current_device()
        torch.cuda.synchronize(device)  # makes its context the current one
        kinds = self._cuda.CUmemAllocationHandleType
        self._descriptors = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        self._wanted = self._cuda.CUmemAllocationProp()
        self._wanted.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._wanted.requestedHandleTypes = self._descriptors
        self._wanted.location = location
        self._access = self._cuda.CUmemAccessDesc()
        self._access.location = location

    def reserve(self, size: int) -> int:
        """Reserves `size` bytes of addresses for `map`; returns the first."""
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def create(self, size: int) -> object:
        """Returns a handle of new memory, to be released."""
        return self._call("cuMemCreate", size, self._wanted, 0)

    def export(self, handle: object) -> int:
        """Returns a descriptor of the handle's memory, to be closed."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._descriptors, 0))

    def take(self, descriptor: int) -> object:
        """Returns a handle of the memory of `descriptor`, to be released."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._descriptors)

    def release(self, handle: object) -> None:
        """Releases a handle of `create` or `take`."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: object) -> None:
        """Puts the first `size` bytes of the handle's memory at `address`; `set_access` must
        follow.
        """
        self._call("cuMemMap", address, size, 0, handle, 0)

    def set_access(self, address: int, size: int, writable: bool) -> None:
        """Sets what kernels of this process may do with the memory: read and write, or only
        read.
        """
        flags = self._cuda.CUmemAccess_flags
        self._access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Removes one mapping that `map` made."""
        self._call("cuMemUnmap", address, size)

    def pin(self, address: int, size: int) -> None:
        """Pins memory of the host. Source:
        https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html."""
        self._call("cuMemHostRegister", address, size, 0)

    def unpin(self, address: int) -> None:
        """Unpins memory that `pin` pinned."""
        self._call("cuMemHostUnregister", address)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *found = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {getattr(status, 'name', status)}")
        return found[0] if found else None
