"""An engine's builder says what it does, in the order in which it does it."""

from __future__ import annotations

from pipeinfer.engine import stage
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology.topology import Identity, local


def test_a_start_tells_its_phases_and_how_many_bytes_are_read():
    settings = Settings(kv_pages=64, threads=1, in_process=True, grammar_backend="none")
    told: list[tuple[str, str]] = []
    topology = local(settings, "inproc://")
    stage.build(
        StageContext(settings, topology, Identity("engine"), 1, lambda *said: told.append(said))
    )
    phases = list(dict.fromkeys((state, text.partition(",")[0]) for state, text in told))
    assert phases == [
        ("starting", "loading libraries"),
        ("starting", "checking the model's configuration"),
        ("loading", "reading weights"),
        ("loading", "loading kernels"),
        ("loading", "trying the first steps"),
        ("loading", "reserving memory for tokens"),
        ("loading", "measuring how long steps take"),
    ]
    read = [text for _, text in told if text.startswith("reading weights, ")]
    assert len(read) > 10 and read[-1] == "reading weights, 0.00 of 0.00 GiB", "the demo is small"
