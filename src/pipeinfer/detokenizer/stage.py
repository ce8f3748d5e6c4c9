"""Builds the detokenizer stage from a checkpoint's tokenizer files.

Knows files and settings; everything that happens afterwards is the core's.
"""

from __future__ import annotations

from pipeinfer.checkpoint.source import find_model
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.retained_outputs import OutputBounds
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.runtime.stage import Stage, StageContext
from pipeinfer.text import load_tokenizer, read_tokenizer_config


def build(context: StageContext) -> Stage:
    """The stage; raises ConfigurationError for a model or a tokenizer that cannot be read."""
    settings = context.settings
    folder = find_model(settings, context.log_progress)
    tokenizer = load_tokenizer(folder, read_tokenizer_config(folder))
    schedulers = context.topology.ids("scheduler")
    core = DetokenizerCore(
        DecoderFactory(tokenizer),
        context.identity.id,
        context.incarnation,
        schedulers,
        OutputBounds(settings.kept_mib * 2**20, settings.key_kept_mib * 2**20),
    )
    return Stage(core)
