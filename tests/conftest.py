"""For every test: torch computes with one thread, and Ctrl-C is heard; what several share; and in
which order they are handed out.

The tests run several at a time on few cores, and torch's threads wait for each other by spinning:
two of them on one busy core are tens of times slower than one. A shell's background jobs ignore
SIGINT, and so would every process that a test starts and then interrupts. Python writes bytecode,
also where the environment says otherwise: each of some hundred processes that tests start would
compile all that it imports. Each client of httpx, and so of openai and anthropic, reads the
certificates of the web: 20 ms of processor time, for a thousand clients whose server is at http:.
They share what one has read.
"""

import functools
import gc
import os
import signal
import ssl
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from quick_rule import is_quick

DRAW = ("gpu", "kernels", "layers")  # their tests draw numbers, as draws.py says
# Their tests share a server, a browser, or a model of transformers that takes long to load.
TOGETHER = ("blackbox", "page", "smollm2")
# Of some folders, who shares what their conftest.py starts: a server, an LLM, a session.
SHARE = {
    "pipeline": (
        "test_choices_served.py", "test_grammars_served.py", "test_logprobs_served.py",
        "test_serving.py",
    ),
    "trace": ("test_flight_recorder.py", "test_recorded_session.py", "test_redaction.py"),
    "llm": (
        "test_llm.py", "test_llm_lifecycle.py", "test_llm_logprobs.py", "test_random_schemas.py",
        "test_vllm_scripts.py",
    ),
}  # fmt: skip

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Stages that die in tests leave their flight recordings there, and not in somebody's home.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), "pipeinfer-tests-state"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:  # who tests on a GPU, or clients, may have neither
    import certifi
    import hypothesis
except ImportError:
    pass
else:
    # No test fails because others use the machine.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("tests")
    _context = ssl.create_default_context
    _context_of = functools.cache(lambda file: _context(cafile=file))

    def _context_read_once(*args, **kwargs) -> ssl.SSLContext:
        of_the_web = (certifi.where(), os.environ.get("SSL_CERT_FILE"))
        if args or kwargs.keys() != {"cafile"} or kwargs["cafile"] not in of_the_web:
            return _context(*args, **kwargs)
        return _context_of(kwargs["cafile"])

    ssl.create_default_context = _context_read_once


def pytest_addoption(parser):
    text = "only test modules that start no process and load no model"
    parser.addoption("--quick", action="store_true", help=text)
    text = "runs each test of random numbers so often, with others"
    parser.addoption("--draws", type=int, default=1, help=text)


def pytest_ignore_collect(collection_path, config):
    """Left out before they are imported: torch alone takes seconds. And so is a folder without
    quick modules, whose conftest.py may import it."""
    if not config.getoption("quick"):
        return None
    if collection_path.is_dir():
        modules = collection_path.rglob("test_*.py")
    elif collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        modules = [collection_path]
    else:
        return None
    return None if any(map(is_quick, modules)) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of what is imported and collected is garbage: a third of the time of both was spent
    on looking for some, and later each look at it all would take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.path.parent.name not in DRAW:
        return None
    from draws import repeat

    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    draws = pyfuncitem.config.getoption("draws")
    repeat(lambda: pyfuncitem.obj(**given), pyfuncitem.nodeid, draws)
    return True


def pytest_collection_modifyitems(items):
    """The long ones first: what is left at the end is little, and no worker waits for another."""
    seen = {item.path for item in items}
    places = {path: (not _scope(path), is_quick(path)) for path in seen}
    items.sort(key=lambda item: places[item.path])


def _scope(path: Path) -> str:
    """Of those that one worker runs all; "" for the others."""
    folder = path.parent.name
    if path.name in SHARE.get(folder, ()):
        return f"{folder}, shared"
    return folder if folder in TOGETHER else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As --dist loadfile, but what shares something goes to one worker whole."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(Path(nodeid.partition("::")[0])) or super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # in the order of their collection
    return ByFileOrFolder(config, log)


def pytest_configure(config):
    """On several workers, none may be waited for without an end: see `Overdue`."""
    # Libraries look at the end whether all of theirs is gone; pytest looks for garbage before.
    config.add_cleanup(gc.unfreeze)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Overdue())


class Overdue:
    """Ends a run whose worker is stuck, and names the test.

    A worker ends by itself when a test takes too long, and the run ends with it. Here is what that
    misses: a worker whose end is not seen, as a process that it forked holds its pipe open.
    """

    SECONDS = 600.0  # longer than each limit of a single test

    def __init__(self) -> None:
        self._running: dict[str, float] = {}  # {test: when it began}
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def _watch(self) -> None:
        while True:
            time.sleep(10)
            late = time.monotonic() - self.SECONDS
            stuck = [test for test, began in list(self._running.items()) if began < late]
            if stuck:
                print(f"\nno end after {self.SECONDS:g} s:", *stuck, sep="\n", file=sys.stderr)
                os._exit(3)


SHARED = pytest.StashKey[ExitStack]()


@pytest.fixture(scope="session")
def shared(pytestconfig) -> ExitStack:
    """What the files of one scope (`_scope`) share. It is closed behind the last of them: a server
    that lives to the end of the run takes a minute of processor time for its heartbeats alone."""
    return pytestconfig.stash.setdefault(SHARED, ExitStack())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    scope = _scope(item.path)
    if scope and (nextitem is None or _scope(nextitem.path) != scope):
        item.config.stash.get(SHARED, ExitStack()).close()


@pytest.fixture
def short_path():
    """For sockets: 90 bytes are the most of their paths, and `tmp_path` names users and tests."""
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        yield Path(folder)


@pytest.fixture
def turns(monkeypatch):
    """A list that grows with each iteration of a loop that stays awake."""
    made, really = [], os.sched_yield
    monkeypatch.setattr(os, "sched_yield", lambda: made.append(really()))
    return made
