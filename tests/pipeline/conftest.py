"""One server on the demo model for all tests of a module that do not hurt it."""

import pytest

from servers import Server


@pytest.fixture(scope="module")
def server():
    with Server() as running:
        yield running
