"""The certificate with which the gateway answers over https, and how another takes its place.

Knows no socket and no HTTP.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pipeinfer.settings import ConfigurationError, Settings


class Certificate:
    """The files' certificate chain and key; `context` is what connections are made with."""

    def __init__(self, chain: str, key: str) -> None:
        """Raises ConfigurationError if the files cannot be read, or do not belong together."""
        self._chain = chain
        self._key = key
        self.context = self._read()

    def reload(self) -> None:
        """Connections from now on get what the files hold now. ConfigurationError as above; then
        nothing changes."""
        self._read()  # a half-loaded pair must not get into the context that is in use
        self.context.load_cert_chain(self._chain, self._key, password=_refuse_password)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for flag, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            try:
                with Path(path).open("rb"):
                    pass
            except OSError as error:
                raise ConfigurationError(f"{flag} {path}: {error.strerror or error}") from None
        try:
            context.load_cert_chain(self._chain, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or "one of them is no PEM file of its kind"
            pair = f"--tls-cert {self._chain} --tls-key {self._key}"
            raise ConfigurationError(f"{pair}: {reason}") from None
        return context


def _refuse_password() -> str:
    """Instead of OpenSSL's own question on the terminal."""
    raise ValueError("a key with a password")


def load_certificate(settings: Settings) -> Certificate | None:
    """What the settings name, None for plain HTTP. Raises ConfigurationError."""
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise ConfigurationError("--tls-cert and --tls-key need each other")
    return Certificate(settings.tls_cert, settings.tls_key)
