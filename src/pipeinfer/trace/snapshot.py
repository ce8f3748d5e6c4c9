"""A core's whole state as bytes, by a walk over its objects that keeps sharing and cycles; and back
into a freshly built core of the same configuration.

Plain data only: objects of pipeinfer's classes, containers, arrays, messages. Functions and what a
class names in `__transient__` are left to the core that the state is put into. Objects that the
fresh core has at the same place are filled, others are made without running any code of theirs.
Only classes of pipeinfer that are loaded already can be made; nothing is imported, whatever a file
says. Knows no stage and no file.
"""

from __future__ import annotations

import array
import functools
import itertools
import random
import re
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
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
        self._remaining = most
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
        self._remaining -= values
        if self._remaining < 0:
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


class RestoreError(ValueError):
    """The bytes are no snapshot, or of a core that is built differently from this one."""


def restore(core: object, state: bytes) -> None:
    """Gives `core` the state that `snapshot` wrote. Raises RestoreError; then drop the core."""
    try:
        version, nodes = msgspec.msgpack.decode(state, type=tuple[int, list[list[Any]]])
        if version != FORMAT:
            raise RestoreError(f"a snapshot of format {version}, not {FORMAT}")
        _Builder(nodes, externals(core)).fill(core)
    except RestoreError:
        raise
    except (
        LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError,
        MemoryError,
    ) as error:  # fmt: skip
        raise RestoreError(f"the snapshot does not fit: {type(error).__name__}: {error}") from None


class _Builder:
    """Makes nodes into objects, each once; from the core on, so that its own parts are found."""

    def __init__(self, nodes: list[list[Any]], outside: dict[str, object]) -> None:
        self._nodes = nodes
        self._outside = outside
        self._made: dict[int, Any] = {}
        self._claimed: set[int] = set()
        self._unfilled: deque[Callable[[], None]] = deque()

    def fill(self, core: object) -> None:
        if self._nodes[0][:2] != ["object", class_name(type(core))]:
            raise RestoreError(
                f"it is of a {self._nodes[0][1]}, this is a {class_name(type(core))}"
            )
        self._value([0], core)
        while self._unfilled:
            self._unfilled.popleft()()

    def _value(self, raw: Any, present: object = None) -> Any:
        """The value that stands in a node; `present` is what the core has in its place."""
        if type(raw) in ATOMS:
            return raw
        (number,) = raw
        if number not in self._made:
            self._make(number, self._nodes[number], present)
        return self._made[number]

    def _make(self, number: int, node: list[Any], present: object) -> None:
        kind = node[0]
        if kind in ("tuple", "frozenset", "set"):
            values = [self._value(raw) for raw in node[1]]
            made: Any = {"tuple": tuple, "frozenset": frozenset, "set": set}[kind](values)
        elif kind == "named":
            made = tuple.__new__(known_class(node[1]), [self._value(raw) for raw in node[2]])
        elif kind in ("list", "deque"):
            made = [] if kind == "list" else deque(maxlen=node[2])
            self._unfilled.append(lambda: made.extend([self._value(raw) for raw in node[1]]))
        elif kind in ("dict", "ordered", "counter"):
            made = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[kind]()
            self._unfilled.append(lambda: self._fill_dict(made, node[1]))
        elif kind == "object":
            made = self._object(node, present)
        else:
            made = self._leaf(node)
        self._made[number] = made

    def _leaf(self, node: list[Any]) -> Any:
        match node:
            case ["outside", path]:
                return self._outside[path]
            case ["array", dtype, shape, raw, writeable]:
                values = np.frombuffer(raw, _dtype(dtype)).reshape(shape)
                return values.copy() if writeable else values
            case ["bytearray", raw]:
                return bytearray(raw)
            case ["ints", raw]:
                return array.array("i", raw)
            case ["scalar", dtype, raw]:
                return np.frombuffer(raw, _dtype(dtype))[0]
            case ["random", version, state, gauss]:
                made = random.Random()
                made.setstate((version, tuple(state), gauss))
                return made
            case ["struct", name, raw]:
                kind = known_class(name)
                if not issubclass(kind, msgspec.Struct):
                    raise RestoreError(f"{name} is no message")
                return msgspec.msgpack.decode(raw, type=kind)
        raise RestoreError(f"a node of kind {node[0]!r}")

    def _fill_dict(self, made: dict[Any, Any], flat: list[Any]) -> None:
        values = [self._value(raw) for raw in flat]
        for key, value in zip(values[::2], values[1::2], strict=True):
            made[key] = value

    def _object(self, node: list[Any], present: object) -> Any:
        _, name, flat = node
        same = class_name(type(present)) == name and id(present) not in self._claimed
        if same:
            self._claimed.add(id(present))
            made = present
        else:
            made = object.__new__(known_class(name))
        self._unfilled.append(lambda: self._fill_object(made, flat, same))
        return made

    def _fill_object(self, made: Any, flat: list[Any], same: bool) -> None:
        kept = transient(made)
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            if name in kept or (isinstance(name, str) and name.startswith("__")):
                raise RestoreError(f"{class_name(type(made))}.{name} is not part of a state")
            present = getattr(made, name, None) if same else None
            object.__setattr__(made, name, self._value(raw, present))


def _dtype(name: str) -> np.dtype[Any]:
    """Of plain numbers; NumPy itself would take a whole language."""
    if not re.fullmatch("[<>|=][biuf][1248]", name):
        raise RestoreError(f"numbers of type {name!r}")
    return np.dtype(name)


def known_class(name: str) -> type:
    """A class of pipeinfer by its name in a snapshot, of the modules that are loaded."""
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None)
    if not module.startswith(PACKAGE) or not isinstance(found, type):
        raise RestoreError(f"there is no class {name}")
    if class_name(found) != name:
        raise RestoreError(f"{name} is {class_name(found)}")
    return found
