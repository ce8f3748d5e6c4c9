"""One server on the demo model for all tests that do not hurt it: of which modules, the conftest.py
above this one says, so that one worker runs them all."""

import pytest

from servers import Server


@pytest.fixture(scope="session")
def server(shared):
    return shared.enter_context(Server())
