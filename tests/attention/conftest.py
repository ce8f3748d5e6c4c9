"""One torch thread: the tensors are tiny, and other tests run beside these."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
