"""Several choices of one request: what each of them is called, and with which noise it is sampled.

Who asks for one choice alone gets the first, under the request's own name and seed. Knows no
message.
"""

from __future__ import annotations

from collections.abc import Iterable

SEED_MASK = 2**64 - 1


def choice_id(request_id: str, number: int) -> str:
    """The request id of choice `number`, from 0; the first one's is the request's own."""
    return f"{request_id}/{number}" if number else request_id


def choice_ids(request_id: str, numbers: Iterable[int]) -> list[str]:
    """Those of several."""
    return [choice_id(request_id, number) for number in numbers]


def request_of(choice: str) -> str:
    """The request of which it is the id of a choice."""
    return choice.partition("/")[0]


def choice_seed(seed: int, number: int) -> int:
    """The seed of choice `number`, in 64 bits."""
    return (seed + number) & SEED_MASK
