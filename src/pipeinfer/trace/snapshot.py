"""A core's whole state as bytes, by a walk over its objects that keeps sharing and cycles; and back
into a freshly built core of the same configuration.

Plain data only: objects of pipeinfer's classes, containers, arrays, messages. Functions and what a
class names in `__transient__` are left to the core that the state is put into. Objects that the
fresh core has at the same place are filled, others are made without running any code of theirs.
Only classes of pipeinfer that are loaded already can be made; nothing is imported, whatever a file
says.

StateCopier takes the state without stopping the stage: a forked copy of the process walks it. The
copy has the state as it was between two events, however long the walk takes, and does nothing but
the walk; small states are walked at once. Where a process must not be forked, a thread walks the
state while nothing happens to it.

Knows cores as objects; no stage and no file.
"""

from __future__ import annotations

import array
import functools
import gc
import itertools
import os
import random
import re
import resource
import select
import signal
import struct
import sys
import time
import types
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np

from pipeinfer.trace.format import pack_state

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


def snapshot(core: object, max_values: int = 0) -> bytes:
    """The state of `core`, between two events. Raises Unsnapshottable.

    max_values: TooLarge beyond so many values, found out in the time that these take; 0: no limit.
    """
    walker = _Walker(externals(core), max_values or _ALL)
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

    def __init__(self, outside: dict[str, object], max_values: int = _ALL) -> None:
        self._remaining = max_values
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
    """The dtype of plain numbers called `name`. Raises RestoreError for others: NumPy itself would
    take a whole language."""
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


# Most values that are walked on the loop: a fraction of a millisecond, less than a fork takes.
MAX_WALKED_VALUES = 1_000
SHORT_WALK_SECONDS = 0.001  # seconds; a walk that took longer is a fork's business the next time
COPY_TIMEOUT = 30.0  # seconds that a copy may take; then it is killed, and its state lost
POLL_SECONDS = 0.1  # seconds between looks whether its state is still wanted
CPU_SECONDS = 60  # after which the kernel kills a copy whose parent is gone
NICENESS = 10
CHUNK = 1 << 20
MAX_DESCRIPTORS = 1 << 20  # more than any process has
WALKED, UNFIT = b"S", b"U"
_LEADING = struct.Struct("<cdQ")  # what follows, the seconds that it took, and its bytes


class StateCopyFailed(RuntimeError):
    """There is no state this time; the text says why. It may be asked for again later."""


class StateCopy(Protocol):
    """A state that was taken, and may still be on its way."""

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        """The snapshot (trace/snapshot.py) as one zstd frame; waits for it, in any thread.

        `given_up()`: called now and then, whether the copy is not needed any more. Raises
        StateCopyFailed, or Unsnapshottable.
        """
        ...


class StateCopier:
    """Takes states of one core again and again. `forks`: whether this process may be forked.

    A process must not be forked that uses a GPU (its driver shares memory with the device), nor one
    that is not ours.
    """

    def __init__(self, forks: bool) -> None:
        self._forks = forks
        self.small = True  # as far as is known, the state is walked in no time

    def take(self, core: object, still: Callable[[], bool] | None = None) -> StateCopy:
        """The state of `core` as it is now, between two events.

        still: whether the state is the one of now still, and goes on to be it unless the core takes
        an event; asked in any thread. Without it, what must not be forked is walked at once,
        however large. Raises Unsnapshottable, or StateCopyFailed where there is no way to take it
        now.
        """
        at_once = not self._forks and still is None
        if self.small or at_once:
            begun = time.perf_counter()
            try:
                state = snapshot(core, 0 if at_once else MAX_WALKED_VALUES)
            except TooLarge:
                self.small = False
            else:
                self.small = time.perf_counter() - begun < SHORT_WALK_SECONDS
                return _Here(state)
        if self._forks:
            return self._fork(core)
        assert still is not None
        if not still():
            raise StateCopyFailed("it is too large to be taken while the stage is busy")
        return _Meanwhile(core, still, self._learn)

    def _fork(self, core: object) -> StateCopy:
        """A signal to the copy would reach our own loop: the copy takes none at all."""
        source, sink = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # The warning is of locks that may be held for ever; the walk takes none.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                _walk(core, sink)
        except OSError as error:
            os.close(source)
            raise StateCopyFailed(f"no process can be forked: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(sink)
        return _Elsewhere(pid, source, self._learn)

    def _learn(self, seconds: float) -> None:
        """From the thread that waits."""
        self.small = seconds < SHORT_WALK_SECONDS


def _walk(core: object, sink: int) -> NoReturn:
    """The copy's whole life. No lock may be taken here: the thread that held it was not copied."""
    try:
        gc.disable()
        # Sockets and locks are ours as long as we hold them: a successor of a stage that is killed
        # now finds its ports free, and clients see their connections end.
        os.closerange(0, sink)
        os.closerange(sink + 1, MAX_DESCRIPTORS)
        _humble()
        begun = time.perf_counter()
        try:
            kind, body = WALKED, pack_state(snapshot(core))
        except Unsnapshottable as error:
            kind, body = UNFIT, str(error).encode("utf-8", "replace")
        left = memoryview(_LEADING.pack(kind, time.perf_counter() - begun, len(body)) + body)
        while left:
            left = left[os.write(sink, left) :]
    finally:
        os._exit(0)


def _humble() -> None:
    """The stage comes first: for the processor, and when memory runs out."""
    with suppress(OSError, ValueError):
        os.nice(NICENESS)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class _Here:
    """A state that was walked at once."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        return pack_state(self._state)


class _Meanwhile:
    """A state that the thread which wants it packed walks, while the loop may go on."""

    def __init__(
        self, core: object, still: Callable[[], bool], learn: Callable[[float], None]
    ) -> None:
        self._core = core
        self._still = still
        self._learn = learn

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        begun = time.perf_counter()
        try:
            state = snapshot(self._core)
        except Exception:
            if self._still():
                raise
            state = b""  # state that changes during a walk may have any form
        if not self._still():
            raise StateCopyFailed("the stage went on while its state was walked")
        self._learn(time.perf_counter() - begun)
        return pack_state(state)


class _Elsewhere:
    """A state that process `pid` walks and writes into the pipe `source`."""

    def __init__(self, pid: int, source: int, learn: Callable[[float], None]) -> None:
        self.pid = pid
        self._source = source
        self._learn = learn

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        try:
            received = self._read(given_up)
        finally:
            os.close(self._source)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it has ended, or is not needed
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        whole = len(received) >= _LEADING.size
        kind, seconds, size = _LEADING.unpack_from(received) if whole else (b"", 0.0, 1)
        body = received[_LEADING.size :]
        if len(body) != size:
            raise StateCopyFailed("the process that copied it was killed")
        if kind == UNFIT:
            raise Unsnapshottable(body.decode("utf-8", "replace"))
        self._learn(seconds)
        return body

    def _read(self, given_up: Callable[[], bool]) -> bytes:
        poll, chunks = select.poll(), list[bytes]()  # `select` takes no descriptor above 1023
        poll.register(self._source, select.POLLIN)
        deadline = time.monotonic() + COPY_TIMEOUT
        while True:
            if poll.poll(POLL_SECONDS * 1_000):
                chunk = os.read(self._source, CHUNK)
                if not chunk:
                    return b"".join(chunks)
                chunks.append(chunk)
            elif given_up():
                raise StateCopyFailed("nobody wants it any more")
            elif time.monotonic() > deadline:
                raise StateCopyFailed(f"its copy took more than {COPY_TIMEOUT:g} s")
