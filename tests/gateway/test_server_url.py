"""The line `ready` names the URL under which users reach the server."""

from __future__ import annotations

import pytest

from pipeinfer.gateway.stage import server_url
from pipeinfer.settings import Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "http://127.0.0.1:8001"),
        ({"host": "::1"}, "http://[::1]:8001"),
        ({"host": "0.0.0.0", "tls_cert": "x.pem"}, "https://0.0.0.0:8001"),
        ({"host": "0.0.0.0", "public_address": "127.0.0.1:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "8600", "tls_cert": "x.pem"}, "https://127.0.0.1:8600"),
        ({"public_address": "0.0.0.0:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "[::]:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "[::1]:8600"}, "http://[::1]:8600"),
        ({"public_address": "https://models.example.org/"}, "https://models.example.org"),
    ],
)
def test_a_public_address_stands_in_place_of_the_one_that_is_listened_on(settings, said):
    assert server_url(Settings(**settings), 8001) == said
