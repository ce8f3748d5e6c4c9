"""URLs as people give them: whether they are any of HTTP, and what of them may be shown.

Opens nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pipeinfer.settings import ConfigurationError


def base(url: str) -> str:
    """A server's address without `/v1`, which people write or leave out. Raises
    ConfigurationError for what is no URL of HTTP."""
    plain = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    whole = plain if "://" in plain else f"http://{plain}"
    refusal = ConfigurationError(f"{url!r} is no URL of HTTP, such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(whole)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a bracket or a port that is none
        raise refusal from None
    if not right:
        raise refusal
    return whole


def without_password(url: str) -> str:
    """For messages, which people pass on: without a user and password that may stand in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
