"""Fills a model's parameters from a checkpoint, straight into their merged and sharded places.

Files are taken one after another and a tensor at a time, so there is never a second copy of the
model; the next file is read while this one is taken. Knows no architecture: the model's `sources`
say what goes where.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Shard, WeightSource
from pipeinfer.models.build import ALONE, build_model
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.models.kv_scales import SCALE
from pipeinfer.models.left_out import COMPARISONS, compare_left_out
from pipeinfer.models.readahead import ReadAhead
from pipeinfer.models.stored_head import as_stored, with_both
from pipeinfer.models.weights import Stored, dtypes, open_weights, read_stored
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes of the checkpoint done, bytes in all

# Inputs are scaled as they come, so no scales for them are asked for, nor what is said elsewhere
# (left_out.py) or is stored twice (stored_head.py).
HARMLESS = re.compile(
    r"^lm_head\.weight$|\.input_scale$|\.activation_scale$"
    rf"|{'|'.join(pattern.pattern for pattern in COMPARISONS)}|{SCALE.pattern}"
)
WHOLE_NUMBERS = ("I32", "U8")


class Checkpoint(NamedTuple):
    """config: as the weights are, see stored_head.py. stored: by name."""

    config: ModelConfig
    stored: Mapping[str, Stored]


def check_checkpoint(folder: Path, config: ModelConfig, shard: Shard = ALONE) -> Checkpoint:
    """What is stored in `folder`.

    Raises ConfigurationError if that would not fill a model of `config`, or if `shard` would cut
    through what is stored as one. Reads headers, and small tensors that repeat what is known:
    milliseconds; only a head that is stored beside the embedding that it is tied to is read whole.
    Tensors that nothing asks for are warned about.
    """
    stored = with_both(config, read_stored(folder))
    config = as_stored(config, stored)
    model = build_model(config, device="meta")
    if config.quantization is not None and shard.size > 1:
        list(build_model(config, shard, device="meta").sources())
    asked = set()
    for source in model.sources():
        _stored(source, stored, folder)
        asked.add(source.name)
    unasked = sorted(name for name in stored if name not in asked)
    compare_left_out(unasked, stored, config)
    extra = [name for name in unasked if not HARMLESS.search(name)]
    if extra:
        shown = ", ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
        log.warning("%s: ignoring %d tensors that the model lacks: %s", folder, len(extra), shown)
    return Checkpoint(config, stored)


def load_weights(
    model: CausalLM,
    folder: Path,
    progress: Progress | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> None:
    """Reads this rank's share of every tensor; values are converted to the parameters' dtype.

    `stored`: what `check_checkpoint` gave, else headers are read here. The weights are final then
    (`model.pack`). Raises ConfigurationError as `check_checkpoint` does.
    """
    if stored is None:
        stored = with_both(model.config, read_stored(folder))
    _fill(model, folder, progress, stored)
    model.pack()  # no source may be held here: packing gives the plain weights back one by one


def _fill(
    model: CausalLM, folder: Path, progress: Progress | None, stored: Mapping[str, Stored]
) -> None:
    by_file: dict[Path, list[WeightSource]] = defaultdict(list)
    left: Counter[str] = Counter()  # sources that a tensor is yet to fill
    for source in model.sources():
        by_file[_stored(source, stored, folder).file].append(source)
        left[source.name] += 1
    done, total = 0, sum(stored[name].nbytes for name in left)
    if progress is not None:
        progress(done, total)
    with ReadAhead(list(by_file)) as ahead:
        for file, sources in by_file.items():
            ahead.reached(file)
            with open_weights(file, stored) as opened:
                for source in sources:
                    opened.fill(source)
                    left[source.name] -= 1
                    done += 0 if left[source.name] else stored[source.name].nbytes
                    if progress is not None and not left[source.name]:
                        progress(done, total)


def _stored(source: WeightSource, stored: Mapping[str, Stored], folder: Path) -> Stored:
    """Where `source` lies on disk, if it is there and as the model expects it."""
    entry = stored.get(source.name)
    if entry is None:
        raise ConfigurationError(f"{folder} lacks tensor {source.name}")
    if entry.shape != source.shape and not (source.shape == (1,) and entry.shape == ()):
        raise ConfigurationError(
            f"{source.name} in {entry.file} has shape {list(entry.shape)}, "
            f"the configuration asks for {list(source.shape)}"
        )
    supported = source.stored_dtypes or dtypes(entry.file)
    if entry.dtype not in supported:
        raise ConfigurationError(
            f"{source.name} in {entry.file} is {entry.dtype}; supported: {', '.join(supported)}"
        )
    return entry


def fill_dummy(model: CausalLM, seed: int = 0) -> None:
    """Random weights (standard deviation 0.02, norms one) in place of a checkpoint's, in whichever
    format.

    Each tensor depends on `seed` and its name only, so ranks hold shares of one and the same model.
    The weights are final then (`model.pack`).
    """
    for source in model.sources():
        if "norm" in source.name:
            source.target.copy_(torch.ones((), device=source.target.device))
            continue
        device = source.target.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(f"{seed} {source.name}".encode()))  # 32 bits count
        if "scale" in source.name:
            full = torch.full(source.shape, source.dummy, device=device)
        elif source.stored_dtypes is not None and source.stored_dtypes[0] in WHOLE_NUMBERS:
            bits = torch.empty(source.shape, dtype=torch.int32, device=device)
            full = bits.random_(generator=generator)
        else:
            full = torch.empty(source.shape, dtype=torch.float32, device=device)
            full.normal_(0.0, source.dummy, generator=generator)
        source.target.copy_(full[source.slices])
    model.pack()
