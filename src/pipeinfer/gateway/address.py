"""Under which URL users reach the server: what the line `ready` says.

Knows settings and the port that was taken; opens nothing.
"""

from __future__ import annotations

from pipeinfer.settings import Settings


def server_url(settings: Settings, port: int) -> str:
    """The URL of a server that listens on `port`: of its public address where one is set."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    public = settings.public_address.rstrip("/")
    if public.isdecimal():  # as Docker takes the port that it publishes
        public = f"127.0.0.1:{public}"
    return public if "://" in public else f"{scheme}://{public or f'{host}:{port}'}"
