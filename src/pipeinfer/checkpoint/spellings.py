"""Tensors under one kind of name, whichever generation of files has them.

A model saved without its head has names without "model.", others have it once too often. As
Qwen3-MoE's files do, models ask for one expert's matrix at a time. Mixtral's files call them w1,
w2, w3, and transformers 5 can write all experts of a layer as one tensor. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeinfer.checkpoint.safetensors import StoredTensor, TensorSlice
from pipeinfer.settings import ConfigurationError

# As transformers does, where a name means something only with it, or without one of them.
WITHOUT_PREFIX = re.compile(r"(?:layers|embed_tokens|norm)\..*")
TWO_PREFIXES = re.compile(r"model\.((?:model|lm_head)\..*)")
MIXTRAL = re.compile(r"(.*\.)block_sparse_moe\.(?:(gate)|experts\.(\d+)\.(w[123]))\.(\w+)")
MERGED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MERGED_PARTS = {
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}  # rows, one below the other


def with_model_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored` with names as models ask for them, and with each expert's matrices by themselves, as
    mlp.experts.N.gate_proj and so on.

    Merged experts with biases are left as they are: only gpt-oss has them, its rows are mixed.
    Raises ConfigurationError if two tensors would have one name.
    """
    stored = _with_prefixes(stored)
    return dict(
        pair for name, entry in stored.items() for pair in _model_names(name, entry, stored)
    )


def _with_prefixes(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, entry in stored.items():
        wrapped = TWO_PREFIXES.fullmatch(name)
        wanted = (
            wrapped[1] if wrapped else f"model.{name}" if WITHOUT_PREFIX.fullmatch(name) else name
        )
        if (other := found.setdefault(wanted, entry)) is not entry:
            raise ConfigurationError(
                f"{entry.file} has two tensors for {wanted}: {other.slice.name} and {name}"
            )
    return found


def _model_names(
    name: str, entry: StoredTensor, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    if (found := MIXTRAL.fullmatch(name)) is not None:
        layer, router, number, part, kind = found.groups()
        yield f"{layer}mlp.{router or f'experts.{number}.{MIXTRAL_PARTS[part]}'}.{kind}", entry
    elif (found := MERGED_EXPERTS.fullmatch(name)) is not None and f"{name}_bias" not in stored:
        yield from _experts(found[1], MERGED_PARTS[found[2]], entry)
    else:
        yield name, entry


def _experts(
    prefix: str, parts: tuple[str, ...], entry: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Of a tensor [experts, rows of all parts, columns]."""
    experts, rows, columns = entry.shape if len(entry.shape) == 3 else (0, 0, 0)
    rows //= len(parts)
    for expert in range(experts):
        for index, part in enumerate(parts):
            yield (
                f"{prefix}.{expert}.{part}.weight",
                replace(
                    entry,
                    shape=(rows, columns),
                    nbytes=entry.nbytes // (experts * len(parts)),
                    slice=TensorSlice(entry.slice.name, expert, index * rows),
                ),
            )
