"""What the handlers of HTTP requests need, put together by the driver.

Knows its parts by their kinds only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeinfer.gateway.access import Access
from pipeinfer.gateway.admission import Admission
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.port import Port
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.gateway.sight import Sight
from pipeinfer.gateway.tracing import Traces
from pipeinfer.gateway.web_pages import WebPages


@dataclass(frozen=True)
class Service:
    """What the handlers need. `context_length`: tokens of prompt and output, 0 if not known.
    `fingerprint`: of what makes the answers. `tokenizer_info`: JSON."""

    core: GatewayCore
    port: Port
    metrics: Metrics
    model: str
    terms: RequestDefaults
    admission: Admission
    pages: WebPages
    max_body_bytes: int = 32 * 2**20
    context_length: int = 0
    fingerprint: str = ""
    tokenizer_info: bytes = b"{}"
    sight: Sight | None = None  # None: there is no page
    access: Access = field(default_factory=lambda: Access(Traces()))
    created: int = field(default_factory=lambda: int(time.time()))
