"""What a server that runs leaves in the folder for temporary files, where commands find it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipeinfer import topology as topologies
from pipeinfer.runtime.servers import (
    FOLDER_PREFIX,
    TOPOLOGY,
    ServerInfo,
    publish_served_model,
    record_running,
)
from pipeinfer.settings import Settings


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder for temporary files where nobody else's servers are found; its path is short.
    Tests with it ask for no tmp_path: pytest would keep its folders of all tests in this one."""
    folder = tempfile.mkdtemp(prefix="asking-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
    shutil.rmtree(folder)


def found_server(folder: Path, name: str, url: str, model: str, path: str = "") -> ExitStack:
    """What a server leaves in its temporary folder, as long as the stack is open. path: of the
    model, /models/MODEL if nothing is said."""
    made = folder / (FOLDER_PREFIX + name)
    made.mkdir()
    file = made / TOPOLOGY
    file.write_text(topologies.local(Settings(), f"ipc://{made}/").to_toml())
    stack = ExitStack()
    stack.enter_context(record_running(file))
    publish_served_model(file, ServerInfo(url=url, model=model, path=path or f"/models/{model}"))
    return stack
