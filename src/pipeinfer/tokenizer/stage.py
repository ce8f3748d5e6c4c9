"""Builds the tokenizer stage from a checkpoint's tokenizer, chat template and configuration.

Knows files, settings and the clock of this host; everything that happens afterwards is the core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeinfer.models.config import read_config
from pipeinfer.models.generation import read_generation
from pipeinfer.models.source import resolve_model
from pipeinfer.runtime.stage import Stage, StageContext, deaths
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.loading import load_tokenizer, read_tokenizer_config, special_tokens
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.routing import Router
from pipeinfer.tokenizer.templates import load_templates


def build(context: StageContext) -> Stage:
    """The stage; raises ConfigurationError for a model or a setting that cannot be used."""
    settings = context.settings
    folder = resolve_model(
        settings.model, settings.revision, lambda text: context.report("loading", text)
    )
    topology = context.topology
    gateways = topology.ids("gateway")
    core = make_core(folder, settings, context.identity.id, context.incarnation, gateways)
    # What its groups say matters only where there is a choice.
    groups = settings.dp > 1
    heard = [*topology.ids("scheduler"), *topology.ids("engine")] if groups else []
    listens = (*((stage, "telemetry") for stage in heard), *deaths(topology))
    return Stage(core, listens=listens if groups else ())


def make_core(
    folder: Path,
    settings: Settings,
    stage: str = "tokenizer-0",
    incarnation: int = 0,
    gateways: Sequence[str] = (),
) -> TokenizerCore:
    """The core for the checkpoint in `folder`. Raises ConfigurationError.

    The rest is as for TokenizerCore.
    """
    model = read_config(folder)
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    templates = load_templates(folder, config, settings.chat_template, _strftime_now)
    encoder = PromptEncoder(
        tokenizer, templates, model.vocab_size, settings.max_model_len or model.context_length
    )
    return TokenizerCore(
        encoder,
        Router(settings.routing, settings.dp),
        settings.dp,
        _eos_ids(folder, tokenizer, config),
        stage,
        incarnation,
        gateways,
    )


def _eos_ids(folder: Path, tokenizer: Tokenizer | None, config: dict[str, Any]) -> tuple[int, ...]:
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
