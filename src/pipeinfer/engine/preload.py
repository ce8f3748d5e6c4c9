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
from pathlib import Path

from pipeinfer.engine.cuda.triton_hash import hashing
from pipeinfer.engine.onednn import keep_few_kernels
from pipeinfer.engine.openmp import spin_briefly

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
    keep_few_kernels(os.environ)
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
