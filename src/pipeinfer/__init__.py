"""pipeinfer: an inference server for large language models as a pipeline of processes.

The offline classes are imported on first use, so that no stage pays for another's imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeinfer.params import SamplingParams
from pipeinfer.params import StructuredOutputs as StructuredOutputsParams
from pipeinfer.version import __version__

if TYPE_CHECKING:
    from pipeinfer.llm import LLM, AsyncLLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "AsyncLLM"):
        from pipeinfer import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'pipeinfer' has no attribute {name!r}")
