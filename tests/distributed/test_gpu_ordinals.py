"""Engines of one host take its GPUs one after another, or those that the topology names."""

from __future__ import annotations

import pytest

from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import StageEntry, Topology, local


def test_every_engine_of_a_host_has_a_gpu_of_its_own():
    topology = local(Settings(tp=2, dp=2), "ipc:///tmp/places/")
    engines = topology.ids("engine")
    assert engines == ["engine-0-0", "engine-0-1", "engine-1-0", "engine-1-1"]
    assert [topology.gpu(stage) for stage in engines] == [0, 1, 2, 3]


def test_each_host_counts_its_own_and_a_named_device_is_taken():
    engines = [
        StageEntry("engine", f"tcp://10.0.0.{1 + group}:{7000 + 10 * rank}", group, rank, host=host)
        for group, host in enumerate("ab")
        for rank in range(2)
    ]
    engines.append(StageEntry("engine", "tcp://10.0.0.3:7000", 2, 0, host="c", device="cuda:5"))
    engines.append(StageEntry("engine", "tcp://10.0.0.3:7010", 2, 1, host="c", device="7"))
    engines.append(StageEntry("engine", "tcp://10.0.0.3:7020", 2, 2, host="c", device="gpu"))
    topology = Topology(tuple(engines))
    stages = ["engine-0-0", "engine-0-1", "engine-1-0", "engine-1-1", "engine-2-0", "engine-2-1"]
    assert [topology.gpu(stage) for stage in stages] == [0, 1, 0, 1, 5, 7]
    with pytest.raises(ConfigurationError, match="engine-2-2: device 'gpu' is none"):
        topology.gpu("engine-2-2")
