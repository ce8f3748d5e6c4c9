"""pipeinfer: an inference server for large language models as a pipeline of processes.

The offline classes are imported on first use, so that no stage pays for their imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeinfer.version import __version__

if TYPE_CHECKING:
    from pipeinfer.llm import (
        LLM,
        AsyncLLM,
        BeamSearchParams,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Engine,
        EngineArgs,
        FlexibleArgumentParser,
        LoRARequest,
        PoolingParams,
        RequestOutput,
        SamplingParams,
        ScoringOutput,
        ScoringRequestOutput,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
        async_stream_and_merge,
        stream_and_merge,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "async_stream_and_merge",
    "stream_and_merge",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        from pipeinfer import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'pipeinfer' has no attribute {name!r}")
