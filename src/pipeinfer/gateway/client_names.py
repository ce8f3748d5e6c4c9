"""Whom the pipeline takes for one client: clients take turns where they wait (fair_queue.py).

Where keys are needed a client is a key, by its name. Else it is a connection of a host: a proxy has
those of many, and several programs of one host are several clients. A host is an address, or what
one user commonly has of IPv6.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from ipaddress import ip_address

from aiohttp import web

IPV6_HOST_BYTES = 8  # bytes of an IPv6 address that its host has


class ClientHashes:
    """Hashes: neither an address nor a key's name leaves the gateway."""

    def __init__(self) -> None:
        self._secret = os.urandom(16)  # an address is soon found by its plain hash

    def of_key(self, name: str) -> str:
        """The same in every gateway."""
        return blake2b(name.encode(), digest_size=8).hexdigest()

    def of_connection(self, request: web.Request) -> str:
        """The host, and behind a slash its connection."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        return self.of_peer(request.remote or "", peer)

    def of_peer(self, address: str, peer: object) -> str:
        """As above; `peer`: by which connections of `address` differ."""
        return f"{self._hash(host_bytes(address))}/{self._hash(repr(peer).encode())}"

    def _hash(self, name: bytes) -> str:
        return blake2b(name, key=self._secret, digest_size=8).hexdigest()


def host_bytes(address: str) -> bytes:
    """What all addresses of its host have in common."""
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode()
    return known.packed if known.version == 4 else _ipv6_host(known.packed)


def _ipv6_host(packed: bytes) -> bytes:
    mapped = packed[:12] == bytes(10) + b"\xff\xff"
    return packed[12:] if mapped else packed[:IPV6_HOST_BYTES]
