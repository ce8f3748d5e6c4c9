"""Runs the requests through scheduler core, memory manager, engine core and runner, in one thread.

Of pipeinfer it uses settings, parameters and the names of architectures; the rest is the checkout's
own tests/parity/cores.py, which puts the four together as that revision wants it. The random
checkpoints are made by this checkout's tests/checkpoints.py for every revision.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from cores import Cores

from checkpoints import ARCHITECTURES, make_checkpoint
from pipeinfer.messages import Abort
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings
from same_tokens.requests import Asked, draw

try:
    from pipeinfer.checkpoint.config import ARCHITECTURES as KNOWN
except ImportError:  # in a tree up to November 2026
    from pipeinfer.checkpoint.config import ARCHITECTURES as KNOWN  # type: ignore

OVERRIDES = {"MistralForCausalLM": {"sliding_window": 40}}
OUTSTANDING = 48  # requests of the session at a time, three times as many as run
SEATS = 16
# Page size and pages. Of the requests that run, some have to give way; or the prefixes of all stay
# in the cache. The session's ids must be the same both times.
SCARCE, ROOMY = (4, 120), (16, 1500)
BUDGET, BESIDE = 96, 40  # tokens of a step, and of one that decodes, too


def run(folder: Path, architectures: list[str] | None, each: int, session: int) -> dict[str, Any]:
    """Part -> its digest, counts, and requests, `each` of an architecture and those of the session.

    An architecture that the revision does not have is left out. None: all that have a checkpoint.
    """
    torch.set_num_threads(1)
    parts = {}
    for name in ARCHITECTURES if architectures is None else architectures:
        if name in KNOWN:
            made = make_checkpoint(folder / name, name, seed=1, **OVERRIDES.get(name, {}))
            asked = draw(each, seed=1, crowded=False)
            parts[name] = _part(Session(made, *SCARCE).serve(asked), made)
    if session:
        made = make_checkpoint(folder / "session", "Qwen3ForCausalLM", seed=2)
        asked = draw(session, seed=2)
        parts["session-scarce"] = _part(Session(made, *SCARCE).serve(asked), made)
        parts["session-roomy"] = _part(Session(made, *ROOMY).serve(asked), made)
    return parts


class Session:
    """Cores that serve a list of requests, at most OUTSTANDING at a time."""

    def __init__(self, folder: Path, page_size: int, pages: int) -> None:
        settings = Settings(
            page_size=page_size, cache="radix", overlap_depth=2, kv_pages=pages, max_running=SEATS,
            mixed_step_tokens=BESIDE, threads=1, device="cpu", dtype="float32",
        )  # fmt: skip
        self._cores = Cores(folder, settings, budget=BUDGET)
        self._left: dict[str, int] = {}
        self._here: dict[str, Asked] = {}

    def serve(self, asked: list[Asked]) -> Session:
        waiting = list(reversed(asked))
        while waiting or self._here:
            while waiting and len(self._here) < OUTSTANDING:
                self._submit(waiting.pop())
            self._cores.run(until=self._moves)
            before = len(self._here)
            self._part_from_some()
            assert len(self._here) < before, f"{before} requests stand still"
        self._cores.run()
        assert self._cores.scheduler.idle()
        return self

    def results(self) -> dict[str, dict[str, Any]]:
        """Request -> its ids and how it ended; of one whose client left, what counts of them."""
        finish = self._cores.finished | dict.fromkeys(self._left, "left")
        return {
            name: {"ids": ids[: self._left.get(name)], "finish": finish[name]}
            for name, ids in self._cores.outputs.items()
        }

    def counts(self) -> dict[str, int]:
        """What happened; a change of the scheduler may change these and no id."""
        return {
            "preemptions": self._cores.scheduler.counts["preemptions"],
            "cached_tokens": sum(max(count, 0) for count in self._cores.cached.values()),
        }

    def _submit(self, asked: Asked) -> None:
        self._here[asked.name] = asked
        self._cores.submit(
            asked.name, asked.prompt, RequestParams(**asked.knobs), asked.seed,
            eos_ids=asked.eos_ids, priority=asked.priority, cache_salt=asked.salt,
        )  # fmt: skip

    def _moves(self) -> bool:
        """Whether somebody is done, or has as much as it wanted."""
        return any(self._over(one) for one in self._here.values())

    def _over(self, asked: Asked) -> bool:
        return asked.name in self._cores.finished or self._had_enough(asked)

    def _had_enough(self, asked: Asked) -> bool:
        after = asked.leaves_after
        return after is not None and len(self._cores.outputs[asked.name]) >= after

    def _part_from_some(self) -> None:
        for one in [one for one in self._here.values() if self._over(one)]:
            del self._here[one.name]
            if self._had_enough(one):
                self._left[one.name] = one.leaves_after or 0
                # Cores offer no way to leave; it has been this one since there are cores.
                self._cores._to_scheduler(Abort(one.name, 1))


def _part(session: Session, checkpoint: Path) -> dict[str, Any]:
    requests = session.results()
    weights = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights.update(file.read_bytes())
    return {
        "digest": _digest(requests),
        "weights": weights.hexdigest()[:16],
        "tokens": sum(len(one["ids"]) for one in requests.values()),
        "finish": dict(sorted(Counter(one["finish"] for one in requests.values()).items())),
        **session.counts(),
        "requests": requests,
    }


def _digest(requests: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest()[:32]
