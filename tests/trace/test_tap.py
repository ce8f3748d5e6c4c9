"""When a stage's loop hands over what it has recorded."""

from __future__ import annotations

import asyncio

import pytest

from pipeinfer.runtime import tap as taps
from pipeinfer.runtime.topology import Identity, local
from pipeinfer.settings import Settings


class Core:
    """Nothing is asked of it before there is a snapshot to make."""


async def tapped(rows: int) -> int:
    """Rows that were not handed over while the loop had all the time that it needs for many."""
    settings = Settings()
    identity = Identity("tokenizer", 0, 0, 0)
    tap = taps.Tap(settings, local(settings, "ipc:///nowhere"), identity, 1, print, print)
    tap.begin(Core(), {})  # type: ignore[arg-type]
    for _ in range(rows):
        tap.add((0.0, "note", "local", "", 0, 0.0, b""))
    for _ in range(200):
        if not tap._recorder.waiting:
            break
        await asyncio.sleep(taps.LOOK / 10)
    return tap._recorder.waiting


@pytest.mark.parametrize(("rows", "left"), [(taps.MANY, 0), (10, 10)])
def test_many_rows_are_not_packed_at_once(rows, left, monkeypatch):
    monkeypatch.setattr(taps, "FLUSH", 1e6)
    assert asyncio.run(tapped(rows)) == left
