"""One torch thread for tiny models, and checkpoints made once.

Quick tests are in this folder, too, and transformers takes seconds to import: who asks for a
checkpoint imports it.
"""

import sys

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from checkpoints import CheckpointCache

    return CheckpointCache(tmp_path_factory.mktemp("checkpoints"))
