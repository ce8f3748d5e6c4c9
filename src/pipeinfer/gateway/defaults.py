"""What the checkpoint's folder says about requests that leave sampling open.

As vLLM does, the values in generation_config.json are taken, do_sample aside. Knows no request.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pipeinfer.checkpoint.config import read_generation
from pipeinfer.params import InvalidParameter, SamplingParams, normalized
from pipeinfer.settings import ConfigurationError

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has none


def sampling_defaults(folder: Path) -> SamplingParams:
    """Default parameters; max_tokens (of chats) is None unless the checkpoint limits it.

    Raises ConfigurationError for a file that cannot be used.
    """
    given = read_generation(folder).sampling()
    try:
        return normalized(replace(SamplingParams(max_tokens=None), **given))
    except InvalidParameter as error:
        raise ConfigurationError(f"{folder / 'generation_config.json'}: {error}") from None
