"""Which models of transformers are not served, and why: what can be told before any is built.

Knows classes and configurations of transformers; no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import cast

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeinfer.settings import ConfigurationError

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
BY_LONGEST = {"dynamic", "longrope"}  # RoPE whose angles depend on the longest sequence of a step


def find(folder: Path, architecture: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """transformers' class for the checkpoint in `folder`, and its configuration.

    No Python of the checkpoint runs. Raises ConfigurationError.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a configuration of others raises for a wrong value
        raise refused(architecture, f"transformers does not read config.json: {error}") from error
    found = cast(
        "type[PreTrainedModel] | None", MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    )
    if found is None or found.__name__ != architecture:
        raise ConfigurationError(
            f"unsupported architecture {architecture}: neither pipeinfer nor transformers "
            f"{version('transformers')} has it as a decoder"
        )
    return found, config


def check(
    kind: type[PreTrainedModel], config: PreTrainedConfig, architecture: str, most_tokens: int
) -> None:
    """Raises ConfigurationError for what a flat step over pages cannot compute, with the reason;
    `most_tokens`: of a request."""
    types = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if getattr(kind, "_is_stateful", False):
        raise refused(architecture, "it has a recurrent state, and pages hold keys and values only")
    if types:
        named = ", ".join(sorted(map(str, types)))
        raise refused(architecture, f"layers of type {named} are more than keys and values")
    if getattr(config, "kv_lora_rank", None):
        raise refused(architecture, "it has latent attention (MLA)")
    if getattr(config, "alibi", False):
        raise refused(architecture, "it has ALiBi, a bias of scores that no backend here adds")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        limit = rope.get("original_max_position_embeddings")
        limit = limit or getattr(config, "original_max_position_embeddings", None)
        kind_of_rope = rope.get("rope_type")
        if kind_of_rope in BY_LONGEST and isinstance(limit, int) and most_tokens > limit:
            raise refused(
                architecture,
                f"RoPE of type {kind_of_rope} turns all requests of a step by the longest of them; "
                f"--max-model-len {limit} works",
            )


def refused(architecture: str, reason: str) -> ConfigurationError:
    """To be raised; one line."""
    line = " ".join(reason.split())
    return ConfigurationError(f"{architecture} is not served through transformers: {line[:300]}")


def _ropes(parameters: object) -> Iterator[Mapping[str, object]]:
    """One, or one for each type of layers."""
    if isinstance(parameters, Mapping):
        yield parameters
        for one in parameters.values():
            yield from _ropes(one)
