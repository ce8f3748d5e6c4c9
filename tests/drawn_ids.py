"""What samplers draw, as an id for each row: easier to compare. Import it as `import drawn_ids`."""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.kernels import host
from sampling_rows import SamplingRows

NOTHING = -1  # in place of an id: the row gave no token


def ids_of(drawn: torch.Tensor) -> torch.Tensor:
    """int64 [L] out of int64 [L, 2]: at most one token of each row, and id 0 beside none."""
    assert drawn.dtype == torch.int64 and drawn.shape[1:] == (2,)
    many, ids = drawn.unbind(1)
    assert set(many.tolist()) <= {0, 1} and not ids[many == 0].any()
    return torch.where(many > 0, ids, NOTHING)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Ids int64 [L] that the host's sampler draws."""
    last_token = torch.zeros(len(logits), dtype=torch.int64)
    drawn = host.sample(logits.cpu(), knobs_of(rows), last_token, True)
    assert torch.equal(last_token, drawn[:, 1])
    return ids_of(drawn)


def knobs_of(rows: SamplingRows) -> dict[str, torch.Tensor]:
    """As kernels have them; each row has the slot of its number."""
    fields = {name: torch.from_numpy(_signed(values)) for name, values in rows.fields.items()}
    positions = torch.from_numpy(rows.positions)
    return fields | {"sample_positions": positions, "write_slots": torch.arange(len(positions))}


def _signed(values: np.ndarray) -> np.ndarray:
    return values.view(np.int64) if values.dtype == np.uint64 else values
