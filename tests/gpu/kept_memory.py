"""What outlives a killed process on a GPU, and for how long it still writes; a tool.

`python tests/gpu/kept_memory.py` makes memory with cuMemCreate in one process, keeps its descriptor
in another one that has no CUDA, kills the maker with SIGKILL while a kernel of it spins, and maps
the memory in a successor. It prints one line of JSON for each question. Needs cupy for kernels.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

MIB, GIB = 1 << 20, 1 << 30
READ, READ_WRITE = 1, 3
SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns, unsigned int* where, unsigned int value) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
    *where = value;
}
extern "C" __global__ void fill(unsigned int* where, unsigned int value, unsigned long long count) {
    unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (; at < count; at += gridDim.x * (unsigned long long)blockDim.x) where[at] = value;
}
extern "C" __global__ void wrong(const unsigned int* where, unsigned int value,
                                 unsigned long long count, unsigned long long* found) {
    unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (; at < count; at += gridDim.x * (unsigned long long)blockDim.x)
        if (where[at] != value) atomicAdd(found, 1ull);
}
"""


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Driver:
    """The driver's virtual memory calls, for GPU 0; the current context is torch's."""

    def __init__(self):
        import torch

        torch.zeros(1, device="cuda")
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.torch = torch

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value and text.value.decode()}")

    def create(self, size):
        prop = AllocationProp(type=1, handle_types=1, location=Location(1, 0))
        handle = ctypes.c_ulonglong()
        self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(prop),
                  ctypes.c_ulonglong(0))  # fmt: skip
        return handle

    def export(self, handle):
        fd = ctypes.c_int()
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(1),
                  ctypes.c_ulonglong(0))  # fmt: skip
        return fd.value

    def take(self, fd):
        handle = ctypes.c_ulonglong()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd),
                  ctypes.c_int(1))  # fmt: skip
        return handle

    def reserve(self, size):
        at = ctypes.c_ulonglong()
        self.call("cuMemAddressReserve", ctypes.byref(at), ctypes.c_size_t(size),
                  ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))  # fmt: skip
        return at.value

    def map(self, at, size, handle, access=READ_WRITE):
        address = ctypes.c_ulonglong(at)
        self.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle,
                  ctypes.c_ulonglong(0))  # fmt: skip
        desc = AccessDesc(Location(1, 0), access)
        self.call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(desc),
                  ctypes.c_size_t(1))  # fmt: skip

    def unmap(self, at, size):
        self.call("cuMemUnmap", ctypes.c_ulonglong(at), ctypes.c_size_t(size))

    def release(self, handle):
        self.call("cuMemRelease", handle)

    def tensor(self, at, count, dtype="<u4"):
        class Interface:
            __cuda_array_interface__ = {
                "shape": (count,), "typestr": dtype, "data": (at, False), "version": 2,
            }  # fmt: skip

        return self.torch.as_tensor(Interface(), device="cuda")


def kernels():
    import cupy
    import numpy as np

    module = cupy.RawModule(code=SPIN)
    return cupy, np, module


def say(**found):
    print(json.dumps(found), flush=True)


def maker(link, size, spin_ms):
    """Makes memory, fills it with 7, lends its descriptor, launches a kernel that spins."""
    driver = Driver()
    cupy, np, module = kernels()
    began = time.perf_counter()
    handle, at = driver.create(size), driver.reserve(size)
    driver.map(at, size, handle)
    made = time.perf_counter() - began
    module.get_function("fill")(
        (1024,), (256,), (np.uint64(at), np.uint32(7), np.uint64(size // 4))
    )
    spin = module.get_function("spin")
    spin((1,), (1,), (np.uint64(1000), np.uint64(at), np.uint32(7)))
    cupy.cuda.runtime.deviceSynchronize()
    fd = driver.export(handle)
    socket.send_fds(link, [json.dumps({"made_s": made}).encode()], [fd])
    link.recv(1)  # the holder has it
    spin((1,), (1,), (np.uint64(spin_ms * 1_000_000), np.uint64(at), np.uint32(9)))
    link.send(b"s")
    time.sleep(60)


def successor(link, size, watch_s):
    """Maps the memory, says what it finds and when the word at its begin changes."""
    driver = Driver()
    cupy, np, module = kernels()
    module.get_function("spin")
    found = cupy.zeros(1, dtype=cupy.uint64)
    link.send(b"r")
    told, fds, *_ = socket.recv_fds(link, 100, 1)
    reaped = float(told)
    began = time.perf_counter()
    handle, at = driver.take(fds[0]), driver.reserve(size)
    os.close(fds[0])
    driver.map(at, size, handle)
    mapped = time.perf_counter() - began
    count = size // 4 - 1
    module.get_function("wrong")((1024,), (256,), (np.uint64(at + 4), np.uint32(7),
                                 np.uint64(count), found))  # fmt: skip
    words = driver.tensor(at, 1, "<i4")
    first, late, until = int(words[0]), None, time.time() + watch_s
    while time.time() < until and late is None:
        if int(words[0]) != first:
            late = time.time() - reaped
    answer = {"map_s": mapped, "wrong_words": int(found[0]), "first_word": first}
    answer |= {"late_write_s_after_reap": late, "tensor_works": words.is_cuda}
    link.send(json.dumps(answer).encode())


def start(role, *args):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen(
        [sys.executable, __file__, role, str(theirs.fileno()), *map(str, args)],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return child, ours


def one_death(size, spin_ms, watch_s=3.0):
    """The holder's part: it keeps a descriptor, and has no CUDA."""
    after, to_after = start("successor", size, watch_s)
    child, link = start("maker", size, spin_ms)
    told, fds, *_ = socket.recv_fds(link, 1000, 1)
    to_after.recv(1)  # is ready
    link.send(b"k")
    link.recv(1)  # it spins
    time.sleep(0.05)
    began = time.time()
    child.send_signal(signal.SIGKILL)
    child.wait()
    reaped = time.time()
    socket.send_fds(to_after, [str(reaped).encode()], fds)
    answer = json.loads(to_after.recv(10_000))
    after.wait()
    os.close(fds[0])
    return {
        "size_mib": size // MIB, "spin_ms": spin_ms, **json.loads(told),
        "kill_to_reap_s": reaped - began, **answer,
    }  # fmt: skip


def read_only(link):
    """A kernel reads memory that is mapped for reading; then one writes."""
    driver = Driver()
    cupy, np, module = kernels()
    size = 2 * MIB
    handle, at, other = driver.create(size), driver.reserve(size), driver.reserve(size)
    driver.map(at, size, handle)
    module.get_function("fill")((8,), (256,), (np.uint64(at), np.uint32(7), np.uint64(size // 4)))
    cupy.cuda.runtime.deviceSynchronize()
    answer = {}
    try:
        driver.map(other, size, handle, READ)
        answer["second_mapping_read_only"] = "granted"
        found = cupy.zeros(1, dtype=cupy.uint64)
        module.get_function("wrong")((8,), (256,), (np.uint64(other), np.uint32(7),
                                     np.uint64(size // 4), found))  # fmt: skip
        answer["wrong_words"] = int(found[0])
        module.get_function("fill")((8,), (256,), (np.uint64(other), np.uint32(1), np.uint64(4)))
        cupy.cuda.runtime.deviceSynchronize()
        answer["write"] = f"went through, reads {int(driver.tensor(at, 1, '<i4')[0])}"
    except Exception as error:
        answer["error"] = str(error)[:200]
    link.send(json.dumps(answer).encode())


def same_addresses(link):
    """Unmaps what a CUDA graph uses, gives it back, maps new memory there, replays."""
    driver = Driver()
    torch = driver.torch
    size = 8 * GIB
    before = torch.cuda.mem_get_info()[0]
    handle, at = driver.create(size), driver.reserve(size)
    driver.map(at, size, handle)
    numbers = driver.tensor(at, 1024, "<i4")
    numbers.fill_(5)
    for _ in range(2):
        total = numbers.sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = numbers.sum()
    graph.replay()
    torch.cuda.synchronize()
    held = before - torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    driver.unmap(at, size)
    driver.release(handle)
    asleep, slept = before - torch.cuda.mem_get_info()[0], time.perf_counter() - began
    began = time.perf_counter()
    handle = driver.create(size)
    driver.map(at, size, handle)
    woken = time.perf_counter() - began
    numbers.fill_(6)
    graph.replay()
    link.send(json.dumps({
        "size_gib": 8, "held_mib": held // MIB, "asleep_mib": asleep // MIB, "unmap_s": slept,
        "map_s": woken, "graph_reads_new_memory": int(total) == 6 * 1024,
    }).encode())  # fmt: skip


def used_mib():
    text = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    )
    return int(text.split()[0])


def idle_context(link):
    """A process with a context, as torch makes it, and nothing else."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    link.send(b"r")
    link.recv(1)


def freed(size):
    """How long memory stays taken when its maker was killed and the last descriptor is closed."""
    calm = used_mib()
    child, link = start("maker", size, 1)
    _, fds, *_ = socket.recv_fds(link, 1000, 1)
    link.send(b"k")
    link.recv(1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(1.0)
    kept = used_mib() - calm
    began = time.time()
    os.close(fds[0])
    while used_mib() - calm > 64 and time.time() - began < 10:
        time.sleep(0.01)
    return {
        "size_mib": size // MIB, "kept_mib_after_death": kept, "left_mib": used_mib() - calm,
        "freed_s_after_close": time.time() - began,
    }  # fmt: skip


def main():
    if len(sys.argv) > 1:
        link = socket.socket(fileno=int(sys.argv[2]))
        globals()[sys.argv[1]](link, *(float(x) if "." in x else int(x) for x in sys.argv[3:]))
        return
    calm = used_mib()
    child, link = start("idle_context")
    link.recv(1)
    say(question="a context", mib=used_mib() - calm)
    link.send(b"e")
    child.wait()
    for role in ("read_only", "same_addresses"):
        child, link = start(role)
        say(question=role, **json.loads(link.recv(10_000) or b'{"error": "no answer"}'))
        child.wait()
    for size, spin in ((256 * MIB, 1), (256 * MIB, 2000), (40 * GIB, 1), (40 * GIB, 2000)):
        say(question="death", **one_death(size, spin))
    for _ in range(5):
        say(question="death", **one_death(64 * MIB, 700))
    say(question="freed", **freed(20 * GIB))


if __name__ == "__main__":
    main()
