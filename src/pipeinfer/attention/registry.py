"""Registry of attention backends; a backend's module is imported only when it is chosen.

Knows names and page sizes; it builds no pool and runs no step.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeinfer.command_line import did_you_mean
from pipeinfer.settings import ConfigurationError
from pipeinfer.step import AttentionShape

if TYPE_CHECKING:
    import torch

    from pipeinfer.attention.interface import Attention, AttentionKind

log = logging.getLogger(__name__)

# Name -> "module:kind"; see AttentionKind in interface.py.
BACKENDS = {
    "torch": "pipeinfer.attention.torch_backend:TorchBackend",
    "flashinfer": "pipeinfer.attention.flashinfer_backend:FLASHINFER",
    "fa3": "pipeinfer.attention.fa3_backend:FA3",
    "hybrid": "pipeinfer.attention.triton_backend:HYBRID",
    "exact": "pipeinfer.attention.triton_backend:EXACT",
}
EXACT = "exact"  # the backend of --exact; no other name stands for it
# Packages that a backend made for GPUs needs; the other backends run on any device.
PACKAGES = {
    "flashinfer": ("flashinfer",),
    "fa3": ("sgl_kernel",),
    "hybrid": ("sgl_kernel",),
    EXACT: (),
}
# Modules of these packages that a backend imports when it is made: takes seconds.
IMPORTED = {
    "flashinfer": ("flashinfer.decode", "flashinfer.prefill"),
    "fa3": ("sgl_kernel.flash_attn",),
    "hybrid": ("sgl_kernel.flash_attn",),
    EXACT: (),
}
# Backends that do without a package which those look for: sgl_kernel would take a second to import
# all of FlashInfer, for norms and samplers that it has itself.
WITHOUT = {"fa3": "flashinfer", "hybrid": "flashinfer"}
HALVES = ("bfloat16", "float16")
HEAD_DIMS = {
    "flashinfer": (64, 128, 256),
    "fa3": (64, 96, 128, 192, 256),
    "hybrid": (64, 128, 256),
    EXACT: (64, 128, 256),
}
# Head sizes for which a backend is chosen by itself, the fastest first. With heads of 256, hybrid
# was not measured: builds of sgl_kernel for few head sizes lack FlashAttention-3 for them.
CHOICES = {"hybrid": (64, 128), "flashinfer": (64, 128, 256)}
HOPPER = 9
E4M3_SINCE = (8, 9)  # capability of GPUs that convert e4m3, which our store and decodes do
E4M3_HEAD_DIMS = (64, 128)  # head sizes of sgl_kernel's FlashAttention-3 in e4m3


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU and a model that decide which kernels can run.

    Attributes:
    - capability: of the GPU; (9, 0) is Hopper
    - dtype: of the computation
    - head_dim: values of a head
    - installed: packages with kernels
    - sinks, soft_cap: the model has them (see AttentionShape), and the backend must support them
    - e4m3: keys and values are stored in e4m3
    """

    capability: tuple[int, int]
    dtype: str
    head_dim: int
    installed: frozenset[str]
    sinks: bool = False
    soft_cap: bool = False
    e4m3: bool = False


def installed() -> frozenset[str]:
    """Returns the names of the kernels' packages that can be imported; imports none of them."""
    names = {package for packages in PACKAGES.values() for package in packages}
    return frozenset(name for name in names if importlib.util.find_spec(name) is not None)


def resolve(name: str, device: str, gpu: Gpu | None = None) -> str:
    """Returns the backend that `name` means on `device` ("cpu" or "cuda", which needs `gpu`).

    "auto" chooses. Raises ConfigurationError, with a name that can be used instead.
    """
    here = (name for name in BACKENDS if device == "cuda" or name not in PACKAGES)
    known = ["auto", *(one for one in here if one != EXACT)]
    if name != "auto" and name not in known:
        raise ConfigurationError(
            f"--attention: no backend {name!r} for {device}; known: {', '.join(known)}"
            + did_you_mean(name, known)
        )
    if name == "auto":
        return "torch" if gpu is None else _chosen(gpu)
    if gpu is None:
        return name
    reason = unsupported_reason(name, gpu)
    if reason:
        raise ConfigurationError(
            f"--attention {name}: {reason}; --attention {_chosen(gpu)} works here"
        )
    return name


def resolve_exact(name: str, device: str, gpu: Gpu | None = None) -> str:
    """Returns the backend of --exact for `name`: on a CPU "torch", which computes row by row.
    Raises ConfigurationError as `resolve` does.
    """
    chosen = "torch" if gpu is None else EXACT
    if name not in ("auto", chosen):
        raise ConfigurationError(
            f"--exact: with --attention {name} tokens depend on what else is computed; leave "
            "--attention out"
        )
    if gpu is not None and (reason := unsupported_reason(EXACT, gpu)):
        raise ConfigurationError(f"--exact: {reason}")
    return chosen


def _chosen(gpu: Gpu) -> str:
    """The fastest backend that can run, of those measured."""
    usual = (name for name, dims in CHOICES.items() if gpu.head_dim in dims)
    return next((name for name in usual if not unsupported_reason(name, gpu)), "torch")


def unsupported_reason(name: str, gpu: Gpu) -> str:
    """Why backend `name` cannot run on `gpu`, or ""."""
    if name not in PACKAGES:
        return ""
    if gpu.sinks and name == "flashinfer":
        return "it knows no attention sinks, which this model has"
    if gpu.soft_cap:
        return "it knows no soft cap of scores, which this model has"
    missing = [package for package in PACKAGES[name] if package not in gpu.installed]
    if missing:
        return f"the package {' and '.join(missing)} is not installed (pip install pipeinfer[cuda])"
    major = gpu.capability[0]
    if name in ("fa3", "hybrid") and major != HOPPER:
        return f"FlashAttention-3 is for GPUs of capability 9.0, this one has {major}.x"
    if name == EXACT and major != HOPPER:
        return f"sums were compared on GPUs of capability 9.0 alone, this one has {major}.x"
    if gpu.dtype not in HALVES:
        return f"its kernels compute in {' and '.join(HALVES)}, not {gpu.dtype}"
    if gpu.head_dim not in HEAD_DIMS[name]:
        sizes = ", ".join(map(str, HEAD_DIMS[name]))
        return f"there is no kernel for heads of {gpu.head_dim}, only {sizes}"
    if gpu.sinks and gpu.dtype != "bfloat16" and name != EXACT:
        return f"FlashAttention-3 takes attention sinks in bfloat16, not {gpu.dtype}"
    return _e4m3_unsupported_reason(name, gpu) if gpu.e4m3 else ""


def _e4m3_unsupported_reason(name: str, gpu: Gpu) -> str:
    """The reason why a backend cannot run with FP8 keys and values, or ""."""
    what = "--kv-cache-dtype fp8_e4m3"
    if name == EXACT:
        return f"there is no kernel for {what}"
    if gpu.capability < E4M3_SINCE:
        have, need = (f"{major}.{minor}" for major, minor in (gpu.capability, E4M3_SINCE))
        return f"with {what} it needs a GPU of capability {need}, this one has {have}"
    if name == "flashinfer":
        return ""
    if gpu.sinks:
        return f"with {what} FlashAttention-3 takes no attention sinks, which this model has"
    if gpu.dtype != "bfloat16":
        return f"with {what} FlashAttention-3 gives bfloat16, not {gpu.dtype}"
    if gpu.head_dim not in E4M3_HEAD_DIMS:
        sizes = " and ".join(map(str, E4M3_HEAD_DIMS))
        return f"with {what} FlashAttention-3 takes heads of {sizes}, not {gpu.head_dim}"
    return ""


def padded_head_dim(head_dim: int, backend: str = "") -> int:
    """Returns the smallest head size for which a backend is chosen by itself and that holds
    `head_dim` values; `head_dim` if there is none, or if `backend`, if given, takes any size.
    """
    if backend and backend not in HEAD_DIMS:
        return head_dim
    sizes = sorted({size for sizes in CHOICES.values() for size in sizes})
    return next((size for size in sizes if size >= head_dim), head_dim)


def load(name: str) -> AttentionKind:
    """Imports and returns the kind of backend `name`, a name that `resolve` returned."""
    return pkgutil.resolve_name(BACKENDS[name])


def resolve_page_size(name: str, page_size: int) -> int:
    """Returns `page_size`, or the preferred page size of backend `name` if it is 0.

    Raises ConfigurationError if the backend does not take that size.
    """
    traits = load(name).traits
    if page_size == 0:
        return traits.preferred_page_size
    sizes = traits.page_sizes
    if sizes is not None and page_size not in sizes:
        raise ConfigurationError(
            f"--page-size: attention backend {name!r} takes {', '.join(map(str, sizes))}, "
            f"not {page_size}"
        )
    return page_size


def import_packages(name: str) -> threading.Thread:
    """Starts a thread that imports the packages of backend `name`, without those in WITHOUT. An
    error is logged at debug level; the import of the backend itself will raise it."""

    def work() -> None:
        with _hidden(WITHOUT.get(name, "")):
            for module in IMPORTED.get(name, ()):
                try:
                    importlib.import_module(module)
                except Exception as error:
                    log.debug("%s is left to who needs it: %s", module, error)

    thread = threading.Thread(target=work, name="kernels", daemon=True)
    thread.start()
    return thread


@contextmanager
def _hidden(package: str) -> Generator[None]:
    """Makes imports of `package` raise ModuleNotFoundError within the block, unless it was imported
    before. "": nothing is hidden.

    The import system's reference ("The module cache") defines None in sys.modules as a module that
    cannot be imported. Packages that try to import `package` offer no switch of their own.
    """
    if not package or package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]  # typeshed lacks None here
    try:
        yield
    finally:
        del sys.modules[package]


def create(name: str, shapes: Sequence[AttentionShape], device: torch.device) -> Attention:
    """A backend for the layers' `shapes` on `device`; the caller binds a pool to it."""
    return load(name)(shapes, device)
