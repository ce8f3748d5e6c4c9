"""What samplers draw, as an id for each row: easier to compare. Import it as `import drawn_ids`."""

from __future__ import annotations

import torch

from pipeinfer.engine import sampler
from pipeinfer.steps.step import SamplingRows

NOTHING = -1  # in place of an id: the row gave no token


def ids_of(drawn: torch.Tensor) -> torch.Tensor:
    """int64 [S] out of int64 [S, 2]: at most one token of each row, and id 0 beside none."""
    assert drawn.dtype == torch.int64 and drawn.shape[1:] == (2,)
    many, ids = drawn.unbind(1)
    assert set(many.tolist()) <= {0, 1} and not ids[many == 0].any()
    return torch.where(many > 0, ids, NOTHING)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Ids int64 [S] that the host's sampler draws."""
    return ids_of(sampler.sample(logits, rows))
