"""What the handlers of HTTP requests need, put together by the driver.

Knows its parts by their kinds only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeinfer.gateway.access import AccessLog
from pipeinfer.gateway.admission import Admission
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.port import RequestSessions
from pipeinfer.gateway.requests import Terms
from pipeinfer.gateway.sight import PipelineMonitor
from pipeinfer.gateway.tracing import RequestTraces
from pipeinfer.gateway.web_pages import BrowserGuard


@dataclass(frozen=True)
class Service:
    """What the handlers need. `context_length`: tokens of prompt and output, 0 if not known.
    `fingerprint`: of what makes the answers. `tokenizer_info`: JSON."""

    core: GatewayCore
    sessions: RequestSessions
    metrics: Metrics
    model: str
    terms: Terms
    admission: Admission
    browsers: BrowserGuard
    max_body_bytes: int = 32 * 2**20
    context_length: int = 0
    fingerprint: str = ""
    tokenizer_info: bytes = b"{}"
    monitor: PipelineMonitor | None = None  # None: there is no page
    access_log: AccessLog = field(default_factory=lambda: AccessLog(RequestTraces()))
    created: int = field(default_factory=lambda: int(time.time()))
