"""Triton's interpreter, without doing again what it has done, nor what it does for nothing.

Each call of a device function remaps all of triton.language, a hundred times for one launch of a
kernel. Once in a launch is enough: nothing is mapped back before its end. What a type says of
itself, and a tensor of its shape, is worked out once for each shape, not for every operation; that
is most of what an operation takes, since the numbers in it are few.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
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
    _convert_what_differs()
    _compute_at_once()
    _find_builtins_once()


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

    @functools.cache
    def block_of(sizes: tuple[int, ...], element_ty: tl.dtype) -> tl.block_type:
        return tl.block_type(element_ty, sizes)

    def filled(self: TritonSemantic, scalar: tl.tensor, block: tl.dtype) -> tl.tensor:
        make = block_of if _plain_dtype(scalar.type) else block_of.__wrapped__
        kind = make(tuple(block.shape.values), scalar.type)
        return tl.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def where_shapes_differ(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor):
        one, other = lhs.type, rhs.type
        if one is other:
            return lhs, rhs
        if one.is_block():
            if not other.is_block():
                return lhs, filled(self, rhs, one)
            if one.shape.values == other.shape.values:
                return lhs, rhs
        elif other.is_block():
            return filled(self, lhs, other), rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = where_shapes_differ
    tl.dtype.__hash__ = lambda self: hash(self.name)


def _plain_dtype(kind: tl.dtype) -> bool:
    """Of numbers, not of pointers."""
    return type(kind) is tl.dtype


def _convert_what_differs() -> None:
    """Operands of one type need no conversion; a number beside a tensor becomes the same constant
    each time."""
    general = TritonSemantic.binary_op_type_checking_impl
    unwrap, numbers = tl.core._unwrap_if_constexpr, (int, float)

    def operands(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True,
        div_or_mod=False,
    ):  # fmt: skip
        if type(lhs) is tl.tensor and not div_or_mod and _plain_dtype(lhs.dtype):
            kind = type(rhs)
            if kind is tl.tensor:
                if rhs.dtype is lhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif kind in numbers and arithmetic_check and rhs == rhs:
                dtype = lhs.dtype
                same = kind is int if dtype.is_int() else dtype.is_floating()
                if same and self.to_tensor_type(rhs).kind().value <= dtype.kind().value:
                    sign = math.copysign(1.0, rhs)
                    right = _known(self, rhs, sign, kind, dtype)
                    return self.broadcast_impl_value(lhs, right)
        return general(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    @functools.cache
    def _known(self, value, sign, kind, dtype):
        return self._cast_to_computation_type(value, dtype)

    TritonSemantic.binary_op_type_checking_impl = operands

    as_it_is = frozenset((tl.tensor, int, float, bool, str, type(None)))

    def unwrapped(o):
        kind = type(o)
        if kind is tl.constexpr:
            return o.value
        return o if kind in as_it_is else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrapped


def _compute_at_once() -> None:
    """Sizes are looked up, and what is checked is checked once."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    general, bools = builder.binary_op, np.dtype(bool)

    @functools.cache
    def most_bytes(dtype: tl.dtype) -> int:
        return max(dtype.primitive_bitwidth // 8, 1)

    checked = handle.__post_init__

    def make_handle(self, data, dtype, attr=None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        if _plain_dtype(dtype) and data.itemsize > most_bytes(dtype):
            checked(self)

    def binary_op(self, lhs, rhs, op):
        left, right = lhs.data, rhs.data
        if left.dtype is bools and right.dtype is bools:
            return general(self, lhs, rhs, op)
        output, dtype = op(left, right), lhs.dtype.scalar
        if _plain_dtype(dtype) and output.itemsize > most_bytes(dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)

    handle.__init__, builder.binary_op = make_handle, binary_op


def _find_builtins_once() -> None:
    """Of triton.language; and they are called without a copy of their arguments by name."""

    def called_with(member):
        if member.__code__ is wrapper:
            member = member.__wrapped__  # asks whether `_semantic` is there

        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return called

    wrapper = tl.core.builtin(lambda: None).__code__

    @functools.cache
    def builtins_of(package) -> list:
        found = inspect.getmembers(package)
        return [(name, called_with(member)) for name, member in found if tl.core.is_builtin(member)]

    def patch(package, builder, scope) -> None:
        for name, called in builtins_of(package):
            scope.set_attr(package, name, called)

    interpreter._patch_builtin = patch


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
