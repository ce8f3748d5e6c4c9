"""Builds a prompt encoder from a checkpoint's tokenizer, chat template and configuration.

The stage has one, and so has each process that encodes its long prompts. Knows files, settings and
the clock of this host.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pipeinfer.checkpoint.outline import read_outline
from pipeinfer.grammars.trial import Setup
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.text.ends import end_ids, vocabulary_setup
from pipeinfer.text.loading import load_tokenizer
from pipeinfer.text.template_sources import read_tokenizer_config, template_sources
from pipeinfer.text.thoughts import tags_of
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.templates import load_templates


class EncoderParts(NamedTuple):
    """`eos_ids`: ids that end a request by themselves. `vocabulary`: for grammars; None where none
    are served, because of `without`."""

    encoder: PromptEncoder
    eos_ids: tuple[int, ...]
    grammar_setup: Setup | None
    no_grammars_because: str


def load_encoder(folder: Path, settings: Settings, own_process: bool = False) -> EncoderParts:
    """For the checkpoint in `folder`; `alone` as for PromptEncoder. Raises ConfigurationError."""
    model = read_outline(folder, settings.model_impl)
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    eos_ids = end_ids(folder, tokenizer, config)
    shown = "\n".join(template_sources(folder, config, settings.chat_template).values())
    encoder = PromptEncoder(
        tokenizer,
        load_templates(
            folder,
            config,
            settings.chat_template,
            _strftime_now,
            settings.trust_request_chat_template,
        ),
        model.vocab_size,
        settings.max_model_len or model.context_length,
        eos_ids,
        settings.control_tokens_in_messages,
        own_process,
        tags_of(settings.reasoning_parser, shown),
    )
    if own_process:  # it encodes, and nothing else
        return EncoderParts(encoder, eos_ids, None, "")
    if settings.grammar_backend == "none":
        encoder.thought_budgets = False  # engines without masks count nothing
        return EncoderParts(encoder, eos_ids, None, "this server was started without grammars")
    try:
        vocabulary = vocabulary_setup(tokenizer, model.vocab_size, eos_ids)
    except ConfigurationError as error:
        return EncoderParts(encoder, eos_ids, None, f"this model serves no grammars: {error}")
    return EncoderParts(encoder, eos_ids, vocabulary, "")


def _strftime_now(template: str) -> str:
    # Only templates that print today's date ask, so only their prompts depend on the day.
    return datetime.now().strftime(template)
