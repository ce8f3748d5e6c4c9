"""One torch thread for tiny models, and checkpoints made once."""

import pytest
import torch

from checkpoints import CheckpointCache


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return CheckpointCache(tmp_path_factory.mktemp("checkpoints"))
