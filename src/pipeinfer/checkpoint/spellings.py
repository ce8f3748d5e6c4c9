"""Experts under one kind of name, whichever generation of files has them.

As Qwen3-MoE's files do, models ask for one expert's matrix at a time. Mixtral's files call them w1,
w2, w3, and transformers 5 can write all experts of a layer as one tensor. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeinfer.checkpoint.safetensors import Place, StoredTensor

MIXTRAL = re.compile(r"(.*\.)block_sparse_moe\.(?:(gate)|experts\.(\d+)\.(w[123]))\.(\w+)")
MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
HALVES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}  # rows, one below the other


def respelled(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored` with each expert's matrices by themselves, as mlp.experts.N.gate_proj and so on.

    Merged experts with biases are left as they are: only gpt-oss has them, its rows are mixed.
    """
    return dict(pair for name, entry in stored.items() for pair in _respelled(name, entry, stored))


def _respelled(
    name: str, entry: StoredTensor, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    if (found := MIXTRAL.fullmatch(name)) is not None:
        layer, router, number, part, kind = found.groups()
        yield f"{layer}mlp.{router or f'experts.{number}.{PARTS[part]}'}.{kind}", entry
    elif (found := MERGED.fullmatch(name)) is not None and f"{name}_bias" not in stored:
        yield from _experts(found[1], HALVES[found[2]], entry)
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
                    within=Place(entry.within.name, expert, index * rows),
                ),
            )
