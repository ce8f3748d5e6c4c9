"""The start of an engine: seconds by phase, and libraries that load while Python works.

    Start            reports the current phase and adds up the seconds of each
    preload_torch    loads torch's libraries and wakes a GPU on a thread of its own
    limit_kernel_cache, spin_briefly    variables for oneDNN and OpenMP, set before torch is there

`import torch` and its first look at a GPU hold the interpreter for seconds, so a thread outside of
the interpreter does that work before. Where it fails, the import itself does the work. Imports no
torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

# process: Python, the shell and the modules that every stage has, up to the builder. imports: torch
# and modules that import it. checks: settings against the checkpoint. ranks: waiting for other
# ranks. weights: read and put into place. attention: kernels of packages loaded. warm_up: steps
# that compile and load everything else. pool: measured and allocated. graphs: captured. step_times:
# measured. vocabulary: waiting for that of grammars.
PHASES = (
    "process", "imports", "checks", "ranks", "weights", "attention", "warm_up", "pool", "graphs",
    "step_times", "vocabulary",
)  # fmt: skip
WORDS = {
    "imports": "loading libraries",
    "checks": "checking the model's configuration",
    "weights": "reading weights",
    "attention": "loading kernels",
    "warm_up": "trying the first steps, which may compile kernels",
    "pool": "reserving memory for tokens",
    "step_times": "measuring how long steps take",
    "vocabulary": "preparing grammars",
}  # status texts as a phase begins; `captured` counts graphs, engine/stage.py reports ranks
SHOWN = 0.005  # seconds: shorter phases are left out of the log
TICKS = "SC_CLK_TCK"
GIB = 2**30


class Start:
    """Seconds of an engine's start, and its status texts.

    Attributes:
    - seconds: by phase
    - graphs: "captured of total"; "" without CUDA graphs

    Arguments:
    - say: called with the status text at the beginning of a phase and as weights and graphs
      progress
    - clock: seconds
    """

    def __init__(
        self,
        say: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.graphs = ""
        self._say = say
        self._clock = clock
        self._waited = 0.0
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Times the body as a part of phase `name`; a phase may have several parts."""
        began = self._clock() - self._waited
        if name in WORDS:
            self._say(WORDS[name])
        try:
            yield
        finally:
            self.took(name, self._clock() - self._waited - began)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Excludes the body from the times, also within a phase: a standby waits."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def took(self, name: str, seconds: float) -> None:
        """Adds `seconds` to phase `name`."""
        self.seconds[name] += seconds

    def read(self, done: int, total: int) -> None:
        """Reports `done` of `total` bytes of weights."""
        self._say(f"{WORDS['weights']}, {done / GIB:.2f} of {total / GIB:.2f} GiB")

    def captured(self, done: int, total: int) -> None:
        """Reports `done` of `total` graphs."""
        self.graphs = f"{done} of {total}"
        self._say(f"capturing CUDA graphs, {self.graphs}")

    def __str__(self) -> str:
        """Returns the phases that took long enough to be shown, for the log."""
        many = {"graphs": f" ({self.graphs})"}
        return ", ".join(
            f"{name.replace('_', ' ')} {seconds:.2f} s{many.get(name, '')}"
            for name, seconds in self.seconds.items()
            if seconds >= SHOWN
        )

    def statistics(self) -> dict[str, float]:
        """Returns `start_PHASE_seconds`, and `start_seconds` for all phases together."""
        found = {f"start_{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return found | {"start_seconds": sum(self.seconds.values())}


def process_age(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process began, in steps of 10 ms; 0.0 without /proc."""
    if not stat.exists():
        return 0.0
    began = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf(TICKS)
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)


log = logging.getLogger(__name__)

# In the order and with the flags of `import torch`. Not libtorch_python: its initialisation may
# need the interpreter.
LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch.so", os.RTLD_NOW),
)
WAKE = "cudaSetDevice", "cudaFree"  # the first cudaFree makes a context


def preload_torch(gpu: int | None) -> threading.Thread:
    """Starts a thread that loads torch's libraries, then wakes GPU number `gpu` and computes
    Triton's hash; gpu None: for a CPU.

    Join it before torch is imported, and before the process ends: a process that ends while
    libraries load is killed by a signal."""
    spin_briefly(os.environ)
    limit_kernel_cache(os.environ)
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch sets it before it wakes a GPU
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
    """Limits the caches of kernels, unless the user has set the variables. To be called before
    torch is imported.
    """
    for name in NAMES:
        environ.setdefault(name, str(MAX_CACHED_KERNELS))


# GNU OpenMP spins for milliseconds at every barrier. Where the other thread has lost its core to
# another process, and the other stages are such processes, each of a step's hundreds of barriers
# then costs a time slice, and a step ten times its time. This many spins, some 50 us, outlast most
# gaps within a step; then a thread sleeps and leaves its core to the process that delays it.
# Measured in docs/benchmarks.md.
SPINS = 3_000


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Limits spinning at barriers, unless the user has set a policy or a count. To be called before
    torch is imported.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


@lru_cache(maxsize=1)
def hashing() -> threading.Thread:
    """The thread that computes Triton's hash; join it before the first kernel is compiled."""
    thread = threading.Thread(target=_hash, name="hash", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    try:
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:  # triton_key is not part of triton's API
        log.debug("triton's hash is left to the first kernel: %s", error)
    else:
        triton_key()
