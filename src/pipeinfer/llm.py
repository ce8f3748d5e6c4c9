"""The offline classes: a model without HTTP, on the same stages as `pipeinfer serve`.

Only names; see offline/ for what they do, and docs/offline.md for how to use them.
"""

from __future__ import annotations

from pipeinfer.offline.asynchronous import AsyncLLM
from pipeinfer.offline.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
)
from pipeinfer.offline.pipeline import PipelineStopped
from pipeinfer.offline.synchronous import LLM
from pipeinfer.settings import ConfigurationError

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigurationError",
    "Delta",
    "Logprob",
    "PipelineStopped",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
]
