"""Which attention backends there are; a backend's module is imported only when it is chosen.

Knows names and page sizes; it builds no pool and runs no step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from pipeinfer.attention.interface import AttentionBackend, AttentionShape
from pipeinfer.settings import ConfigurationError

# Name -> "module:class"; the class is called with (shapes of all layers, torch device).
BACKENDS = {"torch": "pipeinfer.attention.torch_backend:TorchBackend"}


def resolve(name: str, device: str) -> str:
    """The backend that `name` means on `device` ("cpu" or "cuda"); "auto" chooses.

    Raises ConfigurationError, which lists what exists.
    """
    if name == "auto":
        return "torch"
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigurationError(f"--attention: no backend {name!r} for {device}; known: {known}")
    return name


def load(name: str) -> type[Any]:
    """The class of backend `name`, as `resolve` returned it."""
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def resolve_page_size(name: str, page_size: int) -> int:
    """`page_size`, or what backend `name` prefers if it is 0.

    Raises ConfigurationError if the backend does not take that size.
    """
    backend = load(name)
    if page_size == 0:
        return backend.preferred_page_size
    sizes = backend.page_sizes
    if sizes is not None and page_size not in sizes:
        raise ConfigurationError(
            f"--page-size: attention backend {name!r} takes {', '.join(map(str, sizes))}, "
            f"not {page_size}"
        )
    return page_size


def create(name: str, shapes: Sequence[AttentionShape], device: Any) -> AttentionBackend:
    """A backend for the layers' `shapes` on `device`; the caller binds a pool to it."""
    return load(name)(shapes, device)
