"""Training of the demo model on a CPU: a schedule, two optimizers and one loop.

Knows nothing about what the text means; see corpus.py for that.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from demo_training.checkpoint import build_model, save
from demo_training.corpus import IGNORED, batch

STEPS_PER_REPORT = 50
STEPS_PER_SAVE = 500
FORMED = 0.3  # the share of a training after which copying works over short distances
LENGTHS = (128, 256, 512, 1024, 2048)
# How often a batch has which length, until which share of the training.
LENGTH_WEIGHTS = (
    (0.08, (1.0, 0.0, 0.0, 0.0, 0.0)),
    (0.30, (0.4, 0.4, 0.2, 0.0, 0.0)),
    (0.60, (0.2, 0.25, 0.35, 0.2, 0.0)),
    (1.00, (0.15, 0.2, 0.25, 0.25, 0.15)),
)


@dataclass(frozen=True)
class Schedule:
    """The course of a training; `done` is the share of it that is over, from 0 to 1.

    It ends after `steps` or `seconds`, whichever comes first, with the learning rate at its
    lowest either way. `tokens_per_step` counts every token of a batch, learnt or not.
    """

    steps: int
    seconds: float
    tokens_per_step: int
    peak_rate: float
    warm_up: float = 0.03

    def done(self, step: int, elapsed: float) -> float:
        """Return the share that is over after `step` steps and `elapsed` seconds."""
        return max(step / self.steps, elapsed / self.seconds)

    def rate(self, done: float) -> float:
        """Return the learning rate: a linear warm-up, then a cosine down to a fiftieth."""
        if done < self.warm_up:
            return self.peak_rate * (0.01 + 0.99 * done / self.warm_up)
        cosine = 0.5 * (1 + math.cos(math.pi * (done - self.warm_up) / (1 - self.warm_up)))
        return self.peak_rate * (0.02 + 0.98 * cosine)

    def shape(self, rng: Random, done: float) -> tuple[int, int, float]:
        """Return rows, length and ease of the next batch.

        Short and easy first: copying and recall need induction heads, and those form many times
        sooner where there is little to look through. Long rows teach long distances at the end.
        """
        weights = next(row for end, row in LENGTH_WEIGHTS if done < end)
        length = rng.choices(LENGTHS, weights)[0]
        return max(1, self.tokens_per_step // length), length, min(1.0, 0.2 + done / 0.3)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the embedding and the norms.

    Muon (Jordan et al., 2024) halves the steps needed here; `match_rms_adamw` scales its updates
    so that both take the same learning rate.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def answer_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the learnt tokens, computing no other logits."""
    hidden = model.model(ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    learnt = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt])


def train(schedule: Schedule, out: Path, seed: int, start: Path | None = None) -> None:
    """Train a model and write it to `out`, now and then on the way and at the end.

    With `start`, go on from that checkpoint, and leave out the part for models without induction.
    """
    torch.manual_seed(seed)
    rng = Random(seed)
    model = build_model() if start is None else Qwen3ForCausalLM.from_pretrained(start)
    skipped = 0.0 if start is None else FORMED
    optimizers = build_optimizers(model)
    begin = time.monotonic()
    step, recent = 0, 0.0
    while (done := schedule.done(step, time.monotonic() - begin)) < 1:
        ids, labels = batch(rng, *schedule.shape(rng, skipped + (1 - skipped) * done))
        loss = answer_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(done)
            optimizer.step()
            optimizer.zero_grad()
        step, recent = step + 1, recent + loss.item()
        if step % STEPS_PER_REPORT == 0:
            print(f"{step} steps, {100 * done:.1f} % done,", end=" ")
            print(f"loss {recent / STEPS_PER_REPORT:.4f}", flush=True)
            recent = 0.0
        if step % STEPS_PER_SAVE == 0:
            save(model, out)
    save(model, out)
