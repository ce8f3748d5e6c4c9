"""The offline classes: a model without HTTP, on the same stages as `pipeinfer serve`.

Only names; offline/ implements them, and docs/offline.md explains how to use them.
"""

from __future__ import annotations

from pipeinfer.offline.async_llm import AsyncLLM, PipelineStopped
from pipeinfer.offline.calls import (
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from pipeinfer.offline.keywords import EngineArgs, FlexibleArgumentParser
from pipeinfer.offline.llm import LLM, Engine, async_stream_and_merge, stream_and_merge
from pipeinfer.offline.outputs import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pipeinfer.settings import ConfigurationError

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigurationError",
    "Delta",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LoRARequest",
    "Logprob",
    "PipelineStopped",
    "PoolingParams",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "async_stream_and_merge",
    "stream_and_merge",
]
