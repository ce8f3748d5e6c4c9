"""Builds the tokenizer stage: its core, and the driver with its worker processes.

Knows which other stages this one listens to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.checkpoint.source import find_model
from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.prompts import EncoderParts, load_encoder
from pipeinfer.tokenizer.routing import GroupMonitor, GroupRouter
from pipeinfer.tokenizer.workers import EncodingQueues, GrammarValidation, TokenizerDriver


def build(context: StageContext) -> Stage:
    """The stage; raises ConfigurationError for a model or a setting that cannot be used."""
    settings = context.settings
    folder = find_model(settings, context.log_progress)
    topology = context.topology
    gateways = topology.ids("gateway")
    built = load_encoder(folder, settings)
    core = _core(built, settings, context.identity.id, context.incarnation, gateways)
    listens = (
        *((stage, "group") for stage in topology.ids("scheduler")),
        *death_subscriptions(topology),
    )
    encoding = EncodingQueues(folder, settings, core.submit_to_encode)
    validation = GrammarValidation(
        built.grammar_setup, core.submit_to_validate, built.no_grammars_because
    )
    return Stage(core, TokenizerDriver(encoding, validation), listens=listens)


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
    return _core(load_encoder(folder, settings), settings, stage, incarnation, gateways)


def _core(
    built: EncoderParts, settings: Settings, stage: str, incarnation: int, gateways: Sequence[str]
) -> TokenizerCore:
    router = GroupRouter(settings.routing, settings.dp)
    monitor = GroupMonitor(settings.dp, settings.host_loss)
    return TokenizerCore(
        built.encoder, router, monitor, built.eos_ids, stage, incarnation, gateways
    )
