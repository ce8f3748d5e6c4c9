"""What tests draw: the same numbers in every run, whatever ran before. `--draws N` repeats each
test that draws, N times in all, each time with other numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import torch

APART = 1_000_003  # between the seeds of two draws; tests name small ones


class _Now:
    """The draw that runs, counted from 0, and whether its test has asked for numbers."""

    draw = 0
    asked = False


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """torch's numbers of a test's own seed, in the draw that runs."""
    return torch.Generator(device).manual_seed(_seed(seed))


def numbers(seed: int) -> np.random.Generator:
    """The same of NumPy."""
    return np.random.default_rng(_seed(seed))


def _seed(seed: int) -> int:
    _Now.asked = True
    return seed + APART * _Now.draw


def repeat(test: Callable[[], object], name: str, draws: int) -> None:
    """Calls a test `draws` times, once if it asks for no numbers; an error says in which draw."""
    for draw in range(draws):
        _Now.draw, _Now.asked = draw, False
        torch.manual_seed(zlib.crc32(name.encode()) + APART * draw)
        before = _states()
        try:
            test()
        except Exception as error:
            error.add_note(f"in draw {draw} of {draws}")
            raise
        finally:
            _Now.draw = 0
        if not _Now.asked and all(map(torch.equal, before, _states())):
            return


def _states() -> list[torch.Tensor]:
    """Of the generators that draw where a test names none."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states
