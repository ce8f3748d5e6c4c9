"""An engine's builder says what it does, in the order in which it does it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from pipeinfer.engine import stage
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, local


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


def test_the_gpu_of_the_first_rank_is_named_and_the_others_are_counted(monkeypatch):
    names = ["A100", "H100"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    loaded = SimpleNamespace(
        device="cuda", dtype="bfloat16", pages=1001, page_size=16,
        runner=SimpleNamespace(pool=SimpleNamespace(total_bytes=3 << 29)),
    )  # fmt: skip
    said = stage._placed(Settings(model="tiny", tp=2), loaded, 1)  # type: ignore[arg-type]
    assert said == (
        "tiny runs on GPU 1 (H100) and 1 more, in bfloat16; memory for 16,000 tokens (1.50 GiB)"
    )
