"""A recorded run as its clients saw it: what they asked for and when, and when the tokens came.

Reads traces through measured.py and replay. Knows no step and no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipeinfer.messages import Submit, Text, Work
from pipeinfer.replay.recording import LoadedTrace
from pipeinfer.settings import ConfigurationError
from pipeinfer.step_cost import StepCost
from pipeinfer.wire import unpack
from simulate import measured
from simulate.arrivals import Arrival
from simulate.deployment import Deployment


@dataclass
class Stream:
    """A request: when the gateway sent it on, when pieces of its text came, how many tokens."""

    sent: float
    prompt: np.ndarray | None = None
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0


def streams(found: Sequence[LoadedTrace], skip: int) -> list[Stream]:
    """Requests that got tokens, in the order in which they came, without the first `skip`."""
    known: dict[str, Stream] = {}
    for entry in measured.entries(found, "gateway"):
        message = entry.message
        if isinstance(message, Submit) and entry.direction == "out":
            known.setdefault(message.request_id, Stream(entry.time))
        elif isinstance(message, Text) and entry.direction == "in":
            for row in message.rows:
                stream = known.get(row.request_id)
                if stream is not None and row.ids:
                    stream.pieces.append(entry.time)
                    stream.tokens += len(row.ids) // 4
    for entry in measured.entries(found, "scheduler"):
        if isinstance(entry.message, Work) and entry.message.request_id in known:
            known[entry.message.request_id].prompt = unpack(entry.message.prompt_ids)
    ordered = sorted(known.values(), key=lambda stream: stream.sent)[skip:]
    kept = [stream for stream in ordered if stream.tokens and stream.prompt is not None]
    if not kept:
        raise ConfigurationError("the recording holds no request that got a token")
    return kept


def arrivals(kept: Sequence[Stream]) -> list[Arrival]:
    """The same requests, the first of them at 0 seconds; each wants as many tokens as it got."""
    found: list[Arrival] = []
    for number, stream in enumerate(kept):
        assert stream.prompt is not None
        found.append(Arrival(number, stream.sent - kept[0].sent, stream.prompt, stream.tokens))
    return found


def deployment(found: Sequence[LoadedTrace]) -> tuple[Deployment, int, str]:
    """(each group, how many groups, routing policy), as the headers of the recordings say."""
    scheduler = next((one for one in found if one.identity.name == "scheduler"), None)
    engine = next((one for one in found if measured.leads(one)), None)
    if scheduler is None or engine is None:
        raise ConfigurationError("there is no recording of a scheduler, or none of an engine")
    settings, facts = scheduler.header.settings, engine.header.facts
    group = Deployment(
        kv_pages=facts["pages"] - 1,  # without the dummy
        page_size=facts["page_size"],
        max_model_len=facts["max_model_len"],
        max_running=min(settings["max_running"], facts["max_slots"]),
        max_step_tokens=settings["max_step_tokens"] or facts["step_tokens"],
        mixed_step_tokens=settings["mixed_step_tokens"],
        itl_target=settings.get("itl_target", 0.0),
        ttft_target=settings.get("ttft_target", 0.0),
        policy=settings["policy"],
        overlap_depth=settings["overlap_depth"],
        cache=settings["cache"],
        step_cost=msgspec.convert(facts["step_cost"], StepCost | None),
    )
    return group, settings["dp"], settings["routing"]
