"""A busy minute of a pipeline, made up: steps, requests, a timeline and prefixes for the page."""

from __future__ import annotations

import math
import random

WORDS = (
    "Translate the following paragraph into plain English, and keep its names",
    "You are a helpful assistant. Answer in at most three sentences",
    "Summarise the minutes of the meeting below as five bullets",
)


def steps(now: float, groups: int = 1) -> list[dict[str, object]]:
    """Those of the minute before `now`: decodes that come and go, prompts in waves."""
    drawn, made = random.Random(7), []
    for index in range(1200):
        at = now - 60 + index * 0.05
        decodes = int(24 + 10 * math.sin(index / 140) + drawn.randint(-2, 2))
        wave = math.sin(index / 60) > 0.55
        prompt = drawn.choice((0, 64, 128, 256)) if wave else drawn.choice((0, 0, 0, 0, 32))
        seconds = 0.003 + decodes * 2e-5 + prompt * 4e-5 + drawn.random() * 1e-3
        made.append({
            "group": index % groups, "at": at, "seconds": seconds, "decodes": decodes,
            "prompt_tokens": prompt, "target": 0.02 if prompt else 0.0,
        })  # fmt: skip
    return made


def requests(now: float, count: int = 24) -> list[dict[str, object]]:
    """The newest of them still run."""
    drawn, made = random.Random(5), []
    for index in range(count):
        began = now - 58 + index * 58 / count
        first = began + 0.02 + drawn.random() * 0.06
        ended = first + 1 + drawn.random() * 3
        runs = ended > now
        made.append({
            "id": f"chatcmpl-{drawn.getrandbits(128):032x}", "began": began,
            "ended": None if runs else ended, "first_token": first,
            "prompt_tokens": drawn.randint(20, 900), "output_tokens": drawn.randint(30, 400),
            "finish": None if runs else drawn.choice(("stop", "stop", "stop", "length")),
        })  # fmt: skip
    return made


def timeline(name: str, began: float) -> dict[str, object]:
    """A request's way through the stages."""

    def passage(stage: str, at: float, end: float, outcome: str, *moments: tuple):
        told = [{"at": began + m, "name": n, "values": v} for m, n, v in moments]
        return {"stage": stage, "began": began + at, "ended": began + end, "outcome": outcome,
                "moments": told}  # fmt: skip

    decodes = [
        (0.018 + 0.04 * n, "step", {"tokens": 1 + 9 * n, "decodes": 30}) for n in range(1, 10)
    ]
    return {"id": name, "spans": [
        passage("gateway-0", 0.0, 0.412, "stop", (0.033, "first_text", {"tokens": 1})),
        passage("tokenizer-0", 0.001, 0.006, "accepted", (0.003, "rendered", {"letters": 812}),
                (0.005, "encoded", {"tokens": 214})),
        passage("scheduler-0", 0.006, 0.409, "stop", (0.009, "admitted", {"slot": 4}),
                (0.03, "prompt_done", {"steps": 2})),
        passage("engine-0-0", 0.010, 0.404, "released",
                (0.010, "admitted", {"cached_tokens": 96, "pages": 14}), *decodes),
        passage("detokenizer-0", 0.031, 0.410, "stop",
                (0.032, "first_text", {"tokens": 1, "seconds": 0.0003})),
    ]}  # fmt: skip


def prefixes() -> dict[str, object]:
    """What the tree of one group holds."""
    listed = [
        {"tokens": size, "locks": held, "ids": list(range(64)), "text": text}
        for size, held, text in zip((1536, 640, 208), (3, 1, 0), WORDS, strict=True)
    ]
    return {"groups": [{"group": 0, "prefixes": listed}]}
