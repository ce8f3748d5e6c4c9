"""Loads libraries of torch and of kernels, and wakes a GPU, while Python does something else.

`import torch` and its first look at a GPU hold the interpreter meanwhile: seconds, with a GPU's
kernels. Knows where libraries lie; what fails here is left to the import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

# In the order and with the flags of `import torch`. Not libtorch_python: what is run when that is
# loaded may need the interpreter.
LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch.so", os.RTLD_NOW),
)
WAKE = "cudaSetDevice", "cudaFree"  # what the first call of the latter does is make a context
MAJOR, MINOR = 75, 76  # of a GPU's capability, for cudaDeviceGetAttribute
# Of sgl_kernel, a second to load: its operations, by capability, and its attention.
KERNELS = "sgl_kernel"
HOPPER, OTHERS, ATTENTION = "sm90/common_ops.*.so", "sm100/common_ops.*.so", "flash_ops.*.so"


def preload_torch(gpu: int | None) -> threading.Thread:
    """A running thread that loads them, and then wakes GPU number `gpu` where there is one; None:
    none is wanted. To be waited for before torch is imported, and before the process ends: amid
    such loading it would be ended by a signal. What the libraries read of the environment as they
    are loaded, such as how long OpenMP spins, must stand there before."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it wakes one
    thread = threading.Thread(target=_load, args=(gpu,), name="libraries", daemon=True)
    thread.start()
    return thread


def _load(gpu: int | None) -> None:
    folder, here = _folder("torch"), _functions()
    if folder is None:
        return
    for name, flags in LIBRARIES:
        path = folder / "lib" / name
        if not path.exists() or not here.dlopen(os.fsencode(path), flags):
            log.debug("%s is left to the import of torch", path)
            return
    if gpu is not None and all(hasattr(here, name) for name in WAKE):  # torch is built for GPUs
        here.cudaFree.argtypes = (ctypes.c_void_p,)
        error = here.cudaSetDevice(gpu) or here.cudaFree(None)
        log.debug("GPU %d: %s", gpu, f"error {error}" if error else "awake")


def preload_kernels(gpu: int) -> threading.Thread:
    """The same for the package of kernels that most models use on GPU number `gpu`, which is awake:
    to be started when torch's libraries are there, and waited for before the package is imported.
    """
    thread = threading.Thread(target=_load_kernels, args=(gpu,), name="kernels", daemon=True)
    thread.start()
    return thread


def _load_kernels(gpu: int) -> None:
    folder, here = _folder(KERNELS), _functions()
    if folder is None or not hasattr(here, "cudaDeviceGetAttribute"):
        return
    numbers = [ctypes.c_int() for _ in (MAJOR, MINOR)]
    for number, attribute in zip(numbers, (MAJOR, MINOR), strict=True):
        if here.cudaDeviceGetAttribute(ctypes.byref(number), attribute, gpu):
            return
    major, minor = (number.value for number in numbers)
    for path in kernel_libraries(folder, (major, minor)):
        if not here.dlopen(os.fsencode(path), os.RTLD_NOW):
            log.debug("%s is left to its import", path)


def kernel_libraries(folder: Path, capability: tuple[int, int]) -> list[Path]:
    """Of the package in `folder`, what a GPU of that capability takes."""
    operations = HOPPER if capability == (9, 0) else OTHERS
    return [path for name in (operations, ATTENTION) for path in sorted(folder.glob(name))]


def _folder(package: str) -> Path | None:
    """Where it is installed; nothing of it is run."""
    found = importlib.util.find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _functions() -> ctypes.CDLL:
    """What is loaded, to be called as any C function is, so without the interpreter; ctypes.CDLL
    of a library itself would hold it."""
    here = ctypes.CDLL(None)
    here.dlopen.restype, here.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return here
