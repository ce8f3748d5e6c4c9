"""Loads torch's libraries from disk while Python does something else.

`import torch` holds the interpreter meanwhile, for a second and more where they have a GPU's
kernels. Knows where they lie; what fails here is left to the import.
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


def preload_torch() -> threading.Thread:
    """A running thread that loads them; to be waited for before torch is imported."""
    thread = threading.Thread(target=_load, name="libraries", daemon=True)
    thread.start()
    return thread


def _load() -> None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    # Called as any C function, so without the interpreter; ctypes.CDLL itself would hold it.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, flags in LIBRARIES:
        path = Path(found.origin).parent / "lib" / name
        if not path.exists() or not dlopen(os.fsencode(path), flags):
            log.debug("%s is left to the import of torch", path)
            return
