"""Which processes stay awake between messages, on which hosts."""

from __future__ import annotations

import argparse
import asyncio
import os
from functools import partial

import pytest

from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer import topology as topologies
from pipeinfer.runtime import entry
from pipeinfer.runtime.entry import (
    BUSY_POLL_SECONDS,
    CORES_PER_PROCESS,
    busy_poll_seconds,
    usable_cores,
)
from pipeinfer.runtime.shell import Shell
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity

PROCESSES = 5  # of a pipeline with one engine


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes the root of a host with so many cores, a GPU perhaps, and a quota perhaps."""

    def make(count: int, gpu: bool = False, quota: str = ""):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(count)))
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
        if gpu:
            (tmp_path / "dev/nvidia0").touch()
        if quota:
            (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
            (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
        return tmp_path

    return make


def asked(root, name: str = "scheduler", **given) -> float:
    settings = Settings(**given)
    return busy_poll_seconds(
        settings, topologies.local(settings, "ipc:///x/"), Identity(name), root
    )


@pytest.mark.parametrize("name", ["gateway", "tokenizer", "scheduler", "detokenizer"])
def test_stages_beside_a_gpu_stay_awake_where_cores_are_to_spare(host, name):
    assert asked(host(CORES_PER_PROCESS * PROCESSES, gpu=True), name) == BUSY_POLL_SECONDS


def test_they_sleep_where_cores_are_few(host):
    assert asked(host(CORES_PER_PROCESS * PROCESSES - 1, gpu=True)) == 0


def test_more_engines_on_a_host_need_more_cores(host):
    root = host(CORES_PER_PROCESS * PROCESSES, gpu=True)
    assert asked(root, tp=2) == 0


def test_they_leave_the_cores_to_engines_that_compute_on_them(host):
    root = host(64)
    assert asked(root) == 0
    assert asked(root, device="cpu") == 0
    assert asked(root, device="cuda") == BUSY_POLL_SECONDS  # the engine is in another container


def test_a_quota_counts_and_not_what_the_host_has(host):
    root = host(64, gpu=True, quota="400000 100000")
    assert usable_cores(root) == 4
    assert asked(root) == 0


def test_a_group_without_a_quota_has_all_cores(host):
    assert usable_cores(host(64, quota="max 100000")) == 64


@pytest.mark.parametrize(("quota_us", "cores"), [(400_000, 4), (-1, 64)])
def test_a_quota_of_version_1_counts_as_well(host, quota_us, cores):
    root = host(64, gpu=True)
    group = root / "sys/fs/cgroup/cpu"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(root) == cores


def test_the_setting_has_the_last_word_but_for_engines(host):
    root = host(64, gpu=True)
    assert asked(root, stay_awake="never") == 0
    assert asked(root, device="cpu", stay_awake="always") == BUSY_POLL_SECONDS
    assert asked(root, "engine", stay_awake="always") == 0


@pytest.mark.parametrize("setting", ["never", "always"])
def test_a_stages_process_does_what_is_set(setting, monkeypatch):
    settings, given = Settings(stay_awake=setting), []

    class Ended(Shell):
        async def run(self):
            given.append(self._options.busy_poll)

    monkeypatch.setattr(entry, "Shell", Ended)
    topology = topologies.local(settings, "inproc://wakefulness-")
    options = argparse.Namespace(listen_fd=[], child=False)
    ties = entry.ParentTies(1, None, None)
    build = partial(entry._build, "scheduler", ())
    asyncio.run(entry._run(settings, topology, Identity("scheduler"), options, ties, build))
    assert given == [BUSY_POLL_SECONDS if setting == "always" else 0.0]


async def test_a_callers_own_loop_stays_awake_if_that_is_asked_for(turns, monkeypatch):
    monkeypatch.setattr(entry, "BUSY_POLL_SECONDS", 60.0)
    async with AsyncLLM(stay_awake="always", kv_pages=64, log_level="error") as llm:
        async for _ in llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True)):
            pass
    assert turns
