"""Self-signed certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key, as files in `folder`."""
    folder.mkdir(exist_ok=True)
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", cert,
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
