"""Triton's interpreter, without doing again what it has done.

Each call of a device function remaps all of triton.language, a hundred times for one launch of a
kernel. Once in a launch is enough: nothing is mapped back before its end.
"""

from __future__ import annotations

import functools

import triton.language as tl
from triton.runtime import interpreter


def remap_once() -> None:
    """From now on, in this process; needs TRITON_INTERPRET."""
    remap, launch, mapped = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def seen(fn) -> frozenset[int]:
        """The modules that `remap` finds in the function's globals."""
        found = {id(value) for value in fn.__globals__.values()}
        return frozenset(found & {id(tl), id(tl.core)})

    def once(fn):
        modules = seen(fn)
        if modules and modules <= mapped:
            return None
        mapped.update(modules)
        return remap(fn)

    def launched(self, *args, **kwargs) -> None:
        mapped.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launched
