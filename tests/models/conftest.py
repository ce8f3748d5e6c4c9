"""One checkpoint of each kind for the whole session, and one torch thread."""

from __future__ import annotations

import pytest
import torch

from checkpoints import CheckpointCache


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointCache:
    """`checkpoint(architecture, **overrides)` is a folder that tests share and do not change."""
    return CheckpointCache(tmp_path_factory.mktemp("checkpoints"))
