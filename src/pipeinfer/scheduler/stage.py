"""Builds the scheduler stage: its options from the settings.

Knows names of settings; the core checks whether they fit together.
"""

from __future__ import annotations

from pipeinfer.runtime.stage import Stage, StageContext, death_subscriptions
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.step_cost import Targets


def build(context: StageContext) -> Stage:
    """Builds the stage. Raises ConfigurationError for an unknown policy."""
    settings = context.settings
    options = SchedulerOptions(
        policy=settings.policy,
        overlap_depth=settings.overlap_depth,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        mixed_step_tokens=settings.mixed_step_tokens,
        targets=Targets(settings.itl_target, settings.ttft_target),
        watchdog=settings.watchdog,
        tp=settings.tp,
        groups=settings.dp,
        host_loss=settings.host_loss,
        shares_prefixes=settings.cache != "naive",
        drafts_always=settings.synthetic_acceptance_rate >= 0,
        max_loras=settings.max_loras if settings.enable_lora else 0,
    )
    core = SchedulerCore(
        options,
        context.identity.group,
        context.incarnation,
        context.topology.ids("tokenizer"),
        context.topology.ids("detokenizer"),
    )
    engines = [
        entry.identity.id
        for entry in context.topology.entries
        if entry.name == "engine" and entry.group == context.identity.group
    ]
    listens = (*((engine, "group") for engine in engines), *death_subscriptions(context.topology))
    return Stage(core, tick=0.1, listens=listens)
