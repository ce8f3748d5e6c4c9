"""Builds the tokenizer stage: its core, and beside it the lanes for long prompts
and the processes that try grammars.

Knows which other stages it listens to; what a checkpoint's files say is read in building.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.runtime.stage import Stage, StageContext, deaths
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.building import make_encoder
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.driver import TokenizerDriver
from pipeinfer.tokenizer.lanes import Lanes
from pipeinfer.tokenizer.routing import Router
from pipeinfer.tokenizer.trials import Trials


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
    listens = (*((stage, "group") for stage in topology.ids("scheduler")), *deaths(topology))
    lanes = Lanes(folder, settings, core.encoding)
    driver = TokenizerDriver(lanes, Trials(folder, core.encoding))
    return Stage(core, driver, listens=listens if groups else ())


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
    encoder, eos_ids = make_encoder(folder, settings)
    router = Router(settings.routing, settings.dp)
    return TokenizerCore(encoder, router, settings.dp, eos_ids, stage, incarnation, gateways)
