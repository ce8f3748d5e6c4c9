"""Builds the tokenizer stage: its core, and beside it the lanes for long prompts.

Knows which other stages it listens to; what a checkpoint's files say is read in building.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.checkpoint.source import find_model
from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.building import Built, make_encoder
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.driver import TokenizerDriver
from pipeinfer.tokenizer.group_watch import GroupWatch
from pipeinfer.tokenizer.lanes import Lanes
from pipeinfer.tokenizer.routing import Router
from pipeinfer.tokenizer.trials import Trials


def build(context: StageContext) -> Stage:
    """The stage; raises ConfigurationError for a model or a setting that cannot be used."""
    settings = context.settings
    folder = find_model(settings, context.log_progress)
    topology = context.topology
    gateways = topology.ids("gateway")
    built = make_encoder(folder, settings)
    core = _core(built, settings, context.identity.id, context.incarnation, gateways)
    listens = (
        *((stage, "group") for stage in topology.ids("scheduler")),
        *death_subscriptions(topology),
    )
    lanes = Lanes(folder, settings, core.encoding)
    trials = Trials(built.vocabulary, core.untried, built.without)
    return Stage(core, TokenizerDriver(lanes, trials), listens=listens)


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
    return _core(make_encoder(folder, settings), settings, stage, incarnation, gateways)


def _core(
    built: Built, settings: Settings, stage: str, incarnation: int, gateways: Sequence[str]
) -> TokenizerCore:
    router = Router(settings.routing, settings.dp)
    watch = GroupWatch(settings.dp, settings.host_loss)
    return TokenizerCore(built.encoder, router, watch, built.eos_ids, stage, incarnation, gateways)
