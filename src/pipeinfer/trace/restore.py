"""Puts a snapshot into a freshly built core of the same configuration.

Objects that the fresh core has at the same place are filled, others are made without running any
code of theirs. Only classes of pipeinfer that are loaded already can be made; nothing is imported,
whatever a file says. Knows no stage.
"""

from __future__ import annotations

import array
import random
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeinfer.trace.snapshot import ATOMS, FORMAT, PACKAGE, class_name, externals, transient


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
