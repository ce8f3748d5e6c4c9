"""Builds a prompt encoder from a checkpoint's tokenizer, chat template and configuration.

The stage has one, and so has each process that encodes its long prompts. Knows files, settings and
the clock of this host.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.generation import read_generation
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import Settings
from pipeinfer.text.loading import load_tokenizer, special_tokens
from pipeinfer.text.template_sources import read_tokenizer_config
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.templates import load_templates


class Built(NamedTuple):
    """`eos_ids`: ids that end a request by themselves."""

    encoder: PromptEncoder
    eos_ids: tuple[int, ...]


def make_encoder(folder: Path, settings: Settings, alone: bool = False) -> Built:
    """For the checkpoint in `folder`; `alone` as for PromptEncoder. Raises ConfigurationError."""
    model = read_config(folder)
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    eos_ids = _eos_ids(folder, tokenizer, config)
    encoder = PromptEncoder(
        tokenizer,
        load_templates(folder, config, settings.chat_template, _strftime_now),
        model.vocab_size,
        settings.max_model_len or model.context_length,
        eos_ids,
        settings.control_tokens_in_messages,
        alone,
    )
    return Built(encoder, eos_ids)


def _eos_ids(folder: Path, tokenizer: Tokenizer | None, config: JsonObject) -> tuple[int, ...]:
    """The union of what config.json, generation_config.json and the tokenizer say."""
    ids = dict.fromkeys(read_generation(folder).eos_ids)
    text = special_tokens(config).get("eos_token")
    token = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
    if token is not None:
        ids[token] = None
    return tuple(ids)


def _strftime_now(template: str) -> str:
    # Only templates that print today's date ask, so only their prompts depend on the day.
    return datetime.now().strftime(template)
