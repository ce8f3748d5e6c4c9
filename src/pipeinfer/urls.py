"""URLs as users type them: validated, and without passwords for messages. Opens no connection."""

from __future__ import annotations

from urllib.parse import urlsplit

from pipeinfer.settings import ConfigurationError


def base(url: str) -> str:
    """The base URL of a server, without a trailing `/v1`; `http://` is added if there is no scheme.
    Raises ConfigurationError if `url` is not an HTTP URL.
    """
    plain = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    whole = plain if "://" in plain else f"http://{plain}"
    refusal = ConfigurationError(f"{url!r} is no URL of HTTP, such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(whole)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an unbalanced bracket, or a port that is not a number
        raise refusal from None
    if not right:
        raise refusal
    return whole


def without_password(url: str) -> str:
    """`url` without user and password, for messages that people pass on."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
