"""Triton's interpreter, without doing again what it has done, nor what it does for nothing.

Each call of a device function remaps all of triton.language, a hundred times for one launch of a
kernel. Once in a launch is enough: nothing is mapped back before its end.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


def hurry() -> None:
    """From now on, in this process; needs TRITON_INTERPRET."""
    remap_once()
    _compute_no_overflow()
    _make_types_once()


def _compute_no_overflow() -> None:
    """Each sum of integers is made again in 64 bits and compared with what 32 can hold; whether it
    was too large, nobody looks at without `debug`."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _make_types_once() -> None:
    """They never change, and are made anew for every operation. Those of pointers, which nobody can
    look up, still are."""
    numpys, with_element = interpreter._get_np_dtype, tl.block_type.with_element_ty
    numpy = functools.cache(numpys)
    block = functools.cache(lambda element, *shape: tl.block_type(element, list(shape)))

    def numpy_once(kind: tl.dtype):
        plain = type(kind.scalar) is tl.dtype
        return numpy(kind.scalar) if plain else numpys(kind)

    def block_once(self: tl.block_type, element: tl.dtype) -> tl.block_type:
        plain = type(element) is tl.dtype
        return block(element, *self.shape) if plain else with_element(self, element)

    interpreter._get_np_dtype, tl.block_type.with_element_ty = numpy_once, block_once


def remap_once() -> None:
    """See above."""
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
