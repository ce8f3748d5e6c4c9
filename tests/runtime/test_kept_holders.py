"""Where a server looks for the memory of the one before: its folder, and who else might have it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.runtime.memory_holder import FOLDER, KeptHolders, kept_holders, listen
from pipeinfer.settings import ConfigurationError, Settings

KEEPS, NOT = Settings(keep_memory_on_stop=True, kept_memory_timeout=7), Settings()


@pytest.fixture(autouse=True)
def root(monkeypatch) -> Iterator[Path]:
    """Under a folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder, f"{FOLDER}-{os.geteuid()}")


def test_names_that_are_too_long_for_sockets_are_refused(root, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(root.parent / ("x" * 60)))
    with pytest.raises(ConfigurationError, match="TMPDIR"), kept_holders(KEEPS, "a"):
        pass
    with kept_holders(NOT, "a") as kept:
        assert kept == KeptHolders()


def leave(folder: Path, *stages: str) -> None:
    for stage in stages:
        listen(str(folder / stage)).close()


def test_what_a_server_leaves_is_found_at_the_same_address_alone(root):
    with kept_holders(KEEPS, "a") as kept:
        assert (dict(kept.found), kept.patience) == ({}, 7)
        folder = kept.folder
        leave(folder, "engine-0-0.12", "engine-0-0.34", "engine-0-1.56")
    with kept_holders(KEEPS, "b") as kept:
        assert not kept.found and kept.folder != folder
    for settings in (KEEPS, NOT):
        with kept_holders(settings, "a") as kept:
            assert sorted(map(len, kept.found.values())) == [1, 2]
            assert kept.found["engine-0-1"] == [str(folder / "engine-0-1.56")]
            assert kept.folder == (folder if settings is KEEPS else None)
            kept.end_others(["engine-0-0"])  # nobody listens any more at any of them
        assert not (folder / "engine-0-1.56").exists()
        leave(folder, "engine-0-1.56")
    assert (root.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)


def test_without_the_flag_no_folder_is_made_and_an_empty_one_goes(root):
    with kept_holders(NOT, "a") as kept:
        assert kept == KeptHolders()
    assert not root.exists()
    with kept_holders(KEEPS, "a") as kept:
        folder = kept.folder
    with kept_holders(NOT, "a"):
        assert folder.exists()
    assert not folder.exists()


def test_two_servers_at_a_time_share_nothing(caplog):
    with kept_holders(KEEPS, "a") as first:
        leave(first.folder, "engine-0-0.12")
        with pytest.raises(ConfigurationError), kept_holders(KEEPS, "a"):
            pass
        with kept_holders(NOT, "a") as other:
            assert other == KeptHolders()
        assert "is not looked for" in caplog.text
        assert (first.folder / "engine-0-0.12").exists()


@pytest.mark.parametrize("which", ["open", "link", "file"])
def test_a_folder_that_others_may_change_is_not_used(root, which):
    if which == "open":
        root.mkdir()
        root.chmod(0o755)
    elif which == "link":
        (root.parent / "other").mkdir(mode=0o700)
        root.symlink_to(root.parent / "other")
    else:
        root.write_text("")
    with pytest.raises(ConfigurationError, match="--keep-memory-on-stop"), kept_holders(KEEPS, "a"):
        pass


def test_without_an_address_nothing_can_be_kept():
    with pytest.raises(ConfigurationError, match="--port"), kept_holders(KEEPS, ""):
        pass
    with kept_holders(NOT, "") as kept:
        assert kept == KeptHolders()
