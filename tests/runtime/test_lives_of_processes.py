"""Real stage processes: they end with who started them, and are heard whatever the clock says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from listening_core import ListeningCore

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus
from pipeinfer.core import Send
from pipeinfer.messages import Recover
from pipeinfer.runtime.child import STANDBY_FLAG
from pipeinfer.runtime.shell import Shell
from pipeinfer.runtime.stage import INCARNATION_VARIABLE, Stage
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity
from servers import alive, environment
from waiting import until

HOUR = 3600 * 10**9
STAGES = Path(__file__).parents[2] / "stages"

# Starts what its arguments say as a supervisor does, and dies while that imports.
PARENT = """
import asyncio, os, signal, sys
from pipeinfer.runtime.child import Child, Command
from pipeinfer.topology import Identity

async def main():
    child = Child(Identity(sys.argv[1]), Command(tuple(sys.argv[2:])))
    process = await child.start((), os.environ, ())
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
STAYS = ("sh", "-c", '"$@"; true', "sh")  # a command around the stage that lives as long as it


@pytest.mark.parametrize("around", [(), STAYS], ids=["alone", "in a command"])
@pytest.mark.parametrize("stage", ["engine", "detokenizer"])
async def test_a_stage_whose_parent_dies_while_it_imports_ends(short_path, stage, around):
    file = short_path / "pipeinfer.toml"
    file.write_text(topologies.local(Settings(), f"ipc://{short_path}/").to_toml())
    words = [*around, sys.executable, "-m", "pipeinfer.runtime", stage]
    words += ["--topology", str(file), "--child"]
    began = subprocess.run(
        [sys.executable, "-c", PARENT, stage, *words],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert began.returncode == -signal.SIGKILL
    pid = int(began.stdout)
    try:
        await until(lambda: not alive(pid), 60)
    finally:
        if alive(pid):
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
async def scheduler(short_path):
    """(its core, the topology, a context, the topology's file)"""
    topology = topologies.local(Settings(), f"ipc://{short_path}/")
    file = short_path / "pipeinfer.toml"
    file.write_text(topology.to_toml())
    core = ListeningCore()
    with zmq.Context() as context:
        shell = Shell(
            Settings(), topology, Identity("scheduler"), context, lambda _: Stage(core, tick=0.1)
        )
        task = asyncio.create_task(shell.run())
        yield core, topology, context, file
        shell.stop()
        await task


async def test_a_stage_that_dies_after_the_clock_was_set_back_is_heard_again(scheduler):
    core, topology, context, file = scheduler
    ahead = HOUR
    supervisor = Supervisor(
        Settings(), topology, str(file), [Identity("detokenizer")], context,
        lambda: time.time_ns() + ahead,
    )  # fmt: skip
    task = asyncio.create_task(supervisor.run())
    child = supervisor._children["detokenizer-0"]
    await until(lambda: len(core.asked()) == 1 and child.config_valid, 60)
    ahead = 0
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: len(core.asked()) == 2, 60)
    assert core.asked()[0] < core.asked()[1] == child.newest
    supervisor.stop()
    assert await asyncio.wait_for(task, 60) == 0


async def test_a_stage_that_nobody_numbers_finds_a_number_that_is_heard(scheduler):
    """As in a container that is started again: its host's clock is an hour behind."""
    core, topology, context, file = scheduler
    before = Bus(Identity("detokenizer"), time.time_ns(), topology, context)
    before.send(Send("recovery", "scheduler-0", Recover("detokenizer-0", before.incarnation)))
    await until(lambda: core.asked() == [before.incarnation])
    before.close()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(STAGES / "detokenizer.py"), "--topology", str(file),
        env={**environment(), INCARNATION_VARIABLE: str(before.incarnation - HOUR)},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        await until(lambda: len(core.asked()) == 2, 60)
    finally:
        process.terminate()
    assert core.asked()[1] > before.incarnation
    assert (
        f"process {before.incarnation - HOUR} is fenced out"
        in (await process.stderr.read()).decode()
    )
    assert await process.wait() == 0


def test_a_standby_without_a_status_pipe_is_silent_and_ends_with_its_stdin(short_path):
    """As within a command that closes what it does not know."""
    file = short_path / "pipeinfer.toml"
    file.write_text(topologies.local(Settings(), f"ipc://{short_path}/").to_toml())
    words = [sys.executable, "-m", "pipeinfer.runtime", "engine", "--topology", str(file)]
    done = subprocess.run(
        [*words, STANDBY_FLAG], input="", text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0
    assert [one.name for one in short_path.iterdir()] == [file.name]
