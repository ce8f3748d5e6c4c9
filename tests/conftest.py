"""For every test: torch computes with one thread, and Ctrl-C is heard; and what several share.

The tests run several at a time on few cores, and torch's threads wait for each other by spinning:
two of them on one busy core are tens of times slower than one. A shell's background jobs ignore
SIGINT, and so would every process that a test starts and then interrupts.
"""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from quick_rule import is_quick

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Stages that die in tests leave their flight recordings there, and not in somebody's home.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), "pipeinfer-tests-state"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    text = "only test modules that start no process and load no model"
    parser.addoption("--quick", action="store_true", help=text)


def pytest_ignore_collect(collection_path, config):
    """Left out before they are imported: torch alone takes seconds."""
    module = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if config.getoption("quick") and module and not is_quick(collection_path) else None


@pytest.fixture
def turns(monkeypatch):
    """A list that grows with each iteration of a loop that stays awake."""
    made, really = [], os.sched_yield
    monkeypatch.setattr(os, "sched_yield", lambda: made.append(really()))
    return made
