"""The bar of a batch: requests that ended, and tokens a second.

Knows how far a batch is, and no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from tqdm import tqdm

from pipeinfer.offline.outputs import Progress


class Bar:
    """Shows a batch's progress until its context ends.

    use_tqdm: True shows it, False does not, None does where stderr is a terminal. Or what makes the
    bar, called as tqdm is; `show` then works with anything that has update() and set_postfix_str().
    """

    def __init__(self, progress: Progress, use_tqdm: bool | Callable[..., object] | None) -> None:
        make = cast("Callable[..., Any]", use_tqdm) if callable(use_tqdm) else tqdm
        quiet = {None: None, True: False, False: True}
        said = {} if callable(use_tqdm) else {"disable": quiet[use_tqdm]}
        self._progress = progress
        self._bar = make(total=progress.total, desc="requests", unit="", dynamic_ncols=True, **said)
        self._shown = 0
        self._began = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._bar.close()

    def show(self) -> None:
        """What is known now: the rates are those of the whole batch so far."""
        if getattr(self._bar, "disable", False):
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        prompts, outputs = (count / seconds for count in self._progress.tokens())
        said = f"tokens/s: {prompts:,.0f} of prompts, {outputs:,.0f} of outputs"
        self._bar.set_postfix_str(said, refresh=False)
        ended, self._shown = self._progress.ended - self._shown, self._progress.ended
        self._bar.update(ended)
        self._bar.refresh()
