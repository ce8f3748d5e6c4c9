"""One real server for all clients: the demo model, with a chat template that shows tools.

It runs in the environment that PYTHON_OF_SERVER names, for that of the clients has no pipeinfer.
"""

import os
from pathlib import Path

import pytest

from servers import Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
TEMPLATE = Path(__file__).with_name("hermes.jinja")


@pytest.fixture(scope="session")
def server():
    with Server("--chat-template", str(TEMPLATE), python=os.environ["PYTHON_OF_SERVER"]) as running:
        yield running


@pytest.fixture(scope="session")
def vectors_url():
    """Of a server that makes vectors."""
    with Server("--task", "embed", python=os.environ["PYTHON_OF_SERVER"]) as running:
        yield f"{running.url}/v1"


@pytest.fixture(scope="session")
def url(server):
    return f"{server.url}/v1"
