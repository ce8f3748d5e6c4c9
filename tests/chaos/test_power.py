"""Two power cuts of `tools/chaos power`: what was stored is there afterwards."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

from chaos import power


def test_what_was_stored_outlives_all_processes_and_what_is_lost_is_found_out(tmp_path: Path):
    path = tmp_path / "store.db"
    cuts = power.PowerCuts(str(path), random.Random(2), {"log_level": "warning"})
    cuts.round("1/2")
    first = len(cuts.completed)
    cuts.round("2/2")
    assert cuts.broken == []
    assert cuts.looked_at >= min(first, power.LOOKED_AT) > 3 and cuts.continued > 0
    assert len(cuts.completed) > first
    lost = sorted(cuts.completed)[0]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM responses WHERE id = ?", (lost,))
    connection.close()
    cuts.last_round()
    assert cuts.broken and all(lost in broken for broken in cuts.broken)
