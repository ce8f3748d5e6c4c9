"""Loads torch's libraries from disk, and wakes a GPU, while Python does something else.

`import torch` and its first look at a GPU hold the interpreter meanwhile: seconds, with a GPU's
kernels. Knows where libraries lie, and what they read of the environment; what fails here is left
to the import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import MutableMapping
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

# In the order and with the flags of `import torch`. Not libtorch_python: what is run when that is
# loaded may need the interpreter.
LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch.so", os.RTLD_NOW),
)
WAKE = "cudaSetDevice", "cudaFree"  # what the first call of the latter does is make a context


def preload_torch(gpu: int | None) -> threading.Thread:
    """A running thread that loads them, then wakes GPU number `gpu` where there is one, and has
    Triton's hash made for it; None: none is wanted. To be waited for before torch is imported, and
    before the process ends: amid such loading it would be ended by a signal."""
    spin_briefly(os.environ)
    limit_kernel_cache(os.environ)
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it wakes one
    thread = threading.Thread(target=_load, args=(gpu,), name="libraries", daemon=True)
    thread.start()
    return thread


def _load(gpu: int | None) -> None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    # Called as any C functions, so without the interpreter; ctypes.CDLL itself would hold it.
    here = ctypes.CDLL(None)
    here.dlopen.restype, here.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, flags in LIBRARIES:
        path = Path(found.origin).parent / "lib" / name
        if not path.exists() or not here.dlopen(os.fsencode(path), flags):
            log.debug("%s is left to the import of torch", path)
            return
    if gpu is not None and all(hasattr(here, name) for name in WAKE):  # torch is built for GPUs
        here.cudaFree.argtypes = (ctypes.c_void_p,)
        error = here.cudaSetDevice(gpu) or here.cudaFree(None)
        log.debug("GPU %d: %s", gpu, f"error {error}" if error else "awake")
        if not error:
            hashing()


# oneDNN makes a kernel for each number of rows of each shape of weights, up to half a MB, and keeps
# the last 1,024; so does torch, which holds them with all they need. With 128 an engine is as fast
# and some 200 MiB smaller; see docs/benchmarks.md.
MAX_CACHED_KERNELS = 128
NAMES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"  # oneDNN's, and torch's


def limit_kernel_cache(environ: MutableMapping[str, str]) -> None:
    """To be called before torch is imported; what the user has set stays."""
    for name in NAMES:
        environ.setdefault(name, str(MAX_CACHED_KERNELS))


# GNU OpenMP spins for milliseconds at every barrier. Where the other thread has lost its core to
# another process, and the other stages are such processes, each of a step's hundreds of barriers
# then costs a time slice, and a step ten times its time. This many spins, some 50 us, outlast most
# gaps within a step; then a thread sleeps and leaves its core to whoever keeps it waiting. Measured
# in docs/benchmarks.md.
SPINS = 3_000


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """To be called before torch is imported; what the user has set stays."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


@lru_cache(maxsize=1)
def hashing() -> threading.Thread:
    """It makes the hash, or has; to be waited for before the first kernel is asked for."""
    thread = threading.Thread(target=_hash, name="hash", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    try:
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:  # no part of what triton promises
        log.debug("triton's hash is left to the first kernel: %s", error)
    else:
        triton_key()
