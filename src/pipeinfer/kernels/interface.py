"""What a device computes around a model, whichever device it is: two sets of eleven functions.

`kernels.host` has them in NumPy, `kernels.by_triton` for GPUs; each is a module that fits Kernels.
Knows tensors; no request, no model and no attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from pipeinfer.kernels.tables import DeviceStep, SlotLogitBias, SlotTables

# Sampling tensors of S rows of logits, by name: the fields of engine/step_builder.py, a seed as the
# bits of the uint64; sample_positions, write_slots: int64.
SamplingTensors = Mapping[str, torch.Tensor]


class Kernels(Protocol):
    """All on the current stream and without a synchronisation; grids depend on capacities only."""

    def scatter_words(
        self, pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor, /
    ) -> None:
        """words[index] = value for the first `count` int32 [1] of the (index, value) in `pairs`,
        int32 [2n], of which no two have one index and different values."""
        ...

    def prepare_inputs(self, step: DeviceStep, held: SlotTables, page_size: int, /) -> None:
        """Fills what DeviceStep says from what was uploaded of the step and lies in its slots."""
        ...

    def apply_logit_bias(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
        edits: SlotLogitBias, first_id: int, values: bool, /,
    ) -> None:  # fmt: skip
        """Changes logits [S, ids], those from `first_id` on, in place; slots, positions int64 [S].

        First, unless `values`, the last token of slots with bans joins their recent ids, if it was
        sampled there. values: also add what edits add, to logits of float32. In fewer bits, ids
        that were raised as much as each other would be equal: near 100, bfloat16 counts in halves.
        """
        ...

    def apply_token_bitmask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int, /
    ) -> None:
        """Makes -inf, in place, of the logits [S, ids], those from `first_id` on, of `rows` int64
        [N] what their masks forbid: words int32 [N, W], a bit for each id, the lowest first, 1 for
        those that are allowed. Ids without a bit are forbidden."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncate: bool,
        /,
    ) -> torch.Tensor:
        """int64 [S, 2], of each row how many tokens it gave and which, from logits [S, vocab]; ids
        also go to last_token at `write_slots`. A row with a NaN, or whose maximum is not finite,
        gives none, and its id is 0. truncate False promises that no row has top-k, top-p or min-p.
        """
        ...

    def local_argmax(
        self, logits: torch.Tensor, sampling: SamplingTensors, first_id: int, /
    ) -> torch.Tensor:
        """What a rank offers for rows of logits [S, share], those of ids `first_id` and following:
        one row of numbers each, which only `choose` reads. For rows that nothing truncates.
        """
        ...

    def global_argmax(
        self, offers: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, /
    ) -> torch.Tensor:
        """As `sample`, from the offers of all ranks [ranks, S, ...]; of equal scores the lowest
        id."""
        ...

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, most: int, /) -> torch.Tensor:
        """int32 [N, 2 + 2 most]: the scores (pipeinfer/logprobs.py) of `ids` int64 [N], each with
        `most` alternatives, up to 20, from logits [N, vocab]. Sums are float32. Of equal logits the
        lowest id is the likeliest."""
        ...

    def logit_keys(self, logits: torch.Tensor, ids: torch.Tensor, first_id: int, /) -> torch.Tensor:
        """int64 [N]: each of `ids` int64 [N] with its logit as one number, which orders them as
        their logits do, and of equal ones the lowest id highest; tables.NO_KEY for those that are
        not among logits [N, share] of the ids from `first_id` on."""
        ...

    def local_topk(
        self, logits: torch.Tensor, own: torch.Tensor, most: int, first_id: int, /
    ) -> torch.Tensor:
        """int64 [N, 2 + most], what a rank says of its share: the bits of float32
        log(sum(exp(logit))), how many ids are above `own` [N], keys, and the `most` greatest keys,
        falling."""
        ...

    def merge_topk(self, records: torch.Tensor, own: torch.Tensor, /) -> torch.Tensor:
        """As `scores`, of the ids of `own` keys, from what all ranks have said, int64
        [ranks, N, 2 + most]."""
        ...
