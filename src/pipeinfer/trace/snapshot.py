"""A core's whole state as bytes: a walk over its objects that keeps sharing and cycles.

Plain data only: objects of pipeinfer's classes, containers, arrays, messages. Functions and what a
class names in `__transient__` are left to the core that the state is put into (trace/restore.py).
Knows no stage and no file.
"""

from __future__ import annotations

import array
import functools
import itertools
import random
import types
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import numpy as np

# A snapshot is MessagePack [FORMAT, nodes]; a node is [kind, ...] and node 0 is the core. A value
# in a node is an atom (None, bool, int, float, str, bytes) or [n], which stands for node n.
FORMAT = 1
ATOMS = frozenset((type(None), bool, int, float, str, bytes))
PACKAGE = "pipeinfer."
CALLABLES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type,
)  # fmt: skip
CONTAINERS = frozenset((list, tuple, set, frozenset, deque, bytearray, np.ndarray, array.array))
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_UNSET = object()
_ALL = 1 << 62
_NOTHING: dict[str, Any] = {}
_encode = msgspec.msgpack.Encoder().encode


class Unsnapshottable(ValueError):
    """The state holds something that cannot be written down; the text says where."""


class TooLarge(Exception):
    """The state has more values than were asked for."""


def snapshot(core: object, most: int = 0) -> bytes:
    """The state of `core`, between two events. Raises Unsnapshottable.

    most: TooLarge beyond so many values, found out in the time that these take; 0: all there are.
    """
    walker = _Walker(externals(core), most or _ALL)
    try:
        return _encode([FORMAT, walker.walk(core)])
    except (OverflowError, TypeError) as error:
        raise Unsnapshottable(f"the state of {class_name(type(core))}: {error}") from None


def class_name(kind: type) -> str:
    """ "module:Class", as it stands in a snapshot."""
    return f"{kind.__module__}:{kind.__qualname__}"


@functools.cache
def slot_names(kind: type) -> tuple[str, ...]:
    """Names of the `__slots__` of a class and its bases."""
    named = (kind.__dict__.get("__slots__", ()) for kind in kind.__mro__)
    return tuple(name for some in named for name in some if name not in ("__dict__", "__weakref__"))


def attributes(value: object) -> list[tuple[str, object]]:
    """(name, value) of all that is set on an object, slots first, in a fixed order."""
    found = [(name, getattr(value, name, _UNSET)) for name in slot_names(type(value))]
    found = [(name, part) for name, part in found if part is not _UNSET]
    found += getattr(value, "__dict__", _NOTHING).items()
    return found


def is_code(value: object) -> bool:
    """A function of some kind, or a table of nothing else: part of the class, not of the state."""
    if type(value) in CONTAINERS:
        return False
    if isinstance(value, dict):
        table: dict[Any, Any] = value
        return bool(table) and all(isinstance(one, CALLABLES) for one in table.values())
    return isinstance(value, CALLABLES)


def transient(value: object) -> tuple[str, ...]:
    """The attributes that the object's class leaves out of snapshots."""
    return tuple(getattr(type(value), "__transient__", ()))


def externals(core: object) -> dict[str, object]:
    """By path, what is not state but may be referred to by state: all that hangs from transient
    attributes, one level deep, such as a detokenizer's tables of token texts."""
    found: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", core)]
    seen = {id(core)}
    while waiting:
        path, owner = waiting.pop()
        left_out = transient(owner)
        for name, value in attributes(owner):
            if name in left_out:
                found |= _outside(f"{path}.{name}", value)
            elif type(value).__module__.startswith(PACKAGE) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{path}.{name}", value))
    return found


def _outside(path: str, value: object) -> dict[str, object]:
    found = {path: value}
    for name, part in attributes(value):
        if type(part) in ATOMS:
            continue
        found[f"{path}.{name}"] = part
        if isinstance(part, dict):
            table: dict[object, object] = part
            for key, one in table.items():
                if type(key) in ATOMS and type(one) not in ATOMS:
                    found[f"{path}.{name}[{key!r}]"] = one
    return found


class _Walker:
    """Numbers what it meets and writes it down; breadth first: trees are deeper than a stack."""

    def __init__(self, outside: dict[str, object], most: int = _ALL) -> None:
        self._left = most
        self._paths = {id(value): path for path, value in outside.items()}
        self._numbers: dict[int, int] = {}
        self._empty: dict[tuple[Any, ...], int] = {}
        self._found: list[Any] = []  # keeps alive what `_numbers` knows by its address
        self._fixed: set[int] = set()  # objects that the fresh core has at the same place

    def walk(self, core: object) -> list[Any]:
        self._fixed.add(id(core))
        self._value(core)
        nodes: list[Any] = []
        for value in self._found:  # grows while it is walked
            self._spend(1)
            nodes.append(self._node(value))
        return nodes

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooLarge

    def _value(self, value: Any) -> Any:
        if type(value) in ATOMS:
            return value
        number = self._numbers.get(id(value))
        return [self._new(value) if number is None else number]

    def _new(self, value: Any) -> int:
        number = len(self._found)
        if type(value) is np.ndarray and value.size == 0:
            # Which empty array it is makes no difference; a module's constant, say, is no part of
            # a state, but a state that was restored would have one of its own.
            kind = value.dtype.str, value.shape, value.flags.writeable
            if self._empty.setdefault(kind, number) != number:
                return self._empty[kind]
        self._numbers[id(value)] = number
        self._found.append(value)
        return number

    def _values(self, values: Any) -> list[Any]:
        some = list(values)
        if ATOMS.issuperset(map(type, some)):
            return some  # the ids of a prompt: nothing here may cost anything for each of them
        return [self._value(value) for value in some]

    def _node(self, value: Any) -> list[Any]:
        path = self._paths.get(id(value))
        if path is not None:
            return ["outside", path]
        kind: Any = type(value)
        if kind in CONTAINERS or kind in MAPPINGS:
            self._spend(len(value))
        if kind is list or kind is tuple:
            return [kind.__name__, self._values(value)]
        if kind is set or kind is frozenset:
            return [kind.__name__, self._values(value)]
        if kind is bytearray:
            return ["bytearray", bytes(value)]
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named", class_name(kind), self._values(value)]
        if kind in MAPPINGS:
            flat = itertools.chain.from_iterable(value.items())
            return [MAPPINGS[kind], self._values(flat)]
        if kind is deque:
            return ["deque", self._values(value), value.maxlen]
        if kind is np.ndarray and value.dtype.kind in "biuf":
            return ["array", value.dtype.str, value.shape, value.tobytes(), value.flags.writeable]
        if issubclass(kind, np.generic) and value.dtype.kind in "biuf":
            return ["scalar", value.dtype.str, value.tobytes()]
        if kind is array.array and value.typecode == "i":
            return ["ints", value.tobytes()]
        if kind is random.Random:
            version, state, gauss = value.getstate()
            return ["random", version, state, gauss]
        if issubclass(kind, msgspec.Struct):
            return ["struct", class_name(kind), _encode(value)]
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        kind, fixed = type(value), id(value) in self._fixed  # for thousands of nodes of a tree
        if not kind.__module__.startswith(PACKAGE) and not fixed:
            raise Unsnapshottable(f"a {class_name(kind)} is part of the state")
        left_out = transient(value)
        flat: list[Any] = []
        for name, part in attributes(value):
            if type(part) in ATOMS:
                if name not in left_out:
                    flat += (name, part)
                continue
            if name in left_out:
                continue
            if is_code(part) and id(part) not in self._paths:
                if not fixed:
                    raise Unsnapshottable(f"{class_name(kind)}.{name} is a function")
                continue
            if fixed:
                self._fixed.add(id(part))
            flat += (name, self._value(part))
        return ["object", class_name(kind), flat]
