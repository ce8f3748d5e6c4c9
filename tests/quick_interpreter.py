"""Triton's interpreter, without doing again what it has done, nor what it does for nothing.

Each call of a device function remaps all of triton.language, a hundred times for one launch of a
kernel. Once in a launch is enough: nothing is mapped back before its end. What a type says of
itself, and a tensor of its shape, is worked out once for each shape, not for every operation; that
is most of what an operation takes, since the numbers in it are few.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hurry() -> None:
    """From now on, in this process; needs TRITON_INTERPRET."""
    remap_once()
    _compute_no_overflow()
    _find_types_of_numpy_once()
    _describe_shapes_once()
    _compare_types_by_what_they_are()
    _broadcast_what_differs()
    _hand_arguments_on()


def _compute_no_overflow() -> None:
    """Each sum of integers is made again in 64 bits and compared with what 32 can hold; whether it
    was too large, nobody looks at without `debug`."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _find_types_of_numpy_once() -> None:
    """Those of pointers, which nobody can look up, are found anew."""
    numpys = interpreter._get_np_dtype
    numpy = functools.cache(numpys)

    def numpy_once(kind: tl.dtype):
        plain = type(kind.scalar) is tl.dtype
        return numpy(kind.scalar) if plain else numpys(kind)

    interpreter._get_np_dtype = numpy_once


@functools.cache
def _of_a_type(sizes: tuple[int, ...]) -> tuple[tl.tuple, int]:
    return tl.tuple(sizes), validate_block_shape(list(sizes))


@functools.cache
def _of_a_tensor(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


@functools.cache
def _name(sizes: tuple[int, ...], element: str) -> str:
    return f"<{tl.tuple(sizes)}, {element}>"


def _plain(shape: Iterable[int | tl.constexpr]) -> tuple[int, ...]:
    return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)


def _describe_shapes_once() -> None:
    """A type and a tensor as Triton makes them; those of one shape share what describes it."""
    block_type, blocks = tl.block_type.__init__, (list, tuple, tl.tuple)

    def make_block_type(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
        sizes = _plain(shape) if isinstance(shape, blocks) else ()
        if not sizes:
            block_type(self, element_ty, shape)  # refuses it
            return
        self.element_ty = element_ty
        self.shape, self.numel = _of_a_type(sizes)
        self.name = _name(sizes, str(element_ty))

    def make_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = _of_a_tensor(sizes)

    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor


def _compare_types_by_what_they_are() -> None:
    def block_types(self: tl.block_type, other: object) -> bool:
        if self is other:
            return True
        alike = isinstance(other, tl.block_type) and self.shape.values == other.shape.values
        return alike and self.element_ty == other.element_ty

    dtypes = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or dtypes(self, other)
    tl.block_type.__eq__ = block_types


def _broadcast_what_differs() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def where_shapes_differ(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor):
        one, other = lhs.type, rhs.type
        if one is other:
            return lhs, rhs
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = where_shapes_differ


def _hand_arguments_on() -> None:
    """What triton.language has is called as it was, without a copy of its arguments by name."""

    def patch(obj, name: str, member, builder, scope) -> None:
        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch


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
