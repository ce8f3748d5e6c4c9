"""Under which URL users reach the server: what the line `ready` says.

Knows settings and the port that was taken; opens nothing.
"""

from __future__ import annotations

from pipeinfer.settings import Settings


def url(settings: Settings, port: int) -> str:
    """The URL of a server that listens on `port`: of its public address where one is set."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    public = settings.public_address.rstrip("/")
    # As Docker takes what it publishes: a port alone, and these, are all addresses of the host.
    at, _, published = public.rpartition(":")
    if published.isdecimal() and at in ("", "0.0.0.0", "[::]"):
        public = f"127.0.0.1:{published}"
    return public if "://" in public else f"{scheme}://{public or f'{host}:{port}'}"
