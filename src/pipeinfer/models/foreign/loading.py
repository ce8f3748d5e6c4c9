"""From a checkpoint's folder to a model of transformers with its weights, which attends as we do.

Weights are read by transformers, from safetensors alone. Knows no pool and no step.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as theirs

from pipeinfer.checkpoint.config import ModelOutline
from pipeinfer.layers.placement import DUMMY_STD
from pipeinfer.models.foreign import hook
from pipeinfer.models.foreign.model import ForeignModel
from pipeinfer.models.foreign.refusals import check, find, refused
from pipeinfer.models.foreign.trace import Traced, trace
from pipeinfer.models.foreign.trial import tried
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)

Found = Mapping[str, Set[object]]  # names of tensors, by what is wrong with them


@dataclass(frozen=True)
class Foreign:
    """What is known of a model before its weights are read."""

    outline: ModelOutline
    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    traced: Traced


def look_at(folder: Path, outline: ModelOutline, most_tokens: int) -> Foreign:
    """Finds the class and what attention it wants; `most_tokens`: of a request.

    Raises ConfigurationError for what cannot be served, with the reason.
    """
    with _quiet():
        kind, config = find(folder, outline.architecture)
        check(kind, config, outline.architecture, most_tokens)
        return Foreign(outline, kind, config, trace(kind, config, outline.architecture))


def load(
    foreign: Foreign,
    folder: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    most_tokens: int,
    head_dim: int = 0,
) -> ForeignModel:
    """The model on `device`; without a folder with random weights of `seed`. head_dim: what heads
    are padded to, if they have less. Raises ConfigurationError for weights that do not fit, and
    for a model that does not compute tokens one by one."""
    hook.register()
    outline = foreign.outline
    with _quiet():
        if folder is None:
            model = _random(foreign, seed, device, dtype)
        else:
            model = _read(foreign, folder, dtype)
    torch.nn.Module.to(model, device).eval().requires_grad_(False)
    shapes, hidden = tried(model, foreign.traced.shapes, outline, most_tokens)
    made = ForeignModel(model, shapes, outline.vocab_size, head_dim)
    with torch.inference_mode():
        width = made.logits(hidden).shape[-1]
    if width != outline.vocab_size:
        raise refused(
            outline.architecture,
            f"it has logits of {width} ids, config.json says {outline.vocab_size}",
        )
    return made


def _read(foreign: Foreign, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """With the weights in `folder`, all of them; those that nobody asks for are warned about."""
    architecture = foreign.outline.architecture
    read = cast(Callable[..., tuple[PreTrainedModel, Found]], foreign.kind.from_pretrained)
    try:
        model, info = read(
            folder,
            config=deepcopy(foreign.config),
            dtype=dtype,
            attn_implementation=hook.NAME,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    for what, key in (("lacks", "missing_keys"), ("has in another shape", "mismatched_keys")):
        wrong = sorted(map(str, info[key]))
        if wrong:
            raise ConfigurationError(
                f"{folder} {what} {len(wrong)} tensors that {architecture} needs: {_few(wrong)}"
            )
    extra = sorted(map(str, info["unexpected_keys"]))
    if extra:
        log.warning(
            "%s: ignoring %d tensors that the model lacks: %s", folder, len(extra), _few(extra)
        )
    return model


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


@torch.no_grad()
def _random(
    foreign: Foreign, seed: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """As models/loading.py fills its own: each tensor depends on `seed` and its name only."""
    with device:
        model = hook.built(foreign.kind, foreign.config, hook.NAME, dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):  # of a norm
            weight.fill_(1.0)
            continue
        generator = torch.Generator(weight.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        weight.copy_(full.normal_(0.0, DUMMY_STD, generator=generator))
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers says nothing and shows no progress bar of its own meanwhile."""
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
