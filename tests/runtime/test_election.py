"""A shared folder for temporary files: what others put there is neither written nor believed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest

from pipeinfer import topology as topologies
from pipeinfer.runtime.entry import elect_instance, elected_instance, instance_file
from pipeinfer.settings import ConfigurationError, Settings

ROOT = Path(__file__).parents[2]
PLACE = topologies.local(Settings(), "ipc:///nowhere/")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder for temporary files, and one of locks."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def folder(path: Path, _target: Path) -> None:
    path.mkdir()


def pipe(path: Path, _target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("put", [link, hard_link, folder, pipe])
@pytest.mark.parametrize("what", ["note", "lock"])
def test_what_is_no_plain_file_is_refused_and_nothing_is_written_through_it(shared, put, what):
    precious = shared / "precious"
    precious.write_text("a key")
    path = instance_file() if what == "note" else shared / "locks" / "tokenizer-0.lock"
    put(path, precious)
    with pytest.raises(ConfigurationError, match=str(path)):
        elect_instance(PLACE, "tokenizer", "", shared / "locks")
    assert precious.read_text() == "a key"


def test_a_link_to_nothing_is_not_made_into_a_file(shared):
    instance_file().symlink_to(shared / "made")
    with pytest.raises(ConfigurationError, match="it is a link"):
        elect_instance(PLACE, "tokenizer", "", shared / "locks")
    assert not (shared / "made").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(shared):
    instance_file().write_text("gateway-0")
    os.chown(instance_file(), 12345, 12345)
    with pytest.raises(ConfigurationError, match="not a plain file of this user's"):
        elect_instance(PLACE, "tokenizer", "", shared / "locks")
    with pytest.raises(ConfigurationError, match="not a plain file of this user's"):
        elected_instance()


def test_a_stage_that_begins_again_takes_its_place_and_the_note_names_it(shared):
    for _ in range(2):
        mine = elect_instance(PLACE, "detokenizer", "", shared / "locks")
        assert mine.identity.id == elected_instance() == "detokenizer-0"
        mine._lock.close()
    mine = elect_instance(
        PLACE, "gateway", "", shared / "locks"
    )  # a shorter name than the one before
    assert elected_instance() == "gateway-0"
    mine._lock.close()


def test_where_all_run_one_more_is_a_standby_until_one_ends(shared):
    """For each engine there is one; that is promoted leaves the standby's place to the next."""
    elect = partial(elect_instance, PLACE, "engine", "", shared / "locks", standby=True)
    serving, standby = elect(), elect()
    assert not serving.is_standby and standby.is_standby
    assert standby.identity == serving.identity
    with pytest.raises(ConfigurationError, match="all of them run, with their standbys"):
        elect()
    ending = threading.Event()

    def end() -> None:
        ending.set()
        serving._lock.close()

    threading.Timer(0.2, end).start()
    standby.wait()
    assert ending.is_set() and not standby.is_standby
    assert elect().is_standby


def test_a_health_check_does_not_follow_a_link(shared):
    (shared / "other").write_text("gateway-0")
    instance_file().symlink_to(shared / "other")
    done = subprocess.run(
        [sys.executable, str(ROOT / "stages/healthcheck.py"), "gateway", "--claimed"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "it is a link" in done.stderr
